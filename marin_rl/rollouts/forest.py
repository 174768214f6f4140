"""Rollouts of several segments as the forests that they are: where each segment comes from.

A program may go back to an earlier turn, or begin another conversation. A segment that goes back
has the exact ids of what it goes on from at its beginning, so its parent is read off the tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marin_rl.types import Rollout, Turn

REWRITTEN = "rewritten history"


def segments_of(row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The segments of a rollout with `token_ids` and `segment_lengths`; none where it is one.

    `turns` have the texts that are shown. `turn` is the number of a segment's first turn, `parent`
    that of the model's turn that it goes on from; both count all turns from 1. `n_read` tokens of
    it are its own, without those of its parent, and `n_sampled` of them were sampled.
    """
    if not row["segment_lengths"]:
        return []
    ids, segments = np.asarray(row["token_ids"]), list[dict[str, Any]]()
    borders = np.cumsum([0, *row["segment_lengths"]])
    contexts, head = list[tuple[int, np.ndarray]](), 0
    for number, turn in enumerate(turns, 1):
        if turn["inference_metadata"] is None or turn["start"] is None:
            continue
        begin = borders[np.searchsorted(borders, turn["start"], side="right") - 1]
        if len(segments) < len(borders) - 1 and begin == borders[len(segments)]:
            prompt, read = ids[begin : turn["start"]], turns[head : number - 1]
            parents = [
                (len(context), parent)
                for parent, context in contexts
                if np.array_equal(prompt[: len(context)], context)
            ]
            shared, parent = max(parents, default=(0, None))
            segments.append(
                {
                    "segment": len(segments),
                    "turn": head + 1,
                    "parent": parent,
                    "reason": _reason(parent, read, first=not segments),
                    "n_turns": 0,
                    "tools": [],
                    "n_read": int(borders[len(segments) + 1] - begin) - shared,
                    "n_sampled": 0,
                }
            )
        own = segments[-1]
        own["n_turns"] += 1
        own["n_sampled"] += turn["end"] - turn["start"]
        own["n_read"] -= turn["end"] - turn["start"]
        called = [call["name"] for call in turn["tool_calls"] or ()]
        own["tools"] = list(dict.fromkeys([*own["tools"], *called]))
        contexts.append((number, ids[begin : turn["end"]]))
        head = number
    return [segment | {"about": _about(segment)} for segment in segments]


def segments_of_rollout(rollout: Rollout) -> list[dict[str, Any]]:
    row = {"segment_lengths": rollout.segment_lengths, "token_ids": rollout.token_ids}
    return segments_of(row, [*map(_plain, rollout.turns)])


def _plain(turn: Turn) -> dict[str, Any]:
    names = ("role", "start", "end", "inference_metadata")
    calls = [{"name": call.name} for call in turn.tool_calls]
    return {name: getattr(turn, name) for name in names} | {"tool_calls": calls}


def _reason(parent: int | None, read: Sequence[Mapping[str, Any]], *, first: bool) -> str:
    if first:
        return "first call"
    if any(turn["role"] == "assistant" for turn in read):
        return REWRITTEN
    return "another prompt" if parent is None else f"goes back to turn {parent}"


def _about(segment: Mapping[str, Any]) -> str:
    """The segment in a line, for people."""
    parts = [
        f"segment {segment['segment'] + 1}",
        segment["reason"],
        f"{segment['n_turns']} of the model's turns",
        *([", ".join(segment["tools"])] if segment["tools"] else []),
        f"{segment['n_read']} tokens read, {segment['n_sampled']} sampled",
    ]
    return " · ".join(parts)

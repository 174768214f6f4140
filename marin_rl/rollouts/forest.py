"""Rollouts of several segments as the forests that they are: where each segment comes from.

A program may go back to an earlier turn, or begin another conversation. A segment that goes back
has the exact ids of what it goes on from at its beginning, so its parent is read off the tokens.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from marin_rl.types import Rollout

REWRITTEN = "rewritten history"
TOKENS = ("token_ids", "loss_mask")
COUNTS = ("n_read", "n_sampled", "n_trained")  # tokens


def calls_of(row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The model's turns of a rollout that have tokens; `call` is the number of one, from 1.

    `turns` are all of them. `turn` is the number of the first that a call reads, `parent` that of
    the model's turn that it goes on from; `reason` says why it begins a segment, None where it
    extends one. `n_read` tokens of its prompt are its own, without those of its parent.
    `token_ids` may be empty where the rollout is one segment.
    """
    ids, mask = np.asarray(row["token_ids"]), np.asarray(row["loss_mask"])
    borders = np.cumsum([0, *(row["segment_lengths"] or [len(ids)])])
    calls, contexts = list[dict[str, Any]](), list[tuple[int, np.ndarray]]()
    asked = dict[bytes, int]()
    head, segment, begin = 0, -1, 0
    for number, turn in enumerate(turns, 1):
        start, end = turn["start"], turn["end"]
        if turn["inference_metadata"] is None or start is None:
            continue
        own = borders[np.searchsorted(borders, start, side="right") - 1]
        if segment < 0 or (segment + 2 < len(borders) and own == borders[segment + 1]):
            segment, begin = segment + 1, int(borders[segment + 1])
            prompt, read = ids[begin:start], turns[head : number - 1]
            parents = [
                (len(context), parent)
                for parent, context in contexts
                if np.array_equal(prompt[: len(context)], context)
            ]
            shared, parent = max(parents, default=(0, None))
            reason = _reason(parent, read, turns[0]) if calls else "first call"
            if reason != REWRITTEN and (same := asked.get(prompt.tobytes())) is not None:
                reason = f"asks again for turn {same}"
        else:
            shared, parent, reason = calls[-1]["end"] - begin, calls[-1]["call"], None
        calls.append(
            {
                "call": number,
                "turn": head + 1,
                "segment": segment,
                "parent": parent,
                "reason": reason,
                "tools": list(dict.fromkeys(call["name"] for call in turn["tool_calls"] or ())),
                "n_read": start - begin - shared,
                "n_sampled": end - start,
                "n_trained": int(np.count_nonzero(mask[start:end])),
                "end": end,
            }
        )
        contexts.append((number, ids[begin:end]))
        asked[ids[begin:start].tobytes()] = number
        head = number
    return calls


def segments_of(row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The segments of a rollout, each by its calls; none where it is one.

    `parent`, `reason` and `turn` are those of its first call, `n_turns` counts its calls.
    """
    if not row["segment_lengths"]:
        return []
    segments = list[dict[str, Any]]()
    for _, group in groupby(calls_of(row, turns), key=lambda call: call["segment"]):
        calls = list(group)
        first = {name: calls[0][name] for name in ("segment", "turn", "parent", "reason")}
        counts = {name: sum(call[name] for call in calls) for name in COUNTS}
        tools = list(dict.fromkeys(tool for call in calls for tool in call["tools"]))
        segment = first | {"n_turns": len(calls), "tools": tools} | counts
        segments.append(segment | {"about": _about(segment)})
    return segments


def segments_of_rollout(rollout: Rollout) -> list[dict[str, Any]]:
    row = {name: getattr(rollout, name) for name in ("segment_lengths", *TOKENS)}
    names = ("role", "content", "start", "end", "inference_metadata")
    turns = [
        {name: getattr(turn, name) for name in names}
        | {"tool_calls": [{"name": call.name} for call in turn.tool_calls]}
        for turn in rollout.turns
    ]
    return segments_of(row, turns)


def _reason(
    parent: int | None, read: Sequence[Mapping[str, Any]], opening: Mapping[str, Any]
) -> str:
    if any(turn["role"] == "assistant" for turn in read):
        return REWRITTEN
    if parent is not None:
        return f"goes back to turn {parent}"
    if read and read[0]["role"] == "system" and read[0]["content"] != opening["content"]:
        return "another system prompt"
    return "another prompt"


def _about(segment: Mapping[str, Any]) -> str:
    """The segment in a line, for people."""
    trained = segment["n_trained"]
    parts = [
        f"segment {segment['segment'] + 1}",
        segment["reason"],
        f"{segment['n_turns']} of the model's turns",
        *([", ".join(segment["tools"])] if segment["tools"] else []),
        f"{segment['n_read']} tokens read, {segment['n_sampled']} sampled",
        *([f"{trained} trained"] if trained < segment["n_sampled"] else []),
    ]
    return " · ".join(parts)

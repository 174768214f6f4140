"""Rollouts as people read them: all turns in order, with rewards, stop reasons and times.

One shape serves the list of a round, a single rollout and `--json`. Leaves out drawing
(`commands.dialogue`) and tokens (`pages`).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pyarrow as pa

from marin_rl.errors import InputError, ObjectMissing
from marin_rl.storage.runs import Run, committed, rollouts_slot, round_of, rounds_in
from marin_rl.storage.tables.rollouts import iter_shards, rollouts_manifest

COLUMNS = (
    "round", "rollout_id", "group_id", "environment", "example_id", "turns", "answer", "reward",
    "reward_components", "status", "finish_reason", "error", "n_prompt_tokens",
    "n_completion_tokens", "policy_version_min", "policy_version_max", "started_at", "finished_at",
    "queue_s", "prefill_s", "decode_s", "segment_lengths", "start_s",
)  # fmt: skip

# What a line of a list needs.
BRIEF = (
    "rollout_id", "example", "prompt", "completion", "answer", "reward", "status", "finish_reason",
    "n_turns",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Conditions on a rollout; None and 0 ask for nothing. Turns are those of the model."""

    tool: str | None = None
    finish_reason: str | None = None
    min_turns: int = 0
    max_turns: int | None = None

    def passes(self, row: Mapping[str, Any]) -> bool:
        """Return True if a row of the table `rollouts` fulfils all conditions."""
        if self.finish_reason is not None and row["finish_reason"] != self.finish_reason:
            return False
        if self.tool is not None and self.tool not in tools_of(row["turns"]):
            return False
        n_turns = len(model_turns(row["turns"]))
        return self.min_turns <= n_turns and (self.max_turns is None or n_turns <= self.max_turns)

    @property
    def asks(self) -> bool:
        return self != RolloutFilter()


def model_turns(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [turn for turn in turns if is_sampled(turn)]


def is_sampled(turn: Mapping[str, Any]) -> bool:
    return turn["role"] == "assistant" and turn["inference_metadata"] is not None


def tools_of(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the tools that a rollout called or whose results it read, in order of first use."""
    names: dict[str, None] = {}
    for turn in turns:
        # The name of a turn repeats those of its calls, and is all that older files have.
        called = [call["name"] for call in calls_of(turn)] or [turn["tool_name"]]
        names |= dict.fromkeys(filter(None, called))
    return list(names)


def calls_of(turn: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Calls of tools in a turn: id, name and arguments; none in files of schema version 1."""
    return turn["tool_calls"] or ()


def sample_rollouts(
    run: Run,
    round_number: int | None,
    limit: int,
    *,
    worst_first: bool = False,
    where: RolloutFilter | None = None,
) -> list[dict[str, Any]]:
    """Rollouts of one round (default: the newest) by reward, of those that `where` lets pass.

    Raises ObjectMissing when the round has no committed rollouts, CorruptObject, NewerSchema.
    """
    rows = _rows_of(run, _round(run, round_number))
    rewards = rows["reward"].to_pylist()  # `to_numpy` imports pandas
    sign = 1.0 if worst_first else -1.0
    rank = [(reward is None, sign * (reward or 0.0), place) for place, reward in enumerate(rewards)]
    if where is None or not where.asks:
        order = heapq.nsmallest(limit, rank)
        return [dialogue_of(_row(rows, place)) for _, _, place in order]
    chosen = (_row(rows, place) for _, _, place in sorted(rank))
    return [dialogue_of(row) for row in islice(filter(where.passes, chosen), limit)]


def count_rollouts(run: Run, rollout_id: str) -> int:
    """Number of rollouts of the sealed round that this one is of. Raises as `sample_rollouts`."""
    number = _round(run, round_of(rollout_id.partition("/")[0]))
    return sum(part.rows or 0 for part in rollouts_manifest(run, number).parts)


def rollout_named(run: Run, name: str, round_number: int | None = None) -> dict[str, Any]:
    """The rollout with this id, or the only one of a round whose id ends in `/name`.

    The round is that of the id, else `round_number`, else the newest. Raises ObjectMissing where
    there is none, InputError where several end like that, CorruptObject, NewerSchema.
    """
    number = round_of(name.partition("/")[0])  # an id of a rollout begins with its round
    number = _round(run, round_number if number is None else number)
    rows = _rows_of(run, number)
    ids = rows["rollout_id"].to_pylist()
    places = [place for place, own in enumerate(ids) if f"/{own}".endswith(f"/{name}")]
    if len(places) > 1:
        raise InputError(
            f"{len(places)} rollouts of round {number} end in {name!r}, {ids[places[0]]} and "
            f"{ids[places[1]]} among them: give more of the id"
        )
    if not places:
        raise ObjectMissing(
            f"run {run.run_id!r} has no rollout {name!r} in round {number}: expected an id such as "
            f"{ids[0] if ids else 'round-00000/group-00000/000'}; `marin-rl rollouts "
            f"{run.run_id} --round {number}` lists some"
        )
    return dialogue_of(_row(rows, places[0]))


def dialogue_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a rollout for people and `--json`: all turns, rewards, times in seconds."""
    turns = row["turns"] or []
    first = next((place for place, turn in enumerate(turns) if is_sampled(turn)), len(turns))
    asked = [turn["content"] for turn in turns[:first] if turn["role"] == "user"]
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    waits = [t["environment_s"] for t in turns if t["environment_s"] is not None]
    return {
        "rollout_id": row["rollout_id"],
        "round": row["round"],
        "group_id": row["group_id"],
        "environment": row["environment"],
        "example": row["example_id"],
        "prompt": asked[-1] if asked else "",
        "completion": said[-1] if said else "",
        "answer": row["answer"] or "",
        "reward": row["reward"],
        "reward_components": row["reward_components"],
        "status": row["status"],
        "finish_reason": row["finish_reason"],
        "error": row["error"],
        "n_turns": len(model_turns(turns)),
        "tools": tools_of(turns),
        "n_prompt_tokens": row["n_prompt_tokens"],
        "n_completion_tokens": row["n_completion_tokens"],
        "segment_lengths": row["segment_lengths"],
        "policy_version_min": row["policy_version_min"],
        "policy_version_max": row["policy_version_max"],
        # Seconds of the model, of the environment, and of the group up to its scores.
        "timing": {
            "started_at": row["started_at"],
            "group_s": (row["finished_at"] - row["started_at"]).total_seconds(),
            "queue_s": row["queue_s"],
            "prefill_s": row["prefill_s"],
            "decode_s": row["decode_s"],
            "environment_s": sum(waits) if waits else None,
            "start_s": row["start_s"],
        },
        "turns": [_turn(turn) for turn in turns],
    }


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn with the facts of its sampling next to its text; None where they are not recorded."""
    facts = turn["inference_metadata"] or {}
    phases = [turn[name] for name in ("queue_s", "prefill_s", "decode_s")]
    start, end = turn["start"], turn["end"]
    record = {name: value for name, value in turn.items() if name != "inference_metadata"}
    return record | {
        "n_tokens": None if start is None or end is None else end - start,
        "finish_reason": facts.get("finish_reason") or None,
        "weight_version": facts.get("weight_version"),
        "request_id": facts.get("request_id") or None,
        "model_s": None if None in phases else sum(phases),
    }


def _rows_of(run: Run, number: int) -> pa.Table:
    return pa.concat_tables(iter_shards(run, number, COLUMNS))


def _row(rows: pa.Table, place: int) -> dict[str, Any]:
    """One row as Python values. Times are read as numbers: Arrow imports pandas for their zone."""
    names = [field.name for field in rows.schema if pa.types.is_timestamp(field.type)]
    row = rows.slice(place, 1).combine_chunks()
    (values,) = row.drop_columns(names).to_pylist()
    for name in names:
        (since,) = row[name].chunk(0).view(pa.int64()).to_pylist()
        # In UTC, as all times on disk are.
        moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=since or 0)
        values[name] = None if since is None else moment
    return values


def _round(run: Run, chosen: int | None) -> int:
    """The chosen round or the newest sealed one. Raises ObjectMissing where it is not sealed."""
    rounds = reversed(rounds_in(run.store, "rollouts")) if chosen is None else [chosen]
    number = next((n for n in rounds if committed(run, rollouts_slot(n)) is not None), None)
    if number is None:
        which = "" if chosen is None else f" of round {chosen}"
        raise ObjectMissing(
            f"run {run.run_id!r} has no committed rollouts{which} under {run.config.root}: "
            f"`marin-rl status {run.run_id}` shows which rounds there are"
        )
    return number

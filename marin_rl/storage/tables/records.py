"""Rollout nouns as Arrow rows and back, without loss: what a shard's columns mean.

`Turn.logprobs` are not stored: they are the slice of the rollout's own logprobs between the turn's
`start` and `end`, given back to assistant turns that carry inference metadata. No file is touched.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from marin_rl.errors import InputError
from marin_rl.types import (
    Example,
    InferenceMetadata,
    Message,
    RewardComponent,
    Rollout,
    RolloutGroup,
    Sampling,
    Timing,
    Turn,
)
from schemas.rollouts import ROLLOUTS, STATUSES, TOKEN_COLUMNS

Row = dict[str, Any]


def check_groups(groups: Sequence[RolloutGroup]) -> None:
    """Raises ValueError naming the first rollout that could not be trained on as it stands."""
    seen: set[str] = set()
    for group in groups:
        for rollout in group.rollouts:
            if rollout.rollout_id in seen:
                raise ValueError(f"rollout {rollout.rollout_id} is in the shard more than once")
            seen.add(rollout.rollout_id)
            _check_rollout(rollout)


def rollout_table(groups: Sequence[RolloutGroup], constants: Mapping[str, Any]) -> pa.Table:
    """One row per rollout; `constants` are the columns that are the same for the whole shard.

    Raises InputError for what an environment gave and no file can hold.
    """
    examples = [group.example for group in groups for _ in group.rollouts]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values: dict[str, Any] = {
        "group_id": [group.group_id for group in groups for _ in group.rollouts],
        "group_size": [group.group_size for group in groups for _ in group.rollouts],
        "prompt_seed": [example.seed for example in examples],
        **_repeated(groups),
        **{name: [value] * len(rollouts) for name, value in constants.items()},
    }
    for name in ("environment", "environment_version", "example_id", "split", "answer"):
        values[name] = [getattr(example, name) for example in examples]
    for name in _PLAIN_COLUMNS:
        values[name] = [getattr(rollout, name) for rollout in rollouts]
    for name in ("started_at", "finished_at", "queue_s", "prefill_s", "decode_s", "worker"):
        values[name] = [getattr(rollout.timing, name) for rollout in rollouts]
    values["sampling"] = [_sampling_row(rollout.sampling) for rollout in rollouts]
    values["reward_components"] = [[asdict(c) for c in r.reward_components] for r in rollouts]
    values["turns"] = [[_turn_row(turn) for turn in rollout.turns] for rollout in rollouts]
    columns = {name: _column(name, value) for name, value in values.items()}
    for name in TOKEN_COLUMNS:
        arrays = [getattr(rollout, name) for rollout in rollouts]
        columns[name] = _list_column(arrays, ROLLOUTS.field(name).type)
    return pa.table([columns[name] for name in ROLLOUTS.names], schema=ROLLOUTS)


def _column(name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values, ROLLOUTS.field(name).type)
    except UnicodeEncodeError as error:
        raise InputError(
            f"rollouts cannot be written: a text of the column {name} is not Unicode, "
            f"{error.reason} at character {error.start} of {error.object[:80]!a}: an "
            "environment must give text that UTF-8 can hold"
        ) from error


def groups_of(table: pa.Table) -> list[RolloutGroup]:
    """The groups of a shard's table (all columns); rows of a group are adjacent."""
    arrays = {name: _arrays(table[name]) for name in TOKEN_COLUMNS}
    rows = table.drop_columns(list(TOKEN_COLUMNS)).to_pylist()
    for index, row in enumerate(rows):
        row.update({name: values[index] for name, values in arrays.items()})
    return [_group(list(part)) for _, part in groupby(rows, key=lambda row: row["group_id"])]


_PLAIN_COLUMNS = (
    "rollout_id", "index_in_group", "policy_version_min", "policy_version_max", "reward", "status",
    "finish_reason", "error", "n_prompt_tokens", "n_completion_tokens",
)  # fmt: skip


def _check_rollout(rollout: Rollout) -> None:
    name, length = rollout.rollout_id, len(rollout.token_ids)
    if rollout.status not in STATUSES:
        raise ValueError(f"rollout {name}: expected a status of {STATUSES}: {rollout.status!r}")
    for field in ("loss_mask", "logprobs", "policy_versions"):
        array = getattr(rollout, field)
        if array is not None and len(array) != length:
            raise ValueError(f"rollout {name}: {length} token_ids, but {len(array)} {field}")
    if rollout.status not in ("complete", "truncated"):
        return
    counted = rollout.n_prompt_tokens + rollout.n_completion_tokens
    if counted != length:
        raise ValueError(
            f"rollout {name}: n_prompt_tokens + n_completion_tokens is {counted}, but there are "
            f"{length} token_ids"
        )
    if not np.isfinite(rollout.logprobs[rollout.loss_mask == 1]).all():
        raise ValueError(f"rollout {name}: a sampled token's logprob is not a finite number")


def _repeated(groups: Sequence[RolloutGroup]) -> dict[str, list[Any]]:
    """Columns that are worth rendering once per group."""
    messages: list[list[Row]] = []
    metadata: list[str] = []
    for group in groups:
        rendered = [{"role": m.role, "content": m.content} for m in group.example.messages]
        messages += [rendered] * len(group.rollouts)
        metadata += [_json(group.example)] * len(group.rollouts)
    return {"messages": messages, "metadata": metadata}


def _json(example: Example) -> str:
    try:
        return json.dumps(
            dict(example.metadata), sort_keys=True, ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise InputError(
            f"example {example.example_id} of environment {example.environment}: its metadata is "
            f"not JSON ({error}); an environment must give plain numbers, strings, lists and maps"
        ) from error


def _sampling_row(sampling: Sampling) -> Row:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
    }


def _turn_row(turn: Turn) -> Row:
    metadata = turn.inference_metadata
    return {
        "role": turn.role,
        "content": turn.content,
        "start": turn.start,
        "end": turn.end,
        "reward": turn.reward,
        "tool_name": turn.tool_name,
        "tool_call_id": turn.tool_call_id,
        "inference_metadata": None
        if metadata is None
        else {
            "model": metadata.model,
            "weight_version": metadata.weight_version,
            **_sampling_row(metadata.sampling),
            "request_id": metadata.request_id,
            "finish_reason": metadata.finish_reason,
        },
    }


def _list_column(arrays: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """A list column out of one array per row; None is null."""
    dtype = kind.value_type.to_pandas_dtype()
    present = [array for array in arrays if array is not None]
    offsets = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)])
    values = np.concatenate([*present, np.empty(0, dtype)]).astype(dtype, copy=False)
    missing = [array is None for array in arrays]
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(values),
        type=kind,
        mask=pa.array(missing) if any(missing) else None,
    )


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    """One NumPy view per row, int8 widened to int32; None for null."""
    return [view for chunk in column.chunks for view in _views(chunk)]


def _views(chunk: pa.Array) -> Iterator[np.ndarray | None]:
    values = chunk.values.to_numpy(zero_copy_only=True)
    if values.dtype == np.int8:
        values = values.astype(np.int32)
    offsets = chunk.offsets.to_numpy()
    missing = chunk.is_null().to_numpy(zero_copy_only=False)
    for start, end, absent in zip(offsets[:-1], offsets[1:], missing, strict=True):
        yield None if absent else values[start:end]


def _group(rows: list[Row]) -> RolloutGroup:
    first = rows[0]
    example = Example(
        environment=first["environment"],
        environment_version=first["environment_version"],
        example_id=first["example_id"],
        split=first["split"],
        seed=first["prompt_seed"],
        messages=tuple(Message(**message) for message in first["messages"]),
        answer=first["answer"],
        metadata=json.loads(first["metadata"]),
    )
    return RolloutGroup(
        group_id=first["group_id"],
        example=example,
        rollouts=tuple(_rollout(row) for row in rows),
        group_size=first["group_size"],
    )


def _rollout(row: Row) -> Rollout:
    timing = ("started_at", "finished_at", "queue_s", "prefill_s", "decode_s", "worker")
    return Rollout(
        **{name: row[name] for name in (*_PLAIN_COLUMNS, *TOKEN_COLUMNS)},
        reward_components=tuple(RewardComponent(**c) for c in row["reward_components"]),
        sampling=_sampling(row["sampling"]),
        turns=tuple(_turn(turn, row["logprobs"]) for turn in row["turns"]),
        timing=Timing(**{name: row[name] for name in timing}),
    )


def _sampling(row: Row) -> Sampling:
    return Sampling(
        temperature=row["temperature"],
        top_p=row["top_p"],
        top_k=row["top_k"],
        max_tokens=row["max_tokens"],
        stop=tuple(row["stop"]),
        seed=row["seed"],
    )


def _turn(row: Row, logprobs: np.ndarray) -> Turn:
    found = row["inference_metadata"]
    metadata = None
    if found is not None:
        metadata = InferenceMetadata(
            model=found["model"],
            weight_version=found["weight_version"],
            sampling=_sampling(found),
            request_id=found["request_id"],
            finish_reason=found["finish_reason"],
        )
    sampled = metadata is not None and row["role"] == "assistant" and row["start"] is not None
    return Turn(
        **{**row, "inference_metadata": metadata},
        logprobs=logprobs[row["start"] : row["end"]] if sampled else None,
    )

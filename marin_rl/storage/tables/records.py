"""Rollout nouns as Arrow rows and back, without loss: what a shard's columns mean.

`Turn.logprobs` are not stored: they are the slice of the rollout's own logprobs between the turn's
`start` and `end`, and decoding gives them to assistant turns that carry inference metadata. Touches
no file.
"""

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa

from marin_rl.errors import InputError
from marin_rl.types import Example, Rollout, RolloutGroup, Turn
from schemas.tables import ROLLOUTS, STATUSES, TOKEN_COLUMNS, TURN

Record = TypeVar("Record")
Row = dict[str, Any]
Convert = Callable[[Any], Any]


class Struct(Generic[Record]):
    """The conversion of one dataclass: its fields and the Arrow fields belong together by name.

    A field that is a dataclass itself and has no Arrow field is inlined: its own fields are among
    the Arrow fields, as those of a rollout's timing. Other fields without an Arrow field are not
    stored, and Arrow fields that the dataclass lacks are not its concern. A null of a field that
    cannot be None, in a file from before the field, is the field's default.
    """

    def __init__(self, kind: type[Record], arrow: Iterable[pa.Field]) -> None:
        arrow = list(arrow)
        # Resolved once per class: rows are converted by the hundred thousand.
        stored = {field.name: field.type for field in arrow}
        hints = get_type_hints(kind)
        names = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
        self._kind = kind
        self._converters = {n: _converters(hints[n], stored[n]) for n in names if n in stored}
        self._stored = list(self._converters)
        self._decoded = [(n, decode) for n, (_, decode) in self._converters.items() if decode]
        nullable = {field.name for field in arrow if field.nullable}
        optional = {n for n, hint in hints.items() if types.NoneType in get_args(hint)}
        self._later = [n for n in self._stored if n in nullable and n not in optional]
        self._inlined = {
            name: Struct(hints[name], arrow)
            for name in names
            if name not in stored and is_dataclass(hints[name])
        }
        self._is_plain = not (self._decoded or self._later or self._inlined)

    def encode(self, record: Record) -> Row:
        row = {}
        for name, (encode, _) in self._converters.items():
            value = getattr(record, name)
            row[name] = value if encode is None or value is None else encode(value)
        for name, struct in self._inlined.items():
            row |= struct.encode(getattr(record, name))
        return row

    def columns(self, records: Sequence[Record]) -> dict[str, list[Any]]:
        columns = {}
        for name, (encode, _) in self._converters.items():
            values = [getattr(record, name) for record in records]
            if encode is not None:
                values = [None if value is None else encode(value) for value in values]
            columns[name] = values
        for name, struct in self._inlined.items():
            columns |= struct.columns([getattr(record, name) for record in records])
        return columns

    def decode(self, row: Mapping[str, Any], **others: Any) -> Record:
        """The record of a row; `others` are fields that the row does not have, or has otherwise."""
        values = {name: row[name] for name in self._stored}
        # Most structs, and rows by the hundred thousand: nothing below applies to them.
        if self._is_plain:
            return self._kind(**values, **others)
        for name, decode in self._decoded:
            if name not in others and values[name] is not None:
                values[name] = decode(values[name])
        for name in self._later:
            if values[name] is None:
                del values[name]
        for name, struct in self._inlined.items():
            values[name] = struct.decode(row)
        return self._kind(**{**values, **others})


def _converters(hint: Any, arrow: pa.DataType) -> tuple[Convert | None, Convert | None]:
    """Functions that encode and decode a field's value; None where it stays as it is."""
    if isinstance(hint, types.UnionType):
        # Optional fields only: null is handled by the callers, so the other type decides.
        (hint,) = (each for each in get_args(hint) if each is not types.NoneType)
    if is_dataclass(hint):
        assert isinstance(hint, type), "a class"
        struct = Struct(hint, arrow)
        return struct.encode, struct.decode
    if get_origin(hint) is tuple:
        encode, decode = _converters(get_args(hint)[0], arrow.value_type)
        if encode is None or decode is None:
            return list, tuple
        return (
            lambda values: [encode(value) for value in values],
            lambda values: tuple(map(decode, values)),
        )
    if pa.types.is_list(arrow):
        # The file's type: NumPy's default of 64 bits would take twice the memory.
        dtype = arrow.value_type.to_pandas_dtype()
        return np.ndarray.tolist, lambda values: np.array(values, dtype)
    return None, None


# Of an example, `seed` has another name in a shard, and `metadata` is JSON there.
_EXAMPLE_COLUMNS = (
    "environment", "environment_version", "example_id", "split", "messages", "answer",
)  # fmt: skip
_GROUP_COLUMNS = ("group_id", "group_size", "prompt_seed", "metadata", *_EXAMPLE_COLUMNS)
_EXAMPLE = Struct(Example, [ROLLOUTS.field(name) for name in _EXAMPLE_COLUMNS])
# A rollout has one only where other parameters sampled it than its group's.
_DIGEST = "policy_digest"
_ROLLOUT = Struct(Rollout, [f for f in ROLLOUTS if f.name not in (*TOKEN_COLUMNS, _DIGEST)])
_TURN = Struct(Turn, TURN)

_EPOCH = datetime.fromtimestamp(0, UTC)

# Key in the metadata of a rollout, next to its example's: texts behind its reward components.
DETAILS = "reward_details"


def check_groups(groups: Sequence[RolloutGroup]) -> None:
    """Raise ValueError naming the first rollout that could not be trained on as it stands."""
    seen: set[str] = set()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.rollout_id in seen:
            raise ValueError(f"rollout {rollout.rollout_id} is in the shard more than once")
        seen.add(rollout.rollout_id)
        _check_rollout(rollout)


def rollout_table(groups: Sequence[RolloutGroup], constants: Mapping[str, Any]) -> pa.Table:
    """Table with a row per rollout; `constants` are the columns with one value for all rows.

    Raises InputError for what an environment gave and no file can hold.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    shared = [  # rendered once a group
        {
            "group_id": group.group_id,
            "group_size": group.group_size,
            "prompt_seed": group.example.seed,
            "metadata": _json(group.example),
            **_EXAMPLE.encode(group.example),
        }
        for group in groups
    ]
    values = {name: [value] * len(rollouts) for name, value in constants.items()}
    for name in _GROUP_COLUMNS:
        rows = zip(shared, groups, strict=True)
        values[name] = [row[name] for row, group in rows for _ in group.rollouts]
    for place, rollout in enumerate(rollouts):
        # The texts behind reward components, by their names.
        details = {part.name: part.detail for part in rollout.reward_components if part.detail}
        if details:
            metadata = {**json.loads(values["metadata"][place]), DETAILS: details}
            values["metadata"][place] = json.dumps(metadata, ensure_ascii=False)
    values |= _ROLLOUT.columns(rollouts)
    values[_DIGEST] = [rollout.policy_digest or constants[_DIGEST] for rollout in rollouts]
    columns = dict[str, pa.Array]()
    for name, column in values.items():
        try:
            columns[name] = pa.array(column, ROLLOUTS.field(name).type)
        except UnicodeEncodeError as error:
            raise InputError(
                f"rollouts cannot be written: a text of the column {name} is not Unicode, "
                f"{error.reason} at character {error.start} of {error.object[:80]!a}: an "
                "environment must give text that UTF-8 can hold"
            ) from error
    for name in TOKEN_COLUMNS:
        arrays = [getattr(rollout, name) for rollout in rollouts]
        columns[name] = _list_column(arrays, ROLLOUTS.field(name).type)
    return pa.table([columns[name] for name in ROLLOUTS.names], schema=ROLLOUTS)


def groups_of(table: pa.Table) -> list[RolloutGroup]:
    """The groups of a shard's table (all columns); rows of a group are adjacent."""
    names = table.column_names
    columns = [_values(name, table[name]) for name in names]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return [_group(list(part)) for _, part in groupby(rows, key=lambda row: row["group_id"])]


def _values(name: str, column: pa.ChunkedArray) -> list[Any]:
    if name in TOKEN_COLUMNS:
        return [view for chunk in column.chunks for view in _views(chunk)]
    return python_values(column)


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """As `to_pylist`, whose times look up their zone one by one, which imports pandas too."""
    if not pa.types.is_timestamp(column.type):
        return column.to_pylist()
    since = column.cast(pa.int64()).to_pylist()
    return [None if value is None else _EPOCH + timedelta(microseconds=value) for value in since]


def _check_rollout(rollout: Rollout) -> None:
    name, length = rollout.rollout_id, len(rollout.token_ids)
    if rollout.status not in STATUSES:
        raise ValueError(f"rollout {name}: expected a status of {STATUSES}: {rollout.status!r}")
    for field in ("loss_mask", "logprobs", "policy_versions", "teacher_logprobs"):
        array = getattr(rollout, field)
        if array is not None and len(array) != length:
            raise ValueError(f"rollout {name}: {length} token_ids, but {len(array)} {field}")
    if rollout.segment_lengths is not None and (
        sum(rollout.segment_lengths) != length or min(rollout.segment_lengths, default=0) < 1
    ):
        raise ValueError(
            f"rollout {name}: {length} token_ids, but segments of {rollout.segment_lengths}"
        )
    # Others are never trained on: what is kept of them may be incomplete.
    if rollout.status not in ("complete", "truncated"):
        return
    counted = rollout.n_prompt_tokens + rollout.n_completion_tokens
    if counted != length:
        raise ValueError(
            f"rollout {name}: n_prompt_tokens + n_completion_tokens is {counted}, but there are "
            f"{length} token_ids"
        )
    # Importance ratios are made of these: one NaN would refuse the update of a whole step.
    if not np.isfinite(rollout.logprobs[rollout.loss_mask == 1]).all():
        raise ValueError(f"rollout {name}: a sampled token's logprob is not a finite number")


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


def _list_column(arrays: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """A list column out of one array per row; None is null."""
    dtype = kind.value_type.to_pandas_dtype()
    present = [array for array in arrays if array is not None]
    offsets = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)])
    # An empty array at the end: NumPy refuses to join none.
    values = np.concatenate([*present, np.empty(0, dtype)]).astype(dtype, copy=False)
    missing = [array is None for array in arrays]
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(values),
        type=kind,
        mask=pa.array(missing) if any(missing) else None,
    )


def _views(chunk: pa.Array) -> Iterator[np.ndarray | None]:
    """NumPy view of each row, int8 widened to int32; None for null."""
    # All rows at once, and views of it below, in place of a conversion for each row.
    values = chunk.values.to_numpy(zero_copy_only=True)
    if values.dtype == np.int8:
        values = values.astype(np.int32)
    offsets = chunk.offsets.to_numpy()
    missing = chunk.is_null().to_numpy(zero_copy_only=False)
    for start, end, absent in zip(offsets[:-1], offsets[1:], missing, strict=True):
        yield None if absent else values[start:end]


def _group(rows: list[Row]) -> RolloutGroup:
    first = rows[0]
    metadata = json.loads(first["metadata"])
    metadata.pop(DETAILS, None)  # of the first rollout alone
    return RolloutGroup(
        group_id=first["group_id"],
        example=_EXAMPLE.decode(first, seed=first["prompt_seed"], metadata=metadata),
        rollouts=tuple(_rollout(row) for row in rows),
        group_size=first["group_size"],
    )


def _rollout(row: Row) -> Rollout:
    logprobs, turns = row["logprobs"], list[Turn]()
    for turn in row["turns"]:
        sampled = turn["inference_metadata"] is not None and turn["role"] == "assistant"
        located = sampled and turn["start"] is not None
        own = logprobs[turn["start"] : turn["end"]] if located else None
        turns.append(_TURN.decode(turn, logprobs=own))
    rollout = _ROLLOUT.decode(
        row, turns=tuple(turns), **{name: row[name] for name in TOKEN_COLUMNS}
    )
    # A search in the text: most rollouts have no details, and no JSON is parsed for them.
    if f'"{DETAILS}"' not in row["metadata"]:
        return rollout
    details = json.loads(row["metadata"]).get(DETAILS, {})
    parts = (replace(part, detail=details.get(part.name)) for part in rollout.reward_components)
    return replace(rollout, reward_components=tuple(parts))

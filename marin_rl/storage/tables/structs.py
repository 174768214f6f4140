"""Dataclasses as rows of Arrow fields and back: the one conversion between nouns and Arrow.

Rollouts, their turns and sampling, examples and preference pairs go through it, so a field is named
twice: in marin_rl/types.py and in the schema. Long arrays of tokens are columns (records.py).
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa

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
        """The record as a tree of dicts, lists and scalars, in the order of its fields."""
        row = {}
        for name, (encode, _) in self._converters.items():
            value = getattr(record, name)
            row[name] = value if encode is None or value is None else encode(value)
        for name, struct in self._inlined.items():
            row |= struct.encode(getattr(record, name))
        return row

    def columns(self, records: Sequence[Record]) -> dict[str, list[Any]]:
        """The rows of many records, column by column."""
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
        # The file's type and not NumPy's default: 64 bits would double what a shard takes in
        # memory.
        dtype = arrow.value_type.to_pandas_dtype()
        return np.ndarray.tolist, lambda values: np.array(values, dtype)
    return None, None

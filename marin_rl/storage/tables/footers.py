"""Sizes of column chunks from a Parquet footer, read without pyarrow's own metadata objects.

`RowGroupMetaData.column` of pyarrow validates what the footer says of a chunk in C++ code whose
exceptions no one catches: a flipped bit in the statistics ends the process (`terminate called`). A
file that another person or a failing disk wrote must not do that, so these few numbers are read
from the footer's Thrift structure (compact protocol; parquet.thrift names the fields).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from schemas import Malformed

MAGIC = b"PAR1"
TAIL_BYTES = 8  # length of the footer, and MAGIC
DEPTH_MAX = 32  # structs and lists within each other: parquet.thrift has 8
FOOTERS_KEPT, KEPT_BYTES_MAX = 64, 1 << 18  # one of ours has about 30 KB

# Types of the compact protocol. A boolean field has its value in place of a type.
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

# Reads a value at an offset: the value, and the offset after it.
Read = Callable[[bytes, int], tuple[Any, int]]
Fields = Mapping[int, tuple[int, Read]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChunk:
    """A column of a row group: its path, parquet.thrift's physical type, and its sizes."""

    path: str
    physical_type: int
    values: int
    uncompressed_bytes: int
    has_dictionary: bool


def column_chunks(buffer: pa.Buffer) -> list[list[ColumnChunk]]:
    """Return the column chunks of each row group. Raises Malformed for a damaged footer."""
    size = buffer.size
    tail = buffer.slice(max(size - TAIL_BYTES, 0)).to_pybytes()
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or length > size - TAIL_BYTES:
        raise Malformed(f"expected a footer before {MAGIC!r} at the end of the file")
    read = _row_groups if length > KEPT_BYTES_MAX else _row_groups_kept
    return read(buffer.slice(size - TAIL_BYTES - length, length).to_pybytes())


def _row_groups(footer: bytes) -> list[list[ColumnChunk]]:
    try:
        return _struct(footer, 0, FILE)[0].get(4, [])
    except (IndexError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("the footer is not the structure that Parquet writes") from error


# The processing task reads each shard twice: first the scalar columns, then the tokens.
_row_groups_kept = lru_cache(FOOTERS_KEPT)(_row_groups)


def _struct(data: bytes, at: int, fields: Fields) -> tuple[dict[int, Any], int]:
    """Read a struct: values of `fields` by their number; the others are passed over."""
    values, number = dict[int, Any](), 0
    while header := data[at]:
        at, kind = at + 1, header & 15
        # The short form has the distance from the last number, the long one the number itself.
        if header >> 4:
            number += header >> 4
        else:
            number, at = _integer(data, at)
        wanted = fields.get(number)
        # One of another type counts as absent: those who need it raise KeyError.
        if wanted is not None and wanted[0] == kind:
            values[number], at = wanted[1](data, at)
        else:
            at = _skip(data, at, kind, 0)
    return values, at + 1


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the offset after a value. Raises KeyError for a type that there is not."""
    # By frequency: most of a footer is numbers and texts of statistics, and this is its whole cost.
    if I16 <= kind <= I64:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == BINARY:
        size, at = _varint(data, at)
        return at + size
    if kind == STRUCT:
        return _skip_struct(data, at, _deeper(depth))
    if kind in (LIST, SET):
        count, element, at = _list_header(data, at)
        for _ in range(count):
            at = _skip(data, at, BYTE if element in (TRUE, FALSE) else element, _deeper(depth))
        return at
    return at + {TRUE: 0, FALSE: 0, BYTE: 1, DOUBLE: 8}[kind]  # no field of Parquet is a map


def _skip_struct(data: bytes, at: int, depth: int) -> int:
    while header := data[at]:
        at += 1
        if not header >> 4:
            _, at = _integer(data, at)
        at = _skip(data, at, header & 15, depth)
    return at + 1


def _deeper(depth: int) -> int:
    if depth >= DEPTH_MAX:
        raise KeyError(depth)
    return depth + 1


def _list_of(kind: int, read: Read) -> tuple[int, Read]:
    """A reader of lists of elements of one type."""

    def elements(data: bytes, at: int) -> tuple[list[Any], int]:
        count, element, at = _list_header(data, at)
        if count and element != kind:
            raise KeyError(element)
        values = []
        for _ in range(count):
            value, at = read(data, at)
            values.append(value)
        return values, at

    return LIST, elements


def _list_header(data: bytes, at: int) -> tuple[int, int, int]:
    """Number and type of a list's elements. An element has a byte at least."""
    header, at = data[at], at + 1
    count = header >> 4
    if count == 15:
        count, at = _varint(data, at)
    # Before any loop: a forged count costs nothing.
    if count > len(data) - at:
        raise IndexError(count)
    return count, header & 15, at


def _binary(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _varint(data, at)
    if size > len(data) - at:
        raise IndexError(size)
    return data[at : at + size], at + size


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag-encoded number."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while (byte := data[at]) > 127:
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        # 64 bits fit in ten bytes.
        if shift > 63:
            raise IndexError(shift)
    return value | byte << shift, at + 1


def _chunk(data: bytes, at: int) -> tuple[ColumnChunk, int]:
    """A column chunk by its metadata, field 3."""
    fields, at = _struct(data, at, {3: (STRUCT, _metadata)})
    column = fields[3]
    return ColumnChunk(
        path=b".".join(column[3]).decode(),
        physical_type=column[1],
        values=column[5],
        uncompressed_bytes=column[6],
        has_dictionary=11 in column,
    ), at


def _metadata(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    return _struct(data, at, METADATA)


def _row_group(data: bytes, at: int) -> tuple[list[ColumnChunk], int]:
    group, at = _struct(data, at, ROW_GROUP)
    return group.get(1, []), at


METADATA: Fields = {
    1: (I32, _integer),  # type
    3: _list_of(BINARY, _binary),  # path_in_schema
    5: (I64, _integer),  # num_values
    6: (I64, _integer),  # total_uncompressed_size
    11: (I64, _integer),  # dictionary_page_offset
}
ROW_GROUP: Fields = {1: _list_of(STRUCT, _chunk)}  # columns
FILE: Fields = {4: _list_of(STRUCT, _row_group)}  # row_groups

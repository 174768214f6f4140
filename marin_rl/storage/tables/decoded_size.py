"""Decoded size of a Parquet file, before it is decoded: a small file may stand for gigabytes.

A dictionary holds one long value once and names it a million times; runs of equal numbers take no
space at all. What the footer tells bounds most files at once. Where that bound is too wide, columns
of text are read as dictionaries, which stay small, and their lengths are added up.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from marin_rl.storage.tables.footers import ColumnChunk
from schemas import Malformed

FACTOR_MAX = 1000  # a shard of ours becomes 5 to 50 times its size
FLOOR_BYTES = 64 * 2**20
CEILING_BYTES = 4 * 2**30
# Bytes of a value by parquet.thrift's types: BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE.
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}


def limit_of(size: int) -> int:
    """Bytes that a row group of a file of `size` bytes may take in memory."""
    return min(max(FACTOR_MAX * size, FLOOR_BYTES), CEILING_BYTES)


def check_decoded(
    buffer: pa.Buffer,
    chunks: Sequence[Sequence[ColumnChunk]],
    groups: Iterable[int],
    columns: Sequence[str],
) -> None:
    """Raise Malformed for a row group whose columns would take more memory than `limit_of`.

    `chunks` are the file's column chunks by row group. Nothing that grows is decoded to find out.
    """
    limit, wanted = limit_of(buffer.size), set(columns)
    for group in groups:
        exact, doubtful = 0, dict[str, int]()
        for chunk in chunks[group]:
            if chunk.path.partition(".")[0] not in wanted:
                continue
            # None for texts and bytes, of whose lengths the footer says nothing.
            width = _WIDTHS.get(chunk.physical_type)
            # A run of equal numbers is a few bytes in the file; a text has an offset of 4 bytes.
            exact += max(chunk.uncompressed_bytes, chunk.values * (width or 4))
            if width is None and chunk.has_dictionary:
                # At worst every value is the one entry that fills the dictionary.
                doubtful[chunk.path] = chunk.values * chunk.uncompressed_bytes
        _check(exact, limit, group)
        if exact + sum(doubtful.values()) > limit:
            _check(exact + sum(_text_bytes(buffer, group, doubtful)), limit, group)


def _check(size: int, limit: int, group: int) -> None:
    if size > limit:
        raise Malformed(
            f"row group {group} would take {size} bytes of memory, expected {limit} at most for a "
            "file of this size: it was made to grow"
        )


def _text_bytes(buffer: pa.Buffer, group: int, paths: Iterable[str]) -> Iterator[int]:
    """Bytes of the texts of each column, by the lengths of its dictionaries' entries."""
    import pyarrow.compute as pc  # takes as long to import as pyarrow itself

    names = list(paths)
    file = pq.ParquetFile(pa.BufferReader(buffer), read_dictionary=names)
    for name in names:
        # A column at a time, so that one is in memory and not all.
        table = file.read_row_group(group, columns=[name], use_threads=False)
        for leaf in (leaf for chunk in table.column(0).chunks for leaf in _leaves(chunk)):
            if isinstance(leaf, pa.DictionaryArray):
                lengths = pc.binary_length(leaf.dictionary).cast(pa.int64())
                yield pc.sum(lengths.take(leaf.indices)).as_py() or 0
            else:
                yield leaf.nbytes


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    """The arrays of values below lists and structs."""
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        yield from _leaves(array.flatten())
    elif isinstance(array, pa.StructArray):
        for child in array.flatten():
            yield from _leaves(child)
    else:
        yield array

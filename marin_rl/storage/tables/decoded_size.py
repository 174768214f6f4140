"""Decoded size of a Parquet file, before it is decoded: a small file may stand for gigabytes.

A dictionary names one long value a million times; runs of equal numbers take no space. The footer
bounds most files at once; else columns of text are read as small dictionaries, and lengths added.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas import Malformed

FACTOR_MAX = 1000  # a shard of ours becomes 5 to 50 times its size
FLOOR_BYTES = 64 * 2**20
CEILING_BYTES = 4 * 2**30
# Of a footer, which has about 30 KB in a file of ours. A forged count costs nothing then.
FOOTER_LIMITS = {"thrift_string_size_limit": 2**24, "thrift_container_size_limit": 2**17}
# Bytes of a value by Parquet's physical types, but for texts and bytes.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


def open_parquet(buffer: pa.Buffer, **options: Any) -> pq.ParquetFile:
    """Open an untrusted file, with checksums of pages and limits of the footer, as pyarrow does."""
    return pq.ParquetFile(
        pa.BufferReader(buffer), page_checksum_verification=True, **FOOTER_LIMITS, **options
    )


def limit_of(size: int) -> int:
    """Bytes that a row group of a file of `size` bytes may take in memory."""
    return min(max(FACTOR_MAX * size, FLOOR_BYTES), CEILING_BYTES)


def check_decoded(
    file: pq.ParquetFile, buffer: pa.Buffer, groups: Iterable[int], columns: Sequence[str]
) -> None:
    """Raise Malformed for a row group whose columns would take more memory than `limit_of`.

    `file` reads `buffer`. Nothing that grows is decoded to find out. Raises what pyarrow raises for
    metadata that contradict themselves.
    """
    limit, wanted = limit_of(buffer.size), set(columns)
    paths = [file.schema.column(index).path for index in range(len(file.schema))]
    leaves = [index for index, path in enumerate(paths) if path.partition(".")[0] in wanted]
    for group in groups if leaves else ():
        exact, doubtful = 0, dict[str, int]()
        for index, chunk in _chunks(file, group, leaves):
            # None for texts and bytes, of whose lengths the footer says nothing.
            width = _WIDTHS.get(chunk.physical_type)
            # A run of equal numbers is a few bytes in the file; a text has an offset of 4 bytes.
            exact += max(chunk.total_uncompressed_size, chunk.num_values * (width or 4))
            if width is None and chunk.has_dictionary_page:
                # At worst every value is the one entry that fills the dictionary.
                doubtful[paths[index]] = chunk.num_values * chunk.total_uncompressed_size
        _check(exact, limit, group)
        if exact + sum(doubtful.values()) > limit:
            _check(exact + sum(_text_bytes(buffer, group, doubtful)), limit, group)


def _chunks(
    file: pq.ParquetFile, group: int, leaves: Sequence[int]
) -> Iterator[tuple[int, pq.ColumnChunkMetaData]]:
    """Column chunks of a row group, each with the number of its column."""
    # `RowGroupMetaData.column` validates in C++ code whose exceptions no one catches: a flipped bit
    # in a histogram would end the process. A reader of no rows validates the same and decodes
    # nothing, and its errors are Python's.
    deque(file.reader.iter_batches(0, row_groups=[group], column_indices=leaves), maxlen=0)
    row_group = file.metadata.row_group(group)
    return ((index, row_group.column(index)) for index in leaves)


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
    file = open_parquet(buffer, read_dictionary=names)
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

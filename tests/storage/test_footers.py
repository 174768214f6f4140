"""Footers of Parquet files, read without pyarrow's own metadata objects."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.cases import printed_seed

from marin_rl.storage.tables.footers import ColumnChunk, column_chunks
from schemas import Malformed

# of parquet.thrift, by number
TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY")


def written(rows: int = 2500, *, dictionary: bool = True) -> pa.Buffer:
    """A file of three row groups: numbers, texts, lists, a struct within a list."""
    table = pa.table(
        {
            "number": np.arange(rows),
            "flag": np.arange(rows) % 2 == 0,
            "text": [f"text {n % 7}" for n in range(rows)],
            "ids": [list(range(n % 5)) for n in range(rows)],
            "turns": [[{"role": "user", "start": n}] * (n % 3) for n in range(rows)],
            "none": pa.nulls(rows, pa.float32()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, row_group_size=1000, use_dictionary=dictionary, write_page_index=True
    )
    return sink.getvalue()


@pytest.mark.parametrize("dictionary", [True, False])
def test_sizes_are_those_of_pyarrow(*, dictionary: bool) -> None:
    buffer = written(dictionary=dictionary)
    metadata = pq.ParquetFile(pa.BufferReader(buffer)).metadata
    for group, chunks in enumerate(column_chunks(buffer)):
        for index, chunk in enumerate(chunks):
            column = metadata.row_group(group).column(index)
            assert chunk == ColumnChunk(
                path=column.path_in_schema,
                physical_type=TYPES.index(column.physical_type),
                values=column.num_values,
                uncompressed_bytes=column.total_uncompressed_size,
                has_dictionary=column.has_dictionary_page,
            )
        assert len(chunks) == metadata.num_columns
    assert group == metadata.num_row_groups - 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a footer"),
        (b"PAR1", "expected a footer"),
        (b"\xff\xff\xff\x7fPAR1", "expected a footer"),
        (b"\x00\x00\x00\x00PAR1", "not the structure"),
        (b"\x1f\x00\x02\x00\x00\x00PAR1", "not the structure"),  # a type that there is not
        (b"\x49\xfc\xff\xff\xff\x0f\x06\x00\x00\x00PAR1", "not the structure"),  # 2**32 row groups
        (b"\x19" * 4000 + (4000).to_bytes(4, "little") + b"PAR1", "not the structure"),  # depth
    ],
)
def test_bytes_that_are_no_footer_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        column_chunks(pa.py_buffer(data))


def test_a_damaged_footer_is_read_or_refused() -> None:
    buffer = written().to_pybytes()
    length = int.from_bytes(buffer[-8:-4], "little")
    choose = random.Random(printed_seed())
    for _ in range(300):
        data = bytearray(buffer)
        for _ in range(choose.choice((1, 1, 1, 8))):
            data[len(data) - 8 - choose.randrange(length)] ^= 1 << choose.randrange(8)
        try:
            groups = column_chunks(pa.py_buffer(bytes(data)))
        except Malformed:
            continue
        assert all(isinstance(chunk, ColumnChunk) for chunks in groups for chunk in chunks)

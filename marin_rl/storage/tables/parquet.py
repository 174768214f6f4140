"""Tables as Parquet bytes and back: the encodings, the stamp in the footer, and the checks.

The stamp (format, schema version, and what the caller adds) is Parquet key-value metadata, so a
file says what it is. Everything read is verified: SHA-256 where a manifest has it, page checksums,
format, version, columns. Raises CorruptObject or NewerSchema naming the file.
"""

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from marin_rl.errors import CorruptObject, NewerSchema, ObjectMissing
from marin_rl.storage.commits import commit_object, part_of
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.local import checked_file, explained
from marin_rl.storage.tables.decoded_size import check_decoded, open_parquet
from schemas import Malformed, NewerVersion
from schemas.manifests import Part
from schemas.migrations import Ladder

ROW_GROUP_ROWS = 1000
PART_BYTES_MAX = 32 * 2**20
FETCHES_MAX = 64  # small objects that are fetched from elsewhere at once
PARTS_MAX = 8  # parts of PART_BYTES_MAX

Item = TypeVar("Item")
Value = TypeVar("Value")
Columns = pa.Schema | Sequence[str] | None

STAMP_PREFIX = "marin_rl."
_WRITER = re.compile(r"parquet-cpp-arrow version \d+\.\d+\.\d+[\w.+-]*")

# Encodings that beat the defaults, by the name of the column: ids are too many for a dictionary,
# logprobs share their exponent bytes, positions differ by one.
_PLAIN = ("token_ids", "chosen_token_ids", "rejected_token_ids")
_SPLIT = (
    "logprobs", "policy_logprobs", "teacher_logprobs", "trainer_logprobs", "sampler_logprobs",
    "reference_logprobs", "old_logprobs", "entropies", "ratios", "values", "old_values",
)  # fmt: skip
ENCODINGS: Mapping[str, str] = {
    **dict.fromkeys(_PLAIN, "PLAIN"),
    **dict.fromkeys(_SPLIT, "BYTE_STREAM_SPLIT"),
    "positions": "DELTA_BINARY_PACKED",
}


class TableWriter:
    """Collects tables of one schema into the bytes of one Parquet file, a row group per call."""

    def __init__(self, ladder: Ladder, schema: pa.Schema, stamp: Mapping[str, str]) -> None:
        values = {"format": ladder.format, "schema_version": str(ladder.newest)}
        values |= dict(sorted(stamp.items()))  # in one order, so that equal files have equal bytes
        self.schema = schema.with_metadata({STAMP_PREFIX + k: v for k, v in values.items()})
        self.rows = 0
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._sink, self.schema, **_options(schema))

    @property
    def bytes_written(self) -> int:
        return self._sink.tell()

    def write(self, table: pa.Table) -> None:
        """Append `table` as one row group. Its schema must be the writer's, metadata aside."""
        assert table.schema.equals(self.schema), "a table is written under another schema"
        self.rows += table.num_rows
        # One row group a call, whatever its size: readers go by row groups, and 0 is refused.
        self._writer.write_table(table.cast(self.schema), row_group_size=max(table.num_rows, 1))

    def finish(self) -> bytes:
        self._writer.close()
        return self._sink.getvalue().to_pybytes()


def write_plain(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path)  # for other libraries: without a stamp of ours


class PartWriter:
    """Streams tables into the parts of a slot; a part that has reached `part_bytes_max` is closed.

    Parts are `NAME-0000.parquet` and so on; the name has the attempt, so no other attempt uses it.
    `open_writer` makes the writer of a part, of the schema of its first table.
    """

    def __init__(
        self,
        store: ObjectStore,
        slot: str,
        name: str,
        open_writer: Callable[[pa.Schema], TableWriter],
        part_bytes_max: int = PART_BYTES_MAX,
    ) -> None:
        self._store, self._slot, self._name = store, slot, name
        self._open_writer, self._part_bytes_max = open_writer, part_bytes_max
        self._parts: list[Part] = []
        self._writer: TableWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Append `table` as one row group, to a new part where the last one is full."""
        # Before the table: a part ends up larger by one table at most.
        if self._writer is not None and self._writer.bytes_written > self._part_bytes_max:
            self._close_part(self._writer)
        if self._writer is None:
            self._writer = self._open_writer(table.schema)
        self._writer.write(table)

    def close(self, empty: pa.Schema | None = None) -> tuple[Part, ...]:
        """Write the last part; return the parts in order, all durable.

        Without any table there is none, or one without rows where the schema `empty` is given.
        """
        if self._writer is None and not self._parts and empty is not None:
            self._writer = self._open_writer(empty)
        if self._writer is not None:
            self._close_part(self._writer)
        return tuple(self._parts)

    def _close_part(self, writer: TableWriter) -> None:
        name = f"{self._name}-{len(self._parts):04d}.parquet"
        data = writer.finish()
        self._parts.append(put_part(self._store, self._slot, name, data, rows=writer.rows))
        self._writer = None


def put_part(
    store: ObjectStore, slot: str, name: str, data: bytes, *, rows: int | None = None
) -> Part:
    """Write a part durably; return its entry of the manifest. Raises StorageError."""
    store.put_part(f"{slot}/{name}", data)
    # Hashed from memory, and not read back: the digest is of what was meant to be written.
    return part_of(name, data, rows=rows)


class TableReader:
    """Reader of a Parquet file of a known format, by row groups, which are upgraded.

    `stamp` is what the footer says, `schema` the columns in the file. `Columns` are names of the
    ladder's columns, all, or a schema where it has none.
    """

    def __init__(self, data: pa.Buffer | bytes, source: str, ladder: Ladder) -> None:
        self.source, self.ladder = source, ladder
        with corruption_named(source):
            self._buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
            self._file = open_parquet(self._buffer)
            raw = self._file.metadata.metadata or {}
            stamp = self.stamp = {
                key.decode().removeprefix(STAMP_PREFIX): value.decode()
                for key, value in raw.items()
                if key.startswith(STAMP_PREFIX.encode())
            }
            if stamp.get("format") != ladder.format:
                raise CorruptObject(
                    f"{source}: expected format {ladder.format!r}, found {stamp.get('format')!r}"
                )
            version = stamp.get("schema_version", "")
            # Bounded first: `int` takes digits of any script, and thousands of them.
            if not (version.isascii() and version.isdigit() and len(version) < 10):
                raise CorruptObject(f"{source}: expected a schema version, found {version!r}")
            # Before a row is read: a later version may have given a column another meaning.
            ladder.check(int(version))
            self.schema = self._file.schema_arrow

    @property
    def rows(self) -> int:
        return self._file.metadata.num_rows

    @property
    def row_groups(self) -> int:
        return self._file.num_row_groups

    @property
    def committed_as(self) -> tuple[str, str]:
        """(attempt, fingerprint) by the stamp. Raises CorruptObject where it lacks one of them."""
        missing = {"attempt", "fingerprint"} - set(self.stamp)
        if missing:
            raise CorruptObject(
                f"{self.source}: the footer names no {' and no '.join(sorted(missing))}"
            )
        return self.stamp["attempt"], self.stamp["fingerprint"]

    def group(self, index: int, columns: Columns = None) -> pa.Table:
        return self._read([index], columns)

    def groups(self, columns: Columns = None) -> Iterator[pa.Table]:
        return (self.group(index, columns) for index in range(self.row_groups))

    def table(self, columns: Columns = None) -> pa.Table:
        return self._read(list(range(self.row_groups)), columns)

    def check(self, columns: Columns = None) -> None:
        """Raise CorruptObject unless the columns are, or become by upgrades, exactly these."""
        self._read([], columns)

    def rewritten(self) -> bytes | None:
        """The bytes that writing all rows again gives; None if another writer made the file.

        What is deterministic comes out equal, so a difference is damage that no checksum inside the
        file covers. Raises CorruptObject where rows cannot be read, or no writer of ours is named.
        """
        created_by = str(self._file.metadata.created_by)
        if _WRITER.fullmatch(created_by) is None:
            raise CorruptObject(
                f"{self.source}: expected Arrow's name as its writer, found {created_by!r}"
            )
        values = {key: value for key, value in self.stamp.items() if key != "format"}
        writer = TableWriter(self.ladder, self.schema.remove_metadata(), values)
        with corruption_named(self.source):
            check_decoded(self._file, self._buffer, range(self.row_groups), self.schema.names)
            tables = [self._file.read_row_group(i) for i in range(self.row_groups)]
        for table in tables:
            writer.write(table.replace_schema_metadata())
        data = writer.finish()
        # Another version of Arrow may encode the same rows in other bytes.
        ours = pq.read_metadata(pa.BufferReader(data)).created_by
        return data if ours == created_by else None

    def _read(self, groups: list[int], columns: Columns) -> pa.Table:
        schema = select(self.ladder.schema, columns)
        inside = set(self.schema.names)
        stored = [name for name in schema.names if name in inside]
        with corruption_named(self.source):
            check_decoded(self._file, self._buffer, groups, stored)
            raw = self._file.read_row_groups(groups, columns=stored, use_threads=False)
            table = self.ladder.upgrade(raw, int(self.stamp["schema_version"]))
        columns_read = Counter(table.column_names)
        # Twice is as wrong as never: Arrow would read either of the two.
        wrong = [name for name in schema.names if columns_read[name] != 1]
        if wrong:
            problem = "stand there twice" if columns_read[wrong[0]] else "are missing"
            raise CorruptObject(f"{self.source}: columns {', '.join(wrong)} {problem}")
        table = table.select(schema.names).replace_schema_metadata()
        if not table.schema.equals(schema.remove_metadata()):
            raise CorruptObject(
                f"{self.source}: expected the columns\n{schema.remove_metadata()}\nfound\n"
                f"{table.schema}"
            )
        return table


def commit_table(store: ObjectStore, key: str, data: bytes, ladder: Ladder) -> tuple[bytes, bool]:
    """Commit a file by the attempt and fingerprint of its stamp; the bytes there, True if ours.

    They are another attempt's where that one was first. Raises as `commit_object` does.
    """

    def identify(file: bytes) -> tuple[str, str]:
        return TableReader(file, store.url_of(key), ladder).committed_as

    attempt, fingerprint = identify(data)
    # The file is its own commit: one create of all its bytes, so no manifest can be missing.
    committed = commit_object(
        store, key, data, attempt=attempt, fingerprint=fingerprint, identify=identify
    )
    return committed, committed == data


def open_part(store: ObjectStore, slot: str, part: Part, ladder: Ladder) -> TableReader:
    """A reader over a part whose SHA-256 has been checked against its manifest.

    Local files are mapped, not read into memory. Raises CorruptObject, NewerSchema, ObjectMissing.
    """
    key = f"{slot}/{part.name}"
    source = store.url_of(key)
    data = load(store, key)
    if data.size != part.bytes:  # spares hashing what may be of any size
        raise CorruptObject(
            f"{source}: expected {part.bytes} bytes, found {data.size}: the file was truncated or "
            "altered after it was committed; restore it from a copy"
        )
    return TableReader(verified(data, part.sha256, source), source, ladder)


def load(store: ObjectStore, key: str) -> pa.Buffer:
    """The object as a buffer: mapped where the store is local, else read whole."""
    path = store.local_path(key)
    if path is None:
        return pa.py_buffer(store.read(key))
    with explained(checked_file(path, key)):
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return pa.py_buffer(b"")
        return pa.memory_map(str(path)).read_buffer()


def load_readable(store: ObjectStore, keys: Iterable[str]) -> Iterator[pa.Buffer | None]:
    """Objects as buffers, in order; None for a link or a pipe in their place, which fsck names."""

    def readable(key: str) -> pa.Buffer | None:
        with suppress(CorruptObject):
            return load(store, key)
        return None

    return in_order(store, readable, keys)


def in_order(
    store: ObjectStore,
    work: Callable[[Item], Value],
    items: Iterable[Item],
    at_once: int = FETCHES_MAX,
) -> Iterator[Value]:
    """Results of `work` on each item, in order; of a remote store `at_once` are under way."""
    if store.local_path("shard") is not None:
        yield from map(work, items)
        return
    # A window and not a map: results come in order, and no more than `at_once` are in memory.
    with ThreadPoolExecutor(at_once) as pool:
        under_way = deque[Future[Value]]()
        for item in items:
            if len(under_way) == at_once:
                yield under_way.popleft().result()
            under_way.append(pool.submit(work, item))
        while under_way:
            yield under_way.popleft().result()


def fetches_at_once(bytes_max: int) -> int:
    """Number of parts of at most `bytes_max` bytes that are fetched from elsewhere at once.

    They take as much memory as PARTS_MAX parts of full size.
    """
    return min(max(PARTS_MAX * PART_BYTES_MAX // max(bytes_max, 1), PARTS_MAX), FETCHES_MAX)


def iter_present(
    store: ObjectStore, keys: Iterable[str], at_once: int = FETCHES_MAX
) -> Iterator[pa.Buffer | None]:
    """Objects as buffers, in order, None for missing ones; remote ones concurrently.

    Of a remote store no more than `at_once` objects are in memory. The caller has one more, unless
    it lets go of it.
    """
    return in_order(store, lambda key: load_or_none(store, key), keys, at_once)


def load_or_none(store: ObjectStore, key: str) -> pa.Buffer | None:
    with suppress(ObjectMissing):
        return load(store, key)
    return None


def digest_of(data: pa.Buffer | bytes) -> str:
    return hashlib.sha256(memoryview(data)).hexdigest()


def verified(data: pa.Buffer, sha256: str, source: str) -> pa.Buffer:
    """`data` if it has this digest. Raises CorruptObject naming `source`."""
    actual = digest_of(data)
    if actual != sha256:
        raise CorruptObject(
            f"{source}: expected SHA-256 {sha256}, found {actual} over {data.size} bytes: the file "
            "was truncated or altered after it was committed; restore it from a copy"
        )
    return data


# In addition to its own errors Arrow raises these for forged bytes.
_UNREADABLE = (pa.ArrowException, OSError, Malformed, ValueError, TypeError, ArithmeticError)


@contextmanager
def corruption_named(source: str) -> Iterator[None]:
    """Turn what a reader of broken bytes raises into CorruptObject or NewerSchema."""
    try:
        yield
    except NewerVersion as error:
        raise NewerSchema(f"{source}: {error}") from None
    except _UNREADABLE as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CorruptObject(f"{source} is not a readable Parquet file: {reason}") from None


def select(schema: pa.Schema | None, columns: Columns) -> pa.Schema:
    """The fields that `columns` name, in that order; all of them for None."""
    if isinstance(columns, pa.Schema):
        return columns
    assert schema is not None, "files of this format differ in their columns"
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def _options(schema: pa.Schema) -> dict[str, Any]:
    leaves = [path for field in schema for path in _leaves(field.name, field.type)]
    tops = {path: path.partition(".")[0] for path in leaves}
    encodings = {path: ENCODINGS[top] for path, top in tops.items() if top in ENCODINGS}
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": [path for path in leaves if path not in encodings],
        "column_encoding": encodings,
        "write_page_index": True,
        # What the reader verifies: metrics and open shards have no digest in a manifest.
        "write_page_checksum": True,
    }


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    """Paths of the Parquet columns below a field, as the writer's options name them."""
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            child = kind.field(index)
            yield from _leaves(f"{path}.{child.name}", child.type)
    else:
        yield path

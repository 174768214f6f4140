"""SQL over runs: DuckDB's answer to one query, with a view for each table that it names.

DuckDB's own settings, which are locked, keep a query away from other files, extensions and
settings. They do not separate reading from writing, so statements that write files are refused
before they run, by DuckDB's parser.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from marin_rl.analysis.scan import TABLES, Options, Root, Runs, open_runs
from marin_rl.errors import InputError
from marin_rl.machine import cores
from marin_rl.storage.run_records import read_record
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.store import ForkedStore
from schemas.tables import ROLLOUTS

# Statements that work in memory. COPY, ATTACH, EXPORT and LOAD reach files, SET and PRAGMA
# settings, CALL either of them; COMMIT would leave tables for the next query, and EXECUTE hides its
# statement.
STATEMENTS = (
    "SELECT", "EXPLAIN", "CREATE", "INSERT", "UPDATE", "DELETE", "MERGE_INTO", "ALTER", "DROP",
    "MULTI",
)  # fmt: skip
WRITES_FILES = b"copy"  # DuckDB runs it inside WITH and EXPLAIN ANALYZE too

UNSAFE = (
    "a query reads the run's own files and writes none; `--unsafe` (in Python `unsafe=True`) lets "
    "it read, write, attach and install whatever you may"
)
_REFUSED = re.compile(r"configuration has been locked|Table with name \S*/")  # a path, in FROM
_PATTERN = re.compile(r"[*?[]")  # DuckDB takes a path with one of these for a pattern
_INTERVAL = re.compile(r'(?<!")\bINTERVAL\b(?!")')  # the type, not a field of that name

READ_BY_DUCKDB = ("rollouts", "evals", "metrics")  # where their files are local
OF_ROLLOUTS = ("rollouts", "evals")
# Columns of `rollouts` and `evals` that SQL has next to the stored ones: turns of the model, and
# tools that a rollout called or whose results it read.
_DERIVED = (
    "len([turn for turn in turns if turn.role = 'assistant' "
    "and turn.inference_metadata is not null]) as n_turns, "
    "list_sort(list_distinct(list_concat("
    "flatten([[call.name for call in turn.tool_calls] for turn in turns "
    "if len(turn.tool_calls) > 0]), "
    "[turn.tool_name for turn in turns if turn.tool_name <> '' "
    "and coalesce(len(turn.tool_calls), 0) = 0]))) as tools"
)

# Types whose Python values from DuckDB are those that Polars gives, by DuckDB's ids.
_PLAIN = frozenset(
    {f"{sign}{size}int" for sign in ("", "u") for size in ("tiny", "small", "", "big", "huge")}
    | {"integer", "uinteger", "boolean", "float", "double", "decimal", "varchar", "blob", "enum"}
    | {"NULL", "null"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def sql(
    root: Root,
    run_id: Runs,
    query: str,
    storage_options: Options | None = None,
    *,
    unsafe: bool = False,
) -> pl.DataFrame:
    """Return DuckDB's answer to `query`, which may name the runs' tables (`scan.TABLES`).

    Local rollouts are read by DuckDB itself, unless `*`, `?` or `[` is in their path, everything
    else through Polars. A query reads the files of these runs and nothing else, and writes none:
    statements that write files are refused. Tables that it creates in memory are dropped when it
    has answered. With `unsafe` it may read and write whatever the user may, in a database of its
    own.

    Intervals are durations, in which a month has 30 days. Raises InputError in DuckDB's own words
    when the query is wrong or refused, or when Polars has no such type as it answers with, and as
    `scan_rollouts`.
    """
    with _answering(root, run_id, query, storage_options, unsafe=unsafe) as answer:
        return _as_frame(answer)


def answer_rows(
    root: Root,
    run_id: Runs,
    query: str,
    storage_options: Options | None = None,
    *,
    unsafe: bool = False,
) -> Answer:
    """Return DuckDB's answer to `query` as Python's values: sums of integers are integers."""
    with _answering(root, run_id, query, storage_options, unsafe=unsafe) as answer:
        names = answer.columns
        # Of two columns of one name a frame renames the second.
        if len({name.lower() for name in names}) == len(names) and all(map(_plain, answer.types)):
            return Answer(columns=names, rows=answer.fetchall())
        frame = _as_frame(answer)
        return Answer(columns=frame.columns, rows=frame.rows())


def tables(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> dict[str, dict[str, str]]:
    """Columns of each table that a query may name, with types in SQL. Raises as `sql`."""
    described: dict[str, dict[str, str]] = {}
    with _database(open_runs(root, run_id, storage_options)).cursor() as connection:
        for name, table in TABLES.items():
            if table.differ:
                rows = answer_rows(root, run_id, f"describe {name}", storage_options).rows
                described[name] = {row[0]: row[1] for row in rows}
                continue
            # `empty_table` imports pandas
            stored = connection.from_arrow(pa.Table.from_batches([], table.columns))
            if name in OF_ROLLOUTS:
                stored = stored.project(f"*, {_DERIVED}")
            described[name] = dict(zip(stored.columns, map(str, stored.types), strict=True))
    return described


@contextmanager
def _answering(
    root: Root, run_id: Runs, query: str, storage_options: Options | None, *, unsafe: bool
) -> Iterator[duckdb.DuckDBPyRelation]:
    runs = open_runs(root, run_id, storage_options)
    try:
        if unsafe:
            with _connected() as connection:
                yield _answer(connection, query, runs)
            return
        for statement in duckdb.extract_statements(query):
            if (kind := statement.type.name) not in STATEMENTS:
                words = {"MULTI": "PIVOT", "CREATE_FUNC": "CREATE MACRO"}.get(kind, kind)
                raise InputError(
                    f"DuckDB's {words.replace('_', ' ')} statement is refused: {UNSAFE}"
                )
        tokens, data = duckdb.tokenize(query), query.encode()
        ends = [start for start, _ in tokens[1:]] + [len(data)]
        for (start, kind), end in zip(tokens, ends, strict=True):
            word = data[start:end].split(maxsplit=1)
            if kind.name == "keyword" and word and word[0].lower() == WRITES_FILES:
                raise InputError(
                    f'COPY is refused (a column of that name is written "copy"): {UNSAFE}'
                )
        with _database(runs).cursor() as connection:
            connection.begin()  # never committed: closing takes back what the query creates
            yield _answer(connection, query, runs)
    except duckdb.Error as error:
        # With the remedy where DuckDB's settings refuse.
        refused = isinstance(error, duckdb.PermissionException) or _REFUSED.search(str(error))
        remedy = f"; {UNSAFE}" if refused else ""
        raise InputError(f"DuckDB refuses the query: {error}{remedy}") from None


def _database(runs: Sequence[Run]) -> duckdb.DuckDBPyConnection:
    """The database of these runs, which opens what DuckDB reads of them and of their ancestors."""
    stores, records = [run.folder for run in runs], [read_record(run.store) for run in runs]
    for run in runs:
        if isinstance(run.store, ForkedStore):
            stores += [store for _, store in run.store.shared]
    folders = [store.local_path(name) for store in stores for name in READ_BY_DUCKDB]
    return _restricted(
        os.getpid(),
        # Another one than that of a run that was started again under its name.
        frozenset(str(record["attempt"]) for record in records if record is not None),
        frozenset(str(folder) for folder in folders if folder is not None),
    )


@lru_cache(maxsize=8)
def _restricted(
    process: int, runs: frozenset[str], folders: frozenset[str]
) -> duckdb.DuckDBPyConnection:
    """An empty database in memory that caches Parquet footers and opens files in `folders` alone.

    Footers take most of the time of a query over many files, and files of a run never change. Other
    runs have a database of their own, for DuckDB takes a file with the name and time of an earlier
    one for the same; so has a forked process.
    """
    del process, runs  # are the cache's key
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    database = _connected(
        memory_limit=f"{memory_bytes // 2}B",
        temp_directory="",  # no spilling: it writes files
        allow_community_extensions=False,
        autoinstall_known_extensions=False,
        autoload_known_extensions=False,
    )
    database.execute("set global allowed_directories = ?", [sorted(folders)])
    database.execute("set global enable_external_access = false")
    database.execute("set global lock_configuration = true")
    return database


def _connected(**settings: str | bool) -> duckdb.DuckDBPyConnection:
    # The system has pages of local files in its memory; a second copy costs more than it spares.
    # DuckDB would count all cores of the machine, not those of this process.
    chosen = {"threads": cores(), "enable_external_file_cache": False, **settings}
    database = duckdb.connect(config=chosen)
    database.execute("set global parquet_metadata_cache = true")
    return database


def _answer(
    connection: duckdb.DuckDBPyConnection, query: str, runs: Sequence[Run]
) -> duckdb.DuckDBPyRelation:
    for name in TABLES:
        if re.search(rf"\b{name}\b", query, re.IGNORECASE):
            _create_view(connection, name, runs)
    answer = connection.sql(query)
    if answer is None:
        raise InputError(f"expected a query that returns rows, found {query!r}")
    return answer


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, runs: Sequence[Run]) -> None:
    """Create a view: by DuckDB's own reader for local files, else over the frame."""
    paths = []
    if name in READ_BY_DUCKDB:
        paths = [part.path for part in TABLES[name].parts(runs)]
    # DuckDB cannot escape a pattern in a path that contains a backslash.
    if paths and all(path and not _PATTERN.search(path) for path in paths):
        listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
        # Columns differ by version, or by round as metrics do: DuckDB reads every footer at first.
        options = "union_by_name=true, hive_partitioning=false"
        stored = f"select * from read_parquet([{listed}], {options})"
        if name in OF_ROLLOUTS:  # files of earlier versions have fewer columns, and fields of turns
            newest = pa.Table.from_batches([], ROLLOUTS)
            connection.register("newest_rollouts", newest)
            (turns,) = connection.from_arrow(newest.select(["turns"])).types
            added = "segment_lengths, start_s, teacher_logprobs"
            stored = f"{stored} union all by name select {added} from newest_rollouts"
            stored = f"select * replace (turns::{turns} as turns) from ({stored})"
    else:
        connection.register(f"stored_{name}", TABLES[name].frame(runs))
        stored = f"select * from stored_{name}"
    derived = f", {_DERIVED}" if name in OF_ROLLOUTS else ""
    connection.sql(f"create temp view {name} as select *{derived} from ({stored})")


def _plain(kind: Any) -> bool:
    if kind.id in ("list", "struct", "map"):
        return all(_plain(child) for _, child in kind.children)
    return kind.id in _PLAIN


def _as_frame(answer: duckdb.DuckDBPyRelation) -> pl.DataFrame:
    """The answer as a frame. Raises InputError for types that Polars lacks, duckdb.Error."""
    kinds = [(name, str(kind)) for name, kind in zip(answer.columns, answer.types, strict=True)]
    intervals = [name for name, kind in kinds if kind == "INTERVAL"]
    for name, kind in kinds:  # nested intervals panic in Polars, which is no error
        if name not in intervals and _INTERVAL.search(kind):
            raise InputError(
                f"no table can hold column {name!r} of type {kind}: expected intervals in columns "
                "of their own; unnest it"
            )
    try:
        if not intervals:
            return answer.pl()
        # Polars has durations in place of DuckDB's intervals.
        quoted = ['"' + name.replace('"', '""') + '"' for name in intervals]
        casts = ", ".join(f"epoch_us({name}) as {name}" for name in quoted)
        frame = answer.project(f"* replace ({casts})").pl()
        return frame.with_columns(pl.col(intervals).cast(pl.Duration("us")))
    except (pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise InputError(f"no table can hold the answer: {error}; cast its columns") from None

"""SQL over runs: DuckDB's answer to one query, with a view for each table that it names.

Neither Polars, Arrow nor NumPy is imported for queries over local rollouts, evaluations and metrics
with an answer of plain types, so that `marin-rl sql` starts quickly. The other tables are frames
(`frames`), and so are answers with other types.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from marin_rl.analysis.database import (
    check_statements,
    connect_unsafe,
    explained,
    restricted_database,
)
from marin_rl.analysis.parts import Part, of_metrics, sealed, shards
from marin_rl.errors import InputError
from marin_rl.storage.run_records import read_record
from marin_rl.storage.runs import Run, runs_under
from marin_rl.storage.stores.forked_store import ForkedStore

if TYPE_CHECKING:
    import duckdb

Options = Mapping[str, Any]
Root = str | os.PathLike[str]
Runs = str | Sequence[str] | None

TABLES = ("rollouts", "batches", "dispositions", "metrics", "evals", "scores", "rewards")

# The type of `turns`, which files of earlier versions have fewer fields of. In DuckDB's words, for
# this module imports no Arrow.
TURNS_TYPE = (
    'STRUCT("role" VARCHAR, content VARCHAR, "start" INTEGER, "end" INTEGER, reward DOUBLE, '
    "tool_name VARCHAR, tool_call_id VARCHAR, inference_metadata STRUCT(model VARCHAR, "
    "weight_version INTEGER, temperature DOUBLE, top_p DOUBLE, top_k INTEGER, max_tokens INTEGER, "
    '"stop" VARCHAR[], seed BIGINT, request_id VARCHAR, finish_reason VARCHAR), '
    'tool_calls STRUCT(id VARCHAR, "name" VARCHAR, arguments VARCHAR)[], cut BOOLEAN, '
    "queue_s DOUBLE, prefill_s DOUBLE, decode_s DOUBLE, environment_s DOUBLE, "
    'rewards STRUCT("name" VARCHAR, "value" DOUBLE)[], malformed VARCHAR)[]'
)
# Columns that no file of an earlier version has, for runs that have only those.
_LATER = "select null::INTEGER[] as segment_lengths, null::DOUBLE as start_s where false"

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

_PATTERN = re.compile(r"[*?[]")  # DuckDB takes a path with one of these for a pattern

# Types whose Python values from DuckDB are those that Polars gives, by DuckDB's ids.
_PLAIN = frozenset(
    {f"{sign}{size}int" for sign in ("", "u") for size in ("tiny", "small", "", "big", "huge")}
    | {"integer", "uinteger", "boolean", "float", "double", "decimal", "varchar", "blob", "enum"}
    | {"NULL", "null"}
)
_NESTED = ("list", "struct", "map")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The rows of an answer, in the order of its columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def answer_rows(
    root: Root,
    run_id: Runs,
    query: str,
    storage_options: Options | None = None,
    *,
    unsafe: bool = False,
) -> Answer:
    """Return DuckDB's answer to `query` as Python's values. Raises as `scan.sql`."""
    with answering(root, run_id, query, storage_options, unsafe=unsafe) as answer:
        names = answer.columns
        # Of two columns of one name a frame renames the second.
        if len({name.lower() for name in names}) == len(names) and all(map(_plain, answer.types)):
            return Answer(columns=names, rows=answer.fetchall())
        from marin_rl.analysis.frames import as_frame

        frame = as_frame(answer)
        return Answer(columns=frame.columns, rows=frame.rows())


def tables(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> dict[str, dict[str, str]]:
    """Columns of each table that a query may name, with types in SQL. Raises as `scan.sql`."""
    described = _columns(open_runs(root, run_id, storage_options))
    metrics = answer_rows(root, run_id, "describe metrics", storage_options).rows
    return {name: {row[0]: row[1] for row in described.get(name, metrics)} for name in TABLES}


def _columns(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Names and types of the columns of tables that have a schema: of all but metrics."""
    import pyarrow as pa

    from marin_rl.analysis.table_schemas import SCHEMAS

    described = dict[str, list[Any]]()
    with _database(runs).cursor() as connection:
        for name, schema in SCHEMAS.items():
            # `empty_table` imports pandas
            stored = connection.from_arrow(pa.Table.from_batches([], schema))
            if name in ("rollouts", "evals"):
                stored = stored.project(f"*, {_DERIVED}")
            described[name] = list(zip(stored.columns, map(str, stored.types), strict=True))
    return described


@contextmanager
def answering(
    root: Root,
    run_id: Runs,
    query: str,
    storage_options: Options | None = None,
    *,
    unsafe: bool = False,
) -> Iterator["duckdb.DuckDBPyRelation"]:
    """Open DuckDB's answer to `query`, to be read inside the block. Raises as `scan.sql`."""
    import duckdb  # here, for it is large, and only SQL needs it

    runs = open_runs(root, run_id, storage_options)
    try:
        if unsafe:
            with connect_unsafe() as connection:
                yield _answer(connection, query, runs)
            return
        check_statements(query)
        with _database(runs).cursor() as connection:
            connection.begin()  # never committed: closing takes back what the query creates
            yield _answer(connection, query, runs)
    except duckdb.Error as error:
        raise InputError(f"DuckDB refuses the query: {explained(error)}") from None


def _database(runs: Sequence[Run]) -> "duckdb.DuckDBPyConnection":
    attempts = frozenset(_attempt(run) for run in runs)
    return restricted_database(os.getpid(), attempts, _folders(runs))


def open_runs(root: Root, run_id: Runs, storage_options: Options | None) -> list[Run]:
    """Open one run, several, or all below a root (None). Raises ObjectMissing."""
    place = os.fspath(root)
    if run_id is None:
        names: Sequence[str] = runs_under(place, storage_options)
    else:
        names = [run_id] if isinstance(run_id, str) else list(dict.fromkeys(run_id))
    return [Run.open(place, name, storage_options) for name in names]


def _answer(
    connection: "duckdb.DuckDBPyConnection", query: str, runs: Sequence[Run]
) -> "duckdb.DuckDBPyRelation":
    for name in TABLES:
        if re.search(rf"\b{name}\b", query, re.IGNORECASE):
            _create_view(connection, name, runs)
    answer = connection.sql(query)
    if answer is None:
        raise InputError(f"expected a query that returns rows, found {query!r}")
    return answer


def _plain(kind: Any) -> bool:
    """Return True for types of DuckDB whose values, or parts, are all of `_PLAIN`."""
    if kind.id in _NESTED:
        return all(_plain(child) for _, child in kind.children)
    return kind.id in _PLAIN


def _create_view(connection: "duckdb.DuckDBPyConnection", name: str, runs: Sequence[Run]) -> None:
    """Create a view: by DuckDB's own reader for local files of `_READ`, else over the frame."""
    if name in _READ:
        parts_of, reading = _READ[name]
        paths = [part.path for part in parts_of(runs)]
        # DuckDB cannot escape a pattern in a path that contains a backslash.
        if paths and all(path and not _PATTERN.search(path) for path in paths):
            connection.sql(f"create temp view {name} as {reading(paths)}")
            return
    from marin_rl.analysis.frames import VIEWS

    if name in ("rollouts", "evals"):
        connection.register(f"stored_{name}", VIEWS[name](runs))
        connection.sql(f"create temp view {name} as select *, {_DERIVED} from stored_{name}")
        return
    connection.register(name, VIEWS[name](runs))


def _rollouts_in(paths: Sequence[str | None]) -> str:
    """DuckDB's query over files of rollouts, of any version."""
    return (
        f"select *, {_DERIVED} from (select * replace (turns::{TURNS_TYPE} as turns) from ("
        f"{_files_in(paths)} union all by name {_LATER}))"
    )


def _files_in(paths: Sequence[str | None]) -> str:
    """DuckDB's query over files whose columns differ: by version, or by round as metrics do."""
    listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    # Reads every footer before the query starts.
    options = "union_by_name=true, hive_partitioning=false"
    return f"select * from read_parquet([{listed}], {options})"


# Tables that DuckDB reads itself where they are local: their files, and the query over these.
_READ: Mapping[
    str, tuple[Callable[[Sequence[Run]], list[Part]], Callable[[Sequence[str | None]], str]]
] = {
    "rollouts": (shards, _rollouts_in),
    "evals": (lambda runs: sealed(runs, "evals", ""), _rollouts_in),
    "metrics": (of_metrics, _files_in),
}


def _folders(runs: Sequence[Run]) -> frozenset[str]:
    """Local folders with what DuckDB reads itself, of these runs and of their ancestors."""
    stores = [run.folder for run in runs]
    for run in runs:
        if isinstance(run.store, ForkedStore):
            stores += [store for _, store in run.store.shared]
    folders = (store.local_path(name) for store in stores for name in _READ)
    return frozenset(str(folder) for folder in folders if folder is not None)


def _attempt(run: Run) -> str:
    """The identity of a run, other than that of a run that was started again under its name."""
    record = read_record(run.store)
    return "" if record is None else str(record["attempt"])

"""Runs as tables: Polars LazyFrames and DuckDB views over what their manifests name.

Only committed slots are read, so a scan of a running run is consistent. A scan takes one run,
several, or all below a root (run_id None). Every table has `run_id`, the run that wrote the row: of
a fork's shared rounds its ancestor, so that no row occurs twice when both are scanned. Arrays of
batches are lists, for the padded length differs from round to round.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from marin_rl.analysis.database import (
    check_statements,
    connect_unsafe,
    explained,
    restricted_database,
)
from marin_rl.analysis.parts import (
    Part,
    frame,
    of_metrics,
    owned_frame,
    placed_frame,
    sealed,
    united_frame,
)
from marin_rl.errors import InputError
from marin_rl.storage.run_records import read_record
from marin_rl.storage.runs import Run, runs_under
from marin_rl.storage.stores.forked_store import ForkedStore
from marin_rl.storage.tables.batches import BATCHES_PREFIX, DISPOSITIONS_PREFIX
from marin_rl.storage.tables.scores import SCORES_PREFIX
from schemas.batches import ARRAYS, DISPOSITIONS, batches_schema
from schemas.metrics import METRICS_IDENTITY
from schemas.migrations import ROLLOUTS as ROLLOUTS_LADDER
from schemas.rollouts import ROLLOUTS
from schemas.scores import SCORES

if TYPE_CHECKING:
    import duckdb

Options = Mapping[str, Any]
Root = str | os.PathLike[str]
Runs = str | Sequence[str] | None

_PATTERN = re.compile(r"[*?[]")  # DuckDB takes a path with one of these for a pattern
_INTERVAL = re.compile(r'(?<!")\bINTERVAL\b(?!")')  # the type, not a field of that name


def scan_rollouts(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The rollouts of all sealed rounds, one row each, in the order of runs, rounds and shards.

    Raises ObjectMissing for an unknown run, CorruptObject, NewerSchema.
    """
    return VIEWS["rollouts"](_runs(root, run_id, storage_options))


def scan_batches(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The rows of all committed batches, with their round. Raises as `scan_rollouts`."""
    return VIEWS["batches"](_runs(root, run_id, storage_options))


def scan_dispositions(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Dispositions of all rollouts, with the round of the batches. Raises as `scan_rollouts`."""
    return VIEWS["dispositions"](_runs(root, run_id, storage_options))


def scan_metrics(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Frame with a row per run and round and a column per metric. Raises as `scan_rollouts`."""
    return VIEWS["metrics"](_runs(root, run_id, storage_options))


def scan_evals(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Rollouts of all committed evaluations. Raises as `scan_rollouts`."""
    return VIEWS["evals"](_runs(root, run_id, storage_options))


def scan_scores(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Trainer's scores of every trained token: a row per segment, with parallel lists.

    Columns are those of `schemas.scores`; `run_id` and `rollout_id` join them with the rollouts,
    and `positions` with their tokens. Raises as `scan_rollouts`.
    """
    return VIEWS["scores"](_runs(root, run_id, storage_options))


def _shards(runs: Sequence[Run]) -> list[Part]:
    return sealed(runs, "rollouts", "shard-")


def _batches(runs: Sequence[Run]) -> pl.LazyFrame:
    return placed_frame(sealed(runs, "batches", BATCHES_PREFIX), _listed(batches_schema(1)), ARRAYS)


def _scores(runs: Sequence[Run]) -> pl.LazyFrame:
    return owned_frame(sealed(runs, "checkpoints", SCORES_PREFIX, behind=1), SCORES)


VIEWS: Mapping[str, Callable[[Sequence[Run]], pl.LazyFrame]] = {
    "rollouts": lambda runs: frame(_shards(runs), ROLLOUTS),
    "batches": _batches,
    "dispositions": lambda runs: placed_frame(
        sealed(runs, "batches", DISPOSITIONS_PREFIX), DISPOSITIONS
    ),
    "metrics": lambda runs: united_frame(of_metrics(runs), METRICS_IDENTITY),
    "evals": lambda runs: frame(sealed(runs, "evals", ""), ROLLOUTS),
    "scores": _scores,
}


def sql(
    root: Root,
    run_id: Runs,
    query: str,
    storage_options: Options | None = None,
    *,
    unsafe: bool = False,
) -> pl.DataFrame:
    """Return DuckDB's answer to `query`, which may name the views of the runs (`VIEWS`).

    Local rollouts are read by DuckDB itself, unless `*`, `?` or `[` is in their path, everything
    else through Polars. A query reads the files of these runs and nothing else, and writes none:
    DuckDB's access to files, extensions and settings is switched off but for the folders of
    rollouts, and statements that write files are refused. Tables that it creates in memory are
    dropped when it has answered. `unsafe` lifts all of that: the query may then read and write
    whatever the user may, in a database of its own.

    Intervals are durations, in which a month has 30 days. Raises InputError in DuckDB's own words
    when the query is wrong or refused, or when Polars has no such type as it answers with, and as
    `scan_rollouts`.
    """
    import duckdb  # here, for it is large, and only SQL needs it

    runs = _runs(root, run_id, storage_options)
    try:
        if unsafe:
            with connect_unsafe() as connection:
                return _answer(connection, query, runs)
        check_statements(query)
        attempts = frozenset(_attempt(run) for run in runs)
        database = restricted_database(os.getpid(), attempts, _rollout_folders(runs))
        with database.cursor() as connection:
            connection.begin()  # never committed: closing takes back what the query creates
            return _answer(connection, query, runs)
    except duckdb.Error as error:
        raise InputError(f"DuckDB refuses the query: {explained(error)}") from None
    except (pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise InputError(f"no table can hold the answer: {error}; cast its columns") from None


def _answer(
    connection: "duckdb.DuckDBPyConnection", query: str, runs: Sequence[Run]
) -> pl.DataFrame:
    for name in VIEWS:
        if re.search(rf"\b{name}\b", query, re.IGNORECASE):
            _create_view(connection, name, runs)
    answer = connection.sql(query)
    if answer is None:
        raise InputError(f"expected a query that returns rows, found {query!r}")
    return _as_frame(answer)


def _rollout_folders(runs: Sequence[Run]) -> frozenset[str]:
    """Local folders with rollouts of these runs and of their ancestors."""
    stores = [run.folder for run in runs]
    for run in runs:
        if isinstance(run.store, ForkedStore):
            stores += [store for _, store in run.store.shared]
    folders = (store.local_path("rollouts") for store in stores)
    return frozenset(str(folder) for folder in folders if folder is not None)


def _as_frame(answer: "duckdb.DuckDBPyRelation") -> pl.DataFrame:
    """The answer, with durations for DuckDB's intervals, a type that Polars lacks."""
    kinds = [(name, str(kind)) for name, kind in zip(answer.columns, answer.types, strict=True)]
    intervals = [name for name, kind in kinds if kind == "INTERVAL"]
    for name, kind in kinds:  # nested intervals panic in Polars, which is no error
        if name not in intervals and _INTERVAL.search(kind):
            raise InputError(
                f"no table can hold column {name!r} of type {kind}: expected intervals in columns "
                "of their own; unnest it"
            )
    if not intervals:
        return answer.pl()
    quoted = ['"' + name.replace('"', '""') + '"' for name in intervals]
    casts = ", ".join(f"epoch_us({name}) as {name}" for name in quoted)
    frame = answer.project(f"* replace ({casts})").pl()
    return frame.with_columns(pl.col(intervals).cast(pl.Duration("us")))


def _attempt(run: Run) -> str:
    """The identity of a run, other than that of a run that was started again under its name."""
    record = read_record(run.store)
    return "" if record is None else str(record["attempt"])


def _runs(root: Root, run_id: Runs, storage_options: Options | None) -> list[Run]:
    place = os.fspath(root)
    if run_id is None:
        names: Sequence[str] = runs_under(place, storage_options)
    else:
        names = [run_id] if isinstance(run_id, str) else list(dict.fromkeys(run_id))
    return [Run.open(place, name, storage_options) for name in names]


def _listed(schema: pa.Schema) -> pa.Schema:
    """Return the schema with lists instead of fixed-size lists."""
    return pa.schema(
        field.with_type(pa.list_(field.type.value_type)) if field.name in ARRAYS else field
        for field in schema
    )


def _create_view(connection: "duckdb.DuckDBPyConnection", name: str, runs: Sequence[Run]) -> None:
    """Create a view: by DuckDB's own reader for local rollouts, else over the frame."""
    if name == "rollouts":
        paths = [part.path for part in _shards(runs)]
        # DuckDB cannot escape a pattern in a path that contains a backslash.
        if paths and all(path and not _PATTERN.search(path) for path in paths):
            connection.sql(f"create temp view rollouts as {_reading(paths)}")
            return
    connection.register(name, VIEWS[name](runs))


def _reading(paths: Sequence[str | None]) -> str:
    """DuckDB's query over the files.

    Files of several versions need `union_by_name`, which reads every footer before the query
    starts; with one version alone it is left out.
    """
    listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    by_name = "true" if ROLLOUTS_LADDER.rungs else "false"
    return (
        f"select * from read_parquet([{listed}], union_by_name={by_name}, hive_partitioning=false)"
    )

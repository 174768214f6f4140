"""A run as tables: Polars LazyFrames and DuckDB views over what its manifests name.

Only committed slots are seen, so a scan of a running run is a consistent picture of some moment.
Local files are scanned where they lie; objects elsewhere are fetched when a query is run. Arrays of
batches are lists here, for the padded length differs from round to round.
"""

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from marin_rl.errors import InputError
from marin_rl.storage.batches import BATCHES_PREFIX, DISPOSITIONS_PREFIX
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.filesystem import ObjectStore
from marin_rl.storage.metrics import read_metrics
from marin_rl.storage.runs import Run, round_of
from schemas.batches import ARRAYS, DISPOSITIONS, batches_schema
from schemas.rollouts import ROLLOUTS

Options = Mapping[str, Any]
Columns = Mapping[str, Any]  # names to Polars types; beartype cannot digest pl.Schema

ROUND = pa.field("round", pa.int32(), nullable=False)


def scan_rollouts(
    root: str | os.PathLike[str], run_id: str, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The rollouts of all sealed rounds, one row each, in round and shard order.

    Raises ObjectMissing when there is no such run; CorruptObject, NewerSchema.
    """
    return _lazy(_sealed(_run(root, run_id, storage_options), "rollouts", "shard-"), ROLLOUTS)


def scan_batches(
    root: str | os.PathLike[str], run_id: str, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The rows of all committed batches, with their round. Raises as `scan_rollouts`."""
    parts = _sealed(_run(root, run_id, storage_options), "batches", BATCHES_PREFIX)
    frames = [_batch_frame(part) for part in parts]
    return pl.concat(frames) if frames else _empty(_listed(batches_schema(1)))


def scan_dispositions(
    root: str | os.PathLike[str], run_id: str, storage_options: Options | None = None
) -> pl.LazyFrame:
    """What became of every rollout, with the round that decided it. Raises as `scan_rollouts`."""
    parts = _sealed(_run(root, run_id, storage_options), "batches", DISPOSITIONS_PREFIX)
    frames = [_with_round(_lazy([part], DISPOSITIONS), part.round) for part in parts]
    return pl.concat(frames) if frames else _empty(DISPOSITIONS.insert(0, ROUND))


def scan_metrics(
    root: str | os.PathLike[str], run_id: str, storage_options: Options | None = None
) -> pl.LazyFrame:
    """One row per round, one column per metric. Raises as `scan_rollouts`."""
    return _from_arrow(read_metrics(_run(root, run_id, storage_options))).lazy()


def scan_evals(
    root: str | os.PathLike[str], run_id: str, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The held-out rollouts of all committed evaluations. Raises as `scan_rollouts`."""
    parts = _sealed(_run(root, run_id, storage_options), "evals", "")
    parts = [part for part in parts if part.key.endswith(".parquet")]
    frames = [_with_round(_lazy([part], _schema_of(part)), part.round) for part in parts]
    if not frames:
        return _empty(ROLLOUTS)
    return pl.concat(frames, how="diagonal_relaxed")


VIEWS = {
    "rollouts": scan_rollouts,
    "batches": scan_batches,
    "dispositions": scan_dispositions,
    "metrics": scan_metrics,
    "evals": scan_evals,
}


def sql(
    root: str | os.PathLike[str],
    run_id: str,
    query: str,
    storage_options: Options | None = None,
) -> pl.DataFrame:
    """DuckDB's answer to `query`, which may name the views of a run (`VIEWS`).

    Local rollouts are read by DuckDB itself, everything else through Polars. Raises InputError with
    DuckDB's own words when the query is wrong, and as `scan_rollouts`.
    """
    run = _run(root, run_id, storage_options)
    with duckdb.connect() as connection:
        for name, scan in VIEWS.items():
            if name in query.lower():
                _create_view(connection, name, run, scan(root, run_id, storage_options))
        try:
            answer = connection.sql(query)
            if answer is None:
                raise InputError(f"expected a query that returns rows, found {query!r}")
            return answer.pl()
        except duckdb.Error as error:
            raise InputError(f"DuckDB refuses the query: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One committed Parquet object of a round."""

    store: ObjectStore
    round: int
    key: str

    @property
    def path(self) -> str | None:
        """Where it lies on this machine, if it does."""
        path = self.store.local_path(self.key)
        return None if path is None else str(path)

    def open(self) -> str | io.BytesIO:
        """What readers take: the path, or the bytes."""
        return self.path or io.BytesIO(self.store.read(self.key))


def _run(root: str | os.PathLike[str], run_id: str, storage_options: Options | None) -> Run:
    return Run.open(os.fspath(root), run_id, storage_options)


def _sealed(run: Run, kind: str, prefix: str) -> list[_Part]:
    """The parts that committed manifests of a kind name, in round order."""
    rounds = {round_of(name): name for name in run.store.children(kind)}
    parts = []
    for round in sorted(number for number in rounds if number is not None):
        slot = f"{kind}/{rounds[round]}"
        found = read_manifest(run.store, slot)
        if found is not None:
            names = (part.name for part in found[0].parts if part.name.startswith(prefix))
            parts += [_Part(store=run.store, round=round, key=f"{slot}/{n}") for n in names]
    return parts


def _lazy(parts: list[_Part], schema: pa.Schema) -> pl.LazyFrame:
    """All parts as one frame with the columns of `schema`; those an old file lacks are null."""
    columns = _from_arrow(schema.empty_table()).schema
    paths = [part.path for part in parts]
    if not parts:
        return _empty(schema)
    if all(paths):
        return _scan([path for path in paths if path], columns)
    return register_io_source(
        lambda *pushed: _fetch(parts, columns, *pushed), schema=columns, is_pure=True
    )


def _scan(source: Any, columns: Columns) -> pl.LazyFrame:
    return pl.scan_parquet(
        source,
        schema=columns,
        missing_columns="insert",
        extra_columns="ignore",
        hive_partitioning=False,
    )


def _fetch(
    parts: list[_Part],
    columns: Columns,
    with_columns: list[str] | None,
    predicate: pl.Expr | None,
    n_rows: int | None,
    batch_size: int | None,
) -> Iterator[pl.DataFrame]:
    """Polars' contract of an io source: one part at a time, with what was pushed down applied."""
    del batch_size  # a part is a batch
    for part in parts:
        frame = _scan(part.open(), columns)
        if n_rows is not None:  # counts rows before the predicate
            first = frame.head(n_rows).collect()
            n_rows -= first.height
            frame = first.lazy()
        if predicate is not None:
            frame = frame.filter(predicate)
        if with_columns is not None:
            frame = frame.select(with_columns)
        yield frame.collect()
        if n_rows == 0:
            return


def _batch_frame(part: _Part) -> pl.LazyFrame:
    """A batch file with its arrays as lists."""
    frame = _with_round(_lazy([part], _schema_of(part)), part.round)
    return frame.with_columns(pl.col(name).arr.to_list() for name in ARRAYS)


def _with_round(frame: pl.LazyFrame, round: int) -> pl.LazyFrame:
    if "round" in frame.collect_schema():
        return frame
    return frame.select(pl.lit(round, pl.Int32).alias("round"), pl.all())


def _schema_of(part: _Part) -> pa.Schema:
    names = pl.read_parquet_schema(part.open())
    return pl.DataFrame(schema=names).to_arrow().schema


def _listed(schema: pa.Schema) -> pa.Schema:
    """The same with lists instead of fixed-size lists, and the round in front."""
    fields = [
        field.with_type(pa.list_(field.type.value_type)) if field.name in ARRAYS else field
        for field in schema
    ]
    return pa.schema([ROUND, *fields])


def _empty(schema: pa.Schema) -> pl.LazyFrame:
    return _from_arrow(schema.empty_table()).lazy()


def _from_arrow(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame), "a table gives a frame"
    return frame


def _create_view(
    connection: duckdb.DuckDBPyConnection, name: str, run: Run, frame: pl.LazyFrame
) -> None:
    paths = [part.path for part in _sealed(run, "rollouts", "shard-")] if name == "rollouts" else []
    if not paths or None in paths:
        connection.register(name, frame)
        return
    listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    connection.sql(
        f"create view {name} as select * from "
        f"read_parquet([{listed}], union_by_name=true, hive_partitioning=false)"
    )

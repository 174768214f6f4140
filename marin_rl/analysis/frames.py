"""The tables of runs as Polars LazyFrames, over the parts that `parts` lists.

Local files are scanned in place. Objects of a remote store are fetched when a query is run, those
of rounds that it filters out are not. Arrays of batches are lists, for the padded length differs
from round to round.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from marin_rl.analysis.parts import Part, of_metrics, sealed, shards, slots
from marin_rl.analysis.table_schemas import NAMED, PLACE, RUN, listed
from marin_rl.errors import CorruptObject, InputError
from marin_rl.storage.layout import BATCHES_PREFIX, DISPOSITIONS_PREFIX, SCORES_PREFIX
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.parquet import FETCHES_MAX
from marin_rl.storage.tables.rewards import name_of_table
from schemas.rollouts import ROLLOUTS
from schemas.tables import ARRAYS, DISPOSITIONS, METRICS_IDENTITY, REWARDS, SCORES, batches_schema

if TYPE_CHECKING:
    import duckdb

Columns = Mapping[str, Any]  # names to Polars types; beartype cannot digest pl.Schema
FrameOf = Callable[[Part], pl.LazyFrame]

_INTERVAL = re.compile(r'(?<!")\bINTERVAL\b(?!")')  # the type, not a field of that name

LOCAL_TOGETHER = 32  # local parts that are read concurrently where each is a frame of its own


def of_rewards(runs: Sequence[Run]) -> list[Part]:
    """The tables of `rescore`, each once, in order of runs, rounds, names and versions."""
    parts = [
        Part(store=run.store, run_id=run.player_of(round), round=round, key=f"{folder}/{name}")
        for run in runs
        for round, folder in ((n, f"rewards/{name}") for n, name in slots(run, "rewards"))
        for name in run.store.children(folder)
        if name_of_table(name) is not None
    ]
    return list({(part.run_id, part.key): part for part in parts}.values())


def frame(parts: Sequence[Part], schema: pa.Schema) -> pl.LazyFrame:
    """Read all parts as a frame with the columns of `schema`; null where a file lacks one."""
    columns = columns_of(schema)
    if not parts:
        return empty(columns)
    if all(part.path for part in parts):
        return scan([part.path for part in parts], columns)
    return fetched(parts, columns, lambda part: scan(part.open(), columns))


def placed_frame(
    parts: Sequence[Part], own: Sequence[pa.Field], schema: pa.Schema, arrays: Sequence[str] = ()
) -> pl.LazyFrame:
    """`frame` for files without the columns `own`, which their places say, and which come first.

    `arrays` are columns of fixed-size lists, which become lists.
    """
    inside, columns = columns_of(schema), columns_of(pa.schema([*own, *schema]))
    if not parts:
        return empty(columns)

    def read(part: Part) -> pl.LazyFrame:
        if arrays:
            plain = (pl.col(name).arr.to_list() for name in arrays)
            rows = _scan(part.open()).with_columns(plain)
        else:
            rows = scan(part.open(), inside)
        name, version = name_of_table(part.key) or ("", 0)
        values = {"run_id": part.run_id, "round": part.round, "name": name, "version": version}
        place = [pl.lit(values[f.name], columns[f.name]).alias(f.name) for f in own]
        return rows.select(*place, *inside)

    return fetched(parts, columns, read)


def owned_frame(parts: Sequence[Part], schema: pa.Schema) -> pl.LazyFrame:
    """`placed_frame` for files without `run_id` alone: local ones of a run are scanned together."""
    if not parts or not all(part.path for part in parts):
        return placed_frame(parts, (RUN,), schema)
    inside = columns_of(schema)
    return pl.concat(
        scan([part.path for part in of_run], inside).select(
            pl.lit(run_id, pl.String).alias("run_id"), pl.all()
        )
        for run_id, of_run in groupby(parts, key=lambda part: part.run_id)
    )


def united_frame(parts: Sequence[Part], first: pa.Schema) -> pl.LazyFrame:
    """The columns of `first`, then those of all parts, in order of appearance.

    Footers are read at once, and remote objects whole, for these parts are small. Raises
    CorruptObject.
    """
    if not parts:
        return empty(columns_of(first))
    local = all(part.path for part in parts)
    if local:
        opened: list[Any] = [part.path for part in parts]
    else:
        with ThreadPoolExecutor(FETCHES_MAX) as pool:
            opened = list(pool.map(Part.open, parts))
    columns = dict(columns_of(first))
    for part, source in zip(parts, opened, strict=True):
        columns |= _footer(part, source)
    return scan(opened, columns)


def _footer(part: Part, source: Any) -> Columns:
    try:
        return _scan(source).collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        url = part.store.url_of(part.key)
        raise CorruptObject(f"{url} is not a readable Parquet file: {error}") from None


def scan(source: Any, columns: Columns) -> pl.LazyFrame:
    """Scan Parquet files of any version of a schema."""
    return _scan(
        source,
        schema=dict(columns),
        missing_columns="insert",
        extra_columns="ignore",
        cast_options=pl.ScanCastOptions(missing_struct_fields="insert"),
    )


def _scan(source: Any, **options: Any) -> pl.LazyFrame:
    """Scan these files alone: folder names are neither patterns nor Hive partitions."""
    return pl.scan_parquet(source, glob=False, hive_partitioning=False, **options)


def fetched(parts: Sequence[Part], columns: Columns, frame_of: FrameOf) -> pl.LazyFrame:
    """A frame that a query reads part by part, by `frame_of`, and only what it needs."""
    return register_io_source(partial(_fetch, parts, frame_of), schema=dict(columns), is_pure=True)


def _fetch(
    parts: Sequence[Part],
    frame_of: FrameOf,
    with_columns: list[str] | None,
    predicate: pl.Expr | None,
    n_rows: int | None,
    batch_size: int | None,
) -> Iterator[pl.DataFrame]:
    """Read a few parts at a time, and apply what Polars pushes down (its io source protocol)."""
    del batch_size  # a part is a batch
    if predicate is not None and n_rows is None:
        parts = [part for part in parts if _may_hold(part, predicate)]
    left, count = iter(parts), LOCAL_TOGETHER if all(part.path for part in parts) else 1
    while together := list(islice(left, count)):
        rows = pl.concat(frame_of(part) for part in together)
        if n_rows is not None:  # counts rows before the predicate
            first = rows.head(n_rows).collect()
            n_rows -= first.height
            rows = first.lazy()
        if predicate is not None:
            rows = rows.filter(predicate)
        if with_columns is not None:
            rows = rows.select(with_columns)
        yield rows.collect()
        if n_rows == 0:
            return


def _may_hold(part: Part, predicate: pl.Expr) -> bool:
    """Return False where a condition on the round alone excludes the part."""
    place = pl.DataFrame({"round": [part.round]}, schema={"round": pl.Int32})
    alone = [term for term in _terms(predicate) if set(term.meta.root_names()) == {"round"}]
    return place.filter(*alone).height > 0 if alone else True


def _terms(predicate: pl.Expr) -> list[pl.Expr]:
    """The conditions that a predicate joins by `and`, or the predicate itself."""
    inputs = predicate.meta.pop()
    for first, second in (inputs, inputs[::-1]) if len(inputs) == 2 else ():
        if predicate.meta.eq(first & second):
            return [*_terms(first), *_terms(second)]
    return [predicate]


def columns_of(schema: pa.Schema) -> Columns:
    """Polars' types of Arrow's fields."""
    frame = pl.from_arrow(pa.Table.from_batches([], schema))  # `empty_table` imports pandas
    assert isinstance(frame, pl.DataFrame), "a table gives a frame"
    return frame.schema


def empty(columns: Columns) -> pl.LazyFrame:
    """Return an empty frame."""
    return pl.DataFrame(schema=dict(columns)).lazy()


VIEWS: Mapping[str, Callable[[Sequence[Run]], pl.LazyFrame]] = {
    "rollouts": lambda runs: frame(shards(runs), ROLLOUTS),
    "batches": lambda runs: placed_frame(
        sealed(runs, "batches", BATCHES_PREFIX), PLACE, listed(batches_schema(1)), ARRAYS
    ),
    "dispositions": lambda runs: placed_frame(
        sealed(runs, "batches", DISPOSITIONS_PREFIX), PLACE, DISPOSITIONS
    ),
    "metrics": lambda runs: united_frame(of_metrics(runs), METRICS_IDENTITY),
    "evals": lambda runs: frame(sealed(runs, "evals", ""), ROLLOUTS),
    "scores": lambda runs: owned_frame(
        sealed(runs, "checkpoints", SCORES_PREFIX, behind=1), SCORES
    ),
    "rewards": lambda runs: placed_frame(of_rewards(runs), NAMED, REWARDS),
}


def as_frame(answer: "duckdb.DuckDBPyRelation") -> pl.DataFrame:
    """The answer as a frame. Raises InputError for types that Polars lacks, duckdb.Error."""
    try:
        return _with_durations(answer)
    except (pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise InputError(f"no table can hold the answer: {error}; cast its columns") from None


def _with_durations(answer: "duckdb.DuckDBPyRelation") -> pl.DataFrame:
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

"""Committed Parquet objects of runs, and LazyFrames over them.

A part belongs to the run that wrote it: rounds that a fork shares are its ancestor's, so a part of
several runs is there once. Local files are scanned in place. Objects of a remote store are fetched
when a query is run, those of rounds that it filters out are not.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from marin_rl.errors import CorruptObject
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, round_of
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.local import checked_file
from marin_rl.storage.tables.parquet import FETCHES_MAX

Columns = Mapping[str, Any]  # names to Polars types; beartype cannot digest pl.Schema
FrameOf = Callable[["Part", Columns], pl.LazyFrame]

LOCAL_TOGETHER = 32  # local parts that are read concurrently where each is a frame of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Committed Parquet object, the run that wrote it, and the round of its rows."""

    store: ObjectStore
    run_id: str
    round: int
    key: str

    @property
    def path(self) -> str | None:
        """Path on this machine, or None. Raises CorruptObject, ObjectMissing."""
        path = self.store.local_path(self.key)
        return None if path is None else str(checked_file(path, self.key))

    def open(self) -> str | io.BytesIO:
        """Argument for readers: the path, or the bytes."""
        return self.path or io.BytesIO(self.store.read(self.key))


def sealed(runs: Sequence[Run], kind: str, prefix: str, *, behind: int = 0) -> list[Part]:
    """The parts that committed manifests of a kind name, each once, in order of runs and rounds.

    The rows of a slot are of `behind` rounds before the slot's own: scores lie in the checkpoint
    that their round ended in.
    """
    seen, parts = set[tuple[str, str]](), []
    for run in runs:
        for number, name in _slots(run, kind):
            round, slot = number - behind, f"{kind}/{name}"
            owner = run.player_of(round)
            if round < 0 or (owner, slot) in seen:
                continue
            seen.add((owner, slot))
            manifest = read_manifest(run.store, slot)
            names = [part.name for part in manifest[0].parts] if manifest else []
            parts += [
                Part(store=run.store, run_id=owner, round=round, key=f"{slot}/{name}")
                for name in names
                if name.startswith(prefix) and name.endswith(".parquet")
            ]
    return parts


def of_metrics(runs: Sequence[Run]) -> list[Part]:
    """The metrics of all closed rounds, each once, in order of runs and rounds."""
    parts = [
        Part(store=run.store, run_id=run.player_of(round), round=round, key=f"metrics/{name}")
        for run in runs
        for round, name in _slots(run, "metrics")
    ]
    return list({(part.run_id, part.key): part for part in parts}.values())


def _slots(run: Run, kind: str) -> list[tuple[int, str]]:
    rounds = {round_of(name): name for name in run.store.children(kind)}
    return sorted((round, name) for round, name in rounds.items() if round is not None)


def frame(parts: Sequence[Part], schema: pa.Schema) -> pl.LazyFrame:
    """Read all parts as a frame with the columns of `schema`; null where a file lacks one."""
    columns = columns_of(schema)
    if not parts:
        return empty(columns)
    if all(part.path for part in parts):
        return scan([part.path for part in parts], columns)
    return fetched(parts, columns, lambda part, columns: scan(part.open(), columns))


def owned_frame(parts: Sequence[Part], schema: pa.Schema) -> pl.LazyFrame:
    """`frame` for files without `run_id`, which is added first: the run that wrote them."""
    inside, columns = columns_of(schema), {"run_id": pl.String, **columns_of(schema)}
    if not parts:
        return empty(columns)
    if not all(part.path for part in parts):
        own = lambda part, _: scan(part.open(), inside).select(_literal(part.run_id), pl.all())
        return fetched(parts, columns, own)
    owned = groupby(parts, key=lambda part: part.run_id)
    return pl.concat(
        scan([part.path for part in own], inside).select(_literal(owner), pl.all())
        for owner, own in owned
    )


def placed_frame(
    parts: Sequence[Part], schema: pa.Schema, listed: Sequence[str] = ()
) -> pl.LazyFrame:
    """`frame` for files without `run_id` and `round`, which are added first.

    `listed` are columns of fixed-size lists, which become lists.
    """
    inside = columns_of(schema)
    columns = {"run_id": pl.String, "round": pl.Int32, **inside}
    if not parts:
        return empty(columns)

    def read(part: Part, _: Columns) -> pl.LazyFrame:
        if not listed:
            rows = scan(part.open(), inside)
        else:
            plain = (pl.col(name).arr.to_list() for name in listed)
            rows = _scan(part.open()).with_columns(plain)
        round = pl.lit(part.round, pl.Int32).alias("round")
        return rows.select(_literal(part.run_id), round, *inside)

    return fetched(parts, columns, read)


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
    return _scan(source, schema=dict(columns), missing_columns="insert", extra_columns="ignore")


def _scan(source: Any, **options: Any) -> pl.LazyFrame:
    """Scan these files alone: folder names are neither patterns nor Hive partitions."""
    return pl.scan_parquet(source, glob=False, hive_partitioning=False, **options)


def fetched(parts: Sequence[Part], columns: Columns, frame_of: FrameOf) -> pl.LazyFrame:
    """A frame that a query reads part by part, by `frame_of`, and only what it needs."""
    return register_io_source(
        partial(_fetch, parts, columns, frame_of), schema=dict(columns), is_pure=True
    )


def _fetch(
    parts: Sequence[Part],
    columns: Columns,
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
    left = iter(parts)
    while together := list(islice(left, _together(parts))):
        rows = pl.concat(frame_of(part, columns) for part in together)
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


def _together(parts: Sequence[Part]) -> int:
    return LOCAL_TOGETHER if all(part.path for part in parts) else 1


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


def _literal(run_id: str) -> pl.Expr:
    return pl.lit(run_id, pl.String).alias("run_id")


def columns_of(schema: pa.Schema) -> Columns:
    """Polars' types of Arrow's fields."""
    frame = pl.from_arrow(schema.empty_table())
    assert isinstance(frame, pl.DataFrame), "a table gives a frame"
    return frame.schema


def empty(columns: Columns) -> pl.LazyFrame:
    """Return an empty frame."""
    return pl.DataFrame(schema=dict(columns)).lazy()

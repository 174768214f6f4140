"""Runs as tables: Polars LazyFrames over the Parquet objects that their manifests name.

Only committed slots are read, so a scan of a running run is consistent. Every table has `run_id`,
the run that wrote the row: of a fork's shared rounds its ancestor, so that no row occurs twice.
Local files are scanned in place; of a remote store, rounds that a query filters out are not
fetched. Arrays of batches are lists, for padded lengths differ. Raises ObjectMissing for an unknown
run, CorruptObject, NewerSchema.
"""

import io
import os
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
from marin_rl.rollouts.forest import COUNTS, TOKENS, calls_of
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.layout import BATCHES_PREFIX, DISPOSITIONS_PREFIX, SCORES_PREFIX
from marin_rl.storage.runs import Run, pairs_slot, round_of, runs_under
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.local import checked_file
from marin_rl.storage.tables.parquet import FETCHES_MAX
from marin_rl.storage.tables.rewards import name_of_table
from schemas import tables

LOCAL_TOGETHER = 32  # local parts that are read concurrently where each is a frame of its own

Options = Mapping[str, Any]
Root = str | os.PathLike[str]
Runs = str | Sequence[str] | None
Columns = Mapping[str, Any]  # names to Polars types; beartype cannot digest pl.Schema

RUN = pa.field("run_id", pa.string())
PLACE = (RUN, pa.field("round", pa.int32()))
WAITS = ("queue_s", "prefill_s", "decode_s", "environment_s")
NAMED = (*PLACE, pa.field("name", pa.string()), pa.field("version", pa.int32()))


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
        return self.path or io.BytesIO(self.store.read(self.key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: its parts in order of runs and rounds, and its columns.

    `place` are columns that files lack, because their place says them; they come first. `schema`
    has the columns of the files; where they `differ`, the columns that all files have; where the
    table is `derived` from rollouts, its own.
    """

    parts: Callable[[Sequence[Run]], list[Part]]
    schema: pa.Schema
    place: tuple[pa.Field, ...] = ()
    differ: bool = False
    derived: Callable[[pl.LazyFrame], pl.LazyFrame] | None = None

    @property
    def columns(self) -> pa.Schema:
        """All columns, with lists in place of fixed-size lists."""
        lists = (
            field.with_type(pa.list_(field.type.value_type)) if _is_fixed(field) else field
            for field in self.schema
        )
        return pa.schema([*self.place, *lists])

    def frame(self, runs: Sequence[Run]) -> pl.LazyFrame:
        """All rows; null where a file of an earlier version lacks a column."""
        parts, columns = self.parts(runs), columns_of(self.columns)
        if not parts:
            return pl.DataFrame(schema=dict(columns)).lazy()
        local = all(part.path for part in parts)
        if self.differ:
            opened: list[Any] = [part.path for part in parts]
            if not local:
                with ThreadPoolExecutor(FETCHES_MAX) as pool:
                    opened = list(pool.map(Part.open, parts))
            columns = dict(columns)
            for part, source in zip(parts, opened, strict=True):
                try:
                    columns |= _scan(source).collect_schema()
                except (pl.exceptions.PolarsError, OSError) as error:
                    url = part.store.url_of(part.key)
                    raise CorruptObject(f"{url} is not a readable Parquet file: {error}") from None
            return scan(opened, columns)
        if local and self.derived is None and set(self.place) <= {RUN}:
            # Files of a run are scanned together.
            by_run = [[*group] for _, group in groupby(parts, key=lambda part: part.run_id)]
            stored = columns_of(self.schema)
            frames = (scan([part.path for part in own], stored) for own in by_run)
            return pl.concat(map(self._placed, frames, (own[0] for own in by_run)))
        fetch = partial(_fetch, parts, self._read)
        return register_io_source(fetch, schema=dict(columns), is_pure=True)

    def _read(self, part: Part) -> pl.LazyFrame:
        if self.derived is not None:
            return self.derived(scan(part.open(), columns_of(tables.ROLLOUTS)))
        arrays = [field.name for field in self.schema if _is_fixed(field)]
        if arrays:
            rows, kinds = _scan(part.open()), columns_of(self.columns)
            inside = rows.collect_schema().names()
            lists = (
                pl.col(name).arr.to_list()
                if name in inside
                else pl.lit(None, kinds[name]).alias(name)
                for name in arrays
            )
            return self._placed(rows.with_columns(lists), part)
        return self._placed(scan(part.open(), columns_of(self.schema)), part)

    def _placed(self, rows: pl.LazyFrame, part: Part) -> pl.LazyFrame:
        name, version = name_of_table(part.key) or ("", 0)
        values = {"run_id": part.run_id, "round": part.round, "name": name, "version": version}
        kinds = columns_of(pa.schema(self.place))
        place = [pl.lit(values[name], kind).alias(name) for name, kind in kinds.items()]
        return rows.select(*place, *self.schema.names)


def _is_fixed(field: pa.Field) -> bool:
    return pa.types.is_fixed_size_list(field.type)


def of_manifests(kind: str, prefix: str, behind: int, runs: Sequence[Run]) -> list[Part]:
    """The parts that committed manifests of a kind name, each once.

    The rows of a slot are of `behind` rounds before the slot's own: scores lie in the checkpoint
    that their round ended in.
    """
    seen, parts = set[tuple[str, str]](), []
    for run in runs:
        for number, name in _rounds(run, kind):
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
    return _each_once(
        Part(store=run.store, run_id=run.player_of(round), round=round, key=f"metrics/{name}")
        for run in runs
        for round, name in _rounds(run, "metrics")
    )


def of_rewards(runs: Sequence[Run]) -> list[Part]:
    """The tables of `rescore`, each once, in order of names and versions within a round."""
    return _each_once(
        Part(store=run.store, run_id=run.player_of(round), round=round, key=f"{folder}/{name}")
        for run in runs
        for round, folder in ((n, f"rewards/{name}") for n, name in _rounds(run, "rewards"))
        for name in run.store.children(folder)
        if name_of_table(name) is not None
    )


def of_pairs(runs: Sequence[Run]) -> list[Part]:
    slot = pairs_slot()
    manifests = [(run, read_manifest(run.store, slot)) for run in runs]
    return _each_once(
        Part(store=run.store, run_id=run.owner_of(slot), round=0, key=f"{slot}/{part.name}")
        for run, committed in manifests
        for part in (committed[0].parts if committed else ())
    )


def _rounds(run: Run, kind: str) -> list[tuple[int, str]]:
    rounds = {round_of(name): name for name in run.store.children(kind)}
    return sorted((round, name) for round, name in rounds.items() if round is not None)


def _each_once(parts: Iterator[Part]) -> list[Part]:
    return list({(part.run_id, part.key): part for part in parts}.values())


def scan(source: Any, columns: Columns) -> pl.LazyFrame:
    return _scan(
        source,
        schema=dict(columns),
        missing_columns="insert",
        extra_columns="ignore",
        cast_options=pl.ScanCastOptions(missing_struct_fields="insert"),
    )


def _scan(source: Any, **options: Any) -> pl.LazyFrame:
    # These files alone: folder names are neither patterns nor Hive partitions.
    return pl.scan_parquet(source, glob=False, hive_partitioning=False, **options)


def _fetch(
    parts: Sequence[Part],
    frame_of: Callable[[Part], pl.LazyFrame],
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
    return pl.DataFrame(pa.Table.from_batches([], schema)).schema  # `empty_table` imports pandas


# A row per call of the model, so that agents' rollouts are seen as forests (`rollouts.forest`).
CALLS = pa.schema(
    [
        *PLACE,
        pa.field("rollout_id", pa.string()),
        *(pa.field(name, pa.int32()) for name in ("call", "segment", "parent")),
        pa.field("reason", pa.string()),
        pa.field("tools", pa.list_(pa.string())),
        *(pa.field(name, pa.int64()) for name in COUNTS),
        pa.field("finish_reason", pa.string()),
        *(pa.field(name, pa.float64()) for name in WAITS),
    ]
)


def calls_frame(rollouts: pl.LazyFrame) -> pl.LazyFrame:
    names, calls = ("run_id", "round", "rollout_id"), list[dict[str, Any]]()
    rows = rollouts.select(*names, "turns", "segment_lengths", *TOKENS).collect()
    tokens = {name: rows[name] for name in TOKENS}
    for number, row in enumerate(rows.drop(*tokens).iter_rows(named=True)):
        arrays = {name: column[number].to_numpy() for name, column in tokens.items()}
        turns = row["turns"]
        for call in calls_of(row | arrays, turns):
            turn = turns[call["call"] - 1]
            waits = {name: turn[name] for name in WAITS}
            finish = {"finish_reason": turn["inference_metadata"]["finish_reason"]}
            calls.append({name: row[name] for name in names} | call | finish | waits)
    return pl.LazyFrame(calls, schema=dict(columns_of(CALLS)))


TABLES: Mapping[str, Table] = {
    "rollouts": Table(parts=partial(of_manifests, "rollouts", "shard-", 0), schema=tables.ROLLOUTS),
    "batches": Table(
        parts=partial(of_manifests, "batches", BATCHES_PREFIX, 0),
        schema=tables.batches_schema(1, distilled=True),
        place=PLACE,
    ),
    "dispositions": Table(
        parts=partial(of_manifests, "batches", DISPOSITIONS_PREFIX, 0),
        schema=tables.DISPOSITIONS,
        place=PLACE,
    ),
    "metrics": Table(parts=of_metrics, schema=tables.METRICS_IDENTITY, differ=True),
    "evals": Table(parts=partial(of_manifests, "evals", "", 0), schema=tables.ROLLOUTS),
    "scores": Table(
        parts=partial(of_manifests, "checkpoints", SCORES_PREFIX, 1),
        schema=tables.SCORES,
        place=(RUN,),
    ),
    "rewards": Table(parts=of_rewards, schema=tables.REWARDS, place=NAMED),
    "pairs": Table(parts=of_pairs, schema=tables.PAIRS, place=(RUN,)),
    "calls": Table(
        parts=partial(of_manifests, "rollouts", "shard-", 0), schema=CALLS, derived=calls_frame
    ),
}


def open_runs(root: Root, run_id: Runs, storage_options: Options | None) -> list[Run]:
    """Open one run, several, or all below a root (None). Raises ObjectMissing."""
    place = os.fspath(root)
    if run_id is None:
        names: Sequence[str] = runs_under(place, storage_options)
    else:
        names = [run_id] if isinstance(run_id, str) else list(dict.fromkeys(run_id))
    return [Run.open(place, name, storage_options) for name in names]


def _scan_table(
    name: str, root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    return TABLES[name].frame(open_runs(root, run_id, storage_options))


scan_rollouts = partial(_scan_table, "rollouts")  # of all sealed rounds
scan_evals = partial(_scan_table, "evals")  # rollouts of all committed evaluations
scan_batches = partial(_scan_table, "batches")
scan_dispositions = partial(_scan_table, "dispositions")  # `round` is that of the batches
scan_metrics = partial(_scan_table, "metrics")  # a row per run and round, a column per metric
# A row per trained segment; `rollout_id` and `positions` join them with rollouts and tokens.
scan_scores = partial(_scan_table, "scores")
scan_rewards = partial(_scan_table, "rewards")  # of `rescore`, told apart by `name` and `version`

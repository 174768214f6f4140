"""Runs as tables: Polars LazyFrames and DuckDB views over what their manifests name.

Only committed slots are read, so a scan of a running run is consistent. A scan takes one run,
several, or all below a root (run_id None). Every table has `run_id`, the run that wrote the row: of
a fork's shared rounds its ancestor, so that no row occurs twice when both are scanned. Arrays of
batches are lists, for the padded length differs from round to round.
"""

import polars as pl

from marin_rl.analysis.frames import VIEWS, as_frame
from marin_rl.analysis.query import Options, Root, Runs, answering, open_runs


def scan_rollouts(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The rollouts of all sealed rounds, one row each, in the order of runs, rounds and shards.

    Raises ObjectMissing for an unknown run, CorruptObject, NewerSchema.
    """
    return VIEWS["rollouts"](open_runs(root, run_id, storage_options))


def scan_batches(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The rows of all committed batches, with their round. Raises as `scan_rollouts`."""
    return VIEWS["batches"](open_runs(root, run_id, storage_options))


def scan_dispositions(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Dispositions of all rollouts, with the round of the batches. Raises as `scan_rollouts`."""
    return VIEWS["dispositions"](open_runs(root, run_id, storage_options))


def scan_metrics(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Frame with a row per run and round and a column per metric. Raises as `scan_rollouts`."""
    return VIEWS["metrics"](open_runs(root, run_id, storage_options))


def scan_evals(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Rollouts of all committed evaluations. Raises as `scan_rollouts`."""
    return VIEWS["evals"](open_runs(root, run_id, storage_options))


def scan_scores(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Trainer's scores of every trained token: a row per segment, with parallel lists.

    Columns are those of `schemas.tables`; `run_id` and `rollout_id` join them with the rollouts,
    and `positions` with their tokens. Raises as `scan_rollouts`.
    """
    return VIEWS["scores"](open_runs(root, run_id, storage_options))


def scan_rewards(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Rewards that `rescore` gave to rollouts, all tables; `name` and `version` tell them apart.

    `run_id` and `rollout_id` join them with the rollouts. Raises as `scan_rollouts`.
    """
    return VIEWS["rewards"](open_runs(root, run_id, storage_options))


def sql(
    root: Root,
    run_id: Runs,
    query: str,
    storage_options: Options | None = None,
    *,
    unsafe: bool = False,
) -> pl.DataFrame:
    """Return DuckDB's answer to `query`, which may name the runs' tables (`query.TABLES`).

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
    with answering(root, run_id, query, storage_options, unsafe=unsafe) as answer:
        return as_frame(answer)

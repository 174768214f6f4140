"""Runs as tables: Polars LazyFrames over what their manifests name.

Only committed slots are read, so a scan of a running run is consistent. A scan takes one run,
several, or all below a root (run_id None). Every table has `run_id`, the run that wrote the row: of
a fork's shared rounds its ancestor, so that no row occurs twice when both are scanned. Arrays of
batches are lists, for the padded length differs from round to round.

Scans raise ObjectMissing for an unknown run, CorruptObject and NewerSchema.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from marin_rl.analysis.tables import TABLES
from marin_rl.storage.runs import Run, runs_under

Options = Mapping[str, Any]
Root = str | os.PathLike[str]
Runs = str | Sequence[str] | None


def open_runs(root: Root, run_id: Runs, storage_options: Options | None) -> list[Run]:
    """Open one run, several, or all below a root (None). Raises ObjectMissing."""
    place = os.fspath(root)
    if run_id is None:
        names: Sequence[str] = runs_under(place, storage_options)
    else:
        names = [run_id] if isinstance(run_id, str) else list(dict.fromkeys(run_id))
    return [Run.open(place, name, storage_options) for name in names]


def scan_rollouts(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The rollouts of all sealed rounds, one row each, in the order of runs, rounds and shards."""
    return TABLES["rollouts"].frame(open_runs(root, run_id, storage_options))


def scan_batches(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """The rows of all committed batches, with their round."""
    return TABLES["batches"].frame(open_runs(root, run_id, storage_options))


def scan_dispositions(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Dispositions of all rollouts, with the round of the batches."""
    return TABLES["dispositions"].frame(open_runs(root, run_id, storage_options))


def scan_metrics(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Metrics: a row per run and round, a column per metric."""
    return TABLES["metrics"].frame(open_runs(root, run_id, storage_options))


def scan_evals(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Rollouts of all committed evaluations."""
    return TABLES["evals"].frame(open_runs(root, run_id, storage_options))


def scan_scores(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Trainer's scores of every trained token: a row per segment, with parallel lists.

    Columns are those of `schemas.tables`; `run_id` and `rollout_id` join them with the rollouts,
    and `positions` with their tokens.
    """
    return TABLES["scores"].frame(open_runs(root, run_id, storage_options))


def scan_rewards(
    root: Root, run_id: Runs = None, storage_options: Options | None = None
) -> pl.LazyFrame:
    """Rewards that `rescore` gave to rollouts, all tables; `name` and `version` tell them apart.

    `run_id` and `rollout_id` join them with the rollouts.
    """
    return TABLES["rewards"].frame(open_runs(root, run_id, storage_options))

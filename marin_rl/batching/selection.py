"""Selection of a round's groups among those that were sampled (`asynchrony.select`).

A pure function of the committed shards: groups that have a signal and pass the filter are taken by
number, or by the time at which they were finished, until the round has its number of them. Whether
further groups are to be sampled follows from the same function.

Axes: N rollouts of a round in shard order, P groups in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from marin_rl.batching.group_filters import SCORE, reason_of
from marin_rl.config import Config
from schemas.rollouts import UNFINISHED

SURPLUS = "surplus"  # reason of groups that pass and are not taken
FINISHED_AT, FINISH_REASON = "finished_at", "finish_reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Groups that a round takes, and those that it leaves: below the filter, or surplus."""

    taken_P: Bool[np.ndarray, " P"]
    failing_P: Bool[np.ndarray, " P"]
    surplus_P: Bool[np.ndarray, " P"]
    failing_reason: str


def columns_needed(config: Config) -> tuple[str, ...]:
    """Columns without tokens that a selection reads in addition to the scalar ones."""
    by_time = config.asynchrony is not None and config.asynchrony.select == "first_done"
    return (FINISHED_AT, FINISH_REASON) if by_time else ()


def unfinished(scalars: pa.Table) -> Bool[np.ndarray, " N"]:
    """Rollouts that were cancelled because enough groups of their shard were finished."""
    if FINISH_REASON not in scalars.column_names:
        return np.zeros(len(scalars), bool)
    reason_N = scalars[FINISH_REASON].to_numpy(zero_copy_only=False)
    return np.asarray(reason_N == UNFINISHED, bool)


def select_groups(
    scalars: pa.Table,
    group_N: Int64[np.ndarray, " N"],
    signal_P: Bool[np.ndarray, " P"],
    config: Config,
) -> Selection:
    """Take the first `groups_per_round` groups, in the configured order, of those that pass.

    `signal_P` are the groups that can be trained on. Ties are taken by number.
    """
    settings, groups = config.asynchrony, len(signal_P)
    assert settings is not None, "a round without the section takes all of its groups"
    score_P = np.zeros(groups)
    if SCORE in scalars.column_names:
        score_P[group_N] = scalars[SCORE].to_numpy(zero_copy_only=False)
    passing_P = signal_P & ~np.isnan(score_P)
    # lexsort's last key is its first criterion; the number of a group breaks ties.
    order_P = np.arange(groups)
    if settings.select == "first_done":
        order_P = np.lexsort((order_P, _finished(scalars, group_N, groups)))
    candidates = order_P[passing_P[order_P]]
    taken_P = np.zeros(groups, bool)
    taken_P[candidates[: config.rollouts.groups_per_round]] = True
    return Selection(
        taken_P=taken_P,
        failing_P=signal_P & np.isnan(score_P),
        surplus_P=passing_P & ~taken_P,
        failing_reason=reason_of(settings.group_filter or ""),
    )


def _finished(
    scalars: pa.Table, group_N: Int64[np.ndarray, " N"], groups: int
) -> Int64[np.ndarray, " P"]:
    """Times at which groups were finished: those of the last of their rollouts."""
    finished_P = np.zeros(groups, np.int64)
    times_N = scalars[FINISHED_AT].cast(pa.int64()).to_numpy(zero_copy_only=False)
    np.maximum.at(finished_P, group_N, times_N)
    return finished_P


def shards_missing(selected: int, shards: int, config: Config) -> Sequence[int]:
    """Numbers of the further shards to sample, where `shards` gave `selected` groups.

    As many as would give what is missing if groups went on as so far; one sample batch at most, and
    none once a round has its groups or was sampled `max_sample_batches` times.
    """
    per_batch = config.rollouts.shards_per_round
    missing = config.rollouts.groups_per_round - selected
    left = per_batch * config.sample_batches_max - shards
    if missing <= 0 or left <= 0:
        return ()
    # Rounded up; without any taken group there is no yield to go by, so a whole batch.
    wanted = -(-missing * shards // selected) if selected else per_batch
    return range(shards, shards + min(wanted, per_batch, left))

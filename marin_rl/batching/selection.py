"""Selection of a round's groups among those that were sampled (`asynchrony.over_sampling.select`).

A pure function of the committed shards: groups that have a signal and pass the filter
(`asynchrony.group_filter`) are taken by number, or by the time at which they were finished, until
the round has its number of them. Whether further groups are to be sampled follows from the same
function. A filter scores one group alone, as the shards are read: the rows of a group are adjacent
in one row group.

Axes: N rollouts of a round in shard order, P groups in the same order, G members of a group.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float64, Int64

from marin_rl.config import GROUP_FILTERS, AsynchronyConfig, Config
from marin_rl.errors import ConfigError, MarinRLError
from marin_rl.finite import fit_rewards
from marin_rl.storage.tables.rollouts import groups_of
from marin_rl.types import RolloutGroup
from marin_rl.user_code import load, parse_spec
from schemas.tables import ROLLOUTS

SURPLUS = "surplus"  # reason of groups that pass and are not taken
FINISHED_AT, FINISH_REASON = "finished_at", "finish_reason"
SCORE = "group_score"  # column of a table of rollouts: NaN where the group does not pass
LENGTHS_APART = 4  # of a reasonable length: times shorter or longer than the group's median
READ = ("group_id", "reward", "status", "n_completion_tokens", "token_ids", "loss_mask")

Row = Mapping[str, Any]
GroupScore = Callable[[Sequence[Row]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Taken groups, and groups left out as below the filter or as surplus."""

    taken_P: Bool[np.ndarray, " P"]
    failing_P: Bool[np.ndarray, " P"]
    surplus_P: Bool[np.ndarray, " P"]
    failing_reason: str


def columns_needed(config: Config) -> tuple[str, ...]:
    return (FINISHED_AT, FINISH_REASON) if config.ahead.select == "first_done" else ()


def select_groups(
    scalars: pa.Table,
    group_N: Int64[np.ndarray, " N"],
    signal_P: Bool[np.ndarray, " P"],
    config: Config,
) -> Selection:
    """Take the first `groups_per_round` groups, in the configured order, of those that pass.

    `signal_P` are the groups that can be trained on. Ties are taken by number.
    """
    settings, groups = config.ahead, len(signal_P)
    score_P = np.zeros(groups)
    if SCORE in scalars.column_names:
        score_P[group_N] = scalars[SCORE].to_numpy(zero_copy_only=False)
    passing_P = signal_P & ~np.isnan(score_P)
    # lexsort's last key is its first criterion; the number of a group breaks ties.
    order_P = np.arange(groups)
    if settings.select == "first_done":
        # A group is finished when the last of its rollouts is.
        finished_P = np.zeros(groups, np.int64)
        times_N = scalars[FINISHED_AT].cast(pa.int64()).to_numpy(zero_copy_only=False)
        np.maximum.at(finished_P, group_N, times_N)
        order_P = np.lexsort((order_P, finished_P))
    candidates = order_P[passing_P[order_P]]
    taken_P = np.zeros(groups, bool)
    taken_P[candidates[: config.rollouts.groups_per_round]] = True
    return Selection(
        taken_P=taken_P,
        failing_P=signal_P & np.isnan(score_P),
        surplus_P=passing_P & ~taken_P,
        failing_reason=reason_of(settings.group_filter.score if settings.group_filter else ""),
    )


def shards_missing(selected: int, shards: int, config: Config) -> Sequence[int]:
    """Numbers of the further shards to sample, where `shards` gave `selected` groups.

    As many as fill the round at the yield so far, one sample batch at most; none once a round has
    its groups or was sampled `dynamic_sampling` times.
    """
    per_batch = config.rollouts.shards_per_round
    missing = config.rollouts.groups_per_round - selected
    left = per_batch * config.sample_batches_max - shards
    if missing <= 0 or left <= 0:
        return ()
    # Rounded up; without any taken group there is no yield to go by, so a whole batch.
    wanted = -(-missing * shards // selected) if selected else per_batch
    return range(shards, shards + min(wanted, per_batch, left))


def columns_of(name: str) -> tuple[str, ...]:
    """Columns that a filter reads: all of them for a function of the user."""
    return READ if name in GROUP_FILTERS else tuple(ROLLOUTS.names)


def reason_of(name: str) -> str:
    """The reason of what a filter drops: its name, or that of the user's function."""
    spec = parse_spec(name)
    return name if spec is None else spec.name


def with_scores(table: pa.Table, settings: AsynchronyConfig, keep: Sequence[str]) -> pa.Table:
    """A table of rollouts with the column `group_score`; of the others, `keep` stay.

    Raises ConfigError where the user's function fails or returns no number.
    """
    assert settings.group_filter is not None, "rounds without a filter have no scores"
    name, least = settings.group_filter.score, settings.group_filter.min
    if name in GROUP_FILTERS:
        rows = table.select(list(READ)).to_pylist()
        parts = [list(part) for _, part in groupby(rows, key=lambda row: row["group_id"])]
        groups = [(len(part), _NAMED[name](part)) for part in parts]
    else:
        score = load(name, "group_filter")
        groups = [(len(each.rollouts), _own_score(name, score, each)) for each in groups_of(table)]
    least = GROUP_FILTERS.get(name, -np.inf) if least is None else least
    # A row group may be empty, where zip(*[]) has nothing to unpack.
    sizes, scores = zip(*groups, strict=True) if groups else ((), ())
    score_n = np.repeat(np.array(scores, np.float64), np.array(sizes, np.int64))
    # A comparison with NaN is false: a group without a score does not pass.
    passed_n = np.where(score_n >= (-np.inf if least is None else least), score_n, np.nan)
    return table.select(list(keep)).append_column(SCORE, pa.array(passed_n, pa.float64()))


def check_filter(name: str) -> str:
    """Load a filter, and report what it is. Raises InputError, ConfigError before anything runs."""
    if name in GROUP_FILTERS:
        return f"filter {name}"
    function = load(name, "group_filter")
    try:
        inspect.signature(function).bind("a group")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{_shown(name)}: expected a function of one group (RolloutGroup), found {error}"
        ) from None
    return f"filter {reason_of(name)}"


def _shown(name: str) -> str:
    spec = parse_spec(name)
    return f"asynchrony.group_filter {(spec.typed if spec else name)!r}"


def _own_score(name: str, function: Callable[[RolloutGroup], Any], group: RolloutGroup) -> float:
    try:
        score = function(group)
    except MarinRLError:
        raise
    except Exception as error:  # the user's own
        raise ConfigError(
            f"{_shown(name)} failed on {group.group_id}: {type(error).__name__}: {error}"
        ) from error
    # Only False itself: a score of 0 is a number that the minimum judges.
    if score is None or score is False:
        return np.nan
    if not isinstance(score, int | float | np.number | np.bool_):
        raise ConfigError(
            f"{_shown(name)} returned {score!r:.80} for {group.group_id}: expected a number, "
            "True to keep the group, or None or False to drop it"
        )
    return float(score)


def _rewards(group: Sequence[Row]) -> Float64[np.ndarray, " G"]:
    rewards = [row["reward"] for row in _valid(group) if row["reward"] is not None]
    return np.array([reward for reward in rewards if fit_rewards(reward)], np.float64)


def _valid(group: Sequence[Row]) -> list[Row]:
    return [row for row in group if row["status"] in ("complete", "truncated")]


def _reward_std(group: Sequence[Row]) -> float:
    rewards = _rewards(group)
    # max - min of equal rewards is exactly 0, which a standard deviation may not be.
    return float(rewards.std(ddof=1)) if len(rewards) > 1 and np.ptp(rewards) else np.nan


def _mean_reward(group: Sequence[Row]) -> float:
    rewards = _rewards(group)
    return float(rewards.mean()) if len(rewards) else np.nan


def _diversity(group: Sequence[Row]) -> float:
    """Share of different completions, by their sampled tokens; NaN where there are none."""
    sampled = {
        tuple(id for id, mask in zip(row["token_ids"], row["loss_mask"], strict=True) if mask)
        for row in _valid(group)
    }
    return len(sampled) / len(_valid(group)) if sampled else np.nan


def _reasonable_length(group: Sequence[Row]) -> float:
    """Share of members that ended by themselves, within a factor of 4 of the median length."""
    if not group:
        return np.nan
    ended = [row["n_completion_tokens"] for row in group if row["status"] == "complete"]
    median = float(np.median(ended)) if ended else 0.0
    low, high = median / LENGTHS_APART, median * LENGTHS_APART
    # Of all members: one that was cut off counts as unreasonable.
    return sum(low <= length <= high for length in ended) / len(group)


_NAMED: Mapping[str, GroupScore] = MappingProxyType(
    {
        "reward_std_nonzero": _reward_std,
        "min_reward": _mean_reward,
        "diversity": _diversity,
        "reasonable_length": _reasonable_length,
        "quality_and_diversity": lambda group: _mean_reward(group) * _diversity(group),
    }
)
assert set(_NAMED) == set(GROUP_FILTERS), "every filter that is configured has a score"

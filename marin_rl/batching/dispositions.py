"""Dispositions of the rollouts of a round, and the advantages of the kept ones.

Decided from the scalar columns alone, before any token is read. A rollout is a candidate in the
round it was generated in and in no other: it leaves that round consumed or dropped for a reason, so
it can be trained on at most once, unless a later round uses its group again (`reuse`), which then
plans it as its own. Staleness is the age of the policy that sampled it, above 0 when generation
runs ahead of training. Leaves out where kept rollouts lie in batches (plan.py).

Of the filters, the first that applies gives the reason, in this order: unfinished, failed, stale,
truncated, short group, no signal, not selected, greedy, overlong. What is dropped before the groups
are looked at is left out of its group's baseline too; what is overlong is in it and not trained on.

Axes: N rollouts of a round in shard order, P groups.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float64, Int, Int64

from marin_rl.batching.round_advantages import AdvantageChoice, group_statistics, round_advantages
from marin_rl.batching.selection import FINISH_REASON, SURPLUS, select_groups
from marin_rl.batching.turns import TurnAdvantages, Turns, turn_advantages
from marin_rl.config import Config, ObjectiveConfig
from marin_rl.errors import ConfigError
from marin_rl.finite import usable_rewards
from schemas.tables import UNFINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDecision:
    """Dispositions and advantages of the N rollouts of a round, in shard order.

    `reason_N` is "" for the kept, whose disposition is "consumed"; `advantage_N` is 0 for the
    others. `turns` has the advantages of turns where they have their own; `advantage_N` then is
    their mean over a rollout's tokens. `selected` is the number of groups that were taken where
    more may be sampled, else None.
    """

    disposition_N: np.ndarray
    reason_N: np.ndarray
    reward_N: Float64[np.ndarray, " N"]
    advantage_N: Float64[np.ndarray, " N"]
    group_N: Int64[np.ndarray, " N"]
    turns: TurnAdvantages | None
    selected: int | None

    @property
    def kept_N(self) -> Bool[np.ndarray, " N"]:
        return self.disposition_N == "consumed"


@dataclass(frozen=True, slots=True)
class _Drops:
    """Disposition and reason of each dropped rollout; "" while no filter has dropped it."""

    kind_N: np.ndarray
    reason_N: np.ndarray

    @property
    def left_N(self) -> Bool[np.ndarray, " N"]:
        return self.kind_N == ""

    def add(self, mask_N: np.ndarray, kind: str, reason: str | np.ndarray) -> None:
        """Drop the marked rollouts that no filter has dropped yet, in place."""
        # The first reason stays, so the order of calls decides (`decide_round`).
        newly_N = mask_N & self.left_N
        self.kind_N[newly_N] = kind
        self.reason_N[newly_N] = reason if isinstance(reason, str) else reason[newly_N]


def decide_round(scalars: pa.Table, config: Config, round: int) -> RoundDecision:
    """Decide, from the scalar columns of all rollouts of a round.

    Raises ConfigError for rewards that the advantage is not made for.
    """
    objective = config.objective
    choice = advantage_choice(objective)
    reward_N = _shaped_rewards(scalars, config)
    encoded = scalars["group_id"].combine_chunks().dictionary_encode()
    group_N, groups = encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)
    drops = _before_groups(scalars, reward_N, config, round)
    # NaN rather than a reward: what failed or is stale is in no mean that others are compared with.
    eligible_N = np.where(drops.left_N, reward_N, np.nan)
    greedy_N = _greedy(scalars, choice)
    # Counted after the drops above: of a group of four with three failures, one has no baseline.
    fewest = max(config.rollouts.group_size_min, choice.members_min)
    short_P = group_statistics(eligible_N, group_N, groups).count < fewest
    if greedy_N is not None:  # without the reward of its greedy member, remax has no baseline
        compared_P = np.bincount(group_N[greedy_N & np.isfinite(eligible_N)], minlength=groups)
        short_P |= compared_P == 0
    drops.add(short_P[group_N], "filtered", "short_group")
    # Short groups leave the statistics of the round too, which batch_std and whitening divide by.
    compared_N = np.where(short_P[group_N], np.nan, eligible_N)
    advantages_of = partial(_advantages, scalars, group_N, groups, objective)
    advantages = advantages_of(compared_N)
    # A KL or entropy term has a gradient where all rewards are equal: such groups are kept then.
    regularised = objective.regularised and not config.samples_on
    if config.filters.zero_signal and choice.within_groups and not regularised:
        spread_P = advantages.spread_P
        if objective.overlong == "soft_penalty":  # a long answer is no less right
            own_N = usable_rewards(numbers(scalars, "reward", np.float64))
            spread_P = advantages_of(np.where(np.isnan(compared_N), np.nan, own_N)).spread_P
        # Exactly 0, not nearly: max - min of equal rewards has no rounding.
        equal_N = spread_P[group_N] == 0.0
        drops.add(equal_N & ~_distilled(scalars, config), "filtered", "zero_signal")
    selected = None
    if config.ahead.selects_groups:
        taken_P = _select(scalars, drops, group_N, groups, config)
        # The round is what is taken: nothing else is in the statistics that scales divide by.
        advantages = advantages_of(np.where(taken_P[group_N], compared_N, np.nan))
        selected = int(taken_P.sum())
    if greedy_N is not None:
        drops.add(greedy_N, "filtered", "greedy")
    # Last, since its reward still counts in its group: overlong filtering masks the loss alone
    # (DAPO, arXiv:2503.14476, section 3.4).
    if objective.overlong == "mask":
        drops.add(statuses(scalars) == "truncated", "filtered", "overlong")
    return RoundDecision(
        disposition_N=np.where(drops.left_N, "consumed", drops.kind_N),
        reason_N=drops.reason_N,
        reward_N=reward_N,
        # Computed with late drops, which are in their group's baseline and not trained on.
        advantage_N=np.where(drops.left_N, advantages.advantage_N, 0.0),
        group_N=group_N,
        turns=advantages.turns,
        selected=selected,
    )


def _before_groups(
    scalars: pa.Table, reward_N: Float64[np.ndarray, " N"], config: Config, round: int
) -> _Drops:
    """Drop failed, stale, truncated and cancelled rollouts, whatever their group is."""
    status_N, sampled_N = statuses(scalars), numbers(scalars, "n_completion_tokens")
    drops = _Drops(*(np.full(len(reward_N), "", dtype=object) for _ in range(2)))
    if FINISH_REASON in scalars.column_names:
        ended_N = scalars[FINISH_REASON].to_numpy(zero_copy_only=False)
        drops.add(ended_N == UNFINISHED, "filtered", UNFINISHED)
    # A broken rollout may have tokens or none; its status says more than either reason does.
    broken_N = (status_N == "error") | (status_N == "aborted")
    failed_N = broken_N | ~np.isfinite(reward_N) | (sampled_N == 0)
    reason_N = np.where(sampled_N == 0, "no_tokens", "no_reward").astype(object)
    reason_N[broken_N] = status_N[broken_N]
    drops.add(failed_N, "failed", reason_N)
    # By the oldest version: weights may have been swapped in the middle of a completion.
    age_N = round - numbers(scalars, "policy_version_min")
    drops.add(age_N > config.staleness_rounds_max, "stale", "policy_age")
    if config.filters.truncated:
        drops.add(status_N == "truncated", "filtered", "truncated")
    return drops


def _select(
    scalars: pa.Table, drops: _Drops, group_N: Int64[np.ndarray, " N"], groups: int, config: Config
) -> np.ndarray:
    """Drop groups that the round does not take; return the mask of the taken ones, `[P]`."""
    # Groups of which some rollout is left.
    signal_P = np.bincount(group_N[drops.left_N], minlength=groups) > 0
    round_N = numbers(scalars, "round")
    # What a round uses again was chosen before, and is of an earlier round.
    again_P = np.bincount(group_N[round_N < round_N.max(initial=0)], minlength=groups) > 0
    selection = select_groups(scalars, group_N, signal_P & ~again_P, config)
    for mask_P, reason in (
        (selection.failing_P, selection.failing_reason),
        (selection.surplus_P, SURPLUS),
    ):
        drops.add(mask_P[group_N], "filtered", reason)
    return selection.taken_P | (signal_P & again_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundAdvantages:
    """Advantages of rollouts, of their turns where these have their own, and groups' spreads.

    A spread is 0 where nothing tells the members of a group apart.
    """

    advantage_N: Float64[np.ndarray, " N"]
    spread_P: Float64[np.ndarray, " P"]
    turns: TurnAdvantages | None = None


def _advantages(
    scalars: pa.Table,
    group_N: Int64[np.ndarray, " N"],
    groups: int,
    objective: ObjectiveConfig,
    reward_N: Float64[np.ndarray, " N"],
) -> _RoundAdvantages:
    choice, discount = advantage_choice(objective), objective.turn_discount
    parted = Turns.of(scalars) if looks_at_turns(objective) else None
    greedy_N = _greedy(scalars, choice)
    try:
        if parted is None or discount is None:
            tokens_N = None if parted is None else parted.trained_n
            of_group = reward_N, group_N, groups
            parts_NK = _parts(scalars) if "parts_GK" in choice.facts.inputs else None
            of_rollout = tokens_N, greedy_N, parts_NK
            advantage_N = round_advantages(*of_group, choice, *of_rollout)
            # Unequal rewards are worth the same to pass_at_k where each of `pass_k` members, or
            # none of them, has a success; equal ones may differ in their components.
            if "k" in choice.facts.inputs or parts_NK is not None:
                reward_N = round_advantages(*of_group, replace(choice, scale="none"), *of_rollout)
            spread_P = group_statistics(reward_N, group_N, groups).spread
            return _RoundAdvantages(advantage_N=advantage_N, spread_P=spread_P)
        by_turn = turn_advantages(parted, reward_N, group_N, groups, discount, choice)
    except ValueError as error:
        raise ConfigError(f"objective.advantage: {error}") from error
    return _RoundAdvantages(advantage_N=by_turn.mean_n, spread_P=by_turn.spread_P, turns=by_turn)


def advantage_choice(objective: ObjectiveConfig) -> AdvantageChoice:
    """The part of an objective that advantages depend on; what comes after KL is left to it."""
    return AdvantageChoice(
        estimator=objective.advantage,
        scale="none" if objective.whitens_tokens else objective.advantage_scale,
        pass_k=objective.pass_k,
        success_threshold=objective.success_threshold,
    )


def _shaped_rewards(scalars: pa.Table, config: Config) -> Float64[np.ndarray, " N"]:
    """The environment's rewards, less what the objective takes off for length."""
    reward_N = usable_rewards(numbers(scalars, "reward", np.float64))
    objective = config.objective
    if objective.overlong != "soft_penalty":
        return reward_N
    return reward_N - overlong_penalty(
        numbers(scalars, "n_completion_tokens"),
        config.sampling.max_tokens,
        objective.overlong_buffer,
        objective.overlong_penalty,
    )


def overlong_penalty(
    sampled_N: Int[np.ndarray, " N"], tokens_max: int, buffer: float, penalty: float
) -> Float64[np.ndarray, " N"]:
    """Penalty on the reward of a long completion.

    0 until the last `buffer` (a share) of `tokens_max` sampled tokens, then growing linearly to
    `penalty` at `tokens_max` (the soft punishment of DAPO, arXiv:2503.14476, eq. 13).
    """
    before = (1.0 - buffer) * tokens_max  # tokens that cost nothing
    return penalty * np.clip((sampled_N - before) / (buffer * tokens_max), 0.0, 1.0)


def _distilled(scalars: pa.Table, config: Config) -> Bool[np.ndarray, " N"]:
    """Rollouts with a signal of their own, whatever their rewards are: a teacher's."""
    settings = config.distillation
    if settings is None or settings.coefficient == 0:
        return np.zeros(scalars.num_rows, bool)
    return np.array([settings.covers(name) for name in scalars["environment"].to_pylist()], bool)


def _greedy(scalars: pa.Table, choice: AdvantageChoice) -> Bool[np.ndarray, " N"] | None:
    """The last member of each group, which `rollouts.greedy_baseline` has sampled greedily.

    None for an estimator that does not compare with it.
    """
    if "greedy_G" not in choice.facts.inputs:
        return None
    return numbers(scalars, "index_in_group") == numbers(scalars, "group_size") - 1


def _parts(scalars: pa.Table) -> Float64[np.ndarray, "2 N K"]:
    """Values and weights of the components of each reward, by name; NaN where it has none."""
    components_N = scalars["reward_components"].to_pylist()
    names = sorted({part["name"] for parts in components_N for part in parts})
    parts_NK = np.full((2, len(components_N), len(names)), np.nan)
    for place, parts in enumerate(components_N):
        for part in parts:
            parts_NK[:, place, names.index(part["name"])] = part["value"], part["weight"]
    return parts_NK


def statuses(scalars: pa.Table) -> np.ndarray:
    return scalars["status"].to_numpy(zero_copy_only=False)


def numbers(table: pa.Table, name: str, dtype: type = np.int64) -> np.ndarray:
    return table[name].to_numpy(zero_copy_only=False).astype(dtype)


def looks_at_turns(objective: ObjectiveConfig) -> bool:
    """True if advantages depend on where a rollout's trained tokens and rewards are."""
    return objective.turn_discount is not None or advantage_choice(objective).needs_tokens


def columns_needed(objective: ObjectiveConfig) -> tuple[str, ...]:
    greedy = "greedy_G" in objective.estimator.inputs
    return ("index_in_group", "group_size") if greedy else ()

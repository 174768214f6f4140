"""Plan a round: each rollout's disposition, advantage, and its row in the batch.

Decided from the scalar columns alone, before any token is read. A rollout is a candidate in the
round it was generated in and in no other: it leaves that round consumed or dropped for a reason, so
it can be trained on at most once; but for those of groups that a later round uses again
(`reuse`), which are planned as that round's own are. What staleness bounds is the age of the policy
that sampled it, which is above 0 when generation runs ahead of training.

Axes: N rollouts of a round in shard order, S segments of them, K those of kept rollouts, P groups.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float64, Int64

from marin_rl.batching import filters
from marin_rl.batching.packing import Packing, pack
from marin_rl.batching.round_advantages import (
    AdvantageChoice,
    group_statistics,
    round_advantages,
)
from marin_rl.batching.segments import Segments
from marin_rl.batching.selection import SURPLUS, select_groups, unfinished
from marin_rl.batching.turns import TurnAdvantages, Turns, turn_advantages
from marin_rl.config import BatchingConfig, Config, ObjectiveConfig
from marin_rl.errors import ConfigError
from schemas.batches import DISPOSITIONS
from schemas.rollouts import UNFINISHED

SHORTEST_BUCKET = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Dispositions, advantages and places of the N rollouts of a round, in shard order.

    `reason_N` is "" for the kept, whose disposition is "consumed"; `place_N` counts the segments of
    kept rollouts before a kept one's first, and is -1 for others; `length` is the padded length in
    tokens. Without packing a step has `rows_of_step` rows, one for each segment. Where the round is
    `by_token`, advantages are 0 until the training stage makes them. `turns` has the advantages of
    turns where they have their own; `advantage_N` then is their mean over a rollout's tokens.
    `selected` is the number of groups that were taken where more may be sampled, else None.
    """

    disposition_N: np.ndarray
    reason_N: np.ndarray
    reward_N: Float64[np.ndarray, " N"]
    advantage_N: Float64[np.ndarray, " N"]
    tokens_N: Int64[np.ndarray, " N"]
    place_N: Int64[np.ndarray, " N"]
    segments: Segments
    length: int
    rows_of_step: tuple[int, ...]
    packing: Packing | None = None
    by_token: bool = False
    turns: TurnAdvantages | None = None
    selected: int | None = None

    @property
    def kept_N(self) -> Bool[np.ndarray, " N"]:
        """The rollouts that are trained on."""
        return self.place_N >= 0

    @property
    def kept_S(self) -> Bool[np.ndarray, " S"]:
        """The segments that are trained on."""
        return self.kept_N[self.segments.rollout_S]

    @property
    def is_cut(self) -> bool:
        """True if a rollout has several segments."""
        return len(self.segments.rollout_S) > len(self.place_N)

    def places_N(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step, row and segment (from 1) of the first segment of each kept rollout."""
        columns = self._places_K()
        places = tuple(np.zeros_like(self.place_N) for _ in columns)
        for place, column in zip(places, columns, strict=True):
            place[self.kept_N] = column[self.place_N[self.kept_N]]
        return places[0], places[1], places[2]

    def _places_K(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self.packing is not None:
            return self.packing.step_K, self.packing.row_K, self.packing.segment_K
        rows = np.array(self.rows_of_step, np.int64)
        row_K = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        return np.repeat(np.arange(len(rows)), rows), row_K, np.ones_like(row_K)

    @property
    def rows(self) -> int:
        """Rows of all steps."""
        return sum(self.rows_of_step) if self.packing is None else self.packing.rows

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.rows_of_step)

    def reasons_counted(self) -> dict[str, int]:
        """Number of dropped rollouts by `disposition/reason`, sorted."""
        dropped = ~self.kept_N
        names, counts = np.unique(
            [
                f"{kind}/{reason}"
                for kind, reason in zip(
                    self.disposition_N[dropped], self.reason_N[dropped], strict=True
                )
            ],
            return_counts=True,
        )
        return dict(zip(names.tolist(), counts.tolist(), strict=True))


def plan_round(scalars: pa.Table, config: Config, round: int) -> RoundPlan:
    """Decide, from the scalar columns of all rollouts of a round.

    Raises ConfigError as `bucket` does, and for rewards that the advantage is not made for.
    """
    objective = config.objective
    reward_N = _shaped_rewards(scalars, config)
    tokens_N = numbers(scalars, "n_prompt_tokens") + numbers(scalars, "n_completion_tokens")
    group_N, groups = _groups(scalars)
    disposition_N, reason_N = _before_groups(scalars, reward_N, config, round)
    # NaN rather than a reward: what failed or is stale is in no mean that others are compared with.
    eligible_N = np.where(disposition_N == "", reward_N, np.nan)
    choice = advantage_choice(objective)
    statistics = group_statistics(eligible_N, group_N, groups)
    # Counted after the drops above: of a group of four with three failures, one has no baseline.
    fewest = max(config.rollouts.group_size_min, choice.members_min)
    short_P = filters.short(statistics.count, fewest)
    greedy_N = _greedy(scalars, choice)
    if greedy_N is not None:
        # Without the reward of its greedy member, a group of remax has nothing to compare with.
        short_P |= np.bincount(group_N[greedy_N & np.isfinite(eligible_N)], minlength=groups) == 0
    _drop(disposition_N, reason_N, short_P[group_N], "filtered", "short_group")
    # Short groups leave the statistics of the round too, which batch_std and whitening divide by.
    compared_N = np.where(short_P[group_N], np.nan, eligible_N)
    advantages = _advantages(scalars, compared_N, group_N, groups, objective)
    # A KL or entropy term has a gradient where all rewards are equal: such groups are kept then.
    regularised = objective.regularised and not config.samples_on
    if config.filters.zero_signal and choice.within_groups and not regularised:
        spread_P = advantages.spread_P
        if objective.overlong == "soft_penalty":  # what is too long is no less right
            reward_or_nan_N = _where_compared(compared_N, numbers(scalars, "reward", np.float64))
            spread_P = _advantages(scalars, reward_or_nan_N, group_N, groups, objective).spread_P
        flat_P = filters.zero_signal(spread_P)
        _drop(disposition_N, reason_N, flat_P[group_N], "filtered", "zero_signal")
    selected = None
    if config.selects_groups:
        taken_P = _select(scalars, disposition_N, reason_N, group_N, groups, config)
        # The round is what is taken: nothing else is in the statistics that scales divide by.
        compared_N = np.where(taken_P[group_N], compared_N, np.nan)
        advantages = _advantages(scalars, compared_N, group_N, groups, objective)
        selected = int(taken_P.sum())
    if greedy_N is not None:
        _drop(disposition_N, reason_N, greedy_N, "filtered", "greedy")
    # Last, since its reward still counts in its group: overlong filtering masks the loss alone
    # (DAPO, arXiv:2503.14476, section 3.4).
    if objective.overlong == "mask":
        _drop(disposition_N, reason_N, filters.truncated(statuses(scalars)), "filtered", "overlong")
    kept_N = disposition_N == ""
    disposition_N[kept_N] = "consumed"
    segments = Segments.of(scalars, tokens_N)
    kept_S = kept_N[segments.rollout_S]
    per_step = config.batching.sequences_per_step or max(int(kept_N.sum()), 1)
    step_N = (np.cumsum(kept_N) - 1) // per_step
    packing = _packing(segments, kept_N, group_N, config.batching, per_step)
    return RoundPlan(
        disposition_N=disposition_N,
        reason_N=reason_N,
        reward_N=reward_N,
        advantage_N=np.where(kept_N, advantages.advantage_N, 0.0),
        tokens_N=tokens_N,
        place_N=np.where(kept_N, (np.cumsum(kept_S) - 1)[segments.first_N], -1),
        segments=segments,
        length=_length(int(segments.tokens_S[kept_S].max(initial=1)), config.batching),
        rows_of_step=tuple(np.bincount(step_N[segments.rollout_S[kept_S]]).tolist()),
        packing=packing,
        by_token=choice.facts.by_token,
        turns=advantages.turns,
        selected=selected,
    )


def _where_compared(compared_N: np.ndarray, reward_N: np.ndarray) -> np.ndarray:
    """Rewards of the rollouts that are compared, NaN for the others."""
    return np.where(np.isnan(compared_N), np.nan, reward_N)


def _select(
    scalars: pa.Table,
    disposition_N: np.ndarray,
    reason_N: np.ndarray,
    group_N: np.ndarray,
    groups: int,
    config: Config,
) -> np.ndarray:
    """Filter groups that the round does not take; True for those that it takes, `[P]`."""
    signal_P = np.bincount(group_N[disposition_N == ""], minlength=groups) > 0
    round_N = numbers(scalars, "round")
    # What a round uses again was chosen before, and is of an earlier round.
    again_P = np.bincount(group_N[round_N < round_N.max(initial=0)], minlength=groups) > 0
    selection = select_groups(scalars, group_N, signal_P & ~again_P, config)
    for mask_P, reason in (
        (selection.failing_P, selection.failing_reason),
        (selection.surplus_P, SURPLUS),
    ):
        _drop(disposition_N, reason_N, mask_P[group_N], "filtered", reason)
    return selection.taken_P | (signal_P & again_P)


def bucket(longest: int, config: BatchingConfig) -> int:
    """The padded length: the smallest bucket of at least `longest` tokens.

    Where none are configured: 32, 48, 64, 96, 128 and so on, so that less than a third is padding.
    Raises ConfigError where the configured buckets end below it.
    """
    if not config.length_buckets:
        power = max(SHORTEST_BUCKET, 1 << max(longest - 1, 0).bit_length())
        between = power * 3 // 4
        return between if between >= max(longest, SHORTEST_BUCKET) else power
    for length in config.length_buckets:
        if length >= longest:
            return length
    raise ConfigError(
        f"batching.length_buckets end at {config.length_buckets[-1]}, but a sequence of "
        f"{longest} tokens is to be trained on: add a bucket of at least that, or lower "
        "sampling.max_tokens"
    )


def advantage_choice(objective: ObjectiveConfig) -> AdvantageChoice:
    """The part of an objective that advantages depend on; what comes after KL is left to it."""
    return AdvantageChoice(
        estimator=objective.advantage,
        scale="none" if objective.whitens_tokens else objective.advantage_scale,
        pass_k=objective.pass_k,
        success_threshold=objective.success_threshold,
    )


def _length(longest: int, config: BatchingConfig) -> int:
    return bucket(longest, config) if config.packing == "none" else config.row_tokens or longest


def _packing(
    segments: Segments,
    kept_N: np.ndarray,
    group_N: np.ndarray,
    config: BatchingConfig,
    per_step: int,
) -> Packing | None:
    if config.packing == "none" or config.row_tokens is None:
        return None
    kept_S = kept_N[segments.rollout_S]
    lead_S, rollout_S = segments.lead_S, segments.rollout_S
    # What a later segment begins with follows from its own first one: no other rollout has it.
    alone_S = -1 - np.arange(len(rollout_S))
    group_S = np.where(segments.begins_S, group_N[rollout_S], alone_S)
    return pack(
        lead_S[kept_S],
        (segments.tokens_S - lead_S)[kept_S],
        group_S[kept_S],
        row_tokens=config.row_tokens,
        sequences_per_step=per_step,
        share=config.packing == "shared_prompt",
        rollout_K=(np.cumsum(kept_N) - 1)[rollout_S[kept_S]],
    )


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
    reward_N: Float64[np.ndarray, " N"],
    group_N: Int64[np.ndarray, " N"],
    groups: int,
    objective: ObjectiveConfig,
) -> _RoundAdvantages:
    choice, discount = advantage_choice(objective), objective.turn_discount
    parted = Turns.of(scalars) if looks_at_turns(objective) else None
    greedy_N = _greedy(scalars, choice)
    try:
        if parted is None or discount is None:
            tokens_N = None if parted is None else parted.trained_n
            return _RoundAdvantages(
                advantage_N=round_advantages(reward_N, group_N, groups, choice, tokens_N, greedy_N),
                spread_P=_spreads(reward_N, group_N, groups, choice),
            )
        by_turn = turn_advantages(parted, reward_N, group_N, groups, discount, choice)
    except ValueError as error:
        raise ConfigError(f"objective.advantage: {error}") from error
    return _RoundAdvantages(advantage_N=by_turn.mean_n, spread_P=by_turn.spread_P, turns=by_turn)


def _spreads(
    reward_N: Float64[np.ndarray, " N"],
    group_N: Int64[np.ndarray, " N"],
    groups: int,
    choice: AdvantageChoice,
) -> Float64[np.ndarray, " P"]:
    """Spread of each group's rewards; of advantages where unequal rewards may be worth the same.

    To pass_at_k they are where each of `pass_k` members, or none of them, has a success.
    """
    if "k" in choice.facts.inputs:
        reward_N = round_advantages(reward_N, group_N, groups, replace(choice, scale="none"))
    return group_statistics(reward_N, group_N, groups).spread


def looks_at_turns(objective: ObjectiveConfig) -> bool:
    """True if advantages depend on where a rollout's trained tokens and rewards are."""
    return objective.turn_discount is not None or advantage_choice(objective).needs_tokens


def columns_needed(objective: ObjectiveConfig) -> tuple[str, ...]:
    """Columns without tokens that a plan reads in addition to the scalar ones."""
    greedy = "greedy_G" in objective.estimator.inputs
    return ("index_in_group", "group_size") if greedy else ()


def _shaped_rewards(scalars: pa.Table, config: Config) -> Float64[np.ndarray, " N"]:
    """The environment's rewards, less what the objective takes off for length."""
    reward_N = numbers(scalars, "reward", np.float64)
    objective = config.objective
    if objective.overlong != "soft_penalty":
        return reward_N
    return reward_N - filters.overlong_penalty(
        numbers(scalars, "n_completion_tokens"),
        config.sampling.max_tokens,
        objective.overlong_buffer,
        objective.overlong_penalty,
    )


def _before_groups(
    scalars: pa.Table, reward_N: np.ndarray, config: Config, round: int
) -> tuple[np.ndarray, np.ndarray]:
    """(disposition, reason) of what is dropped for its own sake; "" where nothing speaks so far."""
    status_N = statuses(scalars)
    sampled_N = numbers(scalars, "n_completion_tokens")
    disposition_N = np.full(len(reward_N), "", dtype=object)
    reason_N = disposition_N.copy()
    _drop(disposition_N, reason_N, unfinished(scalars), "filtered", UNFINISHED)
    failed_N = filters.failed(status_N, reward_N, sampled_N)
    # A broken rollout may have tokens or none; its status says more than either reason does.
    broken_N = (status_N == "error") | (status_N == "aborted")
    failures_N = np.where(sampled_N == 0, "no_tokens", "no_reward").astype(object)
    failures_N[broken_N] = status_N[broken_N]
    newly_N = failed_N & (disposition_N == "")
    reason_N[newly_N] = failures_N[newly_N]
    disposition_N[newly_N] = "failed"
    versions_N = numbers(scalars, "policy_version_min")
    old_N = filters.stale(versions_N, round, config.staleness_rounds_max)
    _drop(disposition_N, reason_N, old_N, "stale", "policy_age")
    if config.filters.truncated:
        _drop(disposition_N, reason_N, filters.truncated(status_N), "filtered", "truncated")
    return disposition_N, reason_N


def _drop(
    disposition_N: np.ndarray, reason_N: np.ndarray, mask_N: np.ndarray, kind: str, reason: str
) -> None:
    """Mark, in place, what the mask holds for and nothing has dropped before."""
    # The first reason stays, so the order of calls decides: failed, stale, filtered.
    newly_N = mask_N & (disposition_N == "")
    disposition_N[newly_N] = kind
    reason_N[newly_N] = reason


def _greedy(scalars: pa.Table, choice: AdvantageChoice) -> Bool[np.ndarray, " N"] | None:
    """The last member of each group, which `rollouts.greedy_baseline` has sampled greedily.

    None for an estimator that does not compare with it.
    """
    if "greedy_G" not in choice.facts.inputs:
        return None
    return numbers(scalars, "index_in_group") == numbers(scalars, "group_size") - 1


def _groups(scalars: pa.Table) -> tuple[Int64[np.ndarray, " N"], int]:
    """Group numbers in order of appearance, and how many groups there are."""
    encoded = scalars["group_id"].combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def statuses(scalars: pa.Table) -> np.ndarray:
    """Status of each rollout, as `types.Rollout.status` has it."""
    return scalars["status"].to_numpy(zero_copy_only=False)


def numbers(table: pa.Table, name: str, dtype: type = np.int64) -> np.ndarray:
    """A column as numbers; null becomes NaN."""
    return table[name].to_numpy(zero_copy_only=False).astype(dtype)


def dispositions_table(plan: RoundPlan, scalars: pa.Table) -> pa.Table:
    """Dispositions of the round, a row per rollout, in shard order."""
    dropped = ~plan.kept_N
    step_N, row_N, segment_N = plan.places_N()
    columns = {
        "rollout_id": scalars["rollout_id"],
        "group_id": scalars["group_id"],
        "round_generated": scalars["round"],
        "environment": scalars["environment"],
        "policy_version_min": scalars["policy_version_min"],
        "policy_version_max": scalars["policy_version_max"],
        "n_tokens": pa.array(plan.tokens_N.astype(np.int32)),
        "disposition": pa.array(plan.disposition_N, pa.string()),
        "reason": pa.array(plan.reason_N, pa.string(), mask=~dropped),
        "step": _places(step_N, dropped),
        "row": _places(row_N, dropped),
        "segment": _places(segment_N, dropped),
        # Null where the training stage makes them: 0 would say that they have no signal.
        "advantage": pa.array(plan.advantage_N, mask=dropped | plan.by_token),
        "reward": scalars["reward"],
    }
    return pa.table([columns[name] for name in DISPOSITIONS.names], schema=DISPOSITIONS)


def _places(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    return pa.array(values.astype(np.int32), mask=missing)

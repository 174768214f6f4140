"""Advantages: numbers by hand, TRL's own numbers, and the laws that every baseline obeys."""

import itertools
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.cases import printed_seed

from marin_rl.batching.advantages import (
    EPSILON,
    discounted_returns,
    dr_grpo,
    gdpo,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    remax,
    rewards_array,
    rloo,
)
from marin_rl.batching.round_advantages import (
    WHITENING_VARIANCE_MIN,
    AdvantageChoice,
    group_statistics,
    round_advantages,
)
from marin_rl.config.estimators import ESTIMATORS, GROUPS_OF_ONE
from marin_rl.config.objective import ObjectiveConfig

# Each with rewards alone as its input, and a sum of 0 in every group.
WITHIN_GROUPS = {"rloo": rloo, "grpo": grpo, "dr_grpo": dr_grpo, "maxrl": maxrl}

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trl-advantages.json").read_text())

REWARDS = st.one_of(
    st.none(), st.integers(-3, 3).map(float), st.floats(-1e3, 1e3, allow_subnormal=False)
)


def test_rloo_by_hand() -> None:
    # others' means: 3, 2, 1
    assert_array_equal(rloo(np.array([0.0, 2.0, 4.0])), [-3.0, 0.0, 3.0])


def test_grpo_by_hand() -> None:
    # mean 1, std (ddof 1) 1
    assert_allclose(grpo(np.array([0.0, 1.0, 2.0]), epsilon=0.0), [-1.0, 0.0, 1.0], rtol=1e-15)


def test_dr_grpo_by_hand() -> None:
    assert_array_equal(dr_grpo(np.array([0.0, 1.0, 5.0])), [-2.0, -1.0, 3.0])


def test_maxrl_by_hand() -> None:
    # mean 1/4: three failures at -1, a success at 3
    assert_array_equal(maxrl(np.array([0.0, 0.0, 1.0, 0.0])), [-1.0, -1.0, 3.0, -1.0])
    assert_array_equal(maxrl(np.zeros(3)), np.zeros(3))
    with pytest.raises(ValueError, match="at least 0, found -1"):
        maxrl(np.array([-1.0, 1.0]))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("successes", range(6))
def test_pass_at_k_is_the_mean_over_all_subsets(k: int, successes: int) -> None:
    reward = np.array([1.0] * successes + [0.5] * (5 - successes))
    subsets = list(itertools.combinations(range(5), k))
    passed = np.array([float(reward[list(subset)].max() >= 1.0) for subset in subsets])
    spread = passed.std()
    expected = np.zeros(5)
    if spread > 0:
        for member in range(5):
            mine = [member in subset for subset in subsets]
            expected[member] = (passed[mine].mean() - passed.mean()) / spread
    assert_allclose(pass_at_k(reward, k, 1.0), expected, atol=1e-12)


def test_pass_at_k_needs_k_members() -> None:
    with pytest.raises(ValueError, match=r"found k = 3 and a group of 2: lower objective\.pass_k"):
        pass_at_k(np.array([1.0, 0.0, np.nan]), 3, 1.0)


@pytest.mark.parametrize("estimator", [rloo, grpo, dr_grpo, maxrl, lambda r: pass_at_k(r, 2, 1.0)])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.0, 1.0, 1.0, 0.0],
        [False, True, True, False],
        np.array([0, 1, 1, 0]),
        np.array([0, 1, 1, 0], np.float32),
    ],
)
def test_rewards_may_be_numbers_of_any_kind(estimator, rewards) -> None:
    found = estimator(rewards)
    assert found.dtype == np.float64
    assert_array_equal(found, estimator(np.array([0.0, 1.0, 1.0, 0.0])))


def test_a_recorded_round_is_taken_as_it_is() -> None:
    groups = np.array([0, 0, 1, 1], np.int32)
    choice = AdvantageChoice(estimator="grpo")
    expected = round_advantages(np.array([0.0, 1.0, 2.0, 5.0]), groups, 2, choice)
    for rewards in ([0, 1, 2, 5], np.array([0, 1, 2, 5]), np.array([0, 1, 2, 5], np.float32)):
        assert_array_equal(round_advantages(rewards, groups, 2, choice), expected)


def test_other_frameworks_epsilon_can_be_chosen() -> None:
    rewards, groups = np.array([0.0, 1.0, 1.0]), np.zeros(3, np.int32)
    verls = AdvantageChoice(estimator="grpo", epsilon=1e-6)
    assert_allclose(
        round_advantages(rewards, groups, 1, verls), grpo(rewards, epsilon=1e-6), rtol=1e-12
    )
    wide = AdvantageChoice(estimator="rloo", scale="batch_std", epsilon=1.0)
    std = rewards.std(ddof=1)
    assert_allclose(round_advantages(rewards, groups, 1, wide), rloo(rewards) / (std + 1.0))


def test_returns_over_time_can_be_had_here_in_any_precision() -> None:
    rewards, discounts = np.array([0, 0, 1]), np.full(3, 0.5, np.float32)
    assert_array_equal(discounted_returns(rewards, discounts), [0.25, 0.5, 1.0])


def test_missing_rewards_stay_out_of_the_baseline() -> None:
    assert_array_equal(rloo(np.array([np.nan, 1.0, 3.0])), [0.0, -2.0, 2.0])
    assert_array_equal(rloo(rewards_array([None, 1.0, float("inf"), 3.0])), [0.0, -2.0, 0.0, 2.0])


@pytest.mark.parametrize("estimator", WITHIN_GROUPS.values(), ids=WITHIN_GROUPS)
@pytest.mark.parametrize("rewards", [[], [np.nan], [5.0], [5.0, np.nan], [0.1] * 7])
def test_no_signal_is_exactly_zero(estimator, rewards: list[float]) -> None:
    assert_array_equal(estimator(np.array(rewards)), np.zeros(len(rewards)))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_agrees_with_trl(case: dict) -> None:
    components = np.array([rewards_array(_numbers(row)) for row in case["rewards"]])
    present = np.isfinite(components).any(axis=1)
    reward = np.where(present, np.nansum(components * case["weights"], axis=1), np.nan)
    if "clip" in case:
        reward = np.clip(reward, *case["clip"])
    if "beta" in case:
        reward = reward - case["beta"] * np.array(case["kl"])
    groups = np.arange(len(reward)) // case["group_size"]
    choice = AdvantageChoice(estimator=case["estimator"], scale=case.get("scale", "default"))
    parts = np.stack([components, np.broadcast_to(case["weights"], components.shape)])
    count = int(groups.max()) + 1
    whole = round_advantages(reward, groups, count, choice, parts_NK=parts)
    assert_allclose(whole, case["advantages"], rtol=1e-4, atol=1e-4)
    if choice.estimator in WITHIN_GROUPS and choice.scale == "default":
        alone = WITHIN_GROUPS[case["estimator"]]
        ours = np.concatenate([alone(reward[groups == g]) for g in range(groups.max() + 1)])
        assert_allclose(ours, case["advantages"], rtol=1e-4, atol=1e-4)


@given(st.lists(REWARDS, max_size=9))
def test_rloo_is_the_leave_one_out_difference(rewards: list[float | None]) -> None:
    reward = rewards_array(rewards)
    valid = np.flatnonzero(np.isfinite(reward))
    expected = np.zeros(len(reward))
    if len(valid) > 1:
        for i in valid:
            expected[i] = reward[i] - np.mean([reward[j] for j in valid if j != i])
    assert_allclose(rloo(reward), expected, rtol=1e-9, atol=1e-9)


@given(
    st.lists(REWARDS, min_size=1, max_size=9), st.sampled_from(sorted({*WITHIN_GROUPS} - {"maxrl"}))
)
def test_advantages_sum_to_zero_and_ignore_a_constant(rewards, name):
    reward = rewards_array(rewards)
    advantage = WITHIN_GROUPS[name](reward)
    assert_allclose(advantage.sum(), 0.0, atol=1e-8)
    # A power of two keeps the shift exact for the small integers and close for the rest.
    assert_allclose(WITHIN_GROUPS[name](reward + 4.0), advantage, rtol=1e-6, atol=1e-6)


@given(
    st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=6),
    st.sampled_from(sorted(WITHIN_GROUPS)),
    st.randoms(use_true_random=False),
)
def test_a_round_equals_its_groups(groups: list[list[float | None]], name: str, random) -> None:
    rewards = np.abs(np.concatenate([rewards_array(group) for group in groups]))
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    expected = np.concatenate([WITHIN_GROUPS[name](np.abs(rewards_array(g))) for g in groups])
    choice = AdvantageChoice(estimator=name)
    assert_allclose(
        round_advantages(rewards, numbers, len(groups), choice), expected, rtol=1e-9, atol=1e-9
    )
    # Order carries nothing: a shuffled round gives the same numbers to the same rollouts.
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = round_advantages(rewards[order], numbers[order], len(groups), choice)
    assert_allclose(shuffled, expected[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted({*ESTIMATORS} - {"reinforce_batch"}))
def test_a_group_has_the_same_bits_alone_as_among_others(name: str) -> None:
    rng = np.random.default_rng(printed_seed())
    group = rng.permutation(np.repeat(np.arange(12), [9, 33, 17, 9, 9, 2, 1, 33, 9, 5, 3, 17]))
    reward = np.where(rng.random(len(group)) < 0.1, np.nan, rng.random(len(group)))
    tokens, greedy = rng.integers(1, 50, len(group)), np.zeros(len(group), bool)
    greedy[np.unique(group, return_index=True)[1]] = True
    choice = AdvantageChoice(estimator=name, scale="group_std", success_threshold=0.5)
    parts = np.stack([rng.random((len(group), 3)), np.full((len(group), 3), 0.5)])
    among = round_advantages(reward, group, 12, choice, tokens, greedy, parts)
    for number in range(12):
        members = group == number
        one = np.zeros(members.sum(), np.int64)
        own = tokens[members], greedy[members], parts[:, members]
        alone = round_advantages(reward[members], one, 1, choice, *own)
        assert_array_equal(among[members], alone)


def test_statistics_by_hand() -> None:
    found = group_statistics(np.array([1.0, np.nan, 4.0, np.nan]), np.array([0, 0, 0, 1]), 2)
    assert_array_equal(found.count, [2, 0])
    assert_array_equal(found.mean, [2.5, 0.0])
    assert_array_equal(found.spread, [3.0, 0.0])
    assert_allclose(found.std, [np.sqrt(4.5), 0.0])


REWARD = np.array([1.0, 3.0, np.nan, 2.0, 2.0, 7.0])
GROUP = np.array([0, 0, 0, 1, 1, 1])


def advantages(estimator: str, scale: str = "default", **more: int | float) -> np.ndarray:
    return round_advantages(
        REWARD, GROUP, 2, AdvantageChoice(estimator=estimator, scale=scale, **more)
    )


def test_baselines_over_the_round_by_hand() -> None:
    assert_array_equal(advantages("reinforce"), [1, 3, 0, 2, 2, 7])
    assert_array_equal(advantages("reinforce_batch"), [-2, 0, 0, -1, -1, 4])  # mean 3


def test_scales_by_hand() -> None:
    std = np.sqrt((4 + 0 + 1 + 1 + 16) / 4)  # of the round's rewards, ddof 1
    assert_allclose(advantages("dr_grpo", "batch_std")[:2], np.array([-1, 1]) / (std + EPSILON))
    assert_allclose(
        advantages("dr_grpo", "group_std")[:2], [-1 / (2**0.5 + EPSILON)] * np.array([1, -1])
    )
    assert_allclose(advantages("dr_grpo", "group_std"), advantages("grpo"))
    whitened = advantages("reinforce_batch", "batch_whitening")  # REINFORCE++
    assert_allclose(whitened, np.array([-2, 0, 0, -1, -1, 4]) / (std + EPSILON))
    valid = whitened[np.isfinite(REWARD)]
    assert_allclose([valid.mean(), valid.std(ddof=1)], [0, 1], atol=1e-4)


def masked_whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Whitening of [N, T] as verl, tunix and TRL's PPO have it: written out over the tokens."""
    tokens = values[mask]
    variance = ((tokens - tokens.mean()) ** 2).sum() / (len(tokens) - 1)
    return (values - tokens.mean()) / np.sqrt(variance + WHITENING_VARIANCE_MIN) * mask


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_batch", "dr_grpo", "rloo"])
def test_token_whitening_is_over_every_token_of_every_rollout(estimator: str) -> None:
    tokens = np.array([1, 4, 2, 3, 2, 5])
    mask = (np.arange(5) < tokens[:, None]) & np.isfinite(REWARD)[:, None]
    raw = np.broadcast_to(advantages(estimator, "none")[:, None], mask.shape)
    choice = AdvantageChoice(estimator=estimator, scale="token_whitening")
    found = round_advantages(REWARD, GROUP, 2, choice, tokens)
    assert_allclose(found[:, None] * mask, masked_whiten(raw, mask), rtol=1e-9, atol=1e-9)
    assert found[2] == 0.0  # no reward


def test_token_whitening_of_a_round_of_equal_rewards_is_zero_and_needs_the_tokens() -> None:
    choice = AdvantageChoice(estimator="reinforce", scale="token_whitening")
    equal, group, tokens = np.full(4, 0.1), np.array([0, 0, 1, 1]), np.array([1, 2, 3, 4])
    assert_allclose(round_advantages(equal, group, 2, choice, tokens), 0.0, atol=1e-9)
    nothing = round_advantages(np.full(4, np.nan), group, 2, choice, tokens)
    assert_array_equal(nothing, np.zeros(4))
    with pytest.raises(ValueError, match="needs the number of tokens"):
        round_advantages(equal, group, 2, choice)


def test_only_group_baselines_are_blind_to_a_group_of_equal_rewards() -> None:
    within = [
        AdvantageChoice(estimator=name).within_groups for name in (*WITHIN_GROUPS, "pass_at_k")
    ]
    assert all(within)
    assert not AdvantageChoice(estimator="reinforce_batch").within_groups


def test_a_group_of_one_is_enough_where_its_mean_is_no_baseline() -> None:
    found = {name: AdvantageChoice(estimator=name, pass_k=3).members_min for name in ESTIMATORS}
    assert found == dict.fromkeys(
        [*WITHIN_GROUPS, "gdpo", "opo", "remax", "optimal_token_baseline"], 2
    ) | {
        "pass_at_k": 3, "reinforce": 1, "reinforce_batch": 1, "gae": 1,
    }  # fmt: skip


def test_opo_by_hand_and_by_loops() -> None:
    # (1 * 2 + 0 * 6) / 8 = 1/4
    assert_array_equal(opo([1.0, 0.0], np.array([2, 6])), [0.75, -0.25])
    rng = np.random.default_rng(11)
    groups = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    rewards, tokens = rng.normal(0, 1, 10), rng.integers(1, 30, 10)
    rewards[1] = np.nan
    expected = np.zeros(10)
    for i in range(10):
        if np.isnan(rewards[i]) or groups[i] == 3:  # missing, and a group of one
            continue
        total = weight = 0.0
        for j in range(10):
            if groups[j] == groups[i] and not np.isnan(rewards[j]):
                total += tokens[j] * rewards[j]
                weight += tokens[j]
        expected[i] = rewards[i] - total / weight
    choice = AdvantageChoice(estimator="opo")
    assert_allclose(round_advantages(rewards, groups, 4, choice, tokens), expected, rtol=1e-12)
    assert_array_equal(opo([0.3] * 3, np.array([1, 2, 4])), np.zeros(3))
    with pytest.raises(ValueError, match="opo needs the number of tokens of every rollout"):
        round_advantages(rewards, groups, 4, choice)


def test_gdpo_by_hand() -> None:
    # Rewards 2, 1, 1 are the same to grpo for the last two, components tell them apart.
    value = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    parts = np.stack([value, np.broadcast_to([1.0, 3.0], value.shape)])
    high, low = 1 / 3 / (3**-0.5 + EPSILON), -2 / 3 / (3**-0.5 + EPSILON)  # std of 1, 1, 0
    expected = [high + 3 * high, high + 3 * low, low + 3 * high]
    assert_allclose(gdpo(value.sum(axis=1), parts), expected, rtol=1e-12)
    # A missing reward is in no mean, a missing component adds nothing.
    missing = parts.copy()
    missing[:, 2, 0] = np.nan
    found = gdpo([2.0, 1.0, 1.0], missing)
    assert_allclose(found, [3 * high, 3 * low, 3 * high], rtol=1e-12)
    assert_array_equal(gdpo([2.0, None, 1.0], parts)[1], 0.0)
    with pytest.raises(ValueError, match="a reward without any"):
        gdpo([2.0, 1.0], np.full((2, 2, 1), np.nan))
    assert AdvantageChoice(estimator="gdpo").over_round


def test_remax_by_hand_and_by_loops() -> None:
    last = np.array([False, False, True])
    assert_array_equal(remax([1.0, 0.0, 0.25], last), [0.75, -0.25, 0.0])
    assert_array_equal(remax([1.0, 0.0, None], last), np.zeros(3))  # no baseline
    rng = np.random.default_rng(12)
    groups, rewards = np.repeat(np.arange(5), 3), rng.normal(0, 1, 15)
    greedy = np.arange(15) % 3 == 2
    expected = np.zeros(15)
    for i in range(15):
        for j in range(15):
            if greedy[j] and groups[j] == groups[i] and not greedy[i]:
                expected[i] = rewards[i] - rewards[j]
    choice = AdvantageChoice(estimator="remax")
    found = round_advantages(rewards, groups, 5, choice, greedy_N=greedy)
    assert_allclose(found, expected, rtol=1e-12)
    with pytest.raises(ValueError, match="remax needs to know the greedy member"):
        round_advantages(rewards, groups, 5, choice)


def test_every_estimator_of_the_configuration_has_its_facts() -> None:
    field = ObjectiveConfig.model_fields["advantage"]
    assert tuple(ESTIMATORS) == get_args(field.annotation)
    assert GROUPS_OF_ONE == ("gae", "reinforce", "reinforce_batch")


def _numbers(row: list[float | str]) -> list[float]:
    return [float(value) for value in row]

"""A rollout that was cut weighs, sums and discounts as the same tokens uncut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from marin_rl.config import ObjectiveConfig
from marin_rl.training.losses import policy_losses, token_weights, weighted_sum
from marin_rl.training.precompute import RowPrecompute, token_rewards
from marin_rl.training.step_loss import row_weights
from marin_rl.training.step_metrics import sequence_entropy, trained_rollouts
from marin_rl.training.step_types import StepRows, StepSettings, step_arrays
from marin_rl.training.token_advantages import rollout_gae, token_gae
from marin_rl.types import TrainingBatch

# Rollout a has the trained tokens 1 to 5, b has 6 and 7; before each run of them something is read.
UNCUT = [[[0, 1, 2, 3, 4, 5]], [[0, 6, 7]]]
CUT = [[[0, 1, 2], [0, 3, 4, 5]], [[0, 6, 7]]]
# The same in one row of two segments, and a row of the third.
PACKED = [[[0, 1, 2], [0, 3, 4, 5]], [[0, 6, 7]]]
VALUES = np.array([0, 0.5, -0.25, 0.125, 1.0, -0.5, 0.75, 0.25], np.float32)
LOGPROBS = np.array([0, -1.0, -0.5, -2.0, -0.25, -1.5, -0.75, -0.125], np.float32)
ADVANTAGES = np.array([0, 2, 2, 2, 2, 2, -1, -1], np.float32)
AGGREGATIONS = {
    "token_mean": [1 / 7] * 7,
    "sequence_mean_token_mean": [1 / 10] * 5 + [1 / 4] * 2,
    "sequence_mean_token_sum": [1 / 2] * 7,
    "sequence_mean_token_sum_norm": [1 / 20] * 7,
    "token_sum": [1.0] * 7,
}


def batch_of(rollouts: list[list[list[int]]], *, packed: bool = False) -> TrainingBatch:
    """Rows of segments of token ids, of which 0 is read and the others are trained on."""
    named = [(name, s) for name, each in zip("ab", rollouts, strict=True) for s in each]
    rows = [named[:2], named[2:]] if packed else [[each] for each in named]
    shape = len(rows), 8
    ids, mask, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
    for row, parts in enumerate(rows):
        at = 0
        for number, (_, tokens) in enumerate(parts, start=1):
            here = slice(at, at + len(tokens))
            ids[row, here], segments[row, here] = tokens, number
            mask[row, here] = np.array(tokens) > 0
            positions[row, here] = np.arange(len(tokens))
            at += len(tokens)
    on = mask.astype(np.float32)
    return TrainingBatch(
        token_ids=ids,
        loss_mask=mask,
        segment_ids=segments,
        positions=positions,
        policy_logprobs=LOGPROBS[ids] * on,
        advantages=ADVANTAGES[ids] * on,
        # a's third token and its last are rewarded, b's last
        returns=np.array([0, 3, 3, 3, 2, 2, 1, 1], np.float32)[ids] * on,
        rollout_ids=tuple(tuple(name for name, _ in parts) for parts in rows),
    )


BATCHES = {"uncut": batch_of(UNCUT), "cut": batch_of(CUT), "packed": batch_of(PACKED, packed=True)}


def by_token(batch: TrainingBatch, values_BT: np.ndarray) -> list[float]:
    """Values of the trained tokens 1 to 7."""
    found = dict(zip(batch.token_ids.ravel(), np.asarray(values_BT).ravel(), strict=True))
    return [float(found[token]) for token in range(1, 8)]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rollout_weighs_the_same_cut_or_not(name: str, aggregation: str) -> None:
    batch = BATCHES[name]
    objective = ObjectiveConfig(aggregation=aggregation)
    settings = StepSettings(objective=objective, length_norm=10)
    arrays, _ = step_arrays(batch, 2, 2)
    weights = row_weights(jax.tree.map(jnp.asarray, arrays), settings)[: len(batch.token_ids)]
    assert_allclose(by_token(batch, weights), AGGREGATIONS[aggregation], rtol=1e-6)
    assert (arrays.rollout_shares is None) == (name == "uncut")


def test_segments_alone_would_weigh_more() -> None:
    """As sequences of their own two segments count twice, which weights of rollouts prevent."""
    batch = BATCHES["cut"]
    weights = token_weights(batch.loss_mask, batch.segment_ids, "sequence_mean_token_mean", 1)
    assert_allclose(by_token(batch, np.asarray(weights)), [1 / 6] * 2 + [1 / 9] * 3 + [1 / 6] * 2)


@pytest.mark.parametrize("name", BATCHES)
def test_values_go_on_from_segment_to_segment(name: str) -> None:
    batch = BATCHES[name]
    arrays, _ = step_arrays(batch, len(batch.token_ids), 1)
    mask = arrays.mask[0]
    rewards = token_rewards(batch, arrays)[0]
    assert by_token(batch, rewards) == [0, 0, 1, 0, 2, 0, 1]
    found = rollout_gae(
        batch, rewards, VALUES[batch.token_ids], mask, batch.segment_ids, gamma=0.9, lambda_=0.8
    )
    expected = []
    for tokens, received in (([1, 2, 3, 4, 5], [0, 0, 1, 0, 2]), ([6, 7], [0, 1])):
        after, value_after, advantages = 0.0, 0.0, list[float]()
        for token, reward in zip(reversed(tokens), reversed(received), strict=True):
            delta = reward + 0.9 * value_after - VALUES[token]
            after, value_after = delta + 0.9 * 0.8 * after, VALUES[token]
            advantages.insert(0, float(after))
        expected += advantages
    assert_allclose(by_token(batch, found), expected, rtol=1e-5)
    assert not found[~mask].any()


def test_gae_row_by_row_would_end_at_a_segment() -> None:
    batch = BATCHES["cut"]
    rows = np.zeros((3, 8), np.float32), VALUES[batch.token_ids], batch.loss_mask > 0
    alone = token_gae(*rows, batch.segment_ids, gamma=0.9, lambda_=0.8)
    whole = rollout_gae(batch, *rows, batch.segment_ids, gamma=0.9, lambda_=0.8)
    assert abs(by_token(batch, np.asarray(alone))[1] - by_token(batch, whole)[1]) > 0.01


BY_TOKEN = {"advantage": "reinforce", "ratio_level": "token", "surrogate": "ppo_clip"}
BY_TOKEN |= {"advantage_scale": "token_whitening"}


@pytest.mark.parametrize("choice", [{"advantage": "rloo"}, BY_TOKEN], ids=["rollout", "token"])
def test_kl_in_the_reward_is_that_of_the_rollout(choice: dict[str, str]) -> None:
    objective = ObjectiveConfig.model_validate(
        {**choice, "kl_placement": "reward", "kl_coefficient": 0.5, "kl_estimator": "k1"}
    )

    def penalised(name: str) -> tuple[list[float], dict[str, float]]:
        batch = BATCHES[name]
        rows = step_arrays(batch, len(batch.token_ids), 1)
        precompute = RowPrecompute(objective, [batch], [rows])

        def reference(step: StepRows) -> np.ndarray:
            return np.where(step.arrays.mask, step.arrays.policy_logprobs - 0.25, 0)

        precompute.penalise(reference, 0.5, {"a": "g", "b": "g"})
        (extra,) = precompute.extras
        assert extra.advantages is not None
        return by_token(batch, extra.advantages[0]), dict(precompute.metrics)

    uncut, metrics = penalised("uncut")
    assert metrics["objective/kl"] == pytest.approx(0.25 * 7 / 2)
    if not objective.kl_by_token:  # a: 5 tokens of 0.25 nats, b: 2; each against the other
        assert_allclose(uncut, [-0.5 * 0.25 * 3] * 5 + [0.5 * 0.25 * 3] * 2, rtol=1e-5)
    for name in ("cut", "packed"):
        found, own = penalised(name)
        assert_allclose(found, uncut, rtol=1e-5)
        assert own == pytest.approx(metrics)


def test_an_optimal_token_baseline_counts_tokens_through_a_rollout() -> None:
    objective = ObjectiveConfig(advantage="optimal_token_baseline", ratio_level="token")

    def advantages(name: str) -> list[float]:
        batch = BATCHES[name]
        precompute = RowPrecompute(objective, [batch], [step_arrays(batch, 3, 1)])
        norms = np.zeros((1, 3, 8), np.float32)
        norms[0, : len(batch.token_ids)] = np.square(VALUES[batch.token_ids])
        precompute.weigh(lambda step: norms, {"a": "g", "b": "g"})
        (extra,) = precompute.extras
        assert extra.advantages is not None
        return by_token(batch, extra.advantages[0, : len(batch.token_ids)])

    uncut = advantages("uncut")
    assert any(uncut)
    assert_allclose(advantages("cut"), uncut, rtol=1e-6)
    assert_allclose(advantages("packed"), uncut, rtol=1e-6)


def test_means_over_rollouts_count_a_rollout_once() -> None:
    for batch in BATCHES.values():
        arrays, _ = step_arrays(batch, len(batch.token_ids), 1)
        rows = arrays._replace(
            **{
                name: None if array is None else array[0]
                for name, array in arrays._asdict().items()
            }
        )
        assert float(trained_rollouts(rows)) == pytest.approx(2)
        logprobs = jnp.asarray(LOGPROBS[batch.token_ids])
        entropy = sequence_entropy(
            logprobs, jnp.asarray(batch.loss_mask, jnp.float32), trained_rollouts(rows)
        )
        assert float(entropy) == pytest.approx(-LOGPROBS.sum() / 2)


@pytest.mark.parametrize(
    ("level", "aggregation"),
    [
        ("token", "sequence_mean_token_mean"),
        ("sequence", "token_mean"),
        ("sequence_mean", "sequence_mean_token_mean"),
    ],
)
def test_on_policy_a_cut_rollout_has_the_gradient_of_an_uncut_one(level, aggregation):
    """A ratio by sequence is that of a segment: on policy their gradients add up to the same."""
    chosen = ObjectiveConfig(surrogate="ppo_clip", ratio_level=level, aggregation=aggregation)

    def gradient(name: str) -> list[float]:
        batch = BATCHES[name]
        arrays, _ = step_arrays(batch, len(batch.token_ids), 1)
        old, mask = batch.policy_logprobs, batch.loss_mask.astype(np.float32)

        def loss(logprobs, placed):
            weights = row_weights(placed, StepSettings(objective=chosen, length_norm=10))
            losses = policy_losses(chosen, logprobs, old, batch.advantages, mask, batch.segment_ids)
            return weighted_sum(weights, losses)

        return by_token(batch, jax.jit(jax.grad(loss))(old, arrays))

    assert_allclose(gradient("cut"), gradient("uncut"), rtol=1e-5)
    assert_allclose(gradient("packed"), gradient("uncut"), rtol=1e-5)

"""Sampling by itself: what is drawn, how often, and with which logprob."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import others_slow

from marin_rl.inference import sampling
from marin_rl.inference.sampling import Drawn, SlotSampling, filter_logits, seed_words, uniforms

sample = jax.jit(sampling.sample)
draw = jax.jit(sampling.draw)


def slot_sampling(
    slots: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SlotSampling:
    return SlotSampling(
        temperature_S=np.full(slots, temperature, np.float32),
        top_p_S=np.full(slots, top_p, np.float32),
        top_k_S=np.full(slots, top_k, np.int32),
        min_p_S=np.full(slots, min_p, np.float32),
        seed_S2=np.array([seed_words(seed + slot) for slot in range(slots)], np.uint32),
    )


@pytest.mark.parametrize("vocabulary", others_slow([2, 7, 103, 512], 2, 7))
def test_draws_follow_the_weights(vocabulary):
    rng = np.random.default_rng(vocabulary)
    weights = rng.exponential(size=vocabulary).astype(np.float32)
    weights[rng.integers(vocabulary)] = 0
    count = 200_000
    uniform = (np.arange(count) + 0.5) / count
    drawn = draw(jnp.broadcast_to(weights, (count, vocabulary)), jnp.asarray(uniform, jnp.float32))
    shares = np.bincount(drawn, minlength=vocabulary) / count
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=2 / count + 1e-5)


def test_a_token_of_weight_zero_is_never_drawn():
    weights = jnp.zeros((3, 50), jnp.float32).at[:, 20].set(1e-30).at[1, 33].set(1)
    for uniform in (0.0, 0.5, 1 - 2**-24):
        drawn = draw(weights, jnp.full(3, uniform, jnp.float32))
        assert set(np.asarray(drawn).tolist()) <= {20, 33}


def test_uniform_numbers_know_seed_and_position_only():
    seeds = np.array([seed_words(seed) for seed in (5, 6, 2**40 + 5, 5)], np.uint32)
    first = np.asarray(uniforms(seeds, jnp.array([3, 3, 3, 3])))
    moved = np.asarray(uniforms(seeds[::-1], jnp.array([3, 3, 3, 4])))
    assert first[0] == first[3] == moved[0]
    assert moved[3] != first[0]
    assert len(set(first[:3].tolist())) == 3
    many = np.asarray(uniforms(np.tile(seeds[:1], (4096, 1)), jnp.arange(4096)))
    assert abs(many.mean() - 0.5) < 0.03
    assert (many >= 0).all()
    assert (many < 1).all()


def drawn_at(logits: jax.Array, asked: SlotSampling, positions: jax.Array) -> Drawn:
    return sample(logits, asked, uniforms(asked.seed_S2, positions))


def test_top_k_and_top_p_by_hand():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    kept = lambda **options: np.isfinite(
        np.asarray(filter_logits(logits, slot_sampling(1, **options)))
    )[0].tolist()
    assert kept(top_k=2) == [False, True, False, True]
    assert kept(top_p=0.4) == [False, True, False, False]
    assert kept(top_p=0.41) == [False, True, False, True]
    assert kept(top_p=0.75) == [False, True, True, True]
    assert kept(top_k=99) == [True] * 4
    # of what top-k leaves (4/7 and 3/7), the first alone makes up half
    assert kept(top_k=2, top_p=0.5) == [False, True, False, False]


@pytest.mark.slow
def test_logprobs_are_of_the_distribution_that_was_sampled():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]] * 64))
    tokens, logprobs, *_ = drawn_at(logits, slot_sampling(64, top_k=2), jnp.arange(64))
    expected = {1: np.log(4 / 7), 3: np.log(3 / 7)}
    assert set(np.asarray(tokens).tolist()) == {1, 3}
    for token, logprob in zip(np.asarray(tokens).tolist(), np.asarray(logprobs), strict=True):
        assert logprob == pytest.approx(expected[token], abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_it_at_temperature_one():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    tokens, logprobs, *_ = drawn_at(
        logits, slot_sampling(1, temperature=0.0), jnp.zeros(1, jnp.int32)
    )
    assert int(tokens[0]) == 1
    assert float(logprobs[0]) == pytest.approx(np.log(0.4), abs=1e-6)


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_a_filter_in_one_slot_changes_no_bit_of_the_others():
    logits = jax.random.normal(jax.random.key(0), (6, 300)) * 3
    plain = slot_sampling(6)
    mixed = plain._replace(top_k_S=np.array([0, 5, 0, 0, 0, 0], np.int32))
    positions = jnp.arange(6)
    tokens, logprobs, *_ = drawn_at(logits, plain, positions)
    with_filter = drawn_at(logits, mixed, positions)
    others = np.array([0, 2, 3, 4, 5])
    np.testing.assert_array_equal(tokens[others], with_filter[0][others])
    np.testing.assert_array_equal(logprobs[others], with_filter[1][others])


def test_a_certainty_has_logprob_zero_and_no_more():
    logits = jnp.zeros((1, 20)).at[0, 3].set(200)
    tokens, logprobs, *_ = drawn_at(logits, slot_sampling(1), jnp.zeros(1, jnp.int32))
    assert (int(tokens[0]), float(logprobs[0])) == (3, 0.0)

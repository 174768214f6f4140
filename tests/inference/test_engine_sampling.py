"""Sampling by itself: what is drawn, how often, and out of which tokens."""

import jax
import numpy as np
import pytest
from support.cases import others_slow

from marin_rl.inference import sampling
from marin_rl.inference.sampling import SlotSampling, filter_logits, seed_words, uniforms

draw = jax.jit(sampling.draw)


@pytest.mark.parametrize("vocabulary", others_slow([2, 7, 103, 512], 2, 7))
def test_draws_follow_the_weights(vocabulary):
    rng = np.random.default_rng(vocabulary)
    weights = rng.exponential(size=vocabulary).astype(np.float32)
    weights[rng.integers(vocabulary)] = 0
    count = 200_000
    uniform = (np.arange(count) + 0.5) / count
    drawn = draw(np.broadcast_to(weights, (count, vocabulary)), uniform.astype(np.float32))
    shares = np.bincount(drawn, minlength=vocabulary) / count
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=2 / count + 1e-5)


def test_a_token_of_weight_zero_is_never_drawn():
    weights = np.zeros((3, 50), np.float32)
    weights[:, 20], weights[1, 33] = 1e-30, 1
    for uniform in (0.0, 0.5, 1 - 2**-24):
        drawn = draw(weights, np.full(3, uniform, np.float32))
        assert set(np.asarray(drawn).tolist()) <= {20, 33}


def test_uniform_numbers_know_seed_and_position_only():
    seeds = np.array([seed_words(seed) for seed in (5, 6, 2**40 + 5, 5)], np.uint32)
    numbers = jax.jit(uniforms)
    first = np.asarray(numbers(seeds, np.array([3, 3, 3, 3], np.int32)))
    moved = np.asarray(numbers(seeds[::-1], np.array([3, 3, 3, 4], np.int32)))
    assert first[0] == first[3] == moved[0]
    assert moved[3] != first[0]
    assert len(set(first[:3].tolist())) == 3
    many = np.asarray(numbers(np.tile(seeds[:1], (4096, 1)), np.arange(4096, dtype=np.int32)))
    assert abs(many.mean() - 0.5) < 0.03
    assert (many >= 0).all()
    assert (many < 1).all()


def test_top_k_and_top_p_by_hand():
    logits, filtered = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)), jax.jit(filter_logits)

    def kept(top_k: int = 0, top_p: float = 1.0) -> list[bool]:
        asked = SlotSampling(
            temperature_S=np.ones(1, np.float32),
            top_p_S=np.full(1, top_p, np.float32),
            top_k_S=np.full(1, top_k, np.int32),
            min_p_S=np.zeros(1, np.float32),
            seed_S2=np.zeros((1, 2), np.uint32),
        )
        return np.isfinite(np.asarray(filtered(logits, asked)))[0].tolist()

    assert kept(top_k=2) == [False, True, False, True]
    assert kept(top_p=0.4) == [False, True, False, False]
    assert kept(top_p=0.41) == [False, True, False, True]
    assert kept(top_p=0.75) == [False, True, True, True]
    assert kept(top_k=99) == [True] * 4
    # of what top-k leaves (4/7 and 3/7), the first alone makes up half
    assert kept(top_k=2, top_p=0.5) == [False, True, False, False]

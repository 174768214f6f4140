"""Attention over blocks that are seen, against a softmax over everything with the rest masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import others_slow

from marin_rl.training import attention
from marin_rl.training.attention import attend, sight_of

HEADS, GROUP, SIZE = 2, 3, 5


def rows_of(rng, length):
    """Two rows of sequences of any lengths; in the second, completions share a prompt."""
    segments = np.zeros((2, length), np.int32)
    column = number = 0
    while column < length - 3:  # a little padding behind
        size = int(rng.integers(1, 9))
        number += 1
        segments[0, column : min(column + size, length - 3)] = number
        column += size
    prompt = int(rng.integers(1, length // 2))
    segments[1, :prompt] = 9
    segments[1, prompt:-2] = 1 + np.sort(rng.integers(0, 3, length - prompt - 2))
    prompts = segments.copy()
    prompts[1, :-2] = 9
    return segments, prompts


def dense(query, keys, values, segments, prompts):
    """The same by the definition, over every pair of positions."""
    index = np.arange(segments.shape[1])
    others = segments[:, None, :]
    seen = (segments[..., None] == others) | (prompts[..., None] == others)
    seen &= (others > 0) & (index[:, None] >= index)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, keys)
    weights = jnp.where(seen[:, None, None], jnp.exp(scores), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bkgts,bskh->btkgh", weights, values)


def ours(query, keys, values, weights, segments, prompts):
    found = attend(query, keys, values, sight_of(segments, prompts))
    return jnp.sum(found * weights), found


def theirs(query, keys, values, weights, segments, prompts):
    found = dense(query, keys, values, segments, prompts)
    return jnp.sum(found * weights), found


# Gradients of a random combination of what is attended to, and all of that.
OURS, THEIRS = (jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True)) for f in (ours, theirs))


@pytest.mark.parametrize(
    ("length", "block"), others_slow([(23, 4), (10, 64), (70, 64)], (23, 4), several=True)
)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_values_and_gradients_are_those_of_the_whole_softmax(length, block, seed):
    rng = np.random.default_rng(seed)
    segments, prompts = rows_of(rng, length)
    query, weights = rng.standard_normal((2, 2, length, HEADS, GROUP, SIZE)).astype(np.float32)
    keys, values = rng.standard_normal((2, 2, length, HEADS, SIZE)).astype(np.float32)
    arguments = (query, keys, values, weights, segments, prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "POSITIONS_PER_BLOCK", block)  # read while it is traced
        by_ours, found = OURS(*arguments)
    by_theirs, expected = THEIRS(*arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for mine, other in zip(by_ours, by_theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_blocks_that_are_seen_by_hand(monkeypatch):
    monkeypatch.setattr(attention, "POSITIONS_PER_BLOCK", 2)
    segments = jnp.array([[3, 3, 1, 1, 2, 2, 0]])  # a prompt and two completions of two tokens
    prompts = jnp.array([[3, 3, 3, 3, 3, 3, 0]])
    sight = sight_of(segments, prompts)
    np.testing.assert_array_equal(sight.counts.array, [[1, 2, 2, 0]])
    keys = sight.keys.array[0].tolist()
    assert [keys[0][:1], keys[1][:2], keys[2][:2]] == [[0], [0, 1], [0, 2]]


def test_a_square_of_the_row_never_exists():
    length = 16 * attention.POSITIONS_PER_BLOCK
    segments = jnp.asarray(np.arange(length)[None] // 50 + 1, jnp.int32)

    def loss(query, keys):
        sight = sight_of(segments, segments)
        return jnp.sum(attend(query, keys, keys, sight) ** 2)

    shapes = jax.ShapeDtypeStruct((1, length, 1, 1, 4), jnp.float32)
    keys = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(shapes, keys).compile().as_text()
    assert f"{length},{length}]" not in program
    assert "f32[1,16,1,64,64]" in program.replace("f32[16,64,64]", "f32[1,16,1,64,64]")


def test_attention_of_a_gpu_sees_the_same_pairs():
    rng = np.random.default_rng(5)
    length = 24
    segments, prompts = rows_of(rng, length)
    shape = (2, length, HEADS, GROUP, SIZE)
    query = rng.normal(size=shape).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, length, HEADS, SIZE)).astype(np.float32)
    pairs = attention.pairs_of(jnp.asarray(segments), jnp.asarray(prompts))
    assert pairs.seen is not None
    found = attention.attend_fused(
        jnp.asarray(query), jnp.asarray(keys), jnp.asarray(values), pairs.seen.array, 1.0, "xla"
    )
    expected = dense(query, keys, values, segments, prompts)
    inside = segments > 0  # padding gets some finite mean
    np.testing.assert_allclose(np.asarray(found)[inside], np.asarray(expected)[inside], atol=2e-5)
    assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize(
    ("flags", "asks"),
    [
        ("", False),
        ("--xla_gpu_exclude_nondeterministic_ops=true", True),
        ("--xla_dump_to=/tmp --xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=false", False),
    ],
)
def test_the_kernel_of_a_gpu_is_left_out_where_bits_are_to_be_the_same(flags, asks, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert attention.asks_for_determinism() is asks

"""Attention over blocks that are seen, against a softmax over everything with the rest masked."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from support.cases import others_slow

from marin_rl.config import MeshConfig
from marin_rl.errors import ConfigError
from marin_rl.models import fused_attention
from marin_rl.training import attention, context
from marin_rl.training.attention import Tokens, attend, sight_of
from marin_rl.training.mesh import layout_of

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


def positions_of(segments, prompts):
    """Positions within a sequence: completions continue the prompt of their row."""
    positions = np.zeros_like(segments)
    for row, (own, of_prompt) in enumerate(zip(segments, prompts, strict=True)):
        for number in np.unique(own[own > 0]):
            at = np.flatnonzero(own == number)
            before = np.sum((own == of_prompt[at[0]]) & (own != number))
            positions[row, at] = before + np.arange(len(at))
    return positions


def dense(query, keys, values, rows, window=None, cap=None):
    """The same by the definition, over every pair of positions."""
    segments, prompts, positions = rows
    index = np.arange(segments.shape[1])
    others = segments[:, None, :]
    seen = (segments[..., None] == others) | (prompts[..., None] == others)
    seen &= (others > 0) & (index[:, None] >= index)
    if window is not None:
        seen &= positions[:, None, :] > positions[..., None] - window
    scores = jnp.einsum("btkgh,bskh->bkgts", query, keys)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    weights = jnp.where(seen[:, None, None], jnp.exp(scores), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bkgts,bskh->btkgh", weights, values)


@cache
def gradients(attended, limits, block):
    """Gradients of a random combination of what is attended to, and all of that.

    `block` is read while it is traced.
    """

    def combined(query, keys, values, weights, *rows):
        found = attended(query, keys, values, rows, *limits)
        return jnp.sum(found * weights), found

    return jax.jit(jax.grad(combined, argnums=(0, 1, 2), has_aux=True))


def ours(query, keys, values, rows, *limits):
    return attend(query, keys, values, sight_of(*rows), *limits)


@pytest.mark.parametrize(
    ("length", "block"), others_slow([(23, 4), (10, 64), (70, 64)], (23, 4), several=True)
)
@pytest.mark.parametrize("limits", [(None, None), (5, 0.7)], ids=["plain", "window and cap"])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_values_and_gradients_are_those_of_the_whole_softmax(length, block, limits, seed):
    rng = np.random.default_rng(seed)
    segments, prompts = rows_of(rng, length)
    query, weights = rng.standard_normal((2, 2, length, HEADS, GROUP, SIZE)).astype(np.float32)
    keys, values = rng.standard_normal((2, 2, length, HEADS, SIZE)).astype(np.float32)
    given = (query, keys, values, weights, segments, prompts, positions_of(segments, prompts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "POSITIONS_PER_BLOCK", block)
        by_ours, found = gradients(ours, limits, block)(*given)
    by_theirs, expected = gradients(dense, limits, block)(*given)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for mine, other in zip(by_ours, by_theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_blocks_that_are_seen_by_hand(monkeypatch):
    monkeypatch.setattr(attention, "POSITIONS_PER_BLOCK", 2)
    segments = jnp.array([[3, 3, 1, 1, 2, 2, 0]])  # a prompt and two completions of two tokens
    prompts = jnp.array([[3, 3, 3, 3, 3, 3, 0]])
    sight = sight_of(segments, prompts, jnp.array([[0, 1, 2, 3, 2, 3, 0]]))
    np.testing.assert_array_equal(sight.counts, [[1, 2, 2, 0]])
    keys = sight.blocks[0].tolist()
    assert [keys[0][:1], keys[1][:2], keys[2][:2]] == [[0], [0, 1], [0, 2]]


def test_a_square_of_the_row_never_exists():
    length = 16 * attention.POSITIONS_PER_BLOCK
    segments = jnp.asarray(np.arange(length)[None] // 50 + 1, jnp.int32)

    def loss(query, keys):
        sight = sight_of(segments, segments, segments)
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

    @jax.jit
    def fused(query, keys, values, segments, prompts):
        pairs = attention.pairs_of(segments, prompts)
        return fused_attention.attend_fused(query, keys, values, pairs, None, "xla")

    found = fused(query, keys, values, segments, prompts)
    expected = jax.jit(dense)(query, keys, values, (segments, prompts, None))
    inside = segments > 0  # padding gets some finite mean
    np.testing.assert_allclose(np.asarray(found)[inside], np.asarray(expected)[inside], atol=2e-5)
    assert np.isfinite(np.asarray(found)).all()


@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "alone"])
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_attention_of_a_gpu_is_each_devices_own_on_a_mesh(axis, packed):
    rng, length = np.random.default_rng(5), 24
    query, weights = rng.standard_normal((2, 4, length, HEADS, GROUP, SIZE)).astype(np.float32)
    keys, values = rng.standard_normal((2, 4, length, HEADS, SIZE)).astype(np.float32)
    pairs = np.concatenate(
        [attention.pairs_of(*map(jnp.asarray, rows_of(rng, length))) for _ in range(2)]
    )

    def combined(query, keys, values):
        seen = jnp.asarray(pairs) if packed else None
        found = fused_attention.attend_fused(
            query, keys, values, seen, None if packed else 7, "xla"
        )
        return jnp.sum(found * weights), found

    graded = jax.grad(combined, argnums=(0, 1, 2), has_aux=True)
    expected = jax.jit(graded)(query, keys, values)
    layout = layout_of(MeshConfig(**{axis: 2}))
    cut = PartitionSpec(("data", "fsdp"), None, "tensor")
    with layout.active():
        placed = jax.device_put((query, keys, values), NamedSharding(layout.mesh, cut))
        program = jax.jit(graded).lower(*placed).compile()
        found = program(*placed)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    # nothing is gathered: of scores a device has those of half of the rows, or of the heads
    assert "all-gather" not in program.as_text()


def in_blocks(query, keys, values, sinks, rows, *limits):
    return context.attend_pieces(
        query, keys, values, context.sights_of_pieces(rows), *limits, sinks
    )


def by_kernel(query, keys, values, _, rows, window, cap):
    assert cap is None
    return context.attend_pieces_fused(query, keys, values, rows, window, "xla")


@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.parametrize(
    ("pieces", "limits"),
    [
        pytest.param(in_blocks, (5, 0.7), id="blocks"),
        pytest.param(in_blocks, (None, None), id="without-limits", marks=pytest.mark.slow),
        pytest.param(by_kernel, (5, None), id="kernel", marks=pytest.mark.slow),
    ],
)
def test_devices_that_share_rows_attend_as_one(monkeypatch, pieces, limits):
    monkeypatch.setattr(attention, "POSITIONS_PER_BLOCK", 4)
    rng, length = np.random.default_rng(7), 24
    query, weights = rng.standard_normal((2, 2, length, HEADS, GROUP, SIZE)).astype(np.float32)
    keys, values = rng.standard_normal((2, 2, length, HEADS, SIZE)).astype(np.float32)
    segments, prompts = rows_of(rng, length)
    rows = Tokens(*map(jnp.asarray, (segments, prompts, positions_of(segments, prompts))))
    weights *= (segments > 0)[..., None, None, None]  # padding gets some finite mean
    sinks = rng.standard_normal((HEADS, GROUP)).astype(np.float32)
    sinks = jnp.asarray(sinks) if pieces is in_blocks else None

    def combined(query, keys, values, sinks):
        n = context.context_size()
        arrays = [context.in_pieces(array, n) for array in (query, keys, values)]
        if n == 1:
            found = attend(*arrays, sight_of(*rows), *limits, sinks)
        else:
            found = pieces(*arrays, sinks, rows, *limits)
        found = context.in_order(found, n)
        return jnp.sum(found * weights), found * (weights != 0)

    graded = jax.jit(jax.grad(combined, argnums=(0, 1, 2, 3), has_aux=True))
    expected = graded(query, keys, values, sinks)
    with layout_of(MeshConfig(context=2)).active():
        found = graded(query, keys, values, sinks)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_each_device_has_an_early_and_a_late_piece_of_a_row():
    row = jnp.arange(8)[None]
    assert context.in_pieces(row, 2)[0].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert context.in_order(context.in_pieces(row, 2), 2)[0].tolist() == list(range(8))
    device, place = context.places_of(jnp.arange(16), 8, 2)
    assert device.tolist() == [0, 0, 1, 1, 1, 1, 0, 0] * 2
    assert place.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7]
    with pytest.raises(ConfigError, match=r"rows of a multiple of 4 tokens.* found 10"):
        context.in_pieces(jnp.arange(10)[None], 2)


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
    assert fused_attention.asks_for_determinism() is asks

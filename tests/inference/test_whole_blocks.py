"""The accelerator's cache: one block a layer, no conditional in a step, and the GPU's kernel.

The kernel runs interpreted, as Pallas does on a device without it.
"""

import re
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import others_slow
from support.models import tiny_model

from marin_rl.inference import decoder
from marin_rl.inference.kv_cache import (
    KERNEL_POSITIONS,
    Cache,
    Limits,
    WholeBlock,
    attend,
    attend_by_kernel,
    block_size,
    cache_length,
    empty_cache,
    in_blocks,
)
from marin_rl.inference.pieces import Extension, packed
from marin_rl.inference.programs import copy_slots, extend_slots, prefill_slots
from marin_rl.inference.weights import fused_weights, read_model, rotary_table

SLOTS, CONTEXT = 4, 200
DTYPE = jnp.dtype(jnp.float32)


def whole_block(rng: np.random.Generator, heads: int, size: int, positions: int) -> WholeBlock:
    shape = SLOTS, heads, positions, size
    keys, values = rng.normal(size=(2, *shape)).astype(np.float32)
    return WholeBlock(jnp.asarray(keys), jnp.asarray(values))


@pytest.mark.usefixtures("itself_compiled_quickly")
@pytest.mark.parametrize(
    ("positions", "window", "sinks"),
    others_slow(
        product([KERNEL_POSITIONS, 3 * KERNEL_POSITIONS], [None, 20], [False, True]),
        (KERNEL_POSITIONS, None, False),
        (3 * KERNEL_POSITIONS, 20, True),
        several=True,
    ),
)
def test_the_kernel_attends_as_the_definition_does(
    positions: int,
    window: int | None,
    sinks: bool,  # noqa: FBT001 - a parameter
) -> None:
    rng = np.random.default_rng(positions)
    heads, queries, size = 2, 3, 16
    block = whole_block(rng, heads, size, positions)
    query = jnp.asarray(rng.normal(size=(SLOTS, heads, queries, size)), jnp.float32)
    sink = jnp.asarray(rng.normal(size=(heads, queries)), jnp.float32) if sinks else None
    limits = Limits(window, None, sink)
    at = jnp.asarray([0, 5, positions // 2 + 1, positions - 1], jnp.int32)

    @jax.jit
    def both(query: jax.Array, block: WholeBlock, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        by_kernel = attend_by_kernel(query, block, at, limits, interpret=True)
        return by_kernel, attend(query, (block,), at, jnp.max(at), None, limits)

    by_kernel, plainly = both(query, block, at)
    np.testing.assert_allclose(by_kernel, plainly, atol=1e-5, rtol=0)
    # by hand, for the slot in the middle
    slot, end = 2, positions // 2 + 2
    seen = slice(max(0, end - (window or end)), end)
    scores = np.einsum("kgh,kth->kgt", query[slot], block.keys[slot, :, seen])
    weights = np.exp(scores)
    total = weights.sum(-1) + (0 if sink is None else np.exp(sink))
    truth = np.einsum("kgt,kth->kgh", weights / total[..., None], block.values[slot, :, seen])
    np.testing.assert_allclose(by_kernel[slot], truth.reshape(-1), atol=1e-5, rtol=0)


class Played:
    """A tiny model's caches after each kind of program, in blocks or whole, and its logits."""

    def __init__(self, *, whole: bool) -> None:
        model = tiny_model(seed=3, context_length=CONTEXT)
        self.spec, weights = read_model(model)
        self.cache = empty_cache(self.spec, SLOTS, CONTEXT, DTYPE, whole=whole)
        rotary = rotary_table(self.spec, cache_length(self.cache))
        self.fused = fused_weights(self.spec, weights, DTYPE, rotary)
        self.step = jax.jit(partial(decoder.decode_step, self.spec))

    def play(self) -> list[np.ndarray]:
        rng = np.random.default_rng(8)
        prompts = rng.integers(2, 100, (2, 64)).astype(np.int32)
        # slot 3 takes no prompt, slots 0 and 2 the same
        source = np.asarray([0, 1, 0, 2], np.int32)
        inputs = self.spec, self.fused
        self.cache = prefill_slots(*inputs, self.cache, prompts, np.int32(2), source)
        logits = self.decode([60, 20, 5, -1], steps=6)
        extension = Extension(3, 0, rng.integers(2, 100, 90).astype(np.int32))
        for pieces in packed([extension], SLOTS, 2):
            self.cache = extend_slots(*inputs, self.cache, pieces)
        self.cache = copy_slots(
            self.cache, np.asarray([3, 0, 0, 0]), np.asarray([1, 0, 0, 0]), np.int32(1)
        )
        return logits + self.decode([66, 90, 11, 90], steps=3)

    def decode(self, positions: list[int], steps: int) -> list[np.ndarray]:
        at, logits = np.asarray(positions, np.int32), list[np.ndarray]()
        for number in range(steps):
            tokens = np.full(SLOTS, 7 + number, np.int32)
            here = np.where(at < 0, at, at + number)
            each, self.cache = self.step(self.fused, self.cache, tokens, here)
            logits.append(np.asarray(each)[at >= 0])
        return logits


@pytest.mark.usefixtures("itself_compiled_quickly")
def test_one_block_gives_the_logits_of_many_by_every_program() -> None:
    whole, blocks = Played(whole=True), Played(whole=False)
    assert [len(played.cache[0]) for played in (whole, blocks)] == [1, 4]
    for ours, theirs in zip(whole.play(), blocks.play(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)


def test_a_whole_block_grows_with_zeros_behind() -> None:
    block = whole_block(np.random.default_rng(1), 2, 8, KERNEL_POSITIONS)
    length = block_size(2 * KERNEL_POSITIONS - 5, whole=True)
    (grown,) = in_blocks((block,), length, length)
    assert length == 2 * KERNEL_POSITIONS
    for before, after in zip(block, grown, strict=True):
        np.testing.assert_array_equal(after[:, :, :KERNEL_POSITIONS], before)
        np.testing.assert_array_equal(after[:, :, KERNEL_POSITIONS:], 0)


def compiled_step(*, whole: bool) -> str:
    played = Played(whole=whole)
    vectors = [np.zeros(SLOTS, np.int32)] * 2
    step = jax.jit(partial(decoder.decode_step, played.spec), donate_argnums=1)
    return step.lower(played.fused, played.cache, *vectors).compile().as_text()


def test_a_step_on_whole_blocks_has_no_conditional_and_writes_in_place() -> None:
    text, in_blocks = compiled_step(whole=True), compiled_step(whole=False)
    count = lambda pattern, text: len(re.findall(pattern, text))
    layers = 2
    # the pattern does find them where they are
    assert count(r"\bconditional\(", in_blocks) == 3 * layers
    assert count(r"\bconditional\(", text) == 0
    assert count(r"(may|must)-alias", text) == 2 * layers  # keys and values are donated


def lowered_for_gpu(function: Any, *arguments: Any) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_a_layer_on_a_gpu_is_two_scatters_and_one_kernel() -> None:
    shape = jax.ShapeDtypeStruct
    spec = Played(whole=True).spec
    make = partial(empty_cache, spec, 64, 2048, jnp.dtype(jnp.bfloat16), whole=True)
    cache: Cache = jax.eval_shape(make)
    (block,) = cache[0]
    assert isinstance(block, WholeBlock)
    S, K, _, H = block.keys.shape
    query = shape((S, K, 2, 2 * H), jnp.bfloat16)
    wide = WholeBlock(*(shape((*leaf.shape[:3], 2 * H), leaf.dtype) for leaf in block))
    limits = Limits(None, None, None)
    positions = shape((S,), jnp.int32)
    text = lowered_for_gpu(
        lambda q, k, v, at: attend_by_kernel(q, WholeBlock(k, v), at, limits),
        query, *wide, positions,
    )  # fmt: skip
    assert text.count("xla.gpu.triton") == 1
    # nothing of the cache's size is transposed or copied on the way to the kernel
    assert not re.search(r"stablehlo\.(transpose|scatter|case|if)", text)
    key = shape((S, K, H), jnp.bfloat16)
    from_step = lowered_for_gpu(
        lambda k, v, key, at: decoder.write((WholeBlock(k, v),), key, key, at),
        *block, key, positions,
    )  # fmt: skip
    assert from_step.count('"stablehlo.scatter"') == 2

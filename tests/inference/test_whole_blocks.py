"""The accelerator's programs: one block, no conditional, kernels of a GPU.

The decode kernel runs interpreted, as Pallas does on a device without it.
"""

import re
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import NamedSharding, PartitionSpec
from support.cases import others_slow
from support.models import tiny_model

from marin_rl.config import MeshConfig
from marin_rl.cpu_streams import Lanes
from marin_rl.inference import decoder, programs
from marin_rl.inference.batch import RunningBatch
from marin_rl.inference.kv_cache import (
    KERNEL_POSITIONS,
    Limits,
    WholeBlock,
    attend,
    attend_by_kernel,
    block_size,
    cache_length,
    empty_cache,
    in_blocks,
)
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.pieces import Extension, packed
from marin_rl.inference.programs import (
    ChunkInputs,
    SlotState,
    copy_slots,
    decode_chunk,
    extend_slots,
    prefill_slots,
)
from marin_rl.inference.sampling import UNKNOWN, Asked
from marin_rl.inference.weights import fused_weights, read_model, rotary_table
from marin_rl.training.mesh import layout_of

SLOTS, CONTEXT = 4, 200
DTYPE = jnp.dtype(jnp.float32)
# Of a chunk on an accelerator: it draws, it filters, it does all that may be asked.
PROGRAMS = Asked(False, False), Asked(True, False), Asked(True, True)


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
    def each(query: jax.Array, block: WholeBlock, at: jax.Array) -> tuple[jax.Array, ...]:
        by_kernel = attend_by_kernel(query, block, at, limits, interpret=True)
        return by_kernel, attend(query, (block,), at, jnp.max(at), None, limits)

    by_kernel, plainly = each(query, block, at)
    np.testing.assert_allclose(by_kernel, plainly, atol=1e-5, rtol=0)
    # by hand, for the slot in the middle
    slot, end = 2, positions // 2 + 2
    seen = slice(max(0, end - (window or end)), end)
    scores = np.einsum("kgh,kth->kgt", query[slot], block.keys[slot, :, seen])
    weights = np.exp(scores)
    total = weights.sum(-1) + (0 if sink is None else np.exp(sink))
    truth = np.einsum("kgt,kth->kgh", weights / total[..., None], block.values[slot, :, seen])
    np.testing.assert_allclose(by_kernel[slot], truth.reshape(-1), atol=1e-5, rtol=0)


@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.usefixtures("itself_compiled_quickly")
@pytest.mark.parametrize("axis", others_slow(["data", "tensor"], "tensor"))
def test_each_device_of_a_mesh_attends_to_its_own_slots_and_heads(axis: str) -> None:
    rng = np.random.default_rng(2)
    block, at = whole_block(rng, 2, 16, KERNEL_POSITIONS), jnp.asarray([0, 5, 70, 127], jnp.int32)
    query = jnp.asarray(rng.normal(size=(SLOTS, 2, 3, 16)), jnp.float32)
    limits = Limits(20, None, jnp.asarray(rng.normal(size=(2, 3)), jnp.float32))

    def attended(query: jax.Array, block: WholeBlock, at: jax.Array) -> jax.Array:
        return attend_by_kernel(query, block, at, limits, interpret=True)

    expected = jax.jit(attended)(query, block, at)
    layout = layout_of(MeshConfig(**{axis: 2}))
    assert layout.mesh is not None
    with layout.active():
        cut = NamedSharding(layout.mesh, PartitionSpec(("data", "fsdp"), "tensor"))
        placed = jax.device_put((query, block), cut)
        program = jax.jit(attended).lower(*placed, at).compile()
        np.testing.assert_allclose(program(*placed, at), expected, atol=1e-6, rtol=0)
    # of queries and of the cache a device has its own
    assert not re.search(r"f32\[4,2,(3|128),16\]\S* all-gather", str(program.as_text()))


class Played:
    """A tiny model's caches after each kind of program, in a form of its cache, and its logits."""

    def __init__(self, form: str, **sizes: Any) -> None:
        model = tiny_model(seed=3, context_length=CONTEXT, **sizes)
        self.spec, weights = read_model(model)
        self.cache = empty_cache(self.spec, SLOTS, CONTEXT, DTYPE, whole=form == "whole")
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


@pytest.mark.slow
@pytest.mark.usefixtures("itself_compiled_quickly")
def test_one_block_gives_the_logits_of_many_by_every_program() -> None:
    whole, blocks = Played("whole"), Played("blocks")
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


CONDITIONAL, ALIAS = r"\bconditional\(", r"(may|must)-alias"
# every way from a running program to the host
HOST = r"\b(infeed|outfeed|send|recv|copy-start)\(|xla_ffi_python_cpu_callback|S\(5\)"


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def lowered_step(form: str, layers: int = 2) -> Any:
    played = Played(form, layers=layers)
    vectors = [np.zeros(SLOTS, np.int32)] * 2
    step = jax.jit(partial(decoder.decode_step, played.spec), donate_argnums=1)
    return step.lower(played.fused, played.cache, *vectors)


@pytest.mark.slow
def test_a_step_has_no_conditional_and_writes_in_place() -> None:
    lowered = lowered_step("whole")
    blocks = lowered_step("blocks").compile().as_text()
    # the pattern does find them where they are: in three blocks of each of two layers
    assert count(CONDITIONAL, blocks) == 6
    text = lowered.compile().as_text()
    assert count(CONDITIONAL, text) == count(HOST, text) == 0
    # keys and values of each of two layers are donated, and written once
    assert count(ALIAS, text) == count(r'"stablehlo\.scatter"', lowered.as_text()) == 4


@pytest.mark.slow
def test_a_chunk_samples_on_the_device_and_keeps_its_state_there() -> None:
    """As the engine runs it: cache donated, tokens in a loop, the last chunk's state an input."""
    played = Played("whole")
    vocabulary = played.spec.vocabulary
    rows = ExtraRows(Lanes(1, SLOTS), CONTEXT, vocabulary, lambda arrays: arrays)
    inputs = RunningBatch(SLOTS, vocabulary, None, rows).inputs
    limits = programs.Limits(np.int32(4), np.int32(0))
    last, unread = SlotState(*np.zeros((3, SLOTS), np.int32)), np.ones(SLOTS, np.bool_)
    chunk = ChunkInputs(inputs, rows.on_device(0), limits, last, unread)
    # where the device looks, each for what some row asks for: adjusted logits (4), filters (2),
    # reports (2); where the host has looked, none
    for asked, conditionals in ((UNKNOWN, 8), *((each, 0) for each in PROGRAMS)):
        sizes = {"spec": played.spec, "steps": 4, "asked": asked}
        lowered = decode_chunk.lower(played.fused, played.cache, chunk, **sizes)
        text = str(lowered.compile().as_text())
        assert count(HOST, text) == 0
        assert count(ALIAS, text) == 4
        assert count(CONDITIONAL, text) == conditionals


def lowered_for_gpu(function: Any, *arguments: Any) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_a_layer_on_a_gpu_is_two_scatters_and_one_kernel() -> None:
    shape = jax.ShapeDtypeStruct
    S, K, B, H = 64, 2, 2048, 64
    leaf = shape((S, K, B, H), jnp.bfloat16)
    query, key = shape((S, K, 7, H), jnp.bfloat16), shape((S, K, H), jnp.bfloat16)
    limits = Limits(None, None, None)
    positions = shape((S,), jnp.int32)
    text = lowered_for_gpu(
        lambda q, k, v, at: attend_by_kernel(q, WholeBlock(k, v), at, limits),
        query, leaf, leaf, positions,
    )  # fmt: skip
    assert text.count("xla.gpu.triton") == 1
    # nothing of the cache's size is transposed, sliced or copied on the way to the kernel
    assert not re.search(r"stablehlo\.(transpose|scatter|case|if|dynamic_slice|gather)", text)
    from_step = lowered_for_gpu(
        lambda k, v, key, at: decoder.write((WholeBlock(k, v),), key, key, at)[0],
        leaf, leaf, key, positions,
    )  # fmt: skip
    assert from_step.count('"stablehlo.scatter"') == 2


PROMPTS = 2, 96, 2, 3, 16  # rows, positions, key/value heads, query heads of each, head size


@pytest.mark.parametrize("window", [None, 7])
def test_the_form_of_cudnn_attends_to_prompts_as_the_definition_does(window: int | None) -> None:
    R, P, K, _, H = PROMPTS
    rng = np.random.default_rng(5)
    query = jnp.asarray(rng.normal(size=PROMPTS), jnp.float32)
    key, value = jnp.asarray(rng.normal(size=(2, R, P, K, H)), jnp.float32)
    limits = Limits(window, None, None)
    fused = decoder.attend_fused(query, key, value, None, window, "xla").reshape(R, P, -1)
    scores = np.einsum("rpkgh,rtkh->rkgpt", query, key)
    behind = np.arange(P)[:, None] - np.arange(P)
    seen = (behind >= 0) & (behind < (window or P))
    weights = np.where(seen, np.exp(scores), 0)
    shares = weights / weights.sum(-1, keepdims=True)
    truth = np.einsum("rkgpt,rtkh->rpkgh", shares, value).reshape(R, P, -1)
    np.testing.assert_allclose(fused, truth, atol=1e-5, rtol=0)
    plainly = decoder._attend_causally(
        query, jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2), limits
    )
    np.testing.assert_allclose(fused, plainly, atol=1e-5, rtol=0)


def test_prompts_on_a_gpu_are_attended_to_by_cudnn_in_tiles_of_2048_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # JAX asks the cuDNN of this machine, which lowering for another does not need
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    R, P, K, G, H = 4, 512, 2, 7, 64
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    text = lowered_for_gpu(
        lambda q, k, v: decoder.attend_fused(q, k, v, None),
        shape((R, P, K, G, H)), shape((R, P, K, H)), shape((R, P, K, H)),
    )  # fmt: skip
    assert text.count("__cudnn$fmhaSoftmax") == 1
    # no scores in memory, and no copy of keys for each query head
    assert "512x512" not in text
    tiles = {P: decoder.prefill_tile(64, P, whole=True) for P in (32, 512, 2048, 8192)}
    assert tiles == {32: 64, 512: 4, 2048: 1, 8192: 1}

"""The accelerator's programs: one block, layers in a scan, no conditional, kernels of a GPU.

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
from support.cases import others_slow
from support.models import tiny_model

from marin_rl.cpu_streams import Lanes
from marin_rl.inference import decoder, programs
from marin_rl.inference.batch import RunningBatch
from marin_rl.inference.kv_cache import (
    KERNEL_POSITIONS,
    Limits,
    StackedBlock,
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
from marin_rl.inference.weights import fused_weights, read_model, rotary_table
from marin_rl.models.spec import LayerKind, Rope

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
    others = whole_block(rng, heads, size, positions)
    stack = StackedBlock(*(jnp.stack(pair, 1) for pair in zip(others, block, strict=True)))

    @jax.jit
    def each(query: jax.Array, block: WholeBlock, at: jax.Array) -> tuple[jax.Array, ...]:
        by_kernel = attend_by_kernel(query, block, at, limits, interpret=True)
        of_stack = attend_by_kernel(query, stack._replace(layer=1), at, limits, interpret=True)
        return by_kernel, of_stack, attend(query, (block,), at, jnp.max(at), None, limits)

    by_kernel, of_stack, plainly = each(query, block, at)
    np.testing.assert_array_equal(of_stack, by_kernel)
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
    """A tiny model's caches after each kind of program, in a form of its cache, and its logits."""

    def __init__(self, form: str, **sizes: Any) -> None:
        model = tiny_model(seed=3, context_length=CONTEXT, **sizes)
        self.spec, weights = read_model(model)
        stacked = form == "stacked"
        forms = {"whole": form != "blocks", "stacked": stacked}
        self.cache = empty_cache(self.spec, SLOTS, CONTEXT, DTYPE, **forms)
        rotary = rotary_table(self.spec, cache_length(self.cache))
        self.fused = fused_weights(self.spec, weights, DTYPE, rotary, stacked=stacked)
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


@pytest.mark.slow
@pytest.mark.usefixtures("itself_compiled_quickly")
@pytest.mark.parametrize("sizes", [{"qkv_bias": True}, {"window": 20}, {"experts": 4}])
def test_layers_in_a_scan_give_the_logits_of_layers_one_by_one(sizes: dict[str, Any]) -> None:
    """Five layers, also where every second one has a window: two periods, and half of a third."""
    rope = Rope(theta=10_000.0, size=8)
    kinds = (LayerKind(rope=rope, window=sizes.pop("window", None)), LayerKind(rope=rope)) * 2
    sizes |= {"kinds": (*kinds, kinds[0]), "experts_chosen": 2}
    stacked, apart = Played("stacked", **sizes), Played("whole", **sizes)
    for ours, theirs in zip(stacked.play(), apart.play(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
    ((stack,),) = stacked.cache
    pairs = zip(*(of[0] for of in apart.cache), strict=True)
    for leaf, of_layers in zip(stack[:2], pairs, strict=True):
        np.testing.assert_allclose(leaf, np.stack(of_layers, 1), atol=2e-5, rtol=0)


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
    whole, stacked = lowered_step("whole"), lowered_step("stacked")
    blocks = lowered_step("blocks").compile().as_text()
    # the pattern does find them where they are: in three blocks of each of two layers
    assert count(CONDITIONAL, blocks) == 6
    # keys and values of each layer, or of all, are donated; a layer writes twice
    for lowered, donated, scatters in ((whole, 4, 4), (stacked, 2, 2)):
        text = lowered.compile().as_text()
        assert count(CONDITIONAL, text) == count(HOST, text) == 0
        assert count(ALIAS, text) == donated
        assert count(r'"stablehlo\.scatter"', lowered.as_text()) == scatters


def test_the_programs_of_a_scan_are_as_long_for_any_number_of_layers() -> None:
    few, many = lowered_step("stacked", 2).as_text(), lowered_step("stacked", 12).as_text()
    assert len(many.splitlines()) == len(few.splitlines())
    assert len(lowered_step("whole", 4).as_text()) > 1.5 * len(lowered_step("whole").as_text())
    lines = [len(lowered_prefill(layers).as_text().splitlines()) for layers in (2, 12)]
    assert lines[0] == lines[1]


def lowered_prefill(layers: int) -> Any:
    played = Played("stacked", layers=layers)
    tokens, source = np.zeros((2, 64), np.int32), np.zeros(SLOTS, np.int32)
    inputs = played.spec, played.fused, played.cache, tokens, np.int32(2), source
    return prefill_slots.lower(*inputs)


@pytest.mark.slow
def test_a_chunk_samples_on_the_device_and_keeps_its_state_there() -> None:
    """As the engine runs it: cache donated, tokens in a loop, the last chunk's state an input."""
    played = Played("stacked")
    vocabulary = played.spec.vocabulary
    rows = ExtraRows(Lanes(1, SLOTS), CONTEXT, vocabulary, lambda arrays: arrays)
    inputs = RunningBatch(SLOTS, vocabulary, None, rows).inputs
    limits = programs.Limits(np.int32(4), np.int32(0))
    last, unread = SlotState(*np.zeros((3, SLOTS), np.int32)), np.ones(SLOTS, np.bool_)
    chunk = ChunkInputs(inputs, rows.on_device(0), limits, last, unread)
    # of sampling, each for what some row asks for: adjusted logits (4), filters (2), reports (2)
    for plain, conditionals in ((False, 8), (True, 0)):
        sizes = {"spec": played.spec, "steps": 4, "plain": plain}
        lowered = decode_chunk.lower(played.fused, played.cache, chunk, **sizes)
        text = str(lowered.compile().as_text())
        assert count(HOST, text) == 0
        assert count(ALIAS, text) == 2
        assert count(CONDITIONAL, text) == conditionals


def lowered_for_gpu(function: Any, *arguments: Any) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("stacked", [False, True])
def test_a_layer_on_a_gpu_is_two_scatters_and_one_kernel(
    stacked: bool,  # noqa: FBT001 - a parameter
) -> None:
    shape = jax.ShapeDtypeStruct
    S, L, K, B, H = 64, 24, 2, 2048, 64
    leaf = shape((S, L, K, B, H) if stacked else (S, K, B, H), jnp.bfloat16)
    make: Any = partial(StackedBlock, layer=7) if stacked else WholeBlock
    query, key = shape((S, K, 7, H), jnp.bfloat16), shape((S, K, H), jnp.bfloat16)
    limits = Limits(None, None, None)
    positions = shape((S,), jnp.int32)
    text = lowered_for_gpu(
        lambda q, k, v, at: attend_by_kernel(q, make(k, v), at, limits),
        query, leaf, leaf, positions,
    )  # fmt: skip
    assert text.count("xla.gpu.triton") == 1
    # nothing of the cache's size is transposed, sliced or copied on the way to the kernel
    assert not re.search(r"stablehlo\.(transpose|scatter|case|if|dynamic_slice|gather)", text)
    from_step = lowered_for_gpu(
        lambda k, v, key, at: decoder.write((make(k, v),), key, key, at)[0][:2],
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
    fused = decoder.attend_fused(query, key, value, limits, "xla")
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
    limits = Limits(None, None, None)
    text = lowered_for_gpu(
        lambda q, k, v: decoder.attend_fused(q, k, v, limits),
        shape((R, P, K, G, H)), shape((R, P, K, H)), shape((R, P, K, H)),
    )  # fmt: skip
    assert text.count("__cudnn$fmhaSoftmax") == 1
    # no scores in memory, and no copy of keys for each query head
    assert "512x512" not in text
    tiles = {P: decoder.prefill_tile(64, P, whole=True) for P in (32, 512, 2048, 8192)}
    assert tiles == {32: 64, 512: 4, 2048: 1, 8192: 1}

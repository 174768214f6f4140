"""The engine over a mesh: what one device says, from the trainer's own arrays."""

from contextlib import closing
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from inference.engines import PROGRAMS, AcceleratorRunner
from support.models import tiny_model
from support.quick_programs import run_on_devices

from marin_rl.config import EngineConfig, MeshConfig
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import GenerationRequest
from marin_rl.inference.programs import ChunkInputs, Limits, decode_chunk
from marin_rl.inference.runner import Runner
from marin_rl.inference.weights import compiled_layers, fused_weights, read_model
from marin_rl.models.module import LanguageModel
from marin_rl.training.mesh import layout_of
from marin_rl.training.model import named_parameters, with_parameters
from marin_rl.types import Sampling

pytestmark = pytest.mark.usefixtures("compiled_quickly")

CONTEXT = 96
VOCABULARY = 104  # every axis divides by 2


def model_of(seed: int) -> LanguageModel:
    return tiny_model(seed=seed, context_length=CONTEXT, vocabulary=VOCABULARY)


def on_mesh(model: LanguageModel, **sizes: int) -> LanguageModel:
    """The model with its arrays where the trainer would place them."""
    placed = layout_of(MeshConfig(**sizes)).place_parameters(named_parameters(model), model)
    return with_parameters(model, placed)


def engine_of(model: LanguageModel, programs: type[Runner] = Runner) -> Engine:
    config = EngineConfig(slots=8, chunk_steps=4, prefill_rows=4)
    return Engine(model, config, context_length=CONTEXT, programs=programs)


def requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(
            prompt_ids=rng.integers(2, VOCABULARY, length).astype(np.int32),
            n=n,
            sampling=Sampling(max_tokens=12, temperature=0.0, seed=7),
        )
        for length, n in ((1, 1), (9, 3), (40, 5), (50, 2))
    ]


def answers(engine: Engine) -> list[tuple[np.ndarray, np.ndarray]]:
    futures = [engine.submit(request) for request in requests()]
    samples = [sample for future in futures for sample in future.result(timeout=300).samples]
    return [(sample.token_ids, sample.logprobs) for sample in samples]


@cache
def expected(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Results of one device."""
    with closing(engine_of(model_of(seed))) as engine:
        return answers(engine)


def assert_alike(found: list, truth: list) -> None:
    assert len(found) == len(truth) == 11
    for (tokens, logprobs), (true_tokens, true_logprobs) in zip(found, truth, strict=True):
        np.testing.assert_array_equal(tokens, true_tokens)
        np.testing.assert_allclose(logprobs, true_logprobs, atol=1e-5, rtol=0)


def pointers(arrays: object) -> set[int]:
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(eqx.filter(arrays, eqx.is_array))
        for shard in leaf.addressable_shards
    }


def check(programs: type[Runner] = Runner, **sizes: int) -> None:
    """Greedy answers as on one device; a swap takes references and compiles nothing."""
    first, second = model_of(0), model_of(1)
    spread, other = on_mesh(first, **sizes), on_mesh(second, **sizes)
    with closing(engine_of(spread, programs)) as engine:
        assert pointers(engine.policy.weights) <= pointers(spread)
        assert_alike(answers(engine), expected(0))
        check_spread(engine, **sizes)
        compiled = [program._cache_size() for program in PROGRAMS]
        engine.swap(other, 1, "one")
        assert pointers(engine.policy.weights) <= pointers(other)
        assert_alike(answers(engine), expected(1))
        assert [program._cache_size() for program in PROGRAMS] == compiled


def check_spread(engine: Engine, data: int = 1, fsdp: int = 1, tensor: int = 1) -> None:
    """Slots lie over data and fsdp, heads over tensor, before and after the programs ran."""
    for leaf in jax.tree.leaves(engine._runner.memory.caches):
        slots, heads, *rest = leaf.shape
        shard = leaf.addressable_shards[0].data
        assert shard.shape == (slots // (data * fsdp), heads // tensor, *rest)


@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "programs"),
    [("data", Runner), ("fsdp", Runner), ("tensor", Runner), ("tensor", AcceleratorRunner)],
)
def test_two_devices_answer_as_one(axis, programs):
    check(programs, **{axis: 2})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_devices_answer_as_one():
    run_on_devices(8, Path(__file__), "check(data=2, fsdp=2, tensor=2)")


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
def test_only_weights_over_fsdp_are_gathered_and_only_where_they_are_fused():
    with closing(engine_of(on_mesh(model_of(0), fsdp=2))) as engine:
        runner, table = engine._runner, engine._batch
        weights, limits = engine.policy.weights, Limits(np.int32(4), np.int32(0))
        given = ChunkInputs(table.inputs, table.extras.on_device(0), limits)
        sizes, dtype = {"spec": engine.spec}, np.dtype(np.float32)
        with runner._placement.active():
            fuse = compiled_layers.lower(layers=weights.layers, dtype=dtype, **sizes)
            fused = fused_weights(engine.spec, weights, dtype, runner.rotary)
            chunk = decode_chunk.lower(fused, runner.memory.caches[0], given, **sizes, steps=4)
        in_fuse, in_chunk = gathers(fuse), gathers(chunk)
    assert in_fuse
    # tokens, logprobs and counts may be gathered in a chunk; weights [.., 32] and the cache never
    assert not [line for line in in_chunk if ",32]" in line or ",64]" in line], in_chunk


def gathers(program: jax.stages.Lowered) -> list[str]:
    """Gathers of a program: the results' types."""
    compiled = program.compile().as_text()
    assert compiled is not None
    return [
        line.split(" all-gather(")[0] for line in compiled.splitlines() if " all-gather(" in line
    ]


@pytest.mark.slow
def test_a_model_on_one_device_stays_there():
    spec, weights = read_model(model_of(0))
    with closing(engine_of(model_of(0))) as engine:
        assert engine.spec == spec
        for leaf in jax.tree.leaves((engine.policy.weights, engine._runner.memory.caches)):
            assert leaf.sharding.device_set == {jax.devices()[0]}
        assert len(jax.tree.leaves(weights)) == len(jax.tree.leaves(engine.policy.weights))

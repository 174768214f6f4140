"""The planner's memory of a step, against XLA's own analysis of the compiled programs.

Nothing is computed and no array is made: programs are compiled from shapes.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.quick_programs import quick_programs, run_on_devices

from marin_rl.config import Config, load_config
from marin_rl.planning import StepMemory, architecture_of
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.compiled_step import CompiledStep, policy_settings
from marin_rl.training.model import parameter_structs
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.state import template_of
from marin_rl.training.step import TEACHER, MicrobatchRange, _by_moment
from marin_rl.training.step_types import StepArrays, TrainableParams, TrainState

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
FIELDS = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "vocab_size")

UNROLLED = (256, 4, 4, 2, 768, 4096)
WIDE = (512, 2, 8, 2, 1024, 8192)
LARGE_VOCABULARY = (192, 12, 3, 3, 512, 16_384)
SCANNED = (256, 12, 4, 2, 768, 4096)
SMOLLM2_135M = (576, 30, 9, 3, 1536, 49_152)
CHECKPOINTING = "training.gradient_checkpointing=true"
LORA = "policy.lora.rank=8"
EIGHT_BIT = "training.optimizer=adamw_8bit"
TAUGHT = "distillation={loss: {top_k: 64}}"
BFLOAT16 = "policy.compute_dtype=bfloat16"


def configured(sizes: Sequence[int], length: int, rows: int, *more: str) -> Config:
    model = ", ".join(f"{name}: {size}" for name, size in zip(FIELDS, sizes, strict=True))
    return load_config(
        DEBUG,
        [
            f"policy.model={{{model}}}",
            f"policy.context_length={length}",
            f"batching.length_buckets=[{length}]",
            f"training.microbatch_sequences={rows}",
            f"rollouts.group_size={rows}",
            "rollouts.groups_per_round=1",  # one microbatch, so one lane
            "rollouts.shards_per_round=1",
            *more,
        ],
    )


def bytes_of(program: Any, *arguments: Any) -> int:
    """XLA's peak of a program: arguments, results that are no argument, temporaries."""
    found = program.lower(*arguments).compile().memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def jitted(called: Any) -> Any:
    """The jitted function behind those that call it."""
    while not hasattr(called, "lower"):
        called = inspect.getclosurevars(inspect.unwrap(called)).nonlocals["jitted"]
    return called


def step_bytes(config: Config, rows: int, length: int) -> int:
    """The most of both halves of a compiled step, with what else lies there meanwhile."""
    tokenizer, settings = character_tokenizer(), policy_settings(config)
    if (taught := config.distillation) is not None:
        spec = template_of(config.policy, tokenizer).spec
        settings = replace(settings, distillation=taught, teacher=spec)
    program = CompiledStep(config, tokenizer, policy_adamw(config.training), settings)
    state, dtype = program.placed_like, jnp.dtype(program.settings.compute_dtype)
    mesh = program.layout.mesh
    of_rows = mesh and NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"), None))
    frozen = {
        name: jax.ShapeDtypeStruct(each.shape, dtype)
        for name, each in parameter_structs(program.template).items()
        if name not in state.parameters
    }
    if taught is not None:
        beside = parameter_structs(program.template).items()
        frozen |= {f"{TEACHER}{n}": jax.ShapeDtypeStruct(p.shape, dtype) for n, p in beside}

    def array(kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, rows, length), kind, sharding=of_rows)

    whole, real = array(jnp.int32), array(jnp.float32)
    arrays = StepArrays(whole, array(jnp.bool_), whole, whole, real, real)
    trainable = TrainableParams(dict(state.parameters))
    others = (state.step, state.rng, state.refused, state.average)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    given = others, [trainable], loss
    with program.layout.active():
        passes = bytes_of(
            jitted(program.forward_backward(program.settings)._gather),
            trainable, frozen, None, arrays, MicrobatchRange.of(0, 1, 1),
        )  # fmt: skip
        update = update_bytes(program, state, given)
    moments, base = _bytes(state.optimizer), _bytes(frozen)
    return max(passes + moments, update + base)


def update_bytes(program: CompiledStep, state: TrainState, given: Sequence[Any]) -> int:
    """The most of an update's programs, with the parts of the state that wait for the next one."""
    programs = inspect.getclosurevars(inspect.unwrap(program.update)).nonlocals
    squares, averages = _by_moment(state.optimizer)
    moved = state.parameters, state.optimizer, None, *given
    moving = bytes_of(jitted(programs["move"]), *moved)
    square = jitted(programs["square"])
    arguments = squares, averages, state.parameters, None, *given
    temporary = square.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    old_and_new = 2 * _bytes(state.parameters)
    return max(moving, old_and_new + _bytes(state.optimizer) + _bytes(given) + temporary)


def _bytes(tree: Any) -> int:
    """Bytes of a tree on one device."""

    def of(leaf: jax.ShapeDtypeStruct) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(of, jax.tree.leaves(tree)))


@pytest.mark.parametrize(
    ("sizes", "length", "rows", "more"),
    [
        pytest.param(UNROLLED, 64, 16, (), id="unrolled"),
        pytest.param(SCANNED, 256, 4, (), id="scanned", marks=pytest.mark.slow),
        pytest.param(SCANNED, 64, 4, (), id="few-tokens", marks=pytest.mark.slow),
        pytest.param(UNROLLED, 256, 4, (CHECKPOINTING,), id="recomputed", marks=pytest.mark.slow),
        pytest.param(SCANNED, 256, 4, (LORA,), id="adapter", marks=pytest.mark.slow),
        pytest.param(WIDE, 128, 4, (), id="two-layers", marks=pytest.mark.slow),
        pytest.param(WIDE, 128, 4, ("mesh.fsdp=2",), id="fsdp", marks=pytest.mark.slow),
        pytest.param(WIDE, 128, 4, ("mesh.data=2",), id="data", marks=pytest.mark.slow),
        pytest.param(WIDE, 128, 4, ("mesh.tensor=2",), id="tensor", marks=pytest.mark.slow),
        pytest.param(LARGE_VOCABULARY, 96, 16, (), id="vocabulary", marks=pytest.mark.slow),
        pytest.param(
            LARGE_VOCABULARY, 96, 16, (LORA, CHECKPOINTING), id="adapter-recomputed",
            marks=pytest.mark.slow,
        ),
        pytest.param(SCANNED, 256, 4, (BFLOAT16,), id="bfloat16", marks=pytest.mark.slow),
        pytest.param(
            WIDE, 192, 6, ("batching.packing=sequences", "batching.row_tokens=192"), id="packed",
            marks=pytest.mark.slow,
        ),
        pytest.param(SCANNED, 64, 4, (EIGHT_BIT,), id="8-bit", marks=pytest.mark.slow),
        pytest.param(SCANNED, 256, 4, (TAUGHT,), id="taught", marks=pytest.mark.slow),
        pytest.param(SMOLLM2_135M, 96, 16, (), id="135M", marks=pytest.mark.slow),
        pytest.param(SMOLLM2_135M, 96, 8, (LORA,), id="135M-adapter", marks=pytest.mark.slow),
        pytest.param(
            SMOLLM2_135M, 256, 4, ("batching.packing=shared_prompt", "batching.row_tokens=256"),
            id="135M-packed", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_plan_of_a_step_is_what_xla_says(monkeypatch, sizes, length, rows, more):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    config = configured(sizes, length, rows, *more)
    with quick_programs(emitters=True):
        actual = step_bytes(config, rows, length)
    architecture = architecture_of(config)
    assert architecture is not None
    planned = StepMemory.of(config, architecture, on_host=True).peak
    assert planned == pytest.approx(actual, rel=0.1), planned / actual


DEEP = (512, 12, 8, 2, 1536, 16_384)
PACKED = "batching.packing=sequences", "batching.row_tokens=1024"
MESHES = (
    (WIDE, 128, 16, ("mesh.fsdp=8",)),
    (WIDE, 128, 16, ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")),
    (WIDE, 1024, 2, ("mesh.context=8", *PACKED)),
    (DEEP, 1024, 4, ("mesh.context=4", "mesh.fsdp=2", CHECKPOINTING, *PACKED)),
    (DEEP, 1024, 4, ("mesh.context=2", "mesh.fsdp=2", "mesh.tensor=2", CHECKPOINTING, *PACKED)),
)


def plan_for_every_mesh() -> None:
    """Called where there are eight devices."""
    with quick_programs(emitters=True):
        for sizes, length, rows, more in MESHES:
            config = configured(sizes, length, rows, *more)
            architecture = architecture_of(config)
            assert architecture is not None
            planned = StepMemory.of(config, architecture, on_host=True).peak
            assert planned / step_bytes(config, rows, length) == pytest.approx(1.0, abs=0.1), more


@pytest.mark.slow
def test_the_plan_of_a_device_of_eight_is_what_xla_says(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    run_on_devices(8, Path(__file__), "plan_for_every_mesh()", quick=False)

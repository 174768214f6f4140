"""Experts that tokens take, by trainer and engine: how often the two differ by rounding."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.family_folders import golden, tokens

from marin_rl.inference import decoder
from marin_rl.inference.decoder import FusedLinears
from marin_rl.inference.kv_cache import Limits, attend, empty_cache, write
from marin_rl.inference.weights import Decoder, fused_weights, read_model, rotary_table
from marin_rl.models.block import after_attention, after_mlp, normed
from marin_rl.models.experts import routing_of
from marin_rl.models.families import described
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.models.spec import Spec
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.model import named_parameters, parameter_shapes, with_parameters

# As many experts as Qwen3-30B-A3B has, and as many layers as a CPU computes in seconds.
SIZES = {
    "num_hidden_layers": 12,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 96,
    "moe_intermediate_size": 32,
}
LENGTH = 48


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    config = golden()["qwen3-30b-a3b"]["config"]
    spec = described(config | SIZES, Path("qwen3-moe"))
    rng, template = np.random.default_rng(0), model_of(spec)

    def first(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape, np.float32)
        return 1 + 0.1 * noise if "norm" in name else noise / np.float32(spec.width**0.5)

    arrays = {name: first(name, shape) for name, shape in parameter_shapes(template).items()}
    return with_parameters(template, arrays)


def experts_of(spec: Spec, linears: FusedLinears, x: jax.Array) -> jax.Array:
    """Flags [..., X] of the experts that are taken after attention has been added to `x`."""
    taken = routing_of(spec, linears.router(normed(spec, linears.norms.mlp, x))).experts
    return jnp.any(jax.nn.one_hot(taken, spec.experts, dtype=bool), axis=-2)


def by_prefill(spec: Spec, fused: Decoder, ids: Any) -> tuple[jax.Array, jax.Array]:
    """Flags [L, B, T, X] by the lines of `decoder.prompt_layer`, and the last states."""
    x, turns = decoder.prompt_inputs(spec, fused.ends, ids)
    flags = []
    for kind, layer in zip(spec.kinds, fused.layers, strict=True):
        linears = FusedLinears(spec, layer)
        query, key, value = decoder._queries_keys_values(spec, kind, linears, x, turns)
        keys, values = jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2)
        limits = Limits(kind.window, spec.cap, layer.sinks)
        attended = decoder._attend_causally(query, keys, values, limits)
        x = after_attention(spec, linears, x, attended)
        flags.append(experts_of(spec, linears, x))
        x = after_mlp(spec, linears, x)
    return jnp.stack(flags), x


def by_decoding(
    spec: Spec, fused: Decoder, cache: Any, ids: Any, positions: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """Flags [L, S, X] of a step by the lines of `decoder.step_layer`, logits, and the cache."""
    x, turns = decoder.step_inputs(spec, fused.ends, ids, positions)
    flags, written = [], []
    for kind, layer, blocks in zip(spec.kinds, fused.layers, cache, strict=True):
        linears = FusedLinears(spec, layer)
        query, key, value = decoder._queries_keys_values(spec, kind, linears, x, turns)
        blocks = write(blocks, key, value, positions)
        limits = Limits(kind.window, spec.cap, layer.sinks)
        attended = attend(query, blocks, positions, jnp.max(positions), None, limits)
        x = after_attention(spec, linears, x, attended)
        flags.append(experts_of(spec, linears, x))
        x = after_mlp(spec, linears, x)
        written.append(blocks)
    return jnp.stack(flags), decoder.logits(spec, fused.ends, x), tuple(written)


def by_engine(model: LanguageModel, dtype: Any) -> Iterator[np.ndarray]:
    """Flags [L, B, T, X] of a prefill, and of decoding token by token."""
    spec, weights = read_model(model)
    fused = fused_weights(spec, weights, dtype, rotary_table(spec, LENGTH))
    ids = jnp.asarray(tokens())
    flags, states = jax.jit(partial(by_prefill, spec))(fused, ids)
    hidden = jax.jit(partial(decoder.hidden_states, spec))(fused, ids)
    near = 1e-5 if dtype == jnp.float32 else 0.05  # another program rounds elsewhere
    np.testing.assert_allclose(states, hidden, atol=near * float(jnp.abs(hidden).max()))
    yield np.asarray(flags)
    cache, step = empty_cache(spec, len(ids), LENGTH, dtype), jax.jit(partial(by_decoding, spec))
    steps = []
    for at in range(LENGTH):
        where = jnp.full(len(ids), at, jnp.int32)
        flags, _, cache = step(fused, cache, ids[:, at], where)
        steps.append(flags)
    yield np.stack(steps, axis=2)


def by_trainer(model: LanguageModel, dtype: Any) -> np.ndarray:
    """Flags [L, B, T, X] by the loads of one token at a time."""
    ids = jnp.asarray(tokens())
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), ids.shape)
    cast = {name: array.astype(dtype) for name, array in named_parameters(model).items()}
    masks = jnp.eye(ids.size, dtype=bool).reshape(-1, *ids.shape)

    @jax.jit
    def counts(parameters: Any) -> jax.Array:
        module = with_parameters(model, parameters)

        def of(mask: jax.Array) -> jax.Array:
            loads = token_logprobs(module, ids, jnp.ones_like(ids), positions, mask).loads
            assert loads is not None
            return loads.counts > 0

        return jax.lax.map(of, masks)

    flags = np.asarray(counts(cast))  # [B T, L, X]
    return np.moveaxis(flags, 0, 1).reshape(model.spec.layers, *ids.shape, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "others_max", "experts_max"), [("float32", 0.0, 0.0), ("bfloat16", 0.15, 0.02)]
)
def test_trainer_and_engine_take_the_same_experts(model, dtype, others_max, experts_max):
    """The numbers of docs/hugging-face-models.md; a tie of two experts falls by the last bits."""
    kind = jnp.dtype(dtype)
    trainer = by_trainer(model, kind)
    assert (trainer.sum(-1) == model.spec.experts_chosen).all()
    for name, engine in zip(("prefill", "decoding"), by_engine(model, kind), strict=True):
        apart = trainer & ~engine
        others = float(np.mean(apart.any(-1)))
        experts = float(apart.sum() / trainer.sum())
        assert others <= others_max, (name, others)
        assert experts <= experts_max, (name, experts)

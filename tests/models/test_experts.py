"""Experts computed for the tokens that take them, against all of them for every token."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.cases import others_slow
from support.family_folders import golden
from support.quick_programs import run_on_devices

from marin_rl.config import MeshConfig
from marin_rl.errors import ConfigError
from marin_rl.inference.decoder import FusedLinears
from marin_rl.inference.weights import compiled_layers, read_model
from marin_rl.models.block import after_mlp
from marin_rl.models.experts import GROUPED_TOKENS_MIN, routing_of, takes_grouped
from marin_rl.models.families import described
from marin_rl.models.module import LanguageModel, TrainedLinears, model_of
from marin_rl.models.spec import Spec
from marin_rl.training.adapters import Blocks
from marin_rl.training.mesh import SINGLE_DEVICE, Layout, layout_of
from marin_rl.training.model import named_parameters, parameter_shapes, with_parameters

TOKENS, ROWS = 24, 2

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def spec_of(name: str) -> Spec:
    return described(golden()[name]["config"], Path(name))


def model_with(spec: Spec, biases: dict[int, float] | None = None) -> LanguageModel:
    """Random weights; `biases` of the router, where the family has them, by expert."""
    rng, template = np.random.default_rng(0), model_of(spec)
    arrays = {
        name: (0.3 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in parameter_shapes(template).items()
    }
    for expert, bias in (biases or {}).items():
        arrays["transformer/layers/stacked/mlp/router/bias"][:, expert] = bias
    return with_parameters(template, arrays)


def inputs(spec: Spec, tokens: int = TOKENS, rows: int = ROWS) -> np.ndarray:
    shape = rows, tokens, spec.width
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


Forward = Callable[..., jax.Array]


def trained(model: LanguageModel, parameters: Any, x: Any, *, grouped: bool) -> jax.Array:
    layer = Blocks(with_parameters(model, parameters).layers).take(0)
    linears = TrainedLinears(model.spec, layer, ("batch", "position"))
    return after_mlp(model.spec, linears, x, grouped=grouped)


def decoded(model: LanguageModel, parameters: Any, x: Any, *, grouped: bool) -> jax.Array:
    spec, weights = read_model(with_parameters(model, parameters))
    layer = compiled_layers(spec=spec, layers=weights.layers, dtype=jnp.dtype(jnp.float32))[0]
    return after_mlp(spec, FusedLinears(spec, layer), x, grouped=grouped)


def values_and_gradients(
    forward: Forward, model: LanguageModel, x: Any, *, grouped: bool, layout: Layout = SINGLE_DEVICE
) -> list[np.ndarray]:
    """Outputs, and the gradients of a weighed sum of them by inputs and all parameters.

    An engine takes no gradients: of `decoded` there are outputs.
    """
    weights = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)

    def loss(parameters: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = forward(model, parameters, x, grouped=grouped)
        return jnp.sum(weights * out), out

    with layout.active():
        placed = layout.place_parameters(named_parameters(model), model)
        if forward is decoded:
            return [np.asarray(jax.jit(loss)(placed, x)[1])]
        graded = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, out), gradients = graded(placed, x)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((out, gradients))]


def assert_alike(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Within 1e-5 of the largest number of each array, in float32."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1, np.abs(other).max()))


@pytest.mark.parametrize(
    ("name", "forward"),
    others_slow(
        product(
            ["gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b"], [trained, decoded]
        ),
        ("gpt-oss-20b", trained),
        ("qwen3-30b-a3b", decoded),
        several=True,
    ),
)
def test_products_by_group_are_those_of_all_experts(name: str, forward: Forward) -> None:
    model = model_with(spec_of(name))
    one, all_ = (
        values_and_gradients(forward, model, inputs(model.spec), grouped=grouped)
        for grouped in (True, False)
    )
    assert np.abs(all_[0] - inputs(model.spec)).max() > 0.1
    assert_alike(one, all_)


@pytest.mark.parametrize(
    ("tokens", "chosen", "biases"),
    others_slow(
        [
            (TOKENS, 3, {1: -100.0, 4: -100.0, 7: -100.0}),  # three experts that no token takes
            (1, 3, {}),  # fewer rows than experts
            (TOKENS, 1, {5: 100.0}),  # one that all take
        ],
        first=1,
        several=True,
    ),
)
def test_groups_may_be_empty_or_everything(tokens, chosen, biases):
    spec = replace(spec_of("gpt-oss-20b"), experts_chosen=chosen)
    model, x = model_with(spec, biases), inputs(spec, tokens, rows=1)
    linears = TrainedLinears(spec, Blocks(model.layers).take(0), ("batch", "position"))
    taken = {*np.asarray(routing_of(spec, linears.router(jnp.asarray(x))).experts).ravel().tolist()}
    assert taken == {5} if chosen == 1 else not taken & {*biases}
    found, expected = (
        values_and_gradients(trained, model, x, grouped=grouped) for grouped in (True, False)
    )
    assert_alike(found, expected)


def within_rows(model: LanguageModel, parameters: Any, x: Any, *, grouped: bool) -> jax.Array:
    """As the trainer computes the last layer: each device on its own rows."""

    def own(parameters: Any, x: jax.Array) -> jax.Array:
        layer = Blocks(with_parameters(model, parameters).layers).take(0)
        linears = TrainedLinears(model.spec, layer, ("token",))
        tokens = x.reshape(-1, x.shape[-1])
        return after_mlp(model.spec, linears, tokens, grouped=grouped).reshape(x.shape)

    sizes = jax.sharding.get_abstract_mesh().shape
    axes = tuple(axis for axis in ("data", "fsdp") if sizes.get(axis, 1) > 1)
    if not axes:
        return own(parameters, x)
    specs: Any = {"in_specs": (PartitionSpec(), PartitionSpec(axes)), "axis_names": {*axes}}
    spread = jax.shard_map(own, **specs, out_specs=PartitionSpec(axes), check_vma=False)
    return spread(parameters, x)


def check(**sizes: int) -> None:
    """On a mesh as on one device, by trainer and engine."""
    layout, model = layout_of(MeshConfig(**sizes)), model_with(spec_of("gpt-oss-20b"))
    x = inputs(model.spec, rows=8)
    expected = values_and_gradients(trained, model, x, grouped=False)
    for forward in (trained, within_rows):
        assert_alike(values_and_gradients(forward, model, x, grouped=True, layout=layout), expected)
    # Three rows are shared evenly by no mesh.
    for rows, grouped in ((x, True), (x, False), (inputs(model.spec, rows=3), True)):
        expected = values_and_gradients(decoded, model, rows, grouped=False)
        found = values_and_gradients(decoded, model, rows, grouped=grouped, layout=layout)
        assert_alike(found, expected)


@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "tensor", "context"])
def test_devices_of_a_mesh_sort_their_own_tokens(axis: str) -> None:
    check(**{axis: 2})


@pytest.mark.slow
def test_a_mesh_of_both_axes_computes_the_same() -> None:
    run_on_devices(4, Path(__file__), "check(fsdp=2, tensor=2)")


def test_a_mesh_that_does_not_divide_experts_is_refused() -> None:
    spec = replace(spec_of("qwen3-30b-a3b"), mlp_width=33)
    layout = layout_of(MeshConfig(tensor=2))
    with pytest.raises(ConfigError, match=r"mesh.tensor is 2, but axis mlp of .*experts.* has 33"):
        layout.parameter_shardings(model_of(spec))


def test_a_cpu_computes_all_experts() -> None:
    spec = spec_of("mixtral-8x7b")
    assert not takes_grouped(spec, jnp.zeros((GROUPED_TOKENS_MIN, spec.width), jnp.bfloat16))

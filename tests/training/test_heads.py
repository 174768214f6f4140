"""Scalar heads: what they are given, what they say of it, and how their parameters are named."""

from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import reference_states
from training.batches import VOCAB, random_batch, tiny_policy

from marin_rl.config import MeshConfig
from marin_rl.training.critic import ScalarHead, ScalarModel
from marin_rl.training.logprobs import final_states
from marin_rl.training.mesh import Layout, layout_of
from marin_rl.training.model import (
    build_model,
    digest_of,
    matrix_mask,
    model_template,
    named_parameters,
    parameter_axes,
    parameter_shapes,
    with_parameters,
)


def test_a_head_is_a_linear_map_in_float32_and_begins_at_nothing():
    states = jnp.asarray([[[1.0, 2.0], [3.0, -1.0]]], jnp.bfloat16)
    head = ScalarHead.init(2)
    np.testing.assert_array_equal(head(states), np.zeros((1, 2)))
    weight = hax.named(jnp.asarray([0.5, -2.0]), head.weight.axes)
    head = ScalarHead(weight, hax.named(jnp.asarray(0.25), ()))
    assert head(states).dtype == jnp.float32
    np.testing.assert_array_equal(head(states), [[0.5 - 4 + 0.25, 1.5 + 2 + 0.25]])
    wide = ScalarHead.init(4096, jax.random.PRNGKey(0), std=0.02)
    assert float(jnp.std(wide.weight.array)) == pytest.approx(0.02, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"family": "gemma"}, id="gemma"),
        pytest.param({"tie_embeddings": False, "layers": 1}, id="untied"),
    ],
)
def test_it_is_given_what_the_output_head_is_given(options):
    model, batch = build_model(tiny_policy(**options), VOCAB, 0), random_batch(3)
    arrays = tuple(
        jnp.asarray(getattr(batch, n)) for n in ("token_ids", "segment_ids", "positions")
    )
    truth = jax.vmap(partial(reference_states, model.spec, named_parameters(model)))(*arrays)
    np.testing.assert_allclose(jax.jit(final_states)(model, *arrays), truth, rtol=2e-5, atol=2e-5)
    scalar = eqx.tree_at(lambda m: m.head, ScalarModel.of(model), head := _random_head(model))
    np.testing.assert_allclose(eqx.filter_jit(scalar)(*arrays), head(truth), rtol=1e-4, atol=1e-5)


def _random_head(model) -> ScalarHead:
    return ScalarHead.init(model.spec.width, jax.random.PRNGKey(1), std=1.0)


def test_its_model_is_named_saved_and_shaped_as_every_other():
    policy = tiny_policy(tie_embeddings=False)
    model = build_model(policy, VOCAB, 0)
    template = eqx.filter_eval_shape(ScalarModel.of, model_template(policy, VOCAB))
    scalar = ScalarModel.of(model)
    names = set(named_parameters(scalar))
    of_policy = {f"trunk/{name}" for name in named_parameters(model) if "lm_head" not in name}
    assert names == of_policy | {"head/weight", "head/bias"}
    assert parameter_shapes(template) == parameter_shapes(scalar)
    assert not any(matrix_mask(scalar)[f"head/{name}"] for name in ("weight", "bias"))
    again = with_parameters(template, named_parameters(scalar))
    assert digest_of(named_parameters(again)) == digest_of(named_parameters(scalar))
    assert [axis.name for axis in parameter_axes(template)["head/weight"]] == ["embed"]


@pytest.mark.skipif("len(jax.devices()) < 2", reason="needs two devices")
def test_its_parameters_are_sharded_by_the_models_axes():
    layout = layout_of(MeshConfig(fsdp=2))
    assert isinstance(layout, Layout)
    scalar = ScalarModel.of(build_model(tiny_policy(), VOCAB, 0))
    placed = layout.place_parameters(named_parameters(scalar), scalar)
    spec = placed["head/weight"].sharding.spec
    assert spec == jax.sharding.PartitionSpec("fsdp")

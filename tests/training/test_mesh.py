"""The same step on a mesh: parameters after two steps are those of a single device."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hand_made import LENGTH, compilations, random_batch

from marin_rl.config import MeshConfig, load_config
from marin_rl.errors import ConfigError
from marin_rl.training.loop import Program, fitted, take_step
from marin_rl.training.mesh import layout_of
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.state import first_parameters, fresh_state
from marin_rl.training.step import StepSettings

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
SETTINGS = (
    "policy.model.layers=1", "policy.model.kv_heads=2", "policy.model.vocab_size=104",
    "policy.model.tie_embeddings=false",
)  # fmt: skip


def after_two_steps(config, tokenizer):
    program = Program(
        config, tokenizer, policy_adamw(config.training), StepSettings(objective=config.objective)
    )
    state = program.place(
        fresh_state(first_parameters(config, tokenizer), program.optimizer, config.seed)
    )
    for step in range(2):
        arrays, used = fitted(random_batch(6, LENGTH, seed=step), 4, 8)
        before = compilations()
        state, metrics = take_step(program, state, None, arrays, used)
    return state, metrics, compilations() - before


@pytest.fixture(scope="module")
def single(tokenizer, tmp_path_factory):
    config = load_config(
        DEBUG,
        [f"root={tmp_path_factory.mktemp('mesh')}", "policy.model.hidden_size=16", *SETTINGS],
    )
    return config, after_two_steps(config, tokenizer)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices, real or virtual")
@pytest.mark.parametrize("axis", [pytest.param("data", marks=pytest.mark.slow), "fsdp", "tensor"])
def test_parameters_after_two_steps_are_those_of_one_device(single, tokenizer, axis):
    config, (expected, metrics, compiled) = single
    assert compiled == 0
    meshed = config.model_copy(update={"mesh": MeshConfig(**{axis: 2})})
    found, of_mesh, compiled = after_two_steps(meshed, tokenizer)
    assert compiled == 0
    for name, array in expected.parameters.items():
        assert found.parameters[name].sharding.num_devices == 2
        np.testing.assert_allclose(found.parameters[name], array, atol=1e-5)
    assert of_mesh == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    if axis != "data":
        name = "transformer/layers/stacked/mlp/up_proj/weight"
        shard = found.parameters[name].addressable_shards[0].data
        assert shard.size == found.parameters[name].size // 2


def test_sizes_that_do_not_fit_are_refused():
    devices = jax.device_count()
    with pytest.raises(ConfigError, match=f"found {devices}"):
        layout_of(MeshConfig(data=devices + 1))
    with pytest.raises(ConfigError, match="cannot be shared out"):
        layout_of(MeshConfig(data=devices + 1, fsdp=-1))
    assert layout_of(MeshConfig()).mesh is None

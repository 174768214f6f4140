"""The same step on a mesh: parameters after some steps are those of a single device."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.quick_programs import run_on_devices
from training.batches import LENGTH, VOCAB, compilations, random_batch, tiny_policy
from training.steps import take_step

from marin_rl.compilation import enable_compilation_cache
from marin_rl.config import DivergenceConfig, MeshConfig, load_config
from marin_rl.errors import ConfigError
from marin_rl.models.axes import table_rows
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training import logprobs as trainer_logprobs
from marin_rl.training.compiled_step import CompiledStep, to_fixed_shape
from marin_rl.training.critic import ScalarHead
from marin_rl.training.logprobs import (
    Packing,
    Taught,
    TeacherRows,
    token_logprobs,
    token_logprobs_and_values,
)
from marin_rl.training.mesh import SINGLE_DEVICE, layout_of
from marin_rl.training.model import build_model, named_parameters, with_parameters
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.state import first_parameters, fresh_state
from marin_rl.training.step_types import Reference, StepSettings

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
SETTINGS = (
    "policy.model.layers=1", "policy.model.kv_heads=2", "policy.model.vocab_size=104",
    "policy.model.tie_embeddings=false",
)  # fmt: skip


def after_two_steps(config, tokenizer):
    program = CompiledStep(
        config, tokenizer, policy_adamw(config.training), StepSettings(objective=config.objective)
    )
    state = program.place(
        fresh_state(first_parameters(config, tokenizer), program.optimizer, config.seed)
    )
    for step in range(2):
        rows = to_fixed_shape(random_batch(6, LENGTH, seed=step), 3, 8, program.layout)
        before, moments = compilations(), jax.tree.leaves(state.optimizer)
        state, metrics, _ = take_step(program, state, rows)
        assert all(array.is_deleted() for array in moments)  # donated
    return state, metrics, compilations() - before


@pytest.fixture(scope="module")
def single(tokenizer, tmp_path_factory):
    config = load_config(
        DEBUG, [f"root={tmp_path_factory.mktemp('mesh')}", "policy.model.hidden_size=16", *SETTINGS]
    )
    return config, after_two_steps(config, tokenizer)


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.parametrize(
    ("optimizer", "width"), [("muon", 16), ("adamw_8bit", 64), ("adamw_offload", 16)]
)
def test_other_optimizers_shard_their_moments_as_parameters(single, tokenizer, optimizer, width):
    config, _ = single
    training = config.training.model_copy(update={"optimizer": optimizer})
    model = config.policy.model.model_copy(update={"hidden_size": width})
    policy = config.policy.model_copy(update={"model": model})
    config = config.model_copy(update={"training": training, "policy": policy})
    expected, metrics, _ = after_two_steps(config, tokenizer)
    found, of_mesh, compiled = after_two_steps(
        config.model_copy(update={"mesh": MeshConfig(fsdp=2)}), tokenizer
    )
    assert compiled == 0
    for name, array in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[name], array, atol=1e-4)
    assert of_mesh == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    moments = [each.sharding for each in jax.tree.leaves(found.optimizer) if each.ndim > 1]
    assert {each.num_devices for each in moments} == {2}
    memory = "pinned_host" if optimizer == "adamw_offload" else "device"
    assert {each.memory_kind for each in moments} == {memory}
    if optimizer == "adamw_offload":  # the numbers of AdamW
        for name, array in single[1][0].parameters.items():
            np.testing.assert_allclose(expected.parameters[name], array, atol=1e-6)


def test_devices_without_memory_of_the_host_are_named(monkeypatch):
    device = SimpleNamespace(
        addressable_memories=lambda: [SimpleNamespace(kind="device")], device_kind="another"
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with pytest.raises(
        ConfigError, match=r"adamw_offload needs .* pinned_host, found device of an"
    ):
        layout_of(MeshConfig(), "adamw_offload")


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "context"])
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


EIGHT = (
    "policy.model.layers=1", "policy.model.heads=8", "policy.model.kv_heads=8",
    "policy.model.vocab_size=104", "policy.model.tie_embeddings=false",
    "objective.ratio_level=token", "objective.kl_coefficient=0.1", "training.weight_decay=0.1",
)  # fmt: skip
MESHES = [
    {"data": 8}, {"fsdp": 8}, {"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 2, "context": 2},
]  # fmt: skip


def after_three_steps(config, mesh, *, packed=False):
    """Parameters and metrics, with KL to a reference, two microbatches a step; in any process."""
    tokenizer, meshed = character_tokenizer(), config.model_copy(update={"mesh": mesh})
    settings = StepSettings(objective=config.objective, packing=Packing(packed_rows=packed))
    program = CompiledStep(meshed, tokenizer, policy_adamw(config.training), settings)
    first = first_parameters(config, tokenizer)
    state = program.place(fresh_state(first, program.optimizer, config.seed))
    placed = program.layout.place_parameters(dict(first), program.template)
    reference = Reference(placed, np.float32(config.objective.kl_coefficient))
    for step in range(3):
        rows = to_fixed_shape(random_batch(13, LENGTH, seed=step), 7, 16, program.layout)
        state, metrics, _ = take_step(program, state, rows, reference)
    return {name: np.asarray(array) for name, array in state.parameters.items()}, metrics


def learn_on_every_mesh(root):
    """Called where there are eight devices."""
    assert jax.device_count() == 8
    enable_compilation_cache()
    trainer_logprobs.TOKENS_PER_CHUNK = 7  # several chunks, not as many on every device
    config = load_config(DEBUG, [f"root={root}", *EIGHT])
    expected, metrics = after_three_steps(config, MeshConfig())
    start = first_parameters(config, character_tokenizer())
    assert max(np.abs(expected[name] - start[name]).max() for name in expected) > 1e-3
    for sizes in MESHES:
        # with all axes at once, also by the attention of packed rows
        mesh, packed = MeshConfig(**sizes), len(sizes) > 1
        found, of_mesh = after_three_steps(config, mesh, packed=packed)
        assert of_mesh == pytest.approx(metrics, rel=1e-3, abs=1e-5)
        assert max(np.abs(found[name] - expected[name]).max() for name in expected) < 3e-7, sizes
    look_up_in_a_spread_table()


def look_up_in_a_spread_table():
    """Values and gradients of rows of a table, of which devices exchange the rows asked for."""
    layout, rng = layout_of(MeshConfig(data=2, fsdp=2, tensor=2)), np.random.default_rng(0)
    table, weights = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (8, 3, 4))
    )
    index = rng.integers(0, 6, (8, 3)).astype(np.int32)

    def summed(table, index, weights):
        found = table_rows(table, index)
        return jnp.sum(weights * found), found

    assert layout.mesh is not None
    spread = NamedSharding(layout.mesh, PartitionSpec("tensor", "fsdp"))
    arguments = jax.device_put(table, spread), *layout.place_rows((index[None], weights[None]))
    with layout.active():
        looked_up = jax.jit(jax.value_and_grad(summed, has_aux=True))
        arguments = arguments[0], *(array[0] for array in arguments[1:])
        program = looked_up.lower(*arguments).compile()
        (_, found), gradient = program(*arguments)
    np.testing.assert_array_equal(found, table[index])
    expected = np.zeros_like(table)
    np.add.at(expected, index, weights)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    text = program.as_text()
    assert text is not None
    assert "all-to-all" in text
    assert not re.findall(r"= f32\S* all-gather", text)


@pytest.mark.slow
def test_parameters_after_three_steps_on_eight_devices_are_those_of_one(tmp_path):
    told = run_on_devices(8, Path(__file__), f"learn_on_every_mesh({str(tmp_path)!r})")
    assert "rematerialization" not in told, told[-3000:]


def shared_rows(rows):
    """Rows of a prompt of 5 tokens and completions of 3 and 8 that share it; the last rows empty.

    Half of the rows have the first completion alone to train on.
    """
    rng = np.random.default_rng(3)
    segments = np.repeat([1, 2, 3], [5, 3, 8]).astype(np.int32)
    positions = np.concatenate([np.arange(5), np.arange(5, 8), np.arange(5, 13)]).astype(np.int32)
    used = np.arange(rows)[:, None] < rows - 2
    trained = (segments == 2) | ((segments == 3) & (np.arange(rows)[:, None] % 2 == 0))
    ids = rng.integers(7, VOCAB, (rows, LENGTH)).astype(np.int32)
    return ids * used, segments * used, positions * used, trained & used


def graded(model, head, layout, rows):
    """Scores, values, and gradients of a random combination of them; and the compiled program."""
    weights = np.random.default_rng(5).standard_normal((3, *rows[0].shape)).astype(np.float32)

    def loss(parameters, head, *rows):
        policy = with_parameters(model, parameters)
        scores, values = token_logprobs_and_values(
            policy, head, *rows, packing=Packing(shared_prompts=True)
        )
        found = jnp.stack([scores.logprobs, scores.entropies, values])
        return jnp.sum(weights * found), found

    placed = layout.place_parameters(named_parameters(model), model)
    with layout.active():
        spread = layout.place_rows(tuple(array[None] for array in rows))
        arguments = placed, head, *(array[0] for array in spread)
        grade = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True)).lower(*arguments).compile()
        (by_parameters, by_head), found = grade(*arguments)
    return [found, by_head.weight.array, *by_parameters.values()], grade.as_text()


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_each_device_scores_its_own_rows_and_no_others(axis):
    model, rows = build_model(tiny_policy(layers=1), VOCAB, 0), shared_rows(8)
    head = ScalarHead.init(model.spec.width, jax.random.PRNGKey(2), std=1.0)
    expected, program = graded(model, head, SINGLE_DEVICE, rows)
    assert f"f32[{8 * LENGTH},{VOCAB}]" in program
    found, program = graded(model, head, layout_of(MeshConfig(**{axis: 2})), rows)
    assert f"f32[{4 * LENGTH},{VOCAB}]" in program
    assert f"f32[{8 * LENGTH},{VOCAB}]" not in program
    for ours, theirs in zip(found, expected, strict=True):  # sums of terms as large as the largest
        atol = 1e-5 + 2e-6 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=atol)


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
def test_devices_score_rows_that_they_share_as_one_does():
    """A completion's first token is predicted from a prompt's last state, on another device."""
    model, rows = build_model(tiny_policy(layers=2), VOCAB, 0), shared_rows(4)
    head = ScalarHead.init(model.spec.width, jax.random.PRNGKey(2), std=1.0)
    expected, _ = graded(model, head, SINGLE_DEVICE, rows)
    found, program = graded(model, head, layout_of(MeshConfig(context=2)), rows)
    assert f"f32[4,{LENGTH // 2},{model.spec.mlp_width}]" in program
    assert f"f32[4,{LENGTH},{model.spec.mlp_width}]" not in program
    for ours, theirs in zip(found, expected, strict=True):
        atol = 1e-5 + 2e-6 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=atol)


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
def test_a_teachers_own_rows_are_read_where_the_policys_tokens_are():
    """The teacher's prompt has three tokens more, which stand before that of the policy."""
    model, rows = build_model(tiny_policy(layers=2), VOCAB, 0), shared_rows(4)
    teacher = build_model(tiny_policy(layers=1), VOCAB, 1)
    longer = [np.pad(each, ((0, 0), (3, 5))) for each in rows[:3]]
    longer[0][:2, :3], longer[1][:2, :3] = [[9, 8, 7]], 1
    longer[2][:2, :19] = [*range(8), *range(8, 11), *range(8, 16)]
    places = np.broadcast_to(np.arange(3, 3 + LENGTH, dtype=np.int32), rows[0].shape)

    def apart(parameters, of_teacher, *rows):
        taught = Taught(
            with_parameters(teacher, of_teacher),
            DivergenceConfig(beta=0.5, top_k=None),
            TeacherRows(*rows[4:]),
        )
        policy = with_parameters(model, parameters)
        scores = token_logprobs(
            policy, *rows[:4], packing=Packing(shared_prompts=True), taught=taught
        )
        return scores.divergences

    def on(layout):
        placed = (
            layout.place_parameters(named_parameters(each), each) for each in (model, teacher)
        )
        with layout.active():
            spread = layout.place_rows(tuple(each[None] for each in (*rows, *longer, places)))
            return jax.jit(apart)(*placed, *(each[0] for each in spread))

    expected = on(SINGLE_DEVICE)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(on(layout_of(MeshConfig(context=2))), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
def test_rows_are_filled_up_to_what_devices_share_out_evenly():
    layout = layout_of(MeshConfig(data=2))
    arrays, used = to_fixed_shape(random_batch(7, LENGTH), 3, 7, layout)  # 4 rows, for 3 are odd
    assert (used, arrays.token_ids.shape) == (2, (2, 4, LENGTH))
    layout.place_rows(arrays)
    assert not arrays.segment_ids.reshape(8, LENGTH)[7].any()
    assert [layout.whole_rows(rows) for rows in (1, 6, 7)] == [2, 6, 8]
    assert [SINGLE_DEVICE.whole_rows(rows, together=2) for rows in (1, 6, 7)] == [2, 6, 8]


def test_sizes_that_do_not_fit_are_refused():
    devices = jax.device_count()
    with pytest.raises(ConfigError, match=f"found {devices}"):
        layout_of(MeshConfig(data=devices + 1))
    with pytest.raises(ConfigError, match="cannot be shared out"):
        layout_of(MeshConfig(data=devices + 1, fsdp=-1))
    assert layout_of(MeshConfig()).mesh is None

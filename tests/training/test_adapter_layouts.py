"""Adapters on meshes and over a bfloat16 base: what is computed, how the base lies, refusals."""

import jax  # noqa: F401 - for the condition of TWO
import jax.numpy as jnp
import numpy as np
import pytest
from support.policy_runs import play_round, small_run
from training.trained_runs import begin, play

from marin_rl.errors import ConfigError
from marin_rl.lora.adapter import a_name
from marin_rl.runtime import RunRuntime
from marin_rl.storage.runs import Run, base_slot, committed
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.training.loop import Trainer

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LORA = (
    "policy.model.layers=1", "policy.model.kv_heads=2", "policy.model.vocab_size=104",
    "policy.model.tie_embeddings=false", "training.microbatch_sequences=4", "policy.lora.rank=4",
)  # fmt: skip
UP = "transformer/layers/stacked/mlp/up_proj/weight"
TWO = pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")


@TWO
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_a_round_on_two_devices_is_that_of_one_with_the_base_spread_over_both(
    debug, tokenizer, axis, tmp_path
):
    trained = {}
    for name, mesh in (("one", ()), ("two", (f"mesh.{axis}=2",))):
        run, trainer, first = begin(debug(*LORA, *mesh, f"root={tmp_path / name}"), tokenizer)
        play(run, trainer, first, range(1))
        trained[name] = trainer
    one, two = (trained[name]._loaded.parameters for name in ("one", "two"))
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, atol=1e-5)
    base = trained["two"]._source.frozen
    assert all(array.sharding.num_devices == 2 for array in base.values())
    # By the rules of a run that trains all parameters.
    full, _, _ = begin_full(debug, tokenizer, axis, tmp_path)
    shardings = full.layout.parameter_shardings(full.template)
    for name, array in base.items():
        assert array.sharding.is_equivalent_to(shardings[name], array.ndim), name
    assert base[UP].addressable_shards[0].data.size == base[UP].size // 2
    a = two[a_name(UP)]
    cut = 2 if axis == "fsdp" else 1  # its input is `embed`, which fsdp cuts
    assert a.addressable_shards[0].data.size == a.size // cut


def begin_full(debug, tokenizer, axis, root):
    """The program of a run of all parameters on the mesh."""
    run = Run.create_or_open(debug(*LORA[:-1], f"mesh.{axis}=2", f"root={root / 'full'}"))
    trainer = Trainer(run, tokenizer)
    return trainer._program, run, trainer


@TWO
def test_a_mesh_that_cannot_share_the_base_out_is_refused_before_anything_is_written(
    debug, tokenizer
):
    run = Run.create_or_open(debug(*LORA, "policy.model.kv_heads=1", "mesh.tensor=2"))
    with pytest.raises(ConfigError, match=r"mesh\.tensor is 2, but axis kv_head of .* 1 entries"):
        Trainer(run, tokenizer)
    assert committed(run, base_slot()) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("policy.compute_dtype=bfloat16",),
        ("policy.compute_dtype=bfloat16", "policy.quantize_base=nf4"),
        pytest.param(("mesh.fsdp=2",), marks=TWO),
    ],
)
def test_a_round_from_sampling_to_the_next_checkpoint(tmp_path, tokenizer, settings):
    """With the canary, which compares what engines serve with what is trained."""
    run = small_run(tmp_path, *LORA, *settings)
    runtime = RunRuntime(run)
    try:
        checkpoint = runtime.init_policy()
        for round in range(2):
            checkpoint = play_round(runtime, run, round, checkpoint)
    finally:
        runtime.close()
    trainer = Trainer(run, tokenizer)
    trainer.load(checkpoint)
    dtypes = {name: array.dtype for name, array in trainer._source.frozen.items()}
    assert all(array.dtype == jnp.float32 for array in trainer._loaded.parameters.values())
    narrow = "policy.compute_dtype=bfloat16" in settings
    expected = jnp.bfloat16 if narrow else jnp.float32
    assert dtypes["embeddings/token_embeddings/weight"] == expected
    assert all(audit.balanced for audit in audit_run(run))

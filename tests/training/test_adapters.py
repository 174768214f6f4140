"""Adapters in training: what they compute, what is trained and committed, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.adapters import random_adapter
from support.cases import others_slow
from training.batches import VOCAB, random_batch, tiny_policy
from training.steps import make_step
from training.trained_runs import batches_of, begin, play

from marin_rl.compilation import device_array
from marin_rl.config import LoraConfig, ObjectiveConfig
from marin_rl.errors import ConfigError, CorruptObject, InputError, ObjectMissing
from marin_rl.lora.adapter import digest_of, initial_arrays, merged, policy_digest
from marin_rl.lora.peft import configured_modules, write_peft
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint, read_folder
from marin_rl.serving.weights.export import export_hf
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, base_slot, checkpoint_slot, committed
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect
from marin_rl.training.adapters import (
    is_adapters,
    merged_parameters,
    policy_module,
    trained_names,
    with_adapter,
    without_adapter,
)
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.hidden_states import UNROLLED_LAYERS_MAX
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.loop import Trainer
from marin_rl.training.model import build_model, named_parameters, parameter_shapes
from marin_rl.training.optimizer import make_optimizer
from marin_rl.training.replay import replay_round
from marin_rl.training.state import fresh_state, identity_of
from marin_rl.training.step_types import StepSettings, step_arrays

SPEC = LoraConfig(rank=3, alpha=6.0)
SETTINGS = ("policy.model.layers=1", "training.microbatch_sequences=4", "policy.lora.rank=4")
compiled_logprobs = jax.jit(token_logprobs)


def scored(model, parameters) -> np.ndarray:
    """Logprobs of a batch's tokens by these parameters."""
    scores = compiled_logprobs(policy_module(model, _device(parameters)), *rows_of(random_batch(3)))
    return np.asarray(scores.logprobs)


def rows_of(batch):
    """Ids, segments, positions and mask of a batch on the device."""
    mask = (batch.loss_mask != 0) & (batch.positions > 0)
    arrays = batch.token_ids, batch.segment_ids, batch.positions, mask
    return tuple(map(device_array, arrays))


# Stacked layers, and norms of queries and keys, which one layer has as two do.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("llama", 2), id="llama"),
        pytest.param(("qwen3", 1), id="qwen3", marks=pytest.mark.slow),
    ],
)
def models(request):
    """A base, its parameters, the template with an adapter, and the adapter."""
    family, layers = request.param
    base = build_model(tiny_policy(family=family, layers=layers, heads=4, kv_heads=2), VOCAB, 1)
    adapter = random_adapter(SPEC, seed=2, shapes=parameter_shapes(base))
    return base, named_parameters(base), with_adapter(base, adapter.modules), adapter


def test_masters_of_an_adapter_in_float32_compute_in_the_dtype_of_the_base() -> None:
    # More layers than are written out one by one: a scan must return the dtype that it is given.
    base = build_model(tiny_policy(layers=UNROLLED_LAYERS_MAX + 1, heads=2, kv_heads=1), VOCAB, 1)
    shapes = parameter_shapes(base)
    adapter, modules = random_adapter(SPEC, seed=2, shapes=shapes), configured_modules(SPEC, shapes)
    half = lambda arrays: {n: np.asarray(a).astype(jnp.bfloat16) for n, a in arrays.items()}
    frozen, masters = half(named_parameters(base)), adapter.arrays
    template, cast = with_adapter(base, modules), half(masters)
    assert (scored(template, frozen | masters) == scored(template, frozen | cast)).all()


def test_an_adapter_computes_what_the_merged_weights_compute(models):
    base, parameters, template, adapter = models
    apart = scored(template, {**parameters, **adapter.arrays})
    together = scored(base, merged(parameters, adapter))
    assert np.abs(together - scored(base, parameters)).max() > 0.1
    np.testing.assert_allclose(apart, together, atol=2e-5)


def test_a_merge_on_devices_is_that_of_numpy(models):
    _, parameters, _, adapter = models
    on_host = merged({name: np.asarray(a) for name, a in parameters.items()}, adapter)
    on_device = merged_parameters(parameters, adapter)
    assert set(on_device) == set(on_host)
    for name, array in on_host.items():
        np.testing.assert_allclose(on_device[name], array, atol=1e-5)


def test_an_adapter_whose_b_is_zero_is_the_base_to_the_bit(models):
    base, parameters, template, adapter = models
    first = initial_arrays(adapter.modules, parameter_shapes(base), seed=0)
    np.testing.assert_array_equal(
        scored(template, {**parameters, **first}), scored(base, parameters)
    )


def test_names_of_the_base_stay_and_those_of_the_adapter_follow_them(models):
    base, parameters, template, adapter = models
    shapes = parameter_shapes(template)
    assert {name: shapes[name] for name in parameters} == parameter_shapes(base)
    assert set(shapes) - set(parameters) == set(adapter.arrays)
    assert {name: tuple(a.shape) for name, a in adapter.arrays.items()}.items() <= shapes.items()
    assert set(trained_names(shapes)) == set(adapter.arrays)
    assert trained_names(parameters) == list(parameters)
    assert parameter_shapes(without_adapter(template)) == parameter_shapes(base)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_b_are_those_of_the_weights_times_a_and_the_base_has_none(models, temperature):
    base, parameters, template, adapter = models
    first = initial_arrays(adapter.modules, parameter_shapes(base), seed=0)
    settings = StepSettings(objective=ObjectiveConfig(), temperature=temperature)
    rows = step_arrays(random_batch(4), 2, 2)
    plain = _descent(base, settings)
    whole = plain(fresh_state(parameters, PLAIN(base), 0), None, *rows).state.parameters
    step = _descent(template, settings, frozen=parameters)
    trained = step(fresh_state(_device(first), PLAIN(template), 0), None, *rows).state.parameters
    assert set(trained) == set(first)
    for path, module in adapter.modules.items():
        # One step of plain descent at rate 1 moves by the gradient.
        by_weight = np.asarray(parameters[path]) - np.asarray(whole[path])
        a, b = first[f"{path}:A"], np.asarray(trained[f"{path}:B"])
        layers, rank = a.shape[:2]
        expected = module.scale * np.einsum(
            "loi,lri->lor", by_weight.reshape(layers, -1, a[0, 0].size), a.reshape(layers, rank, -1)
        )
        np.testing.assert_allclose(-b.reshape(expected.shape), expected, atol=2e-5)
        # B is zero, so A has no gradient yet.
        np.testing.assert_array_equal(trained[f"{path}:A"], a)


def PLAIN(model):
    """Plain descent at rate 1 without clipping, for any of the model's parameters."""
    import optax

    del model
    return optax.with_extra_args_support(optax.sgd(1.0))


def _descent(model, settings, frozen=None):
    return make_step(model, PLAIN(model), lambda step: 1.0 + 0 * step, settings, frozen=frozen)


def _device(arrays):
    return {name: device_array(array) for name, array in arrays.items()}


@pytest.mark.slow
def test_no_gradient_of_a_frozen_head_is_computed():
    """The head is the largest product of a step: its gradient must not be in the program."""
    model = build_model(tiny_policy(tie_embeddings=False, layers=1), VOCAB, 0)
    parameters = named_parameters(model)
    rows = rows_of(random_batch(2))

    def loss(trained, frozen):
        scores = token_logprobs(policy_module(model, {**frozen, **trained}), *rows)
        return jnp.sum(scores.logprobs)

    def of_head(name: str) -> int:
        """Number of values in the program with the shape of the head's gradient."""
        trained = {name: parameters[name]}
        frozen = {other: a for other, a in parameters.items() if other != name}
        program = str(jax.make_jaxpr(jax.grad(loss))(trained, frozen))
        return program.count(f"f32[{VOCAB},16] = add") + program.count(f"f32[{VOCAB},16] = dot")

    norm = "transformer/norm/weight"
    assert of_head("lm_head/weight") > of_head(norm)
    assert of_head(norm) == 0


# ---------------------------------------------------------------- runs


@pytest.fixture
def played(debug, tokenizer):
    """A run of two rounds with an adapter."""
    run, trainer, first = begin(debug(*SETTINGS), tokenizer)
    return run, trainer, play(run, trainer, first, range(2))


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_a_checkpoint_is_the_adapter_its_moments_and_the_digest_of_the_base(played, tokenizer):
    run, trainer, last = played
    base = committed(run, base_slot())
    assert base is not None
    digest = manifest_of(run.store, base).extra["parameters_digest"]
    assert [p.slot for p in manifest_of(run.store, base).parents] == []
    first = manifest_of(run.store, committed(run, checkpoint_slot(0)))
    assert [parent.slot for parent in first.parents] == [base_slot()]
    identity = identity_of(run, last)
    state = trainer._loaded
    assert all(map(is_adapters, state.parameters))
    assert identity.base_digest == digest
    assert identity.adapter_digest == digest_of(state.parameters)
    assert identity.adapter is not None
    assert identity.parameters_digest == policy_digest(
        digest, identity.adapter.modules, digest_of(state.parameters)
    )
    # The base is written once: the checkpoints together are far smaller than it is.
    size = {s: sum(p.bytes for p in manifest_of(run.store, committed(run, s)).parts)
            for s in (base_slot(), checkpoint_slot(1), checkpoint_slot(2))}  # fmt: skip
    assert size[checkpoint_slot(2)] < 2 * size[base_slot()] + 40_000
    # A new trainer, from the files alone, ends in the same bits.
    again = Trainer(run, tokenizer)
    again.load(last)
    assert again.identity == trainer.identity == identity
    for name, array in named_parameters(again.models()[1]).items():
        np.testing.assert_array_equal(array, named_parameters(trainer.models()[1])[name])


@pytest.mark.slow
def test_engines_serve_the_merged_policy_which_the_adapter_next_to_its_base_proves(played):
    run, trainer, last = played
    loaded = read_checkpoint(run, 2)
    assert loaded.parameters_digest == identity_of(run, last).parameters_digest
    served = named_parameters(trainer.models()[1])
    for name, array in named_parameters(loaded.model).items():
        np.testing.assert_allclose(array, served[name], atol=1e-6)
    rows = rows_of(random_batch(3))
    trained, read = (
        compiled_logprobs(m, *rows).logprobs for m in (trainer.models()[0], loaded.model)
    )
    np.testing.assert_allclose(trained, read, atol=2e-5)


def faults_of(run, *places):
    """Kinds of the faults in some folders; the batches here are of no rollouts."""
    faults = check_run(run.config.root, run.run_id).faults
    return [fault.kind for fault in faults if any(place in fault.place for place in places)]


@pytest.mark.slow
def test_fsck_and_gc_know_the_base(played):
    run, _, _ = played
    assert faults_of(run, "/base/", "/checkpoints/") == []
    assert collect(run, dry_run=True).garbage == ()
    part = manifest_of(run.store, committed(run, base_slot())).parts[-1]
    path = run.store.local_path(f"base/{part.name}")
    path.write_bytes(b"x" * part.bytes)
    assert faults_of(run, "/base/") == ["altered"]
    with pytest.raises(CorruptObject, match="the file was damaged"):
        read_checkpoint(run, 2)


@pytest.mark.slow
def test_a_base_that_is_gone_ends_with_one_error_before_work(played, tokenizer):
    run, _, last = played
    run.store.local_path("base/manifest.json").unlink()
    assert "missing" in faults_of(run, "/base/")
    trainer = Trainer(run, tokenizer)
    trainer.load(last)
    with pytest.raises(ObjectMissing, match="expected the base that the run's adapter is of"):
        trainer.models()


@pytest.mark.slow
def test_a_model_folder_is_the_base_by_its_digest_alone(debug, tokenizer, tmp_path):
    config = debug(*SETTINGS)
    save_hf(build_model(config.policy, len(tokenizer), 5), tokenizer, tmp_path / "hf")
    folder = ("policy.init=hf", f"policy.hf_path={tmp_path / 'hf'}")
    run, trainer, first = begin(debug(*SETTINGS, *folder), tokenizer)
    base = manifest_of(run.store, committed(run, base_slot()))
    assert base.parts == ()
    trainer.load(first)
    loaded = read_folder(str(tmp_path / "hf"))
    assert base.extra["parameters_digest"] == loaded.parameters_digest
    # Another model in the folder: one clear error.
    for file in (tmp_path / "hf").iterdir():
        file.unlink()
    save_hf(build_model(config.policy, len(tokenizer), 6), tokenizer, tmp_path / "hf")
    with pytest.raises(InputError, match="has other weights than the base of this run's adapter"):
        Trainer(run, tokenizer).train_round(0, batches_of(run, 0), first)


def test_an_adapter_begins_from_a_peft_folder_with_its_ranks(debug, tokenizer, tmp_path):
    plain = debug("policy.model.layers=1")
    shapes = parameter_shapes(build_model(plain.policy, len(tokenizer), 0))
    adapter = random_adapter(LoraConfig(rank=2, alpha=4.0, modules=("mlp.*",)), shapes=shapes)
    write_peft(tmp_path / "peft", adapter)
    run, trainer, first = begin(
        debug(*SETTINGS[:2], f"policy.lora.init_from={tmp_path / 'peft'}"), tokenizer
    )
    trainer.load(first)
    assert digest_of(trainer._loaded.parameters) == adapter.digest
    identity = identity_of(run, first)
    assert identity.adapter is not None
    assert identity.adapter.modules == adapter.modules
    # From then on the run needs the folder no more.
    for file in (tmp_path / "peft").iterdir():
        file.unlink()
    assert Trainer(run, tokenizer).init_policy().reused


def test_a_run_cannot_be_continued_with_another_adapter_or_none(debug, tokenizer):
    begin(debug(*SETTINGS), tokenizer)
    with pytest.raises(ConfigError, match=r"policy\.lora"):
        Run.create_or_open(debug(*SETTINGS[:2]))
    with pytest.raises(ConfigError, match=r"policy\.lora\.rank"):
        Run.create_or_open(debug(*SETTINGS, "policy.lora.rank=8"))
    Run.create_or_open(debug(*SETTINGS[:2], "run_id=full"))
    with pytest.raises(ConfigError, match=r"policy\.lora"):
        Run.create_or_open(debug(*SETTINGS, "run_id=full"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("policy.lora.rank=0",), r"policy\.lora\.rank"),
        (("policy.lora.alpha=2",), r"lora\.rank: expected a rank of at least 1"),
        (("policy.lora.rank=4", "policy.lora.init_from=x"), "has ranks, scales and modules of its"),
        (("policy.lora.rank=4", "policy.lora.modules=[]"), r"policy\.lora\.modules"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(debug, settings, message):
    with pytest.raises(ConfigError, match=message):
        debug(*settings)


@pytest.mark.slow
@pytest.mark.parametrize("trunk", others_slow(["own", "shared"], "shared"))
def test_a_critic_is_a_second_adapter_or_a_head_on_the_same_base(debug, tokenizer, trunk):
    config = debug(*SETTINGS, "recipe=ppo", f"training.critic.trunk={trunk}")
    run, trainer, first = begin(config, tokenizer)
    last = play(run, trainer, first, range(1))
    critic = trainer._loaded.critic
    assert critic is not None
    names = set(critic.parameters)
    own = {f"trunk/{name}" for name in trainer._loaded.parameters}
    assert names == ({"head/weight", "head/bias"} | own if trunk == "own" else {"weight", "bias"})
    assert identity_of(run, last).critic_digest == digest_of(critic.parameters)
    again = Trainer(run, tokenizer)
    again.load(last)
    assert again.identity == trainer.identity


@pytest.mark.slow
def test_the_reference_of_an_adapter_is_its_base_without_a_second_model(debug, tokenizer):
    config = debug(*SETTINGS, "objective.kl_coefficient=0.1")
    run, trainer, first = begin(config, tokenizer)
    last = trainer.train_round(0, batches_of(run, 0), first)
    assert 0 < last.summary["kl"] < 1e-2  # nothing before the first of its two updates
    reference = trainer._reference(1, last)
    assert reference is not None
    assert reference.parameters == {}
    later = trainer.train_round(1, batches_of(run, 1), last)
    assert later.summary["kl"] > last.summary["kl"]


def test_an_optimizer_has_moments_of_the_adapter_alone():
    model = build_model(tiny_policy(layers=1), VOCAB, 0)
    modules = configured_modules(SPEC, parameter_shapes(model))
    from marin_rl.config import TrainingConfig
    from marin_rl.training.model import matrix_mask
    from marin_rl.training.optimizer import policy_adamw

    template = with_adapter(model, modules)
    optimizer = make_optimizer(policy_adamw(TrainingConfig()), matrix_mask(template))
    arrays = _device(initial_arrays(modules, parameter_shapes(model), 0))
    moments = jax.tree.leaves(fresh_state(arrays, optimizer, 0).optimizer)
    assert sum(leaf.size for leaf in moments if leaf.ndim) == 2 * sum(
        a.size for a in arrays.values()
    )


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.bits
def test_rounds_end_in_the_same_bits_however_they_are_interrupted(
    played, debug, tokenizer, tmp_path
):
    run, _, last = played
    other = Run.create_or_open(debug(*SETTINGS, f"root={tmp_path / 'other'}"))
    checkpoint = Trainer(other, tokenizer).init_policy()
    for round in range(2):
        checkpoint = play(other, Trainer(other, tokenizer), checkpoint, [round])
    digests = [identity_of(*pair).parameters_digest for pair in ((run, last), (other, checkpoint))]
    assert digests[0] == digests[1]
    replayed = replay_round(run, 1)
    assert replayed.equal
    assert replayed.digest == digests[0]


@pytest.mark.slow
def test_a_merged_checkpoint_is_exported_as_a_model_folder(played, tmp_path):
    run, trainer, _ = played
    export_hf(run, None, tmp_path / "hf")
    model = read_folder(str(tmp_path / "hf")).model
    for name, array in named_parameters(trainer.models()[1]).items():
        np.testing.assert_allclose(named_parameters(model)[name], array, atol=1e-6)

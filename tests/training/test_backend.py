"""The training backend: a user's loop, frozen parameters, sums of gradients, refusals."""

import asyncio
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training.batches import VOCAB, random_batch, tiny_policy
from training.steps import make_step, take_step

from marin_rl.config import ObjectiveConfig
from marin_rl.errors import InputError
from marin_rl.storage.runs import Run, checkpoint_slot, committed
from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import policy_settings, supervised_settings, to_fixed_shape
from marin_rl.training.loop import Trainer
from marin_rl.training.model import build_model, named_parameters
from marin_rl.training.state import CheckpointSlot, fresh_state, identity_of
from marin_rl.training.step_types import Reference, StepSettings, step_arrays

PAGE = Path(__file__).parents[2] / "docs/training-backend.md"
OBJECTIVE = ObjectiveConfig(kl_coefficient=0.1, aggregation="token_mean")

# One layer: what a backend does with a step depends on no more, and its programs compile sooner.
LAYER = "policy.model.layers=1"


def host(parameters) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in parameters.items()}


@pytest.fixture
def backend(debug, tokenizer):
    return DeviceBackend.of(debug(LAYER), tokenizer)


@pytest.mark.slow
def test_the_loop_of_the_documentation_trains_and_commits(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(code.strip().splitlines()) <= 30
    monkeypatch.chdir(tmp_path)
    debug_yaml = Path(__file__).parents[2] / "configs/debug.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/debug.yaml").write_bytes(debug_yaml.read_bytes())
    (tmp_path / "loop.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "loop.py"))
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
    run = names["run"]
    ref = committed(run, checkpoint_slot(0))
    assert ref is not None
    trainer = Trainer(run, tokenizer_for(run.config.policy))
    trainer.load(ref)
    saved = host(named_parameters(trainer.models()[0]))
    for name, array in host(names["backend"].get_weights().result()).items():
        np.testing.assert_array_equal(saved[name], array)


@pytest.mark.slow
def test_frozen_parameters_have_no_gradient_and_no_moments_and_the_rest_trains():
    policy = tiny_policy(layers=1)
    model = build_model(policy, VOCAB, 0)
    everything = named_parameters(model)
    frozen = {name: array for name, array in everything.items() if name.startswith("embeddings/")}
    trainable = {name: array for name, array in everything.items() if name not in frozen}
    assert frozen
    assert trainable
    before, sgd = host(everything), optax.with_extra_args_support(optax.sgd(1.0, momentum=0.5))
    settings = StepSettings(objective=OBJECTIVE)
    rows = step_arrays(random_batch(4), 2, 2)
    apart = {name: array * 1.1 for name, array in trainable.items()}

    def stepped(own, fixed):
        step = make_step(model, sgd, lambda step: 0.1 + 0 * step, settings, frozen=fixed)
        reference = Reference({**own, **{n: apart[n] for n in apart if n in own}}, np.float32(0.1))
        return step(fresh_state(own, sgd, 0), reference, *rows)

    state, metrics, _ = stepped(trainable, frozen)
    assert set(state.parameters) == set(trainable)
    moments = {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
    }
    assert not any("embeddings" in name for name in moments)
    assert len(moments) == len(trainable)
    for name, array in trainable.items():
        assert np.abs(np.asarray(state.parameters[name]) - before[name]).max() > 0, name
        assert array is everything[name]
    for name, array in frozen.items():
        np.testing.assert_array_equal(array, before[name])
    # What is not frozen moves as it does in a step that trains all of it.
    whole, of_whole, _ = stepped(everything, {})
    assert float(metrics["loss"]) == pytest.approx(float(of_whole["loss"]), rel=1e-6)
    for name in trainable:
        np.testing.assert_allclose(state.parameters[name], whole.parameters[name], atol=1e-6)
    assert float(metrics["grad_norm"]) < float(of_whole["grad_norm"])


@pytest.mark.slow
def test_gradients_of_several_batches_add_up(backend):
    program, loss = backend._program, Loss(settings=backend._program.settings)
    first, second = (to_fixed_shape(random_batch(4, seed=seed), 2, 4) for seed in (1, 2))
    gradients = []
    for rows in (first, second):
        backend.forward_backward(rows, loss).result()
        gradients.append([jax.tree.map(np.asarray, part.policy) for part in backend._gradients])
        backend._gradients = ()
    backend.forward_backward(first, loss)
    backend.forward_backward(second, loss).result()
    for part, (a, b) in zip(backend._gradients, zip(*gradients, strict=True), strict=True):
        for name, array in part.policy.items():
            np.testing.assert_array_equal(array, a[name] + b[name])
    assert backend.optim_step().result().metrics["grad_norm"] > 0
    assert program.settings.objective is not None


@pytest.mark.slow
def test_awaited_and_resolved_operations_give_the_same_bits(debug, tokenizer):
    rows = [to_fixed_shape(random_batch(4, seed=seed), 2, 4) for seed in range(3)]
    loss = Loss(settings=policy_settings(debug(LAYER)))

    async def awaited(backend):
        for batch in rows:
            forward = backend.forward_backward(batch, loss)
            await backend.optim_step()
            assert (await forward).metrics["loss"] == forward.result().metrics["loss"]
        return host(await backend.get_weights())

    queued = DeviceBackend.of(debug(LAYER), tokenizer)
    for batch in rows:  # nothing is waited for in between
        queued.forward_backward(batch, loss)
        queued.optim_step()
    by_hand = DeviceBackend.of(debug(LAYER), tokenizer)
    program, state = by_hand._program, by_hand.close()
    for batch in rows:
        state, _, _ = take_step(program, state, batch)
    expected = host(state.parameters)
    for weights in (
        asyncio.run(awaited(DeviceBackend.of(debug(LAYER), tokenizer))),
        host(queued.get_weights().result()),
    ):
        for name, array in expected.items():
            np.testing.assert_array_equal(weights[name], array)


@pytest.mark.slow
def test_two_losses_share_one_state(backend, debug):
    rows = to_fixed_shape(random_batch(4), 2, 4)
    supervised = Loss(settings=supervised_settings(debug(LAYER)))
    first = backend.forward_backward(rows, supervised).result()
    assert first.measures is None
    steps = [backend.optim_step()]
    policy = backend.forward_backward(rows, Loss(settings=policy_settings(debug(LAYER))))
    steps.append(backend.optim_step())
    assert [step.result().metrics["updates/steps"] for step in steps] == [1, 2]
    assert policy.result().measures is not None


def test_rows_of_several_sequences_are_refused_by_a_loss_of_one_a_row(backend, debug):
    rows = to_fixed_shape(random_batch(4), 2, 4)
    segments = rows.arrays.segment_ids.copy()
    segments[..., -2:] = 2
    packed = rows._replace(arrays=rows.arrays._replace(segment_ids=segments))
    alone = policy_settings(debug(LAYER))
    with pytest.raises(
        InputError, match=r"expected one sequence a row, found rows of 2: .*packing"
    ):
        backend.forward_backward(packed, Loss(settings=alone)).result()


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins where JAX would use the memory of an array itself."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_loaded_weights_are_those_that_are_trained(backend, debug, tokenizer):
    other = build_model(debug(LAYER).policy, len(tokenizer), 5)
    backend.load_weights(host(named_parameters(other))).result()
    for name, array in named_parameters(other).items():
        np.testing.assert_array_equal(backend.get_weights().result()[name], array)
    weights = host(named_parameters(other))
    (name, *_) = weights
    own = {each: aligned(array) for each, array in weights.items()}
    backend.load_weights(own).result()
    own[name] += 1  # what the caller does with its arrays afterwards
    np.testing.assert_array_equal(backend.get_weights().result()[name], weights[name])
    with pytest.raises(InputError, match=re.escape(name) + r" expected .* found None"):
        backend.load_weights({n: a for n, a in weights.items() if n != name}).result()
    with pytest.raises(InputError, match=r"expected .* found"):
        backend.load_weights(weights | {name: weights[name][:0]}).result()


def test_an_update_needs_gradients_and_one_that_is_not_finite_is_refused(backend):
    with pytest.raises(InputError, match="expected forward_backward before optim_step"):
        backend.optim_step().result()
    before = host(backend.get_weights().result())
    rows = to_fixed_shape(random_batch(4), 2, 4)
    spoiled = rows.arrays._replace(advantages=rows.arrays.advantages * np.float32(np.nan))
    loss = Loss(settings=backend._program.settings)
    for refused in (1, 2):
        backend.forward_backward(rows._replace(arrays=spoiled), loss)
        update = backend.optim_step().result()
        assert (update.metrics["updates/skipped"], update.refused) == (1, refused)
    for name, array in backend.get_weights().result().items():
        np.testing.assert_array_equal(array, before[name])
    assert jnp.isfinite(backend.forward_backward(rows, loss).result().metrics["loss"])


def test_a_saved_checkpoint_carries_its_identity(backend, debug, tokenizer):
    run = Run.create_or_open(debug(LAYER))
    names = TokenizerIdentity.of(tokenizer)
    slot = CheckpointSlot(
        run=run, slot=checkpoint_slot(0), tokenizer=names, content={"made by": "a test"}
    )
    assert slot.find() is None
    ref = backend.save(slot, {"loss": 0.5, "left out": float("nan")}).result()
    assert slot.find() == ref
    assert dict(ref.summary) == {"loss": 0.5}
    assert identity_of(run, ref).tokenizer_digest == names.tokenizer_digest
    again = backend.save(slot, {"loss": 0.5}).result()
    assert again.reused

"""A divergence to a teacher as loss: by hand, its gradient, and runs that learn by it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.models import tiny_model
from support.policy_runs import play_round, small_config
from training.batches import random_batch

from marin_rl.analysis.query import sql
from marin_rl.analysis.verify import verify_run
from marin_rl.config import DistillationConfig, DivergenceConfig, ObjectiveConfig
from marin_rl.errors import ConfigError, InputError
from marin_rl.models.block import logits_of
from marin_rl.models.module import LanguageModel
from marin_rl.runtime import RunRuntime
from marin_rl.storage.runs import Run, latest_checkpoint
from marin_rl.storage.tables.batches import read_dispositions
from marin_rl.training.logprobs import final_states
from marin_rl.training.losses import divergence
from marin_rl.training.model import named_parameters, with_parameters
from marin_rl.training.precompute import RowPrecompute, as_taught
from marin_rl.training.replay import replay_round
from marin_rl.training.reprocess import reprocess_round
from marin_rl.training.step import ForwardBackward, beside_teacher
from marin_rl.training.step_types import StepRows, StepSettings, TrainableParams, step_arrays
from marin_rl.types import TrainingBatch

FORMS = [
    DivergenceConfig(beta=beta, top_k=top_k) for beta in (0.0, 0.3, 1.0) for top_k in (None, 5)
]


def by_definition(form: DivergenceConfig, teacher: np.ndarray, policy: np.ndarray) -> float:
    """The divergence of two rows of logits, in float64."""
    theirs, ours = (np.exp(x) / np.exp(x).sum() for x in (teacher.astype(np.float64), policy))
    if form.top_k:
        known = np.argsort(-theirs)[: form.top_k]
        theirs, ours = (np.append(p[known], 1 - p[known].sum()) for p in (theirs, ours))
    mixture = form.beta * theirs + (1 - form.beta) * ours
    if form.beta in (0, 1):  # the limits that GKD names forward and reverse
        first, second = (ours, theirs) if form.beta else (theirs, ours)
        return float(np.sum(first * np.log(first / second)))
    to_mixture = [np.sum(p * np.log(p / mixture)) for p in (theirs, ours)]
    return float(form.beta * to_mixture[0] + (1 - form.beta) * to_mixture[1])


@partial(jax.jit, static_argnums=0)
def values_and_gradients(
    form: DivergenceConfig, teacher: np.ndarray, policy: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Divergences of rows of logits, and the gradient of each by the policy's row."""

    def total(policy: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = divergence(form, jnp.asarray(teacher), policy)
        return jnp.sum(values), values

    gradients, values = jax.grad(total, has_aux=True)(policy)
    return values, gradients


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_and_gradients_by_hand(form: DivergenceConfig):
    rng = np.random.default_rng(0)
    teacher, policy = (rng.normal(0, 2, (7, 30)).astype(np.float32) for _ in range(2))
    teacher = np.concatenate([teacher, np.full((7, 2), 50, np.float32)], axis=1)  # padding ids
    found, gradients = values_and_gradients(form, teacher, policy)
    expected = [by_definition(form, a[:30], b) for a, b in zip(teacher, policy, strict=True)]
    assert_allclose(found, expected, rtol=2e-5)
    step = 1e-5 * np.eye(30)
    pairs = [
        [by_definition(form, teacher[0, :30], policy[0] + s * e) for s in (1, -1)] for e in step
    ]
    numeric = [(up - down) / 2e-5 for up, down in pairs]
    assert_allclose(gradients[0], numeric, rtol=1e-3, atol=1e-5)
    found, gradients = values_and_gradients(form, teacher, teacher[:, :30])  # equal distributions
    assert np.abs(found).max() < 1e-5
    assert_allclose(gradients, np.zeros((7, 30)), atol=1e-5)


def logits_BTV(model: LanguageModel, rows: tuple) -> jax.Array:
    return logits_of(model.spec, model.head, final_states(model, *rows[:3]))


def row_of(*segments: tuple[int, int, list[int], list[int]]) -> TrainingBatch:
    """A row of segments of an id, first position, tokens and mask, and two tokens of padding."""
    columns = [np.zeros(0, np.int32)] * 4
    for segment, first, ids, mask in segments:
        own = ids, mask, [segment] * len(ids), range(first, first + len(ids))
        columns = [
            np.append(a, list(b)).astype(np.int32) for a, b in zip(columns, own, strict=True)
        ]
    padded = (np.pad(column, (0, 2))[None] for column in columns)
    names = "token_ids", "loss_mask", "segment_ids", "positions"
    blank = np.zeros((1, len(columns[0]) + 2), np.float32)
    return TrainingBatch(
        **dict(zip(names, padded, strict=True)), policy_logprobs=blank, advantages=blank,
        returns=blank,
    )  # fmt: skip


def prompts(*pairs: tuple[list[int], list[int]]) -> dict[bytes, np.ndarray]:
    return {np.array(a, np.int32).tobytes(): np.array(b, np.int32) for a, b in pairs}


def test_a_context_stands_before_each_prompt_of_a_row():
    whole = prompts(([5, 6], [9, 9, 5, 6]), ([7], [9, 9, 7]))
    packed = row_of((1, 0, [5, 6, 1, 2], [0, 0, 1, 1]), (2, 0, [7, 3], [0, 1]))
    rows, places = as_taught(packed, 0, whole)
    assert rows.tolist() == [
        [9, 9, 5, 6, 1, 2, 9, 9, 7, 3],
        [1, 1, 1, 1, 1, 1, 2, 2, 2, 2],
        [0, 1, 2, 3, 4, 5, 0, 1, 2, 3],
    ]
    assert places.tolist() == [2, 3, 4, 5, 8, 9, 0, 0]
    # Two completions of one prompt; then a sequence without a trained token, which stays.
    shared = row_of(
        (3, 0, [5, 6], [0, 0]), (1, 2, [1, 2], [1, 1]), (2, 2, [4], [1]), (4, 0, [8], [0])
    )
    rows, places = as_taught(shared, 0, whole)
    assert rows.tolist() == [
        [9, 9, 5, 6, 1, 2, 4, 8],
        [3, 3, 3, 3, 1, 1, 2, 4],
        [0, 1, 2, 3, 4, 5, 4, 0],
    ]
    assert places.tolist() == [2, 3, 4, 5, 6, 7, 0, 0]
    for row in (packed, shared):
        with pytest.raises(InputError, match=r"context: a prompt of 2 tokens is not what the chat"):
            as_taught(row, 0, prompts(([7], [9, 7])))


@pytest.mark.slow
@pytest.mark.parametrize("rows_of_the_teacher", ["the policy's", "with a context"])
def test_the_gradient_of_a_step_is_that_of_the_definition(rows_of_the_teacher: str):
    """Of a teacher of another width, over packed rows in microbatches; no advantage counts."""
    model, teacher = tiny_model(), tiny_model(width=48, seed=3)
    form = DivergenceConfig(beta=0.3, top_k=8)
    batch = random_batch(5, 16, 0)
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    arrays, used = step_arrays(batch, 2, 3)
    read = (arrays.token_ids, arrays.segment_ids, arrays.positions)
    places = np.broadcast_to(np.arange(16), (6, 16))
    if rows_of_the_teacher == "with a context":
        prompt = [
            ids[: mask.argmax()].tolist()
            for ids, mask in zip(batch.token_ids, batch.loss_mask, strict=True)
        ]
        found = prompts(*((plain, [3, 1, 4, *plain]) for plain in prompt))
        precompute = RowPrecompute(ObjectiveConfig(), [batch], [StepRows(arrays, used)])
        precompute.place_context(found)
        arrays = precompute.extras[0](StepRows(arrays, used)).arrays
        assert arrays.taught is not None
        *read, places = arrays.taught
        places = places.reshape(6, 16)
    settings = StepSettings(
        objective=ObjectiveConfig(aggregation="token_mean"),
        distillation=DistillationConfig(loss=form, coefficient=0.7),
        teacher=teacher.spec,
    )
    trained = named_parameters(model)
    frozen = beside_teacher({}, named_parameters(teacher))
    passes = ForwardBackward(model, settings)
    (found,), metrics, _ = passes(TrainableParams(trained), frozen, None, arrays, used)
    assert found.policy is not None
    named = arrays.token_ids, arrays.segment_ids, arrays.positions, arrays.mask
    rows = tuple(jnp.asarray(each.reshape(6, 16)) for each in named)
    length = read[0].shape[-1]
    theirs = jax.jit(logits_BTV)(teacher, tuple(each.reshape(6, length) for each in read))
    theirs = jnp.take_along_axis(theirs, jnp.asarray(places)[..., None], axis=1)

    def loss(parameters: dict[str, jax.Array]) -> jax.Array:
        apart = divergence(form, theirs, logits_BTV(with_parameters(model, parameters), rows))
        # The token at a position is predicted before it.
        apart = jnp.pad(apart, ((0, 0), (1, 0)))[:, :-1]
        return jnp.sum(jnp.where(rows[3], apart, 0)) / jnp.sum(rows[3])

    value, expected = jax.jit(jax.value_and_grad(loss))(trained)
    assert float(metrics["distillation/divergence"]) == pytest.approx(float(value), rel=1e-5)
    assert float(metrics["loss"]) == 0  # the part that files have the numbers of
    for name, gradient in expected.items():
        assert_allclose(found.policy[name], 0.7 * gradient, rtol=1e-3, atol=1e-6, err_msg=name)


SETTINGS = (
    "policy.model.layers=1", "sampling.max_tokens=6", "objective.advantage=rloo",
    "training.learning_rate=1e-2", "training.warmup_steps=0", "batching.length_buckets=[]",
    "filters.zero_signal=true", "rollouts.groups_per_round=8", "rollouts.group_size=4",
)  # fmt: skip


def played(root: Path, rounds: int, *items: str) -> Run:
    run = Run.create_or_open(small_config(root, *SETTINGS, *items))
    runtime = RunRuntime(run)
    checkpoint = runtime.init_policy()
    for round in range(rounds):
        checkpoint = play_round(runtime, run, round, checkpoint)
    runtime.close()
    return run


@pytest.mark.slow
def test_a_run_learns_from_a_larger_teacher_alone(tmp_path: Path):
    wide = ("policy.model.hidden_size=48", "policy.model.initializer_range=0.3")
    played(tmp_path, 0, "run_id=source", *wide)
    teacher = f"distillation.checkpoint={tmp_path}/source/checkpoints/round-00000"
    loss = "distillation.loss={beta: 0}"
    run = played(tmp_path, 6, teacher, loss)
    rows = sql(tmp_path, run.run_id, "select * from metrics order by round").to_dicts()
    apart = [row["distillation/divergence"] for row in rows]
    assert np.mean(apart[-2:]) < 0.9 * apart[0]
    # No group is dropped, though the rewards of many are all equal, and no column was written.
    assert read_dispositions(run, 0)["reason"].to_pylist() == [None] * 32
    scored = sql(tmp_path, run.run_id, "select count(teacher_logprobs) as scored from rollouts")
    assert scored["scored"].to_list() == [0]
    assert [each for each in verify_run(run) if each.problem] == []
    assert replay_round(run, 1).equal
    less = reprocess_round(run, 1, ["distillation.coefficient=0"])
    assert less.gradient is not None
    assert less.gradient.norm_after < less.gradient.norm_before
    # Another teacher in the place of the one that the run began with.
    played(tmp_path / "other", 0, "run_id=source", "seed=9", *wide)
    (tmp_path / "source").rename(tmp_path / "before")
    (tmp_path / "other" / "source").rename(tmp_path / "source")
    runtime, last = RunRuntime(run), latest_checkpoint(run)
    assert last is not None
    with pytest.raises(InputError, match=r"but that of round 5 was [0-9a-f]+: restore the one"):
        play_round(runtime, run, 6, last)
    runtime.close()


@pytest.mark.slow
def test_a_run_learns_what_its_first_policy_says_after_a_context(tmp_path: Path):
    context = (
        "distillation.context=[{role: user, content: hi}, {role: assistant, content: HO}]",
        "policy.model.initializer_range=0.5", "policy.context_length=256",
    )  # fmt: skip
    run = played(tmp_path, 5, "distillation.loss={beta: 0}", *context)
    rows = sql(tmp_path, run.run_id, "select * from metrics order by round").to_dicts()
    apart = [row["distillation/divergence"] for row in rows]
    assert 1e-4 < np.mean(apart[-2:]) < 0.9 * apart[0]
    assert [each for each in verify_run(run) if each.problem] == []
    assert replay_round(run, 1).equal
    less = reprocess_round(run, 1, ["distillation.coefficient=0"])
    assert less.gradient is not None
    assert less.gradient.norm_after < less.gradient.norm_before


def test_settings_that_it_cannot_compare_by_are_refused(tmp_path: Path):
    for item, message in (
        ("distillation.endpoint=http://127.0.0.1:9/v1", "expected endpoint null, or loss null"),
        ("distillation.environments=[a]", "expected environments null"),
        ("distillation.loss.beta=1.5", "distillation.loss.beta"),
        ("sampling.temperature=0.5", "expected sampling.temperature 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            small_config(tmp_path, *SETTINGS, "distillation.loss={beta: 0.5}", item)
    critic = (
        "training.critic={}",
        "objective.advantage=gae",
        "objective.ratio_level=token",
        "distillation.loss={beta: 0.5}",
    )
    with pytest.raises(ConfigError, match=r"expected training\.critic null, or loss null"):
        small_config(tmp_path, *SETTINGS, *critic)

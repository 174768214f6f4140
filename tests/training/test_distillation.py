"""A teacher's part of advantages: by hand, its gradient, and runs that learn from nothing else."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.models import full_logprobs
from support.policy_runs import play_round, small_config
from training.batches import compilations, random_batch

from marin_rl.analysis.query import sql
from marin_rl.analysis.scan import scan_batches
from marin_rl.analysis.verify import verify_run
from marin_rl.config import ObjectiveConfig
from marin_rl.doctor.policy import teacher
from marin_rl.errors import ConfigError, InputError
from marin_rl.runtime import RunRuntime
from marin_rl.serving.weights.export import export_hf
from marin_rl.storage.runs import Run, batches_slot, committed
from marin_rl.storage.tables.batches import read_batches, read_dispositions
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.losses import policy_losses
from marin_rl.training.precompute import RowPrecompute, distillation_metrics, teacher_terms
from marin_rl.training.replay import replay_round
from marin_rl.training.reprocess import reprocess_round
from marin_rl.training.step_types import step_arrays
from marin_rl.training.teacher import LocalTeacher, local_teacher
from marin_rl.types import TrainingBatch

SETTINGS = (
    "policy.model.layers=1", "sampling.max_tokens=6", "objective.ratio_level=token",
    "objective.advantage=reinforce", "training.learning_rate=1e-2", "training.warmup_steps=0",
    "filters.zero_signal=true", "batching.length_buckets=[]",
)  # fmt: skip
CONTEXT = (
    'distillation.context=[{"role": "user", "content": "ab"}, '
    '{"role": "assistant", "content": "zzzzz"}]'
)


def taught_batch(rows: int = 3, length: int = 16, seed: int = 0):
    """A batch with a teacher's log-probabilities; the last row has none."""
    batch = random_batch(rows, length, seed)
    rng = np.random.default_rng(seed + 1)
    teacher = np.where(batch.loss_mask, rng.normal(-4.0, 0.5, (rows, length)), 0)
    teacher[-1][batch.loss_mask[-1] == 1] = np.nan
    names = tuple((f"r{row}",) for row in range(rows))
    return dataclasses.replace(
        batch, rollout_ids=names, teacher_logprobs=teacher.astype(np.float32)
    )


def test_an_advantage_by_hand():
    batch = TrainingBatch(
        token_ids=np.full((1, 4), 7, np.int32),
        returns=np.zeros((1, 4), np.float32),
        loss_mask=np.array([[0, 1, 0, 1]], np.int32),
        segment_ids=np.ones((1, 4), np.int32),
        positions=np.arange(4, dtype=np.int32)[None],
        policy_logprobs=np.array([[0, -1.0, 0, -2.0]], np.float32),
        advantages=np.array([[0, 0.5, 0, 0.5]], np.float32),
        teacher_logprobs=np.array([[0, -3.0, 0, -0.5]], np.float32),
        rollout_ids=(("r0",),),
    )
    rows = step_arrays(batch, 1, 1)
    precompute = RowPrecompute(ObjectiveConfig(ratio_level="token"), [batch], [rows])
    precompute.distil(0.25)
    (extra,) = precompute.extras
    # Half, and a quarter of the differences -2 and 1.5.
    assert extra(rows).arrays.advantages.tolist() == [[[0.0, 0.0, 0.0, 0.875]]]
    assert precompute.metrics["distillation/kl"] == 0.25
    k3 = (np.exp(-2.0) + 1.0 + np.exp(1.5) - 2.5) / 2
    assert precompute.metrics["distillation/kl_k3"] == pytest.approx(k3, rel=1e-6)
    assert precompute.metrics["distillation/unscored_tokens"] == 0


def test_the_gradient_is_that_of_the_difference_held_constant():
    """sum_t A_t grad log pi_t, against the same of the definition; without a term, none."""
    batch = taught_batch()
    rows = step_arrays(batch, 3, 1)
    precompute = RowPrecompute(ObjectiveConfig(ratio_level="token"), [batch], [rows])
    precompute.distil(0.7)
    arrays = precompute.extras[0](rows).arrays
    mask, advantages = arrays.mask[0].astype(np.float32), arrays.advantages[0]
    objective = ObjectiveConfig(surrogate="reinforce", ratio_level="token")
    logprobs = jnp.asarray(batch.policy_logprobs)

    def loss(logprobs: jax.Array) -> jax.Array:
        old = jnp.asarray(batch.policy_logprobs)
        losses = policy_losses(objective, logprobs, old, advantages, mask, arrays.segment_ids[0])
        return jnp.sum(losses * mask)

    found = np.asarray(jax.grad(loss)(logprobs))
    apart = np.nan_to_num(batch.teacher_logprobs) - batch.policy_logprobs
    scored = (batch.loss_mask == 1) & ~np.isnan(batch.teacher_logprobs)
    expected = -(batch.advantages + 0.7 * np.where(scored, apart, 0)) * batch.loss_mask
    assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_tokens_without_a_score_are_counted_and_change_nothing():
    batch = taught_batch()
    rows = step_arrays(batch, 2, 2)
    terms = teacher_terms(batch, rows.arrays)
    unscored = int(batch.loss_mask[-1].sum())
    assert int(np.isnan(terms).sum()) == unscored
    metrics = distillation_metrics([terms], [rows.arrays.mask])
    assert metrics["distillation/unscored_tokens"] == unscored
    assert distillation_metrics([], []) == {"distillation/unscored_tokens": 0.0}
    precompute = RowPrecompute(ObjectiveConfig(ratio_level="token"), [batch], [rows])
    precompute.distil(1.0)
    after = precompute.extras[0](rows).arrays.advantages.reshape(4, -1)
    assert_array_equal(after[2], rows.arrays.advantages.reshape(4, -1)[2])


def begun(root: Path, *items: str) -> tuple[Run, RunRuntime]:
    run = Run.create_or_open(small_config(root, *SETTINGS, *items))
    return run, RunRuntime(run)


def played(root: Path, rounds: int, *items: str) -> Run:
    run, runtime = begun(root, *items)
    checkpoint = runtime.init_policy()
    for round in range(rounds):
        checkpoint = play_round(runtime, run, round, checkpoint)
    runtime.close()
    return run


@pytest.mark.slow
def test_a_run_that_teaches_itself_without_a_context_learns_nothing_new(tmp_path):
    """Teacher and policy are one: 0 for every token, whatever programs computed them."""
    run = played(tmp_path, 1, "distillation.coefficient=1")
    frame = sql(tmp_path, run.run_id, "select logprobs, teacher_logprobs from rollouts")
    apart = [np.abs(np.subtract(*map(np.array, row))).max() for row in frame.iter_rows()]
    assert len(apart) == 16
    assert max(apart) < 1e-6
    (row,) = sql(tmp_path, run.run_id, "select * from metrics").to_dicts()
    assert abs(row["distillation/kl"]) < 1e-6
    assert row["distillation/unscored_tokens"] == 0
    batches = scan_batches(tmp_path, run.run_id).collect()
    apart = [
        np.abs(np.subtract(a, b)).max()
        for a, b in batches.select("teacher_logprobs", "policy_logprobs").iter_rows()
    ]
    assert len(apart) == 16
    assert max(apart) < 1e-6


@pytest.mark.slow
def test_a_larger_teacher_with_a_context_is_learned_from_and_every_reader_knows_it(tmp_path):
    wide = ("policy.model.hidden_size=48", "policy.model.initializer_range=0.3")
    _, teaching = begun(tmp_path, "run_id=source", *wide)
    teaching.init_policy()
    teaching.close()
    place = f"distillation.checkpoint={tmp_path}/source/checkpoints/round-00000"
    many = "rollouts.groups_per_round=32", "rollouts.group_size=8", "objective.advantage=rloo"
    run = played(tmp_path, 8, place, CONTEXT, *many)
    rows = sql(tmp_path, run.run_id, "select * from metrics order by round")
    kl = rows["distillation/kl"].to_list()
    # About 1.8 and 1.6 nats a token.
    assert np.mean(kl[-3:]) < 0.95 * np.mean(kl[:2])
    # No group is dropped, though the rewards of many are all 0.
    reasons = [read_dispositions(run, round)["reason"].to_pylist() for round in range(2)]
    assert reasons == [[None] * 256] * 2
    assert [f for f in verify_run(run) if f.problem] == []
    assert replay_round(run, 1).equal
    less = reprocess_round(run, 1, ["distillation.coefficient=0"])
    assert less.gradient is not None
    assert less.gradient.norm_after < less.gradient.norm_before
    # Without the teacher's part, groups of equal rewards have no signal.
    assert "consumed -> filtered (zero_signal)" in less.moved
    with pytest.raises(ConfigError, match=r"distillation\.context"):
        reprocess_round(run, 1, ["distillation.context=null"])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["null", "{beta: 0.5}"])
def test_devices_that_share_rows_learn_of_a_teacher_what_one_learns(loss, tmp_path):
    ends = []
    for axis in ("null", "2"):
        items = f"mesh.context={axis}", "distillation.coefficient=1", f"distillation.loss={loss}"
        apart = CONTEXT, "policy.model.initializer_range=0.5"
        run, runtime = begun(tmp_path / axis, *items, *apart)  # run ids decide what is sampled
        first = runtime.init_policy()
        trained = play_round(runtime, run, 0, first)
        read = list(read_batches(run, committed(run, batches_slot(0))))
        # Updates of Adam would show signs of what is nearly 0.
        ends.append((read, runtime.trainer.gradient(0, lambda: read, first), trained.summary))  # noqa: B023 - called at once
        runtime.close()
    (read, expected, one), (again, found, two) = ends
    for batch, other in zip(read, again, strict=True):
        assert_array_equal(batch.token_ids, other.token_ids)
    for name, array in expected.items():
        atol = 2e-5 * np.abs(array).max()
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=atol)
    name = "distillation/kl" if loss == "null" else "distillation/divergence"
    assert one[name] > 1e-3
    assert two[name] == pytest.approx(one[name], rel=1e-3)


def test_shards_of_other_lengths_compile_nothing_more(tmp_path):
    _, runtime = begun(tmp_path, "distillation.coefficient=1")
    runtime.init_policy()
    own = runtime.teacher()
    assert own is not None
    own.score([np.arange(7, 7 + 40, dtype=np.int32)], [1])
    before = compilations()
    for longest in (41, 44, 48):  # all of them padded to 48
        own.score([np.arange(7, 7 + longest, dtype=np.int32)], [1])
    assert compilations() == before


def test_a_folder_gives_the_scores_of_the_checkpoint_it_was_exported_from(tmp_path):
    run, runtime = begun(tmp_path, "distillation.coefficient=1")
    runtime.init_policy()
    own = runtime.teacher()
    assert isinstance(own, LocalTeacher)
    folder = tmp_path / "folder"
    export_hf(run, 0, folder)
    other, _ = begun(tmp_path, "run_id=other", f"distillation.folder={folder}")
    exported = local_teacher(other, tokenizer_for(other.config.policy))
    assert exported.identity == own.identity
    assert teacher(other.config).endswith("50 texts have the same ids")
    words = "policy.tokenizer=marin_rl/templates/tools/tokenizer"
    with pytest.raises(InputError, match="2 tokens of the policy have another id in the teacher"):
        teacher(small_config(tmp_path, *SETTINGS, f"distillation.folder={folder}", words))
    ids = [np.arange(7, 7 + n, dtype=np.int32) for n in (5, 40, 5)]
    for found, expected, first in zip(
        exported.score(ids, [1, 3, 4]), own.score(ids, [1, 3, 4]), (1, 3, 4), strict=True
    ):
        assert len(found) in (5 - first, 40 - first)
        assert_array_equal(found, expected)
    (scores,) = own.score(ids[:1], [1])
    by_definition = full_logprobs(runtime.trainer.models()[0], ids[0][:1], ids[0][1:])
    assert_allclose(scores, by_definition, rtol=1e-5, atol=1e-5)
    runtime.close()

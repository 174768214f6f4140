"""Rounds without an orchestrator: what compiles when, what is repeated, how a round closes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from support.models import full_logits
from support.policy_runs import commit, play_round, weights

from marin_rl.config import load_config
from marin_rl.metrics import is_defined
from marin_rl.rollouts.generate import generate_shard
from marin_rl.rounds import close_round, overlap_metrics, rates, rlhf_metrics, transfer_metrics
from marin_rl.runtime import RunRuntime
from marin_rl.storage.runs import Run, shard_key
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import groups_of, iter_shards, seal_round

# Programs as users have them are not the subject here, and take twice as long to compile.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

DEBUG = Path(__file__).parent.parent / "configs/debug.yaml"
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one with every program that XLA compiles."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_nothing_compiles_after_the_second_round(tmp_path: Path, compilations: list[str]) -> None:
    size = "policy.model.intermediate_size=72"  # of no other test, which had compiled all
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", size]))
    runtime = RunRuntime(run)
    try:
        checkpoint = runtime.init_policy()
        counts = []
        for round in range(5):
            checkpoint = play_round(runtime, run, round, checkpoint)
            counts.append(len(compilations))
    finally:
        runtime.close()
    assert counts[0] > 0, "the listener hears nothing"
    assert counts[1:] == [counts[1]] * 4


@pytest.mark.slow
def test_a_round_is_closed_once_with_defined_metrics_only(tmp_path: Path) -> None:
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}"]))
    runtime = RunRuntime(run)
    try:
        play_round(runtime, run, 0, runtime.init_policy())
    finally:
        runtime.close()
    (row,) = read_metrics(run).to_pylist()
    assert all(is_defined(name) for name in row if name not in ("run_id", "round"))
    assert row["rollouts/generated"] == 16
    assert row["episode"] == 16
    assert row["mismatch_kl"] < 1e-6
    assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert row["storage/bytes"] > 0
    assert row["replay/occupancy"] == 0
    assert row["env/echo/errors"] == 0
    again = close_round(run, 0, {"timing_s/round": 99.0})
    assert again.reused
    assert read_metrics(run).to_pylist() == [row]


def test_rates_are_of_what_is_known() -> None:
    metrics = {
        "timing_s/round": 4.0, "timing_s/generate": 2.0, "timing_s/train": 0.5,
        "rollouts/generated": 8.0, "rollouts/errors": 0.25, "completions/mean_length": 5.0,
    }  # fmt: skip
    totals = {"env/a/rollouts": 6.0, "model_flops": 1e12, "peak_flops_per_second": 4e12}
    assert rates(metrics, totals) == {
        "eps": 2.0, "env/a/eps": 1.5, "perf/tokens_per_second": 15.0, "perf/mfu": 0.5,
    }  # fmt: skip
    assert rates({}, totals) == {}
    assert "perf/mfu" not in rates(metrics, {"model_flops": 1e12})


def test_weights_are_counted_by_the_step() -> None:
    measured = {"bytes": 40.0, "seconds": 0.5, "transfers": 2.0, "failures": 1.0}
    assert transfer_metrics(measured, 4) == {
        "weights/bytes": 40.0, "weights/seconds": 0.5, "weights/failures": 1.0,
        "weights/transfers_per_step": 0.5,
    }  # fmt: skip
    assert "weights/transfers_per_step" not in transfer_metrics(measured, 0)


def test_huangs_reward_is_the_score_less_the_kl() -> None:
    told = {"objective/scores": 0.5, "objective/kl": 2.0, "objective/kl_coefficient": 0.1}
    assert rlhf_metrics(told) == {
        "objective/non_score_reward": -0.2, "objective/rlhf_reward": 0.3,
    }  # fmt: skip
    assert rlhf_metrics({"objective/scores": 0.5})["objective/rlhf_reward"] == 0.5
    assert rlhf_metrics({}) == {}


@pytest.mark.slow
def test_a_shard_made_alone_has_the_bits_of_one_made_with_others(tmp_path: Path) -> None:
    """A shard that a killed run makes again must equal the one it would have made."""
    tables = []
    for name, order in (("together", (0, 1)), ("apart", (1, 0))):
        run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path / name}"]))
        runtime = RunRuntime(run)
        try:
            policy = runtime.serve(runtime.init_policy())

            async def both(run=run, policy=policy, apart=name == "apart", order=order):
                if not apart:
                    await asyncio.gather(*(generate_shard(run, 0, n, policy) for n in order))
                    return
                for number in order:
                    await generate_shard(run, 0, number, policy)

            asyncio.run(both())
            parts = [asyncio.run(generate_shard(run, 0, n, policy)) for n in (0, 1)]
            assert all(part.reused for part in parts)
            assert run.store.local_path(shard_key(0, 1)) is not None
            seal_round(run, 0, parts, (policy.checkpoint,))
        finally:
            runtime.close()
        columns = ("rollout_id", "token_ids", "logprobs", "reward")
        tables.append([table.to_pydict() for table in iter_shards(run, 0, columns)])
    for first, second in zip(*tables, strict=True):
        assert first["rollout_id"] == second["rollout_id"]
        assert first["token_ids"] == second["token_ids"]
        assert first["reward"] == second["reward"]
        for a, b in zip(first["logprobs"], second["logprobs"], strict=True):
            assert np.array_equal(np.float32(a), np.float32(b))


def test_overlap_saves_what_both_sides_took_less_the_round() -> None:
    sampling = {"timing_s/generate": 6.0, "timing_s/round": 99.0, "timing_s/sampler_idle": 2.0}
    training = {"timing_s/train": 7.0, "timing_s/trainer_idle": 1.0}
    assert overlap_metrics(sampling, training, 8.0) == {
        "perf/trainer_idle": 1 / 8, "perf/sampler_idle": 2 / 8, "timing_s/overlap_saved": 5.0
    }  # fmt: skip
    assert overlap_metrics(sampling, training, 20.0)["timing_s/overlap_saved"] == 0
    assert overlap_metrics({}, training, 4.0) == {
        "perf/trainer_idle": 1 / 4, "timing_s/overlap_saved": 0.0,
    }  # fmt: skip
    windowed = {"timing_s/train": 5.0, "timing_s/trainer_idle": 1.0, "timing_s/sampler_idle": 2.0}
    assert overlap_metrics({}, windowed, 8.0)["timing_s/overlap_saved"] == 3.0
    assert overlap_metrics(sampling, training, 0.0) == {}


@pytest.mark.slow
def test_a_repetition_penalty_is_corrected_by_the_ratio_to_the_penalised_policy(
    tmp_path: Path,
) -> None:
    """Columns and weights of the correction by definition (arXiv:1909.05858, 4.1), in float64."""
    wishes = "sampling.repetition_penalty=1.5", "objective.importance_correction=truncated"
    fixed = "objective.correction_high=1.1", "sampling.temperature=0.8"
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *wishes, *fixed]))
    model, checkpoint = weights(run, 3), commit(run, 0, weights(run, 3))
    runtime = RunRuntime(run)
    try:
        play_round(runtime, run, 0, checkpoint)
    finally:
        runtime.close()
    ratios = list[float]()
    for group in (group for table in iter_shards(run, 0) for group in groups_of(table)):
        for rollout in group.rollouts:
            assert rollout.sampling.repetition_penalty == 1.5
            ids, logits = rollout.token_ids, full_logits(model, rollout.token_ids)
            for place in np.flatnonzero(rollout.loss_mask).tolist():
                own = logits[place - 1].astype(np.float64)
                changed, seen = own.copy(), np.unique(ids[:place])
                changed[seen] = np.where(own[seen] > 0, own[seen] / 1.5, own[seen] * 1.5)
                policy, sampler = (
                    x[ids[place]] / 0.8 - np.log(np.exp(x / 0.8).sum()) for x in (own, changed)
                )
                assert rollout.logprobs[place] == pytest.approx(sampler, abs=1e-4)
                ratios.append(float(np.exp(policy - sampler)))
    (row,) = read_metrics(run).to_pylist()
    expected = {
        "sampling/importance_ratio/min": min(ratios),
        "sampling/importance_ratio/max": max(ratios),
        "sampling/importance_ratio/mean": np.mean(ratios),
        "sampling/correction_weight/mean": np.mean(np.minimum(ratios, 1.1)),
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert max(ratios) > 1.2 > 0.9 > min(ratios)

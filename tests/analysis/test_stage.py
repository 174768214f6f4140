"""Stage of a run from slots alone, and warnings by rule."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.run_factories import (
    FINGERPRINT,
    add_checkpoint,
    commit_round,
    configuration,
    group,
    policy,
    shown_run,
)

from marin_rl.analysis.status import Stage, run_status, stage_of
from marin_rl.analysis.warnings import NewWarnings, warnings_of
from marin_rl.batching.build import build_round
from marin_rl.progress import ProgressEvent
from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import commit_shard


def stage_now(run: Run) -> Stage:
    return stage_of(run, progress(run))


def test_the_stage_is_the_first_thing_that_is_not_committed(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path), shards=2, rounds=1))
    stage = lambda: stage_now(run).text
    assert stage() == "loading the policy"
    add_checkpoint(run, 0)
    assert stage() == "generating round 0 (0 of 2)"
    commit_shard(run, 0, 0, [group("0a", [0.0, 1.0])], FINGERPRINT, policy(0))
    assert stage() == "generating round 0 (1 of 2)"
    sealed = commit_round(run, 0, [[group("0a", [0.0, 1.0])], [group("0b", [0.0, 1.0])]])
    assert stage() == "processing round 0"
    build_round(run, 0, sealed)
    assert stage() == "training on round 0"
    add_checkpoint(run, 1)
    assert (stage_now(run).text, stage_now(run).ended) == ("complete", True)


def test_a_warm_start_counts_its_steps(tmp_path: Path) -> None:
    run = Run.create_or_open(
        configuration(str(tmp_path), policy={"init": "sft"}, sft={"steps": 450})
    )
    assert stage_now(run).text == "warm start, steps (0 of 450)"
    slot = "sft/step-00225"
    commit_manifest(
        run.store,
        new_manifest(slot, attempt=new_attempt(), fingerprint=FINGERPRINT, parts=()),
    )
    assert stage_now(run).text == "warm start, steps (225 of 450)"


def test_a_dead_process_is_reported(tmp_path: Path) -> None:
    run = shown_run(tmp_path)
    lock = run.store.local_path(".lock")
    assert lock is not None
    for holder, gone in (
        (f"{os.getpid()}\n", False),
        ("999999999 another\n", False),  # a process of another machine cannot be looked at
        ("999999999\n", True),
    ):
        lock.write_text(holder)
        warnings = run_status(str(tmp_path), "shown").warnings
        expected = "process 999999999, which held the run, is gone"
        assert any(warning.startswith(expected) for warning in warnings) == gone


def rows(**columns: list[float]) -> list[dict[str, Any]]:
    count = max(len(values) for values in columns.values())
    return [
        {"round": index, **{name: values[index] for name, values in columns.items()}}
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"mismatch_kl": [1e-5, 0.02]}, "round 1: sampler and trainer disagree: mismatch KL 0.02"),
        ({"rollouts/errors": [0.0, 0.5]}, "round 1: 50% of the rollouts failed"),
        ({"frac_reward_zero_std": [0.9, 0.95]}, "round 1: 95% of the groups carry no signal"),
        ({"updates/skipped": [0.0, 2.0]}, "round 1: 2 updates were not finite"),
        ({"entropy": [2.0, 0.1]}, "entropy fell to 5.0% of what it was"),
        ({"entropy": [2.0, 0.0]}, "entropy is gone (0): samples of a group are alike, nothing can"),
        ({"frac_reward_zero_std": [0.0, 1.0]}, "round 1: nothing can be learned: within every"),
        ({"completions/clipped_ratio": [0.0, 1.0]}, "round 1: every completion is cut off at"),
    ],
)
def test_warnings(columns: dict[str, list[float]], words: str) -> None:
    (found,) = warnings_of(rows(reward=[0.5, 0.5], **columns))
    assert found.startswith(words)


def test_a_kind_of_warning_is_announced_once_when_it_is_first_seen() -> None:
    told: list[str] = []
    new = NewWarnings("run", told.append)
    shares = [1.0, 1.0, 0.0, 0.95, 0.9, 1.0]
    for round, share in enumerate(shares):
        metrics = {"reward": 0.5, "frac_reward_zero_std": share}
        new.listen(ProgressEvent(run_id="other", stage="round", round=round, metrics=metrics))
        new.listen(ProgressEvent(run_id="run", stage="train", round=round, metrics=metrics))
        assert len(told) == [0, 1, 1, 1, 2, 2][round]
        new.listen(ProgressEvent(run_id="run", stage="round", round=round, metrics=metrics))
    assert "`marin-rl rollouts run` shows" in told[0]
    assert [text[:35] for text in told] == [
        "round 0: nothing can be learned: wi",
        "round 3: 95% of the groups carry no",
    ]


@pytest.mark.parametrize("more", [True, False])
def test_few_held_out_examples_are_announced_once_where_there_are_more(*, more: bool) -> None:
    told: list[str] = []
    new = NewWarnings("run", told.append, more_examples=more)
    for round in range(3):
        metrics = {"reward": 0.5, "eval/accuracy": 1 / 11, "eval/examples": 11.0}
        new.listen(ProgressEvent(run_id="run", stage="round", round=round, metrics=metrics))
    expected = "held-out accuracy 9.1 % (95 % CI 2–38 %, n = 11)"  # noqa: RUF001
    assert [text.startswith(expected) for text in told] == ([True] if more else [])


def test_reward_up_and_held_out_flat_is_suspicious_and_both_up_is_not() -> None:
    reward = [index / 20 for index in range(20)]
    flat = rows(reward=reward, **{"eval/accuracy": [0.5] * 20})
    assert "is the reward being hacked?" in warnings_of(flat)[0]
    assert warnings_of(rows(reward=reward, **{"eval/accuracy": reward})) == []
    # Nearly all held-out answers are right: their share wavers, and has no room to rise.
    full = [0.97] * 10 + [0.96] * 10
    assert warnings_of(rows(reward=reward, **{"eval/accuracy": full})) == []
    fallen = rows(reward=reward, **{"eval/accuracy": [0.97] * 10 + [0.9] * 10})
    assert "is the reward being hacked?" in warnings_of(fallen)[0]
    assert warnings_of([]) == []

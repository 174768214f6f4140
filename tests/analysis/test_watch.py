"""A look at a run: its stage from slots alone, warnings by rule, and what the terminal shows."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.run_factories import (
    FINGERPRINT,
    PLANNED,
    add_checkpoint,
    commit_round,
    configuration,
    group,
    policy,
    shown_run,
)

from marin_rl import dashboard
from marin_rl.analysis.warnings import NewWarnings, warnings_of
from marin_rl.analysis.watch import Look, Watched
from marin_rl.batching.build import build_round
from marin_rl.commands import inspect
from marin_rl.errors import CorruptObject, StoreUnavailable
from marin_rl.progress import ProgressEvent
from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import commit_shard


def look_at(root: str, run_id: str) -> Look:
    return Watched(root).one(run_id)


def text_of(seen: Any, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(dashboard.drawn(seen))
    return console.export_text()


def test_the_stage_is_the_first_thing_that_is_not_committed(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path), shards=2, rounds=1))
    stage = lambda: look_at(str(tmp_path), "run").stage.text
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
    look = look_at(str(tmp_path), "run")
    assert (look.stage.text, look.stage.ended, look.trained) == ("complete", True, 1)
    assert look.idle_s is not None
    assert look.idle_s < 60


def test_a_warm_start_counts_its_steps(tmp_path: Path) -> None:
    run = Run.create_or_open(
        configuration(str(tmp_path), policy={"init": "sft"}, sft={"steps": 450})
    )
    assert look_at(str(tmp_path), "run").stage.text == "warm start, steps (0 of 450)"
    slot = "sft/step-00225"
    commit_manifest(
        run.store,
        new_manifest(slot, attempt=new_attempt(), fingerprint=FINGERPRINT, parts=()),
    )
    assert look_at(str(tmp_path), "run").stage.text == "warm start, steps (225 of 450)"


def test_a_dead_process_is_reported(tmp_path: Path) -> None:
    run = shown_run(tmp_path)
    lock = run.store.local_path(".lock")
    assert lock is not None
    lock.write_text(f"{os.getpid()}\n")
    assert look_at(str(tmp_path), "shown").holder == os.getpid()
    lock.write_text("999999999 another\n")
    look = look_at(str(tmp_path), "shown")
    assert (look.holder, look.holder_host) == (999999999, "another")
    assert not any("is gone" in warning for warning in look.warnings)
    assert "process 999999999 on another" in text_of(look)
    lock.write_text("999999999\n")
    look = look_at(str(tmp_path), "shown")
    assert look.holder is None
    assert look.warnings[-1].startswith("process 999999999, which held the run, is gone")


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
        (
            {"eval/accuracy": [0.0, 1 / 11], "eval/examples": [11.0, 11.0]},
            "held-out accuracy 9.1% is of 11 examples and may be anything from 2% to 38%",
        ),
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


def test_reward_up_and_held_out_flat_is_suspicious_and_both_up_is_not() -> None:
    reward = [index / 20 for index in range(20)]
    flat = rows(reward=reward, **{"eval/accuracy": [0.5] * 20})
    assert "is the reward being hacked?" in warnings_of(flat)[0]
    assert warnings_of(rows(reward=reward, **{"eval/accuracy": reward})) == []
    assert warnings_of([]) == []


def test_one_run_in_the_terminal(tmp_path: Path) -> None:
    shown_run(tmp_path)
    text = text_of(look_at(str(tmp_path), "shown"))
    for words in ("shown", "round 3/5", "reward", "0.500", "entropy", "Latest"):
        assert words in text
    assert "! held-out accuracy 50.0% is of 4 examples" in text
    assert "no warnings" not in text
    assert "no warnings" in text_of(replace(look_at(str(tmp_path), "shown"), warnings=()))
    assert "</script><script>window.hurt" in text
    assert "\u2028" not in text


def test_all_runs_in_the_terminal(tmp_path: Path) -> None:
    shown_run(tmp_path)
    Run.create_or_open(configuration(str(tmp_path)))
    looks = Watched(str(tmp_path)).all()
    assert [look.run_id for look in looks] == ["run", "shown"]
    text = text_of(looks, width=160)
    assert "loading the policy" in text
    assert "shown" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_newest_round_is_visible_in_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    """A curve gives way from its old end; its last number stays whole, on the same line."""
    shown_run(tmp_path)
    look = replace(look_at(str(tmp_path), "shown"), rows=rows(reward=[*[0.0] * 40, 1.0]))
    text = text_of([look], width)
    assert max(len(line) for line in text.splitlines()) <= width
    (line,) = (line for line in text.splitlines() if "1.000" in line)
    assert "▁█ 1.000" in line
    assert "…" not in line


def test_lines_of_json_go_on_when_the_store_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shown_run(tmp_path, rounds=1)
    coming: list[Exception | None] = []

    def one(self: Watched, run_id: str) -> Look:
        failure = coming.pop(0)
        if failure is not None:
            raise failure
        if not coming:
            add_checkpoint(run, 1 + PLANNED)
        return seen_by(self, run_id)

    seen_by = Watched.one
    monkeypatch.setattr(Watched, "one", one)
    monkeypatch.setattr(inspect.time, "sleep", lambda seconds: None)
    for failures in ([StoreUnavailable("at first")], [None, CorruptObject("is not a run")]):
        coming = [*failures]
        with pytest.raises(type(failures[-1])):
            inspect.status("shown", watch=True, as_json=True, root=str(tmp_path))
    capsys.readouterr()
    coming = [None, StoreUnavailable("503: slow down"), None]
    inspect.status("shown", watch=True, as_json=True, root=str(tmp_path))
    told = capsys.readouterr()
    assert [json.loads(line)["trained"] for line in told.out.splitlines()] == [1, 3]
    assert told.err == "not updated: 503: slow down\n"


def test_watching_ends_when_the_run_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shown_run(tmp_path, rounds=1)
    seen: list[Look] = []

    def look() -> Look:
        if len(seen) == 2:
            add_checkpoint(run, 1 + PLANNED)
        seen.append(look_at(str(tmp_path), "shown"))
        return seen[-1]

    monkeypatch.setattr(dashboard.time, "sleep", lambda seconds: None)
    console = Console(force_terminal=True, file=io.StringIO())
    dashboard.watch(look, console, 1.0, once=False)
    assert [item.stage.ended for item in seen] == [False, False, True]

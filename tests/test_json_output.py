"""`--json` of every command that has it: JSON and nothing else, and the documented exit code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.run_factories import HOSTILE, ROUNDS, shown_run, whole_run
from typer.testing import CliRunner

from marin_rl.cli import app
from marin_rl.storage.run_progress import ROUNDS_PLANNED
from marin_rl.storage.runs import Run

RUN = "shown"
AUDIT_KEYS = [  # as docs/command-line.md names them
    "balanced", "balances", "consumed", "failed", "filtered", "generated", "offences", "reused",
    "round", "stale",
]  # fmt: skip
NAN_AND_SMILEY = "select 'nan'::double a, ':x:' b"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    shown_run(folder, run_id=RUN)
    return folder


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def told(*arguments: str, code: int = 0) -> list[Any]:
    """Output of a command, a value per line of standard output."""
    shown = CliRunner().invoke(app, [*arguments[0].split(), *arguments[1:], "--json"])
    assert shown.exit_code == code, (shown.output, shown.exception)
    return [json.loads(line, parse_constant=_no_constant) for line in shown.stdout.splitlines()]


CASES: dict[str, tuple[tuple[str, ...], Callable[[list[Any]], bool]]] = {
    "status": ((RUN,), lambda found: found[0]["trained"] == ROUNDS and len(found) == 1),
    "status of all": ((), lambda found: [item["run_id"] for item in found] == [RUN]),
    "rollouts": (
        (RUN, "--limit", "5"),
        lambda found: found[0]["completion"] in HOSTILE and found[0]["rollout_id"],
    ),
    "sql": ((RUN, NAN_AND_SMILEY), lambda found: found == [{"a": None, "b": ":x:"}]),
    "audit": (
        (RUN,),
        lambda found: [sorted(item) for item in found] == [AUDIT_KEYS] * ROUNDS
        and all(item["balanced"] and item["offences"] == {} for item in found),
    ),
    "gc": ((RUN, "--dry-run"), lambda found: found[0]["bytes"] == 0),
    "lineage": ((RUN, "--round", "1"), lambda found: bool(found[0]["nodes"])),
    "diff": ((RUN, RUN), lambda found: found[0]["parts_at"] is None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_json_and_nothing_else(root: Path, case: str) -> None:
    arguments, holds = CASES[case]
    assert holds(told(case.removesuffix(" of all"), *arguments, "--root", str(root)))


def test_files_that_are_written_are_named(root: Path, tmp_path: Path) -> None:
    page, curve = tmp_path / "page.html", tmp_path / "curve.png"
    place = ("--root", str(root))
    (found,) = told("report", RUN, "-o", str(page), *place)
    assert (found["path"], found["bytes"]) == (str(page), page.stat().st_size)
    assert told("report", RUN, "--curve", str(curve), *place) == [{"path": str(curve)}]
    assert curve.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return whole_run(str(tmp_path_factory.mktemp("whole")), 2)


def test_an_archive_is_whole_or_exit_code_1_says_that_it_is_not(whole: Run, tmp_path: Path) -> None:
    archive, place = tmp_path / "run.tar", ("--root", whole.config.root)
    (made,) = told("export", whole.run_id, "--all", "-o", str(archive), *place)
    (checked,) = told("verify", str(archive))
    assert (checked["whole"], checked["root_hash"]) == (True, made["root_hash"])
    (wrong,) = told("verify", str(archive), "--root-hash", "0" * 64, code=1)
    assert not wrong["whole"]


@pytest.mark.usefixtures("compiled_quickly")
def test_damage_and_differing_runs_end_with_exit_code_1(whole: Run, tmp_path: Path) -> None:
    place = ("--root", str(tmp_path))
    damaged = tmp_path / whole.run_id
    shutil.copytree(Path(whole.config.root) / whole.run_id, damaged)
    assert told("fsck", whole.run_id, *place)[0]["whole"]
    missing = told("metrics verify", whole.run_id, *place, code=1)  # no trainer made this run
    assert {item["problem"] for item in missing} >= {"", "is missing from the row"}
    (forked,) = told("fork", whole.run_id, "--round", "1", "--run-id", "other", *place)
    assert forked["run_id"] == "other"
    (same,) = told("diff", whole.run_id, "other", *place)
    assert same["parts_at"] is None
    file = damaged / "rollouts" / "round-00001" / "shard-0000.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    (found,) = told("fsck", whole.run_id, *place, code=1)
    (fault,) = found["faults"]
    assert (fault["kind"], fault["place"]) == ("truncated", str(file))


def test_configurations_and_plans(whole: Run) -> None:
    place = ("--root", whole.config.root)
    (shown,) = told("config show", whole.run_id, *place)
    assert (shown["run_id"], shown["rounds"]) == (whole.run_id, whole.config.rounds)
    assert told("config validate", whole.run_id, *place) == [
        {"run_id": whole.run_id, "root": whole.config.root, "rounds": whole.config.rounds}
    ]
    (plan,) = told("run", whole.run_id, "--dry-run", *place)
    assert (plan["run_id"], plan["trained"]) == (whole.run_id, 2)
    keys = {item["key"]: item for item in told("config reference")}
    assert (keys["training.beta1"]["type"], keys["rounds"]["free"]) == ("float", True)
    assert {item["name"] for item in told("config metrics")} > {"reward", "entropy"}
    assert "grpo" in [item["name"] for item in told("recipes")]


def test_other_rewards_and_other_settings(whole: Run, tmp_path: Path) -> None:
    shutil.copytree(Path(whole.config.root) / whole.run_id, tmp_path / whole.run_id)
    round_1 = (whole.run_id, "--round", "1", "--root", str(tmp_path))
    reward = ("--reward", "marin_rl.environments.answers:exact_match", "--name", "exact")
    (scored,) = told("rescore", *round_1, *reward)
    assert scored["table"]["key"] == "rewards/round-00001/exact-v0001.parquet"
    (found,) = told("reprocess", *round_1, "--rewards", "exact", "--no-gradient")
    assert found["round"] == 1


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    shown_run(tmp_path, run_id="good")
    shown_run(tmp_path, run_id="torn")
    (tmp_path / "torn" / "run.json").write_text('{"format": "marin-rl/ru')
    good, torn = told("status", "--root", str(tmp_path), code=1)
    assert good["run_id"] == "good"
    assert torn["run_id"] == "torn"
    assert torn["error"].startswith("CorruptObject")


def test_a_run_that_was_given_more_rounds_is_not_complete(tmp_path: Path) -> None:
    """run.json has what was planned at first; later checkpoints know better."""
    from support.run_factories import FINGERPRINT, add_round

    from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest
    from marin_rl.storage.runs import checkpoint_slot

    run = shown_run(tmp_path, rounds=2)  # planned: 4
    add_round(run, 2)
    (before,) = told("status", run.run_id, "--root", str(tmp_path))
    assert (before["trained"], before["planned"]) == (3, 4)
    slot = checkpoint_slot(4)
    manifest = new_manifest(
        slot, attempt=new_attempt(), fingerprint=FINGERPRINT, parts=(), extra={ROUNDS_PLANNED: 9}
    )
    commit_manifest(run.store, manifest)
    (found,) = told("status", run.run_id, "--root", str(tmp_path))
    assert (found["trained"], found["planned"]) == (4, 9)

"""Commands as people type them: what they print, what they refuse, and their exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import commit_round, configuration, group
from typer.testing import CliRunner, Result

from marin_rl.cli import app
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.rounds import close_round
from marin_rl.storage.runs import Run

CONFIGS = Path(__file__).parent.parent / "configs"


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root with one run of two rounds, made by hand."""
    from marin_rl.batching.build import build_round

    folder = str(tmp_path_factory.mktemp("runs"))
    run = Run.create_or_open(configuration(folder, groups=2))
    for number in range(2):
        groups = [
            group(f"round-{number:05d}/group-{place:05d}", [0.0, 1.0, float(number)])
            for place in range(2)
        ]
        build_round(run, number, commit_round(run, number, [groups]))
        close_round(run, number, {"timing_s/round": 2.0, "timing_s/generate": 1.0})
    return folder


@pytest.fixture(scope="module")
def name(root: str) -> str:
    return Path(root).joinpath(next(path.name for path in Path(root).iterdir())).name


def test_status_shows_the_rounds_of_a_run(root: str, name: str) -> None:
    shown = invoke("status", name, "--root", root)
    assert shown.exit_code == 0
    assert "0.333" in shown.output  # the mean reward of round 0
    assert "0.667" in shown.output


def test_status_without_a_name_lists_all_runs(root: str, name: str) -> None:
    assert name in invoke("status", "--root", root).output


def test_a_missing_run_is_told_with_those_that_exist(root: str, name: str) -> None:
    shown = invoke("status", "absent", "--root", root)
    assert isinstance(shown.exception, ObjectMissing)
    assert name in str(shown.exception)


def test_sql_reads_every_table(root: str, name: str) -> None:
    query = "select round, avg(reward) from rollouts group by round order by round"
    assert "0.666667" in invoke("sql", name, query, "--root", root).output
    # made by hand as if checkpoint 0 had sampled both rounds, so those of round 1 are stale
    count = "select round_generated, disposition, count(*) as n from dispositions group by all"
    shown = invoke("sql", name, f"select * from ({count}) order by 1", "--root", root).output
    assert " ".join(shown.split()).count("consumed │ 6") == 1
    assert " ".join(shown.split()).count("stale │ 6") == 1


def test_rollouts_are_shown_best_or_worst_first(root: str, name: str) -> None:
    best = invoke("rollouts", name, "--round", "0", "--limit", "1", "--root", root).output
    worst = invoke(
        "rollouts", name, "--round", "0", "--limit", "1", "--worst", "--root", root
    ).output
    assert "1.000" in best
    assert "0.000" in worst


def test_a_round_without_rollouts_is_told(root: str, name: str) -> None:
    shown = invoke("rollouts", name, "--round", "77", "--root", root)
    assert isinstance(shown.exception, ObjectMissing)


def test_audit_balances_and_fails_once_a_file_is_altered(
    root: str, name: str, tmp_path: Path
) -> None:
    assert invoke("audit", name, "--root", root).exit_code == 0
    copy = tmp_path / name
    subprocess.run(["cp", "-r", str(Path(root, name)), str(copy)], check=True)
    part = next(copy.glob("batches/round-00001/dispositions-*.parquet"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(bytes(data))
    shown = invoke("audit", name, "--root", str(tmp_path))
    assert shown.exit_code == 1
    assert "NO" in shown.output


def test_a_plot_is_a_png(root: str, name: str, tmp_path: Path) -> None:
    target = tmp_path / "curve.png"
    assert invoke("plot", name, "--root", root, "-o", str(target)).exit_code == 0
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_validates_and_plans(path: Path) -> None:
    assert invoke("config", "validate", str(path)).exit_code == 0
    plan = invoke("run", str(path), "--dry-run")
    assert plan.exit_code == 0
    for word in ("rounds", "shards", "tokens sampled", "training memory", "disk, rollouts"):
        assert word in plan.output


def test_config_show_resolves_defaults_and_overrides() -> None:
    shown = invoke("config", "show", str(CONFIGS / "debug.yaml"), "--set", "training.beta1=0.5")
    assert "beta1: 0.5" in shown.output
    assert "beta2: 0.95" in shown.output


def test_a_wrong_key_is_refused_before_anything_starts() -> None:
    shown = invoke("run", str(CONFIGS / "debug.yaml"), "--set", "training.lerning_rate=1")
    assert isinstance(shown.exception, ConfigError)
    assert "did you mean training.learning_rate?" in str(shown.exception)


def test_serve_wants_to_know_what() -> None:
    assert isinstance(invoke("serve").exception, ConfigError)


def test_errors_become_one_message_and_an_exit_code(tmp_path: Path) -> None:
    """In a process of its own, as a shell sees it."""
    command = [sys.executable, "-m", "marin_rl", "run", str(tmp_path / "absent.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no configuration file" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_says_what_to_fix(tmp_path: Path) -> None:
    shown = invoke(
        "doctor",
        str(CONFIGS / "debug.yaml"),
        "--set",
        f"root={json.dumps(str(tmp_path / 'file' / 'runs'))}",
        "--set",
        "policy.tokenizer=/nowhere/at/all",
        "--set",
        "inference.endpoints=['http://127.0.0.1:9/v1']",
    )
    assert shown.exit_code == 1
    assert "no tokenizer folder at /nowhere/at/all" in shown.output
    assert "EndpointUnavailable" in shown.output
    assert "ok   environment" in shown.output


def test_another_content_is_refused_before_anything_starts(root: str, name: str) -> None:
    shown = invoke("run", str(CONFIGS / "debug.yaml"), "--run-id", name, "--root", root)
    assert isinstance(shown.exception, ConfigError)
    assert "exists with another content" in str(shown.exception)
    assert "environment.name" not in str(shown.exception)  # both are echo
    assert "policy.context_length: 128 -> 64" in str(shown.exception)

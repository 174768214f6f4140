"""Commands as people type them: what they print, what they refuse, and their exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import prefect.main  # noqa: F401 - its first import closes the streams of loggers: not a CliRunner's
import pytest
from support.run_factories import commit_round, configuration, group, group_of, rollout, whole_run
from typer.testing import CliRunner, Result

from marin_rl.cli import app
from marin_rl.errors import ConfigError, InputError, ObjectMissing
from marin_rl.rounds import close_round
from marin_rl.storage.runs import Run
from marin_rl.storage.upkeep.forks import fork_run

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


def test_a_missing_run_is_reported_with_the_existing_ones(root: str, name: str) -> None:
    shown = invoke("status", "absent", "--root", root)
    assert isinstance(shown.exception, ObjectMissing)
    assert name in str(shown.exception)


def test_a_run_may_be_named_with_the_slash_that_shells_complete(root: str, name: str) -> None:
    for command in ("status", "fsck", "audit"):
        plain = invoke(command, name, "--root", root)
        slashed = invoke(command, f"{name}/", "--root", root)
        assert slashed.exit_code == plain.exit_code, slashed.exception
        assert slashed.output.split() == plain.output.split() or command == "fsck"  # tells seconds
    assert f"{name}/" not in invoke("status", f"{name}/", "--root", root).output


@pytest.mark.parametrize("wrong", ["../run", "a/b", "..", ".", "/"])
@pytest.mark.parametrize("command", ["status", "audit", "fsck", "rollouts", "watch"])
def test_a_folder_that_can_be_no_run_is_refused(root: str, command: str, wrong: str) -> None:
    """Not by an assertion of storage: a path to a run is what people type first."""
    refused = invoke(command, wrong, "--root", root)
    assert isinstance(refused.exception, ConfigError), refused.exception
    assert "--root says where runs are" in str(refused.exception)


@pytest.mark.parametrize(
    "command",
    ["rollouts run", "lineage run", "metrics verify run", "export run --hf hf", "evaluate run",
     "eval run", "serve --run run"],
)  # fmt: skip
def test_a_round_below_zero_is_refused(command: str) -> None:
    refused = invoke(*command.split(), "--round", "-1")
    assert refused.exit_code == 2, refused.exception
    assert "Invalid value for '--round'" in refused.output


def test_a_run_goes_on_from_inside_its_folder(
    root: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` is the folder of a run as well as a path to it is."""
    for place, file in ((Path(root, name), "."), (Path(root, name, "rollouts"), "..")):
        monkeypatch.chdir(place)
        shown = invoke("run", file, "--dry-run")
        assert shown.exit_code == 0, shown.exception
        assert f"Plan of {name}" in shown.output
    monkeypatch.chdir(root)
    assert f"Plan of {name}" in invoke("run", f"{name}/", "--dry-run").output


def test_numbers_of_sql_are_numbers(root: str, name: str) -> None:
    """DuckDB's sums of integers are of 128 bits and its products decimals; JSON has them too."""
    query = """select sum(n_prompt_tokens) tokens, 1.5 * count(*) half, 3::hugeint many,
               [0.25] as listed, max(finished_at) - min(finished_at) + interval 90 seconds as apart
               from rollouts"""
    told = invoke("sql", name, query, "--json", "--root", root)
    assert told.exit_code == 0, told.exception
    row = json.loads(told.output)
    assert row == {"tokens": 36, "half": 18.0, "many": 3, "listed": [0.25], "apart": 90.0}
    assert [type(value) for value in row.values()] == [int, float, int, list, float]
    assert "0:01:30" in invoke("sql", name, query, "--root", root).output


@pytest.mark.parametrize(
    "query", ["select [interval 1 day] days", "select 1::union(n int, s text) u", "select nothing"]
)
def test_queries_without_an_answer_that_a_table_holds_are_refused(
    root: str, name: str, query: str
) -> None:
    for how in ((), ("--json",)):
        refused = invoke("sql", name, query, *how, "--root", root)
        assert isinstance(refused.exception, InputError), refused.exception


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


def test_a_round_without_rollouts_is_an_error(root: str, name: str) -> None:
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


def test_a_shared_checkpoint_of_a_fork_is_evaluated_where_it_is(tmp_path: Path) -> None:
    """Refused before anything is served: its evaluation could not be committed."""
    parent = whole_run(str(tmp_path), 2)
    fork_run(parent, 2, "fork")
    refused = invoke("evaluate", "fork", "--round", "1", "--root", str(tmp_path))
    assert isinstance(refused.exception, ConfigError), refused.exception
    assert "marin-rl evaluate run --round 1" in str(refused.exception)


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


def test_pairs_of_a_run_are_written_as_a_file(root: str, name: str, tmp_path: Path) -> None:
    from marin_rl.storage.tables.pairs import read_pairs

    run = Run.create_or_open(configuration(str(tmp_path), groups=1))
    members = [rollout(f"g/{i}", index=i, reward=float(i), completion=[20 + i]) for i in range(3)]
    commit_round(run, 0, [[group_of("g", members)]])
    file = tmp_path / "pairs.jsonl"
    shown = invoke("pairs", "run", "--out", str(file), "--root", str(tmp_path))
    assert "wrote 1 pairs to" in shown.output
    (pair,) = read_pairs(file).pairs
    assert (pair.chosen_id, pair.rejected_id, pair.chosen_reward) == ("g/2", "g/0", 2.0)
    for given, told in (
        (("--out", str(file), "--margin", "2.5"), "differ by the reward, and by at least 2.5"),
        (("--out", "pairs.csv"), r"expected a name ending in .jsonl or .parquet"),
        (("--out", str(file), "--rounds", "3-1"), "--rounds: expected a round or a span"),
    ):
        refused = invoke("pairs", "run", *given, "--root", str(tmp_path))
        assert told in str(refused.exception)
    same = invoke("pairs", name, "--out", str(file), "--root", root)
    assert "in no group of 2 sealed rounds" in str(same.exception)

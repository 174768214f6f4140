"""Commands as people type them: what they print, what they refuse, and their exit codes."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import prefect.main  # noqa: F401 - its first import closes the streams of loggers: not a CliRunner's
import pytest
import yaml
from support.run_factories import commit_round, configuration, group, group_of, rollout, whole_run
from typer.testing import CliRunner, Result

import marin_rl.commands.options  # noqa: F401 - consoles made while COLUMNS is set keep that width
from flows.server import free_port
from marin_rl.cli import COMMANDS, GROUPS, app, command_named
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


def test_a_run_may_be_named_with_the_slash_that_shells_complete(root: str, name: str) -> None:
    plain, slashed = (invoke("status", given, "--root", root) for given in (name, f"{name}/"))
    assert slashed.output == plain.output


@pytest.mark.parametrize("wrong", ["../run", "a/b", "..", ".", "/"])
def test_a_folder_that_can_be_no_run_is_refused(root: str, wrong: str) -> None:
    """Not by an assertion of storage: a path to a run is what people type first."""
    refused = invoke("status", wrong, "--root", root)
    assert isinstance(refused.exception, ConfigError), refused.exception
    assert "--root says where runs are" in str(refused.exception)


@pytest.mark.parametrize(
    "command",
    ["rollouts run", "lineage run", "metrics verify run", "export run --hf hf", "evaluate run",
     "evaluate run --k 1", "serve run"],
)  # fmt: skip
def test_a_round_below_zero_is_refused(command: str) -> None:
    refused = invoke(*command.split(), "--round", "-1")
    assert refused.exit_code == 2, refused.exception
    assert "Invalid value for '--round'" in refused.output


def test_a_run_goes_on_from_inside_its_folder(root, name, monkeypatch):
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
def test_queries_without_an_answer_that_a_table_holds_are_refused(root, name, query):
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


def test_audit_balances_and_fails_once_a_file_is_altered(root, name, tmp_path):
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


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_validates_and_plans(path: Path, tmp_path: Path) -> None:
    assert invoke("config", "validate", str(path)).exit_code == 0
    # a dry run looks for a run of this name, and tries a bucket of a cloud that is away for 16 s
    plan = invoke("run", str(path), "--dry-run", "--set", f"root={tmp_path}")
    assert plan.exit_code == 0
    for word in ("rounds", "shards", "tokens sampled", "training memory", "disk, rollouts"):
        assert word in plan.output


def test_a_dry_run_whose_bucket_does_not_answer_plans_and_says_so(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_port()}")
    plan = invoke("run", str(CONFIGS / "prod.yaml"), "--dry-run", "--set", "root=gs://none/runs")
    assert plan.exit_code == 0
    assert "disk, rollouts" in plan.output
    assert "exists is not known: gs://none/runs" in plan.output.replace("\n", " ")


def test_config_show_resolves_defaults_and_overrides() -> None:
    shown = invoke("config", "show", str(CONFIGS / "debug.yaml"), "--set", "training.beta1=0.5")
    assert "beta1: 0.5" in shown.output
    assert "beta2: 0.95" in shown.output
    assert "not used" not in shown.output
    folder = ("--set", "policy.init=hf", "--set", "policy.hf_path=/models/m")
    of_folder = invoke("config", "show", str(CONFIGS / "debug.yaml"), *folder).output
    assert "# policy.tokenizer is not used: the tokenizer is that of /models/m\n" in of_folder
    assert "# policy.model is not used" in of_folder
    assert yaml.safe_load(of_folder)["policy"]["hf_path"] == "/models/m"


@pytest.mark.parametrize(
    ("command", "present"),
    [
        ("watch run", "marin-rl view RUN"),
        ("plot run -o curve.png", "marin-rl report RUN --curve FILE.png"),
        ("eval run --k 1,8", "marin-rl evaluate"),
        ("fork run --from-round 3 --run-id new", "--from-round is no longer understood"),
        ("fork run --from-round 3 --run-id new", "it is `--round` now"),
        ("pairs run --out=pairs.jsonl", "it is `--output` now"),
        ("pairs run -o pairs.jsonl --rounds 0-9", "it is `--round` now"),
        ("env try game --url http://127.0.0.1:9/v1", "it is `--endpoint` now"),
        ("serve --run run", "it is `serve RUN` now"),
        ("evaluate run --option min=3", "it is `--set environment.options.KEY=VALUE` now"),
        ("replay-step run 3", "3 is no longer understood: it is `--round N` now"),
    ],
)  # fmt: skip
def test_spellings_of_earlier_versions_are_answered_with_the_present_ones(command, present):
    refused = invoke(*command.split())
    assert refused.exit_code == 2, refused.exception
    assert present in " ".join(refused.output.split())


def test_help_names_every_command_once_in_its_group_with_one_line() -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"])
    assert shown.exit_code == 0
    lines = [line.strip("│ ") for line in shown.output.splitlines()]
    width = max(len(name) for commands in GROUPS.values() for name in commands)
    for title, commands in GROUPS.items():
        assert any(line.startswith(f"╭─ {title} ─") for line in shown.output.splitlines())
        for name, (_, line) in commands.items():
            assert [item for item in lines if item.split()[:1] == [name]] == [
                f"{name:<{width}}  {line}"
            ], "one line of 80 columns"


def test_the_line_of_a_command_is_the_first_of_its_own_help() -> None:
    lines = {name: line for group in GROUPS.values() for name, (_, line) in group.items()}
    for name in COMMANDS:
        command = command_named(name)
        assert command.name == name or name in ("config", "env", "metrics")
        assert str(command.help).splitlines()[0] == lines[name]


@pytest.mark.parametrize(
    "command",
    [
        "status {name}",
        "status",
        "rollouts {name}",
        "audit {name}",
        "metrics verify {name}",
        "gc {name} --dry-run",
        "run {name} --dry-run",
        "diff {name} {name}",
        "sql {name} select:*:from:rollouts",
        "sql {name} select:*:from:metrics",
    ],
)
def test_tables_fit_80_columns_and_cut_no_heading(root: str, name: str, command: str) -> None:
    arguments = [part.replace(":", " ") for part in command.format(name=name).split()]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*arguments, "--root", root])
    assert shown.exit_code in (0, 1), shown.exception
    tables = [line for line in shown.stdout.splitlines() if not line.startswith(("!", "http"))]
    assert "…" not in "".join(tables)
    drawn = [line for line in tables if set(line) & set("─━│┃")]
    assert max((len(line) for line in drawn), default=0) <= 80


def test_version_names_what_bits_depend_on() -> None:
    shown = invoke("--version")
    assert shown.exit_code == 0
    python = ".".join(str(part) for part in sys.version_info[:3])
    expected = f"marin-rl {version('marin-rl')}, Python {python}, JAX {version('jax')}\n"
    assert shown.output == expected


def test_the_root_of_a_new_run_is_that_of_the_command_line_the_environment_or_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("run_id: mine\nroot: of-the-file\n", encoding="utf-8")

    def root_of(command: str, *arguments: str) -> str:
        (line,) = invoke(*command.split(), str(file), *arguments, "--json").output.splitlines()
        return json.loads(line)["root"]

    for command in ("config show", "config validate"):
        assert root_of(command) == "of-the-file"
        monkeypatch.setenv("MARIN_RL_ROOT", "of-the-environment")
        assert root_of(command) == "of-the-environment"
        assert root_of(command, "--set", "root=set") == "set"
        assert root_of(command, "--root", "flag", "--set", "root=set") == "flag"
        monkeypatch.delenv("MARIN_RL_ROOT")
    monkeypatch.setenv("MARIN_RL_ROOT", "of-the-environment")
    plan = invoke("run", str(file), "--dry-run").output
    assert "of-the-environment" in plan


def test_a_run_is_named_by_its_id_too(root, name, monkeypatch, tmp_path):
    assert f"Plan of {name}" in invoke("run", name, "--root", root, "--dry-run").output
    monkeypatch.setenv("MARIN_RL_ROOT", root)
    assert f"Plan of {name}" in invoke("run", name, "--dry-run").output
    shown = json.loads(invoke("config", "show", name, "--json").output)
    assert (shown["run_id"], shown["root"]) == (name, root)
    absent = invoke("run", "absent", "--dry-run").exception
    assert isinstance(absent, ConfigError)
    assert "expected a YAML file, or the id or folder of a run" in str(absent)
    assert name in str(absent)
    monkeypatch.setenv("MARIN_RL_ROOT", str(tmp_path / "elsewhere"))  # a folder says where it is
    assert f"Plan of {name}" in invoke("run", f"{root}/{name}", "--dry-run").output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("report {name} --curve a.png -o b.html", "leave out --output"),
        ("evaluate {name} --k 1 --set inference.model=x", "goes with the evaluation that a run"),
        ("evaluate", "evaluate needs a run id, a model folder, or --endpoint URL --model NAME"),
        ("evaluate http://127.0.0.1:9/v1", "--endpoint URL --model NAME"),
    ],
)
def test_options_that_do_not_go_together_are_refused(root, name, command, message):
    refused = invoke(*command.format(name=name).split(), "--root", root)
    assert isinstance(refused.exception, ConfigError), refused.exception
    assert message in str(refused.exception)


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


def test_pairs_of_a_run_are_written_as_a_file(root: str, name: str, tmp_path: Path) -> None:
    from marin_rl.storage.tables.pairs import read_pairs

    run = Run.create_or_open(configuration(str(tmp_path), groups=1))
    members = [rollout(f"g/{i}", index=i, reward=float(i), completion=[20 + i]) for i in range(3)]
    commit_round(run, 0, [[group_of("g", members)]])
    file = tmp_path / "pairs.jsonl"
    shown = invoke("pairs", "run", "--output", str(file), "--root", str(tmp_path))
    assert "wrote 1 pairs to" in shown.output
    other = str(tmp_path / "other.jsonl")
    shown = invoke("pairs", "run", "-o", other, "--json", "--root", str(tmp_path))
    assert json.loads(shown.output) == {"path": other, "pairs": 1}
    (pair,) = read_pairs(file).pairs
    assert (pair.chosen_id, pair.rejected_id, pair.chosen_reward) == ("g/2", "g/0", 2.0)
    for given, told in (
        (("--output", str(file), "--margin", "2.5"), "differ by the reward, and by at least 2.5"),
        (("--output", "pairs.csv"), r"expected a name ending in .jsonl or .parquet"),
    ):
        refused = invoke("pairs", "run", *given, "--root", str(tmp_path))
        assert told in str(refused.exception)
    refused = invoke("pairs", "run", "--output", str(file), "--round", "3-1")
    assert "Invalid value for '--round'" in refused.output
    same = invoke("pairs", name, "--output", str(file), "--root", root)
    assert "in no group of 2 sealed rounds" in str(same.exception)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), RuntimeError("Error calling function `_ser_model`: KeyboardInterrupt: ")],
    ids=["itself", "of a library"],
)
def test_an_interrupt_is_a_line_and_exit_code_130(error, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("marin_rl.analysis.status.each_run", interrupted)
    ended = invoke("status")
    assert (ended.exit_code, ended.output) == (130, "interrupted\n")


def test_the_plan_of_preferences_counts_pairs_and_writes_nothing(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"say {n}", "chosen": "yes", "rejected": "no", "split": split}
        for n, split in enumerate(["train"] * 8 + ["eval"] * 2)
    ]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = (
        f"preference.pairs={pairs}", "preference.steps=3", "preference.pairs_per_step=4",
        "preference.steps_per_checkpoint=2",
    )  # fmt: skip
    given = [part for each in settings for part in ("--set", each)]
    debug = str(Path(__file__).parents[1] / "configs/debug.yaml")
    arguments = ["preference", debug, "--root", str(tmp_path / "runs"), "--dry-run", *given]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    known = {"pairs": 8, "held_out": 2, "steps": 3, "passes": 1.5, "checkpoints": 2}
    assert {name: found[name] for name in known} == known
    assert found["loss"] == "sigmoid, beta 0.1, of sums"
    shown = CliRunner().invoke(app, [*arguments, "--set", "preference.loss.type=kto"]).output
    assert "16" in shown
    assert "answers with labels" in shown
    assert not (tmp_path / "runs").exists()
    pairs.write_text(json.dumps(rows[0] | {"chosen": "y" * 500}), encoding="utf-8")
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code != 0

"""A model's text is shown as text wherever a run is read: no sign of it is interpreted or lost."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.run_factories import (
    HOSTILE,
    add_checkpoint,
    commit_round,
    configuration,
    group_of,
    rollout,
)
from support.templates import byte_level_tokenizer
from typer.testing import CliRunner

from marin_rl.batching.build import build_round
from marin_rl.cli import app, main
from marin_rl.storage.runs import Run

LONG = "long line " * 100_000
TEXTS = (
    *HOSTILE,
    "before\0after",
    "\x1b[2J\x1b]0;title\x07\r\b\x9b31m",
    "\u202eleft\u202c \u05d0\u05d1\u05d2 \u0645\u0631\u062d\u0628\u0627 \u2067isolated",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \u200b\ufeff \ufdfd e\u0301",
    LONG,
)
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One trained round with a rollout for each text, whose tokens are single bytes."""
    folder = tmp_path_factory.mktemp("hostile")
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    settings = {"tokenizer": str(folder / "tokenizer")}
    run = Run.create_or_open(configuration(str(folder / "runs"), groups=1, policy=settings))
    whole = tokenizer("é😀", add_special_tokens=False)["input_ids"]
    torn = [*whole[:-1], *whole[1:2]]  # ends within a character, and goes on with another's middle
    rollouts = []
    for index, text in enumerate(TEXTS):
        made = rollout(f"g/{index}", index=index, reward=float(index), completion=torn)
        turns = (made.turns[0], replace(made.turns[1], content=text))
        rollouts.append(replace(made, turns=turns))
    add_checkpoint(run, 0)
    build_round(run, 0, commit_round(run, 0, [[group_of("g", rollouts)]]))
    add_checkpoint(run, 1)
    return run


COMMANDS = {
    "status": ("status", "run"),
    "status of all": ("status",),
    "rollouts": ("rollouts", "run"),
    "sql": ("sql", "run", "select turns[-1].content as said, turns from rollouts"),
    "lineage": ("lineage", "run", "--round", "0", "--rows"),
    "lineage on": ("lineage", "run", "--reverse", "--rollout", "g/3"),
    "audit": ("audit", "run"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_obeys_nothing(run: Run, name: str) -> None:
    runner = CliRunner(env={"COLUMNS": "100"})
    shown = runner.invoke(app, [*COMMANDS[name], "--root", run.config.root])
    assert shown.exit_code == 0, (shown.output[-2000:], shown.exception)
    assert OBEYED.findall(shown.output.replace("\n", "")) == []
    assert len(shown.output) < 100_000
    if name in ("rollouts", "sql", "lineage"):
        assert "characters more: --json" in " ".join(shown.output.replace("│", " ").split())


def test_nor_the_name_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J\u202eb"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    shown = CliRunner().invoke(app, ["status", "--root", str(tmp_path)])
    assert shown.exit_code == 1
    assert "a\ufffd[2J\ufffdb" in shown.output
    assert OBEYED.findall(shown.output.replace("\n", "")) == []


ODD = "odd[red]\x1b[2Jy"  # a name that Rich would take for markup, a terminal for a command
ODD_SHOWN = "odd[red]\ufffd[2Jy"


@pytest.fixture(scope="module")
def odd(run: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of such a name with the run, and with another one that has the name too."""
    root = tmp_path_factory.mktemp("roots") / ODD / "[" / "x]"  # ends what was never begun: `[/x]`
    for name in ("run", ODD):
        shutil.copytree(Path(run.config.root, "run"), root / name)
    return str(root)


@pytest.mark.parametrize(
    "command",
    [
        ("status", "run"),
        ("status", ODD),
        ("status",),
        ("fsck", "run"),
        ("rollouts", "run", "--round", "7"),
        ("lineage", "run", "--round", "0", "--row", "0", "--graph", "ROOT/graph.mmd"),
        ("report", "run", "--output", "ROOT/page.html"),
        ("export", "run", "--output", "ROOT/run.tar"),
        ("fork", "run", "--round", "0", "--run-id", "fork"),
        ("run", "ROOT/run", "--dry-run"),
        ("sql", "run", f"pivot (select 1 as n, '{ODD}' as said) on said using sum(n)"),
        ("sql", "run", f"select {ODD}"),
    ],
    ids=" ".join,
)
def test_names_of_folders_and_columns_are_shown_as_they_are(odd, command, monkeypatch, capsys):
    """As a shell runs them, so that it holds for errors too."""
    monkeypatch.setenv("MARIN_RL_ROOT", odd)
    monkeypatch.setattr("sys.argv", ["marin-rl", *(word.replace("ROOT", odd) for word in command)])
    with pytest.raises(SystemExit):
        main()
    shown = "".join(capsys.readouterr())
    text = "".join(shown.replace("│", "").split())
    assert ODD_SHOWN in text or repr(ODD)[1:-1] in text  # an error quotes it
    assert OBEYED.findall(shown.replace("\n", "")) == []


@pytest.mark.parametrize("name", ["rollouts", "sql", "lineage"])
def test_json_keeps_every_sign(run: Run, name: str) -> None:
    shown = CliRunner().invoke(app, [*COMMANDS[name], "--json", "--root", run.config.root])
    assert shown.exit_code == 0, shown.exception
    told = [json.loads(line) for line in shown.stdout.splitlines()]
    if name == "sql":
        assert {row["said"] for row in told} == set(TEXTS)
    if name == "rollouts":
        assert {row["completion"] for row in told} == set(TEXTS)

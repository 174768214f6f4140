"""Rules that hold for every command of the tree: JSON, the root, and how a run is named."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from marin_rl.cli import COMMANDS, app, command_named
from marin_rl.commands.options import ROOT_VARIABLE


def leaves() -> Iterator[tuple[str, Any]]:
    """Yield every command that can be typed, with its words."""
    for name in (
        name for name in COMMANDS if name != "launch"
    ):  # whose options are those of another command
        command: Any = command_named(name)
        below = getattr(command, "commands", None)
        for part, leaf in (below or {"": command}).items():
            yield f"{name} {part}".strip(), leaf


TREE = dict(leaves())
RUN_METAVARS = {"RUN", "CONFIG|RUN", "NAME|CONFIG|RUN", "TARGET"}
# Their argument is a template, a recipe or a file; they read no run.
WITHOUT_RUN = {
    "init", "recipes", "config reference", "config metrics", "env list", "verify", "import",
    "merge",
}  # fmt: skip
# They begin runs: --run-id is the name of the new one.
NAMED = {"env try", "env check", "serve-trajectories", "poll-trajectories"}  # by a configuration
BEGINNERS = {
    "run", "sft", "reward-model", "preference", "fork", "doctor", "config show", "config validate",
}  # fmt: skip


def options(name: str) -> dict[str, Any]:
    """The options of a command by spelling."""
    return {each: param for param in TREE[name].params for each in param.opts if each[0] == "-"}


def arguments(name: str) -> list[str]:
    """Names of the arguments of a command in its help."""
    kinds = [param for param in TREE[name].params if param.param_type_name == "argument"]
    return [param.metavar or param.name.upper() for param in kinds]


def test_every_command_prints_json():
    assert [name for name in TREE if "--json" not in options(name)] == []


def test_a_run_is_the_first_argument_and_its_root_an_option():
    for name in sorted(TREE):
        assert ("--root" in options(name)) == (name not in WITHOUT_RUN), name
        if name not in WITHOUT_RUN:
            assert arguments(name)[0] in RUN_METAVARS, name
            assert "--run" not in options(name), name
            assert ("--run-id" in options(name)) <= (name in BEGINNERS | NAMED), name


def test_one_idea_has_one_spelling():
    spellings = {
        "output": "--output", "out": "--output", "round_number": "--round",
        "overrides": "--set", "as_json": "--json", "root": "--root",
    }  # fmt: skip
    for name in TREE:
        for param in TREE[name].params:
            if param.name in spellings and param.param_type_name == "option":
                assert spellings[param.name] in param.opts, (name, param.opts)
        assert not {"--out", "--from-round", "--option", "--overrides"} & options(name).keys()


@pytest.mark.parametrize(
    "name",
    sorted(TREE.keys() - WITHOUT_RUN - BEGINNERS - {"env try", "env check", "view", "serve"}),
)
def test_the_root_of_the_environment_is_honoured(name, tmp_path, monkeypatch):
    """A run that is not there is looked for under MARIN_RL_ROOT; the message names the place."""
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    extra = {
        "sql": ["select 1"], "diff": ["other"], "pairs": ["--output", "pairs.jsonl"],
        "replay-step": ["--round", "0"], "replay-episode": ["--round", "0"],
        "reprocess": ["--round", "0"], "lineage": ["--round", "0"],
        "rescore": ["--round", "0", "--reward", "a:b", "--name", "c"],
        "poll-trajectories": ["--url", "http://127.0.0.1:1"],
    }  # fmt: skip
    shown = CliRunner().invoke(app, [*name.split(), "missing", *extra.get(name, [])])
    assert shown.exit_code not in (0, 2) or "missing" in str(shown.exception), shown.output
    assert "elsewhere" in f"{shown.output} {shown.exception}", (shown.output, shown.exception)

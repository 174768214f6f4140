"""Facts that are stated of environments without importing them, compared with their classes."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.library_facts import COLUMNS, read_facts

from marin_rl.environments import registry
from marin_rl.environments.base_environment import BaseEnvironment

TOP = Path(__file__).parents[2]
# Modules of environments of other libraries, and of what only they use.
FOREIGN = (
    "marin_rl.environments.external",
    "marin_rl.rollouts.verl",
    "marin_rl.rollouts.relay",
    "marin_rl.serving.trajectories",
    "websockets",
    "zmq",
    "verifiers",
    "gymnasium",
)
# Names in the page's table, and those of environments and in the file of facts.
NAMES = {
    "gymnasium": "gymnasium", "TextArena": "textarena", "verifiers": "verifiers",
    "verifiers v1": "verifiers_v1", "OpenEnv": "openenv", "NeMo Gym": "nemo_gym",
}  # fmt: skip
GROUP_REWARDS = frozenset({"chat", "judge", "verifiers"})
OTHERS = {"TRL": "trl", "atropos": "atropos", "verl": "verl"}


@pytest.mark.parametrize("name", sorted(set(registry._BUILT_IN) - {registry.USER_CLASS}))
def test_abilities_are_those_of_the_class(name: str) -> None:
    importlib.import_module(registry._BUILT_IN[name])
    made = registry._registered[name]
    several = hasattr(made, "episode") or hasattr(made, "rollouts")
    assert several == (name in registry.SEVERAL_TURNS)
    scores_groups = getattr(made, "score_group", None) is not BaseEnvironment.score_group
    if name in {*GROUP_REWARDS, *NAMES.values()}:  # others: as a reward of the user does
        assert scores_groups == (name in GROUP_REWARDS)
    if hasattr(made, "tools_offered"):
        assert name in registry.WITH_TOOLS


def rows() -> dict[str, list[str]]:
    """Cells of the page's table of libraries, by the library's name."""
    page = (TOP / "docs/other-libraries.md").read_text(encoding="utf-8")
    table = page[page.index("| library | tried") :].partition("\n\n")[0].splitlines()[2:]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    found = {}
    for cells in lines:
        match = re.match(r"\[([^\]]+)\]", cells[0])
        assert match is not None, cells
        found[match[1]] = cells[1:]
    return found


def test_the_table_of_libraries_says_what_the_tests_have_seen() -> None:
    facts, table = read_facts(), rows()
    names = {**NAMES, **OTHERS}
    assert table.keys() == names.keys()
    assert facts.keys() == set(names.values())
    for library, name in names.items():
        seen = [facts[name].get(column, "no") for column in COLUMNS]
        assert table[library] == seen, f"{library}: the page differs from docs/data/libraries.json"


def test_listed_abilities_were_seen_by_tests() -> None:
    facts = read_facts()
    for name in NAMES.values():
        assert (facts[name]["turns"] == "yes") == (name in registry.SEVERAL_TURNS), name
        assert ("group rewards" in facts[name]) <= (name in GROUP_REWARDS), name
        assert ("tools" in facts[name]) <= (name in registry.WITH_TOOLS), name


def test_a_run_without_them_imports_and_starts_nothing_of_them() -> None:
    script = f"""
import sys
from marin_rl.config import Config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.finished_pool import pools
from marin_rl.environments.episode_pool import pools as others
import marin_rl.rollouts.evaluate, marin_rl.rollouts.generate, marin_rl.storage.upkeep.audit
environment_of(Config(run_id="r"))
assert not pools and not others
print([name for name in sys.modules if name.startswith({FOREIGN!r})])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_whole_run_without_them_imports_and_starts_nothing_of_them(tmp_path: Path) -> None:
    foreign = tuple(name for name in FOREIGN if name != "websockets")  # Prefect's events use them
    script = f"""
import sys
commands = []
sys.addaudithook(lambda event, args: event == "subprocess.Popen" and commands.append(str(args[1])))
from marin_rl import run
from marin_rl.environments.finished_pool import pools
from marin_rl.environments.episode_pool import pools as others
with run("configs/debug.yaml", {{"root": {str(tmp_path)!r}, "rounds": 1}}) as training:
    (committed,) = training
assert not pools and not others
others = [c for c in commands if sys.executable in c.partition("supervise()")[2]]
print(committed.number, len(commands), others)
print([name for name in sys.modules if name.startswith({foreign!r})])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=TOP
    )
    count, modules = done.stdout.splitlines()[-2:]
    assert count.startswith("0 ")
    assert count.endswith(" []")
    assert int(count.split()[1]) > 0  # workers that score, and Prefect
    assert modules == "[]"

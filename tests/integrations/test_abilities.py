"""Facts that are listed of environments, and that a run without integrations imports none."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.library_facts import COLUMNS, read_facts

from marin_rl.environments import registry
from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.environments.registry import described_environments

TOP = Path(__file__).parents[2]
# Modules of environments of other libraries, and of what only they use.
FOREIGN = (
    "marin_rl.integrations.",
    "marin_rl.rollouts.relay",
    "websockets",
    "zmq",
    "verifiers",
    "gymnasium",
)
INTEGRATIONS = TOP / "marin_rl/integrations"
FILES = {
    path.stem
    for path in INTEGRATIONS.iterdir()
    if path.stem not in ("__init__", "__pycache__", "host", "verl_files")
    and not path.stem.endswith(("_host", "_session"))
}
# Names in the page's table, and those of environments and in the file of facts.
NAMES = {
    "gymnasium": "gymnasium", "TextArena": "textarena", "verifiers": "verifiers",
    "verifiers v1": "verifiers_v1", "OpenEnv": "openenv", "NeMo Gym": "nemo_gym",
}  # fmt: skip
GROUP_REWARDS = frozenset({"chat", "judge", "verifiers"})
OTHERS = {"TRL": "trl", "atropos": "atropos", "verl": "verl"}


@pytest.mark.parametrize("name", sorted({*GROUP_REWARDS, *NAMES.values()}))
def test_environments_that_score_groups_say_so(name: str) -> None:
    made = registry._factory(name)
    scores_groups = getattr(made, "score_group", None) is not BaseEnvironment.score_group
    assert scores_groups == (name in GROUP_REWARDS)


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
    facts, listed = read_facts(), {entry.name: entry for entry in described_environments()}
    for name in NAMES.values():
        assert (facts[name]["turns"] == "yes") == (listed[name].turns == "several"), name
        assert ("group rewards" in facts[name]) <= (name in GROUP_REWARDS), name
        assert ("tools" in facts[name]) <= (listed[name].tools == "yes"), name


def test_a_run_without_them_imports_and_starts_nothing_of_them() -> None:
    script = f"""
import sys
from marin_rl.config import Config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.episode_pool import pools
import marin_rl.rollouts.evaluate, marin_rl.rollouts.generate, marin_rl.storage.upkeep.audit
environment_of(Config(run_id="r"))
assert not pools
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
from marin_rl.environments.episode_pool import pools
with run("configs/debug.yaml", {{"root": {str(tmp_path)!r}, "rounds": 1}}) as training:
    (committed,) = training
assert not pools
others = [c for c in commands if "isolated/worker.py" in c]
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


def test_nothing_imports_an_integration_by_name() -> None:
    """So deleting one is `rm`: it is found by its file's name, or not at all."""
    named = re.compile(r"^\s*(?:from|import) marin_rl\.integrations\.(\w+)", re.MULTILINE)
    for room in ("flows", "tasks", "schemas", "marin_rl"):
        for path in (TOP / room).rglob("*.py"):
            own = {path.stem, path.parent.name, "hosted"} if INTEGRATIONS in path.parents else set()
            own.add(f"{path.stem}_session")  # the client of a server, in a file beside
            assert set(named.findall(path.read_text(encoding="utf-8"))) <= own, path


@pytest.mark.parametrize("name", sorted(FILES))
def test_each_integration_has_a_test_file(name: str) -> None:
    tests = [path.stem for path in Path(__file__).parent.glob("test_*.py")]
    assert any(stem.startswith(f"test_{name}") for stem in tests)


@pytest.mark.slow
def test_an_integration_that_was_deleted_is_not_listed_and_breaks_nothing(tmp_path: Path) -> None:
    shutil.copytree(TOP / "marin_rl", tmp_path / "marin_rl", ignore=shutil.ignore_patterns("__py*"))
    shutil.copytree(TOP / "schemas", tmp_path / "schemas")
    for path in (tmp_path / "marin_rl/integrations").iterdir():
        if path.stem not in ("__init__", "host", "hosted"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    script = """
from marin_rl.config import Config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import described_environments
from marin_rl.errors import ConfigError
from marin_rl.integrations import integration
print(sorted(entry.name for entry in described_environments()))
environment_of(Config.model_validate({"run_id": "r", "environment": {"name": "echo"}}))
for name in ("trackers", "verl", "atropos", "exchange"):
    try:
        integration(name)
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    listed, *refused = done.stdout.splitlines()
    assert listed == str(sorted(registry._OWN))
    assert len(refused) == 4
    assert refused[0].endswith("has no marin_rl/integrations/trackers.py")

"""Environments that score groups say so, and a run without integrations imports none."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.imports import FOREIGN

from marin_rl.environments import registry
from marin_rl.environments.base_environment import BaseEnvironment

TOP = Path(__file__).parents[2]
INTEGRATIONS = TOP / "marin_rl/integrations"
FILES = {
    path.stem
    for path in INTEGRATIONS.iterdir()
    if path.stem not in ("__init__", "__pycache__", "host", "verl_files")
    and not path.stem.endswith(("_host", "_session"))
    and not path.stem.startswith("agent_")  # parts of `agent`
}
# Of some environments, those that score groups first.
GROUP_REWARDS = ("chat", "judge", "verifiers")
NAMES = (*GROUP_REWARDS, "gymnasium", "textarena", "verifiers_v1", "openenv", "nemo_gym")


@pytest.mark.parametrize("name", NAMES)
def test_environments_that_score_groups_say_so(name: str) -> None:
    made = registry._factory(name)
    scores_groups = getattr(made, "score_group", None) is not BaseEnvironment.score_group
    assert scores_groups == (name in GROUP_REWARDS)


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
            if path.stem.startswith("agent"):
                own |= {"agent_gateway", "agent_relay", "agent_sessions"}
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

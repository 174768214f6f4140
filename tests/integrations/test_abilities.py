"""Environments that score groups say so, and a run without integrations imports none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.imports import FOREIGN

from marin_rl.environments import registry
from marin_rl.environments.base_environment import BaseEnvironment

TOP = Path(__file__).parents[2]
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

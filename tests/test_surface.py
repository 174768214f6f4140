"""`import marin_rl`: light, with the names of the Python surface, and with the installed packages.

A user's folder may hold files with the names of our top-level packages. Imports touch no device,
and the data side no accelerator's library.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.imports import FOREIGN

import marin_rl

TOP = Path(marin_rl.__file__).parents[1]
DATA_SIDE = (
    "marin_rl.storage.tables.rollouts",
    "marin_rl.storage.tables.batches",
    "marin_rl.storage.upkeep.audit",
    "marin_rl.rollouts.evaluate",
    "marin_rl.rollouts.generate",
    "marin_rl.batching.build",
    "marin_rl.environments.base",
    "marin_rl.inference.client.policy_client",
)
EVERYTHING = (
    "flows.rl_loop",
    "flows.sft",
    "flows.evaluate",
    "marin_rl.cli",
    "marin_rl.serving.server",
    "marin_rl.serving.weights.canary",
    "marin_rl.training.loop",
    "marin_rl.training.sft",
)
HEAVY = ("jax", "levanter", "haliax", "orbax", "torch")
# Imports of seconds, of which an error in a configuration or its files needs none.
ENGINES = (*HEAVY, "prefect", "polars", "duckdb", "openai")
OWN_FILES = ("tasks.py", "flows.py", "schemas.py", "errors.py", "types.py")


def python(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, which is then first on its sys.path."""
    (folder / "script.py").write_text(code)
    command = [sys.executable, str(folder / "script.py")]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a user, whose files end a process that imports them."""
    for name in OWN_FILES[:-1]:
        (tmp_path / name).write_text(f"raise SystemExit('{name} of the user was imported')\n")
    return tmp_path


def test_importing_is_light_and_files_of_the_user_are_left_alone(folder):
    """The checks before a run import no engine; those of an environment start no process."""
    code = f"""
import sys
def without(*names):
    found = [name for name in sys.modules if name in names]
    assert not found, found
import marin_rl
without("jax", "prefect", "pydantic", "polars", "transformers")
from marin_rl.config import Config, load_config
from marin_rl.doctor.start import before_engines
sound = load_config({str(TOP / "configs/debug.yaml")!r}, ["root={folder}"])
assert before_engines(sound, "rl-loop") is None
without(*{ENGINES!r})
import marin_rl.cli, marin_rl.display
from marin_rl import Config, run, scan_rollouts
without(*{HEAVY!r}, "prefect")
from marin_rl.environments.checks import environment_of
from marin_rl.environments.episode_pool import pools
import {", ".join(DATA_SIDE)}
environment_of(Config(run_id="r"))
assert not pools
without(*{HEAVY!r})
assert not [name for name in sys.modules if name.startswith({FOREIGN!r})]
import flows, schemas, tasks
print(*(module.__file__ for module in (flows, schemas, tasks)), sep="\\n")
"""
    done = python(folder, code)
    assert done.returncode == 0, done.stderr
    packages = [TOP / name / "__init__.py" for name in ("flows", "schemas", "tasks")]
    assert done.stdout.split("\n")[:-1] == [str(path) for path in packages]


@pytest.mark.slow
def test_importing_touches_no_device(tmp_path):
    """JAX would fail at the first array, for there is no such platform."""
    code = "\n".join(f"import {module}" for module in EVERYTHING)
    done = python(tmp_path, code, JAX_PLATFORMS="nowhere", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_prefect_still_starts_its_server_with_the_pinned_fastapi(tmp_path):
    code = "from prefect.server.api.server import create_app; print(type(create_app()).__name__)"
    assert python(tmp_path, code).stdout.strip() == "FastAPI"


def test_a_worker_process_leaves_files_of_the_user_alone(folder):
    """A worker searches modules where its parent does, in the user's folder first."""
    done = python(
        folder,
        "import subprocess, sys\n"
        "from marin_rl.isolated.processes import clean_environment\n"
        "code = 'import marin_rl.isolated.worker, schemas, tasks, sys; ' \\\n"
        "    'print(sys.path[0], schemas.__file__, tasks.__file__)'\n"
        "command = [sys.executable, '-P', '-c', code]\n"
        "subprocess.run(command, env=clean_environment(), check=True)\n",
    )
    assert done.returncode == 0, done.stderr
    packages = [str(TOP / name / "__init__.py") for name in ("schemas", "tasks")]
    assert done.stdout.split() == [str(folder), *packages]


def test_a_module_that_took_our_name_first_is_named(tmp_path):
    (tmp_path / "tasks.py").write_text("")
    done = python(tmp_path, "import tasks\nimport marin_rl\n")
    assert done.returncode == 1
    assert f"the module 'tasks' was imported from {tmp_path / 'tasks.py'}" in done.stderr
    assert "import marin_rl before it, or rename tasks.py" in done.stderr


def test_every_name_of_the_surface_is_there_and_in_the_stub():
    stub = (TOP / "marin_rl/__init__.pyi").read_text()
    for name in marin_rl.__all__:
        assert getattr(marin_rl, name) is not None
        assert f" as {name}\n" in stub or f"{name}: str" in stub
        assert name in dir(marin_rl)
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        _ = marin_rl.trane  # pyright: ignore[reportAttributeAccessIssue]

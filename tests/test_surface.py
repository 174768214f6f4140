"""`import marin_rl`: light, with the names of the Python surface, and with the installed packages.

A user's folder may hold files with the names of our top-level packages.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import marin_rl

TOP = Path(marin_rl.__file__).parents[1]
OWN_FILES = ("tasks.py", "flows.py", "schemas.py", "errors.py", "types.py")


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, which is then first on its sys.path."""
    (folder / "script.py").write_text(code)
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a user, whose files end a process that imports them."""
    for name in OWN_FILES[:-1]:
        (tmp_path / name).write_text(f"raise SystemExit('{name} of the user was imported')\n")
    return tmp_path


def test_importing_is_light_and_files_of_the_user_are_left_alone(folder):
    done = python(
        folder,
        "import marin_rl, sys\n"
        "heavy = {'jax', 'prefect', 'pydantic', 'polars', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from marin_rl import Config, run, scan_rollouts\n"
        "heavy = {'jax', 'prefect'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import flows, schemas, tasks\n"
        "print(*(module.__file__ for module in (flows, schemas, tasks)), sep='\\n')\n",
    )
    assert done.returncode == 0, done.stderr
    packages = [TOP / name / "__init__.py" for name in ("flows", "schemas", "tasks")]
    assert done.stdout.split("\n")[:-1] == [str(path) for path in packages]


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

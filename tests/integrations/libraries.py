"""Interpreters that have a library and nothing of this package, made once for all tests."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from filelock import FileLock

INSTALL_TIMEOUT_S = 600


def interpreter_with(folder: Path, *requirements: str, newer: tuple[str, ...] = ()) -> Path:
    """Python of a virtual environment in `folder` that has the packages; skips where none can be.

    Tests of several processes share it. Packages in `newer` say that they need a newer Python than
    this one, and what is used of them does not; their requirements are among the others.
    """
    python = folder / "bin/python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "installed").exists():
            _make(folder, python)
            _install(python, *requirements)
            for requirement in newer:
                _install(python, "--no-deps", "--python-version", "3.13.14", requirement)
            (folder / "installed").touch()
    return python


def site_packages(python: Path) -> Path:
    """Folder of the packages of a virtual environment."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(python.parents[1])}))


def _make(folder: Path, python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    assert python.exists(), python


def _install(python: Path, *requirements: str) -> None:
    uv = Path(sys.executable).parent / "uv"
    try:
        done = subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", python, *requirements],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{', '.join(requirements)} took too long to install")
    if done.returncode:
        pytest.skip(f"{', '.join(requirements)} cannot be installed: {done.stderr[-300:]}")

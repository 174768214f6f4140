"""Our end of an interpreter that plays episodes of another library: start it, ask, end it.

The process is a worker of `marin_rl.isolated`; its work is `hosts/host.py`, which says what is
asked. Leaves out what the answers mean (`environment`) and limits on time and memory
(`episode_pool`).
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from marin_rl.errors import InputError, RewardFault
from marin_rl.isolated.pool import Worker, WorkerFault, WorkerLimits, WorkerSpec
from marin_rl.isolated.processes import PrintedText, clean_environment

ANSWER_BYTES_MAX = 64 << 20
VERSION_TIMEOUT_S = 60.0
HOSTS = Path(__file__).parent / "hosts"

_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


def installed_version(python: str | None, package: str, supported: str) -> str:
    """Version of a package in an interpreter, None for this one.

    Raises InputError, with the command that installs it, where it is missing or not `supported`,
    which is a version specifier; and where there is no such interpreter.
    """
    shown = python or sys.executable
    install = f"install it with: {shown} -m pip install '{package}{supported}'"
    version = _own_version(package) if python is None else _version_in(python, package)
    if version is None:
        raise InputError(f"environment.options.python: {shown} has no package {package}; {install}")
    if not SpecifierSet(supported).contains(version, prereleases=True):
        raise InputError(
            f"environment.options.python: {shown} has {package} {version}, expected {supported}; "
            f"{install}"
        )
    return version


def _own_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _version_in(python: str, package: str) -> str | None:
    try:
        done = subprocess.run(
            [python, "-I", "-c", _VERSION, package],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            env=clean_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(
            f"environment.options.python: expected the path of a Python interpreter, such as "
            f"FOLDER/bin/python of a virtual environment, found {python!r}: {error}"
        ) from None
    if done.returncode and "PackageNotFoundError" not in done.stderr:
        raise InputError(
            f"environment.options.python: {python} fails: {done.stderr.strip()[-300:]}"
        )
    return None if done.returncode else done.stdout.strip()


class InterpreterEnded(RewardFault):
    """The interpreter of a library ended, or was ended, before it answered."""


class Interpreter:
    """A process that has a library, and answers calls about its episodes. Thread safe."""

    def __init__(
        self, python: str | None, adapter: str, options: Mapping[str, Any], passed: tuple[str, ...]
    ) -> None:
        """Start it. `adapter` is a file of `hosts`; `passed` are names of environment variables.

        Raises InputError where the library cannot be used, with its own words.
        """
        self._python = python or sys.executable
        # Data sets that a library maps would draw bars into the output of a command.
        variables = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", **clean_environment(passed)}
        spec = WorkerSpec(
            module=str(HOSTS / "host.py"),
            limits=WorkerLimits(  # those of the process that plays the episodes hold here too
                wall_s=None, memory_bytes=None, answer_bytes=ANSWER_BYTES_MAX, sealed=False
            ),
            settings={"adapter": str(HOSTS / adapter), "options": dict(options)},
            environment=variables,
            interpreter=self._python,
            name=f"the library of {self._python}",
        )
        self._worker = Worker(spec, PrintedText("library"))
        try:
            self.ready: dict[str, Any] = self._worker.ready.result()
        except InputError as error:
            raise InputError(f"environment.options: {error}") from None

    @property
    def ended(self) -> bool:
        """True once the process has ended and cannot answer."""
        return not self._worker.alive

    def ask(self, call: str, **arguments: Any) -> Any:
        """Ask, and block until the answer. Raises as `answer` does."""
        with self._faults():
            return _taken(self._begin(call, arguments).result())

    async def answer(self, call: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer. Raises RewardFault with the library's error."""
        with self._faults():
            return _taken(await asyncio.wrap_future(self._begin(call, arguments)))

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _begin(self, call: str, arguments: Mapping[str, Any]) -> "Future[Any]":
        return self._worker.call(json.dumps({"call": call, **arguments}, allow_nan=False).encode())

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except WorkerFault as fault:
            ended = f"the interpreter of the library ({self._python}) ended: {fault}"
            raise InterpreterEnded(ended) from None


def _taken(record: Mapping[str, Any]) -> Any:
    """Return the answer of a library. Raises RewardFault with its error."""
    if "error" in record:
        raise RewardFault(record["error"])
    return record["answer"]

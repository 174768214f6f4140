"""Our end of an interpreter that plays episodes of another library: start it, ask, end it.

The other end is `hosts/host.py`, which says what is written between them. Leaves out what the
answers mean (`environment`) and limits on time and memory (`episode_pool`).
"""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from marin_rl.errors import InputError, RewardFault
from marin_rl.isolated.pool import STARTUP_TIMEOUT_S
from marin_rl.isolated.processes import clean_environment

LINE_BYTES_MAX = 64 << 20
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
        del variables["PYTHONPATH"]  # the packages of this interpreter are not for that one
        self._process = subprocess.Popen(
            [self._python, "-I", str(HOSTS / "host.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
        )
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._greeting: Future[dict[str, Any]] = Future()
        self._write({"adapter": str(HOSTS / adapter), "options": dict(options)})
        threading.Thread(target=self._read, name="external-answers", daemon=True).start()
        self.ready = self._greeted()

    @property
    def ended(self) -> bool:
        """True once the process has ended and cannot answer."""
        return self._ended

    def ask(self, call: str, **arguments: Any) -> "Future[Any]":
        """Ask for an answer; the future raises RewardFault with the library's error."""
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            if self._ended:
                answer.set_exception(InterpreterEnded(self._how()))
                return answer
            self._waiting[number] = answer
        self._write({"id": number, "call": call, **arguments})
        return answer

    async def answer(self, call: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer. Raises RewardFault with the library's error."""
        return await asyncio.wrap_future(self.ask(call, **arguments))

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()

    def _greeted(self) -> dict[str, Any]:
        try:
            greeting = self._greeting.result(STARTUP_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise InputError(
                f"environment: {self._python} did not load its library in {STARTUP_TIMEOUT_S:g} s"
            ) from None
        except InterpreterEnded as error:
            raise InputError(f"environment: {error}") from None
        if "unfit" in greeting:
            self.close()
            raise InputError(f"environment.options: {greeting['unfit']}")
        return greeting["ready"]

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with suppress(OSError, ValueError), self._lock:  # the thread that reads notices its end
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self) -> None:
        """Take in answers until there are no more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A line that is no answer: nothing can be read any more.
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            while line := self._process.stdout.readline(LINE_BYTES_MAX):
                self._receive(json.loads(line))
        self.close()
        self._process.stdout.close()
        with self._lock:
            self._ended = True
            with suppress(OSError):
                self._process.stdin.close()
            waiting, self._waiting = [*self._waiting.values(), self._greeting], {}
        for answer in waiting:
            with suppress(Exception):  # answered, or its caller was cancelled
                answer.set_exception(InterpreterEnded(self._how()))

    def _receive(self, record: dict[str, Any]) -> None:
        if not self._greeting.done():
            self._greeting.set_result(record)
            return
        with self._lock:
            answer = self._waiting.pop(record["id"])
        with suppress(Exception):  # its caller may have been cancelled
            if "error" in record:
                answer.set_exception(RewardFault(record["error"]))
            else:
                answer.set_result(record["answer"])

    def _how(self) -> str:
        status = self._process.poll()
        return f"the interpreter of the library ({self._python}) ended with status {status}"

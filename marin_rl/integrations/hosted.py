"""Base of environments that another library plays, in a separate interpreter.

A subclass names the package and its adapter, and turns what the library answers into messages and
rewards. Each process that plays episodes starts one interpreter: a worker of `marin_rl.isolated`
that runs `host.py`, which says what can be asked. `options.python` names another interpreter, for a
library whose dependencies differ. Leaves out limits on time and memory (`episode_pool`).
"""

import asyncio
import atexit
import itertools
import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar

from packaging.specifiers import SpecifierSet
from pydantic import AfterValidator, Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base import RewardedElsewhere
from marin_rl.environments.episode import StepResult, Tool
from marin_rl.environments.registry import parse_options
from marin_rl.environments.row_files import open_rows
from marin_rl.errors import InputError, RewardFault
from marin_rl.isolated.processes import (
    PrintedText,
    Worker,
    WorkerFault,
    WorkerLimits,
    WorkerSpec,
    clean_environment,
)
from marin_rl.types import Example, Message, Split, Turn

ROWS_KEPT = 1024
ANSWER_BYTES_MAX = 64 << 20
VERSION_TIMEOUT_S = 60.0
FOLDER = Path(__file__).parent

_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Library:
    """A package that plays: its name, the versions that are supported, and its adapter."""

    package: str
    versions: str
    adapter: str


class HostedOptions(Section):
    """Options of all environments that another library plays."""

    id: str = Field(min_length=1, description="name of an environment in its library")
    python: str | None = Field(
        default=None,
        description="Python interpreter that has the library, such as FOLDER/bin/python of a "
        "virtual environment; null: the one that runs marin-rl",
    )
    workers: int = Field(
        default=1, ge=1, le=64, description="processes that play episodes, each with a library"
    )


class HostedEnvironment(RewardedElsewhere):
    """An environment of another library. Its interpreter starts when it is first needed."""

    library: ClassVar[Library]
    options_kind: ClassVar[type[HostedOptions]]

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self.options = parse_options(self.options_kind, config)
        self.workers = self.options.workers
        package, versions = self.library.package, self.library.versions
        installed = installed_version(self.options.python, package, versions)
        self.version = f"1+{package}.{installed}"
        self._interpreter: Interpreter | None = None

    @property
    def interpreter(self) -> "Interpreter":
        """The running interpreter of this process. InputError where the library refuses."""
        if self._interpreter is None or self._interpreter.ended:
            self._interpreter = Interpreter(
                self.options.python,
                self.library.adapter,
                self.options.model_dump(mode="json"),
                self._config.pass_environment,
            )
            atexit.register(self._interpreter.close)
        return self._interpreter

    def load_examples(self) -> None:
        _ = self.interpreter  # what the library refuses is known before any work


class RowsOptions(HostedOptions):
    """Options of environments whose library has the rows."""

    eval_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share of the rows kept for evaluation, where the environment has no "
        "evaluation data of its own",
    )


class RowsEnvironment(HostedEnvironment):
    """An environment whose examples are rows that its library has, and splits."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self._row = lru_cache(maxsize=ROWS_KEPT)(
            lambda split, number: self.interpreter.ask("row", split=split, index=number)
        )

    def load_examples(self) -> None:
        super().load_examples()
        self.size, self.eval_size = self._size("train"), self._size("eval")

    def row(self, seed: int, index: int, split: Split) -> dict[str, Any]:
        return self._row(split, (seed + index) % self._size(split))

    def _size(self, split: Split) -> int:
        return self.interpreter.ready["sizes"][split]


def _http_address(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("expected http://HOST:PORT or https://HOST")
    return value.rstrip("/")


HttpAddress = Annotated[str, AfterValidator(_http_address)]  # of a server that others run


class HeldOutRows:
    """Rows of a data file, of which the last ones are for evaluation. Raises InputError."""

    def __init__(self, path: str, eval_fraction: float) -> None:
        rows = open_rows(path)
        self._rows = [rows.row(index) for index in range(len(rows))]
        if len(rows) < 2 or not all(isinstance(row, dict) for row in self._rows):
            raise InputError(
                f"environment.options.path: expected two rows or more, all objects, in {path}"
            )
        self.digest, self.place = rows.digest, rows.place
        self.eval_size = max(1, int(len(rows) * eval_fraction))
        self.size = len(rows) - self.eval_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def row(self, seed: int, index: int, split: Split) -> dict[str, Any]:
        rows = self._rows[: self.size] if split == "train" else self._rows[self.size :]
        return rows[(seed + index) % len(rows)]


_numbers = itertools.count()


class HostedEpisode(ABC):
    """Base of episodes: the calls of one in the interpreter of its environment.

    Each raises RewardFault with the library's error.
    """

    def __init__(self, environment: HostedEnvironment, example: Example) -> None:
        self._interpreter = environment.interpreter
        self.number = next(_numbers)
        self._example = example

    @abstractmethod
    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]: ...

    @abstractmethod
    async def step(self, turn: Turn) -> StepResult: ...

    async def begin(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return await self._interpreter.answer(
            "start", episode=self.number, row=row, seed=self._example.seed
        )

    async def take(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        return await self._interpreter.answer("step", episode=self.number, turn=turn)

    async def close(self) -> None:
        await self._interpreter.answer("close", episode=self.number)


class InterpreterEnded(RewardFault):
    """The interpreter of a library ended, or was ended, before it answered."""


class Interpreter:
    """A process that has a library, and answers calls about its episodes. Thread safe."""

    def __init__(
        self, python: str | None, adapter: str, options: Mapping[str, Any], passed: tuple[str, ...]
    ) -> None:
        """Start it. `adapter` is a file beside this; `passed` are names of environment variables.

        Raises InputError where the library cannot be used, with its own words.
        """
        self._python = python or sys.executable
        spec = WorkerSpec(
            module=str(FOLDER / "host.py"),
            limits=WorkerLimits(  # those of the process that plays the episodes hold here too
                wall_s=None, memory_bytes=None, answer_bytes=ANSWER_BYTES_MAX, sealed=False
            ),
            settings={"adapter": str(FOLDER / adapter), "options": dict(options)},
            # data sets that a library maps would draw bars into the output of a command
            environment={"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", **clean_environment(passed)},
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
        return not self._worker.alive

    def ask(self, call: str, **arguments: Any) -> Any:
        """Ask, and block until the answer. Raises RewardFault with the library's error."""
        with self._faults():
            return _answer_in(self._call(call, arguments).result())

    async def answer(self, call: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer. Raises as `ask` does."""
        with self._faults():
            return _answer_in(await asyncio.wrap_future(self._call(call, arguments)))

    def close(self) -> None:
        self._worker.close()

    def _call(self, call: str, arguments: Mapping[str, Any]) -> "Future[Any]":
        return self._worker.call(json.dumps({"call": call, **arguments}, allow_nan=False).encode())

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except WorkerFault as fault:
            ended = f"the interpreter of the library ({self._python}) ended: {fault}"
            raise InterpreterEnded(ended) from None


def _answer_in(record: Mapping[str, Any]) -> Any:
    if "error" in record:
        raise RewardFault(record["error"])
    return record["answer"]


def installed_version(python: str | None, package: str, supported: str) -> str:
    """Version of a package for an interpreter (None: this). InputError says how to install."""
    shown = python or sys.executable
    install = f"install it with: {shown} -m pip install '{package}{supported}'"
    version = None if python is None else _version_in(python, package)
    if python is None:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(package)
    if version is None:
        raise InputError(f"environment.options.python: {shown} has no package {package}; {install}")
    if not SpecifierSet(supported).contains(version, prereleases=True):
        raise InputError(
            f"environment.options.python: {shown} has {package} {version}, expected {supported}; "
            f"{install}"
        )
    return version


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

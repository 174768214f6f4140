"""Base of environments of other libraries: their interpreter, their options, their episodes.

A subclass names the package and its adapter, and turns what the library answers into messages and
rewards. The library's code runs in an interpreter of its own (`interpreter`), one for each process
that plays episodes; `options.python` says which, so that a library whose dependencies differ has
an environment to itself.
"""

import atexit
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base_environment import RewardedElsewhere
from marin_rl.environments.episode import StepResult, Tool
from marin_rl.environments.external.interpreter import Interpreter, installed_version
from marin_rl.environments.registry import parse_options
from marin_rl.types import Example, Message, Split, Turn

ROWS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Library:
    """A package that plays: its name, the versions that are supported, and its adapter."""

    package: str
    versions: str
    adapter: str


class ExternalOptions(Section):
    """Options of all environments of other libraries."""

    id: str = Field(min_length=1, description="name of an environment in its library")
    python: str | None = Field(
        default=None,
        description="Python interpreter that has the library, such as FOLDER/bin/python of a "
        "virtual environment; null: the one that runs marin-rl",
    )
    workers: int = Field(
        default=1, ge=1, le=64, description="processes that play episodes, each with a library"
    )


class ExternalEnvironment(RewardedElsewhere):
    """An environment of another library. Its interpreter starts when it is first needed."""

    library: ClassVar[Library]
    options_kind: ClassVar[type[ExternalOptions]]

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self.options = parse_options(self.options_kind, config)
        self.workers = self.options.workers
        kind = self.library
        installed = installed_version(self.options.python, kind.package, kind.versions)
        self.version = f"1+{kind.package}.{installed}"
        self._interpreter: Interpreter | None = None

    @property
    def interpreter(self) -> Interpreter:
        """The interpreter of this process; another one where it ended.

        Raises InputError where the library refuses.
        """
        if self._interpreter is None or self._interpreter.ended:
            self._interpreter = Interpreter(
                self.options.python,
                self.library.adapter,
                self.host_options,
                self._config.pass_environment,
            )
            atexit.register(self._interpreter.close)
        return self._interpreter

    @property
    def host_options(self) -> dict[str, Any]:
        """Options as the adapter in the other interpreter reads them."""
        return self.options.model_dump(mode="json")

    def load_examples(self) -> None:
        """Start the interpreter: what the library refuses is known before any work."""
        _ = self.interpreter

    def described(self, text: str, seed: int, index: int, split: Split) -> Example:
        """An example that is nothing but a seed; `text` stands for it where examples are shown."""
        return self.make_example(text, seed=seed, index=index, split=split)


class RowsOptions(ExternalOptions):
    """Options of environments whose library has the rows."""

    eval_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share of the rows kept for evaluation, where the environment has no "
        "evaluation data of its own",
    )


class RowsEnvironment(ExternalEnvironment):
    """An environment whose examples are rows that its library has, and splits."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self._row = lru_cache(maxsize=ROWS_KEPT)(self._read_row)

    def load_examples(self) -> None:
        """Load the library's environment and its rows. Raises InputError with what it says."""
        super().load_examples()
        self.size = self._size("train")

    @property
    def eval_size(self) -> int:
        """Number of evaluation rows."""
        return self._size("eval")

    def row(self, seed: int, index: int, split: Split) -> dict[str, Any]:
        """Row number `seed + index` of a split, starting over at the end."""
        return self._row(split, (seed + index) % self._size(split))

    def _size(self, split: Split) -> int:
        return self.interpreter.ready["sizes"][split]

    def _read_row(self, split: Split, number: int) -> dict[str, Any]:
        return self.interpreter.ask("row", split=split, index=number)


_numbers = itertools.count()


class ExternalEpisode(ABC):
    """Base of episodes: the calls of one in the interpreter of its environment."""

    def __init__(self, environment: ExternalEnvironment, example: Example) -> None:
        self._interpreter = environment.interpreter
        self.number = next(_numbers)
        self._example = example

    @abstractmethod
    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """The messages of the first prompt, and the tools. Raises RewardFault."""

    @abstractmethod
    async def step(self, turn: Turn) -> StepResult:
        """The answer to a turn. Raises RewardFault."""

    async def begin(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Start the library's episode of a row. Raises RewardFault."""
        return await self._interpreter.answer(
            "start", episode=self.number, row=row, seed=self._example.seed
        )

    async def take(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """The library's answer to a turn. Raises RewardFault."""
        return await self._interpreter.answer("step", episode=self.number, turn=turn)

    async def close(self) -> None:
        """Release the library's episode. Raises RewardFault."""
        await self._interpreter.answer("close", episode=self.number)

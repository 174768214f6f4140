"""The protocol of a game: first positions, legal moves, replies and an end.

Positions are immutable, so that members of a group may share one. Leaves out prompts, rewards and
examples (`environments.game`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

# Characters for numbers from 1 on, so that each is one token of the built-in tokenizer.
DIGITS = "123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Reply of a game to a move: what the model reads, the next position, and the end.

    `won` is None while the game goes on.
    """

    text: str
    position: Any
    won: bool | None = None


@runtime_checkable
class Game(Protocol):
    """Rules of a game for one player, against a secret or an opponent."""

    @property
    def counts_turns(self) -> bool:
        """True where fewer turns are better; else only the end counts."""
        ...

    def starts(self) -> int:
        """Number of different first positions."""
        ...

    def start(self, number: int) -> Any:
        """First position `number`, from 0 on."""
        ...

    def prompt(self, position: Any) -> str:
        """Text that the model reads before its first move."""
        ...

    def answer(self, position: Any) -> str | None:
        """The secret of a first position, for people who read a game; None without one."""
        ...

    def legal_moves(self, position: Any) -> Sequence[str]:
        """Moves that the rules allow, good and bad ones."""
        ...

    def reply(self, position: Any, move: str, draw: random.Random) -> Reply:
        """Apply a legal move; `draw` is the opponent's source of random numbers."""
        ...

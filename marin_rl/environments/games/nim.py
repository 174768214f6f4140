"""Nim against an opponent: take from one heap in each turn; who takes the last object wins.

A position is lost for the player to move exactly where the heaps' exclusive or is 0 (Bouton 1901,
doi:10.2307/1967631). Only positions that the player can win are first positions, so that optimal
play wins every game.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor
from typing import Literal

from marin_rl.environments.games.rules import DIGITS, Reply

HEAPS = "abc"
NUMBERS = "0" + DIGITS

Position = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nim:
    """The game with three heaps of up to `size` objects; a position is their sizes.

    A move is a heap and a number, such as b2. The opponent plays at random or optimally: it leaves
    an exclusive or of 0 where it can.
    """

    size: int
    opponent: Literal["random", "optimal"] = "random"
    counts_turns: bool = False

    def starts(self) -> int:
        """Number of positions that the first player can win."""
        return len(self._starts())

    def start(self, number: int) -> Position:
        """Position `number` of those, in the order of their sizes."""
        return self._starts()[number]

    def _starts(self) -> list[Position]:
        sizes = range(self.size + 1)
        return [heaps for heaps in itertools.product(sizes, repeat=len(HEAPS)) if nim_sum(heaps)]

    def prompt(self, position: Position) -> str:
        """The heaps' sizes, such as 345."""
        return "".join(NUMBERS[heap] for heap in position)

    def answer(self, position: Position) -> None:
        """No secret: both players see all."""
        del position

    def legal_moves(self, position: Position) -> Sequence[str]:
        """Every heap with every number that it has."""
        return [
            heap + NUMBERS[taken]
            for heap, held in zip(HEAPS, position, strict=True)
            for taken in range(1, held + 1)
        ]

    def reply(self, position: Position, move: str, draw: random.Random) -> Reply:
        """Take, let the opponent take, and say what is left."""
        left = self._after(position, move)
        if not any(left):
            return Reply(text=self.prompt(left), position=left, won=True)
        moves = self.legal_moves(left)
        if self.opponent == "optimal":
            moves = [each for each in moves if not nim_sum(self._after(left, each))] or moves
        left = self._after(left, draw.choice(moves))
        return Reply(text=self.prompt(left), position=left, won=None if any(left) else False)

    def _after(self, position: Position, move: str) -> Position:
        heap, taken = HEAPS.index(move[0]), NUMBERS.index(move[1])
        return tuple(held - taken * (i == heap) for i, held in enumerate(position))


def nim_sum(heaps: Sequence[int]) -> int:
    """Exclusive or of the heaps: 0 where the player to move loses against optimal play."""
    return reduce(xor, heaps, 0)

"""Rules of the games that the environment `game` plays: first positions, moves, replies, an end.

A game has `starts()` first positions, of which `start(number)` is one; the model reads `prompt` and
answers with one of `legal_moves`, to which `reply` is the game's. `answer` is the secret, for
people. Positions are immutable, so that members of a group may share one. Leaves out rewards and
examples (`environments.game`).
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor
from typing import Any, Literal

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


HIGHER, LOWER, RIGHT = ">", "<", "="


@dataclass(frozen=True, slots=True)
class Guess:
    """Guess a number from 1 to `size`: answers say whether it is higher or lower.

    A position is the secret. Halving the numbers that are left is optimal: the mean number of
    guesses over all numbers is the mean depth of a balanced binary search tree, 2.625 for 8
    numbers and 3.375 for 16.
    """

    size: int
    counts_turns: bool = True

    def starts(self) -> int:
        return self.size

    def start(self, number: int) -> int:
        return number + 1

    def prompt(self, position: int) -> str:
        return f"1-{DIGITS[self.size - 1]}"

    def answer(self, position: int) -> str:
        return DIGITS[position - 1]

    def legal_moves(self, position: int) -> Sequence[str]:
        return tuple(DIGITS[: self.size])

    def reply(self, position: int, move: str, draw: random.Random) -> Reply:
        number = DIGITS.index(move) + 1
        if number == position:
            return Reply(text=RIGHT, position=position, won=True)
        return Reply(text=HIGHER if position > number else LOWER, position=position)


COLOURS = "abcdef"


@dataclass(frozen=True, slots=True)
class Mastermind:
    """Find a secret code of `pegs` pegs of `colours` colours, which is a position.

    Each guess is answered by two digits: pegs of the right colour in the right place, and further
    pegs of a right colour in a wrong place (Knuth 1976, The computer as Master Mind).
    """

    pegs: int
    colours: int
    counts_turns: bool = True

    def starts(self) -> int:
        return self.colours**self.pegs

    def start(self, number: int) -> str:
        places = [number // self.colours**place % self.colours for place in range(self.pegs)]
        return "".join(COLOURS[place] for place in reversed(places))

    def prompt(self, position: str) -> str:
        return f"{self.pegs}{COLOURS[self.colours - 1]}"

    def answer(self, position: str) -> str:
        return position

    def legal_moves(self, position: str) -> Sequence[str]:
        return [self.start(number) for number in range(self.starts())]

    def reply(self, position: str, move: str, draw: random.Random) -> Reply:
        return Reply(
            text=feedback(position, move), position=position, won=True if move == position else None
        )


def feedback(code: str, guess: str) -> str:
    """Right places, and right colours in wrong places, as two digits."""
    places = sum(a == b for a, b in zip(code, guess, strict=True))
    colours = (Counter(code) & Counter(guess)).total()
    return f"{places}{colours - places}"


HEAPS = "abc"
NUMBERS = "0" + DIGITS

Position = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nim:
    """Take from one of three heaps of up to `size` objects; who takes the last object wins.

    A position, the heaps' sizes, is lost for the player to move exactly where their exclusive or is
    0 (Bouton 1901, doi:10.2307/1967631). Only positions that the player can win are first
    positions, so that optimal play wins every game.

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
        return "".join(NUMBERS[heap] for heap in position)

    def answer(self, position: Position) -> None:
        """No secret: both players see all."""

    def legal_moves(self, position: Position) -> Sequence[str]:
        return [
            heap + NUMBERS[taken]
            for heap, held in zip(HEAPS, position, strict=True)
            for taken in range(1, held + 1)
        ]

    def reply(self, position: Position, move: str, draw: random.Random) -> Reply:
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


Game = Guess | Mastermind | Nim

"""Guess a number from 1 to `size`; each answer says whether it is higher or lower.

Halving the numbers that are left is optimal: the mean number of guesses over all numbers is the
mean depth of a balanced binary search tree, 2.625 for 8 numbers and 3.375 for 16.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from marin_rl.environments.games.rules import DIGITS, Reply

HIGHER, LOWER, RIGHT = ">", "<", "="


@dataclass(frozen=True, slots=True)
class Guess:
    """The game for numbers from 1 to `size`; a position is the secret number."""

    size: int
    counts_turns: bool = True

    def starts(self) -> int:
        """Number of secrets."""
        return self.size

    def start(self, number: int) -> int:
        """Secret number `number` + 1."""
        return number + 1

    def prompt(self, position: int) -> str:
        """The range, such as 1-8, which is the same for all secrets."""
        del position
        return f"1-{DIGITS[self.size - 1]}"

    def answer(self, position: int) -> str:
        """The secret number."""
        return DIGITS[position - 1]

    def legal_moves(self, position: int) -> Sequence[str]:
        """All numbers, also those that earlier answers have ruled out."""
        del position
        return tuple(DIGITS[: self.size])

    def reply(self, position: int, move: str, draw: random.Random) -> Reply:
        """Say that the secret is higher or lower, or end the game."""
        del draw
        number = DIGITS.index(move) + 1
        if number == position:
            return Reply(text=RIGHT, position=position, won=True)
        return Reply(text=HIGHER if position > number else LOWER, position=position)

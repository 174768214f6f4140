"""Mastermind: find a secret code by guesses, each answered by how much of it is right.

The answer has two digits: pegs of the right colour in the right place, and further pegs of a right
colour in a wrong place (Knuth 1976, The computer as Master Mind).
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from marin_rl.environments.games.rules import Reply

COLOURS = "abcdef"


@dataclass(frozen=True, slots=True)
class Mastermind:
    """The game with `pegs` pegs of `colours` colours; a position is the secret code."""

    pegs: int
    colours: int
    counts_turns: bool = True

    def starts(self) -> int:
        """Number of codes."""
        return self.colours**self.pegs

    def start(self, number: int) -> str:
        """Code `number`, in alphabetical order."""
        places = [number // self.colours**place % self.colours for place in range(self.pegs)]
        return "".join(COLOURS[place] for place in reversed(places))

    def prompt(self, position: str) -> str:
        """The number of pegs and the last colour, such as 3d, the same for all codes."""
        del position
        return f"{self.pegs}{COLOURS[self.colours - 1]}"

    def answer(self, position: str) -> str:
        """The secret code."""
        return position

    def legal_moves(self, position: str) -> Sequence[str]:
        """All codes, also those that earlier answers have ruled out."""
        del position
        return [self.start(number) for number in range(self.starts())]

    def reply(self, position: str, move: str, draw: random.Random) -> Reply:
        """Compare a guess with the code."""
        del draw
        return Reply(
            text=feedback(position, move), position=position, won=True if move == position else None
        )


def feedback(code: str, guess: str) -> str:
    """Right places, and right colours in wrong places, as two digits."""
    places = sum(a == b for a, b in zip(code, guess, strict=True))
    colours = (Counter(code) & Counter(guess)).total()
    return f"{places}{colours - places}"

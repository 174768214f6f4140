"""Parts of the slow suite: CI runs one of them, chosen by the commit."""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Self, TypeVar

import pytest

T = TypeVar("T")


class Part(NamedTuple):
    """Part `number`, from 1 on, of `parts`. All parts together have each test once."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return part K of N for `K/N`. Raises pytest.UsageError for other text."""
        numbers = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
        if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
            raise pytest.UsageError(
                f"MARIN_RL_SLOW_PART is {text!r}; give K/N, such as 2/5 for part 2 of 5"
            )
        return cls(int(numbers[1]), int(numbers[2]))

    def of(self, tests: Sequence[T], unit: Callable[[T], Hashable]) -> list[T]:
        """Return the tests of every Nth unit from the Kth on: some of each file that has N of them.

        `unit` is equal for tests that stay together, such as those that run in order.
        """
        units = list(dict.fromkeys(map(unit, tests)))
        kept = set(units[self.number - 1 :: self.parts])
        return [test for test in tests if unit(test) in kept]

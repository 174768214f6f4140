"""Random seeds that are printed, and cases of parametrised tests that only the slow suite runs."""

import os
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest

from marin_rl.types import Example, Message


def printed_seed() -> int:
    """Return the seed of MARIN_RL_SEED, else a new one, and print it so that the test can be
    repeated.
    """
    chosen = os.environ.get("MARIN_RL_SEED")
    seed = int(chosen) if chosen else random.SystemRandom().randrange(10**9)
    print(f"MARIN_RL_SEED={seed}")
    return seed


def others_slow(
    names: Iterable[Any], *quick: Any, first: int = 0, several: bool = False
) -> list[Any]:
    """The names, or other values, as parameters, all but `quick` and the `first` marked slow.

    With `several`, each is the values of several parameters.
    """
    names = list(names)
    assert all(name in names for name in quick), f"{quick} are to be among {names}"
    quick = (*quick, *names[:first])
    slow = pytest.mark.slow
    return [
        name if name in quick else pytest.param(*(name if several else (name,)), marks=slow)
        for name in names
    ]


def refusals(text: str) -> list[Any]:
    """Overrides and the words of their error, as parameters: `key=value; key=value -> words`.

    A row goes on in indented lines.
    """
    rows = re.sub(r"\n +", " ", text.strip()).splitlines()
    pairs = [row.split(" -> ", 1) for row in rows]
    return [pytest.param(typed.split("; "), words, id=typed) for typed, words in pairs]


def asked(answer: str | None, /, **metadata: Any) -> Example:
    """An example with this answer and columns, whose prompt says nothing."""
    return Example(
        environment="chat",
        environment_version="1",
        example_id="e",
        split="train",
        seed=0,
        messages=(Message(role="user", content="?"),),
        answer=answer,
        metadata=metadata,
    )


def optimal_mean_guesses(size: int) -> float:
    """Mean number of guesses of binary search over all secrets from 1 to `size`."""
    # level d of the search tree has 2**(d - 1) numbers, each of which takes d guesses
    return sum((number + 1).bit_length() for number in range(size)) / size

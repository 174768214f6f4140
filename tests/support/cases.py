"""Random seeds that are printed, and cases of parametrised tests that only the slow suite runs."""

import os
import random
from collections.abc import Iterable
from typing import Any

import pytest


def printed_seed() -> int:
    """Return the seed of MARIN_RL_SEED, else a new one, and print it so that the test can be
    repeated.
    """
    asked = os.environ.get("MARIN_RL_SEED")
    seed = int(asked) if asked else random.SystemRandom().randrange(10**9)
    print(f"MARIN_RL_SEED={seed}")
    return seed


def others_slow(names: Iterable[Any], *quick: Any) -> list[Any]:
    """The names, or other values, as parameters, those that are not `quick` marked slow."""
    names = list(names)
    assert set(quick) <= set(names), f"{quick} are to be among {names}"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]

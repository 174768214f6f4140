"""Cases of a parametrised test for the default suite, and those for the slow one only."""

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """The names as parameters, those that are not `quick` marked slow."""
    names = list(names)
    assert set(quick) <= set(names), f"{quick} are to be among {names}"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]

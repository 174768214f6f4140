"""Which cases of a parametrised test the default suite takes, and which only the slow one."""

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """The names as parameters, those that are not `quick` marked slow."""
    names = list(names)
    assert set(quick) <= set(names), f"{quick} are to be among {names}"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]

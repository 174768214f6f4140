"""A server that several modules ask."""

from collections.abc import Iterator

import pytest
from support.servers import serving

from marin_rl.serving.server import PolicyServer


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly(compiled_quickly: None) -> None:
    """All tests of this folder: what is asked here is what is said, not how fast."""


@pytest.fixture(scope="module")
def server(compiled_quickly: None) -> Iterator[PolicyServer]:
    with serving() as running:
        yield running

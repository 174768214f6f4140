"""A server that several modules attack."""

from collections.abc import Iterator

import pytest

from marin_rl.serving.server import PolicyServer


@pytest.fixture(scope="module")
def server(compiled_quickly: None) -> Iterator[PolicyServer]:
    """A small server; its programs are compiled quickly, because its speed does not matter."""
    from support.servers import serving  # imports Levanter, which most modules here do not need

    with serving() as running:
        yield running

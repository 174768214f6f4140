"""Servers for tests."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly(compiled_quickly: None) -> None:
    """All tests of this folder: what is asked here is what is said, not how fast."""

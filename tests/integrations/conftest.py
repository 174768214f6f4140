"""Interpreters that have the libraries whose environments are played."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def interpreters(request: pytest.FixtureRequest) -> Path:
    """Folder of the virtual environments, which is kept between sessions."""
    return Path(request.config.cache.mkdir("libraries"))

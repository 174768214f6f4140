"""One temporary Prefect server for all tests of this folder, brought up as `marin-rl run` does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.server import prefect_api

# Prefect's clients leave sockets to the garbage collector, which reports them wherever it strikes.
LEFT_OPEN = "ignore:Exception ignored in. <(socket|ssl)[.]:pytest.PytestUnraisableExceptionWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Exempt this folder's tests from Prefect's unclosed sockets."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(LEFT_OPEN))


@pytest.fixture(scope="session")
def api() -> Iterator[str]:
    """The URL of a Prefect API that flows inside the test report to."""
    with prefect_api() as url:
        yield url

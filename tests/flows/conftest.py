"""One temporary Prefect server for all tests of this folder, brought up as `marin-rl run` does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from debug_run import Played, debug, latest_flow_run

from flows.rl_loop import start
from flows.server import prefect_api
from marin_rl.progress import ProgressEvent, listening

EXEMPT = (
    # Prefect's clients leave sockets to the garbage collector, which reports them where it strikes.
    "ignore:Exception ignored in. <(socket|ssl)[.]:pytest.PytestUnraisableExceptionWarning",
    # Levanter and Haliax still use parts of JAX that will go.
    "ignore:jax[.]:DeprecationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Exempt this folder's tests from what others do wrong."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for exemption in EXEMPT:
                item.add_marker(pytest.mark.filterwarnings(exemption))


@pytest.fixture(scope="session")
def played(api: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A complete run, in this process, that nothing disturbed."""
    config = debug(tmp_path_factory.mktemp("runs"))
    events: list[ProgressEvent] = []
    with listening(events.append):
        checkpoint = start(config)
    return Played(latest_flow_run(config.run_id), config, checkpoint, events)


@pytest.fixture(scope="session")
def api() -> Iterator[str]:
    """The URL of a Prefect API that flows inside the test report to."""
    with prefect_api() as url:
        yield url

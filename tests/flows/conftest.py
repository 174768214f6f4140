"""One temporary Prefect server for all tests of this folder, brought up as `marin-rl run` does."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import temporary_settings
from pydantic import SecretStr
from support.fault_injection import inject_faults
from support.faults import CrashStates, Recording, Undisturbed, outcome
from support.flow_runs import ForkedRuns, Played, debug, latest_flow_run
from support.prefect_server import copy_template, save_template
from support.quick_programs import quick_programs

from flows.rl_loop import start
from flows.server import prefect_api
from flows.session import HEAVY
from marin_rl import progress
from marin_rl.progress import Phase, ProgressEvent, listening


class OpenedPhases(list[Phase]):
    """The open phases of `marin_rl.progress`, which keeps the lines of all that were ever open."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def append(self, phase: Phase) -> None:
        self.lines.append(phase.line(phase.began))
        super().append(phase)


# jaxtyping compiles what is imported from syntax trees, and CPython 3.11 cannot do that in two
# threads at once: everything is imported before flows have threads.
ROOMS = (
    *HEAVY,
    "marin_rl.batching.sequences",
    "marin_rl.compilation",
    "marin_rl.environments.echo",
    "marin_rl.serving.weights.canary",
    "marin_rl.weight_sync",
    "marin_rl.planning",
    "marin_rl.training.sft",
)


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly(compiled_quickly: None) -> None:
    """All tests of this folder: their runs are compared with each other."""


@pytest.fixture(scope="session")
def played(api: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A complete run, in this process, that nothing disturbed."""
    config = debug(tmp_path_factory.mktemp("runs"))
    events: list[ProgressEvent] = []
    phases = OpenedPhases()
    with pytest.MonkeyPatch.context() as patch, quick_programs(), listening(events.append):
        patch.setattr(progress, "_phases", phases)
        checkpoint = start(config)
    return Played(latest_flow_run(config.run_id), config, checkpoint, events, phases.lines)


@pytest.fixture(scope="session")
def undisturbed(api: str, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A complete run in this process, and every state a crash could have left it in."""
    config = debug(tmp_path_factory.mktemp("undisturbed"))
    states = CrashStates(Path(config.root, config.run_id), tmp_path_factory.mktemp("states"))
    operations = Recording(states)
    with quick_programs(), inject_faults(operations):
        start(config)
    return Undisturbed(outcome(config), states, operations.names.seen)


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prefect API that flows inside the test report to."""
    home = tmp_path_factory.mktemp("prefect")
    database = home / "prefect.db"
    migrated = not copy_template(database)
    url = SecretStr(f"sqlite+aiosqlite:///{database}")
    own: dict[Any, Any] = {"home": home, "server.database.connection_url": url}
    with temporary_settings(updates=own), prefect_api(warm=ROOMS) as connection:
        if migrated:
            save_template(database)
        yield connection.url


@pytest.fixture
def standing_api(prefect_url: str) -> Iterator[str]:
    """The same of a server with all services, such as the one that misses workers."""
    with temporary_settings(updates={"api.url": prefect_url}):
        yield prefect_url


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    """Ends what is entered into it, whatever happens."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def forked_runs(api: str, tmp_path_factory: pytest.TempPathFactory) -> ForkedRuns:
    """Runs in processes that report to the API of this folder's tests."""
    with quick_programs():
        return ForkedRuns(tmp_path_factory.mktemp("forked") / "said", PREFECT_API_URL=api)

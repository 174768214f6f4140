"""Runs whose servers announce themselves, come and go: the same slots and parameters as alone."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.faults import outcome
from support.fleet_servers import RegisteredServer, announced
from support.flow_runs import debug

from flows.rl_loop import start
from marin_rl.config import Config, InferenceConfig
from marin_rl.errors import FleetEmpty
from marin_rl.progress import ProgressEvent, listening
from marin_rl.storage.runs import Run, latest_checkpoint

ROUNDS = 4
FLEET = ("inference.endpoints=registered", "inference.publish=pull")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[ExitStack]:
    """Ends the servers that are entered into it, whatever happens."""
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, run: Run, log: Path) -> RegisteredServer:
    server = RegisteredServer(run, log)
    stack.callback(server.end)
    return server


@pytest.mark.slow
@pytest.mark.bits
def test_a_server_is_killed_and_one_added_in_the_middle(api, tmp_path, servers):
    alone = debug(tmp_path / "alone", f"rounds={ROUNDS}")
    start(alone)
    config: Config = debug(tmp_path / "fleet", f"rounds={ROUNDS}", *FLEET)
    run = Run.create_or_open(config)
    first, second = (serve(servers, run, tmp_path / f"{n}.log") for n in ("first", "second"))
    third: list[RegisteredServer] = []

    def listen(event: ProgressEvent) -> None:
        if event.stage == "round" and event.round == 0:
            second.wait()
            third.append(serve(servers, run, tmp_path / "third.log"))
        if event.stage == "generate" and event.round == 1 and event.done and third:
            first.kill()  # in the middle of a round, with requests under way
        if event.stage == "round" and event.round == 1:
            third[0].wait()

    with listening(listen):
        start(config)
    assert outcome(alone).same_as(outcome(config)) == []
    assert first.process.returncode == -9
    assert second.requests > 0
    assert third[0].requests > 0, "it was added in the middle, and used"
    assert [server.end() for server in (second, third[0])] == [0, 0]
    assert len(announced(run)) == 1, "that of the server that was killed"


@pytest.mark.slow
def test_a_run_without_servers_ends_in_one_error_and_loses_nothing(api, tmp_path, servers):
    config = debug(tmp_path, "rounds=1", *FLEET, "inference.fleet_timeout_s=2")
    with pytest.raises(FleetEmpty, match="--register"):
        start(config)
    run = Run.open(config.root, config.run_id)
    begun = latest_checkpoint(run)
    assert begun is not None
    assert begun.slot == "checkpoints/round-00000"
    serve(servers, run, tmp_path / "late.log").wait()
    start(config.model_copy(update={"inference": with_patience(config)}))
    assert latest_checkpoint(run) != begun


def with_patience(config: Config) -> InferenceConfig:
    return config.inference.model_copy(update={"fleet_timeout_s": 300.0})

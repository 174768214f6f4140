"""Workers with the root alone: they are started, killed and added while a run is trained elsewhere.

They have no Prefect API: the address that they are given is a closed port.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fakes import served_policy
from support.fleet_servers import RegisteredServer
from support.flow_runs import DEBUG, REPOSITORY, debug
from support.forked_python import python
from support.nodes import Node, wait
from support.windowed_runs import checked

from flows.root_workers import RootWorkers
from flows.server import free_port
from marin_rl.analysis.status import worker_rows
from marin_rl.config import Config, parse_config
from marin_rl.display.tables import workers_table
from marin_rl.errors import ConfigError, FleetEmpty, StoreUnavailable
from marin_rl.inference.client.fleet_sources import worker_board
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.tables.stream import GroupStream
from marin_rl.storage.workers import WorkerBeat, WorkerBoard
from marin_rl.types import Canary, ServedPolicy

ROUNDS = 6
PROVEN = "proven at http"
FLEET = ("inference.endpoints=registered", "inference.publish=pull")
WINDOW = (
    *FLEET,
    "flow.runner=root",
    "asynchrony.max_staleness=2",
    "asynchrony.sampler=windowed",
    "policy.init=random",
    f"rounds={ROUNDS}",
)

# As `marin-rl sample`, and says at its end whether Prefect was imported.
PROGRAM = """
import sys
from marin_rl.cli import app
try:
    app()
finally:
    print("imported prefect:", "prefect" in sys.modules, flush=True)
"""


def root_worker(run: Run, folder: Path, name: str) -> Node:
    """A worker with the run's root alone, as a process."""
    environment = {**os.environ, "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-c", PROGRAM, "sample", run.run_id, "--root", run.config.root]
    return Node([*command, "--follow", "--trust"], REPOSITORY, environment, folder / f"{name}.log")


def test_a_run_without_workers_ends_with_an_error_that_says_what_to_start(tmp_path: Path) -> None:
    limit = "inference.fleet_timeout_s=0.001"
    run = Run.create_or_open(debug(tmp_path, *WINDOW, limit))
    workers, beat = RootWorkers(run), a_beat(run)
    workers.check(needed=True)
    time.sleep(0.01)
    with pytest.raises(FleetEmpty, match=f"marin-rl sample {run.run_id} --root"):
        workers.check(needed=True)
    workers.check(needed=False)  # a window without room needs none
    workers.check(needed=True)
    worker_board(run).beat(beat)
    asyncio.run(workers.gone([]))  # looks
    time.sleep(0.01)
    workers.check(needed=True)


def fails_once(patch: pytest.MonkeyPatch, name: str, *, served: bool) -> None:
    """Have the next call of a method of the workers' board fail, before or after its effect."""
    method = getattr(WorkerBoard, name)

    def away(board: WorkerBoard, *arguments: Any) -> None:
        patch.setattr(WorkerBoard, name, method)
        if served:
            method(board, *arguments)
        raise StoreUnavailable("503")

    patch.setattr(WorkerBoard, name, away)


def policy_of(version: int) -> ServedPolicy:
    """A policy that is proven, as far as an order says."""
    canary = Canary(temperature=1.0, token_ids=(97,), logprobs=(-1.0,), tolerance=1e-3)
    return served_policy("", "policy", weight_version=version, canary=canary)


def state_of(run: Run) -> str:
    """State of the order that workers read."""
    order = worker_board(run).order()
    assert order is not None
    return order.state


@pytest.fixture
def ordered(tmp_path: Path) -> tuple[Run, RootWorkers]:
    """A run whose trainer has opened an order."""
    run = Run.create_or_open(debug(tmp_path, *WINDOW))
    workers = RootWorkers(run)
    asyncio.run(workers.open(policy_of(0), 0))
    return run, workers


def closed_at_the_second_try(run: Run, workers: RootWorkers) -> bool:
    """True if an order that a store's fault leaves open is closed by the next try."""
    with pytest.raises(StoreUnavailable):
        asyncio.run(workers.close())
    assert state_of(run) == "open"
    asyncio.run(workers.close())
    return state_of(run) == "closed"


def test_an_order_that_could_not_be_closed_is_closed_by_the_next_try(
    ordered: tuple[Run, RootWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or workers would sample on for a flow that has ended."""
    fails_once(monkeypatch, "announce", served=False)
    assert closed_at_the_second_try(*ordered)


def test_the_order_of_an_earlier_process_is_not_taken_for_none_while_the_store_is_away(
    ordered: tuple[Run, RootWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow that was suspended before its first order would leave workers to sample."""
    fails_once(monkeypatch, "order", served=False)
    assert closed_at_the_second_try(ordered[0], RootWorkers(ordered[0]))


def test_an_order_of_which_the_answer_was_lost_is_closed(
    ordered: tuple[Run, RootWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, workers = ordered
    asyncio.run(workers.close())
    fails_once(monkeypatch, "announce", served=True)
    with pytest.raises(StoreUnavailable):
        asyncio.run(workers.open(policy_of(1), 0))
    assert state_of(run) == "open"
    asyncio.run(workers.close())
    assert state_of(run) == "closed"


def test_status_shows_workers_with_their_chunks(tmp_path: Path) -> None:
    run = Run.create_or_open(debug(tmp_path, *WINDOW))
    assert worker_rows(run) == []
    worker_board(run).beat(a_beat(run))
    (row,) = worker_rows(run)
    assert {name: row[name] for name in ("worker", "weight_version", "chunks", "groups")} == {
        "worker": "worker-a-1", "weight_version": 3, "chunks": [5, 8], "groups": 12,
    }  # fmt: skip
    (name, policy, chunks, groups, _) = (
        [str(cell) for cell in column.cells] for column in workers_table([row]).columns
    )
    assert (name, policy, chunks, groups) == (["worker-a-1"], ["3"], ["5, 8"], ["12"])


def a_beat(run: Run) -> WorkerBeat:
    """Heartbeat of a worker that samples two chunks."""
    return WorkerBeat(
        worker="worker-a-1",
        run_sha256=run_sha256(run.folder),
        beat=1,
        chunks=(5, 8),
        weight_version=3,
        groups=12,
        started_at=0.0,
        beat_at=0.0,
    )


def trainer(config: Config, folder: Path) -> Node:
    """The flow of the run, which samples nothing itself."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(DEBUG.read_text())))
    command = [python(), "-m", "marin_rl", "run", str(file), "--run-id", "whole"]
    changes = [f"--set={item}" for item in (f"root={config.root}", *WINDOW)]
    return Node([*command, *changes], REPOSITORY, {**os.environ}, folder / "flow.log")


def numbers_in(run: Run) -> frozenset[int]:
    """Groups of the stream that are committed and not taken away."""
    stream = GroupStream(run)
    stream.look()
    return stream.numbers


def workers_of(run: Run) -> set[str]:
    """Workers that have claimed chunks, as far as claims are there."""
    stream = GroupStream(run)
    stream.look()
    return {claim.worker for claim in stream.claims.values()}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_workers_with_the_root_alone_are_killed_and_added(tmp_path: Path) -> None:
    """Two of them, one killed with SIGKILL; a third is added in the middle.

    Each that is left is for a while the only one, so that the run cannot end without it.
    """
    config = debug(tmp_path / "runs", *WINDOW)
    run = Run.create_or_open(config)
    server = RegisteredServer(run, tmp_path / "server.log")
    flow = trainer(config, tmp_path)
    workers = [root_worker(run, tmp_path, name) for name in ("one", "two")]
    try:
        wait(lambda: numbers_in(run) != frozenset(), "the first group", flow)
        seen = workers_of(run)
        workers[0].kill()
        wait(lambda: PROVEN in workers[1].log.read_text(), "the second worker", flow)
        workers[1].process.send_signal(signal.SIGSTOP)
        workers.append(root_worker(run, tmp_path, "three"))
        wait(lambda: PROVEN in workers[2].log.read_text(), "the third worker", flow)
        workers[1].process.send_signal(signal.SIGCONT)
        wait(lambda: flow.process.poll() is not None, "the end of the flow")
        assert flow.process.returncode == 0, flow.log.read_text()[-4000:]
        for worker in workers[1:]:
            wait(lambda worker=worker: worker.process.poll() is not None, "the end of a worker")
            told = worker.log.read_text()
            assert worker.process.returncode == 0, told[-4000:]
            assert "imported prefect: False" in told
            assert PROVEN in told
    finally:
        for node in (*workers, flow):
            node.end()
        server.end()
    assert seen, "claims were seen"
    assert all(name.startswith("worker-") for name in seen), "the flow samples nothing itself"
    checked(config)
    names = {
        text
        for round in range(ROUNDS)
        for table in iter_shards(run, round, ["group_id"])
        for text in table["group_id"].to_pylist()
    }
    assert len(names) == ROUNDS * config.rollouts.groups_per_round
    assert (order := worker_board(run).order()) is not None
    assert order.state == "ended"


@pytest.mark.slow
def test_a_worker_is_ended_by_sigterm_and_withdraws(tmp_path: Path) -> None:
    run = Run.create_or_open(debug(tmp_path / "runs", *WINDOW))
    worker = root_worker(run, tmp_path, "one")
    try:
        wait(lambda: worker_board(run).beats() != {}, "a heartbeat", worker)
        worker.process.send_signal(signal.SIGTERM)
        wait(lambda: worker.process.poll() is not None, "the end of the worker")
        assert worker.process.returncode == 130, worker.log.read_text()[-3000:]
        assert "imported prefect: False" in worker.log.read_text()
        assert worker_board(run).beats() == {}
    finally:
        worker.end()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"asynchrony": None}, "expected asynchrony.sampler windowed, found in_order"),
        ({"inference": {"endpoints": ["http://a/v1"], "publish": "update_weights_from_disk"}},
         "found publish update_weights_from_disk and endpoints http://a/v1"),
    ],
)  # fmt: skip
def test_runs_without_such_workers_are_refused(changes: dict[str, object], expected: str) -> None:
    window = {"max_staleness": 1, "sampler": "windowed"}
    tree = {
        "flow": {"runner": "root"},
        "asynchrony": window,
        "inference": {"endpoints": ["registered"], "publish": "pull"},
    }
    assert parse_config(tree).without_root_workers == ""
    with pytest.raises(ConfigError, match=expected):
        parse_config({name: value for name, value in (tree | changes).items() if value})

"""Batches of an API server of atropos: registered for, taken, durable before anything else."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from integrations.trajectories import pushed_config, scored
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from support.http_threads import running_application
from support.run_factories import checkpoint

from marin_rl.errors import EndpointUnavailable, InputError
from marin_rl.integrations.atropos import poller as module
from marin_rl.integrations.atropos.poller import Poller
from marin_rl.integrations.atropos.receiver import Receiver
from marin_rl.storage.layout import popped_batch_key
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.group_queue import GroupQueue
from marin_rl.storage.upkeep.gc import collect, rule_of


@dataclass
class ApiServer:
    """The routes of atropos's server that a trainer uses; batches are handed out once."""

    batches: list[Any] = field(default_factory=list[Any])
    registered: dict[str, Any] | None = None
    pushed_to: bool = False  # before a registration, which it then does not follow
    fails: int = 0
    url: str = ""

    async def register(self, request: Request) -> Response:
        """Take any trainer."""
        fields = await request.json()
        self.registered = None if self.pushed_to else fields
        return JSONResponse({"uuid": 7})

    async def reset(self, request: Request) -> Response:
        """Forget all that was pushed."""
        self.pushed_to = False
        return PlainTextResponse("Reset successful")

    async def batch(self, request: Request) -> Response:
        """Forget the batch that the answer has."""
        if self.fails:
            self.fails -= 1
            return PlainTextResponse("restarting", status_code=502)
        if self.registered is None:
            return JSONResponse({"status": "error", "message": "not registered", "batch": []})
        return JSONResponse({"batch": self.batches.pop(0) if self.batches else None})


@contextmanager
def api_server(**options: Any) -> Iterator[ApiServer]:
    """A running server, which ends with the block."""
    made = ApiServer(**options)
    routes = [
        Route("/register", made.register, methods=["POST"]),
        Route("/batch", made.batch, methods=["GET"]),
        Route("/reset_data", made.reset, methods=["GET"]),
    ]
    with running_application(Starlette(routes=routes)) as made.url:
        yield made


@pytest.fixture
def started(tmp_path: Any) -> Run:
    """A run of pushed groups with its first checkpoint."""
    run = Run.create_or_open(pushed_config(tmp_path))
    checkpoint(run, 0, extra={"parameters_digest": "ab" * 32})
    return run


def queued(run: Run) -> int:
    queue = GroupQueue(run)
    queue.open()
    return queue.accepted


def test_a_batch_is_committed_before_its_groups_are(started: Run) -> None:
    said: list[str] = []
    wrong = scored(0, first=29) | {"scores": [float("nan"), 0.0]}
    batch = [scored(0, first=20), scored(1, first=21), {**wrong, "scores": ["x", 0.0]}]
    with api_server(batches=[batch]) as server:
        poller = Poller(Receiver(started), server.url, said.append)
        poller.recover()
        poller.register()
        assert server.registered is not None
        assert server.registered["batch_size"] == 6
        assert server.registered["num_steps"] == started.config.rounds
        assert poller.poll()
        assert not poller.poll()
    kept = json.loads(started.store.read(popped_batch_key(0)))
    assert kept["batch"] == batch
    assert queued(started) == 2
    (refusal,) = said
    assert refusal.startswith("group 2 of batch 0 is refused")
    names = [Receiver(started).environment(number).name for number in (0, 1)]
    assert names == ["polled-0", "polled-1"]


def test_a_batch_that_was_popped_survives_the_process_that_popped_it(started, monkeypatch):
    batch = [scored(0, first=20), scored(0, first=21), scored(0, first=22)]
    with api_server(batches=[batch]) as server:
        killed = Receiver(started)
        poller = Poller(killed, server.url, lambda line: None)
        poller.register()
        accept, taken = killed.accept, iter((True, False))

        def stop_after_one(groups: Any) -> int:
            if not next(taken):
                raise KeyboardInterrupt
            return accept(groups)

        monkeypatch.setattr(killed, "accept", stop_after_one)
        with pytest.raises(KeyboardInterrupt):
            poller.poll()
        assert queued(started) == 1
        again = Receiver(started)
        recovered = Poller(again, server.url, lambda line: None)
        recovered.recover()
        assert queued(started) == 3
        assert (again.counts["accepted"], again.counts["repeated"]) == (2, 1)
        assert not recovered.poll()  # handed out once


def test_a_server_that_was_started_again_is_registered_with_again(started: Run) -> None:
    said: list[str] = []
    with api_server(fails=1) as server:
        poller = Poller(Receiver(started), server.url, said.append)
        assert not poller.poll()
        assert server.registered is not None
        server.batches.append([scored(0)])
        assert poller.poll()
    assert [line.partition(" ")[2][:14] for line in said] == ["does not answer"[:14]]


def test_a_server_that_was_pushed_to_before_its_trainer_came_is_reset(started: Run) -> None:
    """As atropos 0.4 has it: it answers the registration, and says that there was none."""
    said: list[str] = []
    with api_server(pushed_to=True, batches=[[scored(0)]]) as server:
        poller = Poller(Receiver(started), server.url, said.append)
        assert [poller.poll() for _ in range(3)] == [False, False, True]
    (line,) = said
    assert "it is reset, and those groups are lost" in line
    assert queued(started) == 1


def test_no_batch_is_taken_that_would_be_too_old(started: Run) -> None:
    batches = [[scored(0, first=20 + n) for n in range(3)], [scored(0, first=30)]]
    with api_server(batches=batches) as server:
        poller = Poller(Receiver(started), server.url, lambda line: None)
        poller.register()
        assert poller.poll()
        assert not poller.poll()  # a round waits, and no rollout may be a round old
        assert len(server.batches) == 1


def test_gc_takes_batches_before_the_last_and_numbers_go_on(started: Run) -> None:
    batches = [[scored(0, first=20 + n)] for n in range(4)]
    with api_server(batches=batches[:3]) as server:
        behind = Poller(Receiver(started), server.url, lambda line: None)
        poller = Poller(Receiver(started), server.url, lambda line: None)
        poller.register()
        assert [poller.poll() for _ in range(3)] == [True] * 3
        taken = [item.key for item in collect(started, rule_of(started, None, None)).garbage]
        assert taken == [popped_batch_key(0), popped_batch_key(1)]
        again = Receiver(started)
        Poller(again, server.url, lambda line: None).recover()
        assert (again.counts["accepted"], again.counts["repeated"]) == (0, 1)
        server.batches.append(batches[3])
        assert behind.poll()
    assert json.loads(started.store.read(popped_batch_key(3)))["batch"] == batches[3]
    assert queued(started) == 4


def test_servers_that_are_away_or_others_are_named(started, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    poller = Poller(Receiver(started), "http://127.0.0.1:9", lambda line: None)
    with pytest.raises(EndpointUnavailable, match=r"no answer for 0 s: ConnectError"):
        poller.register()
    with api_server() as server:
        other = Poller(Receiver(started), f"{server.url}/other", lambda line: None)
        with pytest.raises(InputError, match="expected the API server of atropos"):
            other.register()

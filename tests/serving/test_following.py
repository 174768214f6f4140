"""A server that follows a run, damaged checkpoints included, and announces itself to it."""

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.policy_runs import commit, small_run, weights
from support.servers import wait_until

from marin_rl.errors import ConfigError, StoreUnavailable
from marin_rl.serving.launch import proven_server
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.checkpoint_loader import Loaded, Served, Source, read_checkpoint
from marin_rl.serving.weights.following import (
    Announcement,
    CheckpointWatcher,
    Registration,
    announcement_of,
    reachable,
    whole_checkpoints,
)
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.fleet import FleetBoard, Heartbeat, Target, run_sha256
from marin_rl.storage.runs import Run, checkpoint_slot, committed_checkpoint
from marin_rl.storage.stores.filesystem import MemoryStore
from marin_rl.storage.stores.store import Keys
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.model import parameters_digest

POLL_S = 0.05
NOWHERE = {"parameters_digest": "0" * 64}


@pytest.fixture
def memory() -> Run:
    """A run with checkpoint 0 in memory, which is the quickest."""
    run = small_run(f"memory://{uuid.uuid4().hex}")
    commit(run, 0)
    return run


def server_of(run: Run) -> PolicyServer:
    return proven_server(read_checkpoint(run, 0), character_tokenizer(), run.config)


def watching(server: PolicyServer, run: Run, **options: float) -> CheckpointWatcher:
    """A watcher of the run that begins after round 0."""
    return CheckpointWatcher(whole_checkpoints(server.updater, run), run, 0, **options)


@pytest.fixture
def server(memory: Run) -> Iterator[PolicyServer]:
    """A server of the run in memory; it gets no requests, so it needs no port."""
    server = server_of(memory)
    yield server
    server.stop()


def served_id(run: Run, round: int) -> str:
    return f"policy@{round:05d}-{parameters_digest(weights(run, round))[:8]}"


def test_the_newest_good_checkpoint_is_what_is_served(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    commit(run, 0)
    server = server_of(run)
    server.start()
    failures = lambda: server.updater.failures
    try:
        with watching(server, run, poll_s=POLL_S) as follower:
            commit(run, 1)
            wait_until(lambda: server.model_id == served_id(run, 1))
            assert follower.round == 1
            commit(run, 2, extra=NOWHERE)
            wait_until(lambda: failures() == 1)
            assert server.model_id == served_id(run, 1)
            commit(run, 3)
            wait_until(lambda: server.model_id == served_id(run, 3))
            commit(run, 6, extra=NOWHERE)
            wait_until(lambda: failures() == 2)
            commit(run, 5)
            wait_until(lambda: server.model_id == served_id(run, 5))
            commit(run, 4)  # late, and older than what is served
            time.sleep(5 * POLL_S)
            assert server.model_id == served_id(run, 5)
        commit(run, 7)
        time.sleep(5 * POLL_S)
        assert server.model_id == served_id(run, 5)
    finally:
        server.stop()
    assert server.updater.last is not None
    assert server.updater.last.source == "watcher"


def test_a_damaged_checkpoint_is_refused_and_an_older_one_taken(memory, server):
    for round in (1, 2, 3):
        commit(memory, round)
    for round in (3, 2):  # after they were committed
        keys = memory.store.list(checkpoint_slot(round))
        key = max((key for key in keys if "manifest" not in key), key=memory.store.size)
        data = memory.store.read(key)
        memory.store.put_part(key, data[:99] + b"?" + data[100:])
    follower = watching(server, memory)
    follower.look()
    assert (server.model_id, follower.round) == (served_id(memory, 1), 1)
    assert server.updater.failures == 2
    follower.look()  # refused ones are left alone for a while
    assert server.updater.failures == 2


@pytest.mark.parametrize(
    ("newer", "parts", "failures"),
    [
        ([2], {"checkpoints/round-00002/manifest.json": b"{"}, 1),
        # work that is not committed is no fault
        ([], {"checkpoints/round-00002/20990101T000000-00/d/0": b"half"}, 0),
        ([], {"checkpoints/round-00003.old/manifest.json": b"another thing"}, 0),
    ],
    ids=["manifest", "half", "other"],
)
def test_an_older_checkpoint_is_not_hidden(memory, server, newer, parts, failures):
    for round in (1, *newer):
        commit(memory, round)
    for key, data in parts.items():
        memory.store.put_part(key, data)
    watching(server, memory).look()
    assert server.model_id == served_id(memory, 1)
    assert server.updater.failures == failures


def test_a_restored_checkpoint_is_taken_after_all(memory: Run, server: PolicyServer) -> None:
    commit(memory, 1)
    key = max(memory.store.list(checkpoint_slot(1)), key=memory.store.size)
    good = memory.store.read(key)
    memory.store.put_part(key, good[:-1])
    follower = watching(server, memory, again_s=3600)
    follower.look()
    memory.store.put_part(key, good)
    follower.look()
    assert server.model_id == served_id(memory, 0)
    follower._refused = {1: follower._refused[1]._replace(again_at=0.0)}  # the hour is over
    follower.look()
    assert server.model_id == served_id(memory, 1)


class Switched(MemoryStore):
    """A store that can be out of reach."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.down = False

    def read(self, key: str) -> bytes:
        if self.down:
            raise StoreUnavailable("the network is down")
        return super().read(key)

    def children(self, prefix: str = "") -> Keys:
        if self.down:
            raise StoreUnavailable("the network is down")
        return super().children(prefix)


def test_storage_out_of_reach_is_waited_for(memory, server, caplog):
    store = Switched(memory.store.url)
    run = Run(config=memory.config, run_id=memory.run_id, store=store)
    store.down = True
    commit(memory, 1)
    with pytest.raises(StoreUnavailable):
        watching(server, run).look()
    lines = lambda: [r.getMessage() for r in caplog.records if "cannot look" in r.getMessage()]
    with caplog.at_level(logging.WARNING), watching(server, run, poll_s=POLL_S) as follower:
        wait_until(lambda: len(lines()) >= 3)
        assert [line.split(" in ")[1].split(" s")[0] for line in lines()[:3]] == [
            "0.1",
            "0.2",
            "0.4",
        ]
        assert "the network is down" in lines()[0]
        assert server.model_id == served_id(memory, 0)
        store.down = False
        wait_until(lambda: follower.round == 1)
    assert server.updater.failures == 0


def test_an_update_by_hand_stays_until_the_next_round(memory: Run, server: PolicyServer) -> None:
    commit(memory, 1)
    follower = watching(server, memory)
    follower.look()
    server.updater.swap(weights(memory, 9), 9, parameters_digest(weights(memory, 9)))
    follower.look()
    assert server.model_id == served_id(memory, 9)
    commit(memory, 2)
    follower.look()
    assert server.model_id == served_id(memory, 2)


def test_it_waits_for_an_update_that_is_under_way(memory: Run, server: PolicyServer) -> None:
    begun, release = threading.Event(), threading.Event()

    def read(served: Served) -> Loaded:
        begun.set()
        assert release.wait(60)
        return read_checkpoint(memory, 0, None, served)

    source = Source(kind="disk", place="held", read=read)
    loading = threading.Thread(target=server.updater.load, args=(source,))
    loading.start()
    assert begun.wait(60)
    commit(memory, 1)
    follower = watching(server, memory)
    follower.look()
    assert (follower.round, server.updater.failures) == (0, 0)
    release.set()
    loading.join(60)
    follower.look()
    assert server.model_id == served_id(memory, 1)


def target(run: Run, version: int) -> Target:
    """The request of a trainer without staleness."""
    ref = committed_checkpoint(run, version)
    assert ref is not None
    return Target(
        run_sha256=run_sha256(run.folder),
        version=version,
        through=version + 1,
        parameters_digest=str(manifest_of(run.store, ref).extra["parameters_digest"]),
    )


def test_a_server_announces_what_it_serves_and_serves_what_is_asked_for(caplog):
    run = small_run(f"memory://{uuid.uuid4().hex}")
    commit(run, 0)
    board = FleetBoard(run.folder, None)
    tokenizer = character_tokenizer()
    server = proven_server(read_checkpoint(run, 0), tokenizer, run.config)
    chosen = Announcement(labels={"zone": "eu"})
    registration = Registration(run, run.config, server.engine, chosen, every_s=0.05)

    def beat() -> Heartbeat | None:
        return next((h for h in board.heartbeats() if isinstance(h, Heartbeat)), None)

    def version() -> int:
        return server.engine.policy.weight_version

    try:
        url = server.start()
        registration.start(url)
        wait_until(lambda: (heard := beat()) is not None and heard.beat >= 2)
        first = beat()
        assert first is not None
        assert (first.url, first.labels, first.weight_version) == (url, {"zone": "eu"}, 0)
        assert (first.slots, first.queued, first.model) == (server.engine.slots, 0, server.model_id)
        # The canary was answered before the first beat.
        assert (first.tokens_per_second, first.idle) == (0.0, 1.0)
        take = whole_checkpoints(server.updater, run)
        told = registration.answer
        with CheckpointWatcher(take, run, 0, board=board, answer=told, poll_s=0.02):
            board.aim(target(run, 0))
            commit(run, 1)
            time.sleep(0.2)
            assert version() == 0, "round 0 is still being sampled"
            board.aim(target(run, 1))
            wait_until(lambda: version() == 1)
            board.aim(target(run, 0))  # a run that is resumed goes back by one
            wait_until(lambda: version() == 0)
            commit(run, 2)  # the trainer of that target can be no further: another one is at work
            wait_until(lambda: version() == 2)
            board.aim(target(run, 1))
            wait_until(lambda: version() == 1)
            board.release()
            wait_until(lambda: version() == 2)
            with caplog.at_level(logging.WARNING):
                FleetBoard(run.folder, "token of another").aim(target(run, 0))
                wait_until(lambda: "asks for is ignored" in caplog.text)
            assert version() == 2
            wait_until(lambda: (heard := beat()) is not None and heard.weight_version == 2)
    finally:
        registration.stop()
        server.stop()
    assert board.heartbeats() == []


def test_an_address_that_means_all_of_a_machine_is_its_name() -> None:
    assert reachable("http://127.0.0.1:8000/v1") == "http://127.0.0.1:8000/v1"
    assert "0.0.0.0" not in reachable("http://0.0.0.0:8000/v1")
    assert reachable("http://[::]:8000/v1").endswith(":8000/v1")
    named = announcement_of(["zone=eu", "rack=3"], "https://engines.example.org/v1/")
    assert named.labels == {"zone": "eu", "rack": "3"}
    assert named.url == "https://engines.example.org/v1"


@pytest.mark.parametrize(
    ("labels", "url", "expected"),
    [(["zone"], None, "NAME=VALUE"), (None, "a:8000", "http://HOST"), (None, "http://a", "/v1")],
)
def test_labels_and_addresses_are_checked(labels, url, expected):
    with pytest.raises(ConfigError, match=expected):
        announcement_of(labels, url)

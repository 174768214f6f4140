"""A server that announces itself, and follows what a run's trainer asks it to serve."""

import logging
import time
import uuid

import pytest
from support.policy_runs import commit, small_run
from support.servers import wait_until

from marin_rl.errors import ConfigError
from marin_rl.serving.launch import proven_server
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint
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
from marin_rl.storage.runs import Run, committed_checkpoint
from marin_rl.tokenizers import TokenizerIdentity, character_tokenizer

pytestmark = pytest.mark.usefixtures("compiled_quickly")


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


def test_a_server_announces_what_it_serves_and_serves_what_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = small_run(f"memory://{uuid.uuid4().hex}")
    commit(run, 0)
    board = FleetBoard(run.folder, None)
    tokenizer = character_tokenizer()
    server = proven_server(read_checkpoint(run, 0), tokenizer, run.config)
    names = TokenizerIdentity.of(tokenizer)
    chosen = Announcement(labels={"zone": "eu"})
    registration = Registration(run, run.config, names, server.engine, chosen, every_s=0.05)

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
def test_labels_and_addresses_are_checked(
    labels: list[str] | None, url: str | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        announcement_of(labels, url)

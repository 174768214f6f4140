"""Records of workers with the root alone: signed, replaced, and alive by the reader's own clock."""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.policy_runs import small_run

from marin_rl.config import RetentionConfig
from marin_rl.errors import CorruptObject
from marin_rl.storage.fleet import FLEET
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.upkeep.gc import collect
from marin_rl.storage.workers import SamplingOrder, WorkerBeat, WorkerBoard, WorkerWatch
from marin_rl.types import Canary, ServedPolicy, SlotRef

NOW = time.time()
BEAT = WorkerBeat(
    worker="worker-a",
    run_sha256="0" * 64,
    beat=1,
    chunks=(3, 5),
    weight_version=2,
    groups=7,
    started_at=NOW,
    beat_at=NOW,
)
ORDER = SamplingOrder(
    run_sha256="0" * 64,
    code="1" * 64,
    stream="2" * 64,
    state="open",
    rounds=8,
    rounds_taken=3,
    groups_open_max=12,
    claim_s=3600.0,
    policy=ServedPolicy(
        endpoints=(),
        model="policy@00002-33333333",
        weight_version=2,
        parameters_digest="3" * 64,
        tokenizer_digest="t",
        chat_template_digest="c",
        checkpoint=SlotRef(slot="checkpoints/round-00002", sha256="4" * 64),
        canary=Canary(temperature=0.5, token_ids=(1, 2), logprobs=(-0.5, -1.0), tolerance=1e-3),
    ),
)


def test_an_order_is_what_was_announced_last(store: ObjectStore) -> None:
    board = WorkerBoard(store, "token")
    assert board.order() is None
    board.announce(ORDER)
    read = board.order()
    assert read == ORDER
    assert read is not None
    assert read.policy.canary == ORDER.policy.canary, "which no equality of policies compares"
    closed = replace(ORDER, state="closed", commit_every_s=2.5)
    board.announce(closed)
    assert board.order() == closed
    assert not closed.replaces(ORDER)
    with pytest.raises(CorruptObject, match="signed with this process's API token, found another"):
        WorkerBoard(store, "another").order()


def test_a_heartbeat_is_replaced_and_withdrawn(store: ObjectStore) -> None:
    board = WorkerBoard(store, None)
    board.beat(BEAT)
    board.beat(replace(BEAT, beat=2, chunks=()))
    WorkerBoard(store, "forged").beat(replace(BEAT, worker="worker-b"))
    assert board.beats() == {"worker-a": replace(BEAT, beat=2, chunks=())}
    board.withdraw("worker-a")
    assert board.beats() == {}


def test_a_worker_is_alive_while_its_beat_goes_on(store: ObjectStore) -> None:
    """Its own clock says nothing: the beats are of the year 1970."""
    board, now = WorkerBoard(store, None), 0.0
    watch = WorkerWatch(board, lost_s=60, clock=lambda: now)
    asked = {"flow", "worker-a", "worker-b"}
    assert watch.gone(asked) == {"worker-a", "worker-b"}, "not the flow, which writes none"
    board.beat(replace(BEAT, beat_at=0.0))
    now = 1.0
    assert watch.gone(asked) == {"worker-b"}
    now = 50.0
    board.beat(replace(BEAT, beat=2, beat_at=0.0))
    watch.look()
    now = 100.0
    watch.look()
    assert watch.alive["worker-a"].beat == 2
    now = 111.0
    watch.look()
    assert watch.alive == {}
    assert watch.gone(asked) == {"worker-a", "worker-b"}


def test_a_worker_that_started_after_the_last_look_is_not_gone(store: ObjectStore) -> None:
    """Its claim is read before the next look is due; its chunks would be sampled twice."""
    board, now = WorkerBoard(store, None), 0.0
    watch = WorkerWatch(board, lost_s=60, clock=lambda: now)
    board.beat(BEAT)
    assert watch.gone({"worker-a", "worker-z"}) == {"worker-z"}
    board.beat(replace(BEAT, worker="worker-b"))
    assert watch.gone({"worker-a", "worker-b", "worker-z"}) == {"worker-z"}
    board.withdraw("worker-b")
    now = 2.0
    assert watch.gone({"worker-a", "worker-b"}) == {"worker-b"}


def test_gc_removes_the_heartbeats_of_workers_that_are_long_gone(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    board = WorkerBoard(run.folder, None)
    board.announce(ORDER)
    board.beat(BEAT)
    board.beat(replace(BEAT, worker="worker-old", beat_at=NOW - timedelta(days=10).total_seconds()))
    collect(run, RetentionConfig(), now=datetime.fromtimestamp(NOW, UTC))
    assert board.beats() == {"worker-a": BEAT}
    assert f"{FLEET}/sampling.json" in run.folder.list(FLEET)

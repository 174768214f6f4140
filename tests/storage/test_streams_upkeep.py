"""A stream on a remote store is read with a bounded number of its objects in memory."""

import gc
import threading
import uuid
import weakref
from dataclasses import replace

import pytest
from support.streams import Streaming, made

from marin_rl.rollouts.streaming import now_utc
from marin_rl.storage.layout import STREAM
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import MemoryStore
from marin_rl.storage.tables.intakes import collect_shard
from marin_rl.storage.tables.parquet import FETCHES_MAX
from marin_rl.storage.tables.stream import GroupStream
from marin_rl.storage.upkeep.streams import waiting_rollouts

GROUPS = 3 * FETCHES_MAX


class Held(bytearray):
    """The bytes of an object, which can be asked when they are given back."""


class CountingStore(MemoryStore):
    """A store that counts how many objects of the stream that it has read are in memory at once."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._lock = threading.Lock()
        self.reads = self.now = self.peak = 0

    def read(self, key: str) -> Held | bytes:  # type: ignore[override]
        """Read an object; count one of the stream until it is collected."""
        if not key.startswith(STREAM):
            return super().read(key)
        data = Held(super().read(key))
        with self._lock:
            self.reads += 1
            self.now += 1
            self.peak = max(self.peak, self.now)
        weakref.finalize(data, self._given_back)
        return data

    def check(self, reads: int) -> None:
        """Check that objects were read, few at once, and that all were given back."""
        gc.collect()
        assert self.reads >= reads
        assert self.now == 0
        assert self.peak <= FETCHES_MAX + 2, "those under way, that which is decoded, the next one"

    def _given_back(self) -> None:
        with self._lock:
            self.now -= 1


@pytest.mark.slow
def test_objects_of_a_remote_stream_in_memory_are_as_many_as_are_fetched_at_once() -> None:
    streaming = filled()
    streaming.chain(1).append(made([GROUPS, GROUPS + 1]))
    run, store = counted(streaming.run)
    assert waiting_rollouts(run) == 2 * (GROUPS + 2)
    store.check(GROUPS + 1)


def filled() -> Streaming:
    """A stream on a store that is not local, of GROUPS groups with an object each."""
    streaming = Streaming(f"memory://{uuid.uuid4().hex}", groups=GROUPS)
    streaming.put(*((number, 0) for number in range(GROUPS)))
    return streaming


def counted(run: Run) -> tuple[Run, CountingStore]:
    """The run over a store that counts what is in memory."""
    store = CountingStore(run.store.url)
    return replace(run, store=store), store


@pytest.mark.slow
def test_a_trainer_reads_its_stream_with_as_few_objects_in_memory() -> None:
    """Groups as they come, claims, and the shard of a round."""
    streaming = filled()
    for chunk in range(GROUPS):
        streaming.stream.claim(chunk, "w", 0, now_utc())
    intake = streaming.take(0)
    run, store = counted(streaming.run)
    stream = GroupStream(run)
    stream.look()
    assert len(stream.claims) == GROUPS
    assert len(stream.groups) == GROUPS
    store.check(2 * GROUPS)
    run, store = counted(streaming.run)
    collect_shard(run, 0, 0, intake)
    store.check(GROUPS)

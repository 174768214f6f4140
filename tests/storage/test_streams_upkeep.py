"""Counts of what waits in a stream, with a bounded number of objects in memory."""

import gc
import threading
import uuid
import weakref
from dataclasses import replace

from support.streams import Streaming, made

from marin_rl.storage.stores.filesystem import MemoryStore
from marin_rl.storage.tables.parquet import FETCHES_MAX
from marin_rl.storage.upkeep.streams import waiting_rollouts

GROUPS = 3 * FETCHES_MAX


class Held(bytearray):
    """The bytes of an object, which can be asked when they are given back."""


class CountingStore(MemoryStore):
    """A store that counts how many of the objects it has read are in memory at once."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._lock = threading.Lock()
        self.reads = self.now = self.peak = 0

    def read(self, key: str) -> Held:  # type: ignore[override]
        """Read an object, and count it until it is collected."""
        data = Held(super().read(key))
        with self._lock:
            self.reads += 1
            self.now += 1
            self.peak = max(self.peak, self.now)
        weakref.finalize(data, self._given_back)
        return data

    def _given_back(self) -> None:
        with self._lock:
            self.now -= 1


def test_objects_of_a_remote_stream_in_memory_are_as_many_as_are_fetched_at_once() -> None:
    streaming = Streaming(f"memory://{uuid.uuid4().hex}", groups=GROUPS)
    streaming.put(*((number, 0) for number in range(GROUPS)))
    streaming.chain(1).append(made([GROUPS, GROUPS + 1]))
    store = CountingStore(streaming.run.store.url)
    run = replace(streaming.run, store=store)
    assert waiting_rollouts(run) == 2 * (GROUPS + 2)
    gc.collect()
    assert store.reads >= GROUPS + 1
    assert store.now == 0
    assert store.peak <= FETCHES_MAX + 2, "those under way, that which is decoded, the next one"

"""Orders and heartbeats in a simulated world: the real records, and their law.

A trainer ends its order, and waits for what workers have under way, before each policy and at each
pause. From then on no worker that is alive claims or commits anything, until an order is open. One
that stalled for longer than `LOST_S` may: its groups are of an older policy, and say so.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from support.fakes import served_policy

from marin_rl.errors import StorageError
from marin_rl.rollouts.interruption import Interruption
from marin_rl.rollouts.worker_pulse import Pulse
from marin_rl.storage.commits import manifest_key, read_manifest
from marin_rl.storage.fleet import FLEET, WORKER_SUFFIX, Item
from marin_rl.storage.layout import checkpoint_slot, claim_of, pack_of, partial_of, stream_group_of
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.tables.stream import claim_in
from marin_rl.storage.workers import (
    BEAT_S,
    LOST_S,
    SAMPLING_KEY,
    SamplingOrder,
    State,
    WorkerBoard,
    WorkerWatch,
)
from marin_rl.types import Canary, SlotRef

POLL_S = 7.0  # of a trainer that waits: in some polls a worker that stalls is lost
PAUSE = 3  # operations of a trainer between its orders
CHUNKS_MAX = 3  # of a worker
CANARY = Canary(temperature=1.0, token_ids=(1,), logprobs=(-1.0,), tolerance=1e-3)


class SmallBoard(WorkerBoard):
    """A board whose records are read one after the other."""

    def each(self, suffix: str, read: Callable[[str], Item | None]) -> list[Item]:
        """Results of `read` by the name of each record with a suffix."""
        names = [name for name in self.folder.children(FLEET) if name.endswith(suffix)]
        return [item for item in map(read, names) if item is not None]


@dataclass
class OrderLaw:
    """Orders and heartbeats as the bucket has them: AssertionError for chunks begun or committed
    while all is quiet.
    """

    world: Any
    orders: int = 0  # that were written
    beats: dict[str, datetime] = field(default_factory=dict[str, datetime])  # by worker, its last
    lost: frozenset[str] | None = None  # workers, at the time that all was quiet; None if it is not

    def note(self, key: str, data: bytes) -> bool:
        """Note a record; False where the object is another one."""
        if key == SAMPLING_KEY:
            order, objects = json.loads(data)["sampling"], self.world.bucket.objects
            ordered = manifest_key(order["checkpoint"])
            assert ordered in objects, "workers are to sample by what is not committed"
            self.orders += 1
            self.lost = None if order["state"] == "open" else self.lost
            return True
        if key.startswith(f"{FLEET}/"):
            self.beats[key.removeprefix(f"{FLEET}/").removesuffix(WORKER_SUFFIX)] = self.world.clock
            return True
        return False

    def is_quiet(self) -> None:
        """From now on, until an order is open, workers that are alive begin and commit nothing."""
        limit = self.world.clock - timedelta(seconds=LOST_S)
        self.lost = frozenset(name for name, at in self.beats.items() if at < limit)

    def check(self, key: str, data: bytes) -> None:
        """Check that no worker that is alive writes into the stream while all is quiet."""
        if self.lost is None or (writer := _writer_of(key, data)) not in self.beats:
            return
        ended = self.world.processes[_number_of(writer)].result is not None
        assert ended or writer in self.lost, f"{writer} writes {key} after its trainer saw none"


def _writer_of(key: str, data: bytes) -> str:
    """The process that claims or commits an object of the stream; nothing for other objects."""
    if claim_of(key) is not None:
        return claim_in(data, key).worker
    if any(of(key) is not None for of in (stream_group_of, pack_of, partial_of)):
        return f"attempt-{int(json.loads(data)['attempt'].rpartition('-')[2], 16) // 1000:03d}"
    return ""


def _number_of(name: str) -> int:
    return int(name.rpartition("-")[2])


@dataclass
class Orders:
    """A process's side of orders: its board, a trainer's order, and its view of the workers."""

    player: Any

    def __post_init__(self) -> None:
        world = self.player.world
        self.board = SmallBoard(self.player.store, None)
        self.watch = WorkerWatch(self.board, clock=lambda: world.clock.timestamp())
        self.closed = -1  # number of the order that this process closed
        world.bucket.objects.setdefault(RUN_KEY, b"{}")

    def announce(self, version: int, state: State) -> None:
        """Write the order to sample by a checkpoint."""
        slot = checkpoint_slot(version)
        manifest = read_manifest(self.player.store, slot)
        sha256 = "0" * 64 if manifest is None else manifest[1]
        checkpoint = SlotRef(slot=slot, sha256=sha256)
        policy = served_policy(
            "", "policy", weight_version=version, checkpoint=checkpoint, canary=CANARY
        )
        digest = "0" * 64
        self.board.announce(
            SamplingOrder(
                run_sha256=digest, code=digest, stream=digest, state=state, rounds=1,
                rounds_taken=0, groups_open_max=1, claim_s=1.0, policy=policy,
            )
        )  # fmt: skip

    def close(self, version: int) -> None:
        """Have workers begin nothing further."""
        self.announce(version, "closed")
        self.closed = self.player.world.order_law.orders

    def wait(self) -> None:
        """Wait until no worker that is alive has a chunk under way."""
        while not self.watch.drained():
            self.player.world.clock += timedelta(seconds=POLL_S)

    def pause(self, version: int) -> None:
        """End the order, and do something else once it is obeyed."""
        world = self.player.world
        world.drain(self, version)
        if world.order_law.orders == self.closed:  # or another trainer has ordered since
            world.order_law.is_quiet()
        for _ in range(PAUSE):
            self.player.store.list(FLEET)

    def work(self) -> None:
        """Sample some chunks by the order as it is now, as long as that is in force."""
        player, world = self.player, self.player.world
        player.pulse = pulse = Pulse(
            player.run, self.board, player.process.name, BEAT_S, lambda: world.clock.timestamp()
        )
        order = pulse.order  # once: it may be old by the time that a chunk is begun
        try:
            pulse.write()
            for _ in range(CHUNKS_MAX):
                if order is None or order.state != "open":
                    break
                pulse.begun, pulse.interruption = order, Interruption()
                if not player.sample(order.policy.weight_version):
                    break
                pulse.chunks = ()
                pulse.write()
        except StorageError:
            with suppress(StorageError):
                self.board.withdraw(pulse.name)
            raise
        self.board.withdraw(pulse.name)


Begin = Callable[[Pulse, int], bool]
Drain = Callable[[Orders, int], None]


def begins(pulse: Pulse, chunk: int) -> bool:
    """Announce a chunk, and read the order once more: the protocol."""
    assert pulse.begun is not None, "a worker samples by an order"
    return pulse.may_begin(pulse.begun, chunk)


def begins_between_heartbeats(pulse: Pulse, chunk: int) -> bool:
    """Wrong: the next heartbeat says what is under way."""
    pulse.chunks = (chunk,)
    return True


def looks_before_it_announces(pulse: Pulse, chunk: int) -> bool:
    """Wrong: the order may be over by the time that the trainer can read of the chunk."""
    latest, pulse.chunks = pulse.look(), (chunk,)
    pulse.write()
    return latest is not None and latest.state == "open"


def drains(orders: Orders, version: int) -> None:
    """Close the order, and then wait: the protocol."""
    orders.close(version)
    orders.wait()


def drains_before_it_closes(orders: Orders, version: int) -> None:
    """Wrong: a chunk may begin between the last look and the end of the order."""
    orders.wait()
    orders.close(version)

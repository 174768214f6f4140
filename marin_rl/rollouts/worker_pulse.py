"""Heartbeats of a worker that has the root alone, and its look at the trainer's order.

Leaves out what a worker does by an order (`root_worker`), and the records themselves
(`storage.workers`).
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from marin_rl.errors import StorageError
from marin_rl.inference.client.fleet_sources import worker_board
from marin_rl.rollouts.interruption import Interruption
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.runs import Run
from marin_rl.storage.workers import SamplingOrder, WorkerBeat, WorkerBoard
from marin_rl.types import ServedPolicy

LOOK_S = 0.5  # between two looks at the order, and at the stream while there is no room
STOP_S = 10.0

_log = logging.getLogger(__name__)


class Pulse:
    """Heartbeats of a worker, and its look at the trainer's order, in a thread of their own.

    The event loop may be busy for seconds; a worker that is alive is to beat all the same.
    """

    def __init__(
        self,
        run: Run,
        board: WorkerBoard,
        name: str,
        beat_s: float | int,
        clock: Callable[[], float] = time.time,  # that heartbeats are dated by
    ) -> None:
        self.name, self.board, self.order = name, board, board.order()
        self.chunks: tuple[int, ...] = ()
        self.version, self.groups = -1, 0
        self.interruption, self.begun = Interruption(), self.order
        self._beat_s, self._run_sha256 = float(beat_s), run_sha256(run.folder)
        self._goes_on = run.config.in_flight_updates  # what is under way, with the next policy
        self._clock = clock
        self._beat, self._started_at, self._due = 0, clock(), 0.0
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._live, name="pulse", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat, before anything is claimed. Raises StorageError."""
        self.write()
        self._thread.start()

    def stop(self) -> None:
        """Beat no more, and withdraw the heartbeat."""
        self._stopping.set()
        self._thread.join(STOP_S)
        try:
            self.board.withdraw(self.name)
        except StorageError as error:
            _log.warning("the heartbeat of %s stays: %s", self.name, error)

    def write(self) -> None:
        """Write a heartbeat. Raises StorageError."""
        with self._lock:
            self._beat += 1
            self.board.beat(
                WorkerBeat(
                    worker=self.name,
                    run_sha256=self._run_sha256,
                    beat=self._beat,
                    chunks=self.chunks,
                    weight_version=self.version,
                    groups=self.groups,
                    started_at=self._started_at,
                    beat_at=self._clock(),
                )
            )
            self._due = time.monotonic() + self._beat_s

    def may_begin(self, order: SamplingOrder, chunk: int) -> bool:
        """Announce a chunk that is about to be claimed; False where the order is over by now.

        The trainer ends its order, and then reads who has something under way. A worker writes that
        it has, and then reads the order: one of the two sees the other, and nothing begins unseen.
        Raises StorageError.
        """
        self.chunks = (chunk,)
        self.write()
        latest = self.look()
        return latest is not None and latest.state == "open" and not latest.replaces(order)

    def look(self) -> SamplingOrder | None:
        """Read the order; where it ends what is under way, say so. Raises StorageError."""
        # Both before the order is read: with a later one new chunks would be ended by an old order.
        begun, interruption = self.begun, self.interruption
        self.order = order = self.board.order()
        closed = order is None or order.state != "open"
        if begun is not None and (closed or self._is_replaced(begun, order)):
            interruption.request(between_groups=True)
        return order

    def _is_replaced(self, begun: SamplingOrder, order: SamplingOrder | None) -> bool:
        """True if what is under way by one order ends before the next one's policy samples."""
        return not self._goes_on and order is not None and order.replaces(begun)

    def _live(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self.look()
                if time.monotonic() >= self._due:
                    self.write()
            except StorageError as error:  # a store that is away for a while; others say why
                _log.warning("worker %s: %s", self.name, error)


async def watch_order(run: Run, policy: ServedPolicy, interruption: Interruption) -> None:
    """Request an interruption once a run's trainer closes its sampling, or goes on.

    Where new weights come in flight, going on ends nothing.

    For workers of a pool and nodes of a cluster, which get no request of another machine.
    """
    if run.config.without_root_workers:
        return
    board = worker_board(run)
    while True:
        try:
            order = await asyncio.to_thread(board.order)
        except StorageError as error:
            _log.warning("cannot look for the order of %s: %s", run.run_id, error)
        else:
            done = order is None or order.state != "open"
            goes_on = run.config.in_flight_updates
            if done or (order and order.policy.checkpoint != policy.checkpoint and not goes_on):
                interruption.request(between_groups=True)
                return
        await asyncio.sleep(LOOK_S)

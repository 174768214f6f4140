"""The order of a flow to workers that have the root alone, and its view of them.

The trainer's side of `marin-rl sample`: the order by which they sample (`storage.workers`), the
wait for what they have under way, and the error where there is none of them. Leaves out their own
side (`rollouts.root_worker`).
"""

import asyncio
import time
from collections.abc import Collection

from marin_rl.errors import FleetEmpty, StorageError
from marin_rl.inference.client.fleet_sources import worker_board
from marin_rl.rollouts.root_worker import stream_digest
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.provenance import code_digest
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.stream import Claim
from marin_rl.storage.workers import SamplingOrder, State, WorkerWatch
from marin_rl.types import ServedPolicy
from tasks.options import in_thread

POLL_S = 0.5


class RootWorkers:
    """Workers of a run that have the root alone, as its flow sees them.

    Where a run cannot have such workers nothing is written, and there are none.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._config = run, run.config
        self._serves = not self._config.without_root_workers
        self._board = worker_board(run)
        self._watch = WorkerWatch(self._board)
        self._order: SamplingOrder | None = None
        self._missed_since: float | None = None

    @property
    def alone(self) -> bool:
        """True where the flow itself samples nothing."""
        return self._config.flow.runner == "root"

    async def open(self, policy: ServedPolicy, rounds_taken: int) -> None:
        """Have workers sample by a policy that is served and proven. Raises StorageError."""
        if not self._serves:
            return
        asynchrony = self._config.asynchrony
        assert asynchrony is not None, "a window is configured"
        order = SamplingOrder(
            run_sha256=await in_thread(run_sha256, self._run.folder),
            code=await in_thread(code_digest),
            stream=await in_thread(stream_digest, self._config, policy),
            state="open",
            rounds=self._config.rounds,
            rounds_taken=rounds_taken,
            groups_open_max=self._config.inflight_groups_max,
            claim_s=asynchrony.seconds_of_claims,
            commit_every_s=asynchrony.commit_every_s,
            policy=policy,
        )
        # First: a store that does not answer may have written it, and then it is to be closed.
        self._order, self._missed_since = order, None
        await in_thread(self._board.announce, order)

    async def close(self, state: State = "closed") -> None:
        """Have workers begin no further group until the next `open`. Raises StorageError.

        With `state` ended the run is over, and they end too.
        """
        if not self._serves:
            return
        order = self._order or await in_thread(self._known)
        if order is not None and order.state not in (state, "ended"):
            await in_thread(self._board.announce, order.in_state(state))
            self._order = order.in_state(state)

    def _known(self) -> SamplingOrder | None:
        """The order of an earlier process of this run, where it can be read.

        Raises StoreUnavailable: workers may go on by an order that was not read.
        """
        try:
            return self._board.order()
        except StorageError as error:
            if error.transient:
                raise
            return None  # one of another token is none

    async def drained(self) -> None:
        """Wait until no worker that is alive has a chunk under way; the order is over."""
        while self._serves:
            if await in_thread(self._watch.drained):
                return
            await asyncio.sleep(POLL_S)

    async def gone(self, claims: Collection[Claim]) -> frozenset[str]:
        """Those workers with claims that are not alive any more."""
        if not self._serves:
            return frozenset()
        return await in_thread(self._watch.gone, {claim.worker for claim in claims})

    def check(self, *, needed: bool) -> None:
        """Raise FleetEmpty where workers are needed, and none was there for long enough."""
        if not needed or self._watch.alive:
            self._missed_since = None
            return
        now = time.monotonic()
        self._missed_since = now if self._missed_since is None else self._missed_since
        limit_s = self._config.inference.fleet_timeout_s
        if now - self._missed_since > limit_s:
            raise FleetEmpty(
                f"flow.runner is root, and no worker was there for {limit_s:g} s "
                f"(inference.fleet_timeout_s): start one (marin-rl sample {self._run.run_id} "
                f"--root {self._run.config.root} --follow) and run again: nothing is lost"
            )

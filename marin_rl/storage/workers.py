"""The order by which the workers of a run sample, and heartbeats of those with the root alone.

`.fleet/sampling.json` is written by the run's trainer again and again, `.fleet/NAME.worker.json` by
one worker each. Like the records of servers they commit nothing: a worker that reads an old record
samples by an older policy, which its groups say, and which the bound of staleness judges. Whether a
worker is alive is never read off its clock: it is while its beat goes on under the reader's own.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from marin_rl.errors import ObjectMissing, StorageError
from marin_rl.storage.canaries import canary_in
from marin_rl.storage.fleet import FLEET, WORKER_SUFFIX, SignedRecords
from marin_rl.types import ServedPolicy, SlotRef
from schemas.fleet import SamplingEnvelope, WorkerEnvelope

SAMPLING_KEY = f"{FLEET}/sampling.json"
WORKERS = "worker-"  # names of workers that write heartbeats begin so
BEAT_S = 5.0
LOST_S = 60.0  # without a beat, after which others sample what a worker claimed
LOOK_S = 1.0  # between two looks at the heartbeats

State = Literal["open", "closed", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOrder:
    """The policy and settings to sample by: see `schemas.fleet.SamplingRecord`."""

    run_sha256: str
    code: str
    stream: str
    state: State
    rounds: int
    rounds_taken: int
    groups_open_max: int
    claim_s: float
    policy: ServedPolicy
    commit_every_s: float | None = None

    def in_state(self, state: State) -> "SamplingOrder":
        """The same in another state."""
        return replace(self, state=state)

    def replaces(self, earlier: "SamplingOrder") -> bool:
        """True if what is sampled by an earlier order is of another policy than this one's."""
        return self.policy.checkpoint != earlier.policy.checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBeat:
    """Self-description of a worker: see `schemas.fleet.WorkerRecord`."""

    worker: str
    run_sha256: str
    beat: int
    chunks: tuple[int, ...]
    weight_version: int
    groups: int
    started_at: float
    beat_at: float


class WorkerBoard(SignedRecords):
    """The records of the workers of a run, and of what they are to sample."""

    def announce(self, order: SamplingOrder) -> None:
        """Write what workers are to sample by. Raises StorageError."""
        self.folder.replace(SAMPLING_KEY, self.signed("sampling", _record_of(order)))

    def order(self) -> SamplingOrder | None:
        """The order by which workers are to sample; None where no trainer has said so.

        Raises CorruptObject for a record of another token, NewerSchema, StoreUnavailable.
        """
        try:
            return _order_in(self.opened("sampling", SamplingEnvelope, SAMPLING_KEY))
        except ObjectMissing:
            return None

    def beat(self, beat: WorkerBeat) -> None:
        """Write a worker's heartbeat in the place of its last one. Raises StorageError."""
        self.folder.replace(_key(beat.worker), self.signed("worker", asdict(beat)))

    def withdraw(self, worker: str) -> None:
        """Remove a worker's heartbeat. Raises StorageError."""
        self.folder.delete(_key(worker))

    def beats(self) -> dict[str, WorkerBeat]:
        """The heartbeats that can be read, by worker. Raises StoreUnavailable."""
        return {beat.worker: beat for beat in self.each(WORKER_SUFFIX, self._beat)}

    def _beat(self, name: str) -> WorkerBeat | None:
        try:
            record = self.opened("worker", WorkerEnvelope, f"{FLEET}/{name}")
        except StorageError as error:
            if error.transient:
                raise
            return None  # withdrawn since the listing, or written with another token
        fields: dict[str, Any] = {name: record[name] for name in _BEAT}
        fields["chunks"] = tuple(fields["chunks"])
        return WorkerBeat(**fields)


@dataclass(slots=True)
class WorkerWatch:
    """The workers whose beats go on, as one process sees them by its own monotonic `clock`."""

    board: WorkerBoard
    lost_s: float | int = LOST_S
    clock: Callable[[], float] = time.monotonic
    _seen: dict[str, tuple[WorkerBeat, float]] = field(
        default_factory=dict[str, tuple[WorkerBeat, float]]
    )
    _looked_at: float | None = None
    _gone: frozenset[str] = frozenset()  # by a look after their claims were read

    def look(self, age_s_max: float | int = LOOK_S) -> None:
        """Read the heartbeats, unless that was done less than `age_s_max` seconds ago.

        Raises StoreUnavailable.
        """
        now = self.clock()
        if self._looked_at is not None and now - self._looked_at < age_s_max:
            return
        self._looked_at = now
        seen = {}
        for name, beat in self.board.beats().items():
            before = self._seen.get(name)
            # By counts of beats on this process's own clock: clocks of two machines may differ by
            # more than LOST_S.
            same = before is not None and before[0].beat == beat.beat
            seen[name] = (beat, before[1] if same and before is not None else now)
        self._seen = seen

    def drained(self) -> bool:
        """Look; True if no worker that is alive has a chunk under way. Raises StoreUnavailable.

        For a trainer whose order is over: what it read before may leave out a chunk that began
        since.
        """
        self.look(0)
        return not any(beat.chunks for beat in self.alive.values())

    @property
    def alive(self) -> Mapping[str, WorkerBeat]:
        """The last beat of each worker that is alive, as far as the last look shows."""
        now = self.clock()
        return {n: beat for n, (beat, at) in self._seen.items() if now - at <= self.lost_s}

    def gone(self, workers: Collection[str]) -> frozenset[str]:
        """Look; those of some workers that write heartbeats, and are not alive.

        For workers whose claims were read before this. Raises StoreUnavailable.
        """
        self.look()
        # Others, such as a flow's own tasks, write no heartbeats: of them only a claim's age says
        # anything.
        beating = frozenset(worker for worker in workers if worker.startswith(WORKERS))
        if beating.difference(self.alive, self._gone):
            # One that started since the last look: it wrote a heartbeat before it claimed anything.
            self.look(0)
        self._gone = beating.difference(self.alive)
        return self._gone


_BEAT = tuple(WorkerBeat.__dataclass_fields__)
_PLAIN = (
    "run_sha256", "code", "stream", "state", "rounds", "rounds_taken", "groups_open_max",
    "claim_s", "commit_every_s",
)  # fmt: skip


def _key(worker: str) -> str:
    return f"{FLEET}/{worker}{WORKER_SUFFIX}"


def _record_of(order: SamplingOrder) -> dict[str, Any]:
    policy = order.policy
    assert policy.canary is not None, "policies of a fleet have one"
    return {
        # Without endpoints and keys: a worker samples with its own, and needs none of the
        # trainer's.
        **{name: getattr(order, name) for name in _PLAIN},
        "model": policy.model,
        "weight_version": policy.weight_version,
        "parameters_digest": policy.parameters_digest,
        "tokenizer": policy.tokenizer_digest,
        "chat_template": policy.chat_template_digest,
        "checkpoint": policy.checkpoint.slot,
        "checkpoint_sha256": policy.checkpoint.sha256,
        "canary": asdict(policy.canary),
    }


def _order_in(record: Mapping[str, Any]) -> SamplingOrder:
    policy = ServedPolicy(
        endpoints=(),  # each worker's own configuration names them
        model=record["model"],
        weight_version=record["weight_version"],
        parameters_digest=record["parameters_digest"],
        tokenizer_digest=record["tokenizer"],
        chat_template_digest=record["chat_template"],
        checkpoint=SlotRef(slot=record["checkpoint"], sha256=record["checkpoint_sha256"]),
        canary=canary_in(record["canary"]),
    )
    plain: dict[str, Any] = {name: record.get(name) for name in _PLAIN}
    return SamplingOrder(policy=policy, **plain)

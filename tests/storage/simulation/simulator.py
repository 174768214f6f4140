"""A simulated world for the commit protocol: one bucket, many processes, a scheduler, faults.

Every process is a thread that runs rounds through the real code of storage/commits.py, on a store
that stops at each operation until the scheduler decides its outcome. One thread runs at a time, so
the choices alone decide a schedule. The bucket checks the laws of the protocol at every write and
delete; `World.settle` checks the rest at the end. gc is one more process, and the world has its own
clock.
"""

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from storage.simulation.simulated_process import Bucket, Player, Pruned, rollouts_of

from marin_rl.config import RetentionConfig, parse_config
from marin_rl.errors import (
    CommitExpired,
    CommitUnknown,
    ObjectMissing,
    StorageError,
    StoreUnavailable,
)
from marin_rl.storage import commits
from marin_rl.storage.commits import commit_manifest, manifest_key
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore, PutOutcome
from marin_rl.storage.upkeep.gc import Collection, collect
from marin_rl.types import SlotRef
from schemas.manifests import Manifest, sha256_of

# What may become of a request. "late" gives no answer now, and takes effect when the scheduler
# lets it; "seems another's" is our own write, sent twice by something below us.
CREATE_FATES = ("served", "lost", "refused", "seems another's", "late")
WRITE_FATES = ("served", "lost", "refused", "late")
READ_FATES = ("served", "refused")
WAIT_S = 120.0

Commit = Callable[..., Manifest]
Naming = Callable[[str, str], str]
Gc = Callable[..., Collection]
Work = Callable[[Player], Any]


class Killed(BaseException):
    """The process dies at this operation."""


@dataclass
class Process:
    """One process, stopped before an operation, or ended."""

    name: str
    patient: bool
    operation: tuple[str, str, bytes] | None = None
    result: Any = None
    fate: str = ""
    committing: bool = False
    go: Any = field(default_factory=threading.Lock)
    stopped: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.go.acquire()
        self.stopped.acquire()

    @property
    def deadline_s(self) -> float:
        """Deadline of a commit, in seconds."""
        return 3600.0 if self.patient else 0.0


class StoppingStore(ObjectStore):
    """Store of a process over the shared bucket."""

    def __init__(self, world: "World", process: Process, lead: str = "") -> None:
        self.url, self._world, self._process, self._lead = f"sim://{lead}", world, process, lead

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        fate = self._stop("create", key, data)
        bucket = self._world.bucket
        if fate == "served":
            return bucket.create(key, data)
        if fate in ("lost", "seems another's"):
            bucket.create(key, data)
        if fate == "late":
            self._world.late.append(lambda: bucket.create(key, data) and None)
        return PutOutcome.EXISTS if fate == "seems another's" else PutOutcome.UNKNOWN

    def read(self, key: str) -> bytes:
        if self._stop("read", key) != "served":
            raise StoreUnavailable("503")
        if key not in self._world.bucket.objects:
            raise ObjectMissing(key)
        return self._world.bucket.objects[key]

    def put_part(self, key: str, data: bytes) -> None:
        self._change("write", key, data, lambda: self._world.bucket.write(key, data))

    def delete(self, key: str) -> None:
        self._change("delete", key, b"", lambda: self._world.bucket.delete(key))

    def list(self, prefix: str = "") -> "list[str]":
        if self._stop("list", prefix) != "served":
            raise StoreUnavailable("503")
        lead = f"{prefix}/" if prefix else ""
        return sorted(key for key in self._world.bucket.objects if key.startswith(lead))

    def children(self, prefix: str = "") -> "list[str]":
        lead = f"{prefix}/" if prefix else ""
        return sorted({key[len(lead) :].partition("/")[0] for key in self.list(prefix)})

    def size(self, key: str) -> int:
        return len(self.read(key))

    def local_path(self, key: str) -> None:
        """Nothing here is a file."""

    def url_of(self, key: str) -> str:
        return self.url + key

    def at(self, folder: str) -> ObjectStore:
        """This world has one run."""
        raise AssertionError(folder)

    def _change(self, name: str, key: str, data: bytes, effect: Callable[[], None]) -> None:
        fate = self._stop(name, key, data)
        if fate in ("served", "lost"):
            effect()
        if fate == "late":
            self._world.late.append(effect)
        if fate != "served":
            raise StoreUnavailable("503")

    def _stop(self, name: str, key: str, data: bytes = b"") -> str:
        process = self._process
        process.operation = (name, key, data)
        process.stopped.release()
        assert process.go.acquire(timeout=WAIT_S), "the scheduler went away"
        if process.fate == "killed":
            raise Killed
        return process.fate


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of this world's run."""

    rounds: int = 2
    shards: int = 2


def _unique(attempt: str, name: str) -> str:
    """The name of a part, below its slot."""
    return f"{attempt}/{name}"


class World:
    """A bucket, the processes that work on it, and what is still on its way to it."""

    player_type: type[Player] = Player

    def __init__(
        self,
        shape: Shape | None = None,
        commit: Commit = commit_manifest,
        naming: Naming = _unique,
        gc: Gc = collect,
    ) -> None:
        self.bucket, self.shape, self.config = Bucket(), shape or Shape(), CONFIG
        self.commit, self.naming, self.gc = commit, naming, gc
        self.processes: list[Process] = []
        self.late: list[Callable[[], None]] = []
        self.acknowledged: dict[str, str] = {}
        self.clock = datetime(2026, 1, 1, tzinfo=UTC)

    @property
    def waiting(self) -> list[Process]:
        """Processes that are stopped before an operation."""
        return [process for process in self.processes if process.operation is not None]

    def start(self, work: Work | None = None, *, patient: bool = True) -> Process:
        """A new process, run to its first operation; by default it plays the whole run."""
        process = Process(f"attempt-{len(self.processes):03d}", patient)
        self.processes.append(process)
        player = self.player_type(self, process, StoppingStore(self, process))
        body = (work or self.player_type.play, player)
        start_new_thread(_live, (process, *body))  # Thread.start waits for more
        self._wait(process)
        return process

    def go_on(self, process: Process, fate: str) -> None:
        """Let the process run to its next operation or its end."""
        process.operation, process.fate = None, fate
        process.go.release()
        self._wait(process)

    def collect(self, *, keep: int | None) -> Process:
        """A process that runs gc as it is; `keep` checkpoints keep their arrays, None for all."""
        rule, now = RetentionConfig(checkpoints_last=keep), self.clock

        def work(player: Player) -> Collection:
            run = Run(config=self.config, run_id=self.config.run_id, store=player.store)
            return self.gc(run, rule, now=now)

        return self.start(work)

    def let_days_pass(self, days: float) -> None:
        """Turn the clock. No commit and no request is under way for that long: that is assumed."""
        for process in self.waiting:
            while process.committing and process.operation is not None:
                self.go_on(process, "served")
        while self.late:
            self.late.pop(0)()
        self.clock += timedelta(days=days)

    def kill(self, process: Process, *, served: bool) -> None:
        """End the process, before or after its operation takes effect."""
        assert process.operation is not None
        name, key, data = process.operation
        if served and name in ("create", "write", "delete"):
            {
                "create": lambda: self.bucket.create(key, data),
                "write": lambda: self.bucket.write(key, data),
                "delete": lambda: self.bucket.delete(key),
            }[name]()
        self.go_on(process, "killed")

    def finish(self, process: Process) -> Any:
        """Serve everything that the process still asks for; what it ended with."""
        while process.operation is not None:
            self.go_on(process, "served")
        return process.result

    def settle(self) -> None:
        """From any state one good process ends the run; then every process that still sleeps wakes
        up.
        """
        last = self.finish(self.start())
        assert isinstance(last, SlotRef), f"the last process ended in {last!r}"
        self._rerun(last)
        for process in self.waiting:
            self.finish(process)
        while self.late:
            self.late.pop(0)()
        self._rerun(last)
        self._complete()

    def _rerun(self, last: SlotRef) -> None:
        before = self.bucket.writes
        assert self.finish(self.start()) == replace(last, reused=True)
        assert self.bucket.writes == before, "re-running a committed run wrote something"

    def _complete(self) -> None:
        sealed = [self.bucket.objects[key] for key in self.bucket.objects if "/shard-" in key]
        names = {name for shard in sealed for name in rollouts_of(shard)}
        assert len(sealed) == self.shape.rounds * self.shape.shards
        assert set(self.bucket.consumed) == names, "what is consumed is not what is committed"

    def acknowledge(self, ref: SlotRef) -> None:
        """Record that a commit was reported to its caller: from now on every reader must see it."""
        known = self.acknowledged.setdefault(ref.slot, ref.sha256)
        assert known == ref.sha256, f"two readers saw different commits of {ref.slot}"
        key = ref.slot if "/shard-" in ref.slot else manifest_key(ref.slot)
        found = self.bucket.objects.get(key)
        assert found is not None, f"an acknowledged commit is not there: {key}"
        assert sha256_of(found) == ref.sha256, f"an acknowledged commit is another's: {key}"

    def _wait(self, process: Process) -> None:
        assert process.stopped.acquire(timeout=WAIT_S), "a process hangs"
        if isinstance(process.result, AssertionError):
            raise process.result


def _live(process: Process, work: Work, player: Player) -> None:
    try:
        process.result = work(player)
    except (StorageError, Killed, AssertionError) as error:
        process.result = error
    process.stopped.release()


CONFIG = parse_config({"root": "memory://a-world-has-one-run", "run_id": "run"})


@contextmanager
def clock_of(world: World) -> Iterator[None]:
    """Let commits be dated by a world's clock."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            assert tz is UTC
            return world.clock

    before, commits.datetime = commits.datetime, Clock
    try:
        yield
    finally:
        commits.datetime = before


def ended_well(process: Process) -> bool:
    """True if a process that met faults ended in one of the ways that the protocol allows."""
    passing = Killed | CommitUnknown | CommitExpired | StoreUnavailable
    return isinstance(process.result, SlotRef | Collection | Pruned | passing)

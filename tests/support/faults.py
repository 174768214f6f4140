"""Faults by name for whole runs: the names, the groups, the crash states, and the outcome of a run.

The number of an operation shifts as soon as something is retried, and threads take turns; its name
does not. A name says which operation on which key, for how many-th time, without the parts that
differ by attempt (ids, random file names): `create rollouts/round-00001/shard-0000.parquet #1`. The
names of an undisturbed run are what N counts; a run that meets many faults, one after the other and
over several starts, reports which of them came.

`kill -9` loses a process's memory and nothing else: it leaves the folder as it was at that instant.
So copies of one undisturbed run's folder, one before each operation, are all states of a crash.
"""

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
from support.fault_injection import Operations

from marin_rl.config import Config
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot
from marin_rl.storage.stores.store import is_private
from marin_rl.storage.tables.batches import dispositions_of
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.upkeep.audit import audit_run
from schemas.manifests import Parent, sha256_of

Fault = TypeVar("Fault")

_OF_ONE_ATTEMPT = re.compile(
    r"\d{8}T\d{6}-[0-9a-f]{16}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}"
)


class Names(Generic[Fault]):
    """Gives what comes its names, and says which fault, if any, was kept for it.

    A name is what is asked for, of what, and for how many-th time, without what only one attempt or
    run has in its names: `create rollouts/round-00001/shard-0000.parquet #1`.
    """

    def __init__(self, faults: Mapping[str, Fault] | None = None) -> None:
        self.waiting = dict(faults or {})
        self.seen: list[str] = []
        self._times = Counter[str]()

    def fault(self, what: str) -> Fault | None:
        """The fault of `what`, which comes once more. Not for two threads at once."""
        plain = _OF_ONE_ATTEMPT.sub("*", what)
        self._times[plain] += 1
        self.seen.append(f"{plain} #{self._times[plain]}")
        return self.waiting.pop(self.seen[-1], None)


class NamedOperations(Operations):
    """Operations on the stores below `root`, which suffer by name.

    A file `met` gets the name of each that suffers, a line each, before it does.
    """

    def __init__(
        self, root: str, faults: Mapping[str, str] | None = None, met: Path | None = None
    ) -> None:
        super().__init__()
        self.names = Names[str](faults)
        self._root, self._met = root, met

    def next(self, name: str, url: str) -> str | None:
        """See Operations."""
        with self.lock:
            self.count += 1
            return self.called(f"{name} {url.removeprefix(self._root).strip('/')}")

    def called(self, what: str) -> str | None:
        """Fault for the operation that now comes, by its name."""
        kind = self.names.fault(what)
        if kind is not None and self._met is not None:
            with self._met.open("a", encoding="utf-8") as file:
                file.write(f"{self.names.seen[-1]}\n")
        return kind


SAMPLED = ("rollout_id", "token_ids", "logprobs", "reward", "policy_digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Committed keys; samples and dispositions by round; digests of parameters by checkpoint."""

    slots: tuple[str, ...]
    samples: tuple[pa.Table, ...]
    dispositions: tuple[pa.Table, ...]
    parameters: tuple[str, ...]

    def same_as(self, other: "Outcome") -> list[str]:
        """Names of what differs; empty where nothing does."""
        pairs = {
            "slots": _first_difference(self.slots, other.slots),
            "samples": _first_difference(self.samples, other.samples),
            "dispositions": _first_difference(self.dispositions, other.dispositions),
            "parameters": _first_difference(self.parameters, other.parameters),
        }
        return [f"{name} ({different})" for name, different in pairs.items() if different]


def outcome(config: Config) -> Outcome:
    """The outcome of a finished run, every named byte of which is verified on the way."""
    run, rounds = Run.open(config.root, config.run_id, config.storage_options), config.rounds
    checkpoints = [read_manifest(run.store, checkpoint_slot(round)) for round in range(rounds + 1)]
    batches = [read_manifest(run.store, batches_slot(round)) for round in range(rounds)]
    assert all(found.balanced for found in audit_run(run)), "the audit does not balance"
    _verify(run)
    return Outcome(
        slots=tuple(key for key in run.store.list() if is_commit(key)),
        samples=tuple(t for r in range(rounds) for t in iter_shards(run, r, SAMPLED)),
        dispositions=tuple(dispositions_of(run, item[0]) for item in batches if item),
        parameters=tuple(item[0].extra["parameters_digest"] for item in checkpoints if item),
    )


def committed_digests(config: Config) -> dict[str, str]:
    """The SHA-256 of everything that is committed, by key; every part of it verified."""
    if not Path(config.root, config.run_id, "run.json").exists():
        return {}
    run = Run.open(config.root, config.run_id)
    _verify(run)
    return {key: sha256_of(run.store.read(key)) for key in run.store.list() if is_commit(key)}


def is_commit(key: str) -> bool:
    """True if a key of a run commits something."""
    name = key.rpartition("/")[2]
    return not is_private(key) and (
        name in ("manifest.json", "run.json")
        or name.startswith("shard-")
        or (key.startswith("metrics/") and name.endswith(".parquet"))
    )


def _verify(run: Run) -> None:
    """Every part that a visible manifest names is there, with its SHA-256, below its parents."""
    seen: dict[str, str] = {}
    parents: dict[str, Sequence[Parent]] = {}
    for key in run.store.list():
        if key.endswith("/manifest.json"):
            found = read_manifest(run.store, key.removesuffix("/manifest.json"))
            assert found is not None
            seen[found[0].slot] = found[1]
            for part in found[0].parts:
                name = f"{found[0].slot}/{part.name}"
                assert sha256_of(run.store.read(name)) == part.sha256, f"{name} is torn"
            parents[found[0].slot] = found[0].parents
    for slot, above in parents.items():
        for parent in above:
            assert seen[parent.slot] == parent.sha256, f"{slot} has a parent that is not there"


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """The first item that differs, of a table its first column and row; empty where none does."""
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)} of them"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.equals(b) if isinstance(a, pa.Table) else a == b:
            continue
        return f"item {number}: " + (_cell(a, b) if isinstance(a, pa.Table) else f"{a!r}, {b!r}")
    return ""


def _cell(ours: pa.Table, theirs: pa.Table) -> str:
    """The first column and row in which two tables differ."""
    if ours.schema != theirs.schema or ours.num_rows != theirs.num_rows:
        return f"{ours.num_rows} rows of {ours.schema}, {theirs.num_rows} rows of {theirs.schema}"
    for name in ours.column_names:
        for row, (a, b) in enumerate(
            zip(ours[name].to_pylist(), theirs[name].to_pylist(), strict=True)
        ):
            if a != b:
                return f"{name} of row {row} of {ours.num_rows}: {a!r:.200}, {b!r:.200}"
    return "equal by value, not by layout"


Signature = tuple[tuple[str, int, int], ...]


@dataclass
class CrashStates:
    """Copies of a run's folder; `numbers[i]` are the operations before which copy i was true."""

    run: Path
    copies: Path
    numbers: list[list[int]] = field(default_factory=list)
    _last: Signature | None = None

    def take(self, number: int) -> None:
        """The state before operation `number`."""
        signature = _signature(self.run)
        if signature != self._last:
            self._last = signature
            _copy(self.run, self.copy(len(self.numbers)))
            self.numbers.append([])
        self.numbers[-1].append(number)

    def copy(self, index: int) -> Path:
        """The folder of a copy."""
        return self.copies / f"{index:05d}"


class Recording(NamedOperations):
    """Operations that suffer nothing, with the crash states before each of them."""

    def __init__(self, states: CrashStates) -> None:
        super().__init__(str(states.run.parent))
        self.states = states

    def called(self, what: str) -> str | None:
        """See NamedOperations."""
        self.states.take(self.count)
        return super().called(what)


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to: what it came to, and the states a crash could have left.

    `names` are those of its operations (see the head of this module), in order.
    """

    expected: Outcome
    states: CrashStates
    names: Sequence[str]

    @property
    def operations(self) -> int:
        """N."""
        return len(self.names)


def _signature(folder: Path) -> Signature:
    found = []
    for path in sorted(folder.rglob("*")):
        try:
            status = path.stat()
        except FileNotFoundError:  # a temporary file of another thread
            continue
        if path.is_file():
            found.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return tuple(found)


def _copy(run: Path, target: Path) -> None:
    """Copy file by file: some vanish meanwhile, as they would from under a dying process."""
    target.mkdir(parents=True)
    for path in sorted(run.rglob("*")):
        copy = target / path.relative_to(run)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            _copy_file(path, copy)


def _copy_file(path: Path, copy: Path) -> None:
    """Copy a file unless it is gone."""
    try:
        shutil.copyfile(path, copy)
    except FileNotFoundError:
        copy.unlink(missing_ok=True)

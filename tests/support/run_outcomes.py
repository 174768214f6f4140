"""Outcome of a run without clocks and chance: for comparing two runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from marin_rl.config import Config
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot
from marin_rl.storage.stores.store import is_private
from marin_rl.storage.tables.batches import dispositions_of
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.upkeep.audit import audit_run
from schemas.manifests import Parent, sha256_of

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
            "slots": self.slots == other.slots,
            "samples": _equal(self.samples, other.samples),
            "dispositions": _equal(self.dispositions, other.dispositions),
            "parameters": self.parameters == other.parameters,
        }
        return [name for name, same in pairs.items() if not same]


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


class Digests:
    """SHA-256 of files; one that has the size, time and inode that it had is not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def of(self, path: Path) -> str:
        """The digest of a file as it is now. Raises FileNotFoundError."""
        status = path.stat()
        sign = status.st_size, status.st_mtime_ns, status.st_ino
        if self._known.get(path, (None, ""))[0] != sign:
            self._known[path] = sign, sha256_of(path.read_bytes())
        return self._known[path][1]


def committed_digests(config: Config, digests: Digests | None = None) -> dict[str, str]:
    """The SHA-256 of everything that is committed, by key; every part of it verified.

    With `digests` of an earlier call, what no one has touched since is taken for what it was.
    """
    if not (folder := Path(config.root, config.run_id)).joinpath("run.json").exists():
        return {}
    run, digests = Run.open(config.root, config.run_id), digests or Digests()
    _verify(run, digests)
    return {key: digests.of(folder / key) for key in run.store.list() if is_commit(key)}


def is_commit(key: str) -> bool:
    """True if a key of a run commits something."""
    name = key.rpartition("/")[2]
    return not is_private(key) and (
        name in ("manifest.json", "run.json")
        or name.startswith("shard-")
        or (key.startswith("metrics/") and name.endswith(".parquet"))
    )


def _verify(run: Run, digests: Digests | None = None) -> None:
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
                assert _digest(run, name, digests) == part.sha256, f"{name} is torn"
            parents[found[0].slot] = found[0].parents
    for slot, above in parents.items():
        for parent in above:
            assert seen[parent.slot] == parent.sha256, f"{slot} has a parent that is not there"


def _digest(run: Run, key: str, digests: Digests | None) -> str:
    path = run.store.local_path(key)
    if digests is None or path is None:
        return sha256_of(run.store.read(key))
    return digests.of(path)


def _equal(ours: tuple[pa.Table, ...], theirs: tuple[pa.Table, ...]) -> bool:
    return len(ours) == len(theirs) and all(a.equals(b) for a, b in zip(ours, theirs, strict=True))

"""A run and its paths: run.json, written once, and the slots whose presence is the run's state.

There is no state file. What has happened in a run is which slots are committed, and that is read
from known keys, or from fresh listings when all rounds are asked for. The names of slots are pure
functions here.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from marin_rl.config import Config, content, differences, free_keys, override, parse_config
from marin_rl.errors import ConfigError, CorruptObject, NewerSchema, ObjectMissing, RunLocked
from marin_rl.storage.commits import (
    commit_object,
    fingerprint,
    new_attempt,
    read_manifest,
    ref_of,
)
from marin_rl.storage.filesystem import ObjectStore, open_store, probe
from marin_rl.storage.local import explained
from marin_rl.storage.provenance import code_version, library_versions
from marin_rl.types import SlotRef
from schemas import Malformed, NewerVersion
from schemas.manifests import canonical_json, open_sealed_json, sealed_json

FORMAT = "marin-rl/run"
VERSION = 1
RUN_KEY = "run.json"
LOCK_KEY = ".lock"
SEED_BITS = 48

_ROUND = re.compile(r"round-(\d{5,})")
_STEP = re.compile(r"step-(\d{5,})")


def round_name(round: int) -> str:
    """`round-00012`: never `round=12`, which readers would take for a Hive column."""
    assert round >= 0, f"rounds count from 0, found {round}"
    return f"round-{round:05d}"


def round_of(name: str) -> int | None:
    """The round that a folder or file is named for: `round-00012`, `round-00012.parquet`."""
    match = _ROUND.fullmatch(name.partition(".")[0])
    return int(match[1]) if match else None


def rollouts_slot(round: int) -> str:
    """The slot that seals a round's rollouts."""
    return f"rollouts/{round_name(round)}"


def shard_key(round: int, shard: int) -> str:
    """The object that is one shard of a round's rollouts, and its own commit."""
    return f"{rollouts_slot(round)}/shard-{shard:04d}.parquet"


def batches_slot(round: int) -> str:
    """The slot of a round's training batches and dispositions."""
    return f"batches/{round_name(round)}"


def checkpoint_slot(round: int) -> str:
    """The slot of the policy that round `round` samples from; round 0 is where the run starts."""
    return f"checkpoints/{round_name(round)}"


def sft_slot(step: int) -> str:
    """The slot of the warm start's checkpoint after `step` optimizer steps."""
    return f"sft/step-{step:05d}"


def evals_slot(round: int) -> str:
    """The slot of the evaluation of checkpoint `round`."""
    return f"evals/{round_name(round)}"


def metrics_key(round: int) -> str:
    """The object that holds a round's metrics."""
    return f"metrics/{round_name(round)}.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRef:
    """What tasks hand to each other to name a run: small, and JSON can say it.

    `free` holds the free configuration keys that are not at their default, as `dotted.key=JSON`:
    how this process goes about the run, where run.json keeps what the run is.
    """

    root: str
    run_id: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An existing run. `store` is rooted in the run's own folder."""

    config: Config
    run_id: str
    store: ObjectStore

    @classmethod
    def create_or_open(cls, config: Config) -> "Run":
        """The run that `config` names, created if it is new.

        The free keys of `config` hold for this process. Raises ConfigError, listing the keys, when
        the run exists with another content; RootUnfit when the root cannot carry a run.
        """
        store = _store_of(config)
        found = _read_record(store)
        if found is not None:
            _check_content(found, config, store.url_of(RUN_KEY))
        probe(store)  # of an old run too: before work is wasted on a root that became read-only
        if found is None:
            _check_content(_create_record(store, config), config, store.url_of(RUN_KEY))
        return cls(config=config, run_id=config.run_id, store=store)

    @classmethod
    def open(
        cls, root: str, run_id: str, storage_options: Mapping[str, Any] | None = None
    ) -> "Run":
        """The run as run.json describes it. Raises ObjectMissing naming the runs there are."""
        return cls._open(root, run_id, storage_options or {}, None)

    @classmethod
    def of(cls, ref: RunRef) -> "Run":
        """The run that `ref` names, with its free keys."""
        return cls._open(ref.root, ref.run_id, ref.storage_options, ref.free)

    @classmethod
    def _open(
        cls,
        root: str,
        run_id: str,
        storage_options: Mapping[str, Any],
        free: tuple[str, ...] | None,
    ) -> "Run":
        top = open_store(root, storage_options)
        store = top.at(run_id)
        record = _read_record(store)
        if record is None:
            raise ObjectMissing(
                f"no run {run_id!r} under {root}: expected {store.url_of(RUN_KEY)}; "
                f"found there: {', '.join(top.children()) or 'nothing'}"
            )
        stored = _stored_config(record, store.url_of(RUN_KEY))
        tree = stored.model_dump(mode="json") if free is None else override(content(stored), free)
        tree |= {"root": root, "storage_options": dict(storage_options)}
        return cls(config=parse_config(tree, "run reference"), run_id=run_id, store=store)

    @property
    def reference(self) -> RunRef:
        """The name of this run for other tasks."""
        skip = {"root", "storage_options"}
        tree, defaults = (
            self.config.model_dump(mode="json"),
            Config.model_validate({}).model_dump(mode="json"),
        )
        free = {key: _dig(tree, key) for key in free_keys() if key not in skip}
        return RunRef(
            root=open_store(self.config.root, self.config.storage_options).url,
            run_id=self.run_id,
            storage_options=dict(self.config.storage_options),
            free=tuple(
                f"{key}={json.dumps(value)}"
                for key, value in free.items()
                if value != _dig(defaults, key)
            ),
        )

    def seed_of(self, *parts: str | int) -> int:
        """A seed in [0, 2**48) that depends on the run's seed and name and on `parts` alone."""
        digest = hashlib.sha256(canonical_json([self.config.seed, self.run_id, *parts])).digest()
        return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run on this machine. Raises RunLocked, with the holder's process id.

        The kernel lets go when the process ends, however it ends. Nothing is locked on object
        stores, where the commit protocol alone keeps two processes apart.
        """
        path = self.store.local_path(LOCK_KEY)
        if path is None:
            yield
            return
        with explained(path, 0):
            file = path.open("a+", encoding="utf-8")
        with file:
            _lock(file.fileno(), path)
            _sign(file, f"{os.getpid()}\n")
            try:
                yield
            finally:
                _sign(file, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProgress:
    """Which slots of one round are committed. `checkpoint` is the policy the round starts from."""

    round: int
    shards: int = 0
    rollouts: bool = False
    batches: bool = False
    checkpoint: bool = False
    evaluation: bool = False
    metrics: bool = False


def progress(run: Run) -> dict[int, RoundProgress]:
    """What is committed, by round, ascending: one fresh listing per kind of slot.

    For people and for starting up; the loop itself looks at the known keys of its round.
    """
    found: dict[int, dict[str, Any]] = {}
    for kind in ("rollouts", "batches", "evals", "metrics"):
        for key in run.store.list(kind):
            _, name, *rest = key.split("/")
            round = round_of(name)
            if round is not None:
                _note(found.setdefault(round, {}), kind, "/".join(rest))
    for name in run.store.children("checkpoints"):
        round = round_of(name)
        if round is not None and "manifest.json" in run.store.children(f"checkpoints/{name}"):
            found.setdefault(round, {})["checkpoint"] = True
    return {round: RoundProgress(round=round, **found[round]) for round in sorted(found)}


def committed(run: Run, slot: str) -> SlotRef | None:
    """The reference of a slot that a manifest commits; None while it is not committed."""
    found = read_manifest(run.store, slot)
    return ref_of(found[0], reused=True) if found else None


def committed_checkpoint(run: Run, round: int) -> SlotRef | None:
    """The checkpoint that round `round` samples from, if it is committed."""
    return committed(run, checkpoint_slot(round))


def latest_checkpoint(run: Run) -> SlotRef | None:
    """The committed checkpoint of the highest round: one listing, then one read or two."""
    rounds = (round_of(name) for name in run.store.children("checkpoints"))
    return _latest(run, (checkpoint_slot(round) for round in _falling(rounds)))


def latest_sft(run: Run) -> SlotRef | None:
    """The committed checkpoint of the warm start with the most steps."""
    matches = (_STEP.fullmatch(name) for name in run.store.children("sft"))
    return _latest(run, (sft_slot(step) for step in _falling(m and int(m[1]) for m in matches)))


def refuse_other_content(config: Config) -> None:
    """Raise ConfigError if the run exists with another content. Writes nothing."""
    store = _store_of(config)
    found = _read_record(store)
    if found is not None:
        _check_content(found, config, store.url_of(RUN_KEY))


def runs_under(root: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Names of the runs below `root`, sorted."""
    top = open_store(root, storage_options)
    return [name for name in top.children() if RUN_KEY in top.children(name)]


def _note(round: dict[str, Any], kind: str, rest: str) -> None:
    if kind == "metrics":
        round["metrics"] = True
    elif rest == "manifest.json":
        round["evaluation" if kind == "evals" else kind] = True
    elif kind == "rollouts" and rest.startswith("shard-"):
        round["shards"] = round.get("shards", 0) + 1


def _falling(numbers: Iterator[int | None]) -> list[int]:
    return sorted((number for number in numbers if number is not None), reverse=True)


def _latest(run: Run, slots: Iterator[str]) -> SlotRef | None:
    return next((ref for slot in slots if (ref := committed(run, slot))), None)


def _store_of(config: Config) -> ObjectStore:
    return open_store(config.root, config.storage_options).at(config.run_id)


def _read_record(store: ObjectStore) -> dict[str, Any] | None:
    try:
        data = store.read(RUN_KEY)
    except ObjectMissing:
        return None
    return _parse_record(data, store.url_of(RUN_KEY))


def _parse_record(data: bytes, source: str) -> dict[str, Any]:
    try:
        return open_sealed_json(data, format=FORMAT, version=VERSION)
    except NewerVersion as error:
        raise NewerSchema(f"{source}: {error}") from None
    except Malformed as error:
        raise CorruptObject(f"{source}: {error}") from None


def _create_record(store: ObjectStore, config: Config) -> dict[str, Any]:
    """Commit run.json; the record of whoever was first."""
    attempt = new_attempt()
    record = {
        "format": FORMAT,
        "version": VERSION,
        "run_id": config.run_id,
        "config": config.model_dump(mode="json"),
        "content_digest": fingerprint("run", content(config)),
        "seeds": {"run": config.seed},
        "code": code_version(),
        "libraries": library_versions(),
        "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "attempt": attempt,
    }
    source = store.url_of(RUN_KEY)

    def identify(data: bytes) -> tuple[str, str]:
        # Whoever was first is adopted; what differs is then told key by key.
        return str(_parse_record(data, source)["attempt"]), config.run_id

    data = commit_object(
        store,
        RUN_KEY,
        sealed_json(record),
        attempt=attempt,
        fingerprint=config.run_id,
        identify=identify,
    )
    return _parse_record(data, source)


def _stored_config(record: Mapping[str, Any], source: str) -> Config:
    return parse_config(record["config"], source)


def _check_content(record: Mapping[str, Any], config: Config, source: str) -> None:
    lines = differences(content(_stored_config(record, source)), content(config))
    if lines:
        raise ConfigError(
            f"run {config.run_id!r} exists with another content ({source}); these keys differ:\n  "
            + "\n  ".join(lines)
            + "\nUse another run_id, or the values the run was started with. These may differ "
            f"freely: {', '.join(free_keys())}"
        )


def _dig(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for name in key.split("."):
        node = node[name]
    return node


def _sign(file: TextIO, text: str) -> None:
    """Say in the lock file who holds it, for the error of whoever comes next."""
    with suppress(OSError):  # a full disk must not keep the run from being locked, or let go
        file.truncate(0)
        file.write(text)
        file.flush()


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # "a+" leaves the holder's text in place; it may be empty for an instant.
        holder = path.read_text(encoding="utf-8").strip()
        by = f"process {holder}" if holder else "another process"
        raise RunLocked(
            f"{path.parent} is being worked on by {by} on this machine: wait for it, or end it"
        ) from None

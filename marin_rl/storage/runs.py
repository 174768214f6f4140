"""A run and its paths: run.json, written once, and the slots whose presence is the run's state.

There is no state file. What has happened in a run is which slots are committed, and that is read
from known keys, or from fresh listings when all rounds are asked for. A forked run reads the
rounds before the fork from its parents' folders; its `store` resolves that for all readers.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from marin_rl.config import (
    RUN_ID_PATTERN,
    Config,
    content_fields,
    free_keys,
    override,
    parse_config,
    place_files,
    places_in,
    value_at,
)
from marin_rl.errors import ConfigError, ObjectMissing, StorageError
from marin_rl.slot_ref import SlotRef
from marin_rl.storage import run_records
from marin_rl.storage.commits import read_manifest, ref_of
from marin_rl.storage.layout import (
    base_slot,
    batches_slot,
    checkpoint_slot,
    evals_slot,
    metrics_key,
    pairs_slot,
    preference_slot,
    reward_model_slot,
    rollouts_slot,
    round_name,
    round_of,
    sft_slot,
    shard_key,
    step_of,
)
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.stores.filesystem import ObjectStore, open_store, probe
from marin_rl.storage.stores.locks import run_lock
from marin_rl.storage.stores.store import Ancestor, ForkedStore
from schemas.records import is_name

__all__ = [
    "LATEST_OF_PAIRS", "LOCK_KEY", "Run", "RunRef", "base_slot", "batches_slot", "check_run_id",
    "checkpoint_at", "checkpoint_named", "checkpoint_slot", "committed", "committed_checkpoint",
    "evals_slot", "is_run_name", "latest_checkpoint", "latest_preference", "latest_reward_model",
    "latest_sft", "metrics_key", "pairs_slot", "place_named", "policy_at", "preference_slot",
    "recorded_config", "refuse_other_content", "reward_model_slot", "rollouts_slot", "round_name",
    "round_of", "rounds_in", "runs_under", "sft_slot", "shard_key", "steps_in", "with_ancestors",
]  # fmt: skip

LOCK_KEY = ".lock"
CHILDREN_NAMED_MAX = 10  # of a root that does not hold the run that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRef:
    """Reference to a run that tasks pass to each other: small, and JSON.

    `free` holds the free configuration keys that are not at their default, as `dotted.key=JSON`:
    how this process goes about the run, where run.json keeps what the run is. `code` and `record`
    are set for other machines: digests of the code and of the run.json that they must have, too.
    `places` are the placed paths of this process by what is written.
    """

    root: str
    run_id: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    code: str = ""
    record: str = ""
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An existing run. `store` holds its slots; `ancestors` are set where it is a fork."""

    config: Config
    run_id: str
    store: ObjectStore
    ancestors: tuple[Ancestor, ...] = ()

    @classmethod
    def create_or_open(
        cls, config: Config, as_begun: Callable[[Config], Config] = lambda config: config
    ) -> "Run":
        """The run that `config` names, created if it is new, as `as_begun` completes `config`.

        The free keys of `config` hold for this process. Raises ConfigError, listing the keys, when
        the run exists with another content; RootUnfit when the root cannot carry a run.
        """
        store = _store_of(config)
        record = run_records.read_record(store)
        if record is not None:
            # Before the probe, which writes: nothing is written into a run that was not meant.
            config = run_records.as_recorded(record, config, store.url_of(RUN_KEY))
            run_records.check_content(record, config, store.url_of(RUN_KEY))
        probe(store)  # of an old run too: before work is wasted on a root that became read-only
        if record is None:
            config = as_begun(config)
            record = run_records.create_record(store, config)
            # Another process may have created the run since the first look, with other content.
            run_records.check_content(record, config, store.url_of(RUN_KEY))
        ancestors = run_records.ancestors_in(record)
        viewed = with_ancestors(open_store(config.root, config.storage_options), store, ancestors)
        return cls(config=config, run_id=config.run_id, store=viewed, ancestors=ancestors)

    @classmethod
    def open(
        cls, root: str, run_id: str, storage_options: Mapping[str, Any] | None = None
    ) -> "Run":
        """The run as run.json describes it.

        What reaches beyond the run's folder (`outward_keys`: endpoints, variables with keys,
        trackers, …) is at its default: `marin_rl.trust` takes that from the user. Raises
        ObjectMissing naming the runs there are, ConfigError for what can be no run's name.
        """
        ref = RunRef(root=root, run_id=run_id, storage_options=storage_options or {})
        return cls._open(ref, None)

    @classmethod
    def of(cls, ref: RunRef) -> "Run":
        return cls._open(ref, ref.free)

    @classmethod
    def _open(cls, ref: RunRef, free: tuple[str, ...] | None) -> "Run":
        check_run_id(ref.run_id)
        top = open_store(ref.root, ref.storage_options)
        store = top.at(ref.run_id)
        record = run_records.read_record(store)
        if record is None:
            # Mostly the root or the name is mistyped: what is there helps.
            names = top.children()
            shown = ", ".join(names[:CHILDREN_NAMED_MAX]) or "nothing"
            more = len(names) - CHILDREN_NAMED_MAX
            raise ObjectMissing(
                f"no run {ref.run_id!r} under {ref.root}: expected {store.url_of(RUN_KEY)}; "
                f"found there: {shown}{f' and {more} more' if more > 0 else ''}"
            )
        stored = run_records.stored_config(record, store.url_of(RUN_KEY))
        # A reference is of a run that this user plays; what is merely opened may be anyone's.
        run_records.offer_code(store, record["config"], allowed=free is not None)
        # A reference leaves out free keys that are at their default, so the free keys in run.json,
        # which are those of the first process, are dropped before its own are applied.
        dumped = stored.model_dump(mode="json")
        tree = dumped if free is None else override(content_fields(stored), free)
        tree = place_files(tree, known=ref.places)
        # The run may have been moved since run.json was written: it lies where it was opened.
        tree |= {"root": ref.root, "storage_options": dict(ref.storage_options)}
        ancestors = run_records.ancestors_in(record)
        return cls(
            config=parse_config(tree, "run reference"),
            run_id=ref.run_id,
            store=with_ancestors(top, store, ancestors),
            ancestors=ancestors,
        )

    @property
    def folder(self) -> ObjectStore:
        return self.store.own if isinstance(self.store, ForkedStore) else self.store

    def owner_of(self, key: str) -> str:
        """The name of the run in whose folder `key` lies: this one, or an ancestor."""
        if not isinstance(self.store, ForkedStore):
            return self.run_id
        owner = self.store.owner(key)
        names = zip(self.ancestors, self.store.shared, strict=True)
        return next((a.run_id for a, (_, store) in names if store is owner), self.run_id)

    def player_of(self, round: int) -> str:
        """The name of the run that played a round: this one's, or of the ancestor that did."""
        # A run forked at checkpoint 5 plays round 5 itself; its parent played rounds 0 to 4.
        shared = (item.run_id for item in self.ancestors if round < item.through_round)
        return next(shared, self.run_id)

    def at_round(self, round: int) -> "Run":
        """The run that played a round: this one, or the ancestor it was forked from after it.

        The round was played as that run's configuration says. Raises ObjectMissing.
        """
        owner = self.player_of(round)
        if owner == self.run_id:
            return self
        return Run.open(self.config.root, owner, self.config.storage_options)

    @property
    def reference(self) -> RunRef:
        tree = self.config.model_dump(mode="json")
        defaults = Config.model_validate({}).model_dump(mode="json")
        # Those two are fields of the reference already.
        keys = [key for key in free_keys() if key not in ("root", "storage_options")]
        values = {key: json.dumps(value_at(tree, key)) for key in keys}
        usual = {key: json.dumps(value_at(defaults, key)) for key in keys}
        return RunRef(
            # Absolute, because the other task may run in another working directory.
            root=open_store(self.config.root, self.config.storage_options).url,
            run_id=self.run_id,
            storage_options=dict(self.config.storage_options),
            free=tuple(f"{key}={text}" for key, text in values.items() if text != usual[key]),
            places=places_in(tree),
        )

    def seed_of(self, *parts: str | int) -> int:
        """A seed in [0, 2**48) that depends on the run's seed and name and on `parts` alone."""
        return run_records.seed_from(self.config, *parts)

    def lock(self) -> AbstractContextManager[None]:
        """Hold the run on this machine. Raises RunLocked, with who holds it.

        The kernel lets go when the process ends, however it ends. Nothing is locked on object
        stores, where the commit protocol alone keeps two processes apart.
        """
        # In the own folder: a fork and its parent may be played at the same time.
        path = self.folder.local_path(LOCK_KEY)
        return nullcontext() if path is None else run_lock(path)


def rounds_in(store: ObjectStore, kind: str) -> list[int]:
    """Rounds that have a folder or a file of a kind, committed or not, ascending: one listing."""
    rounds = (round_of(name) for name in store.children(kind))
    return sorted(round for round in rounds if round is not None)


def committed(run: Run, slot: str) -> SlotRef | None:
    existing = read_manifest(run.store, slot)
    return ref_of(existing[0], reused=True) if existing else None


def committed_checkpoint(run: Run, round: int) -> SlotRef | None:
    return committed(run, checkpoint_slot(round))


def latest_checkpoint(run: Run) -> SlotRef | None:
    """The committed checkpoint of the highest round: one listing, then one read or two."""
    # A listing that is out of date costs work again, and no more: stages look at their own key.
    return _latest(run, map(checkpoint_slot, reversed(rounds_in(run.store, "checkpoints"))))


def checkpoint_at(run: Run, round: int | None) -> SlotRef:
    """The committed checkpoint of a round, or the latest. Raises ObjectMissing without one."""
    ref = latest_checkpoint(run) if round is None else committed_checkpoint(run, round)
    if ref is None:
        wanted = "no checkpoint" if round is None else f"no checkpoint of round {round}"
        raise ObjectMissing(
            f"{wanted} is committed in {run.store.url}: `marin-rl status {run.run_id}` shows which "
            "there are"
        )
    return ref


def policy_at(run: Run, round: int | None) -> SlotRef:
    """As `checkpoint_at`, but the latest of a run without rounds is what pairs or examples taught.

    Raises ObjectMissing.
    """
    if round is None and latest_checkpoint(run) is None:
        learned = latest_preference(run) or latest_sft(run)
        if learned is not None:
            return learned
    return checkpoint_at(run, round)


def steps_in(run: Run, slot_of: Callable[[int], str]) -> list[tuple[str, int]]:
    """Slots that a phase of steps has begun, and their steps, ascending."""
    names = run.store.children(slot_of(0).partition("/")[0])
    steps = sorted(step for name in names if (step := step_of(name)) is not None)
    return [(slot_of(step), step) for step in steps]


def _latest_step(slot_of: Callable[[int], str], run: Run) -> SlotRef | None:
    return _latest(run, (slot for slot, _ in reversed(steps_in(run, slot_of))))


latest_sft = partial(_latest_step, sft_slot)
latest_reward_model = partial(_latest_step, reward_model_slot)
latest_preference = partial(_latest_step, preference_slot)
# By the section of the configuration that says what learns from preference pairs.
LATEST_OF_PAIRS = {"reward_model": latest_reward_model, "preference": latest_preference}


def checkpoint_named(
    text: str, kinds: Mapping[str, str], key: str, storage_options: Mapping[str, Any]
) -> tuple[Run, SlotRef]:
    """The run and the committed slot that ROOT/RUN_ID/KIND/NAME names, manifest.json or not.

    `kinds` has an example NAME per KIND allowed; `key` is the configuration key that holds `text`.
    Raises ConfigError for another form or a slot that is not committed, ObjectMissing without run.
    """
    root, run_id, kind, name = place_named(text)
    if not (root and run_id and kind in kinds and name):
        forms = " or ".join(f"ROOT/RUN_ID/{kind}/{name}" for kind, name in kinds.items())
        raise ConfigError(f"{key} is {text!r}: expected {forms}")
    run = Run.open(root, run_id, storage_options)
    # A folder of files without a manifest is an unfinished attempt.
    ref = committed(run, f"{kind}/{name}")
    if ref is None:
        raise ConfigError(
            f"{key}: {run.store.url_of(f'{kind}/{name}')} is not committed; `marin-rl status "
            f"{run_id}` lists what is"
        )
    return run, ref


def place_named(text: str) -> tuple[str, str, str, str]:
    """ROOT, RUN_ID, KIND and NAME of such a path; empty where it is too short to have them."""
    # From the right, because ROOT has slashes of its own and may be a URL.
    head, _, name = text.rstrip("/").removesuffix("/manifest.json").rpartition("/")
    head, _, kind = head.rpartition("/")
    root, _, run_id = head.rpartition("/")
    return root, run_id, kind, name


def refuse_other_content(config: Config) -> None:
    """Raise ConfigError if the run exists with another content. Writes nothing."""
    store = _store_of(config)
    if (record := run_records.read_record(store)) is not None:
        source = store.url_of(RUN_KEY)
        run_records.check_content(record, run_records.as_recorded(record, config, source), source)


def recorded_config(config: Config) -> Config | None:
    """The configuration with the choices that its run recorded; None if the run is new.

    Raises ConfigError, CorruptObject.
    """
    store = _store_of(config)
    record = run_records.read_record(store)
    return (
        None if record is None else run_records.as_recorded(record, config, store.url_of(RUN_KEY))
    )


def check_run_id(run_id: str) -> None:
    """Raise ConfigError unless `run_id` can be the name of a folder right under a root.

    New runs have stricter names; a folder that was renamed can be read all the same, unless its
    name has control characters.
    """
    if not is_name(run_id):
        raise ConfigError(
            f"expected the id of a run, a folder right under the root, found {run_id[:300]!r}; "
            "--root says where runs are, and `marin-rl status` lists them"
        )


def runs_under(root: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Names of the runs below `root`, sorted; also of what cannot be looked into and may be one."""
    top = open_store(root, storage_options)
    names: list[str] = []
    for name in top.children():
        try:
            is_run = RUN_KEY in top.at(name).children()  # a run's own folder may be a link
        except StorageError as error:
            # A network failure must not look like a root with fewer runs.
            if error.transient:
                raise
            is_run = is_run_name(name)
        if is_run:
            names.append(name)
    return names


def is_run_name(name: str) -> bool:
    return re.fullmatch(RUN_ID_PATTERN, name) is not None


def _latest(run: Run, slots: Iterator[str]) -> SlotRef | None:
    # A folder without a manifest is an unfinished attempt, so the one before it is the latest.
    # Lazy: usually the first slot is committed, and is the only one read.
    return next((ref for slot in slots if (ref := committed(run, slot))), None)


def _store_of(config: Config) -> ObjectStore:
    return open_store(config.root, config.storage_options).at(config.run_id)


def with_ancestors(
    top: ObjectStore, own: ObjectStore, ancestors: Sequence[Ancestor]
) -> ObjectStore:
    if not ancestors:
        return own
    return ForkedStore(own, [(item.through_round, top.at(item.run_id)) for item in ancestors])

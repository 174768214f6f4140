"""Forks: a new run that begins with the rounds of another, without a copy; and who reads whom.

A fork is a run.json that names its ancestors. Everything before the fork is read from their
folders, so a run must not delete what another run under the same root still reaches.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marin_rl.config import Config, differences, override, parse_config, pin_files
from marin_rl.errors import ConfigError, CorruptObject, NewerSchema, ObjectMissing, StorageError
from marin_rl.storage import layout, runs
from marin_rl.storage.commits import committed_manifest, read_manifest
from marin_rl.storage.run_progress import is_closed, optimizer_round
from marin_rl.storage.run_records import RUN_KEY, ancestors_in, create_record, read_record
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from marin_rl.storage.stores.store import Ancestor
from marin_rl.storage.tables.tombstones import pruned_parts
from schemas.manifests import sha256_of
from schemas.records import ANCESTORS_MAX

# What checkpoint 0 is made of, and where the fork's parents are looked for: a fork has them too.
SHARED_KEYS = (
    "policy", "sft", "reward_model", "preference", "seed", "root", "storage_options",
)  # fmt: skip


def fork_run(parent: Run, round: int, run_id: str, overrides: Sequence[str] = ()) -> Run:
    """A new run that has the rounds of `parent` before `round`, and goes on from its checkpoint.

    Nothing is copied. `overrides` change what the fork does from there on. Free if the same fork
    exists. Raises ConfigError for overrides that would have made another prefix, or when the name
    is taken; ObjectMissing when the checkpoint is not committed, or when arrays are pruned: its
    own, or those of the reference policy of the fork's objective.
    """
    config = _forked_config(parent, run_id, overrides)
    _check_whole(parent, round)
    needed = sorted({round, *reference_checkpoints(config, round), *_before(parent, round)})
    for number in needed:
        _check_whole(parent, number)
    # Before anything is written: a name that is taken by a failed fork cannot be used again.
    if round and not is_closed(parent, round - 1):
        # A fork cannot write metrics of a round that it shares.
        closed = parent.store.url_of(layout.metrics_key(round - 1))
        raise ObjectMissing(
            f"{closed} is not committed: expected round {round - 1} to be closed before a fork "
            f"from its checkpoint; continue run {parent.run_id!r} first"
        )
    ancestors = _chain(parent, round)
    own = open_store(config.root, config.storage_options).at(run_id)
    record = read_record(own)
    if record is None:
        # Created before the second look: gc keeps what the record of a fork names.
        record = create_record(own, config, ancestors)
    # The record decides: of two forks made at once, one adopts the other's.
    if ancestors_in(record) != ancestors:
        raise ConfigError(
            f"run {run_id!r} exists and is no fork of {parent.run_id!r} from round {round} "
            f"({own.url_of(RUN_KEY)}): choose another --run-id"
        )
    runs.refuse_other_content(config)
    run = Run.open(config.root, run_id, config.storage_options)
    try:
        for number in needed:  # again, for gc may have begun in between; from now on it sees us
            _check_whole(run, number)
    except ObjectMissing as error:
        raise ObjectMissing(
            f"{error}. That happened while the fork was made: it cannot be played, and keeps other "
            f"checkpoints from being pruned. Delete {own.url}, then fork from another round"
        ) from None
    return run


def _before(parent: Run, round: int) -> set[int]:
    """Earlier checkpoints that restore the optimizer's state of one that leaves it out."""
    manifest = committed_manifest(parent.store, layout.checkpoint_slot(round))
    whole = optimizer_round(manifest)
    if whole is None:
        return set()
    rounds = range(whole, round)
    references = [reference_checkpoints(parent.at_round(n).config, n) for n in rounds]
    return {whole}.union(*references)


def reference_checkpoints(config: Config, round: int) -> frozenset[int]:
    """Checkpoints of round `round`'s reference policy, and of its teacher where that is the run.

    Of the former none where KL has no weight, or an average is used.
    """
    objective, teacher = config.objective, config.distillation
    numbers = {0} if teacher is not None and teacher.is_self else set[int]()
    if objective.kl_coefficient != 0 and objective.reference != "average":
        every = objective.reference_every_rounds
        numbers.add(0 if objective.reference == "first" else round // every * every)
    return frozenset(numbers)


def _forked_config(parent: Run, run_id: str, overrides: Sequence[str]) -> Config:
    tree = parent.config.model_dump(mode="json")
    changes = pin_files(override(tree, [*overrides, f"run_id={run_id}"]))
    config = parse_config(changes, "fork")
    if config.run_id == parent.run_id:
        raise ConfigError(f"a fork needs a name of its own, found that of its parent, {run_id!r}")
    changed = [
        line
        for line in differences(tree, config.model_dump(mode="json"))
        if re.split(r"[.:]", line)[0] in SHARED_KEYS or line.startswith("training.critic")
    ]
    # Checkpoints hold the arrays of an average only where the run took it as the reference.
    references = {parent.config.objective.reference, config.objective.reference}
    if "average" in references and len(references) > 1:
        changed.append("objective.reference: to or from average, which checkpoints hold arrays for")
    if changed:
        raise ConfigError(
            "a fork shares what its parent did before it, which these keys decided:\n  "
            + "\n  ".join(changed)
            + "\nStart a new run to change them"
        )
    return config


def _check_whole(run: Run, round: int) -> None:
    """Raise ObjectMissing unless a checkpoint that the fork needs is there with arrays."""
    slot = layout.checkpoint_slot(round)
    if read_manifest(run.store, slot) is None:
        latest = runs.latest_checkpoint(run)
        raise ObjectMissing(
            f"{run.store.url_of(slot)} is not committed: expected a checkpoint to fork from; the "
            f"latest of run {run.run_id!r} is {latest.slot if latest else 'not there yet'}"
        )
    if pruned_parts(run.store, slot):
        raise ObjectMissing(
            f"{run.store.url_of(slot)} was pruned by retention: expected a checkpoint with its "
            "arrays, to fork from or for the KL to it; one without pruned.json has them"
        )


def _chain(parent: Run, round: int) -> tuple[Ancestor, ...]:
    """Runs that have the rounds before `round`, ascending; `parent` where it has any itself."""
    before = [item for item in parent.ancestors if item.through_round < round]
    after = [item for item in parent.ancestors if item.through_round >= round]
    if len(before) >= ANCESTORS_MAX:
        raise ConfigError(f"expected a chain of at most {ANCESTORS_MAX} forks, found more")
    # The ancestor that has the round: reads then never pass through a run without it.
    if after:
        return (*before, Ancestor(after[0].run_id, round, after[0].sha256))
    own = sha256_of(parent.folder.read(RUN_KEY))
    return (*before, Ancestor(parent.run_id, round, own))


@dataclass(frozen=True, slots=True)
class Reach:
    """Part of a run that another reads: checkpoints up to one (-1: none), and a named slot."""

    through_round: int
    start: str | None


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Reaches of other runs under the root into one run, by the name of the reader."""

    reaches: Mapping[str, Reach]

    def has(self, slot: str) -> bool:
        kind, _, name = slot.partition("/")
        # A warm start comes before every round, so that each fork has it.
        number = int(name.rpartition("-")[2]) if kind == "checkpoints" else 0
        return any(slot == r.start or number <= r.through_round for r in self.reaches.values())

    def proves(self, slot: str) -> bool:
        """True if some run could only be made while this slot was committed."""
        if slot.startswith("checkpoints/"):
            return self.has(slot)
        return any(slot == reach.start for reach in self.reaches.values())


def borrowed_from(run: Run, known: Mapping[str, Reach] | None = None) -> Borrowed:
    """Parts of `run` that its neighbours read: forks, and runs that start from a checkpoint of it.

    Those in `known` are not read again: on that ground nothing may be deleted, for one may have
    been made again under its name. Raises CorruptObject, NewerSchema or StorageError for a
    neighbour that cannot be read, unless no run can have its name.
    """
    top = open_store(run.config.root, run.config.storage_options)
    reaches: dict[str, Reach] = {}
    for name in top.children():
        # Its own record says nothing of others that read it.
        if name == run.run_id:
            continue
        try:
            reach = (known or {}).get(name) or _reach(top.at(name), run.run_id)
        except (CorruptObject, NewerSchema):
            raise
        except StorageError as error:
            if error.transient or runs.is_run_name(name):
                raise
            continue  # a folder that is no run, such as `lost+found`
        if reach is not None:
            reaches[name] = reach
    return Borrowed(reaches)


def _reach(neighbour: ObjectStore, run_id: str) -> Reach | None:
    """Part of `run_id` that a neighbour reads; None if the neighbour is not a run, or is gone."""
    record = read_record(neighbour)
    if record is None:
        return None
    policy = record["config"].get("policy", {})
    if not isinstance(policy, Mapping):
        raise CorruptObject(
            f"{neighbour.url_of(RUN_KEY)}: expected a section as its configuration's policy, found "
            f"{str(policy)[:100]!r}"
        )
    rounds = [a.through_round for a in ancestors_in(record) if a.run_id == run_id]
    # As text, and not resolved: a root may be mounted elsewhere for the run that names it.
    _, owner, kind, slot = runs.place_named(str(policy.get("checkpoint") or ""))
    starts = owner == run_id and kind in layout.POLICY_SLOTS
    return Reach(max(rounds, default=-1), f"{kind}/{slot}" if starts else None)

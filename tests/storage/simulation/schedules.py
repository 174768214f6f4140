"""Seeded schedules of a simulated world, and commit protocols that are wrong on purpose.

python tests/storage/simulation/schedules.py 7 10000  # schedules 7 to 10006
"""

import os
import random
import sys
from collections import Counter
from typing import Any

from storage.simulation.simulator import (
    CREATE_FATES,
    READ_FATES,
    WRITE_FATES,
    Process,
    Shape,
    World,
    clock_of,
    ended_well,
)

from marin_rl.config import RetentionConfig
from marin_rl.errors import CommitConflict
from marin_rl.storage.commits import (
    commit_manifest,
    manifest_key,
    parse_manifest,
)
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore, PutOutcome
from marin_rl.storage.upkeep.gc import Collection
from marin_rl.storage.upkeep.inventory import take_inventory
from schemas.manifests import Manifest

STEPS_MAX = 70
PROCESSES_MAX = 5
DAYS = 0.02  # share of steps in which days pass
STAYS = 0.95  # share of steps after which the same process goes on
FATES = {"create": CREATE_FATES, "write": WRITE_FATES, "delete": WRITE_FATES}


class Scheduler:
    """Plays one schedule. Most steps go to the process in the foreground; the others sleep."""

    def __init__(self, seed: int, **world: Any) -> None:
        self.choices = random.Random(seed)
        rounds, shards = self.choices.choice((1, 1, 1, 2, 3)), self.choices.choice((1, 1, 1, 2))
        self.world = World(Shape(rounds=rounds, shards=shards), **world)
        self.trouble = self.choices.choice((0.02, 0.1, 0.4))
        self.foreground: Process | None = None

    def play(self) -> World:
        """All steps, then settle. Raises AssertionError where a law is broken."""
        with clock_of(self.world):
            for _ in range(self.choices.randrange(20, STEPS_MAX)):
                self._step()
            self.world.settle()
        badly = [p.result for p in self.world.processes if not ended_well(p)]
        assert not badly, f"processes ended in {badly!r}"
        return self.world

    def _step(self) -> None:
        world, roll = self.world, self.choices.random()
        if world.late and roll < 0.05:
            world.late.pop(self.choices.randrange(len(world.late)))()
            return
        waiting = world.waiting
        if not waiting or (roll < 0.08 and len(world.processes) < PROCESSES_MAX):
            self.foreground = self._newcomer()
            return
        if roll < 0.08 + DAYS:
            world.let_days_pass(self.choices.choice((0.5, 8.5, 30)))
            return
        if self.foreground not in waiting or roll > STAYS:
            self.foreground = self.choices.choice(waiting)
        self._decide(self.foreground)

    def _newcomer(self) -> Process:
        if self.world.processes and self.choices.random() < 0.25:
            return self.world.collect(keep=self.choices.choice((None, 2)))
        return self.world.start(patient=self.choices.random() < 0.5)

    def _decide(self, process: Process) -> None:
        assert process.operation is not None
        if self.choices.random() > self.trouble:
            self.world.go_on(process, "served")
        elif self.choices.random() < 0.25:
            self.world.kill(process, served=self.choices.random() < 0.5)
        else:
            fates = FATES.get(process.operation[0], READ_FATES)
            self.world.go_on(process, self.choices.choice(fates))


def play(seed: int, count: int, **world: Any) -> dict[str, int]:
    """Play schedules seed … seed + count - 1; what happened in them, counted."""
    seen = Counter[str]()
    for number in range(seed, seed + count):
        try:
            played = Scheduler(number, **world).play()
        except AssertionError as error:
            raise AssertionError(f"schedule {number}: {error}") from error
        for process in played.processes:
            seen[type(process.result).__name__] += 1
    return dict(seen)


COLLECTED = Collection(garbage=(), live=False, skipped=(), deleted=True)


def exists_then_put(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: looks, and then writes over any object that came in between."""
    key = manifest_key(manifest.slot)
    if key.rpartition("/")[2] in store.children(manifest.slot):
        return parse_manifest(store.read(key), key)
    store.put_part(key, manifest.to_json())
    return manifest


def delete_on_conflict(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: makes room for itself."""
    key = manifest_key(manifest.slot)
    while store.put_if_absent(key, manifest.to_json()) is not PutOutcome.CREATED:
        store.delete(key)
    return manifest


def trusts_exists(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: takes EXISTS for another's, though it may be our own write."""
    if store.put_if_absent(manifest_key(manifest.slot), manifest.to_json()) is PutOutcome.EXISTS:
        raise CommitConflict("it exists")
    return manifest


def trusts_silence(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: takes UNKNOWN for success, and never reads back."""
    store.put_if_absent(manifest_key(manifest.slot), manifest.to_json())
    return manifest


def fixed_names(_attempt: str, name: str) -> str:
    """Wrong: two attempts write the same files."""
    return name


def one_try(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Right, for what it says is true: the deadline is over at once."""
    return commit_manifest(store, manifest, deadline_s=0, sleep=lambda _: None)


def gc_at_once(run: Run, _rule: RetentionConfig, **_: Any) -> Collection:
    """Wrong: deletes what nothing names yet, also of processes that are about to name it."""
    for item in take_inventory(run.folder).items:
        if item.role == "loose":
            run.folder.delete(item.key)
    return COLLECTED


def gc_without_a_word(run: Run, _rule: RetentionConfig, **_: Any) -> Collection:
    """Wrong: gives arrays up, and leaves no tombstone that says so."""
    for slot in take_inventory(run.folder).of_kind("checkpoints")[:-2]:
        for part in slot.manifest.parts if slot.manifest else ():
            run.folder.delete(slot.key(part.name))
    return COLLECTED


if __name__ == "__main__":
    # Processes are threads that take turns: on one core they hand over without waking another.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name, number in sorted(play(int(sys.argv[1]), int(sys.argv[2])).items()):
        print(name, number)

"""Forks while retention prunes what they begin with: seeded schedules of both, by the real code.

Every process stops before each operation on the store until the schedule says that it goes on, or
dies. The law: a fork that was reported to its caller keeps the arrays that it begins with. Two
simpler protocols must be caught: each look, at forks and at tombstones, is needed twice.
"""

import os
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.cases import printed_seed
from support.fault_injection import Operations, inject_faults
from support.run_factories import checkpoint, configuration

from marin_rl.config import RetentionConfig
from marin_rl.errors import ObjectMissing
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, checkpoint_slot, committed, metrics_key
from marin_rl.storage.stores.filesystem import open_store
from marin_rl.storage.upkeep import forks, gc
from marin_rl.storage.upkeep.forks import fork_run, reference_checkpoints
from marin_rl.storage.upkeep.gc import Collection, collect

SCHEDULES = 20
SCHEDULES_SLOW = int(os.environ.get("MARIN_RL_SCHEDULES") or 5000) // 10  # each is ten others' work
ROUNDS, FORKED_FROM = 3, 1
STAYS, DIES = 0.8, 0.01
WAIT_S = 120.0
KEEP = RetentionConfig(checkpoints_last=2)

_own = threading.local()


class Killed(BaseException):
    """The process dies before this operation."""


class Process:
    """A thread that stops before every operation, and what it ended with."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.ended = self.dies = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._live, args=(work,), daemon=True).start()
        assert self._stopped.acquire(timeout=WAIT_S)

    def stop(self) -> None:
        """Called in its thread: wait for the schedule."""
        self._stopped.release()
        assert self._go.acquire(timeout=WAIT_S), "the schedule went away"
        if self.dies:
            raise Killed

    def go_on(self) -> None:
        """Let it run to its next operation, or its end."""
        self._go.release()
        assert self._stopped.acquire(timeout=WAIT_S), "a process hangs"

    def _live(self, work: Callable[[], Any]) -> None:
        _own.process = self
        try:
            self.result = work()
        except (ObjectMissing, Killed) as error:
            self.result = error
        except BaseException as error:
            self.result = error
            raise
        finally:
            self.ended = True
            self._stopped.release()


class Stops(Operations):
    """Processes with a schedule do nothing without a step of it."""

    def next(self, name: str, url: str) -> str | None:
        if (process := getattr(_own, "process", None)) is not None:
            process.stop()
        return None


def parent_of(root: str) -> Run:
    """A run of closed rounds, as far as forks and gc look at it."""
    run = Run.create_or_open(configuration(root))
    for number in range(ROUNDS + 1):
        checkpoint(run, number)
        run.store.put_if_absent(metrics_key(number), b"closed")
    return run


def has_arrays(run: Run, number: int) -> bool:
    ref = committed(run, checkpoint_slot(number))
    assert ref is not None
    there = run.store.list(ref.slot)
    return all(f"{ref.slot}/{part.name}" in there for part in manifest_of(run.store, ref).parts)


def raced(run: Run, fork: Callable[[], Run], choices: random.Random) -> Any:
    """A fork racing one gc or two, as `choices` decide; returns the fork's result."""
    works = [fork, *[lambda: collect(run, KEEP)] * choices.choice((1, 1, 2))]
    processes = [Process(work) for work in works]
    current = choices.choice(processes)
    while waiting := [process for process in processes if not process.ended]:
        if current not in waiting or choices.random() > STAYS:
            current = choices.choice(waiting)
        current.dies = choices.random() < DIES
        current.go_on()
    first, *others = [process.result for process in processes]
    assert all(isinstance(result, Collection | Killed) for result in others), others
    return first


def play(seed: int) -> str:
    """One schedule; how the fork ended in it. Raises AssertionError where the law is broken."""
    # A root of its own each time: gc remembers what it saw of a root before.
    choices, root = random.Random(seed), f"memory://fork-races-{seed}-{secrets.token_hex(8)}"
    made = parent_of(root)
    overrides = choices.choice(([], ["objective.kl_coefficient=0.1"]))

    def fork(parent: Run) -> Run:
        return fork_run(parent, FORKED_FROM, "fork", overrides)

    with inject_faults(Stops()):
        run = Run.open(root, "run")
        found = raced(run, lambda: fork(run), choices)
    if isinstance(found, Killed):  # a second caller gets the answer, too
        try:
            found = fork(made)
        except ObjectMissing as error:
            found = error
    if isinstance(found, Run):
        needed = {FORKED_FROM, *reference_checkpoints(found.config, FORKED_FROM)}
        collect(made, KEEP)
        assert all(has_arrays(found, number) for number in needed), f"schedule {seed}"
    left = open_store(root)
    for key in left.list():
        left.delete(key)
    return type(found).__name__


def check(count: int) -> None:
    """Play schedules from a printed seed, which MARIN_RL_SEED repeats."""
    first = printed_seed()
    ends = Counter(play(seed) for seed in range(first, first + count))
    print(dict(ends))
    assert set(ends) <= {"Run", "ObjectMissing"}


def test_gc_never_takes_what_a_fork_begins_with() -> None:
    check(SCHEDULES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gc_never_takes_what_a_fork_begins_with_in_many_schedules() -> None:
    check(SCHEDULES_SLOW)


def gc_looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: a look from before the tombstones is used after them."""
    look, seen = forks.borrowed_from, dict[Process, Any]()

    def remembered(run: Run, _known: Any = None) -> forks.Borrowed:
        process = getattr(_own, "process", None)  # no thread's id, which a later one may have, too
        if process is None:
            return look(run)
        return seen.pop(process, None) or seen.setdefault(process, look(run))

    monkeypatch.setattr(gc, "borrowed_from", remembered)


def fork_looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: no tombstone is looked for once the fork is there."""
    look = forks._check_whole
    once = lambda run, number: None if run.ancestors else look(run, number)
    monkeypatch.setattr(forks, "_check_whole", once)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [gc_looks_once, fork_looks_once])
def test_one_look_less_is_caught(wrong, monkeypatch):
    wrong(monkeypatch)
    with pytest.raises(AssertionError, match="schedule"):
        [play(seed) for seed in range(SCHEDULES)]

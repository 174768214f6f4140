"""Seeded schedules of the commit protocol: kills, lost replies, late writes, zombies, gc.

Each schedule is a world of its own (simulator.py), played by choices that follow from a seed.
The simpler protocols at the end must be caught, or the laws could not fail.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storage.simulation.schedules import (
    Scheduler,
    delete_on_conflict,
    exists_then_put,
    fixed_names,
    gc_at_once,
    gc_without_a_word,
    one_try,
    play,
    trusts_exists,
    trusts_silence,
)
from support.cases import printed_seed

REPOSITORY = Path(__file__).parents[2]
QUICKLY, ENOUGH = 60, 10_000  # the latter for rare ends too
SCHEDULES_SLOW = int(os.environ.get("MARIN_RL_SCHEDULES") or ENOUGH)
# The rarest of faults, a collector at the wrong moment, shows soon after the first of these.
FIRST_WRONG, LAST_WRONG = 90, 200
ENDS = ("Killed", "CommitUnknown", "CommitExpired", "StoreUnavailable", "Collection", "SlotRef")


def seeded(count: int) -> int:
    """A printed seed, which MARIN_RL_SEED repeats."""
    print(f"{count} schedules")
    return printed_seed()


def check(count: int) -> None:
    """Play schedules in a program of its own: checking types, as tests do, would take most time."""
    script = "tests/storage/simulation/schedules.py"
    command = [sys.executable, script, str(seeded(count)), str(count)]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    seen = dict(line.split() for line in done.stdout.splitlines())
    rare = {"CommitUnknown", "CommitExpired"} if count < ENOUGH else set()
    assert all(int(seen.get(name, 0)) > count / 100 for name in ENDS if name not in rare)


def test_no_law_is_broken_in_random_schedules() -> None:
    check(QUICKLY)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_law_is_broken_in_many_random_schedules() -> None:
    check(SCHEDULES_SLOW)


def test_a_schedule_is_decided_by_its_seed() -> None:
    first, second = (Scheduler(7).play() for _ in range(2))
    assert list(first.bucket.objects) == list(second.bucket.objects)
    assert [type(p.result) for p in first.processes] == [type(p.result) for p in second.processes]


@pytest.mark.parametrize(
    "wrong",
    [
        {"commit": exists_then_put},
        {"commit": delete_on_conflict},
        {"commit": trusts_exists},
        {"commit": trusts_silence},
        {"naming": fixed_names},
        {"gc": gc_at_once},
        {"gc": gc_without_a_word},
    ],
    ids=lambda wrong: next(iter(wrong.values())).__name__,
)
def test_simpler_protocols_are_caught(wrong: dict[str, Callable[..., Any]]) -> None:
    with pytest.raises(AssertionError, match="schedule"):
        play(FIRST_WRONG, LAST_WRONG, **wrong)


def test_the_same_net_lets_a_right_protocol_through() -> None:
    assert play(0, 5, commit=one_try)["SlotRef"] > 0  # and commits happened in it

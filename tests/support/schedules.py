"""Seeded schedules of a world: which process goes on, and what becomes of what it asks for.

python tests/schedules.py 7 10000     # schedules 7 to 10006, and how their processes ended
"""

import os
import random
import sys
from collections import Counter
from typing import Any

from support.simulator import (
    CREATE_FATES,
    READ_FATES,
    WRITE_FATES,
    Process,
    Shape,
    World,
    clock_of,
    ended_well,
)

STEPS_MAX = 70
PROCESSES_MAX = 5
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
        assert all(ended_well(process) for process in self.world.processes)
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
        if roll < 0.1:
            world.let_days_pass(self.choices.choice((0.5, 8.5, 30)))
            return
        if self.foreground not in waiting or roll > 0.95:
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


if __name__ == "__main__":
    # Processes are threads that take turns: on one core they hand over without waking another.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name, number in sorted(play(int(sys.argv[1]), int(sys.argv[2])).items()):
        print(name, number)

"""Many faults in one run: each befalls an operation, or a request, that is known by a name.

A number is another operation's as soon as something is retried, and threads take turns; a name is
not. It says what is asked for of what, for how many-th time, without what only one attempt has (its
id, random file names): `create rollouts/round-00001/shard-0000.parquet #1`. So the names of an
undisturbed run are what N counts, and a run that meets many faults, one after the other and over
several starts, can be asked which of them came.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from support.run_outcomes import Outcome, outcome

from marin_rl.config import Config
from marin_rl.errors import MarinRLError

Case = tuple[str, str]  # the kind of a fault, and the name of what it befalls
Suffer = Callable[[Sequence[Case]], tuple[Config, Sequence[str]]]

ORBAX = "/ocdbt.process_0/d/"


def groups(names: Sequence[str], kinds: Sequence[str], apart: int) -> list[list[Case]]:
    """Every kind at every name, once; in a group every `apart`-th name, and the kinds in turn."""
    return [
        [
            (kinds[(number + turn) % len(kinds)], name)
            for number, name in enumerate(names[first::apart])
        ]
        for first in range(min(apart, len(names)))
        for turn in range(len(kinds))
    ]


@dataclass
class Played:
    """Outcome of groups of faults.

    `suffer` plays a run that meets the faults of a group, and names those that it never met. They,
    and all of a group that did not end as it should, are played singly, and then have to come. But
    `absent` are faults of files that Orbax writes in one run and not in another, as its threads go.
    """

    suffer: Suffer
    expected: Outcome
    runs: int = 0
    passed: int = 0
    absent: int = 0
    failures: list[str] = field(default_factory=list)

    def play(self, group: Sequence[Case]) -> None:
        """Play a group, and what of it must be played again."""
        different, missed = self._once(group)
        if different and len(group) > 1:
            before = len(self.failures)
            for case in group:
                self.play([case])
            if len(self.failures) == before:  # only together, then
                self._blame(different, group)
        elif different:
            self._blame(different, group)
        else:
            self._missed([case for case in group if case[1] in missed], alone=len(group) == 1)
            self.passed += len(group) - len(missed)

    def _missed(self, cases: Sequence[Case], *, alone: bool) -> None:
        for case in cases:
            if ORBAX in case[1]:
                self.absent += 1
            elif alone:
                self._blame(["it never came"], [case])
            else:
                self.play([case])

    def _once(self, group: Sequence[Case]) -> tuple[list[str], set[str]]:
        self.runs += 1
        try:
            config, missed = self.suffer(group)
            return self.expected.same_as(outcome(config)), set(missed)
        except (MarinRLError, AssertionError) as error:
            return [f"{type(error).__name__}: {error}"], set()

    def _blame(self, different: Sequence[str], group: Sequence[Case]) -> None:
        faults = ", ".join(f"{kind} at {name}" for kind, name in group)
        self.failures.append(f"{'; '.join(different)}, after {faults}")


def play_groups(every: Sequence[Sequence[Case]], suffer: Suffer, expected: Outcome) -> list[str]:
    """Play all groups, and print how many faults passed; what differed after the others."""
    began, cpu_began = time.monotonic(), time.process_time()
    played = Played(suffer, expected)
    for group in every:
        played.play(group)
        print(played.passed, end=" ", flush=True)
    faults = sum(len(group) for group in every)
    print(
        f"\n{played.passed} of {faults} faults passed and {played.absent} did not come, in "
        f"{played.runs} runs, {time.monotonic() - began:.0f} s, of which "
        f"{time.process_time() - cpu_began:.0f} s are processor time of this process"
    )
    print(*played.failures, sep="\n")
    assert played.failures or played.passed + played.absent == faults
    return played.failures

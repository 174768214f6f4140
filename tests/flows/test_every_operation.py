"""A fault at every operation on the store: the same command again ends in the same run.

An undisturbed run (configs/debug.yaml with a warm start, three rounds, through Prefect) gives its
operations their names: the N of storage/injection.py. Its committed slots,
samples, dispositions and the parameters of every checkpoint are what every disturbed run must end
in, bit by bit, with every digest right and the audit balanced. Ways of disturbing it:

- crash states: the folder as a kill before or after each operation leaves it, and a resume;
- kills: a process of its own that is killed in the middle of an operation that changes something,
  and started again; what kills before and after operations leave is what crash states are. A sample
  of them has an operation of every stage;
- silence on the fake GCS and on moto: an operation that fails, is late, doubled or not answered;
  and, below the clients, a request that is refused or dropped, before or after it took effect.

All are slow tests. Every crash state is played by itself, and one silence; the rest in
groups, where one run meets many faults, APART operations from each other, and is started again
where one ends it. That each of them came is asserted; a group that ends otherwise is played again
one by one, to name the culprit. A fault that only matters in an otherwise undisturbed run could
hide in a group: MARIN_RL_ALL_FAULTS=1 gives each fault a run of its own, which takes hours.
MARIN_RL_FAULT_GROUPS=3 plays three groups of each kind, MARIN_RL_FAULTS_PLAYED=50 as many crash
states and kills, and MARIN_RL_SEED=5 chooses other samples.
"""

import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest
from support.cases import printed_seed
from support.fake_stores import Fault, Faults, fake_gcs, fake_s3
from support.fault_injection import Operations, inject_faults, parse
from support.faults import NamedOperations, Outcome, Undisturbed, committed_digests, outcome
from support.flow_runs import debug

import flows.sft
from flows.rl_loop import start
from marin_rl.config import Config
from marin_rl.errors import MarinRLError
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import (
    Run,
    batches_slot,
    checkpoint_slot,
    committed,
    evals_slot,
    rollouts_slot,
    sft_slot,
)

KILLS = ("kill-amid", "kill-before", "kill-after")
READS = re.compile(r"(read|children|list|size) |path .*\.parquet #")  # such a file is mapped
REQUESTS: dict[str, Callable[[], Fault]] = {
    "refuse": lambda: Fault("", "", "before", 503),
    "drop": lambda: Fault("", "", "before", None),
    "refuse-after": lambda: Fault("", "", "after", 503),
    "drop-after": lambda: Fault("", "", "after", None),
}
SILENCES = ("fail", "delay", "late", "duplicate", "lose-reply")
APART = 5
ALONE = 10**6  # apart: a group is one fault
ONE_BY_ONE = bool(os.environ.get("MARIN_RL_ALL_FAULTS"))
pytestmark = pytest.mark.slow
ALL_S_MAX = 1800 if "MARIN_RL_FAULT_GROUPS" in os.environ else 24 * 3600
Case = tuple[str, str]  # the kind of a fault, and the name of what it befalls
Suffer = Callable[[Sequence[Case]], tuple[Config, Sequence[str]]]


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
    and all of a group that did not end as it should, are played singly, and then have to come.
    """

    suffer: Suffer
    expected: Outcome
    runs: int = 0
    passed: int = 0
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
            if alone:
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
        f"\n{played.passed} of {faults} faults passed, in "
        f"{played.runs} runs, {time.monotonic() - began:.0f} s, of which "
        f"{time.process_time() - cpu_began:.0f} s are processor time of this process"
    )
    print(*played.failures, sep="\n")
    assert played.failures or played.passed == faults
    return played.failures


# Where each stage of a run leaves what it makes: from the warm start to the metrics of a round.
STAGES = (
    "/sft/",
    "/checkpoints/round-00000/",
    "/evals/",
    "/shard-",
    "/rollouts/.*/manifest",
    "/batches/",
    "/checkpoints/round-0000[1-9]/",
    "/metrics/",
)


def in_groups(names: Sequence[str], kinds: Sequence[str], apart: int) -> list[list[Case]]:
    """Every kind of fault at every name: together, or each in a run of its own if that is asked."""
    found = groups(names, kinds, ALONE if ONE_BY_ONE else apart)
    print(f"N = {len(names)}, {len(kinds)} faults at each, in {len(found)} groups")
    if not (played := int(os.environ.get("MARIN_RL_FAULT_GROUPS") or 0)):
        return found
    print(f"{min(played, len(found))} groups of them are played")
    return random.Random(printed_seed()).sample(found, min(played, len(found)))


def play(cases: Sequence[str], disturbed: Callable[[str], Config], expected: Outcome) -> list[str]:
    """Play cases, and print how many passed; what differed in the others."""
    failures, began = list[str](), time.monotonic()
    for case in cases:
        try:
            different = expected.same_as(outcome(disturbed(case)))
        except (MarinRLError, AssertionError) as error:
            different = [f"{type(error).__name__}: {error}"]
        if different:
            failures.append(f"{case}: other {', '.join(different)}")
    took_s = time.monotonic() - began
    print(f"{len(cases) - len(failures)} of {len(cases)} passed in {took_s:.0f} s")
    print(*failures, sep="\n")
    return failures


def chosen(every: Sequence[str], count: int) -> list[str]:
    """A seeded sample of the cases, in order; all of them where that is asked for."""
    count = int(os.environ.get("MARIN_RL_FAULTS_PLAYED") or count)
    numbers = sorted(
        random.Random(printed_seed()).sample(range(len(every)), min(count, len(every)))
    )
    print(f"{len(numbers)} of {len(every)} cases")
    return [every[number] for number in numbers]


def chosen_of_every_stage(names: Sequence[str]) -> list[str]:
    """A seeded sample, in order, with an operation of each stage; all where that is asked for."""
    count = int(os.environ.get("MARIN_RL_FAULTS_PLAYED") or len(names))
    choices = random.Random(printed_seed())
    of_stages = {choices.choice([n for n in names if re.search(each, n)]) for each in STAGES}
    others = [name for name in names if name not in of_stages]
    more = min(max(0, count - len(of_stages)), len(others))
    picked = of_stages | set(choices.sample(others, more))
    print(f"{len(picked)} of {len(names)} operations")
    return [name for name in names if name in picked]


def summaries(config: Config) -> dict[str, object]:
    """Totals of every slot of a run, metrics included; times and attempts differ."""
    run = Run.open(config.root, config.run_id)
    names = [sft_slot(2), sft_slot(4), *map(checkpoint_slot, range(config.rounds + 1))]
    for round in range(config.rounds):
        names += [rollouts_slot(round), batches_slot(round), evals_slot(round)]
    return {name: ref.summary for name in names if (ref := committed(run, name))}


# --- crash states -------------------------------------------------------------------------------


@pytest.mark.timeout(ALL_S_MAX)
def test_every_crash_state(undisturbed: Undisturbed, tmp_path: Path) -> None:
    states = undisturbed.states
    print(f"N = {undisturbed.operations} operations, {len(states.numbers)} different states")

    def go_on(index: str) -> Config:
        config = debug(tmp_path / index)
        shutil.copytree(states.copy(int(index)), Path(config.root, config.run_id))
        start(config)
        return config

    cases = chosen([str(i) for i in range(len(states.numbers))], 10**6)
    assert play(cases, go_on, undisturbed.expected) == []


# --- real kills ---------------------------------------------------------------------------------


@pytest.mark.timeout(ALL_S_MAX)
def test_kills_at_operations(undisturbed, forked_runs, tmp_path):
    """One run that is killed amid everything it creates or writes, one start after the other."""
    expected = summaries(debug(undisturbed.states.run.parent))

    def killed(group: Sequence[Case]) -> tuple[Config, list[str]]:
        config = debug(tmp_path / str(uuid.uuid4()))
        _, left = forked_runs.run_until_all_came(config, {name: kind for kind, name in group})
        assert summaries(config) == expected
        return config, left

    names = chosen_of_every_stage([name for name in undisturbed.names if not READS.match(name)])
    kinds = KILLS if ONE_BY_ONE else KILLS[:1]
    assert play_groups(in_groups(names, kinds, 1), killed, undisturbed.expected) == []


def test_kills_of_a_warm_start_by_itself(forked_runs, tmp_path, monkeypatch):
    """`marin-rl sft`, killed at each change: before it, amid it or after it."""
    monkeypatch.setattr(forked_runs, "flow", "flows.sft")
    whole, killed = (debug(tmp_path / name, "sft.steps=4") for name in ("whole", "killed"))
    operations = NamedOperations(whole.root)
    with inject_faults(operations):
        flows.sft.start(whole)
    names = [name for name in operations.names.seen if not READS.match(name)]
    turn = random.Random(printed_seed()).randrange(len(KILLS))
    faults = {name: KILLS[(turn + number) % len(KILLS)] for number, name in enumerate(names)}
    starts, left = forked_runs.run_until_all_came(killed, faults)
    print(f"{starts} starts, {len(names) - len(left)} of {len(names)} changes came")
    assert starts == len(names) - len(left) + 1 > 10
    assert learned(killed) == learned(whole)


def learned(config: Config) -> list[object]:
    """The parameters of each checkpoint of a warm start, every byte of them verified."""
    run = Run.open(config.root, config.run_id)
    assert {f"{sft_slot(step)}/manifest.json" for step in (2, 4)} <= committed_digests(
        config
    ).keys()
    refs = [committed(run, sft_slot(step)) for step in (2, 4)]
    return [manifest_of(run.store, ref).extra["parameters_digest"] for ref in refs if ref]


# --- object stores ------------------------------------------------------------------------------


@dataclass
class Bucket:
    """A bucket to play in, and the faults of its server."""

    new: Callable[[], Config]
    faults: Faults

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """Operations of the store there, and requests that they make, of an undisturbed run."""
        self.faults.clear()
        config = self.new()
        operations = NamedOperations(config.root)
        with inject_faults(operations):
            start(config)
        return operations.names.seen, [*self.faults.names.seen]  # which others go on with

    def disturbed(self, fault: str) -> Config:
        """A run that suffers a fault by its number and, where that ends it, is started again."""
        config = self.new()
        with inject_faults(Operations(parse(fault))):
            self.play(config, 2)
        return config

    def silent(self, group: Sequence[Case]) -> tuple[Config, list[str]]:
        """A run whose operations suffer; the names of those that did not come."""
        config = self.new()
        operations = NamedOperations(config.root, {name: kind for kind, name in group})
        with inject_faults(operations):
            self.play(config, 1 + len(group))
        return config, list(operations.names.waiting)

    def refused(self, group: Sequence[Case]) -> tuple[Config, list[str]]:
        """A run whose requests meet faults in the server; the names of those that did not come."""
        config = self.new()
        self.faults.clear({name: REQUESTS[kind]() for kind, name in group})
        self.play(config, 1 + len(group))
        missed = list(self.faults.names.waiting)
        self.faults.clear()
        return config, missed

    def play(self, config: Config, starts_max: int) -> None:
        """Play a run to its end, started again wherever a fault that may pass ended it."""
        for _ in range(starts_max):
            error = ended_by(config)
            if error is None:
                return
            assert error.transient, f"{type(error).__name__}: {error}"
        raise AssertionError(f"it was started {starts_max} times, and did not end well")


def ended_by(config: Config) -> MarinRLError | None:
    """Play a run; the error that ended it, or None."""
    try:
        start(config)
    except MarinRLError as error:
        return error
    return None


@pytest.fixture(scope="module", params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest, api: str) -> Iterator[Bucket]:
    """The fake GCS and moto's S3."""
    with {"gs": fake_gcs, "s3": fake_s3}[request.param]() as server:
        server.create_bucket("bucket")

        def new() -> Config:
            root = {"root": f"{request.param}://bucket/{uuid.uuid4()}"}
            more = {"storage_options": server.options}
            config = debug(Path("unused"), "flow.retry_delay_s=0.02")  # free, as `root` is
            return config.model_copy(update=root | more)

        yield Bucket(new, server.faults)


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_silence(bucket: Bucket, undisturbed: Undisturbed) -> None:
    """One among as many operations as a folder takes; a bucket takes more, but they cost a run."""
    numbers = range(1, undisturbed.operations + 1)
    every = [f"{kind}:{at}" for at in numbers for kind in SILENCES]
    assert play(chosen(every, 1), bucket.disturbed, undisturbed.expected) == []


@pytest.mark.timeout(ALL_S_MAX)
def test_silences_at_operations(bucket: Bucket, undisturbed: Undisturbed) -> None:
    operations, _ = bucket.names
    every = in_groups(operations, SILENCES, APART)
    assert play_groups(every, bucket.silent, undisturbed.expected) == []


@pytest.mark.timeout(ALL_S_MAX)
def test_requests_that_get_no_answer(bucket: Bucket, undisturbed: Undisturbed) -> None:
    _, requests = bucket.names
    every = in_groups(requests, tuple(REQUESTS), APART)
    assert play_groups(every, bucket.refused, undisturbed.expected) == []


def test_two_processes_at_once_on_an_object_store(bucket, forked_runs, undisturbed):
    """Nothing locks a bucket: each adopts what the other was first to commit."""
    config = bucket.new()
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(forked_runs.run, [config] * 2)] == [0, 0], forked_runs.said()
    assert undisturbed.expected.same_as(outcome(config)) == []

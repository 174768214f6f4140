"""A state machine over whole runs: Hypothesis looks for the schedule that breaks the protocol.

The rules are the scheduler's choices of test_simulation.py, here shrunk to a shortest failure.
test_commit_protocol.py does the same for a single slot, at which attempts differ in content.
"""

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.schedules import delete_on_conflict, trusts_exists
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

PROCESSES_MAX = 5


class Protocol(RuleBasedStateMachine):
    """Processes come, stop, die and wake up; the bucket checks the laws at every write."""

    more: dict[str, Any] = {}  # noqa: RUF012 - a subclass says how its world is wrong
    processes = Bundle("processes")

    @initialize(rounds=st.integers(1, 3), shards=st.integers(1, 2))
    def begin(self, rounds: int, shards: int) -> None:
        self.world = World(Shape(rounds=rounds, shards=shards), **self.more)
        self.clock = ExitStack()
        self.clock.enter_context(clock_of(self.world))

    @precondition(lambda self: len(self.world.processes) < PROCESSES_MAX)
    @rule(target=processes, patient=st.booleans())
    def start(self, *, patient: bool) -> Process:
        return self.world.start(patient=patient)

    @precondition(lambda self: len(self.world.processes) < PROCESSES_MAX)
    @rule(target=processes, keep=st.sampled_from([None, 2]))
    def collect(self, keep: int | None) -> Process:
        return self.world.collect(keep=keep)

    @rule(days=st.sampled_from([0.5, 8.5, 30]))
    def let_days_pass(self, days: float) -> None:
        self.world.let_days_pass(days)

    @rule(process=processes, operations=st.integers(1, 30))
    def go_on(self, process: Process, operations: int) -> None:
        """Many operations at once: what goes well is not worth a choice each."""
        while process.operation is not None and operations:
            self.world.go_on(process, "served")
            operations -= 1

    @rule(
        process=processes,
        create=st.sampled_from(CREATE_FATES),
        write=st.sampled_from(WRITE_FATES),
        read=st.sampled_from(READ_FATES),
    )
    def trouble(self, process: Process, create: str, write: str, read: str) -> None:
        if process.operation is not None:
            fates = {"create": create, "write": write, "delete": write}
            self.world.go_on(process, fates.get(process.operation[0], read))

    @rule(process=processes, served=st.booleans())
    def kill(self, *, process: Process, served: bool) -> None:
        if process.operation is not None:
            self.world.kill(process, served=served)

    @precondition(lambda self: self.world.late)
    @rule(which=st.randoms(use_true_random=False))
    def arrive_late(self, which: Any) -> None:
        self.world.late.pop(which.randrange(len(self.world.late)))()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            with self.clock:
                self.world.settle()
            assert all(ended_well(process) for process in self.world.processes)


Protocol.TestCase.settings = settings(
    settings.get_profile("marin-rl"), max_examples=30, stateful_step_count=40
)
TestProtocol = Protocol.TestCase


@pytest.mark.parametrize("wrong", [delete_on_conflict, trusts_exists])
def test_the_machine_catches_simpler_protocols(wrong: Any) -> None:
    class Wrong(Protocol):
        more = {"commit": wrong}  # noqa: RUF012

    quick = settings(settings.get_profile("marin-rl"), phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=quick)

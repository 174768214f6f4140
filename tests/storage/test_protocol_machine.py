"""A state machine over the real commit code: Hypothesis looks for a schedule that breaks a law.

The rules are the scheduler's choices of test_simulation.py, here shrunk to a shortest failure, over
one slot at which attempts differ in content.
"""

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from storage.simulation.schedules import trusts_exists, trusts_silence
from storage.simulation.simulated_process import Player
from storage.simulation.simulator import (
    CREATE_FATES,
    READ_FATES,
    WRITE_FATES,
    Killed,
    Process,
    World,
)

from marin_rl.errors import CommitConflict, CommitUnknown, StoreUnavailable
from marin_rl.storage.commits import manifest_key, new_manifest
from schemas.manifests import Manifest

PROCESSES_MAX = 5
SLOT = "checkpoints/round-00001"


class Machine(RuleBasedStateMachine):
    """Processes come, stop, die and wake up; the bucket checks the laws at every write."""

    more: dict[str, Any] = {}  # noqa: RUF012 - a subclass says how its world is wrong
    processes = Bundle("processes")
    world: World

    @precondition(lambda self: len(self.world.processes) < PROCESSES_MAX)
    @rule(target=processes, patient=st.booleans())
    def start(self, *, patient: bool) -> Process:
        return self.world.start(patient=patient)

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


class Attempt(Player):
    """An attempt at one slot. Of four attempts the last has another fingerprint."""

    @property
    def manifest(self) -> Manifest:
        other = int(self.process.name.rpartition("-")[2]) % 4 == 3
        fingerprint = "other" if other else "same"
        return new_manifest(SLOT, attempt=self.process.name, fingerprint=fingerprint)

    def play(self) -> Any:
        self.process.manifest = made = self.manifest  # type: ignore[attr-defined]
        patience = {"deadline_s": self.process.deadline_s, "sleep": lambda _: None}
        return self.world.commit(self.store, made, **patience)


class SlotWorld(World):
    """A world of one slot."""

    player_type = Attempt


class OneSlot(Machine):
    """Any number of attempts at one slot, with two different fingerprints among them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = SlotWorld(**self.more)

    @invariant()
    def whoever_ended_told_the_truth(self) -> None:
        stored = self.world.bucket.objects.get(manifest_key(SLOT))
        committed = Manifest.from_json(stored) if stored else None
        for process in self.world.processes:
            result, made = process.result, process.manifest  # type: ignore[attr-defined]
            if isinstance(result, Manifest):
                assert result == committed
                assert result.fingerprint == made.fingerprint
            elif isinstance(result, CommitConflict):
                assert committed is not None
                assert committed.fingerprint != made.fingerprint
            elif result is not None and not isinstance(result, Killed):
                assert isinstance(result, CommitUnknown | StoreUnavailable)
                assert not process.patient, "whoever has time left tries again"

    def teardown(self) -> None:
        """From any state, a good store and further attempts of each kind settle everything."""
        for process in self.world.waiting:
            self.world.finish(process)
        for _ in range(4):
            last = self.world.finish(self.world.start())
            assert isinstance(last, Manifest | CommitConflict)
        self.whoever_ended_told_the_truth()


OneSlot.TestCase.settings = settings(
    settings.get_profile("marin-rl"), max_examples=60, stateful_step_count=30
)
TestOneSlot = OneSlot.TestCase


@pytest.mark.parametrize("wrong", [trusts_exists, trusts_silence])
def test_the_machine_catches_simpler_protocols(wrong: Any) -> None:
    class Wrong(OneSlot):
        more = {"commit": wrong}  # noqa: RUF012

    quick = settings(settings.get_profile("marin-rl"), phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=quick)

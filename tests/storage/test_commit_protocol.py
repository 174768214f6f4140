"""A state machine over the real commit code: kills, lost replies, late writes, many attempts.

Each attempt runs `commit_manifest` in a thread of its own against a store that stops at every
operation until the machine decides its fate, so every interleaving is chosen by Hypothesis and
repeats from its seed.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from marin_rl.errors import (
    CommitConflict,
    CommitUnknown,
    ObjectMissing,
    StorageError,
    StoreUnavailable,
)
from marin_rl.storage.commits import commit_manifest, manifest_key, new_manifest
from marin_rl.storage.stores.filesystem import ObjectStore, PutOutcome
from schemas.manifests import Manifest

SLOT = "checkpoints/round-00001"
KEY = manifest_key(SLOT)
WAIT_S = 120.0

# What may become of a request: it is served; served but the reply is lost; served but a retry
# below us makes our own write look like another's; not served. See also `hold_up`.
PUT_FATES = ("served", "reply lost", "seems another's", "not served")
READ_FATES = ("served", "failed")


class Killed(BaseException):
    """The process of an attempt dies at this operation."""


class Objects:
    """The truth behind the store: an object is created at most once, and its first bytes stay."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def create(self, key: str, data: bytes) -> PutOutcome:
        """Create atomically."""
        if key in self.data:
            return PutOutcome.EXISTS
        self.data[key] = data
        return PutOutcome.CREATED


@dataclass
class Attempt:
    """One process trying to commit the slot, stopped at its next operation."""

    manifest: Manifest
    deadline_s: float
    thread: threading.Thread | None = None
    operation: tuple[str, str, bytes] | None = None
    result: Manifest | StorageError | Killed | None = None
    fates: "queue.Queue[Any]" = field(default_factory=queue.Queue)
    stopped: "queue.Queue[None]" = field(default_factory=queue.Queue)


class StoppingStore(ObjectStore):
    """Stops its attempt at every operation, and does what the machine then says."""

    def __init__(self, objects: Objects, attempt: Attempt) -> None:
        self.url, self.objects, self.attempt = "stopping://", objects, attempt

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        fate = self._stop("put", key, data)
        if fate == "served":
            return self.objects.create(key, data)
        if fate in ("reply lost", "seems another's"):
            self.objects.create(key, data)
        return PutOutcome.EXISTS if fate == "seems another's" else PutOutcome.UNKNOWN

    def read(self, key: str) -> bytes:
        if self._stop("read", key, b"") == "failed":
            raise StoreUnavailable("503")
        if key not in self.objects.data:
            raise ObjectMissing(key)
        return self.objects.data[key]

    def _stop(self, kind: str, key: str, data: bytes) -> str:
        self.attempt.operation = (kind, key, data)
        self.attempt.stopped.put(None)
        fate = self.attempt.fates.get(timeout=WAIT_S)
        if fate == "killed":
            raise Killed
        return fate

    def url_of(self, key: str) -> str:
        return self.url + key

    def _never(self, *_: Any) -> Any:
        raise AssertionError("the commit protocol looks and creates: it never does this")

    put_part = list = children = delete = size = local_path = at = _never


class CommitProtocol(RuleBasedStateMachine):
    """Any number of attempts at one slot, with two different fingerprints among them."""

    commit = staticmethod(commit_manifest)
    attempts = Bundle("attempts")
    late = Bundle("late")

    def __init__(self) -> None:
        super().__init__()
        self.objects = Objects()
        self.all: list[Attempt] = []
        self.first: bytes | None = None

    @rule(
        target=attempts,
        fingerprint=st.sampled_from(["same", "same", "same", "other"]),
        patient=st.booleans(),
    )
    def start(self, *, fingerprint: str, patient: bool) -> Attempt:
        name = f"attempt-{len(self.all)}"
        manifest = new_manifest(SLOT, attempt=name, fingerprint=fingerprint)
        attempt = Attempt(manifest, deadline_s=3600.0 if patient else 0.0)
        attempt.thread = threading.Thread(target=self._work, args=(attempt,))
        self.all.append(attempt)
        attempt.thread.start()
        attempt.stopped.get(timeout=WAIT_S)
        return attempt

    @rule(attempt=attempts, put=st.sampled_from(PUT_FATES), read=st.sampled_from(READ_FATES))
    def go_on(self, attempt: Attempt, put: str, read: str) -> None:
        if attempt.operation is not None:
            self._decide(attempt, put if attempt.operation[0] == "put" else read)

    @rule(target=late, attempt=attempts, killed=st.booleans())
    def hold_up(self, *, attempt: Attempt, killed: bool) -> Callable[[], None]:
        """Delay a create beyond the time that its process waits for it, or lives."""
        if attempt.operation is None or attempt.operation[0] != "put":
            return lambda: None
        _, key, data = attempt.operation
        self._decide(attempt, "killed" if killed else "held up")
        return lambda: self.objects.create(key, data) and None

    @rule(write=consumes(late))
    def arrive_late(self, write: Callable[[], None]) -> None:
        write()

    @rule(attempt=attempts, served=st.booleans())
    def kill(self, *, attempt: Attempt, served: bool) -> None:
        """kill -9, before or after the request in flight takes effect."""
        if attempt.operation is not None:
            kind, key, data = attempt.operation
            if served and kind == "put":
                self.objects.create(key, data)
            self._decide(attempt, "killed")

    @invariant()
    def a_commit_never_changes(self) -> None:
        now = self.objects.data.get(KEY)
        if self.first is not None:
            assert now == self.first
        self.first = now
        assert set(self.objects.data) <= {KEY}

    @invariant()
    def whoever_ended_told_the_truth(self) -> None:
        for attempt in self.all:
            if attempt.result is not None:
                self._check(attempt, attempt.result)

    def teardown(self) -> None:
        """From any state, a good store and one more attempt per fingerprint settle everything."""
        for attempt in self.all:
            while attempt.operation is not None:
                self._decide(attempt, "served")
        for fingerprint in ("same", "other"):
            attempt = self.start(fingerprint=fingerprint, patient=True)
            while attempt.operation is not None:
                self._decide(attempt, "served")
            assert isinstance(attempt.result, Manifest | CommitConflict)
        assert self.objects.data
        self.whoever_ended_told_the_truth()

    def _check(self, attempt: Attempt, result: Manifest | StorageError | Killed) -> None:
        stored = self.objects.data.get(KEY)
        committed = Manifest.from_json(stored) if stored else None
        if isinstance(result, Manifest):
            assert result == committed
            assert result.fingerprint == attempt.manifest.fingerprint
        elif isinstance(result, CommitConflict):
            assert committed is not None
            assert committed.fingerprint != attempt.manifest.fingerprint
        elif not isinstance(result, Killed):
            assert isinstance(result, CommitUnknown | StoreUnavailable)
            assert attempt.deadline_s == 0, "whoever has time left tries again"

    def _decide(self, attempt: Attempt, fate: str) -> None:
        """Let the attempt run to its next operation, or to its end."""
        attempt.operation = None
        attempt.fates.put(fate)
        attempt.stopped.get(timeout=WAIT_S)

    def _work(self, attempt: Attempt) -> None:
        store = StoppingStore(self.objects, attempt)
        try:
            attempt.result = self.commit(
                store, attempt.manifest, deadline_s=attempt.deadline_s, sleep=lambda _: None
            )
        except (StorageError, Killed) as error:
            attempt.result = error
        attempt.stopped.put(None)


CommitProtocol.TestCase.settings = settings(
    settings.get_profile("marin-rl"), max_examples=60, stateful_step_count=30
)
TestCommitProtocol = CommitProtocol.TestCase


def trusts_exists(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: takes EXISTS for another's, though it may be our own write."""
    if store.put_if_absent(KEY, manifest.to_json()) is PutOutcome.EXISTS:
        raise CommitConflict("it exists")
    return manifest


def trusts_silence(store: ObjectStore, manifest: Manifest, **_: Any) -> Manifest:
    """Wrong: takes UNKNOWN for success, and never reads back."""
    store.put_if_absent(KEY, manifest.to_json())
    return manifest


@pytest.mark.parametrize("wrong", [trusts_exists, trusts_silence])
def test_the_machine_catches_simpler_protocols(wrong: Callable[..., Manifest]) -> None:
    class Wrong(CommitProtocol):
        commit = staticmethod(wrong)

    quick = settings(settings.get_profile("marin-rl"), phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=quick)

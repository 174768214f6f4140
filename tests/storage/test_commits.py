"""The commit protocol with known answers, against real faults, and under real races."""

import pickle
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.fake_stores import FakeGCS, Fault

from marin_rl import errors
from marin_rl.errors import (
    CommitConflict,
    CommitUnknown,
    CorruptObject,
    MarinRLError,
    NewerSchema,
    StoreUnavailable,
)
from marin_rl.storage.commits import (
    commit_manifest,
    commit_object,
    fingerprint,
    new_attempt,
    new_manifest,
    parent_of,
    part_of,
    read_manifest,
    ref_of,
)
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from schemas.manifests import Manifest, Parent, sealed_json, sha256_of

SLOT = "batches/round-00003"


def manifest(attempt: str = "a", content: str = "same", slot: str = SLOT) -> Manifest:
    return new_manifest(
        slot, attempt=attempt, fingerprint=fingerprint("batches", {"content": content})
    )


def test_a_commit_can_be_read_back_with_its_parts(store: ObjectStore) -> None:
    parent = Parent("rollouts/round-00003", "ab" * 32)
    data = b"PAR1 rows"
    store.put_part(f"{SLOT}/a/batches.parquet", data)
    ours = new_manifest(
        SLOT,
        attempt=new_attempt(),
        fingerprint=fingerprint("batches", {"x": 1}, [parent]),
        parents=[parent],
        parts=[replace(part_of("a/batches.parquet", data, rows=2), minima={"reward": 0.25})],
        totals={"rows": 2, "reward_mean": 0.5},
        extra={"length": 64},
    )
    assert read_manifest(store, SLOT) is None
    assert commit_manifest(store, ours) == ours
    found = read_manifest(store, SLOT)
    assert found is not None
    assert found == (ours, sha256_of(store.read(f"{SLOT}/manifest.json")))
    assert ours.parts[0].sha256 == sha256_of(data)
    assert ours.parts[0].bytes == 9
    ref = ref_of(ours, reused=True)
    assert (ref.slot, ref.sha256, ref.reused) == (SLOT, found[1], True)
    assert ref.summary == {"rows": 2, "reward_mean": 0.5}
    assert parent_of(ref) == Parent(SLOT, found[1])
    assert "numpy" in ours.libraries
    assert "package" in ours.code


def test_the_second_of_two_equal_attempts_adopts_the_first(store: ObjectStore) -> None:
    first = commit_manifest(store, manifest("first"))
    assert commit_manifest(store, manifest("second")) == first
    assert commit_manifest(store, manifest("first")) == first, "ours, made again: done"


def test_another_content_is_a_conflict_that_shows_both(store: ObjectStore) -> None:
    first, other = manifest("first"), manifest("second", content="other")
    commit_manifest(store, first)
    with pytest.raises(CommitConflict) as caught:
        commit_manifest(store, other)
    for part in (first.fingerprint, other.fingerprint, "first", "second", store.url_of(SLOT)):
        assert part in str(caught.value)
    assert commit_manifest(store, first) == first


def test_a_slot_written_by_hand_is_corrupt_not_ours(store: ObjectStore) -> None:
    store.put_part(f"{SLOT}/manifest.json", b"{}")
    with pytest.raises(CorruptObject, match=r"manifest\.json: expected format"):
        commit_manifest(store, manifest())
    with pytest.raises(CorruptObject):
        read_manifest(store, SLOT)


def test_a_newer_manifest_is_refused(store: ObjectStore) -> None:
    record = {"format": "marin-rl/manifest", "version": 2}
    store.put_part(f"{SLOT}/manifest.json", sealed_json(record))
    with pytest.raises(NewerSchema, match="version 2 is newer than 1"):
        read_manifest(store, SLOT)


def test_a_manifest_in_the_wrong_place_is_corrupt(store: ObjectStore) -> None:
    store.put_part("batches/round-00004/manifest.json", manifest().to_json())
    with pytest.raises(CorruptObject, match="expected the manifest of batches/round-00004"):
        read_manifest(store, "batches/round-00004")


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    store = open_store("memory://flipped")
    data = manifest().to_json()
    for position in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 1
        store.put_part(f"{SLOT}/manifest.json", bytes(flipped))
        with pytest.raises((CorruptObject, NewerSchema)):
            read_manifest(store, SLOT)


def test_a_fingerprint_covers_everything_that_decides_the_content() -> None:
    parents = [Parent("checkpoints/round-00000", "1" * 64)]
    base = fingerprint("shard", {"a": 1, "b": [2, 3]}, parents, 1)
    assert base == fingerprint("shard", {"b": [2, 3], "a": 1}, parents, 1)
    others = [
        fingerprint("batches", {"a": 1, "b": [2, 3]}, parents, 1),
        fingerprint("shard", {"a": 2, "b": [2, 3]}, parents, 1),
        fingerprint("shard", {"a": 1, "b": [3, 2]}, parents, 1),
        fingerprint("shard", {"a": 1, "b": [2, 3]}, [], 1),
        fingerprint("shard", {"a": 1, "b": [2, 3]}, [Parent(parents[0].slot, "2" * 64)], 1),
        fingerprint("shard", {"a": 1, "b": [2, 3]}, parents, 2),
    ]
    assert len({base, *others}) == 7
    assert len(base) == 64


def test_attempts_are_unique() -> None:
    assert len({new_attempt() for _ in range(1000)}) == 1000


# --- faults of a real store --------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 409, None])
@pytest.mark.parametrize("when", ["before", "after"])
def test_faults_of_the_store_do_not_reach_the_caller(gcs, when, status):
    store = open_store(f"gs://bucket/commit-{when}-{status}", gcs.options)
    gcs.faults.add(Fault("POST", SLOT, when, status))
    ours = manifest()
    assert commit_manifest(store, ours) == ours
    assert store.list() == [f"{SLOT}/manifest.json"]


def test_faults_on_the_look_and_on_the_create_together(gcs: FakeGCS) -> None:
    store = open_store("gs://bucket/commit-both", gcs.options)
    gcs.faults.add(Fault("POST", SLOT, "after", None), Fault("GET", SLOT, "before", 503, times=2))
    ours = manifest()
    assert commit_manifest(store, ours) == ours


def test_silence_until_the_deadline_is_commit_unknown_and_can_be_resumed(gcs: FakeGCS) -> None:
    store = open_store("gs://bucket/commit-silence", gcs.options)
    gcs.faults.add(Fault("POST", SLOT, "before", 503, times=1000))
    with pytest.raises(CommitUnknown, match=r"no answer for 0\.3 s on whether") as error:
        commit_manifest(store, manifest(), deadline_s=0.3)
    assert error.value.transient
    gcs.faults.clear()
    assert commit_manifest(store, manifest("b")).attempt == "b"


def test_a_store_that_cannot_be_read_is_unavailable_and_nothing_is_written(gcs: FakeGCS) -> None:
    store = open_store("gs://bucket/commit-unread", gcs.options)
    gcs.faults.add(Fault("GET", SLOT, "before", 503, times=1000))
    with pytest.raises(StoreUnavailable, match="so nothing was written"):
        commit_manifest(store, manifest(), deadline_s=0)
    assert "POST" not in gcs.faults.seen


def test_a_single_object_is_its_own_commit(store: ObjectStore) -> None:
    def identify(data: bytes) -> tuple[str, str]:
        attempt, fp, _ = data.decode().split("|")
        return attempt, fp

    def commit(data: bytes) -> bytes:
        attempt, fp = identify(data)
        return commit_object(
            store, "shard", data, attempt=attempt, fingerprint=fp, identify=identify
        )

    assert commit(b"a|fp|rows of a") == b"a|fp|rows of a"
    assert commit(b"b|fp|rows of b") == b"a|fp|rows of a"
    with pytest.raises(CommitConflict, match=r"fingerprint fp \(attempt a\); expected other"):
        commit(b"c|other|rows of c")


# --- races -------------------------------------------------------------------------------------


def test_racing_contents_leave_one_winner_and_conflicts(store: ObjectStore) -> None:
    barrier, outcomes = threading.Barrier(4), []

    def compete(name: str) -> None:
        ours = manifest(name, content=name)
        barrier.wait(30)
        try:
            outcomes.append(commit_manifest(store, ours).attempt)
        except CommitConflict:
            outcomes.append("conflict")

    _run([lambda i=i: compete(f"thread-{i}") for i in range(4)])
    found = read_manifest(store, SLOT)
    assert found is not None
    assert sorted(outcomes) == ["conflict"] * 3 + [found[0].attempt]


def _run(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# --- errors ------------------------------------------------------------------------------------


def test_every_error_survives_pickling() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) >= 18
    for kind in kinds:
        assert issubclass(kind, MarinRLError)
        copy = pickle.loads(pickle.dumps(kind("expected 1, found 2")))
        assert (type(copy), str(copy)) == (kind, "expected 1, found 2")
        assert copy.transient is kind.transient

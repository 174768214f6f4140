"""The commit protocol: a slot is committed by one atomic create of one object, and never changes.

Look at the known key; create the object if absent; when the store says "exists" or nothing at all,
read back and compare the attempt id, for "exists" may be our own write whose reply was lost. Ours
is done; another's with our fingerprint is adopted; another fingerprint is a conflict; absent means
the same bytes are tried again until the deadline. Nothing is ever deleted here.
"""

import random
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from marin_rl.errors import (
    CommitConflict,
    CommitExpired,
    CommitUnknown,
    CorruptObject,
    NewerSchema,
    ObjectMissing,
    StoreUnavailable,
)
from marin_rl.slot_ref import SlotRef
from marin_rl.storage.provenance import code_version, library_versions
from marin_rl.storage.stores.filesystem import ObjectStore, PutOutcome
from marin_rl.storage.written_behind import promised, settle
from schemas import Malformed, NewerVersion
from schemas.manifests import Manifest, Parent, Part, canonical_json, sha256_of

DEADLINE_S = 60.0
# Pauses double from one to the other: short enough not to be noticed after a lost packet, long
# enough not to crowd a store that asks for fewer requests.
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 4.0

# After this long an attempt commits no more, so that gc may take what it left uncommitted. Longer
# than any stage may last.
ATTEMPT_LIFETIME_S = 8 * 24 * 3600.0

_NAMED_AT = "%Y%m%dT%H%M%S"
_ATTEMPT = re.compile(r"\d{8}T\d{6}-[0-9a-f]{16}")

Identify = Callable[[bytes], tuple[str, str]]


def new_attempt() -> str:
    # UTC time for people who list folders, then 64 random bits: no other attempt has the name.
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(8)}"


def attempt_in(key: str) -> str | None:
    """The attempt that an object is named for; None for names that no attempt gives."""
    # Anywhere in the key: files have a prefix and a suffix around the name, folders neither.
    match = _ATTEMPT.search(key)
    if match is None:
        return None
    try:
        attempt_age_s(match[0], datetime.now(UTC))
    except ValueError:  # a day that no calendar has
        return None
    return match[0]


def attempt_age_s(attempt: str, now: datetime) -> float:
    """Seconds since an attempt was named, by the clock of who named it. Negative if clocks differ.

    Raises ValueError for what is not the name of an attempt.
    """
    # From the name, not the store: modification times change when a run is copied.
    named_at = datetime.strptime(attempt.partition("-")[0], _NAMED_AT).replace(tzinfo=UTC)
    return (now - named_at).total_seconds()


def fingerprint(
    kind: str, content: Mapping[str, Any], parents: Sequence[Parent] = (), schema_version: int = 1
) -> str:
    """SHA-256 over all that decides a slot's content: equal fingerprints may replace each other."""
    record = {
        "kind": kind,
        "content": content,
        # By digest too: a result made from other bytes under the same name must not be adopted.
        "parents": [[parent.slot, parent.sha256] for parent in parents],
        # So that a newer format conflicts with an older commit instead of adopting it.
        "schema_version": schema_version,
    }
    return sha256_of(canonical_json(record))


def manifest_key(slot: str) -> str:
    return f"{slot}/manifest.json"


def part_of(name: str, data: bytes | memoryview, *, rows: int | None = None) -> Part:
    return Part(name=name, bytes=len(data), sha256=sha256_of(data), rows=rows)


def new_manifest(
    slot: str,
    *,
    attempt: str,
    fingerprint: str,
    parents: Sequence[Parent] = (),
    parts: Sequence[Part] = (),
    totals: Mapping[str, int | float] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """A manifest of this moment, written by this code with these libraries."""
    return Manifest(
        slot=slot,
        attempt=attempt,
        fingerprint=fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        # Of this moment: the code may have changed since the run began.
        code=dict(code_version()),
        libraries=dict(library_versions()),
        parents=tuple(parents),
        parts=tuple(parts),
        totals=dict(totals or {}),
        extra=dict(extra or {}),
    )


def ref_of(manifest: Manifest, *, reused: bool = False) -> SlotRef:
    """The reference that travels between tasks; its summary is the manifest's totals."""
    summary = {name: float(value) for name, value in manifest.totals.items()}
    return SlotRef(slot=manifest.slot, sha256=manifest.sha256, reused=reused, summary=summary)


def parent_of(ref: SlotRef) -> Parent:
    return Parent(slot=ref.slot, sha256=ref.sha256)


def parse_manifest(data: bytes, source: str) -> Manifest:
    """The manifest in `data`. Raises CorruptObject or NewerSchema naming `source`."""
    with record_errors(source):
        return Manifest.from_json(data)


@contextmanager
def record_errors(source: str) -> Iterator[None]:
    """Turn what the parsers of `schemas` raise into CorruptObject or NewerSchema for `source`."""
    try:
        yield
    except NewerVersion as error:
        raise NewerSchema(f"{source}: {error}") from None
    except Malformed as error:
        raise CorruptObject(f"{source}: {error}") from None


def read_manifest(store: ObjectStore, slot: str) -> tuple[Manifest, str] | None:
    """The manifest that commits `slot` and the SHA-256 of its bytes; None while uncommitted."""
    settle(store.url_of(slot))
    key = manifest_key(slot)
    try:
        data = store.read(key)
    except ObjectMissing:
        return None
    manifest = parse_manifest(data, store.url_of(key))
    # A manifest copied from another slot would vouch for files that are not its own.
    if manifest.slot != slot:
        raise CorruptObject(
            f"{store.url_of(key)}: expected the manifest of {slot}, found that of {manifest.slot}"
        )
    return manifest, sha256_of(data)


def committed_manifest(store: ObjectStore, slot: str, hint: str = "") -> Manifest:
    """The manifest that commits `slot`. Raises ObjectMissing, with `hint`; CorruptObject."""
    committed = read_manifest(store, slot)
    if committed is None:
        raise ObjectMissing(f"{store.url_of(slot)} is not committed" + (hint and f": {hint}"))
    return committed[0]


def manifest_of(store: ObjectStore, ref: SlotRef) -> Manifest:
    """The manifest that `ref` names. Raises ObjectMissing, or CorruptObject if it is another.

    Files that it names may be written still: `settle` waits for them.
    """
    if (manifest := promised(store.url_of(ref.slot), ref)) is not None:
        return manifest
    manifest = committed_manifest(store, ref.slot)
    # By the digest, too: a slot that was deleted and made again is another slot.
    if manifest.sha256 != ref.sha256:
        raise CorruptObject(
            f"{store.url_of(ref.slot)}: expected SHA-256 {ref.sha256}, found {manifest.sha256}: "
            "the reference is of another run, or the manifest was altered"
        )
    return manifest


def count_in(manifest: Manifest, name: str, source: str, *, at_most: int = 2**31) -> int:
    """The total `name` of a manifest, a whole number from 0. Raises CorruptObject naming `source`.

    Totals are what a slot says of itself: a damaged or foreign record may lack them.
    """
    value = manifest.totals.get(name)
    if value is None or value != value or not 0 <= value <= at_most or value != int(value):
        raise CorruptObject(
            f"{source}: expected a whole number from 0 to {at_most} as its total {name!r}, found "
            f"{value!r}"
        )
    return int(value)


def find_commit(store: ObjectStore, slot: str, fingerprint: str) -> SlotRef | None:
    """The slot if it is committed. Raises CommitConflict if it holds another fingerprint."""
    committed = read_manifest(store, slot)
    if committed is None:
        return None
    manifest, _ = committed
    check_fingerprint(store.url_of(slot), manifest.attempt, manifest.fingerprint, fingerprint)
    return ref_of(manifest, reused=True)


def check_fingerprint(
    source: str, attempt: str, committed: str, expected: str, *, ours: str = "not yet begun"
) -> None:
    """Raise CommitConflict, with both fingerprints and attempts, unless they are equal."""
    if committed != expected:
        raise CommitConflict(
            f"{source} is committed with fingerprint {committed} (attempt {attempt}); expected "
            f"{expected} (attempt {ours}): the configuration, a parent or the code's schema "
            "differs. Committed slots never change: use another run_id, or the configuration the "
            "run was started with"
        )


def commit_manifest(
    store: ObjectStore,
    manifest: Manifest,
    *,
    deadline_s: int | float = DEADLINE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Manifest:
    """Commit the slot that `manifest` describes, whose parts are written already.

    Returns the manifest that is committed: ours, or that of another attempt with the same
    fingerprint. Raises CommitExpired for an attempt of which gc may have taken parts, and what
    `commit_object` raises.
    """
    key = manifest_key(manifest.slot)
    # Before the create: gc deletes parts of attempts that are older, and a manifest that names
    # parts which are gone would be a corrupt slot for ever.
    if (adopted := _expired(store, manifest)) is not None:
        return adopted

    def identify(data: bytes) -> tuple[str, str]:
        other = parse_manifest(data, store.url_of(key))
        return other.attempt, other.fingerprint

    data = commit_object(
        store,
        key,
        manifest.to_json(),
        attempt=manifest.attempt,
        fingerprint=manifest.fingerprint,
        identify=identify,
        deadline_s=deadline_s,
        sleep=sleep,
    )
    # What is stored, which may be the winner's: children name its digest, not that of ours.
    return parse_manifest(data, store.url_of(key))


def commit_slot(store: ObjectStore, slot: str, *, attempt: str, **record: Any) -> SlotRef:
    """Commit `slot`, whose parts are written, with the manifest of `new_manifest`.

    Another attempt's commit of the same fingerprint is adopted. Raises as `commit_manifest` does.
    """
    # After the parts: they are durable by now, so no manifest names a file that a crash lost.
    return commit_parts(store, new_manifest(slot, attempt=attempt, **record))


def commit_parts(store: ObjectStore, manifest: Manifest) -> SlotRef:
    """Commit the slot of `manifest`, whose parts are written: see `commit_manifest`."""
    winner = commit_manifest(store, manifest)
    return ref_of(winner, reused=winner.attempt != manifest.attempt)


def _expired(store: ObjectStore, manifest: Manifest) -> Manifest | None:
    """Return None while the attempt may commit; after that, the manifest that another committed."""
    # Not named by `new_attempt`, so it has no age; gc leaves its files alone for the same reason.
    if attempt_in(manifest.attempt) is None:
        return None
    age_s = attempt_age_s(manifest.attempt, datetime.now(UTC))
    if age_s < ATTEMPT_LIFETIME_S:
        return None
    # Too late to create, not too late to adopt what another attempt committed.
    committed = read_manifest(store, manifest.slot)
    if committed is None:
        raise CommitExpired(
            f"{store.url_of(manifest.slot)}: attempt {manifest.attempt} began {age_s:.0f} s ago, "
            f"expected less than {ATTEMPT_LIFETIME_S:.0f} s: `marin-rl gc` may have taken its "
            "files; run again, which makes a new attempt"
        )
    other, source = committed[0], store.url_of(manifest.slot)
    check_fingerprint(
        source, other.attempt, other.fingerprint, manifest.fingerprint, ours=manifest.attempt
    )
    return other


def commit_object(
    store: ObjectStore,
    key: str,
    data: bytes,
    *,
    attempt: str,
    fingerprint: str,
    identify: Identify,
    deadline_s: int | float = DEADLINE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """Commit a slot by creating `key`; returns the committed bytes, ours or the adopted winner's.

    `identify` reads (attempt, fingerprint) out of such bytes. Raises CommitConflict when the slot
    holds another fingerprint, CorruptObject when its bytes cannot be identified, CommitUnknown when
    `deadline_s` passes without knowing whether our create happened, StoreUnavailable when nothing
    was tried because even the first look failed, StorageError when the store refuses for good.
    """
    settle()  # first: this may be of what is being committed
    # The same name and bytes for all tries: whichever takes effect late commits the same.
    look = partial(_look, store, key, data, attempt, fingerprint, identify)
    tried = False  # a create that was sent may take effect later, whatever its reply was
    trouble = "the store did not say"
    for _ in _until(deadline_s, sleep):
        try:
            # Before the create, which uploads all bytes: repeated tasks find the slot committed.
            committed = look()
            if committed is None:
                tried = True
                if store.put_if_absent(key, data) is PutOutcome.CREATED:
                    return data
                # "Exists" and "unknown" are treated alike: the first may be our own create, sent
                # twice by the network, so only the bytes in the slot say whose it is.
                committed = look()
            if committed is not None:
                return committed
        except StoreUnavailable as error:
            trouble = str(error)
    # Two errors, because they differ in what to do: nothing was sent, or its fate is open.
    if not tried:
        raise StoreUnavailable(
            f"{store.url_of(key)} could not be read for {deadline_s:g} s, so nothing was written: "
            f"{trouble}"
        )
    raise CommitUnknown(
        f"{store.url_of(key)}: no answer for {deadline_s:g} s on whether attempt {attempt} is "
        f"committed ({trouble}); run again: the commit is then adopted, or written again"
    )


def _look(
    store: ObjectStore, key: str, ours: bytes, attempt: str, fingerprint: str, identify: Identify
) -> bytes | None:
    """The committed bytes if they are ours or may stand for ours; None when absent.

    Ours and another attempt's of the same fingerprint are equally good: both are returned.
    """
    try:
        committed = store.read(key)
    except ObjectMissing:
        return None
    if committed != ours:  # spares parsing our own bytes after a lost reply
        other, theirs = identify(committed)
        check_fingerprint(store.url_of(key), other, theirs, fingerprint, ours=attempt)
    return committed


def _until(deadline_s: int | float, sleep: Callable[[float], None]) -> Iterator[None]:
    """Yield at least once, then again after growing, jittered pauses until the deadline."""
    # Monotonic, because the wall clock may be set during the wait.
    end = time.monotonic() + deadline_s
    pause_s = PAUSE_FIRST_S
    yield
    while (left_s := end - time.monotonic()) > 0:
        # jittered, so that processes that failed together do not try again together
        sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
        yield

"""run.json: the record that makes a folder a run, written once; its configuration and ancestors.

Next to it lie copies of the user's code, by digest. Leaves out slots and references (runs.py).
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

from marin_rl.config import (
    WITHDRAWN,
    WITHDRAWN_CONTENT,
    Config,
    code_in,
    differences,
    fingerprint_fields,
    of_older_version,
    outward_keys,
    parse_config,
    value_at,
    with_choices,
    withdrawn_in,
    without,
)
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.storage.commits import commit_object, fingerprint, new_attempt, record_errors
from marin_rl.storage.layout import code_key
from marin_rl.storage.provenance import code_version, library_versions
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.store import Ancestor
from marin_rl.user_code import files_in, offer, record_of, registered, source_of
from schemas.manifests import canonical_json, open_record, sealed_json, sha256_of
from schemas.records import RunRecord

FORMAT = "marin-rl/run"
VERSION = 2  # 2 has `ancestors`; runs without any are written as 1, which older software reads
RUN_KEY = "run.json"
SEED_BITS = 48
DIFFERENCES_SHOWN_MAX = 8
DIFFERENCE_CHARACTERS_MAX = 200


def read_record(store: ObjectStore) -> dict[str, Any] | None:
    """Parsed run.json of a run's folder, or None. Raises CorruptObject, NewerSchema."""
    try:
        data = store.read(RUN_KEY)
    except ObjectMissing:
        return None
    return parse_record(data, store.url_of(RUN_KEY))


def parse_record(data: bytes, source: str) -> dict[str, Any]:
    """The record in the bytes of a run.json. Raises CorruptObject, NewerSchema naming `source`."""
    with record_errors(source):
        return open_record(data, RunRecord, format=FORMAT, version=VERSION)


def ancestors_in(record: Mapping[str, Any]) -> tuple[Ancestor, ...]:
    return tuple(Ancestor(**item) for item in record.get("ancestors", ()))


def create_record(
    store: ObjectStore, config: Config, ancestors: Sequence[Ancestor] = ()
) -> dict[str, Any]:
    """Commit the code that the configuration names, then run.json; returns the first one's record.

    Raises CommitUnknown, StorageError, InputError where the source of the code is not known.
    """
    attempt, tree = new_attempt(), config.model_dump(mode="json")
    source = store.url_of(RUN_KEY)
    _check_pinned(tree, source)
    # Before run.json: a run that exists has its code, wherever a crash comes.
    keep_code(store, tree)
    named = [item for item in code_in(tree) if not item[1].module.startswith("marin_rl.")]
    mixture = enumerate(config.environment.mixture or ())
    names = {f"environment.mixture.{place}.name": entry.name for place, entry in mixture}
    for key, name in (names or {"environment.name": config.environment.name}).items():
        named += [(key, spec) for spec in registered(name)]
    code = [{"key": key, **record_of(spec)} for key, spec in named]
    record = {
        **({"ancestors": [asdict(ancestor) for ancestor in ancestors]} if ancestors else {}),
        **({"user_code": code} if code else {}),
        "format": FORMAT,
        "version": VERSION if ancestors else 1,
        "run_id": config.run_id,
        # All of it, free keys too: run.json shows what the first process was started with.
        "config": tree,
        "content_digest": fingerprint("run", fingerprint_fields(config)),
        "seeds": {"run": config.seed},
        "code": code_version(),
        "libraries": library_versions(),
        "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "attempt": attempt,
    }
    data = commit_object(
        store,
        RUN_KEY,
        sealed_json(record),
        attempt=attempt,
        # The name alone: two processes that create a run at once both get the record of the first.
        # Differences are then reported key by key.
        fingerprint=config.run_id,
        identify=lambda other: (str(parse_record(other, source)["attempt"]), config.run_id),
    )
    return parse_record(data, source)


def keep_code(store: ObjectStore, tree: object) -> None:
    """Commit a copy of each file of code that nested values name. Raises as `create_record`."""
    for digest in files_in(tree):
        commit_object(
            store,
            code_key(digest),
            source_of(digest),
            attempt=digest,
            fingerprint=digest,  # the content is the fingerprint
            identify=lambda data, digest=digest: (digest, sha256_of(data)),
        )


def offer_code(store: ObjectStore, tree: object, *, allowed: bool) -> None:
    """Make the copies of a run's code known; see `user_code.offer`. Reads nothing yet."""
    for digest in files_in(tree):
        key = code_key(digest)
        offer(digest, partial(store.read, key), store.url_of(key), allowed=allowed)


def stored_config(record: Mapping[str, Any], source: str) -> Config:
    """The configuration in a record, without its user's own keys. Raises ConfigError."""
    tree = record["config"]
    if not isinstance(tree, Mapping):
        return parse_config(tree, source)
    _check_pinned(tree, source)
    tree = without(tree, [name.partition("=")[0] for name in withdrawn_in(tree)])
    if isinstance(asynchrony := tree.get("asynchrony"), Mapping):
        tree["asynchrony"] = of_older_version(asynchrony)
    return parse_config(without(tree, outward_keys()), source)


def refuse_withdrawn(folder: ObjectStore) -> None:
    if (record := read_record(folder)) is not None:
        _refuse_withdrawn(record, folder.url_of(RUN_KEY))


def _refuse_withdrawn(record: Mapping[str, Any], source: str) -> None:
    for name in withdrawn_in(record["config"]):
        if name in WITHDRAWN_CONTENT:
            raise ConfigError(
                f"{source}: the run was begun with {name}, which was withdrawn: it can be read, "
                "and none of its rounds can be played or processed again; `marin-rl fork` goes on "
                f"without it, and for a new run {WITHDRAWN[name]}"
            )


def as_recorded(record: Mapping[str, Any], config: Config, source: str) -> Config:
    """`config` with the run's own choices of the `AS_BEGUN` keys that it leaves null.

    Raises ConfigError.
    """
    return with_choices(config, partial(value_at, stored_config(record, source)))


def _check_pinned(tree: Mapping[str, Any], source: str) -> None:
    """Refuse a file of code without a digest: it would be whatever lies in the current folder."""
    for key, spec in code_in(tree):
        if spec.is_file and not spec.sha256:
            raise ConfigError(
                f"{source}: {key} names {spec.typed!r} without the digest of its file: expected a "
                "configuration that load_config or pin_code read"
            )


def check_content(record: Mapping[str, Any], config: Config, source: str) -> None:
    """Raise ConfigError naming the keys unless the record is of this configuration's content."""
    _refuse_withdrawn(record, source)
    lines = differences(
        fingerprint_fields(stored_config(record, source)), fingerprint_fields(config)
    )
    changed = [line for line in lines if _is_code(line)]
    if changed and len(changed) == len(lines):
        raise ConfigError(
            f"run {config.run_id!r} was started with other code ({source}):\n  "
            + "\n  ".join(changed)
            + "\nFor a run with the changed file choose another --run-id, or fork this one; "
            f"`marin-rl rescore` scores its rounds by a changed reward. {_going_on(config)}"
        )
    if lines:
        shown = [line[:DIFFERENCE_CHARACTERS_MAX] for line in lines[:DIFFERENCES_SHOWN_MAX]]
        more = len(lines) - len(shown)
        raise ConfigError(
            f"run {config.run_id!r} exists with another content ({source}); these keys differ:\n  "
            + "\n  ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
            + f"\nFor a run with the new values choose another --run-id. {_going_on(config)}"
        )


def _going_on(config: Config) -> str:
    if "://" in config.root:
        return "To go on with this one, give the values that it was started with."
    folder = shlex.quote(f"{config.root}/{config.run_id}")
    return f"To go on with this one as it was started:\n  marin-rl run {folder}"


def _is_code(line: str) -> bool:
    """True for a difference of digests alone, `key: "FILE.py:name#a" -> "FILE.py:name#b"`."""
    old, arrow, new = line.partition(": ")[2].partition(" -> ")
    without_digests = [re.sub(r"#[0-9a-f]{64}", "", text) for text in (old, new)]
    return bool(arrow) and old != new and without_digests[0] == without_digests[1]


def seed_from(config: Config, *parts: str | int) -> int:
    """See `Run.seed_of`; for a configuration without a run."""
    # A hash and not a sum: seeds of neighbouring rounds and shards must have nothing in common.
    digest = hashlib.sha256(canonical_json([config.seed, config.run_id, *parts])).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)

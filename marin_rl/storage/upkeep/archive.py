"""A run as one file: a tar with the digests of its contents, which can be checked anywhere.

The same objects always give the same bytes: entries are sorted, without times, owners or modes. The
root hash of `contents.json`, which comes first, is over all other entries.
"""

import fcntl
import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from marin_rl.errors import CorruptObject, InputError, NewerSchema
from marin_rl.storage.commits import parse_manifest
from marin_rl.storage.layout import PUSHING
from marin_rl.storage.run_records import RUN_KEY, ancestors_in, parse_record
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from marin_rl.storage.stores.local import explained, open_regular
from marin_rl.storage.stores.store import is_private
from marin_rl.storage.tables.parquet import digest_of, load
from marin_rl.storage.tables.tombstones import PRUNED
from marin_rl.storage.upkeep.integrity import Fault
from marin_rl.storage.upkeep.inventory import MANIFEST, Inventory, take_inventory
from marin_rl.storage.upkeep.tarballs import ArchiveEntry, opened_archive
from schemas import Malformed, NewerVersion
from schemas.manifests import Manifest, canonical_json, open_record, sealed_json, sha256_of
from schemas.records import ContentsRecord

FORMAT = "marin-rl/export"
VERSION = 2  # 2 is a fork's: slots lie with the run that has them; other archives are written as 1
CONTENTS = "contents.json"
BLOCK_BYTES = 2**20


class Entry(NamedTuple):
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """Result of an export: the root hash, the number of objects, and their bytes.

    `left_out` counts the committed objects that only an export of everything has.
    """

    path: Path
    root_hash: str
    objects: int
    bytes: int
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of checking an archive. `faults` is empty where everything matches its digests.

    `left_out` counts parts that its manifests name and that were not exported.
    """

    root_hash: str
    run_id: str
    objects: int
    bytes: int
    left_out: int
    faults: tuple[Fault, ...]


def root_hash_of(entries: list[Entry]) -> str:
    # Of names too: the same bytes under another name are another run.
    return sha256_of(canonical_json(sorted(entries)))


def write_archive(run: Run, target: Path, *, everything: bool = False) -> Archived:
    """Write run.json, manifests, metrics and sample rollouts, or every committed object.

    A fork's archive has what it shares with its ancestors too, each slot with the run that has it
    and that run's run.json, so what is unpacked is a root in which the fork is whole. Raises
    CorruptObject where a part is not what its manifest says, and InputError while another process
    exports to `target`, StorageError where it cannot be written; nothing is left there then.
    """
    inventory = take_inventory(run.store)
    # Digests come first in the file, so that a reader can check as it reads.
    sources = _sources(run, inventory, everything=everything)
    buffers = ((name, load(*sources[name])) for name in sorted(sources))
    entries = [Entry(name, data.size, digest_of(data)) for name, data in buffers]
    record = {
        "format": FORMAT,
        "version": VERSION if run.ancestors else 1,
        "run_id": run.run_id,
        "everything": everything,
        "root_hash": root_hash_of(entries),
        "lineage": _lineage(slot.manifest for slot in inventory.slots if slot.manifest is not None),
        "entries": entries,
    }
    size = sum(entry.bytes for entry in entries)
    with _completed(target, size) as file, tarfile.open(fileobj=file, mode="w") as tar:
        _add(tar, CONTENTS, sealed_json(record))
        for entry in entries:
            data = load(*sources[entry.name])
            # Read a second time: digests come first in the file, and data is not kept in memory.
            if digest_of(data) != entry.sha256:
                raise CorruptObject(f"{entry.name} changed while it was exported: run fsck")
            _add(tar, entry.name, memoryview(data))
    return Archived(
        path=target,
        root_hash=str(record["root_hash"]),
        objects=len(entries),
        bytes=size,
        left_out=len(_sources(run, inventory, everything=True)) - len(entries),
    )


@contextmanager
def _completed(target: Path, size: int) -> Iterator[BinaryIO]:
    """An empty file, which gets the name `target` at the end of a block that raises nothing.

    A file at `target` is therefore always a whole archive. Until then it has one name and lock for
    all processes: what a killed export leaves is written over by the next. Raises InputError while
    another process has the lock, and StorageError.
    """
    partial = target.with_name(f".{target.name}.partial")
    with explained(target, size), ExitStack() as stack:
        partial.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(partial, os.O_RDWR | os.O_CREAT)
        file = stack.enter_context(os.fdopen(descriptor, "r+b"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have given it its name in between.
            ours = os.path.samestat(os.fstat(descriptor), partial.stat())
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise InputError(
                f"another process exports to {target}: wait for its end, or name another file"
            )
        # Only where something fails: a file that has its name is another's to remove.
        failed = stack.enter_context(ExitStack())
        failed.callback(partial.unlink, missing_ok=True)
        file.truncate()
        yield file
        file.flush()
        partial.replace(target)
        failed.pop_all()


def verify_archive(path: Path, expected: str | None = None) -> Verified:
    """Check an archive by itself: every digest, the root hash, parts and parents of manifests.

    `expected` is a root hash that was promised. Nothing is unpacked. Raises InputError for what is
    no archive of a run, and for entries that must not be unpacked.
    """
    with opened_archive(path) as entries:
        contents = _contents(path, next(entries, None))
        read = _read(entries, contents)
    faults = [*read.faults, *_misplaced(read, contents)]
    listed = {name for name, _, _ in contents["entries"]}
    faults += [Fault("missing", name, CONTENTS) for name in sorted(listed - set(read.objects))]
    root_hash = root_hash_of(list(read.objects.values()))
    promised = {"contents.json": contents["root_hash"], "the promise": expected}
    for who, value in promised.items():
        if value not in (None, root_hash):
            detail = f"{who} says root hash {value}, found {root_hash}"
            faults.append(Fault("altered", str(path), detail))
    if contents["lineage"] != _lineage(manifest for manifest, _ in read.manifests.values()):
        faults.append(Fault("altered", CONTENTS, "its lineage is not that of the manifests"))
    # Only a complete archive promises the parts of its manifests.
    links, left_out = _links(read.manifests, read.objects, complete=contents["everything"])
    return Verified(
        root_hash=root_hash,
        run_id=contents["run_id"],
        objects=len(read.objects),
        bytes=sum(entry.bytes for entry in read.objects.values()),
        left_out=left_out,
        faults=(*faults, *links),
    )


def _lineage(manifests: Iterable[Manifest]) -> dict[str, dict[str, str]]:
    """By slot, the SHA-256 of the manifest of each slot that it was made from."""
    return {
        manifest.slot: {parent.slot: parent.sha256 for parent in manifest.parents}
        for manifest in manifests
    }


Sources = dict[str, tuple[ObjectStore, str]]


def _sources(run: Run, inventory: Inventory, *, everything: bool) -> Sources:
    for slot in inventory.slots:
        if slot.fault is not None:
            raise slot.fault
    ends = inventory.sealed and (min(inventory.sealed), max(inventory.sealed))
    samples = {
        slot.key(name)
        for slot in inventory.of_kind("rollouts")
        if slot.number in ends
        for name in sorted(slot.parts)[:1]
    }
    # Groups that no shard has yet, which cannot be sampled again, and who pushed them.
    pushed = everything and run.config.rollouts.source == "pushed"
    names = [RUN_KEY]
    for item in inventory.items:
        if item.role == "record":
            wanted = item.slot is not None and item.slot.manifest is not None
        elif item.role in ("part", "shard"):
            wanted = everything or item.key in samples
        else:
            # Commits of their own: tables, digests of rows, copies of code.
            top = item.key.partition("/")[0]
            wanted = top in ("metrics", "rewards", "code", "data") and not is_private(item.key)
            wanted |= pushed and (item.role == "piece" or item.key.startswith(f"{PUSHING}/"))
        if wanted:
            names.append(item.key)
    sources: Sources = {f"{run.owner_of(name)}/{name}": (run.store, name) for name in names}
    top = open_store(run.config.root, run.config.storage_options)
    for ancestor in run.ancestors:
        # An unpacked fork is opened through the records of its ancestors.
        sources[f"{ancestor.run_id}/{RUN_KEY}"] = (top.at(ancestor.run_id), RUN_KEY)
    return sources


def _add(tar: tarfile.TarFile, name: str, data: bytes | memoryview) -> None:
    info = tarfile.TarInfo(name)
    # No owner and no time: the same run gives the same bytes on every machine.
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))


def _contents(path: Path, first: ArchiveEntry | None) -> dict[str, Any]:
    if first is None or first.name != CONTENTS:
        raise InputError(f"{path}: expected {CONTENTS} as its first entry: no export of a run")
    data = first.read_record()
    try:
        contents = open_record(data, ContentsRecord, format=FORMAT, version=VERSION)
    except NewerVersion as error:
        raise NewerSchema(f"{path}: {error}") from None
    except Malformed as error:
        raise InputError(f"{path}: {CONTENTS}: {error}") from None
    names = [name for name, _, _ in contents["entries"]]
    if len(set(names)) < len(names) or not all("/" in name for name in names):
        raise InputError(f"{path}: {CONTENTS}: expected names like RUN/run.json, each once")
    return contents


@dataclass(slots=True)
class _Contained:
    """Contents of an archive: entries, manifests, the ancestors of its run, and faults."""

    objects: dict[str, Entry] = field(default_factory=dict)
    manifests: dict[str, tuple[Manifest, str]] = field(default_factory=dict)
    ancestors: frozenset[str] = frozenset()
    faults: list[Fault] = field(default_factory=list)


def _read(entries: Iterator[ArchiveEntry], contents: Mapping[str, Any]) -> _Contained:
    listed = {name: (size, sha256) for name, size, sha256 in contents["entries"]}
    own = f"{contents['run_id']}/{RUN_KEY}"
    read = _Contained()
    for member in entries:
        if member.name in read.objects or member.name not in listed:
            detail = f"{CONTENTS} names no such object, or once"
            read.faults.append(Fault("orphan", member.name, detail))
            continue
        # Only records are kept in memory; tables are hashed as they pass.
        if member.name == own or member.name.endswith(f"/{MANIFEST}"):
            data = member.read_record()
            entry = Entry(member.name, len(data), sha256_of(data))
            _read_record(read, member.name, data, own)
        else:
            digest = hashlib.sha256()
            while block := member.read(BLOCK_BYTES):
                digest.update(block)
            entry = Entry(member.name, member.size, digest.hexdigest())
        read.objects[member.name] = entry
        if (entry.bytes, entry.sha256) != listed[member.name]:
            detail = f"{CONTENTS} says SHA-256 {listed[member.name][1]}, found {entry.sha256}"
            read.faults.append(Fault("altered", member.name, detail))
    return read


def _read_record(read: _Contained, name: str, data: bytes, own: str) -> None:
    """Keep a manifest, or the ancestors that the run's own record names."""
    try:
        if name == own:
            ancestors = ancestors_in(parse_record(data, name))
            read.ancestors = frozenset(ancestor.run_id for ancestor in ancestors)
        else:
            read.manifests[name] = parse_manifest(data, name), sha256_of(data)
    except CorruptObject as error:
        read.faults.append(Fault("altered", name, str(error)))
    except NewerSchema as error:
        read.faults.append(Fault("newer version", name, str(error)))


def _misplaced(read: _Contained, contents: Mapping[str, Any]) -> Iterator[Fault]:
    """Entries that unpacking would put where no file of this run belongs."""
    runs = {contents["run_id"], *read.ancestors}
    for name in read.objects:
        if name.partition("/")[0] not in runs:
            detail = f"lies with neither run {contents['run_id']!r} nor one of its ancestors"
            yield Fault("orphan", name, detail)
        # A file and a folder of one name cannot both be unpacked.
        for folder in (name[:at] for at, sign in enumerate(name) if sign == "/"):
            if folder in read.objects:
                yield Fault("orphan", name, f"lies below {folder}, which is a file")
    for name, (manifest, _) in read.manifests.items():
        if name.partition("/")[2] != f"{manifest.slot}/{MANIFEST}":
            yield Fault("altered", name, f"is the manifest of {manifest.slot}")


def _links(
    manifests: Mapping[str, tuple[Manifest, str]], entries: Mapping[str, Entry], *, complete: bool
) -> tuple[list[Fault], int]:
    """Check the parts and parents that manifests name, as far as these are in the archive."""
    faults: list[Fault] = []
    left_out = 0
    by_slot = {manifest.slot: sha256 for manifest, sha256 in manifests.values()}
    for name, (manifest, _) in manifests.items():
        folder = name.removesuffix(f"/{MANIFEST}")
        for part in manifest.parts:
            place = f"{folder}/{part.name}"
            entry = entries.get(place)
            left_out += entry is None
            if entry is None and complete and f"{folder}/{PRUNED}" not in entries:
                faults.append(Fault("missing", place, f"{name} names it"))
            elif entry is not None and entry.sha256 != part.sha256:
                detail = f"{name} says SHA-256 {part.sha256}, found {entry.sha256}"
                faults.append(Fault("altered", place, detail))
        for parent in manifest.parents:  # by slot: it has one place, of whichever run it is
            above = by_slot.get(parent.slot)
            if above is None:
                root = name.removesuffix(f"{manifest.slot}/{MANIFEST}")
                detail = f"{name} was made from it"
                faults.append(Fault("missing", f"{root}{parent.slot}/{MANIFEST}", detail))
            elif above != parent.sha256:
                detail = f"names {parent.slot} with SHA-256 {parent.sha256}, found {above}"
                faults.append(Fault("wrong parent", name, detail))
    return faults, left_out

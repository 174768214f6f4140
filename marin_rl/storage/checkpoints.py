"""Checkpoints: trees of arrays in safetensors files, committed by a manifest like other slots.

The processes of a run write one attempt together: each writes and hashes the boxes of arrays that
are dealt out to it, in files of its own, and process 0 commits the manifest once all are written. A
reader takes the files that hold its boxes, whatever mesh and number of processes wrote them, and
verifies each before it is used. Checkpoints of earlier versions are folders of Orbax, and are read.
"""

import logging
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from etils import epath

from marin_rl.compilation import aligned_empty
from marin_rl.errors import CommitConflict, CorruptObject, ObjectMissing
from marin_rl.machine import machine_facts
from marin_rl.processes import all_to_first, by_first, process_number
from marin_rl.progress import phase
from marin_rl.storage.array_files import (
    SUFFIX,
    ArrayPath,
    Box,
    Header,
    Tensor,
    cut,
    encoded,
    extents,
    header_of,
    overlap,
    shapes_of,
    tensors_of,
    whole_box,
    within,
)
from marin_rl.storage.commits import (
    commit_parts,
    fingerprint,
    manifest_of,
    new_attempt,
    new_manifest,
    parent_of,
    part_of,
    ref_of,
)
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.local import explained, make_folder, need_room
from marin_rl.storage.tables.parquet import digest_of, load, put_part
from marin_rl.storage.tables.tombstones import array_parts, pruned_parts
from marin_rl.storage.written_behind import settle, write_behind
from marin_rl.types import SlotRef
from schemas.manifests import Manifest, Part, canonical_json
from schemas.strict_json import parse_json

SCHEMA_VERSION = 1
# A file is in memory whole while it is written or read: these bound what a process needs besides
# its own part of the arrays, to an eighth of it.
FILES_IN_FLIGHT_MAX = 4
FILES_OF_PROCESS = 32
FILE_BYTES_MIN, FILE_BYTES_MAX = 2**22, 2**26
ARRAYS, INDEX = "arrays", "index"

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraParts:
    """Parts that an attempt writes itself, to be committed with the arrays of a checkpoint.

    Their names begin with no folder; they are not read back when the arrays are.
    """

    attempt: str
    parts: Callable[[], Sequence[Part]]


def checkpoint_fingerprint(content: Mapping[str, Any], parents: Sequence[SlotRef]) -> str:
    return fingerprint("checkpoint", content, list(map(parent_of, parents)), SCHEMA_VERSION)


@phase("writing the checkpoint")
def commit_checkpoint(  # noqa: PLR0913 - what a checkpoint holds, and comes from
    run: Run,
    slot: str,
    tree: Tree,
    *,
    content: Mapping[str, Any],
    parents: Sequence[SlotRef],
    totals: Mapping[str, float],
    extra: Mapping[str, Any],
    facts: Mapping[str, str] | None = None,
    extra_parts: ExtraParts | None = None,
    behind: bool = False,
) -> SlotRef:
    """Commit nested dicts of arrays (NumPy or JAX, any sharding) as `slot`.

    With several processes all of them call it, and each writes its part. The fingerprint is
    computed from `content` and `parents`. The manifest stores `totals`, which the returned
    reference shows, and `extra`, with facts about this machine and further `facts` as `machine`.
    The function of `extra_parts` is called, by process 0, once the arrays are written. If the slot
    has a commit of this fingerprint, that one is returned. `behind`: the arrays of a single process
    are only hashed here, and written to a folder while it goes on (`written_behind`); nothing may
    write to them meanwhile. Raises CommitConflict, and StorageError of the store.
    """
    attempt = by_first(lambda: extra_parts.attempt if extra_parts else new_attempt())
    # An object store has no lock to keep others away, whose commit might have to be adopted.
    behind = behind and process_number()[1] == 1 and run.store.local_path(slot) is not None
    own = _write(run, slot, attempt, tree, put=_hashed if behind else put_part)
    # Also the barrier: process 0 has the parts of all once all of them are durable.
    written = all_to_first([asdict(part) for part in own])

    def manifest() -> Manifest:
        parts = [Part(**part) for parts in written for part in parts]
        # After the arrays: a writer of scores closes its last part here, when all are known.
        parts += () if extra_parts is None else extra_parts.parts()
        return new_manifest(
            slot,
            attempt=attempt,
            fingerprint=checkpoint_fingerprint(content, parents),
            parents=list(map(parent_of, parents)),
            parts=parts,
            totals=totals,
            extra={**extra, "machine": {**machine_facts(), **(facts or {})}},
        )

    if not behind:
        return by_first(lambda: commit_parts(run.store, manifest()))
    promise = manifest()

    def work() -> None:
        # One by one: sampling has the memory and the cores meanwhile.
        if _write(run, slot, attempt, tree, in_flight=1) != own:
            raise CorruptObject(
                f"{run.store.url_of(slot)}: its arrays changed while they were written"
            )
        if commit_parts(run.store, promise).reused:
            raise CommitConflict(
                f"{run.store.url_of(slot)} was committed by another process meanwhile: expected "
                "one that trains the run; run again, which goes on from that commit"
            )

    write_behind(run.store.url_of(slot), promise, work)
    return ref_of(promise)


@phase("reading the checkpoint")
def restore_checkpoint(
    run: Run, ref: SlotRef, like: Tree, *, unasked: Sequence[str] = ()
) -> dict[str, Any]:
    """Read a committed tree back, every file verified before it is used.

    `like` is a tree of anything with `shape` and `dtype`. Arrays are NumPy's, but where a leaf is a
    `jax.ShapeDtypeStruct` with a sharding: that is an array on its devices, of which only the boxes
    of this process are read. Branches named in `unasked` are left out. Raises CorruptObject, naming
    the file or the array, where these differ; ObjectMissing.
    """
    settle(run.store.url_of(ref.slot))
    manifest, expected = manifest_of(run.store, ref), _leaves(like)
    parts, arrays = array_parts(manifest), dict[ArrayPath, Any]()
    if parts and not any(part.name.endswith(SUFFIX) for part in parts):
        with _orbax_folder(run, manifest) as folder, explained(folder):
            arrays = _leaves(_orbax_handler().restore(epath.Path(folder)))
        _check_shapes(run, ref, _shapes(arrays), expected, unasked)
        return _tree({path: placed(arrays[path], leaf) for path, leaf in expected.items()})
    files = _Files(run, manifest)
    shapes = shapes_of((t for tensors in files.tensors.values() for t in tensors), files.url)
    _check_shapes(run, ref, {p: f"{d}{s}" for p, (d, s) in shapes.items()}, expected, unasked)
    boxes = {path: LocalBoxes(leaf) for path, leaf in expected.items()}
    files.read(boxes)
    return _tree({path: each.array() for path, each in boxes.items()})


def _check_shapes(
    run: Run,
    ref: SlotRef,
    shapes: Mapping[ArrayPath, str],
    like: Mapping[ArrayPath, Any],
    unasked: Sequence[str],
) -> None:
    """Raise CorruptObject unless a checkpoint has the arrays of `like`."""
    # Digests prove the bytes; they do not prove that the arrays fit this model.
    found = {path: shape for path, shape in shapes.items() if path[0] not in unasked}
    expected = _shapes(like)
    if found != expected:
        path = min(set(found.items()) ^ set(expected.items()))[0]
        raise CorruptObject(
            f"{run.store.url_of(ref.slot)}: array {'/'.join(path)} expected "
            f"{expected.get(path, 'absent')}, found {found.get(path, 'absent')}: the checkpoint "
            "is of another model than the configuration describes"
        )


# ---------------------------------------------------------------- writing


def _write(
    run: Run,
    slot: str,
    attempt: str,
    tree: Tree,
    *,
    put: Callable[..., Part] = put_part,
    in_flight: int = FILES_IN_FLIGHT_MAX,
) -> list[Part]:
    """Write this process's part of the arrays, durably; the records of its files."""
    arrays = _leaves(tree)
    number, count = process_number()
    share = sum(array.nbytes for array in arrays.values()) // count
    file_bytes = min(max(share // FILES_OF_PROCESS, FILE_BYTES_MIN), FILE_BYTES_MAX)
    holders = {
        Tensor(path=path, box=part, dtype=np.dtype(array.dtype), whole=part == whole): processes
        for path, array in arrays.items()
        for whole in [whole_box(array.shape)]
        for box, processes in _held(array, count).items()
        for part in cut(box, array.dtype.itemsize, file_bytes)
    }
    own = [tensor for tensor, owner in dealt(holders).items() if owner == number]
    _need_room(run, f"{slot}/{attempt}", sum(tensor.nbytes for tensor in own))
    files = list(_batches(own, file_bytes))
    alone = count == 1 and len(files) == 1

    def put_file(numbered: tuple[int, Sequence[Tensor]]) -> tuple[Part, Header]:
        place, tensors = numbered
        name = ARRAYS if alone else f"{ARRAYS}-{number:05d}-{place:05d}"
        data, header = encoded((each, _values(arrays[each.path], each.box)) for each in tensors)
        return put(run.store, slot, f"{attempt}/{name}{SUFFIX}", data), header

    # Hashing, syncing and uploading release the interpreter.
    with ThreadPoolExecutor(in_flight) as pool:
        written = list(pool.map(put_file, enumerate(files)))
    parts = [part for part, _ in written]
    if alone or not written:
        return parts
    index = canonical_json({part.name.rpartition("/")[2]: header for part, header in written})
    return [*parts, put(run.store, slot, f"{attempt}/{INDEX}-{number:05d}.json", index)]


def _hashed(store: ObjectStore, slot: str, name: str, data: bytes) -> Part:
    """The entry that `put_part` returns."""
    return part_of(name, data)


def _held(array: Any, count: int) -> dict[Box, list[int]]:
    """The boxes that an array is in memory as, and the processes that hold each."""
    if not isinstance(array, jax.Array):
        return {whole_box(array.shape): list(range(count))}
    held = dict[Box, list[int]]()
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        # What lies on devices of one process alone, all processes have alike.
        processes = range(count) if array.is_fully_addressable else (device.process_index,)
        held.setdefault(_box(index, array.shape), []).extend(processes)
    return held


def dealt(holders: Mapping[Tensor, Sequence[int]]) -> dict[Tensor, int]:
    """The process that writes each tensor, of those that hold it: all write about as much.

    A function of its argument, so that every process finds the same without being told.
    """
    load, owners = Counter[int](), dict[Tensor, int]()
    for tensor in sorted(holders, key=lambda each: (-each.nbytes, each.name)):
        owners[tensor] = min(holders[tensor], key=lambda process: (load[process], process))
        load[owners[tensor]] += tensor.nbytes
    return owners


def _batches(tensors: Iterable[Tensor], file_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors in the order of the arrays, in files of `file_bytes`, which the last may exceed."""
    batch, size = list[Tensor](), 0
    for tensor in sorted(tensors, key=lambda each: (each.path, each.box)):
        if batch and size + tensor.nbytes > file_bytes:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch


def _values(array: Any, box: Box) -> np.ndarray:
    """A box of an array, which this process holds, on the host."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)[within(box, whole_box(array.shape))]
    for shard in array.addressable_shards:
        outer = _box(shard.index, array.shape)
        if overlap(box, outer) == box or not array.size:
            index = within(box, outer)
            if shard.device.platform == "cpu":
                return np.asarray(shard.data)[index]  # a view
            # A slice on the device: JAX keeps what is fetched of an array as long as the array.
            starts = [each.start for each in index[:-1]]
            return np.asarray(jax.lax.dynamic_slice(shard.data, starts, extents(box)))
    raise AssertionError(f"{box} is held by another process")


def _need_room(run: Run, prefix: str, n_bytes: int) -> None:
    """Raise StorageError for a full disk before anything is written to it."""
    if (folder := run.store.local_path(prefix)) is not None and n_bytes:
        with explained(folder, n_bytes):
            make_folder(folder)
            need_room(folder, n_bytes)


# ---------------------------------------------------------------- reading


class LocalBoxes:
    """An array that is being read: the boxes of it that this process is to hold.

    It is NumPy's, whole, unless `like` has a sharding: see `restore_checkpoint`.
    """

    def __init__(self, like: Any) -> None:
        self.shape = tuple(like.shape)
        self.sharding = like.sharding if isinstance(like, jax.ShapeDtypeStruct) else None
        self.devices = {None: whole_box(self.shape)}
        if self.sharding is not None:
            indices = self.sharding.addressable_devices_indices_map(self.shape)
            self.devices = {p: _box(index or (), self.shape) for p, index in indices.items()}
        boxes = self.devices.values()
        self.values = {box: aligned_empty(extents(box), like.dtype) for box in boxes}

    def touches(self, tensor: Tensor) -> bool:
        return any(overlap(box, tensor.box) is not None for box in self.values)

    def fill(self, given: Box, values: np.ndarray) -> dict[Box, int]:
        """Take what a box of the array has of each; the numbers of entries."""
        found = {box: both for box in self.values if (both := overlap(box, given)) is not None}
        for box, both in found.items():
            self.values[box][within(both, box)] = values[within(both, given)]
        return {box: math.prod(extents(both)) for box, both in found.items()}

    def array(self) -> Any:
        if self.sharding is None:
            return self.values[whole_box(self.shape)]
        at = partial(jax.sharding.SingleDeviceSharding, memory_kind=self.sharding.memory_kind)
        # A CPU's devices take the very memory.
        shards = [jax.device_put(self.values[box], at(p)) for p, box in self.devices.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)


class _Files:
    """The files of a checkpoint's arrays, and the tensors in each, by their indices or headers."""

    def __init__(self, run: Run, manifest: Manifest) -> None:
        self._run, self._manifest = run, manifest
        self.url = run.store.url_of(manifest.slot)
        parts = {part.name.rpartition("/")[2]: part for part in array_parts(manifest)}
        self._loaded = dict[str, memoryview]()
        headers = dict[str, Any]()
        for name, part in parts.items():
            if name.startswith(INDEX):
                data = bytes(memoryview(_verified(run, manifest, part)))
                headers |= parse_json(data)
        if not headers:  # a file has its own, and there is one: it is kept
            self._loaded = {
                name: memoryview(_verified(run, manifest, part)) for name, part in parts.items()
            }
            headers = {name: header_of(data, self.url) for name, data in self._loaded.items()}
        if unnamed := sorted(headers.keys() - parts.keys()):
            raise CorruptObject(
                f"{self.url}: its index names {unnamed[0]}, expected files of its manifest"
            )
        self._parts = parts
        self.tensors = {name: tensors_of(header, self.url) for name, header in headers.items()}

    def read(self, arrays: Mapping[ArrayPath, LocalBoxes]) -> None:
        """Fill boxes from the files that have anything of them. Raises CorruptObject."""
        with ThreadPoolExecutor(FILES_IN_FLIGHT_MAX) as pool:
            taken = list(pool.map(partial(self._take, arrays), self.tensors))
        filled = sum(taken, Counter[tuple[ArrayPath, Box]]())
        for path, boxes in arrays.items():
            for box, values in boxes.values.items():
                if filled[path, box] != values.size:
                    raise CorruptObject(
                        f"{self.url}: expected {values.size} values of {'/'.join(path)} in the "
                        f"files that its manifest names, found {filled[path, box]}"
                    )

    def _take(
        self, arrays: Mapping[ArrayPath, LocalBoxes], name: str
    ) -> Counter[tuple[ArrayPath, Box]]:
        """Read a file into the boxes; the numbers of entries that each got."""
        filled = Counter[tuple[ArrayPath, Box]]()
        tensors = [t for t in self.tensors[name] if t.path in arrays and arrays[t.path].touches(t)]
        if not tensors:
            return filled
        data = self._loaded.get(name)
        if data is None:
            data = memoryview(_verified(self._run, self._manifest, self._parts[name]))
        for tensor in tensors:
            values = tensor.values(data, f"{self.url}, {name}")
            for box, count in arrays[tensor.path].fill(tensor.box, values).items():
                filled[tensor.path, box] += count
        return filled


def _verified(run: Run, manifest: Manifest, part: Part) -> pa.Buffer:
    """Read a file of the arrays. Raises CorruptObject and ObjectMissing, naming it."""
    key = f"{manifest.slot}/{part.name}"
    try:
        data = load(run.store, key)
    except ObjectMissing:
        # Retention may have deleted the file since the manifest was read.
        if not pruned_parts(run.store, manifest.slot):
            raise ObjectMissing(
                f"{run.store.url_of(key)} does not exist: expected a file of the arrays of "
                f"{manifest.slot}; restore it from a copy, or go back to an earlier round in a new "
                "run"
            ) from None
        raise ObjectMissing(
            f"{run.store.url_of(key)} was pruned by the run's retention: expected a checkpoint "
            f"with its arrays; `marin-rl status {run.run_id}` shows the latest, which is kept"
        ) from None
    # Sizes first: a file that was truncated needs no hashing.
    sha256 = digest_of(data) if data.size == part.bytes else "another"
    if sha256 != part.sha256:
        raise CorruptObject(
            f"{run.store.url_of(key)}: expected {part.bytes} bytes with SHA-256 {part.sha256}, "
            f"found {data.size} bytes with {sha256}: the file was damaged after it was "
            "committed; restore it from a copy, or go back to an earlier round in a new run"
        )
    return data


# ---------------------------------------------------------------- folders of Orbax


# Orbax logs, with the whole trace, what it raises just after it.
logging.getLogger("absl").addFilter(lambda r: "raised an exception" not in r.getMessage())


def _orbax_handler() -> Any:
    # here, because that takes half a second, and only old checkpoints need it
    import orbax.checkpoint

    return orbax.checkpoint.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)


@contextmanager
def _orbax_folder(run: Run, manifest: Manifest) -> Iterator[Path]:
    """A copy of a checkpoint's verified files, beside which Orbax finds no others."""
    with tempfile.TemporaryDirectory(prefix="marin-rl-checkpoint-") as name:
        staged = Path(name)

        def keep(part: Part) -> None:
            file = staged / part.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(memoryview(_verified(run, manifest, part)))

        with ThreadPoolExecutor(FILES_IN_FLIGHT_MAX) as pool:
            list(pool.map(keep, array_parts(manifest)))
        yield staged / manifest.attempt


# ---------------------------------------------------------------- trees


def _leaves(tree: Tree) -> dict[ArrayPath, Any]:
    """Arrays of nested dicts by their path."""
    leaves = jax.tree_util.tree_flatten_with_path(dict(tree))[0]
    return {tuple(str(part.key) for part in path): leaf for path, leaf in leaves}


def _tree(arrays: Mapping[ArrayPath, Any]) -> dict[str, Any]:
    """Nested dicts of the arrays; the inverse of `_leaves`."""
    tree: dict[str, Any] = {}
    for (*folders, last), array in arrays.items():
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[last] = array
    return tree


def _shapes(arrays: Mapping[ArrayPath, Any]) -> dict[ArrayPath, str]:
    return {path: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" for path, leaf in arrays.items()}


def placed(array: np.ndarray, like: Any) -> Any:
    """A whole array where the leaf that it is like is to be."""
    if not isinstance(like, jax.ShapeDtypeStruct) or like.sharding is None:
        return array
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that an index of a sharding selects."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))

"""Checkpoints: trees of arrays written by Orbax, and committed by a manifest like other slots.

Orbax writes its files under a name unique to the attempt, into the run's folder or into a temporary
one, from which they are uploaded. Their digests go into the manifest; reading verifies them first.
Arrays are written whole and uncompressed, so a checkpoint does not depend on devices, and float32
weights, which hardly shrink, cost no time to pack. A small tree may be one safetensors file: Orbax
takes tens of milliseconds of CPU time for the smallest tree, one file of a few megabytes takes
three.
"""

import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pyarrow as pa
from etils import epath
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from marin_rl.errors import CorruptObject, ObjectMissing
from marin_rl.machine import machine_facts
from marin_rl.progress import phase
from marin_rl.storage.commits import (
    commit_slot,
    fingerprint,
    manifest_of,
    new_attempt,
    parent_of,
    part_of,
)
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.local import explained, make_folder, need_room, sync_folders
from marin_rl.storage.tables.parquet import digest_of, load, put_part
from marin_rl.storage.tables.tombstones import array_parts, pruned_parts
from marin_rl.types import SlotRef
from schemas.manifests import Manifest, Part
from schemas.strict_json import parse_json

SCHEMA_VERSION = 1
# Each is read whole to be hashed or uploaded: number and size bound the memory of a commit, and
# files of a large checkpoint are hashed side by side.
FILES_IN_FLIGHT_MAX = 8
FILE_BYTES = 2**28
# Beyond, one file would take more memory and time than Orbax's several.
PACKED_BYTES_MAX = 2**26

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
def commit_checkpoint(  # noqa: PLR0913 - what a checkpoint holds, comes from, and its layout
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
    pack: bool = False,
) -> SlotRef:
    """Commit nested dicts of arrays (NumPy or JAX, any sharding) as `slot`.

    The fingerprint is computed from `content` and `parents`. The manifest stores `totals`, which
    the returned reference shows, and `extra`, with facts about this machine and further `facts` as
    `machine`. The function of `extra_parts` is called once the arrays are written. With `pack`,
    arrays of less than PACKED_BYTES_MAX are one file. If the slot has a commit of this fingerprint,
    that one is returned. Raises CommitConflict, and StorageError of the store.
    """
    attempt = new_attempt() if extra_parts is None else extra_parts.attempt
    # Gathered on the host: sharded arrays would be written in files that depend on the devices.
    arrays = jax.tree.map(np.asarray, dict(tree))
    parts = list[Part]()  # a slot may refer to arrays elsewhere, and have none
    if arrays and pack and _bytes_of(arrays) < PACKED_BYTES_MAX:
        name = f"{attempt}/{PACKED}"
        parts.append(put_part(run.store, slot, name, packed(arrays)))
    elif arrays:
        parts += _write(run, f"{slot}/{attempt}", attempt, arrays)
    # After the arrays: a writer of scores closes its last part here, when all of them are known.
    parts += () if extra_parts is None else extra_parts.parts()
    return commit_slot(
        run.store,
        slot,
        attempt=attempt,
        fingerprint=checkpoint_fingerprint(content, parents),
        parents=list(map(parent_of, parents)),
        parts=parts,
        totals=totals,
        extra={**extra, "machine": {**machine_facts(), **(facts or {})}},
    )


@phase("reading the checkpoint")
def restore_checkpoint(
    run: Run, ref: SlotRef, like: Tree, *, unasked: Sequence[str] = ()
) -> dict[str, Any]:
    """Read a committed tree back as NumPy arrays, every file verified before it is used.

    Branches named in `unasked` are left out. `like` is a tree of anything with `shape` and `dtype`.
    Raises CorruptObject, naming the file or the array, where these differ; ObjectMissing.
    """
    manifest = manifest_of(run.store, ref)
    if [part.name for part in array_parts(manifest)] == [f"{manifest.attempt}/{PACKED}"]:
        files = dict[str, pa.Buffer]()
        _each_part(run, manifest, files.__setitem__)
        ((name, data),) = files.items()
        tree = unpacked(memoryview(data).tobytes(), run.store.url_of(f"{manifest.slot}/{name}"))
    else:
        with _local_folder(run, manifest) as folder, explained(folder):
            tree = _handler().restore(epath.Path(folder))
    tree = {name: branch for name, branch in tree.items() if name not in unasked}
    # Digests prove the bytes; they do not prove that the arrays fit this model.
    shapes, expected = _shapes(tree), _shapes(like)
    if shapes != expected:
        array = sorted(set(shapes.items()) ^ set(expected.items()))[0][0]
        raise CorruptObject(
            f"{run.store.url_of(ref.slot)}: array {array} expected "
            f"{expected.get(array, 'absent')}, found {shapes.get(array, 'absent')}: the checkpoint "
            "is of another model than the configuration describes"
        )
    return tree


def _orbax() -> Any:
    # here, because that takes half a second, and packed checkpoints do not need it
    import orbax.checkpoint

    return orbax.checkpoint


def _handler() -> Any:
    # Few, uncompressed files: its fastest layout once every file is synced.
    return _orbax().PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)


def _write(run: Run, prefix: str, attempt: str, arrays: Tree) -> list[Part]:
    """Write the arrays below the key `prefix`, durably; the record of every file."""
    target = run.store.local_path(prefix)
    with ExitStack() as stack:
        if target is None:
            staging = tempfile.TemporaryDirectory(prefix="marin-rl-checkpoint-")
            folder = Path(stack.enter_context(staging))
        else:
            folder = target
        stack.enter_context(explained(folder, _bytes_of(arrays)))
        make_folder(folder)
        _save(folder, arrays)

        def seal(file: Path) -> Part:
            relative = file.relative_to(folder).as_posix()
            key = f"{prefix}/{relative}"
            if target is None:
                data = file.read_bytes()
                run.store.put_part(key, data)
                return part_of(f"{attempt}/{relative}", data)
            with file.open("rb") as opened:
                # Synced here, whatever Orbax syncs: the commit must not name files a crash can
                # lose. A descriptor for reading is enough: fsync flushes the file.
                os.fsync(opened.fileno())
            # Mapped: the arrays are not in memory a second time.
            return part_of(f"{attempt}/{relative}", memoryview(load(run.store, key)))

        files = sorted(path for path in folder.rglob("*") if path.is_file())
        # Hashing, syncing and uploading release the interpreter.
        with ThreadPoolExecutor(FILES_IN_FLIGHT_MAX) as pool:
            parts = list(pool.map(seal, files))
        if target is not None:
            # After the files, whose names are entries of these folders: a crash would lose them.
            sync_folders(target)
    return parts


def _save(folder: Path, arrays: Tree) -> None:
    # Checked first: TensorStore's threads may report a full disk late, with some files written.
    need_room(folder, _bytes_of(arrays))
    handler, ocp = _handler(), _orbax()
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=FILE_BYTES), arrays)
    args = ocp.args.PyTreeSave(arrays, save_args=chunks, ocdbt_target_data_file_size=FILE_BYTES)
    try:
        handler.save(epath.Path(folder), args=args)
        # Merges the OCDBT files of the process; only an Orbax Checkpointer calls it by itself.
        handler.finalize(epath.Path(folder))
    except ValueError as error:  # of a full disk, with the code in its text
        match = re.search(r"os_error_code='(\d+)'", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1]))) from error
    # Ends Orbax's threads: one handler for each checkpoint would add up over a run.
    handler.close()


# Orbax logs, with the whole trace, what it raises just after it.
logging.getLogger("absl").addFilter(lambda r: "raised an exception" not in r.getMessage())


def _bytes_of(arrays: Tree) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


@contextmanager
def _local_folder(run: Run, manifest: Manifest) -> Iterator[Path]:
    """A folder of this machine that holds the verified files of the checkpoint."""
    local = run.store.local_path(f"{manifest.slot}/{manifest.attempt}")
    if local is not None:
        # Before Orbax opens anything, because it checks no digests.
        _each_part(run, manifest, lambda name, data: None)
        _check_alone(local, manifest)
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="marin-rl-checkpoint-") as name:
        staged = Path(name)

        def keep(part: str, data: pa.Buffer) -> None:
            file = staged / part
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(memoryview(data))

        # Only verified files reach the temporary folder, so nothing else needs to be ruled out.
        _each_part(run, manifest, keep)
        yield staged / manifest.attempt


def _check_alone(folder: Path, manifest: Manifest) -> None:
    """Raise CorruptObject for a file that Orbax might open, and that the manifest does not name."""
    named = {part.name for part in array_parts(manifest)}
    for place, folders, names in os.walk(folder):
        # os.walk counts links to folders as folders and does not enter them; Orbax might.
        links = (name for name in folders if Path(place, name).is_symlink())
        for name in (*names, *links):
            path = Path(place, name)
            if f"{manifest.attempt}/{path.relative_to(folder).as_posix()}" not in named:
                raise CorruptObject(
                    f"{path}: expected the files that the manifest of {manifest.slot} names and no "
                    "others, because restoring the arrays would read it: remove it"
                )


def _each_part(run: Run, manifest: Manifest, use: Any) -> None:
    def verified(part: Part) -> None:
        key = f"{manifest.slot}/{part.name}"
        try:
            data = load(run.store, key)
        except ObjectMissing:
            # Retention may have deleted the file since the manifest was read.
            if not pruned_parts(run.store, manifest.slot):
                raise
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
        use(part.name, data)

    with ThreadPoolExecutor(FILES_IN_FLIGHT_MAX) as pool:
        list(pool.map(verified, array_parts(manifest)))


def _shapes(tree: Tree) -> dict[str, str]:
    leaves = jax.tree_util.tree_flatten_with_path(dict(tree))[0]
    return {
        "/".join(str(part.key) for part in path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


PACKED = "arrays.safetensors"

_DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype("<i8"), "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"), "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip


def packed(tree: Mapping[str, Any]) -> bytes:
    """Return nested dicts of NumPy arrays as the bytes of a file; the same for equal trees."""
    # JSON and not a joined path: names of arrays have slashes, and dots, of their own.
    return save({json.dumps(path): array for path, array in _leaves(tree)})


def unpacked(data: bytes, source: str) -> dict[str, Any]:
    """Return the tree of a file. Raises CorruptObject, naming `source`, for any other bytes."""
    tree: dict[str, Any] = {}
    try:
        for name, tensor in deserialize(data):
            *folders, last = parse_json(name.encode())
            branch = tree
            for folder in folders:
                branch = branch.setdefault(folder, {})
            if not isinstance(branch, dict) or last in branch:
                raise ValueError(f"two arrays at {name}")
            # A view of the bytes that were read, and no second copy of them.
            array = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]])
            branch[last] = array.reshape(tensor["shape"])
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptObject(f"{source}: expected a tree of arrays, found {error}") from error
    return tree


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for name, branch in tree.items():
        if isinstance(branch, Mapping):
            yield from _leaves(branch, (*path, name))
        else:
            yield (*path, name), branch

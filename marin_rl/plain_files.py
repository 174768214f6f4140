"""Files of other people: only regular files of a bounded size are read, and their JSON.

A FIFO in the place of a file would block a reader for good, a device would never end, and a sparse
file of a terabyte would fill the memory. Symbolic links are followed: the user names these files.
Leaves out run folders, below which no link is followed (`storage.stores.local`), and YAML
(`config.yaml_files`).
"""

import os
import stat
from pathlib import Path
from typing import Any

from marin_rl.errors import InputError
from schemas import Malformed
from schemas.strict_json import LIMITS, parse_json

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular(path: Path, bytes_max: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Raises InputError for one of another kind or of more than `bytes_max` bytes, and OSError.
    """
    check_regular(path, path.stat(), bytes_max)
    # Opened without waiting, and looked at again: the name may lead to another file by now.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        check_regular(path, os.fstat(file.fileno()), bytes_max)
        data = file.read() if bytes_max is None else file.read(bytes_max + 1)
    if bytes_max is not None and len(data) > bytes_max:
        raise InputError(f"{path}: expected at most {bytes_max} bytes, found more")
    return data


def check_regular(path: Path, status: os.stat_result, bytes_max: int | None = None) -> None:
    """Raise InputError unless a path's status is that of a regular file of bounded size."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise InputError(
            f"{path}: expected a regular file, found {kind}; name a file, or remove it"
        )
    if bytes_max is not None and status.st_size > bytes_max:
        raise InputError(f"{path}: expected at most {bytes_max} bytes, found {status.st_size}")


def read_object(path: Path, bytes_max: int = LIMITS.bytes_max) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises InputError."""
    try:
        data = read_regular(path, bytes_max)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return object_in(path, data)


def object_in(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object in the bytes of a file. Raises InputError."""
    try:
        tree = parse_json(data)
    except Malformed as error:
        raise InputError(f"cannot read {path}: expected a JSON object: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: expected a JSON object, found a {type(tree).__name__}")
    return tree

"""Folders of a process for work in progress, which go with it, also when it was killed.

A folder carries the number of its process. It is deleted when that process ends in good order, and
otherwise by the next process that makes or sweeps one.
"""

import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "marin-rl-scratch-"
# What each file, folder or link counts at least: a limit of bytes is one of entries too.
ENTRY_BYTES = 4096


class ScratchFolder:
    """A folder of this process, deleted with this object and at the end of the process."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        # a program's user reaches the folder that it works in, and lists no other
        self.path.chmod(0o711)
        self.close = weakref.finalize(self, delete_tree, self.path)


def sweep() -> None:
    """Delete the folders of processes that are gone."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = place.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            delete_tree(place)


def delete_tree(folder: Path) -> None:
    """Delete a folder, however deep a program has made it; what cannot be deleted stays."""
    subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def entries_under(folder: Path, *, strict: bool = False) -> "Iterator[os.DirEntry[str]]":
    """Everything in a folder and below it; links are not followed.

    A folder that cannot be read is left out, or with `strict` a PermissionError. Raises OSError for
    a path that is too long to be read, such as programs make on purpose.
    """
    waiting = [str(folder)]
    while waiting:
        try:
            listed = os.scandir(waiting.pop())
        except (FileNotFoundError, NotADirectoryError):
            continue  # a program that runs may delete what is listed
        except PermissionError:
            if strict:
                raise
            continue
        with listed:
            for entry in listed:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                yield entry


def bytes_under(folder: Path, *, strict: bool = False) -> int:
    """Return the bytes that entries of a folder have on disk; the largest number if unreadable."""
    total = 0
    try:
        for entry in entries_under(folder, strict=strict):
            try:
                blocks = entry.stat(follow_symlinks=False).st_blocks
            except FileNotFoundError:
                continue
            total += max(blocks * 512, ENTRY_BYTES)
    except OSError:
        return sys.maxsize
    return total

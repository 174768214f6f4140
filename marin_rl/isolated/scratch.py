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


def entries_under(folder: Path) -> "Iterator[os.DirEntry[str]]":
    """Everything in a folder and below it; links are not followed.

    Raises OSError for a path that is too long to be read, such as programs make on purpose.
    """
    waiting = [str(folder)]
    while waiting:
        try:
            listed = os.scandir(waiting.pop())
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue  # a program that runs may delete or close what is listed
        with listed:
            for entry in listed:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                yield entry


def bytes_under(folder: Path) -> int:
    """Return the bytes that files in a folder have on disk; the largest number if unreadable."""
    total = 0
    try:
        for entry in entries_under(folder):
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    except OSError:
        return sys.maxsize
    return total

"""Files whose names come from data: opened below a folder part by part, following no link.

A name of a row, a patch, an archive or a clone is a plain relative path or it is refused. The
kernel looks up each part in the folder that the part before it has opened, so a name cannot mean
one file where it is checked and another where it is used. Leaves out what the files are.
"""

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LINKS_MAX = 40  # on the way to one file, as the kernel has it
# Not through a link, and never waiting for the other end of a pipe.
CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# A folder that is only passed through need not be readable.
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC | (os.O_PATH if sys.platform == "linux" else os.O_RDONLY)


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link with its target, which is not looked up."""

    target: str


Content = bytes | Link | None  # of a file; None: there is none


def plain_parts(name: str) -> tuple[str, ...]:
    """Return the parts of a plain relative path.

    Raises ValueError for an absolute path, one with `..`, `.` or an empty part, and for what no
    file name can be.
    """
    parts = tuple(name.split("/"))
    if "\0" in name or {"", ".", ".."}.intersection(parts):
        raise ValueError(f"expected a plain relative path without .., found {name!r:.200}")
    os.fsencode(name)  # a UnicodeEncodeError for a lone surrogate is a ValueError too
    return parts


@contextmanager
def folder_below(top: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Open a folder below `top`; `top` itself may be reached by links.

    With `make`, what stands where a folder has to be, a link for one, is replaced by a folder.
    Raises FileNotFoundError; NotADirectoryError for a link or a file on the way; OSError.
    """
    descriptor = os.open(top, _FOLDER)
    try:
        for part in parts:
            if make:
                with suppress(FileNotFoundError):
                    if not stat.S_ISDIR(os.lstat(part, dir_fd=descriptor).st_mode):
                        os.unlink(part, dir_fd=descriptor)
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def contents_at(top: Path, name: str) -> dict[str, Content]:
    """Return the file that a name leads to and the links on its way, each by its plain name.

    A link is followed by its letters, within `top` alone: one that leads out is there as a link,
    and nothing that it leads to. None stands for a file that is not there. Raises ValueError for a
    name that is no plain path.
    """
    found: dict[str, Content] = {}
    way: list[str] = []
    waiting = list(reversed(plain_parts(name)))
    links = 0
    while waiting and links <= LINKS_MAX:
        part = waiting.pop()
        if part == "..":
            if not way:
                break
            way.pop()
            continue
        way.append(part)
        entry = _read(top, way, last=not waiting)
        if isinstance(entry, Link):
            found["/".join(way)] = entry
            links += 1
            way.pop()
            if entry.target.startswith("/"):
                break
            waiting += [each for each in reversed(entry.target.split("/")) if each not in ("", ".")]
        elif entry is not True:
            if ".." not in waiting:
                found["/".join([*way, *reversed(waiting)])] = entry
            break
    return found


def _read(top: Path, way: Sequence[str], *, last: bool) -> Content | Literal[True]:
    """Return a link or the content of the last file of a way, True for a folder, else None."""
    try:
        with folder_below(top, way[:-1]) as folder:
            mode = os.lstat(way[-1], dir_fd=folder).st_mode
            if stat.S_ISLNK(mode):
                return Link(os.readlink(way[-1], dir_fd=folder))
            if last and stat.S_ISREG(mode):
                opened = os.open(way[-1], os.O_RDONLY | CAREFULLY, dir_fd=folder)
                with os.fdopen(opened, "rb") as file:
                    return file.read()
            return True if stat.S_ISDIR(mode) else None
    except OSError:  # not there, or longer than a name may be
        return None


def write_at(top: Path, name: str, content: Content) -> None:
    """Write a file or a link below `top`, or delete it, in place of what is there.

    Raises ValueError for a name that is no plain path, IsADirectoryError where a folder is in its
    place, OSError.
    """
    *folders, last = plain_parts(name)
    try:
        with folder_below(top, folders, make=content is not None) as folder:
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(os.lstat(last, dir_fd=folder).st_mode):
                    raise IsADirectoryError(name)
                os.unlink(last, dir_fd=folder)
            if isinstance(content, Link):
                os.symlink(content.target, last, dir_fd=folder)
            elif content is not None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY
                with os.fdopen(os.open(last, flags, 0o666, dir_fd=folder), "wb") as file:
                    file.write(content)
    except (FileNotFoundError, NotADirectoryError):
        if content is not None:
            raise

"""Files of other people, and files whose names come from data.

Of files, their JSON and model folders, only regular files of a bounded size are read.

A FIFO in the place of a file would block a reader for good, a device would never end, and a sparse
file of a terabyte would fill the memory. Symbolic links are followed: the user names these files.
A model folder may come from anywhere, and the libraries that read it open whatever has the right
name, so every file of it is looked at before any is opened. Leaves out run folders, below which no
link is followed (`storage.stores.local`), and YAML (`config.yaml_files`).

A name of a row, a patch, an archive or a clone is a plain relative path or it is refused. The
kernel looks up each part in the folder that the part before it has opened, so a name cannot mean
one file where it is checked and another where it is used.
"""

import os
import secrets
import shutil
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from marin_rl.errors import InputError
from schemas import Malformed
from schemas.strict_json import LIMITS, parse_json

ENTRIES_MAX = 10_000
# tokenizer.json of a vocabulary of 262,144 tokens has 33 MB.
VOCABULARY_BYTES_MAX = 2**28
SETTINGS_BYTES_MAX = 2**24

_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
)
WEIGHTS_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
# The folder of named templates, the only one below a model folder that transformers looks into.
_TEMPLATES = "additional_chat_templates"
# Their sizes are compared with the configuration before their data are read.
_WEIGHTS = ".safetensors"
_READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".bpe")

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular(path: Path, bytes_max: int | None = None) -> bytes:
    """Bytes of a regular file of at most `bytes_max` bytes. Raises InputError, OSError."""
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


def check_model_folder(folder: Path) -> None:
    """Raise InputError for a folder in which something would be read that is no ordinary file.

    Symbolic links count as what they lead to: the Hugging Face cache is made of them.
    """
    for top in (folder, folder / _TEMPLATES):
        for count, path in enumerate(top.iterdir() if top.is_dir() else ()):
            if count >= ENTRIES_MAX:
                raise InputError(
                    f"{top}: expected a model folder, found more than {ENTRIES_MAX} entries"
                )
            try:
                status = path.stat()
            except OSError:
                continue  # a link that leads nowhere can be opened by none
            if stat.S_ISDIR(status.st_mode) and path.suffix not in (_WEIGHTS, *_READ):
                continue
            bytes_max = SETTINGS_BYTES_MAX if path.name in _SETTINGS else VOCABULARY_BYTES_MAX
            check_regular(path, status, bytes_max if path.suffix in _READ else None)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder that has safetensors. Raises InputError."""
    if not folder.is_dir():
        raise InputError(
            f"no model folder at {folder}: expected a local Hugging Face folder with config.json "
            "and safetensors; download it first"
        )
    check_model_folder(folder)
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, WEIGHTS_INDEX)):
        raise InputError(
            f"{folder} holds no safetensors: expected {WEIGHTS_FILE} or {WEIGHTS_INDEX}; convert "
            "other formats with transformers' save_pretrained(safe_serialization=True)"
        )
    return read_object(folder / "config.json")


def check_family(tree: dict[str, Any], families: Collection[str], folder: Path) -> str:
    """Return the `model_type` of a config.json. Raises InputError unless it is in `families`."""
    family = tree.get("model_type")
    if not isinstance(family, str) or family not in families:
        raise InputError(
            f"{folder}: model_type {family!r} is not supported; expected one of "
            f"{', '.join(sorted(families))}: choose a model of one of these families"
        )
    return family


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of its index, else the single file.

    Others are not read: folders of Mistral also hold the weights in another layout. Raises
    InputError for an index that is no index, names a file elsewhere, or one that is missing.
    """
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return [folder / WEIGHTS_FILE]
    places = read_object(index, VOCABULARY_BYTES_MAX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise InputError(f"{index}: expected `weight_map`, an object of tensors and their files")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise InputError(
                f"{index} names {name}, which is not in {folder}: expected each of the "
                f"{len(names)} files that it names; download the missing ones"
            )
    return [folder / name for name in names]


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


@contextmanager
def whole_or_absent(place: Path) -> Iterator[Path]:
    """A hidden path beside `place`, for a file or a folder that takes its name when it is whole.

    A reader sees what was there before, or all of the new. What fails leaves nothing.
    """
    partial = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        partial.replace(place)
    finally:
        with suppress(OSError):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)


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

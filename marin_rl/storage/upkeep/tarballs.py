"""Entries of an untrusted tar file: regular files with plain names, and no others.

`tarfile` reads headers here, and nothing more: links, sparse files and extended headers take memory
and time as an entry asks for them. Everything but extended headers for long names and large sizes
is refused; nothing is unpacked.
"""

import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from marin_rl.errors import InputError
from marin_rl.storage.stores.local import open_regular
from schemas.manifests import RECORD_BYTES_MAX
from schemas.records import is_key

EXTENDED_BYTES_MAX = 64 * 1024  # of one extended header: a name has at most 1024
_BLOCK = tarfile.BLOCKSIZE


@dataclass(slots=True)
class ArchiveEntry:
    """A regular file of an archive, to be read before the next one is asked for."""

    name: str
    size: int
    _file: BinaryIO
    _left: int

    def read(self, count: int) -> bytes:
        """Up to `count` of the bytes that were not read yet; empty at the end."""
        data = self._file.read(min(count, self._left))
        if not data and self._left:
            raise InputError(f"{self._file.name} is no whole archive of a run: it ends too early")
        self._left -= len(data)
        return data

    def read_record(self) -> bytes:
        """Bytes of a JSON record. Raises InputError above RECORD_BYTES_MAX."""
        if self.size > RECORD_BYTES_MAX:
            raise InputError(
                f"{self._file.name}: {self.name}: expected a record of {RECORD_BYTES_MAX} bytes at "
                f"most, found {self.size}"
            )
        parts = []
        while part := self.read(self.size):
            parts.append(part)
        return b"".join(parts)


@contextmanager
def opened_archive(path: Path) -> Iterator[Iterator[ArchiveEntry]]:
    """The entries of a tar file. Raises InputError for other files, and for refused entries.

    Refused are other than regular files, names that lead out of the folder or are there twice, and
    sizes that the file does not have.
    """
    try:
        place = path.resolve()  # the user's own link may lead to it
        with open(place, "rb", opener=lambda name, flags: open_regular(Path(name), flags)) as file:
            yield _entries(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise InputError(f"{path} is no whole archive of a run: {error}") from error


def _entries(file: BinaryIO, size: int) -> Iterator[ArchiveEntry]:
    extended: Mapping[str, str] = {}
    seen: set[str] = set()
    while (header := _header(file)) is not None:
        # The extended size wins: sizes above 8 GiB do not fit the header.
        body = int(extended.get("size", header.size))
        # Before anything is read: a size of exabytes costs nothing to refuse.
        if not 0 <= body <= size - file.tell():
            raise InputError(
                f"{file.name} is no whole archive of a run: entry {header.name[:200]!r} says it "
                f"has {body} bytes, more than are left"
            )
        # Entries fill whole blocks; the reader may stop anywhere in its own.
        end = file.tell() + body + -body % _BLOCK
        if header.type == tarfile.XHDTYPE:
            if extended:
                raise _refused(file, header.name, "is one of two extended headers in a row")
            extended = _extended(file, header)
        else:
            name = extended.get("path", header.name)
            _check(file, header, name, seen)
            seen.add(name)
            yield ArchiveEntry(name, body, file, body)
            # It was of this entry alone.
            extended = {}
        file.seek(end)
    if extended:
        raise _refused(file, "an extended header", "is of no entry")
    # What another reader would find after the end must not be hidden from this one.
    while block := file.read(2**20):
        if block.count(0) != len(block):
            raise InputError(f"{file.name}: expected nothing after the archive's end, found bytes")


def _header(file: BinaryIO) -> tarfile.TarInfo | None:
    """The next header; None at the archive's end. Raises InputError."""
    block = file.read(_BLOCK)
    if block.count(0) == _BLOCK:
        return None
    try:
        # One header alone: `fromtarfile` follows extended ones, as large as they say they are.
        return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise InputError(f"{file.name} is no whole archive of a run: {error}") from None


def _extended(file: BinaryIO, header: tarfile.TarInfo) -> Mapping[str, str]:
    """The records of an extended header: `LENGTH key=value` and a newline each."""
    if header.size > EXTENDED_BYTES_MAX:
        raise _refused(file, header.name, f"is an extended header of {header.size} bytes")
    data = file.read(header.size)
    records: dict[str, str] = {}
    while data:
        length, _, remainder = data.partition(b" ")
        if not (length.isdigit() and len(length) <= 5 and len(length) + 1 < int(length)):
            raise _refused(file, header.name, "is an extended header with a broken record")
        record, data = remainder[: int(length) - len(length) - 1], data[int(length) :]
        key, equals, value = record.partition(b"=")
        if key not in (b"path", b"size") or not equals or not value.endswith(b"\n"):
            reason = f"is an extended header with {key[:40]!r}: expected path and size alone"
            raise _refused(file, header.name, reason)
        if key == b"size" and not (value[:-1].isdigit() and len(value) < 20):
            raise _refused(file, header.name, f"has an extended header with size {value[:40]!r}")
        try:
            records[key.decode()] = value[:-1].decode()
        except UnicodeDecodeError:
            raise _refused(file, header.name, "has a name that is not UTF-8") from None
    return records


def _check(file: BinaryIO, header: tarfile.TarInfo, name: str, seen: set[str]) -> None:
    if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise _refused(file, name, f"is of type {header.type!r}: expected regular files alone")
    if not is_key(name):
        raise _refused(file, name, "has a name that is no relative path like RUN/run.json")
    if name in seen:
        raise _refused(file, name, "is there twice")


def _refused(file: BinaryIO, name: str, why: str) -> InputError:
    return InputError(f"{file.name}: entry {name[:200]!r} {why}; do not unpack it")

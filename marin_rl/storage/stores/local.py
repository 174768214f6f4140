"""Objects as files of this machine: complete or absent, and durable once they are named.

fsspec's own local "create" is not exclusive, so this backend talks to the operating system: a
temporary file in the same folder, fsync, hard link to the final name, unlink, fsync of the folder.
The folder of a store may be reached by links; below it none is followed, and nothing but regular
files is opened, for a folder may come from somebody else.
"""

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from marin_rl.errors import CorruptObject, ObjectMissing, RootUnfit, StorageError, StoreUnavailable
from marin_rl.plain_files import CAREFULLY, folder_below
from marin_rl.storage.stores.store import Keys, ObjectStore, PutOutcome, checked, is_private
from schemas.manifests import RECORD_BYTES_MAX

_log = logging.getLogger(__name__)

RECORDS = frozenset(("run.json", "manifest.json", "pruned.json"))  # read whole, so bounded in size


class LocalStore(ObjectStore):
    """A folder of this machine. Creation is a hard link from a complete, synced temporary file."""

    def __init__(self, url: str) -> None:
        self.url = url

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        path = self._path(key)
        with explained(path, len(data)):
            check_way(path, key)
            if path.exists():  # spares writing the bytes; the link below is what decides
                return self._seen(path)
            make_folder(path.parent)
            # In the same folder, so that the link below stays on one file system.
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
            try:
                # The bytes are durable before they have their name: a crash leaves all or nothing.
                _write_synced(temporary, data, os.O_EXCL)
                # The one step that decides: the kernel lets exactly one process have the name.
                outcome = _link(temporary, path)
            finally:
                with suppress(OSError):  # a leftover is private by its dot, and gc takes it
                    temporary.unlink()
        return self._seen(path, outcome)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with explained(path):
            try:
                with _way(path, key) as folder:
                    descriptor = open_regular(path, folder=folder)
            except NotADirectoryError:  # a file where a folder would be: nothing lies below it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                size = os.fstat(descriptor).st_size
                if path.name in RECORDS and size > RECORD_BYTES_MAX:
                    raise CorruptObject(
                        f"{path}: expected a record of {RECORD_BYTES_MAX} bytes at most, found "
                        f"{size} bytes"
                    )
                return file.read()

    def put_part(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with explained(path, len(data)):
            check_way(path, key)
            make_folder(path.parent)
            # No link is needed: no reader looks at a part before a manifest names it.
            _write_synced(path, data, os.O_TRUNC)
            _sync_folder(path.parent)

    def replace(self, key: str, data: bytes) -> None:
        assert is_private(key), f"{key} is visible, and what is visible never changes"
        path = self._path(key)
        with explained(path, len(data)):
            check_way(path, key)
            make_folder(path.parent)
        replace_file(path, data)

    def list(self, prefix: str = "") -> Keys:
        start = self.url.rstrip("/") + "/"
        with explained(Path(self.url, prefix)):
            if prefix:
                check_way(Path(self.url, checked(prefix), "below"), f"{prefix}/below")
            paths = _not_folders((start + prefix).rstrip("/"))
            return sorted(path.removeprefix(start) for path in paths)

    def children(self, prefix: str = "") -> Keys:
        folder = Path(self.url, prefix and checked(prefix))
        with explained(folder):
            if prefix:
                check_way(folder / "below", f"{prefix}/below")
            return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def delete(self, key: str) -> None:
        path = self._path(key)
        with explained(path):
            check_way(path, key)
            path.unlink(missing_ok=True)

    def size(self, key: str) -> int:
        path = self._path(key)
        with explained(path):
            check_way(path, key)
            return path.lstat().st_size

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def url_of(self, key: str) -> str:
        return str(self._path(key))

    def at(self, folder: str) -> ObjectStore:
        return LocalStore(str(self._path(folder)))

    def _path(self, key: str) -> Path:
        return Path(self.url, checked(key))

    @staticmethod
    def _seen(path: Path, outcome: PutOutcome = PutOutcome.EXISTS) -> PutOutcome:
        """Return `outcome` once the name is durable, whichever process created it."""
        try:
            _sync_folder(path.parent)
        except OSError as error:
            _log.warning("cannot sync %s after creating a file in it: %s", path.parent, error)
            return PutOutcome.UNKNOWN
        return outcome


def check_way(path: Path, key: str) -> None:
    """Raise CorruptObject where a folder on the way to an object is a link.

    `path` is the file of `key` in some store: folders above its first part are the user's own.
    """
    with suppress(FileNotFoundError, NotADirectoryError), _way(path, key):
        pass


@contextmanager
def _way(path: Path, key: str) -> Iterator[int]:
    """Open the folder of an object. Raises CorruptObject where a folder on the way is a link."""
    top = path.parents[key.count("/")]
    parts = path.parent.relative_to(top).parts
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(folder_below(top, parts))
        except NotADirectoryError:
            for count in range(1, len(parts) + 1):
                if (place := top.joinpath(*parts[:count])).is_symlink():
                    raise not_regular(place, "a folder") from None
            raise
        yield folder


def open_regular(path: Path, flags: int = os.O_RDONLY, *, folder: int | None = None) -> int:
    """A descriptor of a regular file, not reached through a link in its last place.

    `folder` is the descriptor of the path's folder, where it is open. Raises CorruptObject for a
    link, pipe, socket, device or folder; OSError.
    """
    try:
        name = path if folder is None else path.name
        descriptor = os.open(name, flags | CAREFULLY, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise not_regular(path) from None
        raise
    # Of the descriptor, because the name may lead to another file by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular(path)
    return descriptor


def checked_file(path: Path, key: str) -> Path:
    """Return the file of `key`, for a library that opens it by its name.

    Raises CorruptObject unless it is a regular file that no link leads to; ObjectMissing.
    """
    with explained(path):
        check_way(path, key)
        if not stat.S_ISREG(path.lstat().st_mode):
            raise not_regular(path)
    return path


def not_regular(path: Path, expected: str = "a regular file") -> CorruptObject:
    with suppress(OSError):
        mode = path.lstat().st_mode
        kind = next((name for test, name in _KINDS.items() if test(mode)), "a file of another kind")
        return CorruptObject(
            f"{path}: expected {expected}, found {kind}; marin-rl writes none there, and follows "
            "none below a run's folder (which may be a link itself): remove it, or restore a copy"
        )
    return CorruptObject(f"{path}: expected {expected}, found none")


_KINDS = {
    stat.S_ISLNK: "a symbolic link",
    stat.S_ISFIFO: "a pipe (FIFO)",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISDIR: "a folder",
    stat.S_ISREG: "a file",
}


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that may be there already; a link in its place is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with explained(path, len(data)):
        try:
            _write_synced(temporary, data, os.O_EXCL)
            # A rename is atomic: a reader opens the old file or the new one.
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink()


def _not_folders(top: str) -> Iterator[str]:
    """All files below a folder, symlinks to folders included."""
    waiting = [top]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        yield entry.path
        except FileNotFoundError:  # a folder that vanishes while it is listed is empty
            continue


def make_folder(folder: Path) -> None:
    """Create `folder` and what is missing above it, each entry durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):  # another process made it meanwhile
        folder.mkdir()
    # Each level before the one below it, which would be lost with its name.
    _sync_folder(folder.parent)


def _write_synced(path: Path, data: bytes, flag: int) -> None:
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | flag)
    try:
        view = memoryview(data)
        while view:  # one write may take less than it was given: 2 GiB at most on Linux
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # FUSE without folders to sync
            raise
    finally:
        os.close(descriptor)


def _link(temporary: Path, path: Path) -> PutOutcome:
    try:
        # Not a rename, which would replace a file that exists.
        os.link(temporary, path)
    except FileExistsError:
        return PutOutcome.EXISTS
    except OSError as error:
        if error.errno in _PASSING:  # a network file system may have done it all the same
            _log.warning("no clear answer on creating %s: %s", path, error)
            return PutOutcome.UNKNOWN
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise RootUnfit(
                f"{path.parent}: this file system has no hard links ({error.strerror}), so files "
                "cannot be created at most once there; use another disk or an object store"
            ) from None
        raise
    return PutOutcome.CREATED


_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR)
_ADVICE = {
    errno.ENOSPC: "the disk is full; free space there, then start the same command again",
    errno.EDQUOT: "your disk quota is used up; free space there, then start the same command again",
    errno.EFBIG: "the file would be larger than this process or file system allows",
    errno.EROFS: "the file system is read-only; choose another root",
    errno.EACCES: "permission denied; choose another root or ask for access",
    errno.EPERM: "operation not permitted; choose another root or ask for access",
    errno.ENOTDIR: "a file is in the way of a folder; choose another root or remove it",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.ELOOP: "links lead in a circle, or to where none may lead; remove them",
}


def need_room(folder: Path, n_bytes: int) -> None:
    """Raise the OSError of a full disk if `n_bytes` cannot fit below `folder`, before any of them.

    A file system that does not tell its size passes.
    """
    disk = os.statvfs(folder)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < n_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@contextmanager
def explained(path: Path, n_bytes: int | None = None) -> Iterator[None]:
    """Turn OSErrors about a local file into our errors.

    `n_bytes` is what was to be written, None when reading. Raises ObjectMissing, StoreUnavailable
    (network file systems) or StorageError.
    """
    try:
        yield
    except OSError as error:
        if n_bytes is None and isinstance(error, FileNotFoundError):
            raise ObjectMissing(f"{path} does not exist") from None
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        kind = StoreUnavailable if error.errno in _PASSING else StorageError
        if n_bytes is None:
            raise kind(f"cannot read {path}: {advice}") from error
        raise kind(
            f"cannot write {n_bytes} bytes to {path}: {advice}. What is committed already is not "
            "affected"
        ) from error

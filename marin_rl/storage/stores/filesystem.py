"""Access to files and fsspec: `open_store` returns the store behind a URL, `probe` tests it.

All stores of this library come from `open_store`; the memory backend, for tests, is here too. What
a store is and does is in store.py. What to do about an unknown outcome is decided in commits.py.
"""

import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from marin_rl.errors import ConfigError, ObjectMissing, RootUnfit, StorageError, StoreUnavailable
from marin_rl.storage.stores.buckets import BucketStore
from marin_rl.storage.stores.local import LocalStore
from marin_rl.storage.stores.store import FilesystemStore, ObjectStore, PutOutcome

__all__ = ["MemoryStore", "ObjectStore", "PutOutcome", "open_store", "probe"]

PROBE_PAUSES_S = (0.2, 0.8, 2.0, 5.0)

# The memory filesystem is one per process, and check and write must be one step in it.
_memory_lock = threading.RLock()


def open_store(url: str, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store at a local path or a file://, memory://, gs:// or s3:// URL. Touches nothing yet.

    `options` go to fsspec. Raises ConfigError for other schemes.
    """
    scheme, separator, path = url.partition("://")
    if not separator:
        scheme, path = "file", url
    if scheme not in BACKENDS:
        raise ConfigError(
            "root: expected a local path or a file://, memory://, gs:// or s3:// URL, found "
            f"{url!r}"
        )
    return BACKENDS[scheme](path, options)


def _local(path: str, options: Mapping[str, Any] | None) -> ObjectStore:
    if options:
        raise ConfigError(
            f"storage_options: a local root takes none, found {', '.join(sorted(options))}"
        )
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ConfigError(
            f"root: {path!a} cannot be a file name in this process, whose encoding is "
            f"{sys.getfilesystemencoding()}: set PYTHONUTF8=1, or a locale such as C.UTF-8"
        ) from None
    # Absolute, for processes with another working directory; links in it are the user's choice.
    return LocalStore(str(Path(path).expanduser().absolute()))


def _bucket(scheme: str, path: str, options: Mapping[str, Any] | None) -> ObjectStore:
    if not path.strip("/"):
        raise ConfigError(f"root: expected {scheme}://BUCKET or {scheme}://BUCKET/PATH")
    return BucketStore(f"{scheme}://{path.strip('/')}", options)


# By the scheme of a root's URL: opens the store at the rest of the URL, with fsspec's options.
BACKENDS: dict[str, Callable[[str, Mapping[str, Any] | None], ObjectStore]] = {
    "file": _local,
    "local": _local,
    "memory": lambda path, options: MemoryStore(f"memory://{path.strip('/')}", options),
    "gs": partial(_bucket, "gs"),
    "gcs": partial(_bucket, "gs"),
    "s3": partial(_bucket, "s3"),
    "s3a": partial(_bucket, "s3"),
}


def probe(store: ObjectStore) -> None:
    """Prove that the root can be written and creates objects at most once.

    Creates one random key twice with different bytes, reads it, and removes it; begins again with
    another key after an answer that was lost or a 5xx. Raises RootUnfit, StoreUnavailable.
    """
    for pause_s in PROBE_PAUSES_S:
        with suppress(StoreUnavailable):
            _probe_once(store)
            return
        time.sleep(pause_s * random.uniform(0.5, 1.0))
    _probe_once(store)


def _probe_once(store: ObjectStore) -> None:
    # Private by its dot, so readers pass over it, and gc takes it if this process dies here.
    key = f".probe-{secrets.token_hex(8)}"
    try:
        # Different bytes, so that what is read back says which of the two creates took effect.
        outcomes = [store.put_if_absent(key, data) for data in (b"first", b"second")]
        if PutOutcome.UNKNOWN in outcomes:
            raise StoreUnavailable(f"{store.url}: the create-if-absent probe got no clear answer")
        content = store.read(key)
        store.delete(key)
    except StoreUnavailable:
        raise  # an outage says nothing about what the root is able to do
    except StorageError as error:
        raise RootUnfit(f"{store.url} cannot hold runs: {error}") from None
    # The first may say "exists" of itself, where the network sent it twice: its bytes decide.
    if outcomes[1] is PutOutcome.CREATED or content != b"first":
        raise RootUnfit(
            f"{store.url} does not honour create-if-absent: expected the second create of a key to "
            f"be refused, found {outcomes[1].value} and content {content!r}. Two processes could "
            "overwrite each other's results there; use a local folder, gs://, or an S3 service "
            "that supports If-None-Match"
        )


class MemoryStore(FilesystemStore):
    """fsspec's memory filesystem under one lock: for tests, and gone with the process."""

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        path = self._path(key)
        with _memory_lock:
            # Look and write under one lock: this is what makes the create atomic.
            if self._fs.exists(path):
                return PutOutcome.EXISTS
            self._fs.pipe_file(path, data)
        return PutOutcome.CREATED

    def read(self, key: str) -> bytes:
        with self._explained(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def put_part(self, key: str, data: bytes) -> None:
        with _memory_lock:
            self._fs.pipe_file(self._path(key), data)

    @property
    def _fs(self) -> Any:
        from fsspec import filesystem  # brings asyncio along, which a local root spares

        return filesystem("memory")

    @property
    def _base(self) -> str:
        # One slash stays: paths of the memory filesystem are absolute.
        return self.url.removeprefix("memory:/")

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            with _memory_lock:
                yield
        except FileNotFoundError:
            where = f"{self.url}/{key}" if key else self.url
            raise ObjectMissing(f"{where} does not exist") from None

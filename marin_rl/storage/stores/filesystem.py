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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from marin_rl.errors import ConfigError, ObjectMissing, RootUnfit, StorageError, StoreUnavailable
from marin_rl.storage.stores.buckets import BucketStore
from marin_rl.storage.stores.local import LocalStore
from marin_rl.storage.stores.store import FilesystemStore, ObjectStore, PutOutcome, on_open

__all__ = ["MemoryStore", "ObjectStore", "PutOutcome", "open_store", "probe"]

BUCKET_SCHEMES = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3"}

PROBE_PAUSES_S = (0.2, 0.8, 2.0, 5.0)

# The memory filesystem is one per process, and check and write must be one step in it.
_memory_lock = threading.RLock()


def open_store(url: str, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store at a local path or a file://, memory://, gs:// or s3:// URL. Touches nothing yet.

    `options` go to fsspec. Raises ConfigError for other schemes. Where MARIN_RL_FAULTS is set, the
    store has those faults (fault_injection.py).
    """
    store = _store_at(url, options)
    if on_open or os.environ.get("MARIN_RL_FAULTS"):
        # Imported here, so that an ordinary run never loads it.
        from marin_rl.storage.stores.fault_injection import with_faults

        return with_faults(store)
    return store


def _store_at(url: str, options: Mapping[str, Any] | None) -> ObjectStore:
    scheme, separator, path = url.partition("://")
    if not separator:
        scheme, path = "file", url
    if scheme in ("file", "local"):
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
    if scheme == "memory":
        return MemoryStore(f"memory://{path.strip('/')}", options)
    if scheme in BUCKET_SCHEMES:
        if not path.strip("/"):
            raise ConfigError(f"root: expected {scheme}://BUCKET or {scheme}://BUCKET/PATH")
        return BucketStore(f"{BUCKET_SCHEMES[scheme]}://{path.strip('/')}", options)
    raise ConfigError(
        f"root: expected a local path or a file://, memory://, gs:// or s3:// URL, found {url!r}"
    )


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

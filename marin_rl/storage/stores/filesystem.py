"""Access to files and fsspec: `open_store` returns the store behind a URL, `probe` tests it.

Buckets are Google Cloud Storage through gcsfs and S3 through s3fs. A create is one conditional
request, sent once; "exists", 409, 5xx and silence are distinguished from refusals here, and judged
in commits.py. Nothing is ever read from a listing cache. The memory backend is for tests.
"""

import logging
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import orjson

from marin_rl.errors import ConfigError, ObjectMissing, RootUnfit, StorageError, StoreUnavailable
from marin_rl.storage.stores.local import LocalStore
from marin_rl.storage.stores.store import FilesystemStore, ObjectStore, PutOutcome

REQUEST_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 1800.0
# A request slower than this counts as unanswered.
BYTES_PER_S_MIN = 2**20
# The most that S3 takes in one PUT.
SINGLE_REQUEST_BYTES_MAX = 5 * 2**30
# Not refusals: 409 and 412 may answer our own create, sent twice, and the others pass with time.
PASSING_STATUSES = (408, 409, 412, 425, 429)
# The only retries of a read, since its filesystem sends each request once.
READ_PAUSES_S = (0.2, 0.8)

_log = logging.getLogger(__name__)


class BucketStore(FilesystemStore):
    """A folder of a bucket on Google Cloud Storage (gcsfs) or S3 (s3fs)."""

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        # Sent once: the commit protocol decides on retries.
        assert len(data) < SINGLE_REQUEST_BYTES_MAX, f"{key} has {len(data)} bytes: cut it smaller"
        try:
            self._filesystem(once=True).pipe_file(
                self._path(key),
                data,
                mode="create",
                # No multipart upload: its parts would be further requests, each with its own fate.
                chunksize=SINGLE_REQUEST_BYTES_MAX,
                timeout=_timeout_s(len(data)),
            )
        except _remote_errors(self._protocol) as error:
            if isinstance(error, FileExistsError):
                return PutOutcome.EXISTS
            if refusal := _refusal(error):
                raise StorageError(f"cannot create {self.url_of(key)}: {refusal}") from error
            # Not raised: an error after the request was sent does not say that nothing was created.
            _log.warning("no clear answer on creating %s: %s", self.url_of(key), _text(error))
            return PutOutcome.UNKNOWN
        return PutOutcome.CREATED

    def read(self, key: str) -> bytes:
        for pause_s in READ_PAUSES_S:
            # Reads may be repeated at will, unlike creates: they change nothing.
            with suppress(StoreUnavailable):
                return self._read_once(key)
            time.sleep(pause_s)
        return self._read_once(key)

    def put_part(self, key: str, data: bytes) -> None:
        with self._explained(key):
            # The backend may send it again: no other attempt writes under this name.
            self._fs.pipe_file(self._path(key), data, timeout=_timeout_s(len(data)))

    def _read_once(self, key: str) -> bytes:
        with self._explained(key):
            fs = self._filesystem(once=True)
            return fs.cat_file(self._path(key), timeout=READ_TIMEOUT_S)

    @property
    def _protocol(self) -> str:
        return self.url.partition("://")[0]

    @property
    def _fs(self) -> Any:
        return self._filesystem()

    def _filesystem(self, *, once: bool = False) -> Any:
        options = orjson.dumps(self.options, option=orjson.OPT_SORT_KEYS)
        # By process: connections that a fork inherits would be used by both.
        return _bucket_filesystem(self._protocol, options, os.getpid(), once=once)

    @property
    def _base(self) -> str:
        return self.url.partition("://")[2]

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except _remote_errors(self._protocol) as error:
            if isinstance(error, FileNotFoundError):
                raise ObjectMissing(f"{where} does not exist") from None
            if refusal := _refusal(error):
                raise StorageError(f"{where}: {refusal}") from error
            raise StoreUnavailable(f"{where}: {_text(error)}") from error


@cache
def _bucket_filesystem(protocol: str, options: bytes, process: int, *, once: bool = False) -> Any:
    """Filesystem of this process (none survives a fork) for a protocol and a set of options.

    With `once`, the filesystem sends each request a single time, so that no retry inside it can
    run past the deadline of a commit.
    """
    from fsspec import filesystem  # brings asyncio along, which a local root spares

    # fsspec's own cache would return one instance for both, and `once` alters it.
    settings = orjson.loads(options) | {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol == "s3" and once:
        configured = settings.get("config_kwargs", {})
        # botocore retries below s3fs, out of reach of `fs.retries`.
        settings["config_kwargs"] = configured | {"retries": {"total_max_attempts": 1}}
    try:
        fs: Any = filesystem("gcs" if protocol == "gs" else protocol, **settings)
    except ImportError as error:
        raise ConfigError(f"root: {protocol}:// needs a package that is missing: {error}") from None
    if once:
        fs.retries = 1  # s3fs reads it at each call
        method = getattr(type(fs), "_request", None)
        if method is not None:  # gcsfs wraps its own count around the method: take what is inside
            fs._request = method.__wrapped__.__get__(fs)
    return fs


def _timeout_s(n_bytes: int) -> float:
    # By size: one limit for all would cut off checkpoints, or wait minutes for a record.
    return REQUEST_TIMEOUT_S + n_bytes / BYTES_PER_S_MIN


@cache
def _remote_errors(protocol: str) -> tuple[type[Exception], ...]:
    """Exceptions of the backend for failures outside of this process; imported on first use."""
    if protocol == "gs":
        from aiohttp import ClientError as HTTPError
        from gcsfs.retry import ChecksumError, HttpError
        from google.auth.exceptions import GoogleAuthError

        return OSError, ValueError, HTTPError, HttpError, ChecksumError, GoogleAuthError
    from botocore.exceptions import BotoCoreError, ClientError

    return OSError, BotoCoreError, ClientError


def _refusal(error: Exception) -> str | None:
    """Why trying again cannot help; None when it may."""
    if isinstance(error, FileNotFoundError):
        return "the bucket does not exist, or you may not see it"
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden"):
        return f"permission denied; check the credentials and the bucket's policy ({error})"
    if "Credential" in type(error).__name__:
        return f"no valid credentials: {error}"
    code = str(getattr(error, "code", ""))
    status = int(code) if code.isdigit() else 0
    # s3fs raises an OSError from botocore's ClientError, which has the response.
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, dict):
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if isinstance(error, ValueError) or (400 <= status < 500 and status not in PASSING_STATUSES):
        return f"the request was refused: {_text(error)}"
    return None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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

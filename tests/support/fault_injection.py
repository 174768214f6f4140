"""Fault injection: a store that kills its process, or fails, at a chosen operation.

For tests of crash safety. A process asks for faults of the stores that it opens: `inject_faults`
for a block, `install("kill-before:17")` for good.

N counts, from 1 and over the whole process, what `open_store`'s stores are asked to do: create,
read, write a part, list, list children, delete, ask for a size, and hand out the path of a local
file, which memory maps then work on by themselves. Of all operations those that create
change what others see; the rest is counted because a process may die, and a network fail, anywhere.
"""

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from marin_rl.errors import StoreUnavailable
from marin_rl.storage.stores import filesystem
from marin_rl.storage.stores.store import Keys, ObjectStore, PutOutcome

BACKENDS = dict(filesystem.BACKENDS)
# Longer than the first pauses of the commit protocol, which thus looks again before it happens.
DELAY_S = 0.3

# What may befall operation N, and what it then is to the caller.
KINDS = {
    "kill-before": "the process is killed before the operation",
    "kill-amid": "killed in its middle: half of the bytes are written, under no visible name",
    "kill-after": "killed after it took effect",
    "fail": "it does not happen, and the store answers as one that is down",
    "delay": f"it happens {DELAY_S:g} s late",
    "late": f"no answer comes, and it happens {DELAY_S:g} s later, when nobody waits for it",
    "duplicate": "the network sends it twice, and the second answer is the one that arrives",
    "lose-reply": "it happens, but no answer comes",
}

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind`, one of KINDS, befalls operation number `at`."""

    kind: str
    at: int


def parse(text: str) -> tuple[Fault, ...]:
    """The faults in `text`: KIND:N, separated by commas."""
    faults = [item.partition(":") for item in text.split(",")]
    assert KINDS.keys() >= {kind for kind, _, _ in faults}, f"expected KIND:N, one of {[*KINDS]}"
    return tuple(Fault(kind, int(number)) for kind, _, number in faults)


class Operations:
    """Counts the operations of a process, and says what befalls the next one."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self.count = 0
        self._faults, self.lock = faults, threading.Lock()

    def next(self, name: str, url: str) -> str | None:
        """Count one more operation; the kind of its fault, or None."""
        with self.lock:
            self.count += 1
            return next((f.kind for f in self._faults if f.at == self.count), None)


@contextmanager
def inject_faults(operations: Operations) -> Iterator[Operations]:
    """Let stores that are opened inside count with `operations`."""
    with opened_as(lambda store: FaultyStore(store, operations)):
        yield operations


@contextmanager
def opened_as(wrap: Callable[[ObjectStore], ObjectStore]) -> Iterator[None]:
    """Apply `wrap`, and no other, to each store that `open_store` opens inside."""
    before = dict(filesystem.BACKENDS)

    def wrapped(backend: Callable[..., ObjectStore]) -> Callable[..., ObjectStore]:
        return lambda path, options: wrap(backend(path, options))

    filesystem.BACKENDS.update({scheme: wrapped(b) for scheme, b in BACKENDS.items()})
    try:
        yield
    finally:
        filesystem.BACKENDS.update(before)


def install(text: str) -> None:
    """Inject the faults in `text` into this process, until it ends."""
    _installed.enter_context(inject_faults(Operations(parse(text))))


_installed = ExitStack()


class FaultyStore(ObjectStore):
    """Wrapper of a store in which chosen operations fail."""

    def __init__(self, inner: ObjectStore, operations: Operations) -> None:
        self.url = inner.url
        self._inner, self._operations = inner, operations

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens it as its own faults say.
        return filesystem.open_store, (self.url, getattr(self._inner, "options", None))

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        torn = self._torn(key, data)
        with suppress(_NoAnswer):
            return self._do("create", key, lambda: self._inner.put_if_absent(key, data), torn)
        # What a backend reports when the reply is lost.
        return PutOutcome.UNKNOWN

    def put_part(self, key: str, data: bytes) -> None:

        # Under the final name, as in a crash: no reader opens a part that no manifest names.
        def half() -> None:
            self._inner.put_part(key, data[: len(data) // 2])

        self._do("write", key, lambda: self._inner.put_part(key, data), half)

    def read(self, key: str) -> bytes:
        return self._do("read", key, lambda: self._inner.read(key))

    def list(self, prefix: str = "") -> Keys:
        return self._do("list", prefix, lambda: self._inner.list(prefix))

    def children(self, prefix: str = "") -> Keys:
        return self._do("children", prefix, lambda: self._inner.children(prefix))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._inner.delete(key))

    def size(self, key: str) -> int:
        return self._do("size", key, lambda: self._inner.size(key))

    def local_path(self, key: str) -> Path | None:
        """Counted where there is a file: the caller is about to use it."""
        path = self._inner.local_path(key)
        if path is None:
            return None
        return self._do("path", key, lambda: path)

    def url_of(self, key: str) -> str:
        return self._inner.url_of(key)

    def at(self, folder: str) -> ObjectStore:
        """Operations are counted together."""
        return FaultyStore(self._inner.at(folder), self._operations)

    def _do(
        self,
        name: str,
        key: str,
        operation: Callable[[], Result],
        amid: Callable[[], None] = lambda: None,
    ) -> Result:
        """The result of `operation`, unless it is the one. Raises _NoAnswer where none comes."""
        url = f"{self.url}/{key}"
        kind = self._operations.next(name, url)
        if kind is not None:
            _befall(kind, url, operation, amid)
        return operation()

    def _torn(self, key: str, data: bytes) -> Callable[[], None]:
        """Half of a file under a temporary name, as a local create leaves it; a bucket has none."""

        def tear() -> None:
            if self._inner.local_path(key) is not None:
                folder, _, name = key.rpartition("/")
                private = f".{name}.{secrets.token_hex(8)}.tmp"
                self._inner.put_part(
                    f"{folder}/{private}" if folder else private, data[: len(data) // 2]
                )

        return tear


class _NoAnswer(StoreUnavailable):
    """The operation may or may not have happened; its caller gets no answer."""


def _befall(kind: str, url: str, operation: Callable[[], Any], amid: Callable[[], None]) -> None:
    """Apply a fault to an operation; returns if the operation is then to take place as always."""
    if kind == "kill-amid":
        amid()
    elif kind in ("kill-after", "duplicate", "lose-reply"):
        # For `duplicate` this is the first delivery; the caller's own call is the second.
        _quietly(operation)
    elif kind == "delay":
        time.sleep(DELAY_S)
    elif kind == "late":
        threading.Timer(DELAY_S, _quietly, (operation,)).start()
    if kind.startswith("kill-"):
        kill()
    if kind in ("fail", "late", "lose-reply"):
        raise _NoAnswer(f"{url}: no answer, for a fault was asked for")


def _quietly(operation: Callable[[], Any]) -> None:
    with suppress(Exception):  # the caller is gone, so the error reaches no one
        operation()


def kill() -> NoReturn:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")

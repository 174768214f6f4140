"""Interface of a store of immutable objects, independent of the backend.

`put_if_absent` is the only operation that the commit protocol rests on. Names that begin with a dot
are temporary or private and never match `shard-*.parquet`. The backends are in local.py and
filesystem.py, which opens them. A forked run reads its own folder, and the rounds before the fork
in its parents'; nothing of the shared prefix can be written or deleted through a fork.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from marin_rl.errors import CorruptObject, ObjectMissing, StorageError
from marin_rl.storage.layout import round_of

Keys = list[str]  # an alias, because `list` names a method below


class PutOutcome(Enum):
    """Outcome of a create: created, already there, or unknown.

    EXISTS may still be our own write whose reply was lost: read back and compare.
    """

    CREATED = "created"
    EXISTS = "exists"
    UNKNOWN = "unknown"


class ObjectStore(ABC):
    """Objects below one folder or URL, by keys like `rollouts/round-00012/shard-0003.parquet`.

    Every listing is fresh and every read is of the whole object. Stores are picklable and open
    their connections lazily, per process. Backends inherit the docstrings of the methods.
    """

    url: str

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        """Create `key` atomically and durably unless it exists. StorageError if never possible."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Bytes of the object. Raises ObjectMissing, StoreUnavailable, StorageError."""

    @abstractmethod
    def put_part(self, key: str, data: bytes) -> None:
        """Write `key`, whose name no other attempt uses, durably. Raises as `read` does."""

    def replace(self, key: str, data: bytes) -> None:
        """Write a private object that commits nothing, in the place of the last one.

        A reader sees the old bytes or the new ones. Raises as `read` does.
        """
        # One request, which is atomic in buckets and in memory.
        assert is_private(key), f"{key} is visible, and what is visible never changes"
        self.put_part(key, data)

    @abstractmethod
    def list(self, prefix: str = "") -> Keys:
        """Keys below the folder `prefix`, temporary ones included, fresh and sorted."""

    @abstractmethod
    def children(self, prefix: str = "") -> Keys:
        """Names directly below the folder `prefix`, objects and folders, fresh and sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove `key` if it is there: for gc, the probe, and a server that withdraws itself."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of the object. Raises ObjectMissing, StoreUnavailable."""

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """The file of `key` where the store is a folder of this machine, else None."""

    @abstractmethod
    def url_of(self, key: str) -> str:
        """Path or URL of the object, for people and other programs."""

    @abstractmethod
    def at(self, folder: str) -> "ObjectStore":
        """The same store, seen from `folder`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class FilesystemStore(ObjectStore):
    """A store whose objects are those of an fsspec filesystem, opened from a URL and options."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self.options = dict(options or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the filesystem, whose event loop and connections belong to this process.
        return type(self), (self.url, self.options)

    @property
    @abstractmethod
    def _fs(self) -> Any:
        """The filesystem of this process."""

    @property
    @abstractmethod
    def _base(self) -> str:
        """The store's folder as the filesystem names it."""

    @abstractmethod
    def _explained(self, key: str) -> AbstractContextManager[None]:
        """Turn the filesystem's errors about a key into ours."""

    def list(self, prefix: str = "") -> Keys:
        start = f"{self._base}/{prefix}".rstrip("/") + "/"
        with self._explained(prefix):
            paths = [f"/{path.lstrip('/')}" for path in self._fs.find(start.rstrip("/"))]
        # `find` of an object returns the object itself, which does not lie below the folder.
        lead, root = "/" + start.lstrip("/"), "/" + self._base.strip("/") + "/"
        return sorted(p.removeprefix(root) for p in paths if p.startswith(lead) and p[-1] != "/")

    def children(self, prefix: str = "") -> Keys:
        folder = f"{self._base}/{prefix}".rstrip("/")
        paths: Keys = []
        with suppress(ObjectMissing), self._explained(prefix):
            paths = [str(path).strip("/") for path in self._fs.ls(folder, detail=False)]
        # `ls` of an object, or of a folder with a marker, returns it too.
        return sorted({path.rpartition("/")[2] for path in paths if path != folder.strip("/")})

    def delete(self, key: str) -> None:
        with suppress(ObjectMissing), self._explained(key):
            self._fs.rm_file(self._path(key))

    def size(self, key: str) -> int:
        with self._explained(key):
            return int(self._fs.info(self._path(key))["size"])

    def local_path(self, key: str) -> Path | None:
        return None

    def url_of(self, key: str) -> str:
        return f"{self.url}/{checked(key)}"

    def at(self, folder: str) -> ObjectStore:
        return type(self)(self.url_of(folder), self.options)

    def _path(self, key: str) -> str:
        return f"{self._base}/{checked(key)}"


def is_private(key: str) -> bool:
    """True if a file or folder in `key` begins with a dot: temporary files, locks, probes."""
    # Any part of the key: objects in a private folder are private as well.
    return any(part.startswith(".") for part in key.split("/"))


def checked(key: str) -> str:
    """Return `key`. Raises CorruptObject unless it stays below its store."""
    # Keys come from records too, which may be forged: `../` would leave the run's folder.
    if "\0" in key or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise CorruptObject(
            f"expected a key like a/b that stays below its folder, found {key[:100]!r}: no record "
            "of marin-rl names it so"
        )
    return key


PLAYED = ("intakes", "rollouts", "batches", "evals", "metrics")
# What there is before the first round.
BEFORE = ("sft", "base", "pairs", "reward_model", "preference")
KINDS = (*PLAYED, *BEFORE, "checkpoints")


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A run whose slots a fork reads as its own, up to the checkpoint of `through_round`.

    `sha256` is that of its run.json. In a chain of forks, each ancestor has
    the rounds after the one before it.
    """

    run_id: str
    through_round: int
    sha256: str


class ForkedStore(ObjectStore):
    """`own`, before which lie the folders of ancestors, ascending by the round they reach to."""

    def __init__(self, own: ObjectStore, shared: Sequence[tuple[int, ObjectStore]]) -> None:
        self.own, self.shared, self.url = own, tuple(shared), own.url
        self._stores = (own, *(store for _, store in shared))

    def owner(self, key: str) -> ObjectStore:
        """The folder that `key` lies in."""
        kind, _, path = key.partition("/")
        round = 0 if kind in BEFORE else round_of(path.partition("/")[0])
        # Locks, records and private files of the run itself are never shared.
        if kind not in KINDS or round is None:
            return self.own
        # The checkpoint that finishes it: round r ends with checkpoint r + 1.
        place = round + 1 if kind in PLAYED else round
        # Ascending: later ancestors have a round from the first that reaches so far.
        return next((store for through, store in self.shared if place <= through), self.own)

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        owner = self.owner(key)
        if owner is self.own:
            return owner.put_if_absent(key, data)
        # Never created there, even if absent: that would change the parent's history.
        owner.size(key)  # raises ObjectMissing
        # Present: the caller reads it back, as after any create that came second.
        return PutOutcome.EXISTS

    def read(self, key: str) -> bytes:
        return self.owner(key).read(key)

    def put_part(self, key: str, data: bytes) -> None:
        self._writable(key).put_part(key, data)

    def replace(self, key: str, data: bytes) -> None:
        self._writable(key).replace(key, data)

    def list(self, prefix: str = "") -> Keys:
        # A parent may play on after the fork; those rounds are not the fork's.
        return sorted(
            key for store in self._stores for key in store.list(prefix) if self.owner(key) is store
        )

    def children(self, prefix: str = "") -> Keys:
        if not prefix:
            kinds = {name for _, store in self.shared for name in store.children() if name in KINDS}
            return sorted({*self.own.children(), *kinds})
        if prefix not in KINDS:
            return self.owner(prefix).children(prefix)
        return sorted(
            name
            for store in self._stores
            for name in store.children(prefix)
            if self.owner(f"{prefix}/{name}") is store
        )

    def delete(self, key: str) -> None:
        self._writable(key).delete(key)

    def size(self, key: str) -> int:
        return self.owner(key).size(key)

    def local_path(self, key: str) -> Path | None:
        return self.owner(key).local_path(key)

    def url_of(self, key: str) -> str:
        return self.owner(key).url_of(key)

    def at(self, folder: str) -> ObjectStore:
        return self.owner(folder).at(folder)

    def _writable(self, key: str) -> ObjectStore:
        owner = self.owner(key)
        if owner is not self.own:
            raise StorageError(
                f"{owner.url_of(key)} belongs to the run that {self.own.url} was forked from: "
                "expected to write nothing there"
            )
        return owner

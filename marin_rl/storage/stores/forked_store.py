"""The store of a forked run: its own folder, and the rounds before the fork in its parents'.

Which folder a key belongs to is decided by the key alone, so a slot has one place and a listing
shows it once. Nothing of the shared prefix can be written or deleted through a fork.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marin_rl.errors import StorageError
from marin_rl.storage.layout import round_of
from marin_rl.storage.stores.store import Keys, ObjectStore, PutOutcome

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
        self.own, self.shared = own, tuple(shared)
        self.url = own.url

    def owner(self, key: str) -> ObjectStore:
        """The folder that `key` lies in."""
        kind, _, path = key.partition("/")
        round = 0 if kind in BEFORE else round_of(path.partition("/")[0])
        # Locks, records and private files of the run itself are never shared.
        if kind not in KINDS or round is None:
            return self.own
        # The checkpoint that finishes it: round r ends with checkpoint r + 1.
        place = round + 1 if kind in PLAYED else round
        # Ascending: the first ancestor that reaches so far played the round, and later ones have it
        # from there.
        return next((store for through, store in self.shared if place <= through), self.own)

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        owner = self.owner(key)
        if owner is self.own:
            return owner.put_if_absent(key, data)
        # Never created there, even if absent: that would change the parent's history.
        owner.size(key)  # raises ObjectMissing
        # Present, so the caller reads it back and compares, as after any other create that came
        # second.
        return PutOutcome.EXISTS

    def read(self, key: str) -> bytes:
        return self.owner(key).read(key)

    def put_part(self, key: str, data: bytes) -> None:
        self._writable(key).put_part(key, data)

    def replace(self, key: str, data: bytes) -> None:
        self._writable(key).replace(key, data)

    def list(self, prefix: str = "") -> Keys:
        keys = [
            key
            for store in (self.own, *(store for _, store in self.shared))
            for key in store.list(prefix)
            # A parent may play on after the fork; those rounds are not the fork's.
            if self.owner(key) is store
        ]
        return sorted(keys)

    def children(self, prefix: str = "") -> Keys:
        if not prefix:
            kinds = {name for _, store in self.shared for name in store.children() if name in KINDS}
            return sorted({*self.own.children(), *kinds})
        if prefix not in KINDS:
            return self.owner(prefix).children(prefix)
        return sorted(
            name
            for store in (self.own, *(store for _, store in self.shared))
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

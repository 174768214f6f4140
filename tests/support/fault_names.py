"""Names of operations and requests, equal in every run: see fault_groups.py."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from marin_rl.storage.stores.fault_injection import Operations, Plan

Fault = TypeVar("Fault")

_OF_ONE_ATTEMPT = re.compile(
    r"\d{8}T\d{6}-[0-9a-f]{16}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}"
)


class Names(Generic[Fault]):
    """Gives what comes its names, and says which fault, if any, was kept for it.

    A name is what is asked for, of what, and for how many-th time, without what only one attempt or
    run has in its names: `create rollouts/round-00001/shard-0000.parquet #1`.
    """

    def __init__(self, faults: Mapping[str, Fault] | None = None) -> None:
        self.waiting = dict(faults or {})
        self.seen: list[str] = []
        self._times = Counter[str]()

    def fault(self, what: str) -> Fault | None:
        """The fault of `what`, which comes once more. Not for two threads at once."""
        plain = _OF_ONE_ATTEMPT.sub("*", what)
        self._times[plain] += 1
        self.seen.append(f"{plain} #{self._times[plain]}")
        return self.waiting.pop(self.seen[-1], None)


class NamedOperations(Operations):
    """Operations on the stores below `root`, which suffer by name.

    A file `met` gets the name of each that suffers, a line each, before it does.
    """

    def __init__(
        self, root: str, faults: Mapping[str, str] | None = None, met: Path | None = None
    ) -> None:
        super().__init__(Plan())
        self.names = Names[str](faults)
        self._root, self._met = root, met

    def next(self, name: str, url: str) -> str | None:
        """See Operations."""
        with self.lock:
            self.count += 1
            return self.called(f"{name} {url.removeprefix(self._root).strip('/')}")

    def called(self, what: str) -> str | None:
        """Fault for the operation that now comes, by its name."""
        kind = self.names.fault(what)
        if kind is not None and self._met is not None:
            with self._met.open("a", encoding="utf-8") as file:
                file.write(f"{self.names.seen[-1]}\n")
        return kind

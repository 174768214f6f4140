"""Every state in which a crash can leave a run's folder, from one run of it.

`kill -9` loses a process's memory and nothing else: what it leaves is the folder as it was at that
instant. So one undisturbed run, whose folder is copied before each of its operations, has them all.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.fault_names import NamedOperations
from support.run_outcomes import Outcome

Signature = tuple[tuple[str, int, int], ...]


@dataclass
class CrashStates:
    """Copies of a run's folder; `numbers[i]` are the operations before which copy i was true."""

    run: Path
    copies: Path
    numbers: list[list[int]] = field(default_factory=list)
    _last: Signature | None = None

    def take(self, number: int) -> None:
        """The state before operation `number`."""
        signature = _signature(self.run)
        if signature != self._last:
            self._last = signature
            _copy(self.run, self.copy(len(self.numbers)))
            self.numbers.append([])
        self.numbers[-1].append(number)

    def copy(self, index: int) -> Path:
        """The folder of a copy."""
        return self.copies / f"{index:05d}"


class Recording(NamedOperations):
    """Operations that suffer nothing, with the crash states before each of them."""

    def __init__(self, states: CrashStates) -> None:
        super().__init__(str(states.run.parent))
        self.states = states

    def called(self, what: str) -> str | None:
        """See NamedOperations."""
        self.states.take(self.count)
        return super().called(what)


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to: what it came to, and the states a crash could have left.

    `names` are those of its operations (see fault_names.py), in order.
    """

    expected: Outcome
    states: CrashStates
    names: Sequence[str]

    @property
    def operations(self) -> int:
        """N."""
        return len(self.names)


def _signature(folder: Path) -> Signature:
    found = []
    for path in sorted(folder.rglob("*")):
        try:
            status = path.stat()
        except FileNotFoundError:  # a temporary file of another thread
            continue
        if path.is_file():
            found.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return tuple(found)


def _copy(run: Path, target: Path) -> None:
    """Copy file by file: some vanish meanwhile, as they would from under a dying process."""
    target.mkdir(parents=True)
    for path in sorted(run.rglob("*")):
        copy = target / path.relative_to(run)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            _copy_file(path, copy)


def _copy_file(path: Path, copy: Path) -> None:
    """Copy a file unless it is gone."""
    try:
        shutil.copyfile(path, copy)
    except FileNotFoundError:
        copy.unlink(missing_ok=True)

"""Commits of checkpoints that are written while the process goes on.

The manifest of such a commit, and so its reference, is known before any file is written. All else
keeps the order that one thread would have: who reads the slot, or commits anything, waits for it
first. So a crash leaves what a crash of that one thread leaves. A write that failed is tried again
by who waits for it, and what fails then is a stage, which is tried again as any other.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from marin_rl.errors import MarinRLError
from marin_rl.slot_ref import SlotRef
from schemas.manifests import Manifest

_log = logging.getLogger(__name__)
# One thread: a second write would only take bandwidth and memory of the first.
_thread = ThreadPoolExecutor(1, "checkpoint")
_writes: "list[_Write]" = []


class _Write:
    """A commit under way of the slot at `url`."""

    def __init__(self, url: str, manifest: Manifest, work: Callable[[], None]) -> None:
        self.url, self.manifest, self._work = url, manifest, work
        self._lock, self._writer = threading.Lock(), 0

    def finish(self) -> None:
        """Do the work, or wait for the thread that does it. Raises what the work raises."""
        if self._writer == threading.get_ident():
            return  # the work itself reads and commits
        with self._lock:
            if self not in _writes:
                return
            self._writer = threading.get_ident()
            try:
                self._work()
            finally:
                self._writer = 0
            _writes.remove(self)

    def try_to_finish(self) -> None:
        try:
            self.finish()
        except MarinRLError as error:
            _log.warning("%s is not committed: %s", self.url, error)


def write_behind(url: str, manifest: Manifest, work: Callable[[], None]) -> None:
    """Begin to commit `manifest` at `url`, by `work`, once what was begun before is committed.

    Raises what that raises.
    """
    settle()
    write = _Write(url, manifest, work)
    _writes.append(write)
    _thread.submit(write.try_to_finish)


def settle(url: str | None = None) -> None:
    """Wait until what is being written is committed; with `url`, only what that slot gets.

    Raises StorageError where it cannot be written.
    """
    for write in tuple(_writes):
        if url in (None, write.url):
            write.finish()


def promised(url: str, ref: SlotRef) -> Manifest | None:
    """The manifest of a reference that is being committed at `url`."""
    for write in tuple(_writes):
        if write.url == url and write.manifest.sha256 == ref.sha256:
            return write.manifest
    return None


def end_writes(folder: str) -> None:
    """Finish what is being written below a run's folder, or give it up: the run has ended."""
    for write in tuple(_writes):
        if write.url.startswith(f"{folder}/"):
            write.try_to_finish()
            if write in _writes:
                _writes.remove(write)

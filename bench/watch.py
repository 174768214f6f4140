"""CPU seconds and memory of a process tree, sampled from outside.

All sides of a benchmark are watched the same way, and so is the rest of the machine: what other
programs used meanwhile says whether wall times may be quoted. Linux only (/proc).
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq of /proc/stat's first line
_PROC = Path("/proc")


@dataclass(slots=True)
class Watch:
    """Samples a process tree from `start` to `stop`; then answers for any span in between.

    Times are seconds since the epoch, as in file times. CPU seconds count finished children too.
    RunRuntime memory of a tree is a sum, so pages that processes share count more than once.
    """

    pid: int
    period_s: float = 0.2
    _samples: list[tuple[float, float, float, float]] = field(default_factory=list)
    _peak_main: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> "Watch":
        """Begin; returns itself."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; call after the process was waited for."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def cpu_s(self, since: float, until: float) -> float:
        """CPU seconds of the tree in a span, interpolated between samples."""
        return self._between(1, since, until)

    def other_cores(self, since: float, until: float) -> float:
        """Cores that all other programs kept busy in a span, on average."""
        busy = self._between(3, since, until) - self.cpu_s(since, until)
        return max(busy, 0.0) / (until - since)

    @property
    def peak_bytes(self) -> int:
        """Most resident memory of the watched process itself (the kernel's high-water mark)."""
        return self._peak_main

    @property
    def peak_tree_bytes(self) -> int:
        """Most resident memory of all processes together at one sample."""
        return int(max(sample[2] for sample in self._samples))

    def _between(self, column: int, since: float, until: float) -> float:
        table = np.asarray(self._samples)
        values = np.interp([since, until], table[:, 0], table[:, column])
        return float(values[1] - values[0])

    def _run(self) -> None:
        while not self._ended.is_set():
            cpu, resident = 0.0, 0
            for pid in tree(self.pid):
                with suppress(OSError):
                    cpu += _cpu_s(pid)
                    resident += _resident_bytes(pid)
            with suppress(OSError):
                self._peak_main = max(self._peak_main, _high_water_bytes(self.pid))
            if resident:
                self._samples.append((time.time(), cpu, resident, _machine_busy_s()))
            self._ended.wait(self.period_s)


def tree(pid: int) -> Iterator[int]:
    """A process and everything below it that lives."""
    yield pid
    with suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                for child in (thread / "children").read_text().split():
                    yield from tree(int(child))


def _cpu_s(pid: int) -> float:
    """User and system time, of its finished and awaited children too."""
    text = (_PROC / str(pid) / "stat").read_text()
    fields = text.rpartition(")")[2].split()
    return sum(int(value) for value in fields[11:15]) * _TICK_S


def _resident_bytes(pid: int) -> int:
    return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES


def _high_water_bytes(pid: int) -> int:
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _machine_busy_s() -> float:
    first = (_PROC / "stat").read_text().splitlines()[0].split()[1:]
    return sum(int(first[i]) for i in _BUSY) * _TICK_S

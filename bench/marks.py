"""CPU and wall seconds between named marks of a process, and its peak memory, for both sides."""

import resource
import time
from collections import defaultdict
from typing import Any


class Marks:
    """Seconds since the mark before, by name; the first of a name is kept apart."""

    def __init__(self) -> None:
        self._spent: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, time.perf_counter()

    def add(self, name: str) -> None:
        """End a stretch of this name."""
        cpu, wall = self._now()
        self._spent[name].append((cpu - self._last[0], wall - self._last[1]))
        self._last = cpu, wall

    def totals(self) -> dict[str, Any]:
        """CPU and wall of each name: the first, and the sum of the others; peak memory in GB."""
        rows: dict[str, Any] = {}
        for name, spent in self._spent.items():
            (cpu, wall), others = spent[0], spent[1:]
            rows[f"first_{name}"] = [round(cpu, 1), round(wall, 1)]
            if others:
                sums = (sum(values) for values in zip(*others, strict=True))
                rows[f"{len(others)}_{name}s"] = [round(value, 1) for value in sums]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return rows | {"peak_gb": round(peak * 1024 / 1e9, 2)}

"""Requests counted in plain numbers, and shown to Prometheus when it asks.

prometheus_client takes a lock for every number, some twenty times a request, which is a good part
of what answering costs. Here a request is counted by one thread, the event loop's, and read by any.
Owns the counts and their shape for Prometheus. Leaves out what is counted, and its names
(`prometheus`).
"""

from bisect import bisect_left
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_BOUNDS = (*map(floatToGoString, SECONDS), "+Inf")

Labels = tuple[str, ...]


class Counts:
    """A counter by labels; without labels it begins at 0."""

    def __init__(self, name: str, meaning: str, labels: Labels = ()) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self._found: dict[Labels, int] = {} if labels else {(): 0}

    def add(self, labels: Labels = (), count: int = 1) -> None:
        """Increase the counter of `labels` by `count`."""
        self._found[labels] = self._found.get(labels, 0) + count

    def family(self) -> Metric:
        """The counts as they are now."""
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for labels, count in self._found.copy().items():
            family.add_metric(labels, count)
        return family


class Durations:
    """A histogram of seconds by labels; a bucket holds what is at most its bound."""

    def __init__(self, name: str, meaning: str, labels: Labels = ()) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self._found: dict[Labels, list[int]] = {} if labels else {(): _no_counts()}
        self._sums: dict[Labels, float] = {}

    def add(self, seconds: float, labels: Labels = ()) -> None:
        """Record a duration of `labels`."""
        counts = self._found.get(labels)
        if counts is None:
            counts = self._found[labels] = _no_counts()
        counts[bisect_left(SECONDS, seconds)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + seconds

    def family(self) -> Metric:
        """The counts as they are now."""
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        for labels, counts in self._found.copy().items():
            buckets = list(zip(_BOUNDS, map(float, accumulate(counts)), strict=True))
            family.add_metric(labels, buckets, self._sums.get(labels, 0.0))
        return family


def _no_counts() -> list[int]:
    return [0] * (len(SECONDS) + 1)

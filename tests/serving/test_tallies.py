"""Plain counts read as prometheus_client's own do."""

import random
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from marin_rl.serving.http.tallies import SECONDS, Counts, Durations


class Shown(Collector):
    """Values of tallies at a scrape."""

    def __init__(self, *tallies: Counts | Durations) -> None:
        self._tallies = tallies

    def collect(self) -> Iterable[Metric]:
        return [tally.family() for tally in self._tallies]


def text_of(registry: CollectorRegistry) -> list[str]:
    """The exposition without the times at which counters were made, which tallies do not keep."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_tallies_show_what_prometheus_would() -> None:
    rng = random.Random(1)
    values = [*SECONDS, *(rng.expovariate(0.1) for _ in range(200)), 1e9, 0.0]
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    by_route = Histogram("a_seconds", "a", ("route",), buckets=SECONDS, registry=theirs)
    alone = Histogram("b_seconds", "b", buckets=SECONDS, registry=theirs)
    requests = Counter("c_total", "c", ("route", "status"), registry=theirs)
    tokens = Counter("d_total", "d", registry=theirs)
    tallies = (
        Durations("a_seconds", "a", ("route",)),
        Durations("b_seconds", "b"),
        Counts("c_total", "c", ("route", "status")),
        Counts("d_total", "d"),
    )
    ours.register(Shown(*tallies))
    assert text_of(ours) == text_of(theirs)
    for value in values:
        route = rng.choice(("/x", "/y"))
        by_route.labels(route).observe(value)
        tallies[0].add(value, (route,))
        requests.labels(route, "200").inc()
        tallies[2].add((route, "200"))
        tokens.inc(7)
        tallies[3].add(count=7)
    alone.observe(0.3)
    tallies[1].add(0.3)
    assert text_of(ours) == text_of(theirs)

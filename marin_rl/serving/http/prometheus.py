"""Prometheus metrics of the server: one table, one registry.

Owns the table (docs are made from it), counting requests and weight updates, and reading the engine
at each scrape, never in between. Leaves out the access log (`access_log`).
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from marin_rl.inference.engine import Engine
from marin_rl.serving.http.access_log import RequestRecord

METRICS_ROUTE = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    name: str
    kind: str
    labels: tuple[str, ...] = ()
    meaning: str


def _spec(name: str, kind: str, meaning: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=f"marin_rl_{name}", kind=kind, meaning=meaning, labels=labels)


METRICS: tuple[MetricSpec, ...] = (
    _spec("requests_total", "counter", "requests answered", "route", "status"),
    _spec(
        "requests_rejected_total", "counter", "requests that failed, by the error's code", "reason"
    ),
    _spec("requests_running", "gauge", "requests that are being answered"),
    _spec("request_seconds", "histogram", "from arrival to the answer's last byte", "route"),
    _spec("queue_seconds", "histogram", "a request's wait for its first slot"),
    _spec("prefill_seconds", "histogram", "from the first slot until the prompt is in the cache"),
    _spec("decode_seconds", "histogram", "from there to the last token"),
    _spec("first_token_seconds", "histogram", "from arrival to a stream's first token"),
    _spec("prompt_tokens_total", "counter", "tokens of prompts that were sampled from"),
    _spec(
        "completion_tokens_total", "counter", "tokens sampled for requests, cancelled ones included"
    ),
    _spec("connections", "gauge", "open connections"),
    _spec("slots", "gauge", "sequences that the engine decodes side by side"),
    _spec("slots_busy", "gauge", "slots with a sequence in them"),
    _spec("samples_queued", "gauge", "samples that wait for a slot"),
    _spec("engine_paused", "gauge", "1 while the engine is paused"),
    _spec(
        "batch_invariant",
        "gauge",
        "1 where proven here: bits do not depend on neighbours (slots, prompts), nor on whether a "
        "prompt's cache is read once (shared), nor, with a prefix cache, on whether a position was "
        "decoded or prefilled (continued), nor, with adapters, on the others (adapters), computed "
        "or not (few_adapters)",
        "what",
    ),
    _spec("prompts_shared", "gauge", "1 where slots of one prompt read its cache once"),
    _spec("engine_requests_total", "counter", "requests that the engine took"),
    _spec("engine_cancelled_total", "counter", "requests whose clients left or ran out of time"),
    _spec("engine_failed_total", "counter", "requests that the engine gave up"),
    _spec("engine_prompt_tokens_total", "counter", "tokens of the prompts of these requests"),
    _spec("engine_tokens_total", "counter", "tokens sampled, of abandoned requests too"),
    _spec("engine_chunks_total", "counter", "decode chunks run on the device"),
    _spec("engine_slot_steps_total", "counter", "decode steps times slots, empty ones included"),
    _spec("engine_busy_slot_steps_total", "counter", "those in which a slot sampled"),
    _spec("engine_prefilled_prompts_total", "counter", "prompts computed into the cache"),
    _spec("engine_prefilled_tokens_total", "counter", "tokens of prompts computed into the cache"),
    _spec("engine_cached_tokens_total", "counter", "tokens of prompts that it still had"),
    _spec("engine_continued_prompts_total", "counter", "prompts that had such tokens"),
    _spec("engine_evicted_prefixes_total", "counter", "kept prefixes whose slots others needed"),
    _spec("engine_recomputed_sequences_total", "counter", "running ones, recomputed after swaps"),
    _spec("engine_recomputed_tokens_total", "counter", "their tokens, computed again"),
    _spec("prefix_cache", "gauge", "1 where dialogues continue from the cache of their last turn"),
    _spec("engine_prefill_seconds_total", "counter", "time on the device for prompts"),
    _spec("engine_decode_seconds_total", "counter", "time on the device for new tokens"),
    _spec("policy_info", "gauge", "1, with the loaded model's id", "model", "parameters_digest"),
    _spec("policy_version", "gauge", "weight version of the loaded model"),
    _spec("swaps_total", "counter", "changes of the loaded weights"),
    _spec("weight_updates_total", "counter", "weight updates that were switched to", "source"),
    _spec("weight_update_failures_total", "counter", "refused: the old weights go on", "source"),
    _spec("weight_update_bytes_total", "counter", "bytes read for these updates", "source"),
    _spec("weight_update_seconds_total", "counter", "time that these updates took", "source"),
    _spec("weight_update_age_seconds", "gauge", "time since the last update, or since the start"),
    _spec("adapters_loaded", "gauge", "adapters that requests may name"),
    _spec("adapters_max", "gauge", "adapters that there is room for"),
    _spec("adapter_info", "gauge", "1, for each adapter that is loaded", "adapter"),
    _spec("adapter_loads_total", "counter", "adapters that were loaded"),
    _spec("adapter_unloads_total", "counter", "adapters that were unloaded"),
    _spec("adapter_load_failures_total", "counter", "loads that were refused"),
    _spec("adapter_load_seconds_total", "counter", "time that loads took, reading included"),
    _spec("adapter_write_seconds_total", "counter", "time that decoding waited for these loads"),
    _spec("access_log_dropped_total", "counter", "lines that the access log could not write"),
)
PHASES = ("queue", "prefill", "decode", "first_token")
# Counted as it happens; other counters are those of the engine, read at each scrape.
COUNTED = (
    "requests_total", "requests_rejected_total", "prompt_tokens_total", "completion_tokens_total",
    "weight_updates_total", "weight_update_failures_total", "weight_update_bytes_total",
    "weight_update_seconds_total", "adapter_load_failures_total", "adapter_load_seconds_total",
)  # fmt: skip
M = TypeVar("M")
_SPECS = {spec.name.removeprefix("marin_rl_"): spec for spec in METRICS}


class Telemetry(Collector):
    """Metrics of one server, in a separate registry; the engine is read at each scrape.

    `base_id` returns the id of the loaded weights, and `connections` the number of open ones.
    Requests are counted on the event loop, all else from any thread.
    """

    def __init__(
        self, engine: Engine, *, base_id: Callable[[], str], connections: Callable[[], int]
    ) -> None:
        self._registry = CollectorRegistry()
        self._engine, self._base_id, self._connections = engine, base_id, connections
        self._updated_at = time.monotonic()
        self._running = 0
        self._counters = {name: self._made(name, Counter) for name in COUNTED}
        buckets = partial(Histogram, buckets=SECONDS)
        self._phases = {phase: self._made(f"{phase}_seconds", buckets) for phase in PHASES}
        self._seconds = self._made("request_seconds", buckets)
        self._registry.register(self)
        self.lines_dropped: Callable[[], int] = lambda: 0

    def request_started(self) -> None:
        self._running += 1

    def request_ended(self, record: RequestRecord) -> None:
        """Count a request and what it cost. Called once, when its answer is complete."""
        self._running -= 1
        self.count("requests_total", 1, record.route, str(record.status))
        self._seconds.labels(record.route).observe(record.latency_s)
        if record.reason:
            self.count("requests_rejected_total", 1, record.reason)
        for phase, histogram in self._phases.items():
            seconds = getattr(record, f"{phase}_s")
            if seconds is not None:
                histogram.observe(seconds)
        if record.weight_version is not None:
            self.count("prompt_tokens_total", record.prompt_tokens)
            self.count("completion_tokens_total", record.completion_tokens)

    def count(self, name: str, amount: float | int = 1, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def weights_updated(self, *, source: str, bytes: int, seconds: float | int) -> None:
        """Count new weights; `source` is one of a fixed set of kinds, such as "memory"."""
        self.count("weight_updates_total", 1, source)
        self.count("weight_update_bytes_total", bytes, source)
        self.count("weight_update_seconds_total", seconds, source)
        self._updated_at = time.monotonic()

    def exposition(self) -> bytes:
        # takes milliseconds: not for the event loop
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield what is read at each scrape; prometheus-client calls it."""
        engine = self._engine
        info, digest = _SPECS["policy_info"], engine.policy.parameters_digest
        labels = {"model": self._base_id(), "parameters_digest": digest}
        # named policy_info in the text: the family adds the suffix
        yield InfoMetricFamily(info.name.removesuffix("_info"), info.meaning, labels)
        for name, values in (
            ("batch_invariant", asdict(engine.plan.invariance)),
            ("adapter_info", {one.name: 1 for one in engine.adapters.loaded}),
        ):
            spec = _SPECS[name]
            gauges = GaugeMetricFamily(spec.name, spec.meaning, labels=spec.labels)
            for label, value in values.items():
                gauges.add_metric((label,), float(value))
            yield gauges
        for name, value in self._values(engine).items():
            spec = _SPECS[name]
            family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            yield family(spec.name, spec.meaning, float(value))

    def _values(self, engine: Engine) -> dict[str, float | int]:
        stats, adapters = engine.stats.snapshot(), engine.adapters.stats
        # counts of the engine have the names of its statistics
        counts = {f"engine_{name}_total": value for name, value in asdict(stats).items()}
        return {name: value for name, value in counts.items() if name in _SPECS} | {
            "requests_running": self._running,
            "connections": self._connections(),
            "slots": engine.slots,
            "slots_busy": engine.active,
            "samples_queued": engine.queued,
            "engine_paused": engine.paused,
            "prompts_shared": engine.plan.sharing,
            "policy_version": engine.policy.weight_version,
            "weight_update_age_seconds": time.monotonic() - self._updated_at,
            "prefix_cache": engine.plan.keeps_prefixes,
            "engine_prefill_seconds_total": stats.prefill_s,
            "engine_decode_seconds_total": stats.decode_s,
            "swaps_total": stats.swaps,
            "adapters_loaded": len(engine.adapters.loaded),
            "adapters_max": engine.adapters.sizes.adapters,
            "adapter_loads_total": adapters.loads,
            "adapter_unloads_total": adapters.unloads,
            "adapter_write_seconds_total": adapters.write_s,
            "access_log_dropped_total": self.lines_dropped(),
        }

    def _made(self, name: str, kind: Callable[..., M]) -> M:
        spec = _SPECS[name]
        return kind(spec.name, spec.meaning, spec.labels, registry=self._registry)

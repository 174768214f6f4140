"""Closing a round: its metrics, gathered from the manifests of its slots, committed and told.

The stages leave their numbers in their own manifests, so the row of a round can be written by
whoever finishes it, also after a crash. Only wall-clock seconds are this process's own.
"""

import time
from collections.abc import Mapping

from marin_rl.metrics import is_defined
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.metrics import write_round_metrics
from marin_rl.storage.runs import (
    Run,
    batches_slot,
    checkpoint_slot,
    evals_slot,
    rollouts_slot,
    round_of,
)
from marin_rl.types import SlotRef
from schemas.manifests import Manifest


class Stopwatch:
    """Wall seconds of the stages of one round, as `timing_s/*`."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """What passed since the last lap belongs to `stage`."""
        now = time.monotonic()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Seconds by stage, and of the whole round so far."""
        laps = {f"timing_s/{stage}": seconds for stage, seconds in self._seconds.items()}
        return laps | {"timing_s/round": time.monotonic() - self._began}


def close_round(run: Run, round: int, seconds: Mapping[str, float]) -> SlotRef:
    """Commit the metrics of a trained round and publish them; `seconds` are `timing_s/*`.

    Raises StorageError. A round that was closed before keeps its first metrics.
    """
    metrics = {**round_metrics(run, round), **seconds}
    whole, sampling = metrics.get("timing_s/round"), metrics.get("timing_s/generate")
    generated = metrics.get("rollouts/generated", 0.0)
    if whole:
        metrics["eps"] = generated / whole
    if sampling and "completions/mean_length" in metrics:
        answered = generated * (1 - metrics.get("rollouts/errors", 0.0))
        tokens = answered * metrics["completions/mean_length"]
        metrics["perf/tokens_per_second"] = tokens / sampling
    ref = write_round_metrics(run, round, metrics)
    publish(
        ProgressEvent(
            run_id=run.run_id, stage="round", round=round, metrics=ref.summary, done=1, total=1
        )
    )
    return ref


def evaluations(run: Run) -> dict[int, dict[str, float]]:
    """The `eval/*` metrics of every committed evaluation, by the checkpoint's round.

    Row r of the metrics repeats the evaluation of checkpoint r. The last checkpoint has no row yet:
    it gets one when the run is continued, so writing one here would keep that row from being.
    """
    rounds = (round_of(name) for name in run.store.children("evals"))
    found = {
        round: read_manifest(run.store, evals_slot(round)) for round in rounds if round is not None
    }
    return {round: _defined(item[0]) for round, item in sorted(found.items()) if item}


def round_metrics(run: Run, round: int) -> dict[str, float]:
    """Everything the round's manifests know of its metrics, and what the round committed."""
    slots = (
        rollouts_slot(round),
        batches_slot(round),
        evals_slot(round),
        checkpoint_slot(round + 1),
    )
    manifests = [found[0] for slot in slots if (found := read_manifest(run.store, slot))]
    metrics: dict[str, float] = {}
    for manifest in manifests:
        metrics |= _defined(manifest)
    parts = [part for manifest in manifests for part in manifest.parts]
    per_round = run.config.rollouts.groups_per_round * run.config.rollouts.group_size
    return metrics | {
        "episode": float((round + 1) * per_round),
        "storage/bytes": float(sum(part.bytes for part in parts)),
        "storage/objects": float(len(parts) + len(manifests)),
    }


def _defined(manifest: Manifest) -> dict[str, float]:
    return {name: float(value) for name, value in manifest.totals.items() if is_defined(name)}

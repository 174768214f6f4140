"""Metrics of a round: gathered from the manifests of its slots, committed and published.

Stages leave their metrics in their own manifests, so any process can close a round, also after a
crash. Only wall-clock seconds are this process's own.
"""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence

from marin_rl.metrics import is_defined
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import (
    Run,
    batches_slot,
    checkpoint_slot,
    evals_slot,
    rollouts_slot,
    rounds_in,
)
from marin_rl.storage.tables.intakes import intake_metrics
from marin_rl.storage.tables.metrics import read_metrics, write_round_metrics
from marin_rl.types import SlotRef
from schemas.manifests import Manifest


class Stopwatch:
    """Wall seconds of the stages of one round, as `timing_s/*`."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        laps = {f"timing_s/{stage}": seconds for stage, seconds in self._seconds.items()}
        return laps | {"timing_s/round": time.monotonic() - self._began}


def close_round(run: Run, round: int, measured: Mapping[str, float]) -> SlotRef:
    """Commit the metrics of a trained round and publish them.

    `measured` are metrics that no file has: `timing_s/*` and `weights/*`. A round that was closed
    before keeps its first metrics. Raises StorageError.
    """
    slots = [of(round) for of in (rollouts_slot, batches_slot, evals_slot)]
    slots.append(checkpoint_slot(round + 1))
    manifests = [item[0] for slot in slots if (item := read_manifest(run.store, slot))]
    metrics: dict[str, float] = {}
    for manifest in manifests:
        metrics |= _defined(manifest)
    metrics |= rlhf_metrics(metrics) | storage_metrics(manifests)
    metrics["episode"] = float(_episodes(run, round, metrics.get("rollouts/generated", 0.0)))
    metrics |= measured
    totals = {name: float(value) for m in manifests for name, value in m.totals.items()}
    metrics |= rates(metrics, totals)
    # Rollouts of later rounds that are sealed and have no batches yet.
    count, ahead = 0, round + 1
    while (sealed := read_manifest(run.store, rollouts_slot(ahead))) is not None:
        if read_manifest(run.store, batches_slot(ahead)) is None:
            count += int(sealed[0].totals.get("rows", 0))
        ahead += 1
    metrics["replay/occupancy"] = float(count)
    if run.config.windowed:
        metrics |= intake_metrics(run, round)
    ref = write_round_metrics(run, round, metrics)
    event = {"run_id": run.run_id, "round": round, "metrics": ref.summary}
    publish(ProgressEvent(stage="round", done=1, total=1, **event))
    return ref


def rates(metrics: Mapping[str, float], totals: Mapping[str, float]) -> dict[str, float]:
    """Rates per second, where numerator and denominator are known.

    `totals` are those of the round's manifests.
    """
    result = {}
    elapsed, sampling = metrics.get("timing_s/round"), metrics.get("timing_s/generate")
    generated = metrics.get("rollouts/generated", 0.0)
    if elapsed:
        result["eps"] = generated / elapsed
        for name, count in totals.items():
            if name.startswith("env/") and name.endswith("/rollouts"):
                result[f"{name.removesuffix('/rollouts')}/eps"] = count / elapsed
    if sampling and "completions/mean_length" in metrics:
        answered = generated * (1 - metrics.get("rollouts/errors", 0.0))
        result["perf/tokens_per_second"] = answered * metrics["completions/mean_length"] / sampling
    training, peak = metrics.get("timing_s/train"), totals.get("peak_flops_per_second")
    if training and peak and "model_flops" in totals:
        result["perf/mfu"] = totals["model_flops"] / (training * peak)
    return result


def overlap_metrics(
    sampling: Mapping[str, float], training: Mapping[str, float], elapsed_s: float
) -> dict[str, float]:
    """Idle shares of trainer and sampler, and seconds that their overlap saved in a round.

    `sampling` and `training` are `timing_s/*` of the stages of each side. Stages of a window's
    sampling are of no round: what they saved is the time of training in which sampling was busy.
    """
    if elapsed_s <= 0:
        return {}
    both = {**sampling, **training}
    result = {
        f"perf/{side}_idle": both[f"timing_s/{side}_idle"] / elapsed_s
        for side in ("trainer", "sampler")
        if f"timing_s/{side}_idle" in both
    }
    if sampling:
        saved = _stages_s(sampling) + _stages_s(training) - elapsed_s
    else:
        saved = min(_stages_s(training), elapsed_s) - both.get("timing_s/sampler_idle", elapsed_s)
    result["timing_s/overlap_saved"] = max(0.0, saved)
    return result


def _stages_s(timings: Mapping[str, float]) -> float:
    others = ("timing_s/trainer_idle", "timing_s/sampler_idle", "timing_s/round")
    return sum((seconds for name, seconds in timings.items() if name not in others), 0.0)


def transfer_metrics(measured: Mapping[str, float], steps: int) -> dict[str, float]:
    """`weights/*` of a round of `steps` updates, from the measurements of its weight transfers."""
    result = {f"weights/{name}": measured[name] for name in ("bytes", "seconds", "failures")}
    if steps:
        result["weights/transfers_per_step"] = measured["transfers"] / steps
    return result


def evaluations(run: Run, rounds: Iterable[int] | None = None) -> dict[int, dict[str, float]]:
    """The `eval/*` metrics of committed evaluations by the checkpoint's round, of all or `rounds`.

    Row r of the metrics repeats the evaluation of checkpoint r, once round r is closed; the last
    checkpoint has no row yet.
    """
    if rounds is None:
        rounds = rounds_in(run.store, "evals")
    manifests = {round: read_manifest(run.store, evals_slot(round)) for round in rounds}
    return {round: _defined(item[0]) for round, item in sorted(manifests.items()) if item}


def _episodes(run: Run, round: int, generated: float) -> float:
    """Rollouts requested up to a round, by the settings of the run that played each.

    Where their number varies from round to round: the `generated` ones added to those of the round
    before, which is closed.
    """
    if run.config.samples_on or run.config.windowed:
        before = read_metrics(run, [round - 1]).to_pylist() if round else [{"episode": 0.0}]
        return before[0]["episode"] + generated
    ends = [a.through_round for a in run.ancestors if a.through_round <= round]
    edges = [0, *ends, round + 1]
    total = 0
    for begin, end in itertools.pairwise(edges):
        if end > begin:
            config = run.at_round(begin).config
            total += (end - begin) * config.candidates_per_batch * config.rollouts.group_size
    return float(total)


def rlhf_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Huang's decomposition of the reward, where rollouts were trained on.

    Rewards are the environment's; the KL term is weighted by the round's coefficient, be it a part
    of the loss or of the advantages.
    """
    if "objective/scores" not in metrics:
        return {}
    coefficient = metrics.get("objective/kl_coefficient", 0.0)
    other = -coefficient * metrics.get("objective/kl", 0.0)
    return {
        "objective/non_score_reward": other,
        "objective/rlhf_reward": metrics["objective/scores"] + other,
    }


def storage_metrics(manifests: Sequence[Manifest]) -> dict[str, float]:
    """Bytes and objects of slots that are committed by these manifests."""
    parts = [part for manifest in manifests for part in manifest.parts]
    return {
        "storage/bytes": float(sum(part.bytes for part in parts)),
        "storage/objects": float(len(parts) + len(manifests)),
    }


def _defined(manifest: Manifest) -> dict[str, float]:
    return {name: float(value) for name, value in manifest.totals.items() if is_defined(name)}

"""Metrics of a round's rollouts: pure functions over arrays.

The metrics have their definitions in `marin_rl.metrics`. Means over nothing are left out, never
reported as 0. Axes: N rollouts, M values of one reward component.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int64


def rollout_metrics(
    *,
    rewards: Float64[np.ndarray, " N"],
    groups: Int64[np.ndarray, " N"],
    lengths: Int64[np.ndarray, " N"],
    statuses: Sequence[str],
    components: Mapping[str, Float64[np.ndarray, " M"]],
) -> dict[str, float]:
    """Metrics of the rollouts of one round, before any of them is trained on.

    `rewards` is NaN where a rollout has none; `groups` are arbitrary integers equal within a group;
    `lengths` count sampled tokens. Means over nothing are left out, never reported as 0.
    """
    status = np.asarray(statuses, dtype=object)
    valid = np.isfinite(rewards)
    result = {
        "rollouts/generated": float(len(rewards)),
        "rollouts/errors": _mean(_broken(status)),
    }
    if valid.any():
        result["reward"] = float(rewards[valid].mean())
        result |= _group_metrics(rewards[valid], groups[valid])
    sampled = ~_broken(status)
    if sampled.any():
        result |= _lengths(lengths[sampled], "length")
        result["completions/clipped_ratio"] = _mean(status[sampled] == "truncated")
    if (status == "complete").any():
        result |= _lengths(lengths[status == "complete"], "terminated_length")
    for name, values in components.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            result[f"rewards/{name}/mean"] = float(finite.mean())
            result[f"rewards/{name}/std"] = float(finite.std(ddof=1)) if len(finite) > 1 else 0.0
    return result


def consumed_metrics(
    *,
    rewards: Float64[np.ndarray, " N"],
    lengths: Int64[np.ndarray, " N"],
    formats: Float64[np.ndarray, " N"],
    corrects: Float64[np.ndarray, " N"],
) -> dict[str, float]:
    """Metrics of the rollouts that a round is trained on: `train/*` and `objective/scores`.

    `formats` and `corrects` are the components of these names, NaN where a rollout has none.
    """
    if not len(rewards):
        return {}
    result = {
        "objective/scores": float(rewards.mean()),
        "train/rewards": float(rewards.mean()),
        "train/output_length": float(lengths.mean()),
    }
    for name, values in (("format", formats), ("correct", corrects)):
        there = values[np.isfinite(values)]
        if len(there):
            result[f"train/{name}_rewards"] = float(there.mean())
    return result


def environment_metrics(
    *,
    environments: Sequence[str],
    rewards: Float64[np.ndarray, " N"],
    statuses: Sequence[str],
    formats: Float64[np.ndarray, " N"],
    groups: Int64[np.ndarray, " N"],
    lengths: Int64[np.ndarray, " N"],
) -> dict[str, float]:
    """`env/{name}/*` of a round's rollouts, and how many each has as `env/{name}/rollouts`.

    The last is not a metric: divided by the seconds of the round it becomes `env/{name}/eps`. Where
    there are several environments, also signal-free groups, lengths and cut-off completions of
    each.
    """
    names, status = np.asarray(environments, dtype=object), np.asarray(statuses, object)
    broken, several = _broken(status), len(set(environments)) > 1
    result: dict[str, float] = {}
    for name in sorted(set(environments)):
        own = names == name
        valid, formatted = own & np.isfinite(rewards), own & np.isfinite(formats)
        result[f"env/{name}/rollouts"] = float(own.sum())
        result[f"env/{name}/errors"] = _mean(broken[own])
        if valid.any():
            result[f"env/{name}/reward"] = float(rewards[valid].mean())
        if formatted.any():
            result[f"env/{name}/format_rate"] = _mean(formats[formatted] > 0)
        sampled = own & ~broken
        if several and sampled.any():
            result[f"env/{name}/mean_length"] = float(lengths[sampled].mean())
            result[f"env/{name}/clipped_ratio"] = _mean(status[sampled] == "truncated")
        if several and valid.any():
            spread = _group_metrics(rewards[valid], groups[valid])
            result[f"env/{name}/frac_reward_zero_std"] = spread["frac_reward_zero_std"]
    return result


def replay_metrics(dispositions: Mapping[str, int | float]) -> dict[str, float]:
    """`replay/*` of a round from its counts by disposition, occupancy aside."""
    drops = sum(dispositions.get(kind, 0) for kind in ("filtered", "stale", "failed"))
    consumed = dispositions.get("consumed", 0)
    return {
        "replay/enqueue": float(consumed + drops),
        "replay/dequeue": float(consumed),
        "replay/drops": float(drops),
    }


def staleness_metrics(ages: Int64[np.ndarray, " N"]) -> dict[str, float]:
    """`staleness/*` of the consumed rollouts, whose policies are `ages` rounds old."""
    if not len(ages):
        return {}
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def staleness_parts(
    oldest: Int64[np.ndarray, " N"], newest: Int64[np.ndarray, " N"], round: int
) -> dict[str, float]:
    """Ages of the consumed rollouts by part: in flight, while they were sampled; and in queue."""
    if not len(oldest):
        return {}
    parts = {"in_flight": newest - oldest, "in_queue": round - newest}
    result: dict[str, float] = {}
    for name, ages in parts.items():
        result[f"staleness/{name}/mean"] = float(ages.mean())
        result[f"staleness/{name}/max"] = float(ages.max())
    return result


def waste_metrics(
    lengths: Int64[np.ndarray, " N"], dispositions: np.ndarray, reasons: np.ndarray
) -> dict[str, float]:
    """`tokens/wasted/{reason}`: sampled tokens of rollouts that are not trained on, by reason."""
    dropped = dispositions != "consumed"
    names = sorted({str(reason) for reason in reasons[dropped]})
    return {
        f"tokens/wasted/{name}": float(lengths[dropped & (reasons == name)].sum()) for name in names
    }


def _lengths(lengths: Int64[np.ndarray, " N"], what: str) -> dict[str, float]:
    return {
        f"completions/mean_{what}": float(lengths.mean()),
        f"completions/min_{what}": float(lengths.min()),
        f"completions/max_{what}": float(lengths.max()),
    }


def _group_metrics(
    rewards: Float64[np.ndarray, " N"], groups: Int64[np.ndarray, " N"]
) -> dict[str, float]:
    _, index = np.unique(groups, return_inverse=True)
    count = np.bincount(index)
    mean = np.bincount(index, weights=rewards) / count
    squares = np.bincount(index, weights=(rewards - mean[index]) ** 2)
    several = count > 1
    low = np.full(len(count), np.inf)
    high = np.full(len(count), -np.inf)
    np.minimum.at(low, index, rewards)
    np.maximum.at(high, index, rewards)
    result = {"frac_reward_zero_std": float((low == high).mean())}
    if several.any():
        result["reward_std"] = float(np.sqrt(squares[several] / (count[several] - 1)).mean())
    return result


def _broken(statuses: np.ndarray) -> Bool[np.ndarray, " N"]:
    return (statuses == "error") | (statuses == "aborted")


def _mean(flags: np.ndarray) -> float:
    return float(np.mean(flags)) if len(flags) else 0.0

"""Every metric, once: its name, unit, formula, and the pure function that computes it.

Names are the field's own (TRL's and Huang's "N implementation details of RLHF"), so that curves can
be laid over those of other trainers. `DEFINITIONS` is the source of docs/metrics.md; a round's row
holds only names that stand there, or that follow one of its patterns (`rewards/{component}/mean`).
NumPy only; what needs the model is computed in the training step and only described here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from jaxtyping import Float64, Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What one metric means. `formula` is over the rollouts or tokens of one round."""

    name: str
    unit: str
    formula: str


def _define(name: str, unit: str, formula: str) -> Definition:
    return Definition(name=name, unit=unit, formula=formula)


DEFINITIONS: tuple[Definition, ...] = (
    _define("reward", "reward", "mean of the rewards of the round's valid rollouts"),
    _define("reward_std", "reward", "mean over groups of the std (ddof 1) of the group's rewards"),
    _define("rewards/*/mean", "reward", "mean of one reward component, unweighted"),
    _define("rewards/*/std", "reward", "std (ddof 1) of one reward component over the round"),
    _define("frac_reward_zero_std", "fraction", "groups whose valid rewards are all equal"),
    _define("completions/mean_length", "tokens", "mean number of sampled tokens"),
    _define("completions/min_length", "tokens", "fewest sampled tokens of a rollout"),
    _define("completions/max_length", "tokens", "most sampled tokens of a rollout"),
    _define("completions/clipped_ratio", "fraction", "rollouts cut off at max_tokens"),
    _define("rollouts/errors", "fraction", "rollouts with status error or aborted"),
    _define("rollouts/generated", "rollouts", "rollouts written by the round"),
    _define("rollouts/consumed", "rollouts", "rollouts that entered a training batch"),
    _define("rollouts/filtered", "rollouts", "rollouts dropped by a filter"),
    _define("rollouts/stale", "rollouts", "rollouts older than staleness_rounds_max"),
    _define("rollouts/failed", "rollouts", "rollouts without a usable reward"),
    _define("episode", "rollouts", "rollouts generated since the run began"),
    _define("eps", "episodes/s", "rollouts of the round / seconds of the round"),
    _define("perf/tokens_per_second", "tokens/s", "sampled tokens / timing_s/generate"),
    _define("objective/kl", "nats", "mean over sequences of the summed k1 KL to the reference"),
    _define("kl", "nats", "mean over tokens of the configured estimator of KL to the reference"),
    _define("entropy", "nats", "mean over trained tokens of the policy's entropy"),
    _define("loss", "", "the objective that was minimised, KL term included"),
    _define("loss/policy_avg", "", "the surrogate part of the loss"),
    _define("grad_norm", "", "global norm of the gradient before clipping"),
    _define("lr", "", "learning rate of the round's last optimizer step"),
    _define("policy/approxkl_avg", "nats", "mean over tokens of (log ratio)^2 / 2"),
    _define("policy/clipfrac_avg", "fraction", "ratios outside the clip range"),
    _define("val/ratio", "", "mean importance ratio"),
    _define("val/ratio_var", "", "variance of the importance ratio"),
    _define(
        "sampling/logp_difference/mean", "nats", "mean |trainer - sampler| logprob over tokens"
    ),
    _define(
        "sampling/logp_difference/max", "nats", "largest |trainer - sampler| logprob of a token"
    ),
    _define("sampling/importance_ratio/*", "", "min, mean and max of exp(trainer - sampler)"),
    _define("mismatch_kl", "nats", "mean over tokens of r - log r - 1, r = exp(trainer - sampler)"),
    _define("updates/skipped", "steps", "updates refused because they were not finite"),
    _define("updates/steps", "steps", "optimizer steps taken since the run began"),
    _define("timing_s/*", "s", "wall seconds of a stage of the round"),
    _define("storage/bytes", "bytes", "bytes that the round committed"),
    _define("storage/objects", "objects", "objects that the round committed"),
    _define("eval/accuracy", "fraction", "held-out rollouts with reward >= pass_threshold"),
    _define("eval/reward_mean", "reward", "mean reward of held-out rollouts"),
    _define("eval/mean_length", "tokens", "mean number of sampled tokens of held-out rollouts"),
    _define("eval/examples", "examples", "held-out examples that were scored"),
    _define("eval/errors", "fraction", "held-out rollouts with status error"),
    _define("sft/loss", "nats", "mean over answer tokens of the negative log-likelihood"),
    _define("staleness/mean", "rounds", "mean age of the consumed rollouts' policy"),
    _define("staleness/max", "rounds", "largest age of a consumed rollout's policy"),
)


def is_defined(name: str) -> bool:
    """Whether a metric of this name has a definition."""
    return any(fnmatchcase(name, definition.name) for definition in DEFINITIONS)


def rollout_metrics(
    *,
    rewards: Float64[np.ndarray, " N"],
    groups: Int64[np.ndarray, " N"],
    lengths: Int64[np.ndarray, " N"],
    statuses: Sequence[str],
    components: Mapping[str, Float64[np.ndarray, " M"]],
) -> dict[str, float]:
    """What the rollouts of one round say, before any of them is trained on.

    `rewards` is NaN where a rollout has none; `groups` are arbitrary integers equal within a group;
    `lengths` count sampled tokens. Means over nothing are left out, never reported as 0.
    """
    status = np.asarray(statuses, dtype=object)
    valid = np.isfinite(rewards)
    result = {
        "rollouts/generated": float(len(rewards)),
        "rollouts/errors": _mean((status == "error") | (status == "aborted")),
    }
    if valid.any():
        result["reward"] = float(rewards[valid].mean())
        result |= _group_metrics(rewards[valid], groups[valid])
    sampled = lengths[(status != "error") & (status != "aborted")]
    if len(sampled):
        result["completions/mean_length"] = float(sampled.mean())
        result["completions/min_length"] = float(sampled.min())
        result["completions/max_length"] = float(sampled.max())
        result["completions/clipped_ratio"] = _mean(status == "truncated")
    for name, values in components.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            result[f"rewards/{name}/mean"] = float(finite.mean())
            result[f"rewards/{name}/std"] = float(finite.std(ddof=1)) if len(finite) > 1 else 0.0
    return result


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


def _mean(flags: np.ndarray) -> float:
    return float(np.mean(flags)) if len(flags) else 0.0

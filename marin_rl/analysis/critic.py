"""Advantages and value loss of a critic, recomputed from the scores of a round.

Generalised advantage estimation runs here over one completion after the other in float64, apart
from the training stage, which works on whole rows on the device. Axes: N trained tokens of a step,
n of one completion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from marin_rl.analysis.tokens import column_of, token_kl, trained
from marin_rl.batching.advantages import WHITENING_VARIANCE_MIN, gae, rewards_of
from marin_rl.config import CriticConfig
from marin_rl.errors import CorruptObject
from marin_rl.metrics import EXPLAINED_VARIANCE_MIN
from marin_rl.storage.commits import ref_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.scores import StepScores, iter_scores
from marin_rl.types import TrainingBatch
from schemas.manifests import Manifest

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedValues:
    """Of each step's tokens the advantages it used and the returns it was to learn; KL metrics."""

    advantages: tuple[Float64[np.ndarray, " _"], ...]
    returns: tuple[Float64[np.ndarray, " _"], ...]
    metrics: Mapping[str, float]


def values_of(
    run: Run, batches: Manifest, checkpoint: Manifest, coefficient: float | None
) -> ExpectedValues:
    """Advantages and returns that follow from a round's old values, rewards and logprobs.

    `coefficient` is the weight of the KL to the reference, None without one. Raises CorruptObject
    where scores lack what advantages are made of, ObjectMissing, NewerSchema.
    """
    config, critic = run.config, run.config.training.critic
    assert critic is not None, "only a critic has values"
    in_reward = coefficient is not None and config.objective.kl_placement == "reward"
    raw, returns, kls, completions = [], [], [], 0
    pairs = zip(read_batches(run, ref_of(batches)), iter_scores(run, checkpoint), strict=False)
    for batch, scores in pairs:
        _check(run, checkpoint, scores, in_reward=in_reward)
        reward_N = _rewards(batch, scores)
        if in_reward and coefficient is not None:
            kls.append(token_kl(scores, config.objective))
            completions += len(scores.counts)
            reward_N = reward_N - coefficient * kls[-1]
        advantage_N = _advantages(scores, reward_N, critic)
        raw.append(advantage_N)
        returns.append(advantage_N + column_of(scores, "old_values"))
    return ExpectedValues(
        advantages=tuple(token_whitened(raw) if config.objective.whitens_tokens else raw),
        returns=tuple(returns),
        metrics=_kl_metrics(kls, completions) if in_reward else {},
    )


def _check(run: Run, checkpoint: Manifest, scores: StepScores, *, in_reward: bool) -> None:
    needed = ("old_values", "values", "returns", *(("reference_logprobs",) * in_reward))
    missing = [name for name in needed if scores.floats[name] is None]
    if missing:
        raise CorruptObject(
            f"{run.store.url_of(checkpoint.slot)}: the scores of step {scores.step} have no "
            f"{missing[0]}, which the advantages of a critic are made of"
        )


def _rewards(batch: TrainingBatch, scores: StepScores) -> Float64[np.ndarray, " N"]:
    returns_N = batch.returns[trained(batch)].astype(np.float64)
    sequence_N = np.repeat(np.arange(len(scores.counts)), scores.counts)
    if len(returns_N) != len(sequence_N):
        return np.zeros(len(sequence_N))  # a contradiction that is counted elsewhere
    return rewards_of(returns_N, sequence_N)


def _advantages(
    scores: StepScores, reward_N: Float64[np.ndarray, " N"], critic: CriticConfig
) -> Float64[np.ndarray, " N"]:
    value_N, advantage_N = column_of(scores, "old_values"), np.zeros(len(reward_N))
    ends = np.cumsum(scores.counts)
    for start, end in zip(ends - scores.counts, ends, strict=True):
        value_n1 = np.append(value_N[start:end], 0.0)
        discount_n = np.full(end - start, critic.gamma)
        advantage_N[start:end] = gae(reward_N[start:end], discount_n, value_n1, critic.gae_lambda)
    return advantage_N


def token_whitened(
    raw: Sequence[Float64[np.ndarray, " _"]],
) -> Sequence[Float64[np.ndarray, " _"]]:
    """Less their mean, over their std, both over all tokens of the round."""
    if not raw:
        return raw
    whole = np.concatenate(raw)
    variance = whole.var(ddof=1) if len(whole) > 1 else 0.0
    mean = whole.mean() if len(whole) else 0.0
    return [(found - mean) / np.sqrt(variance + WHITENING_VARIANCE_MIN) for found in raw]


def _kl_metrics(kls: Sequence[np.ndarray], completions: int) -> dict[str, float]:
    if not kls:
        return {}
    kl_N = np.concatenate(kls)
    return {
        "objective/kl": float(kl_N.sum()) / max(completions, 1),
        "kl": float(kl_N.sum()) / max(len(kl_N), 1),
    }


def value_metrics(scores: StepScores, critic: CriticConfig) -> dict[str, float]:
    """Critic metrics of a step."""
    value_N, old_N, return_N = (
        column_of(scores, name) for name in ("values", "old_values", "returns")
    )
    plain_N, count = np.square(value_N - return_N), max(len(value_N), 1)
    clipped_N = plain_N
    if critic.value_clip is not None:
        bound = critic.value_clip
        clipped_N = np.square(np.clip(value_N, old_N - bound, old_N + bound) - return_N)
    unexplained = _variance(return_N - value_N) / (_variance(return_N) + EXPLAINED_VARIANCE_MIN)
    return {
        "loss/value_avg": float(np.maximum(plain_N, clipped_N).sum() / count / 2),
        "val/clipfrac_avg": float((clipped_N > plain_N).sum() / count),
        "critic/explained_variance": 1.0 - unexplained,
        "critic/values_mean": float(value_N.sum() / count),
        "critic/returns_mean": float(return_N.sum() / count),
    }


def _variance(values_N: np.ndarray) -> float:
    return float(values_N.var()) if len(values_N) else 0.0


def unlearned(scores: StepScores, return_N: Float64[np.ndarray, " N"]) -> float:
    """Number of tokens of a step with other returns than follow from its scores."""
    if len(return_N) != len(scores.positions):
        return float(len(scores.positions))
    near = np.isclose(column_of(scores, "returns"), return_N, TOLERANCE, TOLERANCE)
    return float((~near).sum())

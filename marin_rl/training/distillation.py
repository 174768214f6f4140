"""Distillation by the teacher's log-probabilities of sampled tokens, and its metrics.

The difference to the sampler's is a number that multiplies the gradient of log-probabilities: it is
never differentiated itself, for the gradient of log(policy / teacher) does not know the teacher.
Leaves out where the teacher's numbers come from (`rollouts.teaching`).

Axes: M microbatches, R rows of one, T positions.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float32, Float64

from marin_rl.training.step_types import StepArrays
from marin_rl.types import TrainingBatch


def teacher_terms(batch: TrainingBatch, rows: StepArrays) -> Float32[np.ndarray, "M R T"]:
    """log(teacher / sampler) of every trained token, in nats; NaN where no teacher scored it.

    0 off the mask. The sampler's distribution is the one at temperature 1, of all tokens.
    """
    assert batch.teacher_logprobs is not None, "batches of a run with a teacher have its numbers"
    terms = np.zeros(rows.mask.shape, np.float32)
    trained = np.nonzero(rows.mask.reshape(-1, rows.mask.shape[-1]))
    terms[rows.mask] = batch.teacher_logprobs[trained] - batch.policy_logprobs[trained]
    return terms


def distillation_metrics(
    terms: Sequence[Float32[np.ndarray, "M R T"]], masks: Sequence[Bool[np.ndarray, "M R T"]]
) -> dict[str, float]:
    """Estimates of KL(policy || teacher) over a round's scored tokens, and tokens without a score.

    k1 is the mean of -d, k3 that of exp(d) - 1 - d, with d = log(teacher / policy). Without any
    scored token both are absent.
    """
    parts = [step[mask].astype(np.float64) for step, mask in zip(terms, masks, strict=True)]
    every: Float64[np.ndarray, " N"] = np.concatenate([*parts, np.zeros(0)])
    d = every[~np.isnan(every)]
    metrics = {"distillation/unscored_tokens": float(len(every) - len(d))}
    if not len(d):
        return metrics
    # Clamped as log-ratios are: one token that the teacher rules out must not overflow.
    k3 = np.expm1(np.minimum(d, 20.0)) - d
    return {"distillation/kl": float(-d.mean()), "distillation/kl_k3": float(k3.mean()), **metrics}

"""Metrics of an optimizer step, recomputed from the scores of its tokens: NumPy in float64.

Written apart from the training step, so that the two check one another; only the loss is asked of
the step's own function, for it is composed as the objective says. Axes: N trained tokens,
S segments, B rows, T positions.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from marin_rl.config import Config, CriticConfig, ObjectiveConfig
from marin_rl.storage.tables.scores import StepScores
from marin_rl.types import TrainingBatch

RATIO_TOLERANCE = 1e-3
ADVANTAGE_TOLERANCE = 1e-4
LOG_MAX = 20.0  # of ratios, as in marin_rl.training.losses


def step_metrics(scores: StepScores, objective: ObjectiveConfig) -> dict[str, float]:
    """Metrics of a step's tokens, without the loss."""
    count = max(len(scores.positions), 1)
    sequences = max(int((scores.counts > 0).sum()), 1)

    def mean(values_N: np.ndarray) -> float:
        return float(values_N.sum() / count)

    trainer_N = column_of(scores, "trainer_logprobs")
    sampler_N = column_of(scores, "sampler_logprobs")
    entropy, ratio_N = mean(column_of(scores, "entropies")), ratios(scores, objective.ratio_level)
    advantage_N = column_of(scores, "advantages")
    below_N, above_N = _beyond(scores, objective, ratio_N)
    low_N, high_N = below_N & (advantage_N < 0), above_N & (advantage_N > 0)
    result = {
        "entropy": entropy,
        "policy/entropy_avg": entropy,
        "objective/entropy": float(-trainer_N.sum() / sequences),
        "val/ratio": mean(ratio_N),
        "val/ratio_var": mean(np.square(ratio_N - mean(ratio_N))),
        "policy/clipfrac_avg": mean(low_N | high_N),
        "policy/approxkl_avg": mean(np.square(trainer_N - _old(scores)) / 2),
        **_clip_fractions(scores, objective, low_N, high_N),
        **_mismatch(trainer_N - sampler_N),
        **_completion_mismatch(scores, trainer_N, sampler_N),
    }
    if objective.importance_correction != "none":
        result["sampling/correction_weight/mean"] = mean(corrections(scores, objective))
    if objective.rejection is not None:
        result["sampling/rejected"] = mean(~_accepted(scores, objective))
    if scores.floats["reference_logprobs"] is not None and objective.kl_placement == "loss":
        d_N = trainer_N - column_of(scores, "reference_logprobs")
        result["kl"] = mean(_kl(d_N, objective.kl_estimator))
        result["objective/kl"] = float(d_N.sum() / sequences)
    return result


def ratios(scores: StepScores, level: str) -> Float64[np.ndarray, " N"]:
    """Importance ratios from log-probabilities; see `marin_rl.training.losses.log_ratios`."""
    return _at_level(scores, column_of(scores, "trainer_logprobs") - _old(scores), level)


def _at_level(
    scores: StepScores, log_N: Float64[np.ndarray, " N"], level: str
) -> Float64[np.ndarray, " N"]:
    if level == "token":
        return np.exp(np.clip(log_N, -LOG_MAX, LOG_MAX))
    log_S = _by_segment(scores, log_N)
    if level == "sequence_mean":
        log_S = log_S / np.maximum(scores.counts, 1)
    else:
        assert level == "sequence", level
    return np.exp(np.repeat(np.clip(log_S, -LOG_MAX, LOG_MAX), scores.counts))


def _by_segment(
    scores: StepScores, values_N: Float64[np.ndarray, " N"]
) -> Float64[np.ndarray, " S"]:
    """Sums over the trained tokens of each segment."""
    segment_N = np.repeat(np.arange(len(scores.counts)), scores.counts)
    return np.bincount(segment_N, weights=values_N, minlength=len(scores.counts))


def token_kl(scores: StepScores, objective: ObjectiveConfig) -> Float64[np.ndarray, " N"]:
    """The KL that is taken off rewards, token by token: the sampler's to the reference."""
    d_N = column_of(scores, "sampler_logprobs") - column_of(scores, "reference_logprobs")
    return _kl(d_N, objective.kl_estimator)


def contradictions(
    scores: StepScores,
    batch: TrainingBatch,
    objective: ObjectiveConfig,
    added_N: Float64[np.ndarray, " N"] | None = None,
    near: float = ADVANTAGE_TOLERANCE,
) -> dict[str, float]:
    """Number of tokens whose scores contradict the step's batch, or their own logprobs, by kind.

    `added_N` is what KL in the reward, or a baseline of tokens, adds to the batch's advantages;
    their sum may be off by `near`, relative or absolute.
    """
    mask = trained(batch)
    if int(mask.sum()) != len(scores.positions):
        return {"scores/tokens": float(abs(int(mask.sum()) - len(scores.positions)))}
    derived_N, stored_N = ratios(scores, objective.ratio_level), column_of(scores, "ratios")
    names = tuple(name for row in batch.rollout_ids for name in row)
    if names != scores.rollout_ids or not np.array_equal(_counts(batch), scores.counts):
        return {"scores/rollout_id": float(len(names))}
    advantage_N = batch.advantages[mask].astype(np.float64)
    if added_N is not None:
        advantage_N = advantage_N + added_N
    near = 0.0 if added_N is None else near
    differing = {
        "rollout_id": np.zeros(1, bool),
        "positions": scores.positions != batch.positions[mask],
        "sampler_logprobs": scores.floats["sampler_logprobs"] != batch.policy_logprobs[mask],
        "advantages": ~np.isclose(column_of(scores, "advantages"), advantage_N, near, near),
        "ratios": ~np.isclose(
            stored_N, derived_N, RATIO_TOLERANCE, RATIO_TOLERANCE, equal_nan=True
        ),
    }
    return {f"scores/{name}": float(np.sum(flags)) for name, flags in differing.items()}


def trained(batch: TrainingBatch) -> np.ndarray:
    """The tokens of a batch that are trained on, (B, T)."""
    return (batch.loss_mask != 0) & (batch.positions > 0)


def _counts(batch: TrainingBatch) -> Int64[np.ndarray, " S"]:
    """The trained tokens of every named segment of a batch, in the order of rows and segments."""
    held = [len(row) for row in batch.rollout_ids]
    row_N, position_N = np.nonzero(trained(batch))
    first = np.cumsum(held) - held
    place_N = first[row_N] + batch.segment_ids[row_N, position_N] - 1
    return np.bincount(place_N, minlength=sum(held)).astype(np.int64)


def step_losses(
    scores: StepScores, batch: TrainingBatch, config: Config, coefficient: float | None
) -> dict[str, float]:
    """`loss` and `loss/policy_avg` of a step, from its scores.

    `coefficient` is the weight of the KL to the reference in the round; None without one.
    """
    from marin_rl.training.scoring import TokenScores
    from marin_rl.training.step import step_arrays

    mask = trained(batch)
    arrays, _ = step_arrays(batch, len(mask), 1)
    in_loss = coefficient is not None and config.objective.kl_placement == "loss"

    def spread(name: str) -> np.ndarray:
        whole = np.zeros((1, *mask.shape), np.float32)
        whole[0, mask] = scores.floats[name]
        return whole

    found = TokenScores(spread("trainer_logprobs"), spread("entropies"))  # type: ignore[arg-type]
    corrected = scores.floats["old_logprobs"] is not None
    valued = scores.floats["values"] is not None
    arrays = arrays._replace(
        advantages=spread("advantages"),
        old_logprobs=spread("old_logprobs") if corrected else None,
        old_values=spread("old_values") if valued else None,
        returns=spread("returns") if valued else None,
    )
    referred = spread("reference_logprobs") if in_loss else None
    weight = np.float32(coefficient) if in_loss else None
    temperature = config.sampling.temperature or 1.0
    critic = config.training.critic
    run = _loss_of(
        config.objective.model_dump_json(),
        None if critic is None else critic.model_dump_json(),
        temperature,
        config.sampling.max_tokens,
    )
    loss, surrogate = run(found, referred, weight, arrays, spread("values") if valued else None)
    return {"loss": float(loss), "loss/policy_avg": float(surrogate)}


@lru_cache(maxsize=4)
def _loss_of(
    objective: str, critic: str | None, temperature: float, length_norm: int
) -> Callable[..., tuple[Any, Any]]:
    import jax

    from marin_rl.training.step_loss import step_loss
    from marin_rl.training.step_types import StepSettings

    chosen = ObjectiveConfig.model_validate_json(objective)
    settings = StepSettings(
        objective=chosen,
        temperature=temperature,
        length_norm=length_norm,
        critic=None if critic is None else CriticConfig.model_validate_json(critic),
    )
    return jax.jit(partial(step_loss, settings))


def _clip_fractions(
    scores: StepScores, objective: ObjectiveConfig, low_N: np.ndarray, high_N: np.ndarray
) -> dict[str, float]:
    share_N = np.ones(len(low_N))
    if objective.ratio_level != "token":
        share_N = np.repeat(1.0 / np.maximum(scores.counts, 1), scores.counts)
    total = max(share_N.sum(), 1.0)
    flags = {"low": low_N, "high": high_N, "region": low_N | high_N}
    return {f"clip_ratio/{name}": float(share_N[f].sum() / total) for name, f in flags.items()}


def _beyond(
    scores: StepScores, objective: ObjectiveConfig, ratio_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens below and above what the surrogate bounds; see `marin_rl.metrics`."""
    low, high = objective.clip_low, objective.clip_high
    none_N = np.zeros(len(ratio_N), bool)
    match objective.surrogate:
        case "ppo_clip" | "gspo":
            return ratio_N < 1 - low, ratio_N > 1 + high
        case "cispo":
            lowest = objective.cispo_clip_low
            return none_N if lowest is None else ratio_N < 1 - lowest, ratio_N > 1 + high
        case "dppo":
            moved_N = np.exp(column_of(scores, "trainer_logprobs")) - np.exp(_old(scores))
            return moved_N < -low, moved_N > high
        case "dppo_kl":
            now_N, old_N = column_of(scores, "trainer_logprobs"), _old(scores)
            divergence_N = _binary_kl(old_N, now_N)
            return (
                (now_N < old_N) & (divergence_N > low),
                (now_N > old_N) & (divergence_N > high),
            )
        case "gmpo":
            log_N = column_of(scores, "trainer_logprobs") - _old(scores)
            return log_N < -low, log_N > high
        case "reinforce" | "sapo" | "dro":
            return none_N, none_N


def corrections(scores: StepScores, objective: ObjectiveConfig) -> Float64[np.ndarray, " N"]:
    """The weights of the importance correction."""
    log_N = _old(scores) - column_of(scores, "sampler_logprobs")
    weight_N = np.ones(len(log_N))
    if objective.importance_correction != "rejected":
        weight_N = _at_level(scores, log_N, objective.correction_level)
    low, high = objective.correction_low, objective.correction_high
    if objective.importance_correction == "truncated":
        weight_N = np.clip(weight_N, low, high)
    if objective.importance_correction == "masked":
        weight_N = np.where((weight_N >= low) & (weight_N <= high), weight_N, 0.0)
    if objective.rejection is not None:
        weight_N = np.where(_accepted(scores, objective), weight_N, 0.0)
    return weight_N


def _accepted(scores: StepScores, objective: ObjectiveConfig) -> np.ndarray:
    """Tokens that rejection leaves; see `marin_rl.training.losses.accepted_tokens`."""
    assert objective.rejection is not None, "asked of an objective that rejects"
    assert objective.rejection_high is not None, "it goes with rejection"
    log_N = np.clip(_old(scores) - column_of(scores, "sampler_logprobs"), -LOG_MAX, LOG_MAX)
    value_N, counts_S = _kl(-log_N, objective.rejection), scores.counts
    match objective.rejection_level:
        case "sequence_sum":
            value_N = np.repeat(_by_segment(scores, value_N), counts_S)
        case "sequence_mean":
            value_N = np.repeat(_by_segment(scores, value_N) / np.maximum(counts_S, 1), counts_S)
        case "sequence_max":
            largest_S = np.zeros(len(counts_S))
            segment_N = np.repeat(np.arange(len(counts_S)), counts_S)
            np.maximum.at(largest_S, segment_N, np.abs(value_N))
            value_N = np.repeat(largest_S, counts_S)
    return np.abs(value_N) <= objective.rejection_high


def _binary_kl(old_N: np.ndarray, now_N: np.ndarray) -> np.ndarray:
    """KL of old to new probability of each token against all others."""
    others_N, old_others_N = (np.maximum(-np.expm1(np.minimum(x, 0)), 1e-8) for x in (now_N, old_N))
    of_token_N = np.exp(np.minimum(old_N, 0.0)) * (old_N - now_N)
    return of_token_N + old_others_N * np.log(old_others_N / others_N)


def _mismatch(difference_N: np.ndarray) -> dict[str, float]:
    """As `marin_rl.training.step` says it of no tokens: no difference, and ratios of 1 and 0."""
    ratio_N, some = np.exp(difference_N), len(difference_N) > 0
    count = max(len(difference_N), 1)
    return {
        "sampling/logp_difference/mean": float(np.abs(difference_N).sum() / count),
        "sampling/logp_difference/max": float(np.abs(difference_N).max(initial=0.0)),
        "sampling/importance_ratio/min": float(ratio_N.min()) if some else 1.0,
        "sampling/importance_ratio/mean": float(ratio_N.sum() / count),
        "sampling/importance_ratio/max": float(ratio_N.max(initial=0.0)),
        "mismatch_kl": float((np.expm1(difference_N) - difference_N).sum() / count),
        "sampling/chi2/token": float(np.expm1(2 * difference_N).sum() / count),
    }


def _completion_mismatch(
    scores: StepScores, trainer_N: np.ndarray, sampler_N: np.ndarray
) -> dict[str, float]:
    """Perplexities and chi-square as means over completions with trained tokens; 0 of none."""
    some_S = scores.counts > 0
    trainer_S, sampler_S = (_by_segment(scores, x)[some_S] for x in (trainer_N, sampler_N))
    tokens_S, count = scores.counts[some_S], max(int(some_S.sum()), 1)
    values = {
        "perplexity/trainer": np.exp(-trainer_S / tokens_S),
        "perplexity/sampler": np.exp(-sampler_S / tokens_S),
        "perplexity/ratio": np.exp((sampler_S - trainer_S) / tokens_S),
        "chi2/sequence": np.expm1(2 * (trainer_S - sampler_S)),
    }
    return {f"sampling/{name}": float(value_S.sum() / count) for name, value_S in values.items()}


def _kl(d_N: np.ndarray, estimator: str) -> np.ndarray:
    if estimator == "k1":
        return d_N
    if estimator == "k2":
        return np.square(d_N) / 2
    beyond_N = np.maximum(-d_N - LOG_MAX, 0.0)
    return np.expm1(np.minimum(-d_N, LOG_MAX)) + d_N + np.exp(LOG_MAX) * beyond_N


def _old(scores: StepScores) -> Float64[np.ndarray, " N"]:
    """Old logprobs, the denominator of ratios."""
    there = scores.floats["old_logprobs"] is not None
    return column_of(scores, "old_logprobs" if there else "sampler_logprobs")


def column_of(scores: StepScores, name: str) -> Float64[np.ndarray, " N"]:
    """A column of the scores that is not null."""
    values = scores.floats[name]
    assert values is not None, f"{name} are null"
    return values.astype(np.float64)

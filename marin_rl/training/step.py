"""The optimizer step: one jitted pure function, old state in, new state and metrics out.

Microbatches are a loop on the device with as many turns as the rows need, over arrays of one fixed
size, so that a round's row count never compiles anything anew; only a new padded length T does.
What each token weighs is decided over the whole step before that loop. Parameters are never
donated, because the engine may be serving these very arrays; the optimizer state is.

Axes: M microbatches, R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Int32
from levanter.models.lm_model import LmHeadModel

from marin_rl.config import ObjectiveConfig
from marin_rl.training.losses import (
    kl_estimate,
    log_ratios,
    policy_losses,
    segment_sums,
    token_weights,
)
from marin_rl.training.mesh import SINGLE_DEVICE, Layout
from marin_rl.training.model import with_parameters
from marin_rl.training.optimizer import Schedule
from marin_rl.training.scoring import TokenScores, token_logprobs
from marin_rl.types import TrainingBatch

Parameters = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that an optimizer step reads and writes. `step` counts updates that were applied.

    `rng` is the root key of whatever in a step is random; `refused` counts the updates refused in a
    row because they were not finite.
    """

    parameters: Parameters
    optimizer: optax.OptState
    step: Int32[Array, ""]
    rng: Array
    refused: Int32[Array, ""]


class StepArrays(NamedTuple):
    """The rows of one step, cut into microbatches and filled up with empty rows."""

    token_ids: Int32[Any, "M R T"]
    mask: Bool[Any, "M R T"]
    segment_ids: Int32[Any, "M R T"]
    positions: Int32[Any, "M R T"]
    policy_logprobs: Float[Any, "M R T"]
    advantages: Float[Any, "M R T"]


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What is fixed for a run. `objective` None is supervised: the mean negative log-likelihood.

    `length_norm` is the constant of sequence_mean_token_sum_norm, in tokens.
    """

    objective: ObjectiveConfig | None
    temperature: float = 1.0
    length_norm: int = 1
    compute_dtype: str = "float32"


Step = Callable[
    [TrainState, Parameters | None, StepArrays, Int32[Any, ""]],
    tuple[TrainState, Metrics, Float[Array, "M R T"]],
]


def step_arrays(batch: TrainingBatch, rows: int, microbatches: int) -> tuple[StepArrays, int]:
    """A batch as `microbatches` of `rows` rows, and how many of these hold anything.

    Rows are dealt to the first microbatches in order; what is left over is padding, which carries
    segment 0 and no mask. A token that nothing precedes in its segment is never trained on.
    """
    count, length = batch.token_ids.shape
    assert count <= rows * microbatches, (count, rows, microbatches)

    def cut(array_BT: np.ndarray, dtype: Any) -> np.ndarray:
        whole = np.zeros((rows * microbatches, length), dtype)
        whole[:count] = array_BT
        return whole.reshape(microbatches, rows, length)

    arrays = StepArrays(
        token_ids=cut(batch.token_ids, np.int32),
        mask=cut((batch.loss_mask != 0) & (batch.positions > 0), np.bool_),
        segment_ids=cut(batch.segment_ids, np.int32),
        positions=cut(batch.positions, np.int32),
        policy_logprobs=cut(batch.policy_logprobs, np.float32),
        advantages=cut(batch.advantages, np.float32),
    )
    return arrays, -(-count // rows)


def make_step(
    template: LmHeadModel,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    settings: StepSettings,
    layout: Layout = SINGLE_DEVICE,
) -> Step:
    """The jitted step of a run. `template` gives the architecture; its own arrays are not read.

    Arguments of the result: state (its `optimizer` is donated), parameters of the reference policy
    or None, arrays, and the number of microbatches that hold anything. It returns the new state,
    scalar metrics, and the trainer's log-probabilities before the update.
    """
    score = _scorer(template, settings)

    def step(
        state: TrainState, reference: Parameters | None, arrays: StepArrays, used: Array
    ) -> tuple[TrainState, Metrics, Array]:
        weights_BT = _weights(arrays, settings)
        gradients, scores, reference_logprobs = _accumulate(
            score, settings, state.parameters, reference, arrays, weights_BT, used
        )
        loss, metrics = _report(settings, scores, reference_logprobs, arrays, weights_BT)
        metrics["grad_norm"] = jnp.asarray(optax.global_norm(gradients))
        metrics["lr"] = schedule(state.step)
        ok: Array = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
        new = _updated(optimizer, state, gradients, ok)
        new = layout.constrain_state(new, template, optimizer)
        metrics["updates/skipped"] = jnp.where(ok, 0.0, 1.0)
        metrics["updates/steps"] = new.step
        return new, metrics, scores.logprobs

    return _donating_optimizer(step)


def _donating_optimizer(step: Any) -> Step:
    """Jit with the optimizer state, and nothing else of the state, donated."""

    def split(
        parameters: Parameters, optimizer: Any, rest: Any, reference: Any, arrays: Any, used: Any
    ) -> Any:
        return step(TrainState(parameters, optimizer, *rest), reference, arrays, used)

    jitted = jax.jit(split, donate_argnums=(1,))

    def run(state: TrainState, reference: Any, arrays: StepArrays, used: Any) -> Any:
        return jitted(state.parameters, state.optimizer, state[2:], reference, arrays, used)

    return run


Scorer = Callable[[Parameters, StepArrays], TokenScores]


def _scorer(template: LmHeadModel, settings: StepSettings) -> Scorer:
    def score(parameters: Parameters, rows: StepArrays) -> TokenScores:
        return token_logprobs(
            with_parameters(template, parameters),
            rows.token_ids,
            rows.segment_ids,
            rows.positions,
            rows.mask,
            temperature=settings.temperature,
        )

    return score


def _weights(arrays: StepArrays, settings: StepSettings) -> Float[Array, "B T"]:
    aggregation = settings.objective.aggregation if settings.objective else "token_mean"
    mask_BT, segment_ids_BT = _rows(arrays.mask.astype(jnp.float32)), _rows(arrays.segment_ids)
    return token_weights(mask_BT, segment_ids_BT, aggregation, settings.length_norm)


def _rows(array_MRT: Array) -> Array:
    return array_MRT.reshape(-1, array_MRT.shape[-1])


def _accumulate(
    score: Scorer,
    settings: StepSettings,
    parameters: Parameters,
    reference: Parameters | None,
    arrays: StepArrays,
    weights_BT: Array,
    used: Array,
) -> tuple[Parameters, TokenScores, Array | None]:
    """Gradients summed over the microbatches, and the scores of every row."""
    cast = _computing(parameters, settings.compute_dtype)
    weights_MRT = weights_BT.reshape(arrays.mask.shape)
    frozen = None if reference is None else _computing(reference, settings.compute_dtype)

    def loss(parameters: Parameters, rows: StepArrays, weights: Array) -> tuple[Array, Any]:
        scores = score(parameters, rows)
        referred = None if frozen is None else jax.lax.stop_gradient(score(frozen, rows)).logprobs
        losses, kl = _losses(settings, scores.logprobs, referred, rows)
        return jnp.sum(weights * (losses + kl)), (scores, referred)

    def turn(index: Array, carry: Any) -> Any:
        total, kept = carry
        rows = jax.tree.map(lambda array: array[index], arrays)
        gradients, found = jax.grad(loss, has_aux=True)(cast, rows, weights_MRT[index])
        total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, gradients)
        return total, jax.tree.map(lambda k, f: k.at[index].set(f), kept, found)

    blank = jnp.zeros(arrays.mask.shape, jnp.float32)
    kept = (TokenScores(blank, blank), None if frozen is None else blank)
    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), parameters)
    total, (scores, referred) = jax.lax.fori_loop(0, used, turn, (total, kept))
    return total, scores, referred


def _computing(parameters: Parameters, dtype: str) -> Parameters:
    return jax.tree.map(lambda array: array.astype(dtype), parameters)


def _losses(
    settings: StepSettings, logprobs: Array, referred: Array | None, rows: StepArrays
) -> tuple[Array, Array]:
    """The surrogate and the weighted KL of each token, 0 off the mask."""
    objective, mask = settings.objective, rows.mask.astype(jnp.float32)
    if objective is None:
        return -logprobs * mask, jnp.zeros_like(logprobs)
    losses = policy_losses(
        objective, logprobs, rows.policy_logprobs, rows.advantages, mask, rows.segment_ids
    )
    if referred is None:
        return losses, jnp.zeros_like(logprobs)
    kl = kl_estimate(logprobs, referred, objective.kl_estimator) * mask
    return losses, objective.kl_coefficient * kl


def _updated(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    gradients: Parameters,
    ok: Array,
) -> TrainState:
    """The next state; where the update is not finite, the old one with `refused` counted up.

    Multiplying an update by 0 would keep its NaN; `where` does not.
    """
    updates, moments = optimizer.update(gradients, state.optimizer, state.parameters)
    moved = optax.apply_updates(state.parameters, updates)
    parameters, moments = jax.tree.map(
        lambda new, old: jnp.where(ok, new, old),
        (moved, moments),
        (state.parameters, state.optimizer),
    )
    return TrainState(
        parameters=parameters,
        optimizer=moments,
        step=state.step + ok,
        rng=state.rng,
        refused=jnp.where(ok, 0, state.refused + 1),
    )


def _report(
    settings: StepSettings,
    scores: TokenScores,
    reference_logprobs: Array | None,
    arrays: StepArrays,
    weights_BT: Array,
) -> tuple[Array, Metrics]:
    """The loss and the step's metrics, over all rows at once (definitions: marin_rl/metrics.py)."""
    rows = StepArrays(*(_rows(array) for array in arrays))
    logprobs, entropies = _rows(scores.logprobs), _rows(scores.entropies)
    referred = None if reference_logprobs is None else _rows(reference_logprobs)
    losses, kl = _losses(settings, logprobs, referred, rows)
    loss = jnp.sum(weights_BT * (losses + kl))
    metrics = {"loss": loss, "entropy": _mean(entropies, rows.mask)}
    if settings.objective is not None:
        metrics["loss/policy_avg"] = jnp.sum(weights_BT * losses)
        metrics |= _ratio_metrics(settings.objective, logprobs, rows)
        metrics |= _mismatch_metrics(logprobs, rows)
    if settings.objective is not None and referred is not None:
        estimate = kl_estimate(logprobs, referred, settings.objective.kl_estimator)
        metrics["kl"] = _mean(estimate, rows.mask)
        metrics["objective/kl"] = jnp.sum((logprobs - referred) * rows.mask) / _sequences(rows)
    return loss, metrics


def _ratio_metrics(
    objective: ObjectiveConfig, logprobs: Array, rows: StepArrays
) -> Mapping[str, Array]:
    mask = rows.mask.astype(jnp.float32)
    log_ratio = log_ratios(
        logprobs, rows.policy_logprobs, mask, rows.segment_ids, objective.ratio_level
    )
    ratio = jnp.exp(log_ratio)
    mean = _mean(ratio, rows.mask)
    clipped = (ratio < 1 - objective.clip_low) | (ratio > 1 + objective.clip_high)
    return {
        "val/ratio": mean,
        "val/ratio_var": _mean(jnp.square(ratio - mean), rows.mask),
        "policy/clipfrac_avg": _mean(clipped.astype(jnp.float32), rows.mask),
        "policy/approxkl_avg": _mean(jnp.square(logprobs - rows.policy_logprobs) / 2, rows.mask),
    }


def _mismatch_metrics(logprobs: Array, rows: StepArrays) -> Mapping[str, Array]:
    """How far the sampler's log-probabilities are from the trainer's, token by token."""
    difference = jnp.where(rows.mask, logprobs - rows.policy_logprobs, 0.0)
    ratio = jnp.exp(difference)
    some = jnp.any(rows.mask)
    return {
        "sampling/logp_difference/mean": _mean(jnp.abs(difference), rows.mask),
        "sampling/logp_difference/max": jnp.max(jnp.abs(difference)),
        "sampling/importance_ratio/min": jnp.where(
            some, jnp.min(jnp.where(rows.mask, ratio, jnp.inf)), 1.0
        ),
        "sampling/importance_ratio/mean": _mean(ratio, rows.mask),
        "sampling/importance_ratio/max": jnp.max(jnp.where(rows.mask, ratio, 0.0)),
        "mismatch_kl": _mean(jnp.expm1(difference) - difference, rows.mask),
    }


def _mean(values_BT: Array, mask_BT: Bool[Array, "B T"]) -> Array:
    """The mean over trained tokens, 0 when there are none."""
    total = jnp.sum(jnp.where(mask_BT, values_BT, 0.0))
    return total / jnp.maximum(jnp.sum(mask_BT), 1)


def _sequences(rows: StepArrays) -> Array:
    mask_BT = rows.mask.astype(jnp.float32)
    per_BT = mask_BT / jnp.maximum(segment_sums(mask_BT, rows.segment_ids), 1.0)
    return jnp.maximum(jnp.sum(per_BT), 1.0)


def as_array(value: int) -> Int[np.ndarray, ""]:
    """A count as the argument of a jitted function, so that no value of it compiles anew."""
    return np.asarray(value, np.int32)

"""Gradients and scores of a step's rows, microbatch by microbatch: pure functions.

Microbatches are a loop on the device with as many turns as the rows need, over arrays of one fixed
size. Several loops may share a step's microbatches between them, each with sums of its own; what
they return is then added up, always in the same order. The update is in step.py.

Axes: M microbatches, R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from levanter.models.lm_model import LmHeadModel

from marin_rl.training.critic import Critic, Parameters
from marin_rl.training.losses import weighted_sum
from marin_rl.training.model import with_parameters
from marin_rl.training.scoring import TokenScores, token_logprobs
from marin_rl.training.step_loss import critic_losses, row_weights, step_losses
from marin_rl.training.step_types import StepArrays, StepSettings

Scorer = Callable[[Parameters, Parameters | None, StepArrays], tuple[TokenScores, Array | None]]


class Reference(NamedTuple):
    """Parameters of the reference policy, and the weight of the KL to them."""

    parameters: Parameters
    coefficient: Float[Any, ""]


class TrainableParams(NamedTuple):
    """Trainable parameters, or their gradients; None for parameters that stay as they are."""

    policy: Parameters | None
    critic: Parameters | None


class ForwardOutputs(NamedTuple):
    """Forward outputs of a step's rows before the update; None without a reference, or a critic."""

    scores: TokenScores
    referred: Array | None
    values: Array | None


class MicrobatchRange(NamedTuple):
    """The microbatches of one loop: of `used` ones every `apart`-th, from `first` on."""

    first: Int[Any, ""]
    apart: int
    used: Int[Any, ""]

    @property
    def turns(self) -> Array:
        """Number of microbatches in the range."""
        return jnp.maximum(self.used - self.first + self.apart - 1, 0) // self.apart

    def microbatch(self, turn: Array) -> Array:
        """Index of the next microbatch."""
        return self.first + turn * self.apart


def whole_range(used: Array) -> MicrobatchRange:
    """All microbatches that hold anything, in one loop."""
    return MicrobatchRange(np.int32(0), 1, used)


def scorer_of(
    template: LmHeadModel, settings: StepSettings, critic: Critic | None = None
) -> Scorer:
    """Scores by a policy's parameters, and values where a critic's are given."""

    def score(
        parameters: Parameters, valuing: Parameters | None, rows: StepArrays
    ) -> tuple[TokenScores, Array | None]:
        policy = with_parameters(template, parameters)
        if critic is not None and valuing is not None:
            return critic.scores(valuing, policy, rows, settings)
        scores = token_logprobs(
            policy,
            rows.token_ids,
            rows.segment_ids,
            rows.positions,
            rows.mask,
            temperature=settings.temperature,
            packing=settings.packing,
        )
        return scores, None

    return score


def accumulate(
    score: Scorer,
    settings: StepSettings,
    parameters: Parameters,
    valuing: Parameters | None,
    reference: Reference | None,
    arrays: StepArrays,
    share: MicrobatchRange,
    *,
    warming: bool = False,
) -> tuple[TrainableParams, ForwardOutputs]:
    """Gradients summed over a range of the microbatches, and the forward outputs of their rows.

    `valuing` are a critic's parameters, or None. The weight of each token is decided over the whole
    step. Rows of other microbatches are 0. While a critic is `warming` up, the policy is
    scored and has no gradient.
    """
    weights_MRT = row_weights(arrays, settings).reshape(arrays.mask.shape)
    cast = computing(parameters, settings.compute_dtype)
    trained = TrainableParams(
        policy=None if warming else cast,
        critic=None if valuing is None else computing(valuing, settings.compute_dtype),
    )
    frozen = None if reference is None else computing(reference.parameters, settings.compute_dtype)
    coefficient = None if reference is None else reference.coefficient
    tokens = jnp.sum(arrays.mask) if trained.critic is not None else None

    def loss(
        trained: TrainableParams, rows: StepArrays, weights: Array
    ) -> tuple[Array, ForwardOutputs]:
        scores, values = score(trained.policy or cast, trained.critic, rows)
        referred = None
        if frozen is not None:
            referred = jax.lax.stop_gradient(score(frozen, None, rows)[0]).logprobs
        losses, regularisers = step_losses(settings, scores, referred, coefficient, rows)
        total = weighted_sum(weights, losses + regularisers)
        if values is not None and tokens is not None:
            total += jnp.sum(critic_losses(settings, values, rows)) / jnp.maximum(tokens, 1)
        return total, ForwardOutputs(scores, referred, values)

    def turn(number: Array, carry: Any) -> Any:
        total, kept = carry
        index = share.microbatch(number)
        rows = jax.tree.map(lambda array: array[index], arrays)
        gradients, found = jax.grad(loss, has_aux=True)(trained, rows, weights_MRT[index])
        total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, gradients)
        return total, jax.tree.map(lambda k, f: k.at[index].set(f), kept, found)

    blank = jnp.zeros(arrays.mask.shape, jnp.float32)
    kept = ForwardOutputs(
        scores=TokenScores(blank, blank),
        referred=None if frozen is None else blank,
        values=None if trained.critic is None else blank,
    )
    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    return jax.lax.fori_loop(0, share.turns, turn, (total, kept))


def sum_ranges(
    shares: Sequence[tuple[TrainableParams, ForwardOutputs]],
) -> tuple[TrainableParams, ForwardOutputs]:
    """Sums of the gradients of several ranges of a step, and the forward outputs of all rows."""
    first, *others = shares
    for other in others:
        first = jax.tree.map(jnp.add, first, other)
    return first


def computing(parameters: Parameters, dtype: str) -> Parameters:
    """Parameters as what is computed with them."""
    return jax.tree.map(lambda array: array.astype(dtype), parameters)

"""Gradients and scores of a step's rows, microbatch by microbatch: pure functions.

Microbatches are a loop on the device with as many iterations as the rows need, over arrays of one
fixed size. Several loops may share a step's microbatches between them, each with sums of its own;
what they return is then added up, always in the same order. The update is in step.py.

Axes: M microbatches, R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from levanter.models.lm_model import LmHeadModel

from marin_rl.lora.quantization import is_quantized
from marin_rl.training.adapters import policy_module
from marin_rl.training.critic import Critic
from marin_rl.training.logprobs import TokenScores, token_logprobs
from marin_rl.training.losses import weighted_sum
from marin_rl.training.step_loss import critic_losses, row_weights, step_losses
from marin_rl.training.step_types import (
    ForwardOutputs,
    Parameters,
    Reference,
    StepArrays,
    StepSettings,
    TrainableParams,
)

Tree = TypeVar("Tree")
Scorer = Callable[[Parameters, Parameters | None, StepArrays], tuple[TokenScores, Array | None]]


class MicrobatchRange(NamedTuple):
    """The microbatches of one loop: of `used` ones every `apart`-th, from `first` on."""

    first: Int[Any, ""]
    apart: Int[Any, ""]
    used: Int[Any, ""]

    @property
    def size(self) -> Array:
        """Number of microbatches in the range."""
        return jnp.maximum(self.used - self.first + self.apart - 1, 0) // self.apart

    def microbatch(self, number: Array) -> Array:
        """Index of microbatch `number` of the range."""
        return self.first + number * self.apart

    @classmethod
    def of(cls, lane: int, lanes: int, used: int) -> "MicrobatchRange":
        """Return the microbatches of one of `lanes` loops, as arrays, so that none recompiles."""
        return cls(*(np.asarray(value, np.int32) for value in (lane, lanes, used)))


def combine(trainable: Parameters | None, frozen: Parameters) -> Parameters:
    """Return all parameters of a policy: the trainable ones, and for the other names the frozen."""
    return {**frozen, **(trainable or {})}


def computing(parameters: Tree, dtype: str) -> Tree:
    """Cast parameters to what is computed with; the masters stay float32.

    Weights that lie quantised stay as they are: they are dequantised to the dtype of their product.
    """

    def cast(path: Any, array: Array) -> Array:
        return array if is_quantized(str(getattr(path[-1], "key", ""))) else array.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, parameters)


def scorer_of(
    template: LmHeadModel, settings: StepSettings, critic: Critic | None = None
) -> Scorer:
    """Return the function that scores rows by all of a policy's parameters.

    It gives values too, where parameters of a critic are given.
    """

    def score(
        parameters: Parameters, critic_params: Parameters | None, rows: StepArrays
    ) -> tuple[TokenScores, Array | None]:
        policy = policy_module(template, parameters)
        if critic is not None and critic_params is not None:
            return critic.scores(critic_params, policy, rows, settings)
        scores = token_logprobs(
            policy, *rows.inputs, temperature=settings.temperature, packing=settings.packing
        )
        return scores, None

    return score


def accumulate(
    score: Scorer,
    settings: StepSettings,
    trainable: TrainableParams,
    frozen: Parameters,
    reference: Reference | None,
    arrays: StepArrays,
    microbatches: MicrobatchRange,
) -> tuple[TrainableParams, ForwardOutputs]:
    """Gradients summed over a range of the microbatches, and the forward outputs of their rows.

    `frozen` are the policy's parameters that have no gradient: all of them where
    `trainable.policy` is None. Outputs are 0 in rows of other microbatches.
    """
    # Over the whole step: a mean over one microbatch would weigh its tokens by its own number.
    weights_MRT = row_weights(arrays, settings).reshape(arrays.mask.shape)
    # Cast once, outside of the loop: every microbatch reads the same copy.
    trained, frozen = computing((trainable, frozen), settings.compute_dtype)
    coefficient = None if reference is None else reference.coefficient
    ref_params = None
    if reference is not None:
        # Under an adapter the reference has an adapter of its own alone: the base is shared.
        ref_params = combine(computing(reference.parameters, settings.compute_dtype), frozen)
    # The critic's loss is a mean over the step's tokens, whatever the policy's aggregation is.
    tokens = jnp.sum(arrays.mask) if trained.critic is not None else None

    def loss(
        trained: TrainableParams, rows: StepArrays, weights: Array
    ) -> tuple[Array, ForwardOutputs]:
        scores, values = score(combine(trained.policy, frozen), trained.critic, rows)
        ref_logprobs = None
        if ref_params is not None:
            ref_logprobs = jax.lax.stop_gradient(score(ref_params, None, rows)[0]).logprobs
        losses, regularisers = step_losses(settings, scores, ref_logprobs, coefficient, rows)
        total = weighted_sum(weights, losses + regularisers)
        if values is not None and tokens is not None:
            total += jnp.sum(critic_losses(settings, values, rows)) / jnp.maximum(tokens, 1)
        return total, ForwardOutputs(scores, ref_logprobs, values)

    def body(number: Array, carry: Any) -> Any:
        total, kept = carry
        # One at a time, so that activations need the memory of one microbatch.
        index = microbatches.microbatch(number)
        rows = jax.tree.map(lambda array: array[index], arrays)
        gradients, outputs = jax.grad(loss, has_aux=True)(trained, rows, weights_MRT[index])
        # Summed in float32: bfloat16 would lose what many microbatches each add a little of.
        total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, gradients)
        return total, jax.tree.map(lambda k, f: k.at[index].set(f), kept, outputs)

    blank = jnp.zeros(arrays.mask.shape, jnp.float32)
    kept = ForwardOutputs(
        scores=TokenScores(blank, blank),
        ref_logprobs=None if ref_params is None else blank,
        values=None if trained.critic is None else blank,
    )
    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    # The number of iterations is an array: microbatches without rows cost nothing, and no number
    # recompiles.
    return jax.lax.fori_loop(0, microbatches.size, body, (total, kept))


def sum_ranges(parts: Sequence[Tree]) -> Tree:
    """Add up the gradients, or the forward outputs, of several ranges of a step, in their order."""
    first, *others = parts
    # In a fixed order: floating point sums depend on it, and a resumed run must end in the same
    # bits.
    for other in others:
        first = jax.tree.map(jnp.add, first, other)
    return first

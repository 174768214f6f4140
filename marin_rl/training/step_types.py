"""Types of an optimizer step: its state, its rows on the device, and what decides its loss.

Axes: M microbatches, R rows of one, T positions.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from marin_rl.config import (
    CriticConfig,
    DistillationConfig,
    DivergenceConfig,
    ObjectiveConfig,
    PreferenceLossConfig,
)
from marin_rl.models.spec import Spec
from marin_rl.training.logprobs import ALONE, Packing, TeacherRows, TokenScores
from marin_rl.training.model import Parameters
from marin_rl.training.segments import rollout_shares
from marin_rl.types import TrainingBatch


class CriticState(NamedTuple):
    """State of a critic: parameters by path, its optimizer's state, the number of its updates."""

    parameters: Parameters
    optimizer: optax.OptState
    step: Int32[Array, ""]


class TrainState(NamedTuple):
    """State that an optimizer step reads and writes. `step` counts updates that were applied.

    `parameters` are the trainable ones, by path in the model; parameters that stay as they are go
    into a step as `frozen`. `rng` is the root key of all randomness in a step; `refused` counts the
    updates refused in a row because they were not finite. `average` is the moving average of the
    parameters, where the objective takes it as the reference, `critic` the value function's, where
    there is one.
    """

    parameters: Parameters
    optimizer: optax.OptState
    step: Int32[Array, ""]
    rng: Array
    refused: Int32[Array, ""]
    average: Parameters | None = None
    critic: CriticState | None = None


class Reference(NamedTuple):
    """Parameters of the reference policy, and the weight of the KL to them."""

    parameters: Parameters
    coefficient: Float[Any, ""]


class TrainableParams(NamedTuple):
    """Trainable parameters, or their gradients; None for what is not trained, or not there."""

    policy: Parameters | None
    critic: Parameters | None = None


class ForwardOutputs(NamedTuple):
    """Forward outputs of a step's rows before the update; None without a reference, or a critic."""

    scores: TokenScores
    ref_logprobs: Array | None = None
    values: Array | None = None


class StepArrays(NamedTuple):
    """The rows of one step, cut into microbatches and filled up with empty rows.

    `old_logprobs` are the trainer's before the first update on these rows; None where this step is
    that update. `old_values` are a critic's before that update, `returns` what it is to learn; None
    without a critic. `loss_weights` are those of tokens when supervised; None: 1 on the mask.
    `taught` are the rows that a teacher beside the policy reads; None: these.
    `rollout_shares` are 1 / the trained tokens of a token's rollout where some
    rollout was cut into several segments; None where each segment is one.
    """

    token_ids: Int32[Any, "M R T"]
    mask: Bool[Any, "M R T"]
    segment_ids: Int32[Any, "M R T"]
    positions: Int32[Any, "M R T"]
    policy_logprobs: Float[Any, "M R T"]
    advantages: Float[Any, "M R T"]
    old_logprobs: Float[Any, "M R T"] | None = None
    old_values: Float[Any, "M R T"] | None = None
    returns: Float[Any, "M R T"] | None = None
    rollout_shares: Float[Any, "M R T"] | None = None
    loss_weights: Float[Any, "M R T"] | None = None
    taught: TeacherRows | None = None

    @property
    def inputs(self) -> tuple[Array, Array, Array, Array]:
        """Ids, segments, positions and mask: what `logprobs.token_logprobs` scores."""
        return self.token_ids, self.segment_ids, self.positions, self.mask


def in_microbatches(
    array_BT: Shaped[np.ndarray, "B T"], dtype: Any, *, rows: int, microbatches: int
) -> Shaped[np.ndarray, "M R T"]:
    """Rows as `microbatches` of `rows` rows each, filled up with zeros."""
    count, length = array_BT.shape
    assert count <= rows * microbatches, (count, rows, microbatches)
    # One shape for every batch, so that one compiled program serves them all.
    filled = np.zeros((rows * microbatches, length), dtype)
    filled[:count] = array_BT
    return filled.reshape(microbatches, rows, length)


class PairArrays(NamedTuple):
    """The preference pairs of one step, two neighbouring rows each, cut like `StepArrays`.

    `segment_ids` is 1 on tokens and 0 after them; `margins` has the margin of each row's pair.
    """

    token_ids: Int32[Any, "M R T"]
    segment_ids: Int32[Any, "M R T"]
    margins: Float32[Any, "M R 1"]


class StepRows(NamedTuple):
    """The rows of one step, and the number of microbatches that hold anything."""

    arrays: Any  # StepArrays, or PairArrays of a reward model
    used: int


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of a run's step.

    With `preference` its rows are pairs (see pair_losses.py). Else `objective` None is supervised:
    the mean negative log-likelihood. `length_norm` is the constant of sequence_mean_token_sum_norm,
    in tokens. `distillation` is one with a loss, whose teacher is a model of `teacher`.
    """

    objective: ObjectiveConfig | None
    temperature: float = 1.0
    length_norm: int = 1
    packing: Packing = ALONE
    compute_dtype: str = "float32"
    critic: CriticConfig | None = None
    load_balance_coefficient: float = 0.0
    preference: PreferenceLossConfig | None = None
    distillation: DistillationConfig | None = None
    teacher: Spec | None = None

    @property
    def divergence(self) -> DivergenceConfig | None:
        return None if self.distillation is None else self.distillation.loss


def step_arrays(batch: TrainingBatch, rows: int, microbatches: int) -> StepRows:
    """A batch as `microbatches` of `rows` rows, and how many of these hold anything.

    Rows are dealt to the first microbatches in order; what is left over is padding, which carries
    segment 0 and no mask. A token that nothing precedes in its segment is never trained on.
    """
    cut = partial(in_microbatches, rows=rows, microbatches=microbatches)
    mask_BT = trained_mask(batch)
    shares_BT, weights_BT = rollout_shares(batch, mask_BT), batch.loss_weights
    arrays = StepArrays(
        token_ids=cut(batch.token_ids, np.int32),
        mask=cut(mask_BT, np.bool_),
        segment_ids=cut(batch.segment_ids, np.int32),
        positions=cut(batch.positions, np.int32),
        policy_logprobs=cut(batch.policy_logprobs, np.float32),
        advantages=cut(batch.advantages, np.float32),
        rollout_shares=None if shares_BT is None else cut(shares_BT, np.float32),
        loss_weights=None if weights_BT is None else cut(weights_BT, np.float32),
    )
    return StepRows(arrays, -(-len(mask_BT) // rows))


def trained_mask(batch: TrainingBatch) -> Bool[np.ndarray, "B T"]:
    """The tokens that are trained on: never the first of a segment, for nothing precedes it."""
    return (batch.loss_mask != 0) & (batch.positions > 0)


def as_array(value: int) -> Int[np.ndarray, ""]:
    """A count as an array, so that no value of it causes a recompilation."""
    return np.asarray(value, np.int32)

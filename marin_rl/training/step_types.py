"""The rows of one optimizer step as the device sees them, and what is fixed for all steps of a run.

Axes: M microbatches, R rows of one, T positions.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int32

from marin_rl.config import CriticConfig, ObjectiveConfig
from marin_rl.training.scoring import ALONE, Packing


class StepArrays(NamedTuple):
    """The rows of one step, cut into microbatches and filled up with empty rows.

    `old_logprobs` are the trainer's before the first update on these rows; None where this step is
    that update. `old_values` are a critic's before that update, `returns` what it is to learn; None
    without a critic.
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


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of a run's step. `objective` None is supervised: the mean negative log-likelihood.

    `length_norm` is the constant of sequence_mean_token_sum_norm, in tokens.
    """

    objective: ObjectiveConfig | None
    temperature: float = 1.0
    length_norm: int = 1
    packing: Packing = ALONE
    compute_dtype: str = "float32"
    critic: CriticConfig | None = None

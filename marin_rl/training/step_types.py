"""Types of an optimizer step: its rows on the device, and the streams that share its microbatches.

The operations of a small model are too short for XLA to keep two cores busy with one after the
other; two programs, each with half of the microbatches, do. Gradients are then added up in the
order of the streams, so their number depends on nothing that another machine has less of.

Axes: M microbatches, R rows of one, T positions.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from jaxtyping import Bool, Float, Int32

from marin_rl.config import CriticConfig, ObjectiveConfig
from marin_rl.machine import cores
from marin_rl.training.model import parameter_shapes
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


Result = TypeVar("Result")

LANES = 2

# The operations of larger models are long enough that XLA shares each among all cores, and every
# lane has gradients of its own.
LANE_WEIGHTS_BYTES_MAX = 2**27


def lanes_of(template: eqx.Module, *, on_mesh: bool) -> int:
    """Lanes of the step of a model that looks like `template`: two for a small one on a CPU."""
    small = 4 * sum(map(math.prod, parameter_shapes(template).values())) <= LANE_WEIGHTS_BYTES_MAX
    return LANES if small and not on_mesh and jax.default_backend() == "cpu" else 1


def side_by_side(run: Callable[[int], Result], lanes: int) -> list[Result]:
    """Results of `run` for each lane, once all have ended; one after the other on one core.

    Programs that one thread starts run one after the other, so each lane has a thread. Raises what
    the first lane that failed raised.
    """
    if cores() == 1:
        return [run(lane) for lane in range(lanes)]
    with ThreadPoolExecutor(lanes, "training-lane") as threads:
        futures = [threads.submit(run, lane) for lane in range(lanes)]
    return [future.result() for future in futures]

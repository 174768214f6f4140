"""Several loops that share a step's microbatches, run side by side on the cores of a CPU.

The operations of a small model are too short for XLA to keep two cores busy with one after the
other; two programs, each with half of the microbatches, do. Gradients are then added up in the
order of the loops, so their number depends on nothing that another machine has less of.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import equinox as eqx
import jax

from marin_rl.machine import cores
from marin_rl.training.model import parameter_shapes

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

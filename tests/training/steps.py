"""An optimizer step as one call, for tests of what its two halves do together."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from marin_rl.models.module import LanguageModel
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import CompiledStep
from marin_rl.training.critic import Critic
from marin_rl.training.optimizer import Schedule
from marin_rl.training.step import ForwardBackward, make_update, trainable_of
from marin_rl.training.step_types import (
    Parameters,
    Reference,
    StepArrays,
    StepRows,
    StepSettings,
    TrainState,
)


class StepOutput(NamedTuple):
    """The new state, metrics, and measures of each token before the update."""

    state: TrainState
    metrics: dict[str, Any]
    measures: Any


def make_step(
    template: LanguageModel,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    settings: StepSettings,
    critic: Critic | None = None,
    *,
    lanes: int = 1,
    warming: bool = False,
    frozen: Parameters | None = None,
) -> Callable[[TrainState, Reference | None, StepArrays, int], StepOutput]:
    """Return the step of a model: gradients and update, on one device."""
    passes = ForwardBackward(template, settings, critic=critic, lanes=lanes)
    decay = settings.objective.reference_decay if settings.objective else None
    update = make_update(optimizer, schedule, critic, average_decay=decay)

    def step(
        state: TrainState, reference: Reference | None, arrays: StepArrays, used: int
    ) -> StepOutput:
        trainable = trainable_of(state, frozen or {}, warming=warming)
        gradients, metrics, measures = passes(*trainable, reference, arrays, used)
        state, updated = update(state, gradients, metrics["loss"])
        return StepOutput(state, {**metrics, **updated}, measures)

    return step


def take_step(
    program: CompiledStep, state: TrainState, rows: StepRows, reference: Reference | None = None
) -> tuple[TrainState, Mapping[str, float], Any]:
    """One step by a backend of its own: the new state, metrics, and measures of each token."""
    backend = DeviceBackend(program, state)
    loss = Loss(settings=program.settings, reference=reference)
    forward, update = backend.forward_backward(rows, loss), backend.optim_step()
    before, after = forward.result(), update.result()
    return backend.close(), {**before.metrics, **after.metrics}, before.measures

"""The compiled programs of a run, and taking one step with them.

A Program has the step, the passes that train nothing, the layout of devices and what a state looks
like. It holds no parameters and knows no run: runs of a process whose shapes and settings are the
same share one. The functions place rows, run, and fetch what is asked for in one go.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config
from marin_rl.errors import NonFiniteUpdate
from marin_rl.training.critic import make_critic
from marin_rl.training.mesh import SINGLE_DEVICE, Layout, layout_of
from marin_rl.training.model import matrix_mask, with_gradient_checkpointing
from marin_rl.training.optimizer import AdamW, learning_rate_schedule, make_optimizer
from marin_rl.training.state import state_like, template_of, vocabulary_of
from marin_rl.training.step import (
    Gradient,
    Parameters,
    Reference,
    Score,
    Step,
    StepArrays,
    StepSettings,
    TrainState,
    Values,
    as_array,
    make_gradient,
    make_score,
    make_score_norms,
    make_step,
    make_values,
    step_arrays,
)
from marin_rl.training.step_types import lanes_of
from marin_rl.training.token_metrics import TokenMeasures
from marin_rl.types import TrainingBatch

PROGRAMS_KEPT_MAX = 4


class CompiledStep:
    """The compiled step of one run and one optimizer, and what a state looks like to it."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        adamw: AdamW,
        settings: StepSettings,
    ) -> None:
        self.layout: Layout = layout_of(config.mesh)
        self.template = template_of(config.policy, tokenizer)
        if config.training.gradient_checkpointing:
            self.template = with_gradient_checkpointing(self.template)
        self.optimizer = make_optimizer(adamw, matrix_mask(self.template))
        self.critic = make_critic(config.training, self.template) if settings.critic else None
        average = settings.objective is not None and settings.objective.reference == "average"
        self.like = state_like(self.template, self.optimizer, averaged=average, critic=self.critic)
        schedule = learning_rate_schedule(adamw)
        stepping = partial(
            make_step,
            self.template,
            self.optimizer,
            schedule,
            settings,
            self.layout,
            self.critic,
            lanes=lanes_of(self.template, on_mesh=self.layout.mesh is not None),
        )
        self.step: Step = stepping()
        self.score: Score = make_score(self.template, settings)
        self.score_norms: Score = make_score_norms(
            self.template, settings
        )  # compiled at its first call
        self.gradient: Gradient = make_gradient(self.template, settings, self.critic)
        if self.critic is not None:
            self.warming: Step = stepping(warming=True)
            self.values: Values = make_values(self.template, settings, self.critic)

    def place(self, state: TrainState) -> TrainState:
        """The state on the devices, sharded as the step wants it."""
        return self.layout.place_state(state, self.template, self.optimizer, self.critic)

    def step_of(self, round: int) -> Step:
        """The step that a round takes: the first ones may be for the critic alone."""
        warms = self.critic is not None and round < self.critic.config.warmup_rounds
        return self.warming if warms else self.step


_programs: dict[Any, CompiledStep] = {}


def compiled_step_of(
    config: Config, tokenizer: PreTrainedTokenizerBase, adamw: AdamW, settings: StepSettings
) -> CompiledStep:
    """The program of a run; where this process has one like it, that one, compiled as it is.

    So a run that is continued in its process, or one that differs in no shape, compiles nothing.
    """
    if config.policy.hf_path is not None:  # what lies in that folder may be another model by now
        return CompiledStep(config, tokenizer, adamw, settings)
    training = config.training
    key = (
        config.policy,
        config.mesh,
        training.gradient_checkpointing if settings.critic is None else training,
        adamw,
        settings,
        vocabulary_of(config.policy, tokenizer),
    )
    if key not in _programs:
        while len(_programs) >= PROGRAMS_KEPT_MAX:
            _programs.pop(next(iter(_programs)))
        _programs[key] = CompiledStep(config, tokenizer, adamw, settings)
    return _programs[key]


def to_fixed_shape(
    batch: TrainingBatch, microbatch: int, rows_max: int, layout: Layout = SINGLE_DEVICE
) -> tuple[Any, int]:
    """A batch in the fixed shape that steps of up to `rows_max` rows are compiled for.

    The rows of a microbatch are a multiple that the devices of the layout share evenly.
    """
    rows = layout.whole_rows(min(microbatch, rows_max))
    return step_arrays(batch, rows, -(-rows_max // rows))


def rows_compiled_for(rows: int, rows_max: int) -> int:
    """Rows that a step of at least `rows` packed ones is compiled for: the most, or fewer by fours.

    Packed rows are far fewer than rollouts, and what a step reports is computed for all that it is
    compiled for; a run meets few of these numbers.
    """
    while rows_max // 4 >= rows:
        rows_max //= 4
    return rows_max


def take_step(
    program: CompiledStep,
    state: TrainState,
    reference: Reference | None,
    arrays: Any,
    used: int,
    step: Step | None = None,
) -> tuple[TrainState, dict[str, float], TokenMeasures | None]:
    """One optimizer step, its metrics and what it measured of its tokens, fetched at once."""
    with program.layout.active():
        placed = program.layout.place_rows(arrays)
        taken = step or program.step
        state, metrics, measured = taken(state, reference, placed, as_array(used))
    metrics, measured = jax.device_get((metrics, measured))
    return state, {name: float(value) for name, value in metrics.items()}, measured


def score_rows(
    program: CompiledStep, parameters: Parameters, arrays: StepArrays, used: int
) -> Float32[np.ndarray, "M R T"]:
    """Log-probabilities of the rows of a step under given parameters."""
    with program.layout.active():
        placed = program.layout.place_rows(arrays)
        return np.asarray(program.score(parameters, placed, as_array(used)))


def score_norm_rows(
    program: CompiledStep, parameters: Parameters, arrays: StepArrays, used: int
) -> Float32[np.ndarray, "M R T"]:
    """Squared norms of the scores of the rows of a step under given parameters."""
    with program.layout.active():
        placed = program.layout.place_rows(arrays)
        return np.asarray(program.score_norms(parameters, placed, as_array(used)))


def value_rows(
    program: CompiledStep, state: TrainState, arrays: StepArrays, used: int
) -> Float32[np.ndarray, "M R T"]:
    """Values of the rows of a step under the critic of a state."""
    assert state.critic is not None, "values are a critic's"
    with program.layout.active():
        placed = program.layout.place_rows(arrays)
        found = program.values(state.parameters, state.critic.parameters, placed, as_array(used))
        return np.asarray(found)


def check_finite(state: TrainState, metrics: Mapping[str, float], limit: int) -> None:
    """Raise NonFiniteUpdate once `limit` updates in a row were refused."""
    if metrics["updates/skipped"] and int(state.refused) >= limit:
        raise NonFiniteUpdate(
            f"{int(state.refused)} updates in a row were not finite (loss {metrics['loss']}, "
            f"gradient norm {metrics['grad_norm']}) and were refused; expected fewer than {limit} "
            "(training.nonfinite_updates_max). Lower training.learning_rate, or look at the "
            "round's rewards and log-probabilities"
        )

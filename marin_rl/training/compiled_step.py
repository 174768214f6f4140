"""The compiled programs of a training phase: both halves of a step, and passes that train nothing.

A program has the layout of devices and knows what a state looks like. It holds no parameters and
knows no run. `CompiledStep` is a policy's; runs of a process whose shapes and settings are the same
share one. That of a reward model is in bradley_terry.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float32
from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import device_array, gathered, set_matmul_precision
from marin_rl.config import Config, PolicyConfig
from marin_rl.cpu_streams import gains_from_lanes
from marin_rl.errors import ConfigError, NonFiniteUpdate
from marin_rl.lora.adapter import Adapter, linear_shapes
from marin_rl.lora.quantization import is_quantized, quantize_base
from marin_rl.machine import STEP_LANES, memory_errors
from marin_rl.models.module import LanguageModel
from marin_rl.planning import memory_keys
from marin_rl.training.adapters import (
    Modules,
    merged_parameters,
    modules_of,
    with_adapter,
    with_quantized,
)
from marin_rl.training.critic import Critic, make_critic
from marin_rl.training.logprobs import packing_of
from marin_rl.training.mesh import SINGLE_DEVICE, Layout, layout_of
from marin_rl.training.model import (
    matrix_mask,
    parameter_shapes,
    with_gradient_checkpointing,
    with_parameters,
)
from marin_rl.training.optimizer import (
    AdamW,
    learning_rate_schedule,
    make_optimizer,
    with_adapter_rate,
)
from marin_rl.training.state import fresh_state, state_like, template_of, vocabulary_of
from marin_rl.training.step import (
    ForwardBackward,
    Gradients,
    RowsPass,
    Update,
    make_score,
    make_score_norms,
    make_update,
    make_values,
)
from marin_rl.training.step_metrics import Metrics, TokenMeasures
from marin_rl.training.step_types import (
    Parameters,
    Reference,
    StepRows,
    StepSettings,
    TrainableParams,
    TrainState,
    as_array,
    step_arrays,
)
from marin_rl.types import TrainingBatch

PROGRAMS_KEPT_MAX = 4

# Gradients of rows, metrics of their loss, and measures of each token, from trainable and frozen
# parameters, the reference, arrays, and the number of microbatches that hold anything.
Passes = Callable[
    [TrainableParams, Parameters, Reference | None, Any, int],
    tuple[Gradients, Metrics, TokenMeasures | None],
]


def policy_settings(config: Config) -> StepSettings:
    """Return the settings of the loss that the reinforcement learning stage minimises."""
    return StepSettings(
        objective=config.objective,
        # Greedy sampling has no distribution to be on: the plain softmax stands in.
        temperature=config.sampling.temperature or 1.0,
        length_norm=config.sampling.max_tokens,
        packing=packing_of(config.batching.layout),
        compute_dtype=config.policy.compute_dtype,
        critic=config.training.critic,
        load_balance_coefficient=config.training.load_balance_coefficient or 0.0,
    )


def supervised_settings(config: Config, *, packed: bool = False) -> StepSettings:
    return StepSettings(
        objective=None,
        packing=packing_of("sequences" if packed else "none"),
        compute_dtype=config.policy.compute_dtype,
        load_balance_coefficient=config.training.load_balance_coefficient or 0.0,
    )


class Program(ABC):
    """Base of every phase's programs: update of a state, shapes and places of its arrays.

    `modules` are those of an adapter where they are recorded; None: as the configuration says.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        adamw: AdamW,
        modules: Modules | None = None,
        *,
        settings: StepSettings | None = None,
    ) -> None:
        policy = config.policy
        set_matmul_precision(policy.compute_dtype)
        self.memory_keys = tuple(memory_keys(config))
        self._policy = policy
        self.layout: Layout = layout_of(config.mesh, config.training.optimizer)
        # Without an adapter, as the engine and exports have the model.
        self.base_template = template_of(policy, tokenizer)
        # Recorded ones first: the folder that `init_from` names may have changed since.
        self.modules = modules_of(policy, self.base_template) if modules is None else modules
        template = self.base_template
        if recomputed := config.training.gradient_checkpointing:
            template = with_gradient_checkpointing(template, offload=recomputed == "offload")
        self.template: Any = self._trained_template(with_adapter_of(policy, template, self.modules))
        adamw = with_adapter_rate(adamw, policy.lora)
        # Raises here, before anything is written, where the mesh cannot share a parameter out.
        self.layout.parameter_shardings(self.template)
        linears = linear_shapes(parameter_shapes(self.template))
        self.optimizer = make_optimizer(adamw, matrix_mask(self.template), linears)
        self.critic: Critic | None = None
        if settings is not None and settings.critic is not None:
            self.critic = make_critic(config.training, self.template)
        # The supervised loss has no reference, and so no average of parameters to keep.
        objective = None if settings is None else settings.objective
        averaged = objective is not None and objective.reference == "average"
        self.like = state_like(self.template, self.optimizer, averaged=averaged, critic=self.critic)
        self.update: Update = make_update(
            self.optimizer,
            learning_rate_schedule(adamw),
            self.critic,
            like=self.placed_like,
            average_decay=objective.reference_decay if objective else None,
        )

    def _trained_template(self, template: LanguageModel) -> eqx.Module:
        return template

    @abstractmethod
    def forward_backward(self, settings: StepSettings) -> Passes:
        """Return the passes of the loss that `settings` describe, compiled at their first call."""

    @cached_property
    def placed_like(self) -> TrainState:
        """`like` with the sharding of every array; without a mesh they have none."""
        return self.layout.state_like(self.like, self.template, self.optimizer, self.critic)

    def place(self, state: TrainState) -> TrainState:
        return self.layout.place_state(state, self.template, self.optimizer, self.critic)

    def first_state(self, parameters: Parameters, seed: int) -> TrainState:
        """The state before the first update of these trained parameters, on the devices."""
        critic = self.critic and self.critic.first_state(parameters, self.template)
        averaged = self.like.average is not None
        placed = self.layout.place_parameters(parameters, self.template)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.placed_like.optimizer)
        state = fresh_state(
            placed, self.optimizer, seed, averaged=averaged, critic=critic, shardings=shardings
        )
        return self.place(state)

    def place_frozen(self, base: Mapping[str, Any]) -> Parameters:
        return self.layout.place_parameters(frozen_parameters(self._policy, base), self.template)


class CompiledStep(Program):
    """The programs of a policy: of reinforcement learning, or of a warm start."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        adamw: AdamW,
        settings: StepSettings,
        modules: Modules | None = None,
    ) -> None:
        super().__init__(config, tokenizer, adamw, modules, settings=settings)
        self.settings = settings
        if settings.load_balance_coefficient and not self.template.spec.experts:
            raise ConfigError(
                "training.load_balance_coefficient: expected null for a model without experts, "
                f"found {settings.load_balance_coefficient:g}: there is no load to balance; leave "
                "it out"
            )
        weights = sum(int(np.prod(shape)) for shape in parameter_shapes(self.template).values())
        # 4 bytes each: masters are float32.
        lanes = gains_from_lanes(4 * weights, on_mesh=self.layout.mesh is not None)
        self._lanes = STEP_LANES if lanes else 1
        self._losses: dict[StepSettings, ForwardBackward] = {}
        # Each is compiled at its first call.
        self.score: RowsPass = make_score(self.template, settings)
        self.score_norms: RowsPass = make_score_norms(self.template, settings)
        if self.critic is not None:
            self.values: RowsPass = make_values(self.template, settings, self.critic)

    def forward_backward(self, settings: StepSettings) -> ForwardBackward:
        if settings not in self._losses:
            self._losses[settings] = ForwardBackward(
                self.template, settings, self.layout, self.critic, lanes=self._lanes
            )
        return self._losses[settings]

    def base_and_adapter(
        self, frozen: Parameters, trained: Parameters
    ) -> tuple[LanguageModel, Adapter]:
        with self.layout.local.active():
            base = with_parameters(self.base_template, frozen)
        return base, Adapter(modules=self.modules, arrays=trained)

    def served_model(self, frozen: Parameters, trained: Parameters) -> LanguageModel:
        """The model that engines decode; an adapter is merged into its base."""
        if not self.modules:
            return with_parameters(self.template, trained)
        if self._policy.quantize_base is not None:
            # Merged weights could not be quantised as the base is: engines decode both apart.
            return with_parameters(self.template, {**frozen, **trained})
        adapter = Adapter(modules=self.modules, arrays=trained)
        with self.layout.local.active():
            return with_parameters(self.base_template, merged_parameters(frozen, adapter))

    def rows(
        self, run: RowsPass, trainable: TrainableParams, frozen: Parameters, rows: StepRows
    ) -> Float32[np.ndarray, "M R T"]:
        """Return what a pass that trains nothing gives for the rows of a step."""
        # Sharding constraints inside of the program are resolved on the active mesh.
        with self.layout.active(), memory_errors("scoring a step's rows", self.memory_keys):
            placed = self.layout.place_rows(rows.arrays)
            return np.asarray(gathered(run(trainable, frozen, placed, as_array(rows.used))))

    def warms_up(self, round: int) -> bool:
        """True for rounds of the critic's warm-up, which leave the policy as it is."""
        return self.critic is not None and round < self.critic.config.warmup_rounds


def with_adapter_of(
    policy: PolicyConfig, template: LanguageModel, modules: Modules
) -> LanguageModel:
    """The template with a policy's adapter next to its base, which may be quantised."""
    if policy.lora is None:
        return template
    return with_quantized(with_adapter(template, modules, policy.lora.dtype), policy.quantize_base)


def frozen_parameters(policy: PolicyConfig, base: Mapping[str, Any]) -> Parameters:
    """The base of an adapter, quantised or in the dtype that is computed in."""
    if policy.quantize_base is not None:
        base = quantize_base(base, policy.quantize_base)
    # Cast once and not by each step: no update ever needs the digits that this drops.
    return {
        name: array if is_quantized(name) else device_array(array).astype(policy.compute_dtype)
        for name, array in base.items()
    }


_programs: dict[Any, CompiledStep] = {}


def compiled_step_of(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    adamw: AdamW,
    settings: StepSettings,
    modules: Modules | None = None,
) -> CompiledStep:
    """The program of a run; where this process has one like it, that one, compiled as it is.

    So a run that is continued in its process, or one that differs in no shape, compiles nothing.
    `modules` are those of its adapter, where they are recorded; None: as the configuration says.
    """
    # A folder may hold another model, or another adapter, by now.
    if config.policy.hf_path is not None or (config.policy.lora and config.policy.lora.init_from):
        return CompiledStep(config, tokenizer, adamw, settings, modules)
    training = config.training
    key = (
        config.policy.model_dump_json(),  # an adapter's ranks are a dict, which has no hash
        config.mesh,
        # A critic's optimizer is made from `training`; a policy's is in `adamw`.
        training.gradient_checkpointing if settings.critic is None else training,
        adamw,
        settings,
        vocabulary_of(config.policy, tokenizer),
    )
    if key not in _programs:
        # Oldest first. A process of many small runs would otherwise keep the programs of all.
        while len(_programs) >= PROGRAMS_KEPT_MAX:
            _programs.pop(next(iter(_programs)))
        _programs[key] = CompiledStep(config, tokenizer, adamw, settings)
    return _programs[key]


def to_fixed_shape(
    batch: TrainingBatch, microbatch: int, rows_max: int, layout: Layout = SINGLE_DEVICE
) -> StepRows:
    """A batch in the fixed shape that steps of up to `rows_max` rows are compiled for.

    Examples and rollouts that were cut fill more rows than there are of them: such a step has a
    doubling of `rows_max`. The rows of a microbatch are a multiple that the devices of the layout
    share evenly.
    """
    while rows_max < len(batch.token_ids):
        rows_max *= 2
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


def check_finite(metrics: Mapping[str, float], refused: int, limit: int) -> None:
    """Raise NonFiniteUpdate once `limit` updates in a row were refused."""
    if metrics["updates/skipped"] and refused >= limit:
        raise NonFiniteUpdate(
            f"{refused} updates in a row were not finite (loss {metrics['loss']}, "
            f"gradient norm {metrics['grad_norm']}) and were refused; expected fewer than {limit} "
            "(training.nonfinite_updates_max). Lower training.learning_rate, or look at the "
            "round's rewards and log-probabilities"
        )

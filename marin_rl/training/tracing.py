"""Every program of a run, traced by shapes before the run starts.

JAX finds operands that do not fit, such as a scan whose carry changes its dtype, when it traces a
program; without this a run would come to some of its programs after minutes. No weight is read,
nothing is allocated, compiled or computed.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config
from marin_rl.errors import ConfigError, MarinRLError
from marin_rl.inference.adapters import BankSizes
from marin_rl.inference.warm_up import trace_engine
from marin_rl.lora.quantization import is_quantized
from marin_rl.training.adapters import Modules, warm_start_config
from marin_rl.training.bradley_terry import RewardProgram
from marin_rl.training.compiled_step import (
    CompiledStep,
    Program,
    compiled_step_of,
    policy_settings,
    supervised_settings,
)
from marin_rl.training.logprobs import LENGTH_STEP, sequence_scores
from marin_rl.training.model import parameter_structs, with_parameters
from marin_rl.training.optimizer import policy_adamw, sft_adamw
from marin_rl.training.pair_phase import preference_step
from marin_rl.training.step import RowsPass, combine, trainable_of
from marin_rl.training.step_types import (
    PairArrays,
    Parameters,
    Reference,
    StepArrays,
    StepSettings,
    TrainState,
    as_array,
)

# Settings that decide which operands meet in a program.
KEYS = (
    "policy.compute_dtype",
    "policy.lora",
    "policy.quantize_base",
    "policy.hf_path",
    "training.gradient_checkpointing",
    "training.critic",
    "batching.packing",
    "objective",
    "inference.serve_merged",
    "mesh",
)
# Of operands that do not fit, and of what is not there for them.
FAULTS = (TypeError, ValueError, NotImplementedError, AttributeError, LookupError, AssertionError)


def trace_programs(
    config: Config, tokenizer: PreTrainedTokenizerBase, modules: Modules | None = None
) -> int:
    """Trace the programs of a run, its warm start included, and return their number.

    `modules` are those of its adapter where they are recorded; None: as the configuration says.
    Raises ConfigError with the settings of `KEYS` where one cannot be traced, and InputError for a
    model that is not supported.
    """
    return _traced(config, _programs(config, tokenizer, modules))


def trace_reward_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> int:
    """Trace the step of a reward model, and return the number of programs. Raises as above."""

    def trace() -> None:
        changed = _without_folder(config)
        policy = changed.policy
        adamw = sft_adamw(config.sft, config.training)  # its numbers change no shape
        program = RewardProgram(changed, tokenizer, adamw)
        layout = program.layout
        size = 1, layout.whole_rows(2, together=2), layout.whole_length(policy.context_length)
        ids = jax.ShapeDtypeStruct(size, jnp.int32)
        pairs = PairArrays(ids, ids, jax.ShapeDtypeStruct((*size[:2], 1), jnp.float32))
        _Shapes(changed, program, supervised_settings(changed)).trace_step(pairs, None)

    return _traced(config, [("the step of the reward model", trace)])


def trace_preference(config: Config, tokenizer: PreTrainedTokenizerBase) -> int:
    """Trace what a policy learns from pairs by, and return the number of programs. Raises alike."""
    changed, settings = _without_folder(config), preference_step(config)
    adamw = sft_adamw(config.sft, config.training)
    shapes = _PolicyShapes(changed, compiled_step_of(changed, tokenizer, adamw, settings))
    programs = [
        ("the step on pairs", shapes.trace_policy_step),
        ("the pass of log-probabilities", partial(shapes.trace_pass, shapes.program.score)),
    ]
    return _traced(config, programs)


def _without_folder(config: Config) -> Config:
    """Settings without the folder of an adapter, which may be gone where a run is continued."""
    lora = config.policy.lora
    if lora is None or lora.init_from is None:
        return config
    lora = lora.model_copy(update={"init_from": None, "rank": lora.rank or 1})  # changes no dtype
    return config.model_copy(update={"policy": config.policy.model_copy(update={"lora": lora})})


def _traced(config: Config, programs: Iterable[tuple[str, Callable[[], Any]]]) -> int:
    count = 0
    for name, trace in programs:
        count += 1
        try:
            trace()
        except MarinRLError:
            raise
        except FAULTS as error:
            raise ConfigError(_message(config, name, error)) from error
    return count


def _message(config: Config, name: str, error: BaseException) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"{name} cannot be built with {_settings(config)}: {first[:300]}. This combination is a "
        "fault of marin-rl: report it, and change one of these keys"
    )


def _settings(config: Config) -> str:
    """The settings of `KEYS` that are not at their defaults, and the dtype, as people type them."""
    typed = config.model_dump(mode="json", exclude_defaults=True)
    shown = [f"policy.compute_dtype={config.policy.compute_dtype}"]
    for key in KEYS[1:]:
        section, _, field = key.partition(".")
        value = typed.get(section, {})
        value = value.get(field) if field else value
        if value:
            shown.append(f"{key}={value}")
    return ", ".join(shown)


def _programs(
    config: Config, tokenizer: PreTrainedTokenizerBase, modules: Modules | None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of the programs, and functions that trace them."""
    if config.policy.init == "sft":
        warm = warm_start_config(config)
        adamw = sft_adamw(config.sft, config.training)
        settings = supervised_settings(warm, packed=warm.batching.packs_examples)
        program = compiled_step_of(warm, tokenizer, adamw, settings)
        yield "the step of the warm start", _PolicyShapes(warm, program).trace_policy_step
    adamw, settings = policy_adamw(config.training), policy_settings(config)
    shapes = _PolicyShapes(config, compiled_step_of(config, tokenizer, adamw, settings, modules))
    yield "the training step", shapes.trace_policy_step
    if shapes.program.critic is not None:
        yield "the step of the critic's warm-up", partial(shapes.trace_policy_step, warming=True)
        yield "the pass of the critic's values", partial(shapes.trace_pass, shapes.program.values)
    yield "the pass of log-probabilities", partial(shapes.trace_pass, shapes.program.score)
    if config.objective.estimator.by_token and shapes.program.critic is None:
        norms = shapes.program.score_norms
        yield "the pass of the optimal token baseline", partial(shapes.trace_pass, norms)
    yield "the canary's scores", shapes.trace_canary
    if not config.inference.endpoints:
        yield "the engine", shapes.trace_engine


class _Shapes:
    """Shapes of the arrays of a phase's program, and traces with them."""

    def __init__(self, config: Config, program: Program, settings: StepSettings) -> None:
        self.program, self._config, self._settings = program, config, settings
        # Parameters that no update changes, in the dtype that they are computed in.
        self._frozen = {
            name: struct if is_quantized(name) else struct.update(dtype=config.policy.compute_dtype)
            for name, struct in parameter_structs(program.template).items()
            if name not in program.like.parameters
        }

    def trace_step(self, rows: Any, reference: Any, *, warming: bool = False) -> None:
        program = self.program
        passes = program.forward_backward(self._settings)

        def step(
            state: TrainState, frozen: Parameters, reference: Reference | None, rows: Any
        ) -> Any:
            trained = trainable_of(state, frozen, warming=warming)
            gradients, metrics, _ = passes(*trained, reference, rows, 1)
            return program.update(state, gradients, metrics["loss"])

        self._trace(step, reference, rows)

    def _trace(self, run: Callable[..., Any], *others: Any) -> None:
        """Trace a function of the state, of the parameters that it has not, and of `others`."""
        with self.program.layout.active():
            jax.eval_shape(run, self.program.like, self._frozen, *others)


class _PolicyShapes(_Shapes):
    """Shapes and traces of a policy's programs."""

    program: CompiledStep

    def __init__(self, config: Config, program: CompiledStep) -> None:
        super().__init__(config, program, program.settings)

    def trace_policy_step(self, *, warming: bool = False) -> None:
        objective, reference = self._settings.objective, None
        if objective and objective.kl_coefficient and objective.kl_placement != "reward":
            coefficient = jax.ShapeDtypeStruct((), jnp.float32)
            reference = Reference(self.program.like.parameters, coefficient)
        self.trace_step(self._rows, reference, warming=warming)

    def trace_pass(self, run: RowsPass) -> None:
        def rows_pass(state: TrainState, frozen: Parameters, rows: StepArrays) -> Any:
            return run(*trainable_of(state, frozen), rows, as_array(1))

        self._trace(rows_pass, self._rows)

    def trace_canary(self) -> None:
        template, row = self.program.template, np.ones((1, LENGTH_STEP), np.int32)

        def scores(state: TrainState, frozen: Parameters) -> Any:
            model = with_parameters(template, combine(state.parameters, frozen))
            return sequence_scores(model, row, row, row, 1.0)

        # As a canary runs: outside of the mesh, which could not share out its one row.
        jax.eval_shape(scores, self.program.like, self._frozen)

    def trace_engine(self) -> None:
        """Trace the embedded engine, of the model that it is given in this run."""
        policy, inference = self._config.policy, self._config.inference
        apart = policy.lora is not None and inference.serve_merged is False
        dtype = jnp.dtype(policy.compute_dtype)

        def engine(state: TrainState, frozen: Parameters) -> int:
            bank = None
            if apart:
                model, adapter = self.program.base_and_adapter(frozen, state.parameters)
                bank = BankSizes(adapters=1, rank=adapter.rank_max)
            else:
                model = self.program.served_model(frozen, state.parameters)
            trace_engine(model, inference.engine, policy.context_length, dtype, bank)
            return 0

        self._trace(engine)

    @property
    def _rows(self) -> StepArrays:
        """Rows of a step with all arrays that they may have; one microbatch of the longest."""
        config, layout = self._config, self.program.layout
        buckets = config.batching.length_buckets or (config.policy.context_length,)
        length = layout.whole_length(config.batching.row_tokens or buckets[-1])
        size = 1, layout.whole_rows(config.training.microbatch_sequences), length
        ids, numbers = (jax.ShapeDtypeStruct(size, dtype) for dtype in (jnp.int32, jnp.float32))
        mask = jax.ShapeDtypeStruct(size, jnp.bool_)
        rows = StepArrays(ids, mask, ids, ids, numbers, numbers)
        if self._settings.objective is not None:
            rows = rows._replace(old_logprobs=numbers, rollout_shares=numbers)
        if self.program.critic is not None:
            rows = rows._replace(old_values=numbers, returns=numbers)
        return rows

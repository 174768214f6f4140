"""The optimizer step: one jitted pure function, old state in, new state and metrics out.

Arrays have one fixed size, so that a round's row count never compiles anything again; only a new
padded length T does. Parameters are never donated, because the engine may be serving these very
arrays; states of optimizer and critic are. On a CPU the gradients of a small model come from
several programs side by side, and a last one updates.

Axes: M microbatches, R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Int32
from levanter.models.lm_model import LmHeadModel

from marin_rl.compilation import compiled_apart
from marin_rl.training.critic import Critic, CriticState, Parameters
from marin_rl.training.gradients import (
    ForwardOutputs,
    MicrobatchRange,
    Reference,
    TrainableParams,
    accumulate,
    computing,
    scorer_of,
    sum_ranges,
    whole_range,
)
from marin_rl.training.mesh import SINGLE_DEVICE, Layout
from marin_rl.training.model import with_parameters
from marin_rl.training.optimizer import Schedule, guarded_update
from marin_rl.training.step_loss import Metrics, measures_of, report, row_weights
from marin_rl.training.step_types import StepArrays, StepSettings, side_by_side
from marin_rl.training.token_baseline import squared_score_norms
from marin_rl.training.token_metrics import TokenMeasures
from marin_rl.types import TrainingBatch


class TrainState(NamedTuple):
    """State that an optimizer step reads and writes. `step` counts updates that were applied.

    `rng` is the root key of all randomness in a step; `refused` counts the updates refused in a
    row because they were not finite. `average` is the moving average of the parameters, where the
    objective takes it as the reference, `critic` the value function's, where there is one.
    """

    parameters: Parameters
    optimizer: optax.OptState
    step: Int32[Array, ""]
    rng: Array
    refused: Int32[Array, ""]
    average: Parameters | None = None
    critic: CriticState | None = None


StepOutput = tuple[TrainState, Metrics, TokenMeasures | None]
Step = Callable[[TrainState, Reference | None, StepArrays, Int32[Any, ""]], StepOutput]
GradientFn = Callable[
    [Parameters, Parameters | None, Reference | None, StepArrays, MicrobatchRange],
    tuple[TrainableParams, ForwardOutputs],
]
Update = Callable[
    [TrainState, Array | None, StepArrays, tuple[TrainableParams, ForwardOutputs]], StepOutput
]
Score = Callable[[Parameters, StepArrays, Int32[Any, ""]], Float[Array, "M R T"]]
Values = Callable[[Parameters, Parameters, StepArrays, Int32[Any, ""]], Float[Array, "M R T"]]
Gradient = Callable[[TrainState, Reference | None, StepArrays, Int32[Any, ""]], Parameters]


def step_arrays(batch: TrainingBatch, rows: int, microbatches: int) -> tuple[StepArrays, int]:
    """A batch as `microbatches` of `rows` rows, and how many of these hold anything.

    Rows are dealt to the first microbatches in order; what is left over is padding, which carries
    segment 0 and no mask. A token that nothing precedes in its segment is never trained on.
    """
    count, length = batch.token_ids.shape
    assert count <= rows * microbatches, (count, rows, microbatches)

    def cut(array_BT: np.ndarray, dtype: Any) -> np.ndarray:
        whole = np.zeros((rows * microbatches, length), dtype)
        whole[:count] = array_BT
        return whole.reshape(microbatches, rows, length)

    arrays = StepArrays(
        token_ids=cut(batch.token_ids, np.int32),
        mask=cut(trained_mask(batch), np.bool_),
        segment_ids=cut(batch.segment_ids, np.int32),
        positions=cut(batch.positions, np.int32),
        policy_logprobs=cut(batch.policy_logprobs, np.float32),
        advantages=cut(batch.advantages, np.float32),
    )
    return arrays, -(-count // rows)


def trained_mask(batch: TrainingBatch) -> Bool[np.ndarray, "B T"]:
    """The tokens that are trained on: never the first of a segment, for nothing precedes it."""
    return (batch.loss_mask != 0) & (batch.positions > 0)


def make_step(
    template: LmHeadModel,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    settings: StepSettings,
    layout: Layout = SINGLE_DEVICE,
    critic: Critic | None = None,
    *,
    warming: bool = False,
    lanes: int = 1,
) -> Step:
    """The jitted step of a run. `template` gives the architecture; its own arrays are not read.

    Arguments of the result: state (its `optimizer` and `critic` are donated), the reference or
    None, arrays, and the number of microbatches that hold anything. It returns the new state,
    scalar metrics, and the trainer's scores of each token before the update (None where the
    step is supervised). While it is `warming` a critic up, the policy is scored and stays as it is.
    With several `lanes` as many loops share the microbatches, where there are enough: one jitted
    function then gathers the gradients of a lane, and another makes the update of all.
    """
    score = scorer_of(template, settings, critic)

    def gather(
        parameters: Parameters,
        valuing: Parameters | None,
        reference: Reference | None,
        arrays: StepArrays,
        share: MicrobatchRange,
    ) -> tuple[TrainableParams, ForwardOutputs]:
        return accumulate(
            score, settings, parameters, valuing, reference, arrays, share, warming=warming
        )

    def update(
        state: TrainState,
        coefficient: Array | None,
        arrays: StepArrays,
        gathered: tuple[TrainableParams, ForwardOutputs],
    ) -> StepOutput:
        gradients, found = gathered
        weights_BT = row_weights(arrays, settings)
        loss, metrics = report(
            settings, found.scores, found.referred, coefficient, found.values, arrays, weights_BT
        )
        metrics["grad_norm"] = jnp.asarray(optax.global_norm(gradients.policy or {}))
        metrics["lr"] = jnp.zeros(()) if warming else schedule(state.step)
        ok: Array = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
        if critic is not None and state.critic is not None and gradients.critic is not None:
            metrics |= critic.told(state.critic, gradients.critic)
            ok &= jnp.isfinite(metrics["critic/grad_norm"])
            state = state._replace(critic=critic.updated(state.critic, gradients.critic, ok))
        new = _updated(optimizer, settings, state, gradients.policy, ok)
        new = layout.constrain_state(new, template, optimizer, critic)
        metrics["updates/skipped"] = jnp.where(ok, 0.0, 1.0)
        metrics["updates/steps"] = new.step
        measured = measures_of(settings, found.scores, found.referred, found.values, arrays)
        return new, metrics, measured

    step = _in_one(gather, update)
    return step if lanes == 1 else _in_lanes(gather, update, lanes, step)


def make_score(template: LmHeadModel, settings: StepSettings) -> Score:
    """The jitted pass without an update: log-probabilities of all rows, microbatch by microbatch.

    Arguments of the result: parameters, arrays, and the number of microbatches that hold anything.
    """
    score = scorer_of(template, settings)

    def logprobs(parameters: Parameters, arrays: StepArrays, used: Array) -> Array:
        cast = computing(parameters, settings.compute_dtype)

        def turn(index: Array, kept: Array) -> Array:
            rows = jax.tree.map(lambda array: array[index], arrays)
            return kept.at[index].set(score(cast, None, rows)[0].logprobs)

        return jax.lax.fori_loop(0, used, turn, jnp.zeros(arrays.mask.shape, jnp.float32))

    return jax.jit(logprobs)


def make_score_norms(template: LmHeadModel, settings: StepSettings) -> Score:
    """The jitted pass of the optimal token baseline: `squared_score_norms` of all rows.

    Arguments of the result: parameters, arrays, and the number of microbatches that hold anything.
    """

    def norms(parameters: Parameters, arrays: StepArrays, used: Array) -> Array:
        policy = with_parameters(template, computing(parameters, settings.compute_dtype))

        def body(index: Array, kept: Array) -> Array:
            rows = jax.tree.map(lambda array: array[index], arrays)
            return kept.at[index].set(squared_score_norms(policy, rows, settings))

        return jax.lax.fori_loop(0, used, body, jnp.zeros(arrays.mask.shape, jnp.float32))

    return jax.jit(norms)


def make_values(template: LmHeadModel, settings: StepSettings, critic: Critic) -> Values:
    """The jitted pass of a critic: the values of all rows, microbatch by microbatch.

    Arguments of the result: the policy's parameters, the critic's, arrays, and the number of
    microbatches that hold anything.
    """

    def values(
        parameters: Parameters, valuing: Parameters, arrays: StepArrays, used: Array
    ) -> Array:
        policy = with_parameters(template, computing(parameters, settings.compute_dtype))
        cast = computing(valuing, settings.compute_dtype)

        def turn(index: Array, kept: Array) -> Array:
            rows = jax.tree.map(lambda array: array[index], arrays)
            return kept.at[index].set(critic.values(cast, policy, rows, settings))

        return jax.lax.fori_loop(0, used, turn, jnp.zeros(arrays.mask.shape, jnp.float32))

    return jax.jit(values)


def make_gradient(
    template: LmHeadModel, settings: StepSettings, critic: Critic | None = None
) -> Gradient:
    """The jitted gradient of a step's loss by the policy's parameters, unclipped; no update.

    Arguments of the result are those of a step.
    """
    score = scorer_of(template, settings, critic)

    def gradient(
        state: TrainState, reference: Reference | None, arrays: StepArrays, used: Array
    ) -> Parameters:
        found, _ = accumulate(
            score, settings, state.parameters, _valuing(state), reference, arrays, whole_range(used)
        )
        assert found.policy is not None
        return found.policy

    return jax.jit(gradient)


def _valuing(state: TrainState) -> Parameters | None:
    return None if state.critic is None else state.critic.parameters


def _in_one(gather: GradientFn, update: Update) -> Step:
    """One program; the states of optimizer and critic, and nothing else of the state, donated."""

    def split(
        parameters: Parameters,
        optimizer: Any,
        critic: Any,
        rest: Any,
        reference: Any,
        arrays: Any,
        used: Any,
    ) -> Any:
        state = TrainState(parameters, optimizer, *rest)._replace(critic=critic)
        gathered = gather(parameters, _valuing(state), reference, arrays, whole_range(used))
        return update(state, reference and reference.coefficient, arrays, gathered)

    jitted = compiled_apart(jax.jit(split, donate_argnums=(1, 2)))

    def run(
        state: TrainState, reference: Reference | None, arrays: StepArrays, used: Any
    ) -> StepOutput:
        parameters, optimizer, *rest, critic = state
        return jitted(parameters, optimizer, critic, tuple(rest), reference, arrays, used)

    return run


def _in_lanes(gather: GradientFn, update: Update, lanes: int, otherwise: Step) -> Step:
    """A program for each lane's share, side by side, and one for the update, which donates too.

    `otherwise` takes the steps that have fewer microbatches than there are lanes.
    """

    def share(
        parameters: Any, valuing: Any, reference: Any, arrays: Any, lane: Any, used: Any
    ) -> Any:
        return gather(parameters, valuing, reference, arrays, MicrobatchRange(lane, lanes, used))

    def total(
        parameters: Any,
        optimizer: Any,
        critic: Any,
        gathered: Any,
        rest: Any,
        coefficient: Any,
        arrays: Any,
    ) -> Any:
        state = TrainState(parameters, optimizer, *rest)._replace(critic=critic)
        return update(state, coefficient, arrays, sum_ranges(gathered))

    sharing = compiled_apart(jax.jit(share))
    totalling = compiled_apart(jax.jit(total, donate_argnums=(1, 2)))

    def run(
        state: TrainState, reference: Reference | None, arrays: StepArrays, used: Any
    ) -> StepOutput:
        if len(arrays.mask) < lanes:
            return otherwise(state, reference, arrays, used)
        parameters, optimizer, *rest, critic = state
        arrays = jax.device_put(arrays)  # once, not for every lane

        def gathered(lane: int) -> Any:
            found = sharing(parameters, _valuing(state), reference, arrays, as_array(lane), used)
            return jax.block_until_ready(found)

        found = side_by_side(gathered, lanes)
        coefficient = reference and reference.coefficient
        return totalling(parameters, optimizer, critic, found, tuple(rest), coefficient, arrays)

    return run


def _updated(
    optimizer: optax.GradientTransformationExtraArgs,
    settings: StepSettings,
    state: TrainState,
    gradients: Parameters | None,
    ok: Array,
) -> TrainState:
    """The next state; where the update is not finite, the old one with `refused` counted up.

    Without gradients there is no update of the policy. The critic is as it stands in `state`.
    """
    if gradients is None:
        return state._replace(refused=jnp.where(ok, 0, state.refused + 1))
    parameters, moments = guarded_update(
        optimizer, gradients, state.parameters, state.optimizer, ok
    )
    return TrainState(
        parameters=parameters,
        optimizer=moments,
        step=state.step + ok,
        rng=state.rng,
        refused=jnp.where(ok, 0, state.refused + 1),
        average=_averaged(settings, state.average, parameters, ok),
        critic=state.critic,
    )


def _averaged(
    settings: StepSettings, average: Parameters | None, parameters: Parameters, ok: Array
) -> Parameters | None:
    """decay * average + (1 - decay) * parameters; as it was where an update is refused."""
    if average is None or settings.objective is None:
        return average
    decay = settings.objective.reference_decay
    return {
        name: jnp.where(ok, decay * average[name] + (1 - decay) * new, average[name])
        for name, new in parameters.items()
    }


def as_array(value: int) -> Int[np.ndarray, ""]:
    """A count as an array, so that no value of it causes a recompilation."""
    return np.asarray(value, np.int32)

"""The optimizer step: jitted pure functions, old state in, new state and metrics out.

A step is two halves. `ForwardBackward` gives the gradients of a batch and the metrics of its loss,
`make_update` the function that applies gradients to a state. Arrays have one fixed size, so that a
round's row count never compiles anything again; only a new padded length T does. Parameters are
never donated, because the engine may be serving these very arrays; states of optimizer and critic
are.

Axes: M microbatches, R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Int32
from levanter.models.lm_model import LmHeadModel

from marin_rl.compilation import compiled_apart
from marin_rl.cpu_streams import side_by_side
from marin_rl.training.adapters import policy_module
from marin_rl.training.critic import Critic
from marin_rl.training.gradients import (
    MicrobatchRange,
    accumulate,
    combine,
    computing,
    scorer_of,
    sum_ranges,
)
from marin_rl.training.mesh import SINGLE_DEVICE, Layout
from marin_rl.training.optimizer import Schedule, guarded_update
from marin_rl.training.step_metrics import Metrics, TokenMeasures, step_metrics, token_measures
from marin_rl.training.step_types import (
    ForwardOutputs,
    Parameters,
    Reference,
    StepArrays,
    StepRows,
    StepSettings,
    TrainableParams,
    TrainState,
    in_microbatches,
)
from marin_rl.training.token_baseline import squared_score_norms
from marin_rl.training.trajectories import rollout_shares
from marin_rl.types import TrainingBatch

# Gradients of a batch, in the parts that its loops summed: `Update` adds them up.
Gradients = Sequence[TrainableParams]
Update = Callable[[TrainState, Gradients, Float[Any, ""]], tuple[TrainState, Metrics]]
RowsPass = Callable[
    [TrainableParams, Parameters, StepArrays, Int32[Any, ""]], Float[Array, "M R T"]
]


def step_arrays(batch: TrainingBatch, rows: int, microbatches: int) -> StepRows:
    """A batch as `microbatches` of `rows` rows, and how many of these hold anything.

    Rows are dealt to the first microbatches in order; what is left over is padding, which carries
    segment 0 and no mask. A token that nothing precedes in its segment is never trained on.
    """
    cut = partial(in_microbatches, rows=rows, microbatches=microbatches)
    mask_BT = trained_mask(batch)
    shares_BT = rollout_shares(batch, mask_BT)
    arrays = StepArrays(
        token_ids=cut(batch.token_ids, np.int32),
        mask=cut(mask_BT, np.bool_),
        segment_ids=cut(batch.segment_ids, np.int32),
        positions=cut(batch.positions, np.int32),
        policy_logprobs=cut(batch.policy_logprobs, np.float32),
        advantages=cut(batch.advantages, np.float32),
        rollout_shares=None if shares_BT is None else cut(shares_BT, np.float32),
    )
    return StepRows(arrays, -(-len(mask_BT) // rows))


def trained_mask(batch: TrainingBatch) -> Bool[np.ndarray, "B T"]:
    """The tokens that are trained on: never the first of a segment, for nothing precedes it."""
    return (batch.loss_mask != 0) & (batch.positions > 0)


class ForwardBackward:
    """The jitted forward and backward passes over a batch, for one loss.

    `template` gives the architecture; its own arrays are not read. With several `lanes` as many
    loops share the microbatches, where there are enough; see `marin_rl.cpu_streams`.
    """

    def __init__(
        self,
        template: LmHeadModel,
        settings: StepSettings,
        layout: Layout = SINGLE_DEVICE,
        critic: Critic | None = None,
        *,
        lanes: int = 1,
    ) -> None:
        score = scorer_of(template, settings, critic)

        def gather(
            trainable: TrainableParams,
            frozen: Parameters,
            reference: Reference | None,
            arrays: StepArrays,
            microbatches: MicrobatchRange,
        ) -> tuple[TrainableParams, ForwardOutputs]:
            gradients, outputs = accumulate(
                score, settings, trainable, frozen, reference, arrays, microbatches
            )
            # Within the program, so that XLA reduces each gradient straight into the shard of its
            # parameter and never holds all of it.
            return layout.constrain_gradients(gradients, template, critic), outputs

        def measure(
            outputs: Sequence[ForwardOutputs], coefficient: Array | None, arrays: StepArrays
        ) -> tuple[Metrics, TokenMeasures | None]:
            scores, ref_logprobs, values = sum_ranges(outputs)
            metrics = step_metrics(settings, scores, ref_logprobs, coefficient, values, arrays)
            return metrics, token_measures(settings, scores, ref_logprobs, values, arrays)

        # Two programs: lanes each run the first, and the metrics are of what all lanes gave.
        self._gather = compiled_apart(jax.jit(gather), "the training step")
        self._measure = jax.jit(measure)
        self._lanes = lanes

    def __call__(
        self,
        trainable: TrainableParams,
        frozen: Parameters,
        reference: Reference | None,
        arrays: StepArrays,
        used: int,
    ) -> tuple[Gradients, Metrics, TokenMeasures | None]:
        """Return gradients, metrics of the loss, and measures of each token.

        Only the first `used` microbatches hold anything. `frozen` are the policy's parameters that
        are not trained, all of them where `trainable.policy` is None.
        """
        arrays = jax.device_put(arrays)  # once, not for every program
        # By M, not by `used`: the number of lanes decides the order of sums, and must not change
        # with the rows of a batch.
        lanes = self._lanes if len(arrays.mask) >= self._lanes else 1

        def of_lane(lane: int) -> tuple[TrainableParams, ForwardOutputs]:
            microbatches = MicrobatchRange.of(lane, lanes, used)
            part = self._gather(trainable, frozen, reference, arrays, microbatches)
            # A thread that only dispatched would end at once, and the lanes run one by one.
            return part if lanes == 1 else jax.block_until_ready(part)

        parts = side_by_side(of_lane, lanes)
        coefficient = None if reference is None else reference.coefficient
        outputs = [outputs for _, outputs in parts]
        metrics, measures = self._measure(outputs, coefficient, arrays)
        return [gradients for gradients, _ in parts], metrics, measures


def make_update(
    template: LmHeadModel,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    layout: Layout = SINGLE_DEVICE,
    critic: Critic | None = None,
    *,
    average_decay: float | None = None,
) -> Update:
    """Return the jitted update of a state: its `optimizer` and `critic` are donated.

    Arguments of the result: state, gradients, and the loss that they are of. An update is refused
    where loss or gradients are not finite. Gradients of the critic alone leave the policy as it is.
    """

    def update(
        parameters: Parameters,
        moments: Any,
        critic_state: Any,
        others: Any,
        parts: Gradients,
        loss: Array,
    ) -> tuple[TrainState, Metrics]:
        # In the program that uses them, and in the order of the lanes: the last bits of a sum
        # depend on it.
        state = TrainState(parameters, moments, *others, critic=critic_state)
        gradients = sum_ranges(parts)
        warming = gradients.policy is None
        metrics: Metrics = {
            "grad_norm": jnp.asarray(optax.global_norm(gradients.policy or {})),
            # While the critic warms up the policy is not updated, and its schedule stands still.
            "lr": jnp.zeros(()) if warming else schedule(state.step),
        }
        # The norm is finite only if every gradient is: one number checks them all.
        ok: Array = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
        if critic is not None and state.critic is not None and gradients.critic is not None:
            metrics |= critic.update_metrics(state.critic, gradients.critic)
            # Before either update: policy and critic are both updated or neither, so that a state
            # is never of two steps.
            ok &= jnp.isfinite(metrics["critic/grad_norm"])
            state = state._replace(critic=critic.updated(state.critic, gradients.critic, ok))
        # Counts refusals in a row, which the loop ends a run at; any good update clears it.
        state = state._replace(refused=jnp.where(ok, 0, state.refused + 1))
        if gradients.policy is not None:
            state = updated_state(optimizer, state, gradients.policy, ok, average_decay)
        state = layout.constrain_state(state, template, optimizer, critic)
        metrics["updates/skipped"] = jnp.where(ok, 0.0, 1.0)
        metrics["updates/steps"] = state.step
        return state, metrics

    # Donation is by argument, so the state is passed in parts: moments and critic are donated,
    # parameters are not, for the engine may be sampling from these arrays.
    jitted = compiled_apart(jax.jit(update, donate_argnums=(1, 2)), "the update")

    def run(
        state: TrainState, gradients: Gradients, loss: Float[Any, ""]
    ) -> tuple[TrainState, Metrics]:
        parameters, moments, *others, critic_state = state
        return jitted(parameters, moments, critic_state, tuple(others), gradients, loss)

    return run


def updated_state(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    gradients: Parameters,
    ok: Array,
    average_decay: float | None = None,
) -> TrainState:
    """The state with an update of its parameters applied; as it was where that is not `ok`."""
    parameters, moments = guarded_update(
        optimizer, gradients, state.parameters, state.optimizer, ok
    )
    # A refused update must leave the average too: the old parameters would count in it twice.
    average = state.average
    if average is not None and average_decay is not None:
        average = {
            name: jnp.where(
                ok, average_decay * average[name] + (1 - average_decay) * new, average[name]
            )
            for name, new in parameters.items()
        }
    # `step` drives the schedule: a refused update takes no step of it.
    return state._replace(
        parameters=parameters, optimizer=moments, step=state.step + ok, average=average
    )


def trainable_of(
    state: TrainState, frozen: Parameters, *, warming: bool = False
) -> tuple[TrainableParams, Parameters]:
    """Return the parameters that a step trains, and those that it leaves as they are.

    While a critic is `warming` up, all of the policy's are among the latter.
    """
    critic = None if state.critic is None else state.critic.parameters
    if warming:
        return TrainableParams(None, critic), combine(state.parameters, frozen)
    return TrainableParams(state.parameters, critic), frozen


def rows_pass(
    settings: StepSettings,
    of_rows: Callable[[Parameters, Parameters | None, StepArrays], Float[Array, "R T"]],
) -> RowsPass:
    """Return a jitted pass that trains nothing: `of_rows` of each microbatch, over all rows.

    `of_rows` takes all of the policy's parameters, the critic's or None, and rows [R, T]. Arguments
    of the result: trainable parameters, frozen ones, arrays, and the number of microbatches that
    hold anything.
    """

    def run(
        trainable: TrainableParams, frozen: Parameters, arrays: StepArrays, used: Array
    ) -> Array:
        cast, fixed = computing((trainable, frozen), settings.compute_dtype)
        policy = combine(cast.policy, fixed)

        def body(index: Array, kept: Array) -> Array:
            rows = jax.tree.map(lambda array: array[index], arrays)
            return kept.at[index].set(of_rows(policy, cast.critic, rows))

        # `used` is data and no shape: one program serves any number of rows.
        return jax.lax.fori_loop(0, used, body, jnp.zeros(arrays.mask.shape, jnp.float32))

    return jax.jit(run)


def make_score(template: LmHeadModel, settings: StepSettings) -> RowsPass:
    """Return the pass of log-probabilities of the trained tokens, in nats."""
    score = scorer_of(template, settings)
    return rows_pass(settings, lambda policy, _, rows: score(policy, None, rows)[0].logprobs)


def make_score_norms(template: LmHeadModel, settings: StepSettings) -> RowsPass:
    """Return the pass of the optimal token baseline: `squared_score_norms` of all rows."""
    return rows_pass(
        settings,
        lambda policy, _, rows: squared_score_norms(
            policy_module(template, policy), rows, settings
        ),
    )


def make_values(template: LmHeadModel, settings: StepSettings, critic: Critic) -> RowsPass:
    """Return the pass of a critic's values."""

    def values(policy: Parameters, critic_params: Parameters | None, rows: StepArrays) -> Array:
        assert critic_params is not None, "values are a critic's"
        return critic.values(critic_params, policy_module(template, policy), rows, settings)

    return rows_pass(settings, values)


def as_array(value: int) -> Int[np.ndarray, ""]:
    """A count as an array, so that no value of it causes a recompilation."""
    return np.asarray(value, np.int32)

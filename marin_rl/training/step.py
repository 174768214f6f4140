"""The optimizer step: jitted pure functions, old state in, new state and metrics out.

A step is two halves. `ForwardBackward` gives the gradients of a batch and the metrics of its loss,
`make_update` the function that applies gradients to a state. Microbatches are a loop on the device
with as many iterations as the rows need, over arrays of one fixed size, so that a round's row count
never compiles anything again; only a new padded length T does. Several loops may share them, each
with its own sums, which are added up in a fixed order. Parameters are never donated, because the
engine may be serving these very arrays; states of optimizer and critic are.

Axes: M microbatches, R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Int32

from marin_rl.compilation import compiled_apart
from marin_rl.cpu_streams import side_by_side
from marin_rl.lora.quantization import is_quantized
from marin_rl.models.experts import ExpertLoads, balance_loss
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.models.spec import STACKED
from marin_rl.training.adapters import policy_module, with_sums
from marin_rl.training.critic import Critic
from marin_rl.training.hidden_states import in_scan
from marin_rl.training.logprobs import Taught, TokenScores, token_logprobs
from marin_rl.training.losses import weighted_sum
from marin_rl.training.mesh import SINGLE_DEVICE, Layout
from marin_rl.training.model import with_parameters
from marin_rl.training.optimizer import Schedule, guarded_update
from marin_rl.training.pair_losses import Pairs, counts_of, preference_loss
from marin_rl.training.step_loss import critic_losses, row_weights, step_losses
from marin_rl.training.step_metrics import Metrics, TokenMeasures, step_metrics, token_measures
from marin_rl.training.step_types import (
    ForwardOutputs,
    Parameters,
    Reference,
    StepArrays,
    StepSettings,
    TrainableParams,
    TrainState,
)
from marin_rl.training.token_advantages import squared_score_norms

Tree = TypeVar("Tree")

# Gradients of a batch, in the parts that its loops summed: `Update` adds them up.
Gradients = Sequence[TrainableParams]

TEACHER = "teacher/"  # before the names of its parameters

Update = Callable[[TrainState, Gradients, Float[Any, ""]], tuple[TrainState, Metrics]]

RowsPass = Callable[
    [TrainableParams, Parameters, StepArrays, Int32[Any, ""]], Float[Array, "M R T"]
]


class MicrobatchRange(NamedTuple):
    """The microbatches of one loop: of `used` ones every `apart`-th, from `first` on."""

    first: Int[Any, ""]
    apart: Int[Any, ""]
    used: Int[Any, ""]

    @classmethod
    def of(cls, lane: int, lanes: int, used: int) -> "MicrobatchRange":
        """Return the microbatches of one of `lanes` loops, as arrays, so that none recompiles."""
        return cls(*(np.asarray(value, np.int32) for value in (lane, lanes, used)))


def combine(trainable: Parameters | None, frozen: Parameters) -> Parameters:
    return {**frozen, **(trainable or {})}


def beside_teacher(frozen: Parameters, teacher: Parameters | None) -> Parameters:
    """Parameters that a step does not train: of the policy, and a teacher's."""
    return combine({f"{TEACHER}{name}": array for name, array in (teacher or {}).items()}, frozen)


def _without_teacher(frozen: Parameters) -> tuple[Parameters, Parameters]:
    """Undo `beside_teacher`."""
    parts: tuple[Parameters, Parameters] = {}, {}
    for name, array in frozen.items():
        parts[name.startswith(TEACHER)][name.removeprefix(TEACHER)] = array
    return parts


def computing(parameters: Tree, dtype: str) -> Tree:
    """Cast parameters to what is computed with; the masters stay float32.

    Quantised weights stay as they are: they are dequantised to the dtype of their product.
    """

    def cast(path: Any, array: Array) -> Array:
        return array if is_quantized(str(getattr(path[-1], "key", ""))) else array.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, parameters)


@dataclass(frozen=True)
class Scorer:
    """Scores of rows by all of a policy's parameters; values too, with parameters of a critic."""

    template: LanguageModel
    settings: StepSettings
    critic: Critic | None = None

    def __call__(
        self,
        parameters: Parameters,
        critic_params: Parameters | None,
        rows: StepArrays,
        teacher: Parameters | None = None,
        zeros: Array | None = None,
        sums: Parameters | None = None,
    ) -> tuple[TokenScores, Array | None]:
        settings, policy = self.settings, policy_module(self.template, parameters)
        policy = with_sums(policy, sums) if sums else policy
        if self.critic is not None and critic_params is not None:
            return self.critic.scores(critic_params, policy, rows, settings)
        taught = None
        if teacher and settings.divergence is not None and settings.teacher is not None:
            theirs = with_parameters(model_of(settings.teacher), teacher)
            taught = Taught(theirs, settings.divergence, rows.taught, zeros)
        scores = token_logprobs(
            policy,
            *rows.inputs,
            temperature=settings.temperature,
            packing=settings.packing,
            taught=taught,
        )
        return scores, None

    def summed(self, trained: Parameters | None) -> tuple[Parameters, Parameters | None]:
        """Parameters of layers in a scan, which adds their gradients to the sums; and the others.

        So gradients of a microbatch, as large as the sums, never lie beside these.
        """
        if trained is None or not in_scan(self.template):
            return {}, trained
        layers = {name: array for name, array in trained.items() if name.startswith(STACKED)}
        return layers, {name: array for name, array in trained.items() if name not in layers}

    def blank(self, mask: Bool[Array, "M R T"]) -> TokenScores:
        """Zeros in the place of the scores of rows with this mask, by microbatch."""
        zeros, spec, loads = jnp.zeros(mask.shape, jnp.float32), self.template.spec, None
        if spec.experts:
            each = jnp.zeros((len(mask), spec.layers, spec.experts), jnp.float32)
            balanced = self.settings.load_balance_coefficient > 0
            loads = ExpertLoads(each[..., 0], each, each if balanced else None)
        apart = None if self.settings.divergence is None else zeros
        return TokenScores(zeros, zeros, loads, apart)


def accumulate(
    score: Scorer,
    settings: StepSettings,
    trainable: TrainableParams,
    frozen: Parameters,
    reference: Reference | None,
    arrays: StepArrays,
    microbatches: MicrobatchRange,
) -> tuple[TrainableParams, ForwardOutputs]:
    """Gradients summed over a range of the microbatches, and the forward outputs of their rows.

    `frozen` are the policy's parameters that have no gradient: all of them where
    `trainable.policy` is None; and a teacher's (`beside_teacher`). Outputs are 0 in rows of other
    microbatches.
    """
    # Over the whole step: a mean over one microbatch would weigh its tokens by its own number.
    weights_MRT = row_weights(arrays, settings).reshape(arrays.mask.shape)
    # Cast once, outside of the loop: every microbatch reads the same copy.
    trained, frozen = computing((trainable, frozen), settings.compute_dtype)
    frozen, teacher = _without_teacher(frozen)
    coefficient = None if reference is None else reference.coefficient
    ref_params = None
    if reference is not None:
        # With an adapter, the reference is another adapter on the same base.
        ref_params = combine(computing(reference.parameters, settings.compute_dtype), frozen)
    pairs, (first, apart, used) = counts_of(arrays), microbatches
    # The critic's loss is a mean over the step's tokens, whatever the policy's aggregation is.
    tokens = jnp.sum(arrays.mask)

    summed, own = score.summed(trained.policy)
    others = trained._replace(policy=own)

    def loss(
        by: TrainableParams, sums: Parameters, zeros: Array | None, rows: StepArrays, weights: Array
    ) -> tuple[Array, ForwardOutputs]:
        policy = combine(by.policy, combine(summed, frozen))
        scores, values = score(policy, by.critic, rows, teacher, zeros, sums)
        of_reference = None if ref_params is None else score(ref_params, None, rows)[0]
        ref_logprobs = of_reference and jax.lax.stop_gradient(of_reference).logprobs
        outputs = ForwardOutputs(scores, ref_logprobs, values)
        if settings.preference is not None:
            of_pairs = Pairs.of(scores.logprobs, rows)
            total = preference_loss(settings.preference, of_pairs, pairs)
        else:
            losses, regularisers = step_losses(settings, outputs, coefficient, rows)
            total = weighted_sum(weights, losses + regularisers)
        if values is not None:
            total += jnp.sum(critic_losses(settings, values, rows)) / jnp.maximum(tokens, 1)
        for part in _of_models(settings, scores, weights, jnp.sum(rows.mask), tokens):
            total += part
        if scores.loads is not None and not settings.load_balance_coefficient:
            scores = scores._replace(loads=scores.loads._replace(probabilities=None))
        return total, outputs._replace(scores=scores)

    def body(number: Array, carry: Any) -> Any:
        total, kept = carry
        # One at a time, so that activations need the memory of one microbatch.
        index = first + number * apart
        zeros, rows = jax.tree.map(lambda array: array[index], (scores.divergences, arrays))
        given = total[1], zeros, rows, weights_MRT[index]
        (gradients, sums), outputs = _derivative(loss, others, *given)
        # Summed in float32: bfloat16 would lose what many microbatches each add a little of.
        total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total[0], gradients), sums
        return total, jax.tree.map(lambda k, f: k.at[index].set(f), kept, outputs)

    scores = score.blank(arrays.mask)
    blank = scores.logprobs
    kept = ForwardOutputs(
        scores=scores,
        ref_logprobs=None if ref_params is None else blank,
        values=None if trained.critic is None else blank,
    )
    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), (others, summed))
    # The number of iterations is an array: microbatches without rows cost nothing, and no number
    # recompiles.
    count = jnp.maximum(used - first + apart - 1, 0) // apart
    (gradients, sums), kept = jax.lax.fori_loop(0, count, body, (total, kept))
    policy = None if own is None else combine(gradients.policy, sums)
    return gradients._replace(policy=policy), kept


def _derivative(
    loss: Callable[..., Any],
    trained: TrainableParams,
    sums: Parameters,
    zeros: Array | None,
    *rows: Any,
) -> tuple[tuple[TrainableParams, Parameters], ForwardOutputs]:
    """Gradients of a loss and its outputs, with the divergences by `zeros`: see `Taught`.

    Those by `sums` are sums with what is added to them.
    """
    if zeros is None:
        return jax.grad(loss, (0, 1), has_aux=True)(trained, sums, zeros, *rows)
    by_both, outputs = jax.grad(loss, (0, 1, 2), has_aux=True)(trained, sums, zeros, *rows)
    scores = outputs.scores._replace(divergences=by_both[2])
    return by_both[:2], outputs._replace(scores=scores)


def _of_models(
    settings: StepSettings, scores: TokenScores, weights: Array, own: Array, tokens: Array
) -> Iterator[Array]:
    """Losses that no file has the numbers of: balance of experts, divergence to a teacher.

    `own` are the trained tokens of the rows, of the step's `tokens`.
    """
    if scores.loads is not None and settings.load_balance_coefficient:
        share = own / jnp.maximum(tokens, 1)
        yield settings.load_balance_coefficient * share * balance_loss(scores.loads)
    if settings.distillation is not None and scores.divergences is not None:
        yield settings.distillation.coefficient * weighted_sum(weights, scores.divergences)


def sum_ranges(parts: Sequence[Tree]) -> Tree:
    """Add up the gradients, or the forward outputs, of several ranges of a step, in their order."""
    first, *others = parts
    # In a fixed order: floating point sums depend on it, and a resumed run must end in the same
    # bits.
    for other in others:
        first = jax.tree.map(jnp.add, first, other)
    return first


class ForwardBackward:
    """The jitted forward and backward passes over a batch, for one loss.

    `template` gives the architecture; its own arrays are not read. With several `lanes` as many
    loops share the microbatches, where there are enough; see `marin_rl.cpu_streams`.
    """

    def __init__(
        self,
        template: LanguageModel,
        settings: StepSettings,
        layout: Layout = SINGLE_DEVICE,
        critic: Critic | None = None,
        *,
        lanes: int = 1,
    ) -> None:
        score = Scorer(template, settings, critic)

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
            whole = sum_ranges(outputs)
            metrics = step_metrics(settings, whole, coefficient, arrays)
            return metrics, token_measures(settings, whole, arrays)

        # Two programs: lanes each run the first, and the metrics are of what all lanes gave.
        self._gather = compiled_apart(jax.jit(gather), "the training step")
        self._measure = jax.jit(measure, out_shardings=layout.readable)
        self._lanes, self._on_mesh = lanes, layout.mesh is not None

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
        if not self._on_mesh:
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
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    critic: Critic | None = None,
    *,
    like: TrainState | None = None,
    average_decay: float | None = None,
) -> Update:
    """Return the jitted update of a state by gradients and the loss that they are of.

    The new state is where the shardings of `like` say. The state's `optimizer` and `critic` are
    donated. An update is refused where loss or gradients are not finite. Gradients of only the
    critic leave the policy as it is.
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
        metrics["updates/skipped"] = jnp.where(ok, 0.0, 1.0)
        metrics["updates/steps"] = state.step
        return state, metrics

    return _in_turn(update, like)


def _in_turn(update: Callable[..., tuple[TrainState, Metrics]], like: TrainState | None) -> Update:
    """Jit an update as a program for each array's results.

    Of one, XLA copies moments that others are still to be made of: 5 bytes a parameter.
    """

    def moved(*given: Any) -> tuple[TrainState, Metrics]:
        state, metrics = update(*given)
        return state._replace(optimizer=None, critic=None), metrics

    def squared(own: Any, beside: Any, parameters: Parameters, *given: Any) -> Any:
        state, _ = update(parameters, eqx.combine(own, beside), *given)
        return _by_moment(state.optimizer)[0]

    def averaged(own: Any, critic_state: Any, beside: Any, parameters: Any, *given: Any) -> Any:
        state, _ = update(parameters, eqx.combine(own, beside), critic_state, *given)
        return _by_moment(state.optimizer)[1], state.critic

    # Donation is by argument, so the state is passed in parts: moments and critic are donated,
    # parameters are not, for the engine may be sampling from these arrays.
    where, of_squares, of_averages = None, None, None
    if like is not None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
        where = shardings._replace(optimizer=None, critic=None), like.step.sharding
        of_squares, averages = _by_moment(shardings.optimizer)
        of_averages = averages, shardings.critic
    programs = (
        jax.jit(moved, out_shardings=where),
        jax.jit(squared, donate_argnums=0, out_shardings=of_squares),
        jax.jit(averaged, donate_argnums=(0, 1), out_shardings=of_averages),
    )
    move, square, average = (compiled_apart(each, "the update") for each in programs)

    def run(
        state: TrainState, gradients: Gradients, loss: Float[Any, ""]
    ) -> tuple[TrainState, Metrics]:
        parameters, moments, *others, critic_state = state
        given = tuple(others), gradients, loss
        state, metrics = move(parameters, moments, critic_state, *given)
        squares, averages = _by_moment(moments)
        squares = square(squares, averages, parameters, critic_state, *given)
        averages, critic_state = average(averages, critic_state, squares, parameters, *given)
        moments = eqx.combine(squares, averages)
        return state._replace(optimizer=moments, critic=critic_state), metrics

    return run


def _by_moment(moments: Any) -> tuple[Any, Any]:
    """Second moments of an optimizer's state, and the rest, with None in the place of the others.

    Of AdamW neither is made of the other.
    """

    def is_second(path: Any, _: Any) -> bool:
        return ".nu" in jax.tree_util.keystr(path)

    return eqx.partition(moments, jax.tree_util.tree_map_with_path(is_second, moments))


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
    """Return a jitted pass that trains nothing: `of_rows` of each microbatch that holds anything.

    `of_rows` takes all of the policy's parameters, the critic's or None, and rows [R, T].
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


def make_score(template: LanguageModel, settings: StepSettings) -> RowsPass:
    """Return the pass of log-probabilities of the trained tokens, in nats."""
    score = Scorer(template, settings)
    return rows_pass(settings, lambda policy, _, rows: score(policy, None, rows)[0].logprobs)


def make_score_norms(template: LanguageModel, settings: StepSettings) -> RowsPass:
    """Return the pass of the optimal token baseline: `squared_score_norms` of all rows."""

    def norms(policy: Parameters, _: Parameters | None, rows: StepArrays) -> Array:
        return squared_score_norms(policy_module(template, policy), rows, settings)

    return rows_pass(settings, norms)


def make_values(template: LanguageModel, settings: StepSettings, critic: Critic) -> RowsPass:
    def values(policy: Parameters, critic_params: Parameters | None, rows: StepArrays) -> Array:
        assert critic_params is not None, "values are a critic's"
        return critic.values(critic_params, policy_module(template, policy), rows, settings)

    return rows_pass(settings, values)

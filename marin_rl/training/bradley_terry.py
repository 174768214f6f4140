"""Reward models: the Bradley-Terry loss and its programs, and scoring with a trained model.

P(chosen beats rejected) = sigmoid(r_chosen - r_rejected), with r the number that a `ScalarModel`
gives a sequence at its last token (Bradley and Terry 1952; arXiv:2009.01325, eq. 1; the margin is
that of arXiv:2307.09288, eq. 2). Microbatches are a loop on the device, as in step.py. A reward
model with an adapter trains A and B of its trunk, and its head: `trunk/PATH:A` and `head/…`; the
base's are `trunk/PATH`. When scoring, each sequence is padded to its own power of two, in batches
of a fixed number of rows; so its reward depends on nothing but itself, not on its neighbours.

Axes: M microbatches, R rows of one (two neighbouring rows a pair), P pairs, T positions.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int32, Int64
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import PairBatch, padded
from marin_rl.batching.plan import bucket
from marin_rl.compilation import compiled_apart, device_array, set_matmul_precision
from marin_rl.config import BatchingConfig, PolicyConfig
from marin_rl.errors import CorruptObject
from marin_rl.lora.quantization import is_quantized
from marin_rl.models.module import LanguageModel
from marin_rl.rollouts.rewards import RewardIdentity, RewardModelSlot
from marin_rl.training.adapters import HEAD, trained_shapes
from marin_rl.training.compiled_step import Passes, Program, frozen_parameters, with_adapter_of
from marin_rl.training.critic import TRUNK, ScalarModel
from marin_rl.training.mesh import SINGLE_DEVICE, Layout
from marin_rl.training.model import digest_of, parameter_shapes, with_parameters
from marin_rl.training.policy_source import read_base
from marin_rl.training.state import identity_of, read_parameters, template_of
from marin_rl.training.step import Gradients
from marin_rl.training.step_metrics import Metrics
from marin_rl.training.step_types import (
    PairArrays,
    Parameters,
    Reference,
    StepRows,
    StepSettings,
    TrainableParams,
    as_array,
    in_microbatches,
)

Rewards = Callable[[Parameters, Int32[Any, "R T"], Int32[Any, "R T"]], Float[Array, " R"]]


def bradley_terry_losses(
    chosen_P: Float[Array, " P"], rejected_P: Float[Array, " P"], margins_P: Float[Array, " P"]
) -> Float[Array, " P"]:
    """-log sigmoid(r_chosen - r_rejected - margin) of every pair, in nats."""
    # log_sigmoid and not the log of a sigmoid, which is -inf for a pair that is far off.
    return -jax.nn.log_sigmoid(chosen_P - rejected_P - margins_P)


def pair_totals(
    chosen_P: Float64[np.ndarray, " P"],
    rejected_P: Float64[np.ndarray, " P"],
    margins_P: Float32[np.ndarray, " P"],
) -> dict[str, float]:
    """Loss, accuracy (a tie is wrong) and mean difference of scored pairs, in float64."""
    difference_P = chosen_P - rejected_P
    return {
        # logaddexp, since exp of a large difference would overflow.
        "loss": float(np.logaddexp(0.0, margins_P - difference_P).mean()),
        "accuracy": float((difference_P > 0).mean()),
        "margin": float(difference_P.mean()),
    }


def pair_arrays(
    batch: PairBatch, microbatch_pairs: int, pairs_max: int, layout: Layout = SINGLE_DEVICE
) -> StepRows:
    """A batch in the fixed shape of steps of up to `pairs_max` pairs.

    The rows of a microbatch are a multiple that the devices of the layout share evenly.
    """
    # A multiple of 2 for each device: no pair is split between two.
    rows = layout.whole_rows(2 * min(microbatch_pairs, pairs_max), together=2)
    microbatches = -(-2 * pairs_max // rows)
    cut = partial(in_microbatches, rows=rows, microbatches=microbatches)
    arrays = PairArrays(
        token_ids=cut(batch.token_ids, np.int32),
        segment_ids=cut(batch.inside, np.int32),
        margins=cut(np.repeat(batch.margins, 2)[:, None], np.float32),
    )
    return StepRows(arrays, -(-len(batch.token_ids) // rows))


def rewards_of(template: ScalarModel, compute_dtype: str) -> Rewards:
    """The pure function that reads the reward of every row at its last token, in float32.

    The trunk computes in `compute_dtype`, the head in float32. An empty row gets some number.
    """

    def rewards(parameters: Parameters, token_ids_RT: Array, segment_ids_RT: Array) -> Array:
        # The head stays in float32: the loss is of differences of rewards, whose digits bfloat16
        # loses.
        cast = {
            name: array
            if name.startswith(HEAD) or is_quantized(name)
            else array.astype(compute_dtype)
            for name, array in parameters.items()
        }
        positions_RT = jnp.broadcast_to(jnp.arange(token_ids_RT.shape[1]), token_ids_RT.shape)
        model = with_parameters(template, cast)
        # Positions of padding are 0, as in rows of a policy: padding is in segment 0, which sees
        # nothing.
        numbers_RT = model(token_ids_RT, segment_ids_RT, positions_RT * segment_ids_RT)
        # An empty row has no last token and is read at 0; `_pairs` gives it no weight.
        last_R = jnp.maximum(jnp.sum(segment_ids_RT, axis=1) - 1, 0)
        return jnp.take_along_axis(numbers_RT, last_R[:, None], axis=1)[:, 0]

    return rewards


class RewardProgram(Program):
    """The programs of a reward model: a scalar head on a policy's trunk, or on an adapter of it."""

    template: ScalarModel

    def _trained_template(self, template: LanguageModel) -> ScalarModel:
        return eqx.filter_eval_shape(ScalarModel.of, template)

    def forward_backward(self, settings: StepSettings) -> Passes:
        return self._passes

    @cached_property
    def _passes(self) -> Passes:
        return make_reward_passes(self.template, self._policy.compute_dtype, self.layout)

    def place_frozen(self, base: Mapping[str, Any]) -> Parameters:
        frozen = frozen_trunk(self._policy, self.template, base)
        return self.layout.place_parameters(frozen, self.template)


def frozen_trunk(
    policy: PolicyConfig, template: ScalarModel, base: Mapping[str, Any]
) -> Parameters:
    """The base of a scalar model's adapter: see `frozen_parameters`."""
    # What is neither trained nor read, the output head, would take the memory of a layer or more.
    names = parameter_shapes(template).keys() - trained_shapes(template).keys()
    frozen = {f"{TRUNK}{name}": array for name, array in frozen_parameters(policy, base).items()}
    return {name: array for name, array in frozen.items() if name in names}


def make_reward_passes(
    template: ScalarModel, compute_dtype: str, layout: Layout = SINGLE_DEVICE
) -> Passes:
    """The jitted passes of the Bradley-Terry loss.

    The loss is the mean over the pairs of a step, however they are cut into microbatches.
    """
    rewards = rewards_of(template, compute_dtype)

    def gather(
        trained: Parameters, frozen: Parameters, arrays: PairArrays, used: Array
    ) -> tuple[TrainableParams, Metrics]:
        def of_trained(parameters: Parameters, *rows: Array) -> Array:
            return rewards({**frozen, **parameters}, *rows)

        gradients, metrics = _accumulate(of_trained, trained, arrays, used)
        return layout.constrain_gradients(TrainableParams(gradients), template), metrics

    jitted = compiled_apart(jax.jit(gather), "the training step")

    def passes(
        trainable: TrainableParams,
        frozen: Parameters,
        reference: Reference | None,
        arrays: PairArrays,
        used: int,
    ) -> tuple[Gradients, Metrics, None]:
        assert trainable.policy is not None, "a reward model is trained"
        gradients, metrics = jitted(trainable.policy, frozen, arrays, as_array(used))
        return [gradients], metrics, None

    return passes


def _accumulate(
    rewards: Rewards, parameters: Parameters, arrays: PairArrays, used: Array
) -> tuple[Parameters, Metrics]:
    """The gradient of the mean loss, and the means of loss, accuracy and difference."""
    # Pairs of all microbatches: their weighted sums then add up to the step's mean.
    pairs = jnp.maximum(jnp.sum(_pairs(arrays)), 1.0)

    def loss(parameters: Parameters, rows: PairArrays) -> tuple[Array, Metrics]:
        rewards_R = rewards(parameters, rows.token_ids, rows.segment_ids)
        # Rows of a pair are neighbours: `pair_arrays` cuts microbatches between pairs only.
        chosen_P, rejected_P = rewards_R[0::2], rewards_R[1::2]
        weights_P = _pairs(rows) / pairs
        sums = {
            "loss": bradley_terry_losses(chosen_P, rejected_P, rows.margins[0::2, 0]),
            "accuracy": (chosen_P > rejected_P).astype(jnp.float32),
            "margin": chosen_P - rejected_P,
        }
        means = {name: jnp.sum(weights_P * values) for name, values in sums.items()}
        return means["loss"], means

    def body(index: Array, carry: Any) -> Any:
        rows = jax.tree.map(lambda array: array[index], arrays)
        return jax.tree.map(jnp.add, carry, jax.grad(loss, has_aux=True)(parameters, rows))

    nothing = {name: jnp.zeros((), jnp.float32) for name in ("loss", "accuracy", "margin")}
    return jax.lax.fori_loop(0, used, body, (jax.tree.map(jnp.zeros_like, parameters), nothing))


def _pairs(rows: PairArrays) -> Float[Array, "*M P"]:
    """1 for every pair, 0 for rows that fill up."""
    return (rows.segment_ids[..., 0::2, 0] > 0).astype(jnp.float32)


# Bounds of a scoring program, which bound the memory of its activations.
ROWS_MAX = 64
TOKENS_MAX = 16_384
BUCKETS = BatchingConfig()  # the default's


class SequenceScorer:
    """The compiled programs of one architecture, a fixed number of rows per padded length."""

    def __init__(self, template: ScalarModel, policy: PolicyConfig) -> None:
        set_matmul_precision(policy.compute_dtype)
        self._rewards = jax.jit(rewards_of(template, policy.compute_dtype))
        self._longest = policy.context_length

    def score(
        self, parameters: Parameters, sequences: Sequence[Int32[np.ndarray, " _"]]
    ) -> Float64[np.ndarray, " N"]:
        """The reward of each sequence, in order."""
        rewards_N = np.zeros(len(sequences), np.float64)
        for chunk, rows, length in by_length(list(map(len, sequences)), self._longest):
            # Filled up to all rows of the program, whose other rows are empty.
            token_ids, inside = padded([sequences[index] for index in chunk], rows, length)
            rewards = self._rewards(parameters, token_ids, inside.astype(np.int32))
            rewards_N[chunk] = np.asarray(rewards, np.float64)[: len(chunk)]
        return rewards_N


def by_length(
    lengths: Sequence[int], longest: int | None = None
) -> Iterator[tuple[Int64[np.ndarray, " n"], int, int]]:
    """Cut sequences into batches of one padded length: their indices, rows, and that length.

    None is padded to more than `longest`, where it is given.
    """
    padded_N = np.array([padded_length(each, longest) for each in lengths], np.int64)
    for length in np.unique(padded_N).tolist():
        # By the length only: a program of another number of rows could give other last bits.
        rows = max(1, min(ROWS_MAX, TOKENS_MAX // length))
        indices = np.flatnonzero(padded_N == length)
        for start in range(0, len(indices), rows):
            yield indices[start : start + rows], rows, length


def padded_length(tokens: int, longest: int | None = None) -> int:
    """The bucket that a sequence is padded to; never more than `longest`, such as a context."""
    length = bucket(tokens, BUCKETS)
    assert longest is None or tokens <= longest, f"{tokens} tokens, the context has {longest}"
    return length if longest is None else min(length, longest)


class LearnedReward:
    """A committed reward model in memory: a `RewardScorer`. Thread safe."""

    def __init__(self, slot: RewardModelSlot, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read and verify it. Raises InputError, CorruptObject, and what the store raises."""
        policy, adapter = slot.run.config.policy, identity_of(slot.run, slot.ref).adapter
        trunk = template_of(policy, tokenizer)
        whole = with_adapter_of(policy, trunk, adapter.modules if adapter else {})
        template = eqx.filter_eval_shape(ScalarModel.of, whole)
        parameters = read_parameters(slot.run, slot.ref, trained_shapes(template))
        own, expected = digest_of(parameters), slot.identity.parameters_digest
        digest = adapter.policy_digest(own) if adapter else own
        if digest != expected:
            raise CorruptObject(
                f"{slot.run.store.url_of(slot.ref.slot)}: expected parameters with digest "
                f"{expected}, found {digest}: its manifest speaks of other weights"
            )
        self.identity: RewardIdentity = slot.identity
        base = read_base(slot.run, adapter.base_digest, trunk) if adapter else {}
        arrays = frozen_trunk(policy, template, base) | parameters
        self._parameters = {name: device_array(array) for name, array in arrays.items()}
        self._scorer = SequenceScorer(template, policy)
        self._lock = threading.Lock()

    def score(self, sequences: Sequence[Int32[np.ndarray, " _"]]) -> Float64[np.ndarray, " N"]:
        """The raw reward of each sequence of token ids, read at its last token."""
        with self._lock:
            return self._scorer.score(self._parameters, sequences)

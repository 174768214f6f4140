"""Running a model over given tokens: log-probabilities, entropies, values; all in chunks.

The activations before are in `hidden_states`. What each token does by itself
at the end, the last MLP, the final norm and the logits, is computed only where the mask is, a chunk
of tokens at a time and again in the backward pass: prompts cost less, and an array of tokens by
vocabulary never exists. On a mesh each device does so for the rows that it has.

Axes: B sequences, T positions, N flattened tokens, C tokens of a chunk, E embedding, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import filter_jit
from haliax.partitioning import physical_axis_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from marin_rl.config import DivergenceConfig
from marin_rl.config.training import SHARING
from marin_rl.models.axes import CONTEXT
from marin_rl.models.block import Norm, after_mlp, logits_of, normed
from marin_rl.models.experts import ExpertLoads
from marin_rl.models.module import DecoderLayer, LanguageModel, TrainedLinears
from marin_rl.models.spec import Spec
from marin_rl.training.attention import on_tpu
from marin_rl.training.context import (
    context_size,
    in_order,
    in_pieces,
    on_device,
    places_of,
)
from marin_rl.training.hidden_states import states_before_last_mlp
from marin_rl.training.losses import divergence, scores_of_logits

# A chunk's logits are this many rows of V floats: about 150 MB for a vocabulary of 150,000.
TOKENS_PER_CHUNK = 256
# On a GPU, where adding a chunk's gradient of the head to the sum costs more than the chunk itself.
TOKENS_PER_CHUNK_GPU = 2048

Head = Callable[[Float[Array, "*N E"]], Float[Array, "*N"]]


class TokenScores(NamedTuple):
    """Logprobs and entropies of each token given those before it; 0 where not requested.

    `loads` are those of experts by the requested tokens, `divergences` those to a teacher, in nats.
    """

    logprobs: Float[Array, "B T"]
    entropies: Float[Array, "B T"]
    loads: ExpertLoads | None = None
    divergences: Float[Array, "B T"] | None = None


class TeacherRows(NamedTuple):
    """Rows that a teacher reads in place of the policy's: the same but for longer prompts.

    `places` are where the tokens of the policy's rows are in them, from the last one of each prompt
    on; those of earlier tokens are arbitrary.
    """

    token_ids: Int[Any, "*M R S"]
    segment_ids: Int[Any, "*M R S"]
    positions: Int[Any, "*M R S"]
    places: Int[Any, "*M R T"]


class Taught(NamedTuple):
    """A teacher of the policy that is scored, and how far apart they are counted to be.

    `rows`: what it reads; None: the policy's. `zeros` are needed within a derivative: that of any
    loss by them is the divergences.
    """

    model: LanguageModel
    divergence: DivergenceConfig
    rows: TeacherRows | None = None
    zeros: Float[Array, "B T"] | None = None


class Packing(NamedTuple):
    """Packing of rows.

    `packed_rows`: with several sequences, so that most of a row is out of most of its tokens'
    sight. Without it a row is one sequence, followed by padding: attention on a GPU counts on that,
    and a backend refuses other rows. `shared_prompts`: a segment that begins at a position
    above 0 continues the last segment before it that begins at 0. `chunks` are what the rows of a
    small microbatch are cut into, where only one of so many tokens is trained on.
    """

    packed_rows: bool = False
    shared_prompts: bool = False
    chunks: int = 1


ALONE = Packing()


def packing_of(layout: str) -> Packing:
    return Packing(packed_rows=layout != "none", shared_prompts=layout in SHARING)


def token_logprobs(
    model: LanguageModel,
    token_ids_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    temperature: float = 1.0,
    packing: Packing = ALONE,
    taught: Taught | None = None,
) -> TokenScores:
    """Log-probability (nats) of each masked token given its predecessors, and the entropy there.

    Both are of softmax(logits / temperature), in float32, and differentiable; both are 0 off the
    mask. A token sees itself and what precedes it in its own segment; with `shared_prompts`, a
    segment that begins at a position above 0 also sees the one that it continues, and its first
    token is predicted from that one's last. The mask must be False where a segment begins
    otherwise, for nothing predicts a first token. `taught` adds the divergence of the teacher's
    distribution, which has no gradient, and the policy's at every masked token. Within a derivative
    they are 0, with the right gradients: see `_scores_where`.
    """
    rows = token_ids_BT, segment_ids_BT, positions_BT, mask_BT
    (logprobs_BT, entropies_BT, *divergences), loads = _scored(
        model, rows, temperature=temperature, packing=packing, taught=taught
    )
    return TokenScores(logprobs_BT, entropies_BT, loads, *divergences)


def token_values(
    model: LanguageModel, head: Head, *rows: Array, packing: Packing = ALONE
) -> Float[Array, "B T"]:
    """Values by `head` of the states that masked tokens are predicted from; 0 off the mask.

    That is the value of a token's past, before it is chosen. Rows are as in `token_logprobs`.
    """
    (values_BT,), _ = _scored(model, rows, head, words=False, packing=packing)
    return values_BT


def token_logprobs_and_values(
    model: LanguageModel,
    head: Head,
    *rows: Array,
    temperature: float = 1.0,
    packing: Packing = ALONE,
) -> tuple[TokenScores, Float[Array, "B T"]]:
    """`token_logprobs` and `token_values` of one model, from one pass."""
    (logprobs_BT, entropies_BT, values_BT), loads = _scored(
        model, rows, head, temperature=temperature, packing=packing
    )
    return TokenScores(logprobs_BT, entropies_BT, loads), values_BT


def _scored(
    model: LanguageModel,
    rows: tuple[Array, ...],
    head: Head | None = None,
    *,
    words: bool = True,
    temperature: float = 1.0,
    packing: Packing = ALONE,
    taught: Taught | None = None,
) -> tuple[tuple[Array, ...], ExpertLoads | None]:
    """Score the masked tokens of rows (ids, segments, positions, mask).

    Returns log-probability and entropy if `words`, then the divergence if `taught`, then the scalar
    head's output if there is one; and loads of experts by these tokens.
    """
    token_ids_BT, segment_ids_BT, positions_BT, mask_BT = rows
    sources_BT, _ = _predecessors(segment_ids_BT, positions_BT, packing.shared_prompts)

    def states_of(
        model: LanguageModel, rows: tuple[Array, ...]
    ) -> tuple[Array, DecoderLayer, ExpertLoads | None]:
        token_ids_BT, segments_BT, positions_BT, counted_BT = rows
        _, prompts_BT = _predecessors(segments_BT, positions_BT, packing.shared_prompts)
        if packing.packed_rows and prompts_BT is None and not on_tpu():
            # Plain attention computes all T x T pairs of a packed row; attention by blocks computes
            # only those in sight.
            prompts_BT = segments_BT
        return states_before_last_mlp(
            model,
            token_ids_BT,
            segments_BT,
            positions_BT,
            prompts_BT,
            counted_BT,
            alone=packing == ALONE,
        )

    states_BTE, last, loads = states_of(model, rows)
    tail = _Tail.of(model, last, head, words=words)
    if taught is not None:
        read, other = rows, taught.rows
        if other is not None:
            read = other.token_ids, other.segment_ids, other.positions, other.segment_ids > 0
        theirs_BTE, theirs, _ = jax.lax.stop_gradient(states_of(taught.model, read))
        if other is not None:
            n = context_size()
            theirs_BSE = in_order(theirs_BTE, n)
            found_BTE = jnp.take_along_axis(theirs_BSE, other.places[..., None], axis=1)
            theirs_BTE = in_pieces(found_BTE, n)
        # Side by side, as all that predicts a token.
        states_BTE = jnp.concatenate([states_BTE, theirs_BTE], axis=-1)
        teacher = _Tail.of(taught.model, theirs)
        tail = dataclasses.replace(tail, teacher=teacher, divergence=taught.divergence)
    # The axes of the mesh that rows are spread over. One of size 1 spreads nothing: left out, the
    # program is the same as on a single device.
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = tuple(axis for axis in physical_axis_name("batch") or () if sizes.get(axis, 1) > 1)
    spread = Spread(axes, context_size(), token_ids_BT.shape[1], packing.chunks)
    # Flat, so that chunks run on over the ends of rows and only the last one has to be filled up.
    flat: Any = _scores_where(
        states_BTE if spread.context > 1 else states_BTE.reshape(-1, states_BTE.shape[-1]),
        tail,
        token_ids_BT.reshape(-1),
        sources_BT.reshape(-1),
        mask_BT.reshape(-1),
        None if taught is None or taught.zeros is None else taught.zeros.reshape(-1),
        temperature,
        spread,
    )
    return tuple(scores.reshape(token_ids_BT.shape) for scores in flat), loads


def final_states(
    model: LanguageModel,
    token_ids_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
) -> Float[Array, "B T E"]:
    """Final hidden states of every token, the output head's input; for short rows, or few.

    A token sees itself and what precedes it in its own segment (0 is padding).
    """
    rows = token_ids_BT, segment_ids_BT, positions_BT
    states_BTE, last, _ = states_before_last_mlp(model, *rows, None)
    # Of all positions, unlike `_scores_where`: a reward model reads a token that no mask has.
    final_BTE = _Tail.of(model, last).final_states(states_BTE, ("batch", "position"))
    return in_order(final_BTE, context_size())


def _predecessors(
    segment_ids_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    shared_prompts: bool,  # noqa: FBT001
) -> tuple[Int[Array, "B T"], Int[Array, "B T"] | None]:
    """Flat index of each token's predecessor, and the segment of its prompt.

    The latter only where prompts are shared, and its own segment where it has no prompt apart.
    """
    B, T = segment_ids_BT.shape
    index_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    rows_B1 = T * jnp.arange(B, dtype=jnp.int32)[:, None]
    if not shared_prompts:
        # Nothing precedes position 0. Any index in range does, for the mask is False there.
        return rows_B1 + jnp.maximum(index_BT - 1, 0), None
    # -1 is no segment's id, so that position 0 always begins one.
    before_BT = jnp.pad(segment_ids_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    begins_BT = segment_ids_BT != before_BT
    roots_BT = jnp.where(begins_BT & (positions_BT == 0), index_BT, 0)
    # Indexes of roots ascend, so a running maximum carries the last one forward.
    root_BT = jax.lax.cummax(roots_BT, axis=1)
    prompts_BT = jnp.take_along_axis(segment_ids_BT, root_BT, axis=1)
    # A completion's positions continue its prompt's, which count from the root.
    continues_BT = begins_BT & (positions_BT > 0)
    sources_BT = jnp.where(continues_BT, root_BT + positions_BT - 1, jnp.maximum(index_BT - 1, 0))
    return rows_B1 + sources_BT, prompts_BT


class _Tail(eqx.Module):
    """Computation of each token by itself: the last MLP, the final norm, and the heads.

    `words` are the output head's weights, `scalar` a head that gives a number; either may be None.
    With a `teacher` the states are both models', side by side.
    """

    spec: Spec = eqx.field(static=True)
    layer: DecoderLayer
    final_norm: Norm
    words: Float[Array, "V E"] | None
    scalar: Head | None = None
    teacher: "_Tail | None" = None
    divergence: DivergenceConfig | None = eqx.field(static=True, default=None)

    @property
    def outputs(self) -> int:
        heads = self.scalar, self.teacher
        return 2 * (self.words is not None) + sum(head is not None for head in heads)

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        last: DecoderLayer,
        scalar: Head | None = None,
        *,
        words: bool = True,
    ) -> "_Tail":
        # Without attention, whose gradients would be carried along as zeros.
        layer = dataclasses.replace(last, self_attn=None, input_layernorm=None)
        if model.spec.post:
            layer = dataclasses.replace(layer, post_attention_layernorm=None)
        return cls(model.spec, layer, model.final_norm, model.head if words else None, scalar)

    def final_states(self, states: Float[Array, "*N E"], axes: tuple[str, ...]) -> Array:
        states = after_mlp(self.spec, TrainedLinears(self.spec, self.layer, axes), states)
        return normed(self.spec, self.final_norm, states)


def _tail_scores(
    tail: _Tail, states_CE: Float[Array, "C E"], targets_C: Int[Array, " C"], temperature: float
) -> tuple[Float[Array, " C"], ...]:
    """Score every state of a chunk against its target.

    Returns log-probability and entropy if there are `words`, then the divergence to a teacher and
    the scalar head's output if there are these.
    """
    both_CE = states_CE
    if tail.teacher is not None:
        states_CE = both_CE[:, : tail.spec.width]
    states_CE = tail.final_states(states_CE, ("token",))
    numbers = () if tail.scalar is None else (tail.scalar(states_CE),)
    if tail.words is None:
        return numbers
    logits_CV = logits_of(tail.spec, tail.words, states_CE)
    if (teacher := tail.teacher) is not None:
        assert teacher.words is not None, "a teacher gives distributions"
        assert tail.divergence is not None, "it comes with a teacher"
        theirs_CV = logits_of(
            teacher.spec,
            teacher.words,
            teacher.final_states(both_CE[:, tail.spec.width :], ("token",)),
        )
        numbers = divergence(tail.divergence, theirs_CV, logits_CV), *numbers
    return *scores_of_logits(logits_CV, targets_C, temperature), *numbers


class Spread(NamedTuple):
    """Layout of rows on a mesh: the axes that they are spread over, and devices that share one.

    Rows have `length` positions; those that `context` devices share are in pieces. See `Packing`
    for `chunks`.
    """

    rows: tuple[str, ...]
    context: int
    length: int
    chunks: int

    @property
    def states(self) -> PartitionSpec:
        context = (CONTEXT,) if self.context > 1 else ()
        return PartitionSpec(self.rows, *context)

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.rows, *([CONTEXT] if self.context > 1 else []))


class _Own(NamedTuple):
    """Targets that a device scores: those that one of its own states predicts, flat."""

    states_NE: Array
    sources_N: Array
    mask_N: Array


def _own(spread: Spread, states: Array, sources_N: Array, mask_N: Array) -> _Own:
    """Turn flat indexes into all states into indexes into this device's."""
    if spread.rows:
        sources_N = sources_N - jax.lax.axis_index(spread.rows) * sources_N.size
    if spread.context > 1:
        device_N, sources_N = places_of(sources_N, spread.length, spread.context)
        mask_N = mask_N & (device_N == on_device())
    return _Own(states.reshape(-1, states.shape[-1]), sources_N, mask_N)


# JAX has no reverse derivative of a loop whose length depends on data: it is written out below.
@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _scores_where(
    states: Float[Array, "... E"],
    tail: _Tail,
    targets_N: Int[Array, " N"],
    sources_N: Int[Array, " N"],
    mask_N: Bool[Array, " N"],
    _zeros_N: Float[Array, " N"] | None,
    temperature: float,
    spread: Spread,
) -> tuple[Float[Array, " N"], ...]:
    """Scores of the masked targets, each from the state that predicts it; 0 elsewhere.

    Masked tokens are brought to the front, and a loop of as many chunks as they fill runs over
    them; the backward pass computes a chunk again instead of keeping it. Each device of a mesh does
    this for its own rows, and of rows that several share for what its own states predict. States
    are [N, E], or [B, T, E] in pieces.

    A teacher's logits would be computed again too. So what runs forward within a derivative leaves
    the teacher out, and gives 0 in the place of divergences; the backward pass has to compute them
    anyway, and returns them as the derivative by `_zeros_N`, whatever the loss is.
    """

    def score(
        tail: _Tail, states: Array, targets_N: Array, sources_N: Array, mask_N: Array
    ) -> tuple[Array, ...]:
        states_NE, sources_N, mask_N = _own(spread, states, sources_N, mask_N)
        order_N, chunks, chunk = _masked_first(mask_N, spread)

        def body(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            rows = jax.lax.dynamic_slice_in_dim(order_N, index * chunk, chunk)
            scores = _tail_scores(tail, states_NE[sources_N[rows]], targets_N[rows], temperature)
            return tuple(kept.at[rows].set(s) for kept, s in zip(carry, scores, strict=True))

        # In float32 whatever is computed in: these are the log-probabilities that ratios are made
        # of.
        zero = jnp.zeros(mask_N.shape, jnp.float32)
        scores = jax.lax.fori_loop(0, chunks, body, (zero,) * tail.outputs)
        # The last chunk may reach past the masked tokens, and scores others too.
        scores = tuple(jnp.where(mask_N, scores_N, 0.0) for scores_N in scores)
        # One of the devices that share a row has a score, the others 0.
        return jax.lax.psum(scores, CONTEXT) if spread.context > 1 else scores

    run = _on_each_device(score, spread, PartitionSpec(spread.rows))
    return run(tail, states, targets_N, sources_N, mask_N)


def _on_each_device(run: Callable[..., Any], spread: Spread, results: Any) -> Callable[..., Any]:
    """`run` of the whole tail and, along the axes of the mesh, each device's part of the rest.

    Of the rest states come first. `results` are the partition specs of its results. XLA by itself
    would have every device compute the chunks of all. It shares out a tensor axis, within `run`.
    """
    if not spread.axes:
        return run

    def spread_out(tail: Any, states: Array, *arrays: Any) -> Any:
        parts = spread.states, *[PartitionSpec(spread.rows)] * len(arrays)
        specs: dict[str, Any] = {"in_specs": (PartitionSpec(), *parts), "out_specs": results}
        names = set(spread.axes)
        run_apart = jax.shard_map(run, **specs, axis_names=names, check_vma=False)
        return run_apart(tail, states, *arrays)

    return spread_out


def _masked_first(mask_N: Bool[Array, " N"], spread: Spread) -> tuple[Array, Array, int]:
    """An order that puts masked entries first, the number of chunks they fill, and its size.

    The number is the largest of all devices: what a tensor axis exchanges within a chunk
    needs all devices, and one that is done sooner would only wait.
    """
    size, axes = mask_N.shape[0], spread.axes
    on_gpu = jax.default_backend() == "gpu"
    most = TOKENS_PER_CHUNK_GPU if on_gpu else TOKENS_PER_CHUNK
    chunk = min(most, -(-size // spread.chunks))
    # Stable, so that only the mask decides the order in which gradients are summed.
    order_N = jnp.argsort(~mask_N, stable=True).astype(jnp.int32)
    # The last chunk is filled up with an index past the end: reads give 0, writes are dropped.
    order_N = jnp.pad(order_N, (0, -size % chunk), constant_values=size)
    chunks = (jnp.sum(mask_N) + chunk - 1) // chunk
    return order_N, jax.lax.pmax(chunks, axes) if axes else chunks, chunk


def _scores_forward(
    states: Any,
    tail: Any,
    targets_N: Any,
    sources_N: Any,
    mask_N: Any,
    _zeros_N: Any,
    temperature: float,
    spread: Spread,
) -> tuple[Any, Any]:
    # With symbolic zeros every leaf says whether a derivative by it is wanted.
    primals = states, tail, targets_N, sources_N, mask_N
    rows: Any = custom_vjp_primal_tree_values(primals)
    wanted = tuple(bool(primal.perturbed) for primal in jax.tree.leaves(tail))
    # Only the arguments are kept: a chunk's logits, [C, V], are computed again.
    run: Any = _scores_where
    if rows[1].teacher is None:
        scores = run(*rows, None, temperature, spread)
    else:
        width, alone = rows[1].spec.width, dataclasses.replace(rows[1], teacher=None)
        scores = run(rows[0][..., :width], alone, *rows[2:], None, temperature, spread)
        scores = *scores[:2], jnp.zeros_like(scores[0]), *scores[2:]
    return scores, (rows, _Static(wanted, _zeros_N is not None))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """Facts for the backward pass that are known when it is compiled."""

    wanted: tuple[bool, ...]  # derivatives by the leaves of the tail
    divergences: bool


def _scores_backward(
    temperature: float, spread: Spread, saved: Any, gradients: tuple[Any, ...]
) -> Any:
    (states, tail, targets_N, sources_N, mask_N), static = saved
    leaves, structure = jax.tree.flatten(tail)
    # A scan over chunks computes what it carries, wanted or not, and the gradient of a head that is
    # frozen would be its largest part: such leaves are no argument of what is differentiated.
    trained = [leaf for leaf, wanted in zip(leaves, static.wanted, strict=True) if wanted]
    # An output that the loss does not use comes as a symbolic zero, which vjp cannot take.
    gradients = tuple(
        jnp.zeros(g.shape, jnp.float32) if isinstance(g, SymbolicZero) else g for g in gradients
    )

    def whole(trained: list[Array], leaves: list[Any]) -> Any:
        own = iter(trained)
        pairs = zip(leaves, static.wanted, strict=True)
        return structure.unflatten([next(own) if wanted else leaf for leaf, wanted in pairs])

    def gradient(
        tail: Any,
        states: Array,
        targets_N: Array,
        sources_N: Array,
        mask_N: Array,
        gradients: tuple[Array, ...],
    ) -> tuple[Array, list[Array], list[Array]]:
        leaves, trained = tail
        states_NE, sources_N, mask_N = _own(spread, states, sources_N, mask_N)
        order_N, chunks, chunk = _masked_first(mask_N, spread)
        # The forward pass returned a constant 0 off the mask: no gradient may pass there.
        by_scores_N = tuple(jnp.where(mask_N, gradient, 0.0) for gradient in gradients)

        def body(index: Array, carry: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
            by_states_NE, by_tail, apart = carry
            rows = jax.lax.dynamic_slice_in_dim(order_N, index * chunk, chunk)
            by_scores_C = tuple(g.at[rows].get(mode="fill", fill_value=0) for g in by_scores_N)

            def scores(trained: list[Array], states_CE: Array) -> tuple[Array, ...]:
                return _tail_scores(whole(trained, leaves), states_CE, targets_N[rows], temperature)

            sources = sources_N[rows]
            values, pull = jax.vjp(scores, trained, states_NE[sources])
            by_tail_C, by_states_CE = pull(by_scores_C)
            by_tail = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), by_tail, by_tail_C)
            apart = [each.at[rows].set(values[2]) for each in apart]
            # several completions may be predicted from the last state of one prompt
            return by_states_NE.at[sources].add(by_states_CE), by_tail, apart

        # Summed over chunks in float32: bfloat16 would round small gradients away next to a large
        # sum.
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
        apart = [jnp.zeros(mask_N.shape, jnp.float32)] * static.divergences
        start = (jnp.zeros_like(states_NE), nothing, apart)
        by_states_NE, by_tail, apart = jax.lax.fori_loop(0, chunks, body, start)
        if spread.axes:
            by_tail = jax.lax.psum(by_tail, spread.axes)  # before it is rounded
        by_tail = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), by_tail, trained)
        apart = [jnp.where(mask_N, each, 0.0) for each in apart]
        if spread.context > 1:
            apart = jax.lax.psum(apart, CONTEXT)
        return by_states_NE.reshape(states.shape), by_tail, apart

    specs = spread.states, PartitionSpec(), PartitionSpec(spread.rows)
    run = _on_each_device(gradient, spread, specs)
    arrays = states, targets_N, sources_N, mask_N, gradients
    by_states, by_trained, apart = run((leaves, trained), *arrays)
    own = iter(by_trained)
    by_tail = structure.unflatten([next(own) if wanted else None for wanted in static.wanted])
    # Targets, sources and mask are integers and flags, which have no gradient.
    return by_states, by_tail, None, None, None, apart[0] if apart else None


_scores_where.defvjp(_scores_forward, _scores_backward, symbolic_zeros=True)


# ---------------------------------------------------------------- samples of one prompt

LENGTH_STEP = 64


def sequence_logprobs(
    model: LanguageModel,
    prompt: Int32[np.ndarray, " P"],
    samples: Sequence[Int32[np.ndarray, " _"]],
    temperature: float,
) -> Float32[np.ndarray, " N"]:
    """The trainer's log-probability of each token of the samples, one sample after the other.

    For comparisons with an engine's.
    """
    rows = _rows_of(prompt, samples)
    return np.asarray(sequence_scores(model, *rows, temperature))[rows[2] > 0]


def compile_sequence_logprobs(
    model: LanguageModel, prompt: Any, sample: Any, temperature: float
) -> None:
    """Compile the program of `sequence_logprobs` for a sample of this length."""
    jitted: Any = sequence_scores
    jitted.lower(model, *_rows_of(prompt, [sample]), temperature).compile()


def _rows_of(
    prompt: Int32[np.ndarray, " P"], samples: Sequence[Int32[np.ndarray, " _"]]
) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]:
    """Ids, segments and mask of a prompt with each of its samples."""
    longest = max(map(len, samples))
    token_ids = np.zeros((len(samples), rounded_up(len(prompt) + longest)), np.int32)
    mask, segments = np.zeros_like(token_ids), np.zeros_like(token_ids)
    for row, sampled in enumerate(samples):
        used = len(prompt) + len(sampled)
        token_ids[row, :used] = np.concatenate([prompt, sampled])
        mask[row, len(prompt) : used] = 1
        segments[row, :used] = 1
    return token_ids, segments, mask


def rounded_up(length: int) -> int:
    """Few lengths, so that few programs are compiled."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


@filter_jit
def sequence_scores(
    model: LanguageModel,
    token_ids_BT: Int[Array | np.ndarray, "B T"],
    segment_ids_BT: Int[Array | np.ndarray, "B T"],
    mask_BT: Int[Array | np.ndarray, "B T"],
    temperature: float,
) -> Float[Array, "B T"]:
    """The program of `sequence_logprobs`."""
    positions = jnp.arange(token_ids_BT.shape[1], dtype=jnp.int32)
    positions_BT = jnp.broadcast_to(positions, token_ids_BT.shape)
    ids_BT, segments_BT = jnp.asarray(token_ids_BT), jnp.asarray(segment_ids_BT)
    rows = ids_BT, segments_BT, positions_BT, jnp.asarray(mask_BT) > 0
    return token_logprobs(model, *rows, temperature=temperature).logprobs

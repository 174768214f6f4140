"""Running a model over given tokens: log-probabilities and entropies, differentiable and chunked.

The activations are those of Levanter's own layers. What each token does by itself at the end, the
last MLP, the final norm and the logits, is computed only where the mask is, a chunk of tokens at a
time and again in the backward pass: prompts cost less, and an array of tokens by vocabulary never
exists.

Axes: B sequences, T positions, N flattened tokens, C tokens of a chunk, E embedding, V vocabulary.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, cast

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from jaxtyping import Array, Bool, Float, Int
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaLMHeadModel
from levanter.models.lm_model import LmHeadModel

TOKENS_PER_CHUNK = 256
UNROLLED_LAYERS_MAX = 8


class TokenScores(NamedTuple):
    """What the model thinks of each token given those before it; 0 where nothing was asked for."""

    logprobs: Float[Array, "B T"]
    entropies: Float[Array, "B T"]


def token_logprobs(
    model: LmHeadModel,
    token_ids_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    temperature: float = 1.0,
) -> TokenScores:
    """Log-probability (nats) of each masked token given its predecessors, and the entropy there.

    Both are of softmax(logits / temperature), in float32, and differentiable; both are 0 off the
    mask. A token sees itself and what precedes it in its own segment. The mask must be False where
    a segment begins, for nothing predicts a first token.
    """
    llama = cast(LlamaLMHeadModel, model)
    states_BTE = _before_last_mlp(llama, token_ids_BT, segment_ids_BT, positions_BT)
    # Position t predicts token t + 1; rolling instead of slicing keeps the shapes round.
    flat: Any = _scores_where(
        states_BTE.reshape(-1, states_BTE.shape[-1]),
        _Tail.of(llama),
        jnp.roll(token_ids_BT, -1, axis=1).reshape(-1),
        jnp.roll(mask_BT, -1, axis=1).reshape(-1),
        temperature,
    )
    return TokenScores(*(jnp.roll(s.reshape(token_ids_BT.shape), 1, axis=1) for s in flat))


def _before_last_mlp(
    model: LlamaLMHeadModel,
    token_ids_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
) -> Float[Array, "B T E"]:
    """Levanter's activations, up to where positions stop exchanging anything."""
    batch = Axis("batch", token_ids_BT.shape[0])
    position = Axis("position", token_ids_BT.shape[1])
    named = partial(hax.named, axis=(batch, position))
    mask = AttentionMask.causal().with_segment_ids(named(segment_ids_BT))
    positions = named(positions_BT)
    states = model.embeddings.embed(named(token_ids_BT))
    *body, last = _blocks(model)
    for block in body:
        states = block(states, mask, pos_ids=positions)
    seen = last.self_attn(last.input_layernorm(states), mask, pos_ids=positions)
    return (states + seen).rearrange((batch, position, model.Embed)).array


def _blocks(model: LlamaLMHeadModel) -> list[Any]:
    """What to run one after the other; all but the last may be many layers in one scan.

    Against a scan, running few layers one after the other spares a CPU 8 %; a scan of many
    spares the compiler minutes.
    """
    layers: Any = model.transformer.layers
    count = model.config.num_layers
    # To wait for the last layer is what makes it possible to skip most of it.
    last = layers.get_layer(count - 1)
    if count <= UNROLLED_LAYERS_MAX and layers.gradient_checkpointing.disable:
        return list(layers.unstacked())
    block = layers.Block
    rest = hax.tree_util.tree_map(lambda leaf: leaf[block, : count - 1], layers.stacked)
    shorter = dataclasses.replace(layers, stacked=rest, Block=block.resize(count - 1))
    return [partial(_fold, shorter), last]


def _fold(layers: Any, states: Any, mask: AttentionMask, *, pos_ids: Any) -> Any:
    return layers.fold(states, mask=mask, key=None, pos_ids=pos_ids)


class _Tail(NamedTuple):
    """What is computed for each token by itself: the last MLP, the final norm, the head."""

    norm: Any
    mlp: Any
    final_norm: Any
    head: Float[Array, "V E"]

    @classmethod
    def of(cls, model: LlamaLMHeadModel) -> "_Tail":
        """The tail of a model, as references to its arrays."""
        layers: Any = model.transformer.layers
        last = layers.get_layer(model.config.num_layers - 1)
        final_norm, head = model.transformer.norm, model.get_lm_head().array
        return cls(last.post_attention_layernorm, last.mlp, final_norm, head)


def _tail_scores(
    tail: _Tail, states_CE: Float[Array, "C E"], targets_C: Int[Array, " C"], temperature: float
) -> tuple[Float[Array, " C"], Float[Array, " C"]]:
    """Log-probability of the target and entropy of the prediction of every state of a chunk."""
    states = hax.named(states_CE, ("token", "embed"))
    states = tail.final_norm(states + tail.mlp(tail.norm(states)))
    logits_CV = jnp.einsum("ce,ve->cv", states.array, tail.head, preferred_element_type=jnp.float32)
    logp_CV = jax.nn.log_softmax(logits_CV / temperature, axis=-1)
    logprobs_C = jnp.take_along_axis(logp_CV, targets_C[:, None], axis=1)[:, 0]
    return logprobs_C, -jnp.sum(jnp.exp(logp_CV) * logp_CV, axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scores_where(
    states_NE: Float[Array, "N E"],
    tail: _Tail,
    targets_N: Int[Array, " N"],
    mask_N: Bool[Array, " N"],
    temperature: float,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """`_tail_scores` of the masked states, 0 elsewhere.

    Masked states are brought to the front, and a loop of as many chunks as they fill runs over
    them; the backward pass computes a chunk again instead of keeping it.
    """
    order_N, chunks, chunk = _masked_first(mask_N)

    def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = jax.lax.dynamic_slice_in_dim(order_N, index * chunk, chunk)
        found = _tail_scores(tail, states_NE[rows], targets_N[rows], temperature)
        logprobs_N, entropies_N = (
            kept.at[rows].set(f) for kept, f in zip(carry, found, strict=True)
        )
        return logprobs_N, entropies_N

    zero = jnp.zeros(mask_N.shape, jnp.float32)
    logprobs_N, entropies_N = jax.lax.fori_loop(0, chunks, body, (zero, zero))
    return jnp.where(mask_N, logprobs_N, 0.0), jnp.where(mask_N, entropies_N, 0.0)


def _masked_first(mask_N: Bool[Array, " N"]) -> tuple[Array, Array, int]:
    """An order that puts masked entries first, the number of chunks they fill, and its size."""
    size = mask_N.shape[0]
    chunk = min(TOKENS_PER_CHUNK, size)
    order_N = jnp.argsort(~mask_N, stable=True).astype(jnp.int32)
    # The last chunk is filled up with an index past the end: reads give 0, writes are dropped.
    order_N = jnp.pad(order_N, (0, -size % chunk), constant_values=size)
    return order_N, (jnp.sum(mask_N) + chunk - 1) // chunk, chunk


def _scores_forward(
    states_NE: Array, tail: _Tail, targets_N: Array, mask_N: Array, temperature: float
) -> tuple[Any, Any]:
    scores: Any = _scores_where(states_NE, tail, targets_N, mask_N, temperature)
    return scores, (states_NE, tail, targets_N, mask_N)


def _scores_backward(temperature: float, saved: Any, gradients: tuple[Array, Array]) -> Any:
    states_NE, tail, targets_N, mask_N = saved
    order_N, chunks, chunk = _masked_first(mask_N)
    by_scores_N = tuple(jnp.where(mask_N, gradient, 0.0) for gradient in gradients)

    def body(index: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        by_states_NE, by_tail = carry
        rows = jax.lax.dynamic_slice_in_dim(order_N, index * chunk, chunk)
        by_scores_C = tuple(g.at[rows].get(mode="fill", fill_value=0) for g in by_scores_N)

        def scores(tail: _Tail, states_CE: Array) -> tuple[Array, Array]:
            return _tail_scores(tail, states_CE, targets_N[rows], temperature)

        _, pull = jax.vjp(scores, tail, states_NE[rows])
        by_tail_C, by_states_CE = pull(by_scores_C)
        by_tail = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), by_tail, by_tail_C)
        return by_states_NE.at[rows].set(by_states_CE), by_tail

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), tail)
    start = (jnp.zeros_like(states_NE), nothing)
    by_states_NE, by_tail = jax.lax.fori_loop(0, chunks, body, start)
    by_tail = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), by_tail, tail)
    return by_states_NE, by_tail, None, None


_scores_where.defvjp(_scores_forward, _scores_backward)

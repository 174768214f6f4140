"""Attention of the trainer: over all pairs, and over the blocks in sight.

Tokens of several sequences are cut into blocks of positions (`attend`). The blocks of keys that
a block of queries sees are determined once for all layers; attention then takes one of them after
the other, for all blocks of queries together, with a running maximum and sum (FlashAttention,
arXiv:2205.14135, algorithm 1). Time and memory so go with what is seen, not with the square of the
row. The backward pass computes the weights again (ibid., algorithm 4). On an NVIDIA GPU a kernel
does the same for models that compute in 16 bits (`models.fused_attention`). Visibility between
tokens is defined in logprobs.py.

Axes: B rows, T positions, N blocks of queries, C positions of one (M and D: those of keys), K key
heads, G query heads of each, Q = G times C, H head size.
"""

import importlib
from functools import partial
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marin_rl.models.block import MASKED, capped, scaled, softmax
from marin_rl.models.spec import Spec

# Larger blocks take fewer iterations, smaller ones see less that is out of sight. With prompts of
# 32 and completions of 64 in rows of 544 a step took 11 % less CPU time by the small ones, with
# prompts of 512 in rows of 1,024 it took 7 % more.
POSITIONS_PER_BLOCK = 64
SHORT_ROW_POSITIONS_MAX, POSITIONS_PER_SHORT_BLOCK = 576, 32


def attend_plainly(
    query_BTKGH: Float[Array, "B T K G H"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    seen_BTT: Bool[Array, "B T T"],
    spec: Spec,
    sinks_KG: Float[Array, "K G"] | None = None,
) -> Float[Array, "B T K G H"]:
    """Softmax attention over the pairs that are seen, with an array of all."""
    query_BKGTH = scaled(spec, query_BTKGH.transpose(0, 2, 3, 1, 4))
    keys_BKTH, values_BKTH = (each.swapaxes(1, 2) for each in (keys_BTKH, values_BTKH))
    # In the dtype of the states: in 16 bits the table, and its softmax, take half as much memory.
    scores = jnp.einsum("bkgth,bksh->bkgts", query_BKGTH, keys_BKTH)
    sinks = None if sinks_KG is None else sinks_KG[:, :, None, None]
    shares = softmax(capped(scores, spec.cap), seen_BTT[:, None, None], sinks)
    shares = shares.astype(query_BTKGH.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", shares, values_BKTH).transpose(0, 3, 1, 2, 4)


def pairs_in_sight(
    segments_BT: Int[Array, "B T"], window: int | None = None
) -> Bool[Array, "B T T"]:
    """A position sees what precedes it in its own segment, no further back than the window."""
    index_T = jnp.arange(segments_BT.shape[1])
    seen_TT = index_T[None, :] <= index_T[:, None]
    if window is not None:
        seen_TT &= index_T[None, :] > index_T[:, None] - window
    return (segments_BT[:, :, None] == segments_BT[:, None, :]) & seen_TT


class Tokens(NamedTuple):
    """Tokens of rows: segments, prompts, and positions within a sequence, for windows.

    `prompts` is a token's own segment where it has no prompt apart.
    """

    segments: Int[Array, "B ..."]
    prompts: Int[Array, "B ..."]
    positions: Int[Array, "B ..."]


class Sight(NamedTuple):
    """Visible keys of the tokens of some rows, or of a piece of them.

    `blocks` are the blocks of keys of each of the N blocks of queries, of M in all, those it sees
    first; `counts` how many it sees. `queries` and `keys` are tokens in blocks, `at` is the
    queries' place in the row.
    """

    blocks: Int[Array, "B N M"]
    counts: Int[Array, "B N"]
    queries: Tokens
    keys: Tokens
    at: Int[Array, "N C"]


def sight_of(
    segments_BT: Int[Array, "B T"],
    prompts_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
) -> Sight:
    """A token sees what precedes it in its own segment and in its prompt's; segment 0 sees nothing.

    Blocks are those in sight without a window, which narrows what is seen of them.
    """
    rows = Tokens(*(blocks(array) for array in (segments_BT, prompts_BT, positions_BT)))
    return sight_of_queries(rows, rows, places(*rows.segments.shape[1:]))


def places(count: int, size: int) -> Int[Array, "N C"]:
    return jnp.arange(count * size, dtype=jnp.int32).reshape(count, size)


def sight_of_queries(queries: Tokens, keys: Tokens, index_NC: Int[Array, "N C"]) -> Sight:
    key_index_MD = places(*keys.segments.shape[1:])

    def row_of_blocks(queries: tuple[Array, Array, Array]) -> Bool[Array, "B M"]:
        segment_BC, prompt_BC, index_C = queries
        seen = _seen(
            segment_BC[:, None], prompt_BC[:, None], index_C, keys.segments, key_index_MD
        )  # [B, M, C, D]
        return jnp.any(seen, axis=(2, 3))

    by_block = (queries.segments.swapaxes(0, 1), queries.prompts.swapaxes(0, 1), index_NC)
    # One block of queries after the other: the mask of all of them at once would be [B, T, T].
    seen_BNM = jax.lax.map(row_of_blocks, by_block).swapaxes(0, 1)
    # Blocks in sight come first, and in their order: a loop of `counts` reads no others, and sums
    # in one order whatever the rest of the row holds.
    blocks_BNM = jnp.argsort(~seen_BNM, axis=-1, stable=True).astype(jnp.int32)
    return Sight(blocks_BNM, jnp.sum(seen_BNM, axis=-1), queries, keys, index_NC)


def block_size(length: int) -> int:
    short = length <= SHORT_ROW_POSITIONS_MAX
    return min(POSITIONS_PER_BLOCK, POSITIONS_PER_SHORT_BLOCK if short else length, length)


def blocks(array_BT: Array, size: int | None = None) -> Array:
    """A row in blocks, filled up with zeros behind: [B, T, …] to [B, N, C, …]."""
    B, T, *feature_shape = array_BT.shape
    size = size or block_size(T)
    padding = [(0, 0), (0, -T % size), *((0, 0) for _ in feature_shape)]
    return jnp.pad(array_BT, padding).reshape(B, -1, size, *feature_shape)


def _seen(
    segments: Int[Array, "..."],
    prompts: Int[Array, "..."],
    index: Int[Array, "..."],
    key_segments: Int[Array, "B N D"],
    key_index: Int[Array, "..."],
) -> Bool[Array, "B N C D"]:
    """Mask of the keys of a block that each query sees; the queries' arrays end in C, the keys' in
    D.
    """
    keys = key_segments[:, :, None, :]
    same = (segments[..., None] == keys) | (prompts[..., None] == keys)
    # Padding is of one segment, too: without the middle condition it would attend to itself.
    return same & (keys > 0) & (key_index[..., None, :] <= index[..., None])


def attend(
    query_BTKGH: Float[Array, "B T K G H"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    sight: Sight,
    window: int | None = None,
    cap: float | None = None,
    sinks_KG: Float[Array, "K G"] | None = None,
) -> Float[Array, "B T K G H"]:
    """Softmax attention of scaled queries over what they see; 0 where that is nothing."""
    size = block_size(query_BTKGH.shape[1])
    query = as_rows(query_BTKGH, size)
    keys, values = (by_head(each, size) for each in (keys_BTKH, values_BTKH))
    sinks_KQ = of_queries(sinks_KG, query)
    out: Any = _attended(Limits(window, cap), query, keys, values, sinks_KQ, sight)
    return as_positions(out, query_BTKGH.shape)


def as_rows(array_BTKGH: Array, size: int) -> Float[Array, "B N K Q H"]:
    """Queries, or gradients of what they attend to, in blocks of `size` positions."""
    array = blocks(array_BTKGH, size).transpose(0, 1, 3, 4, 2, 5)  # [B, N, K, G, C, H]
    return array.reshape(*array.shape[:3], -1, array.shape[-1])


def as_positions(array: Float[Array, "B N K Q H"], shape: tuple[int, ...]) -> Array:
    """Undo `as_rows`."""
    B, T, K, G, H = shape
    out = array.reshape(B, array.shape[1], K, G, -1, H).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(B, -1, K, G, H)[:, :T]


def by_head(array_BTKH: Array, size: int) -> Float[Array, "B M K D H"]:
    return blocks(array_BTKH, size).swapaxes(2, 3)


def of_queries(sinks_KG: Array | None, query: Float[Array, "B N K Q H"]) -> Array | None:
    if sinks_KG is None:
        return None
    positions = query.shape[3] // sinks_KG.shape[1]
    return jnp.repeat(sinks_KG.astype(jnp.float32), positions, axis=1)


class Limits(NamedTuple):
    """Limits of a layer's attention: how far back, and how large a score."""

    window: int | None
    cap: float | None


class _KeyBlock(NamedTuple):
    """Block of keys for every block of queries: its index, and the mask of each query."""

    at_BN: Int[Array, "B N"]
    seen_BNQD: Bool[Array, "B N 1 G C D"]


def _key_block(sight: Sight, number: Array, window: int | None) -> _KeyBlock:
    queries, keys = sight.queries, sight.keys
    at_BN = jax.lax.dynamic_index_in_dim(sight.blocks, number, axis=2, keepdims=False)
    size = keys.segments.shape[-1]
    theirs = jnp.take_along_axis(keys.segments, at_BN[..., None], axis=1)
    their_index = at_BN[..., None] * size + jnp.arange(size, dtype=jnp.int32)
    seen = _seen(queries.segments, queries.prompts, sight.at, theirs, their_index)
    seen &= (number < sight.counts)[..., None, None]
    if window is not None:
        their_positions = jnp.take_along_axis(keys.positions, at_BN[..., None], axis=1)
        seen &= their_positions[:, :, None, :] > queries.positions[..., None] - window
    return _KeyBlock(at_BN, seen[:, :, None, None])


def _picked(blocks: Float[Array, "B M K D H"], at_BN: Array) -> Float[Array, "B N K D H"]:
    return jnp.take_along_axis(blocks, at_BN[:, :, None, None, None], axis=1)


def _scores(query: Array, keys: Array, cap: float | None) -> Float[Array, "B N K Q D"]:
    scores = jnp.einsum("bnkqh,bnkdh->bnkqd", query, keys, preferred_element_type=jnp.float32)
    return capped(scores, cap)


def _where(block: _KeyBlock, values: Float[Array, "B N K Q D"], other: float) -> Array:
    B, N, K, Q, D = values.shape
    C = block.seen_BNQD.shape[-2]
    apart = values.reshape(B, N, K, Q // C, C, D)
    return jnp.where(block.seen_BNQD, apart, other).reshape(values.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(
    limits: Limits, query: Array, keys: Array, values: Array, sinks: Array | None, sight: Sight
) -> Array:
    return forward(limits, query, keys, values, sinks, sight)[0]


def forward(
    limits: Limits, query: Array, keys: Array, values: Array, sinks: Array | None, sight: Sight
) -> tuple[Array, Any]:
    # As many as the block of queries that sees most needs; `_key_block` masks them for the others.
    iterations = jnp.max(sight.counts)

    def body(number: Array, carry: Any) -> Any:
        highest, total, sums = carry
        block = _key_block(sight, number, limits.window)
        scores = _scores(query, _picked(keys, block.at_BN), limits.cap)
        scores = _where(block, scores, MASKED)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1))
        # A query that sees nothing yet has its scores at its maximum, where exp would give 1.
        weights = _where(block, jnp.exp(scores - higher[..., None]), 0.0)
        # What is summed so far was scaled by the old maximum.
        kept = jnp.exp(highest - higher)
        weighted = jnp.einsum(
            "bnkqd,bnkdh->bnkqh",
            weights.astype(values.dtype),
            _picked(values, block.at_BN),
            preferred_element_type=jnp.float32,
        )
        total = total * kept + jnp.sum(weights, axis=-1)
        return higher, total, sums * kept[..., None] + weighted

    shape = query.shape[:-1]
    # A sink is a score that was seen before all others, with the value 0.
    start = (
        jnp.full(shape, MASKED, jnp.float32) if sinks is None else jnp.broadcast_to(sinks, shape),
        jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    highest, total, sums = jax.lax.fori_loop(0, iterations, body, start)
    # A query that sees nothing, such as padding, gets 0 and not 0 / 0.
    total = jnp.where(total > 0, total, 1.0)
    # The backward pass gets each weight back from the logarithm of the sum, and keeps no [T, T]
    # array.
    attended = (sums / total[..., None]).astype(query.dtype)
    return attended, (query, keys, values, sinks, sight, attended, highest + jnp.log(total))


def _backward(limits: Limits, saved: Any, gradient: Array) -> tuple[Any, ...]:
    *sums, by_sinks = backward_sums(limits, saved, gradient)
    by_inputs = (f.astype(like.dtype) for f, like in zip(sums, saved[:3], strict=True))
    return (*by_inputs, by_sinks, None)


def backward_sums(limits: Limits, saved: Any, gradient: Array) -> tuple[Any, ...]:
    """Gradients of queries, keys, values and sinks, in float32."""
    query, keys, values, sinks, sight, attended, normaliser = saved
    # The sum over all keys in the softmax's derivative: known before the loop, for it equals the
    # output times its gradient (D in the paper).
    inner = jnp.sum(gradient.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def body(number: Array, carry: Any) -> Any:
        by_query, by_keys, by_values = carry
        block = _key_block(sight, number, limits.window)
        block_keys, block_values = (_picked(each, block.at_BN) for each in (keys, values))
        scores = _scores(query, block_keys, limits.cap)
        hidden = _where(block, scores, MASKED)
        weights = _where(block, jnp.exp(hidden - normaliser[..., None]), 0.0)
        by_weights = product("bnkqh,bnkdh->bnkqd", gradient, block_values)
        # The derivative of a softmax: a weight times how far its own gradient is above the weighted
        # mean.
        by_scores = weights * (by_weights - inner[..., None])
        if limits.cap is not None:  # the derivative of cap x tanh(score / cap)
            by_scores *= 1.0 - jnp.square(scores / limits.cap)
        by_scores = by_scores.astype(query.dtype)
        by_query += product("bnkqd,bnkdh->bnkqh", by_scores, block_keys)
        to_keys = product("bnkqd,bnkqh->bnkdh", by_scores, query)
        to_values = product("bnkqd,bnkqh->bnkdh", weights.astype(gradient.dtype), gradient)
        return by_query, _added(by_keys, block, to_keys), _added(by_values, block, to_values)

    # Summed over blocks in float32 and rounded once, by the caller.
    start = tuple(jnp.zeros(each.shape, jnp.float32) for each in (query, keys, values))
    gradients = jax.lax.fori_loop(0, jnp.max(sight.counts), body, start)
    by_sinks = None
    if sinks is not None:  # its share of every query, and a value of 0
        by_sinks = -jnp.sum(jnp.exp(sinks - normaliser) * inner, axis=(0, 1))
    return (*gradients, by_sinks)


def _added(blocks: Array, block: _KeyBlock, gradient: Array) -> Array:
    """Add gradients to the blocks of keys; several blocks of queries may share one."""
    rows = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    return blocks.at[rows, block.at_BN].add(gradient)


_attended.defvjp(forward, _backward)


# ---------------------------------------------------------------- Levanter's, on a TPU


def on_tpu() -> bool:
    return jax.default_backend() == "tpu"


def attend_by_levanter(
    query_BTKGH: Float[Array, "B T K G H"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"],
    window: int | None,
    cap: float | None,
) -> Float[Array, "B T K G H"]:
    """Causal attention of scaled queries within segments by the kernel that Levanter chooses."""
    # Here and not above: Levanter takes seconds to import, and other devices do not need it.
    levanter = importlib.import_module("levanter.layers.attention")
    mask = levanter.AttentionMask.causal().with_segment_ids(hax.named(segments_BT, AXES[:2]))
    if window is not None:
        mask = mask.with_sliding_window(window)
    batch, position, kv_head, group, size = AXES
    others = (batch, "key_position", kv_head, size)
    attended = levanter.dot_product_attention(
        position,
        "key_position",
        size,
        hax.named(query_BTKGH, AXES),
        hax.named(keys_BTKH, others),
        hax.named(values_BTKH, others),
        mask,
        attention_dtype=query_BTKGH.dtype,
        inference=True,
        scaling_factor=1.0,
        logits_soft_cap=cap,
    )
    return attended.rearrange((batch, position, kv_head, group, size)).array


AXES = ("batch", "position", "kv_head", "q_heads_per_group", "head_size")


def pairs_of(
    segments_BT: Int[Array, "B T"], prompts_BT: Int[Array, "B T"] | None
) -> Bool[Array, "B T T"]:
    """The pairs of rows with several sequences: of one segment, or of a prompt and its own."""
    keys_B1T = segments_BT[:, None, :]
    seen_BTT = segments_BT[:, :, None] == keys_B1T
    if prompts_BT is not None:
        seen_BTT |= prompts_BT[:, :, None] == keys_B1T
    return seen_BTT

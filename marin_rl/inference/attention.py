"""Attention of a decode step, of every sequence slot over its cache.

Owns a block of the cache and how it is read: block by block, and once for slots that share it.
Leaves out how it is written, and everything else that a layer computes (`decoder`).

Axes: S sequence slots, B positions of a block, K key/value heads, G query heads per key/value head,
H head size; N groups of I slots that share, R rows of a group for one key/value head.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Slots side by side that started from one prompt, and read its cache once for all of them.
SHARE = 8

# Added to a masked score instead of -inf, so that exp() of a difference is never NaN.
MASKED = -1e30


class Block(NamedTuple):
    """B positions of one layer's cache."""

    keys: Float[Array, "S K H B"]
    values: Float[Array, "S K B H"]


def attend(
    query_SKGH: Array,
    blocks: tuple[Block, ...],
    positions_S: Array,
    longest: Array,
    shared: Array | None,
) -> Float[Array, "S KGH"]:
    """Softmax over each slot's own positions, block by block (online softmax, arXiv:1805.02867).

    A block in which a slot has nothing leaves its maximum, sum and average bitwise as they were. A
    block that slots share is read once for all of them (as in Hydragen, arXiv:2402.05099): each
    slot's products are sums of the same terms, in an order that the matrix library chooses by the
    instruction set and the shapes. The engine shares where it has proven that order to be the same.
    """
    S, K, G, H = query_SKGH.shape
    size = blocks[0].keys.shape[-1]
    state = (
        jnp.full((S, K, G), MASKED, jnp.float32),
        jnp.zeros((S, K, G), jnp.float32),
        jnp.zeros((S, K, G, H), jnp.float32),
    )
    for index, block in enumerate(blocks):
        start = index * size

        def extend(state, share=1, block=block, start=start):
            visible = start + jnp.arange(size) <= positions_S[:, None]
            return _extend_softmax(state, query_SKGH, block, visible, share)

        ways = [lambda state: state, extend]
        way = (start <= longest).astype(jnp.int32)
        if shared is not None:
            ways.append(partial(extend, share=SHARE))
            way += (way > 0) & (start + size <= shared)
        if index == 0:
            # every sequence has a position in the first block
            ways, way = ways[1:], way - 1
        state = jax.lax.switch(way, ways, state)
    _, total, weighted = state
    return (weighted / total[..., None]).reshape(S, K * G * H).astype(query_SKGH.dtype)


def _extend_softmax(
    state: tuple[Array, Array, Array],
    query_SKGH: Array,
    block: Block,
    visible_SB: Array,
    share: int,
) -> tuple[Array, Array, Array]:
    highest, total, weighted = state
    scores = times_cached(query_SKGH, block.keys, share).astype(jnp.float32)
    scores = jnp.where(visible_SB[:, None, None, :], scores, MASKED)
    higher = jnp.maximum(highest, scores.max(-1))
    kept = jnp.exp(highest - higher)
    terms = jnp.exp(scores - higher[..., None])
    product = times_cached(terms.astype(block.values.dtype), block.values, share)
    return (
        higher,
        total * kept + terms.sum(-1),
        weighted * kept[..., None] + product.astype(jnp.float32),
    )


def times_cached(rows_SKGX: Array, cached_SKXY: Array, share: int) -> Float[Array, "S K G Y"]:
    """Rows of each slot times what it has cached, which every `share` slots have in common."""
    if share == 1:
        return jnp.einsum("skgx,skxy->skgy", rows_SKGX, cached_SKXY)
    S, K, G, X = rows_SKGX.shape
    rows_NKIGX = jnp.swapaxes(rows_SKGX.reshape(S // share, share, K, G, X), 1, 2)
    rows_NKRX = rows_NKIGX.reshape(S // share, K, share * G, X)
    out_NKRY = jnp.einsum("nkrx,nkxy->nkry", rows_NKRX, cached_SKXY[::share])
    out_NKIGY = out_NKRY.reshape(S // share, K, share, G, -1)
    return jnp.swapaxes(out_NKIGY, 1, 2).reshape(S, K, G, -1)

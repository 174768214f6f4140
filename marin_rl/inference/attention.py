"""Attention of a decode step, of every sequence slot over its cache.

Owns a block of the cache and how it is read: block by block, and once for slots that share it.
Leaves out how it is written, and everything else that a layer computes (`decoder`).

Axes: S sequence slots, B positions of a block, K key/value heads, G query heads per key/value head,
H head size; N groups of I slots that share, R rows of a group for one key/value head.
"""

from collections.abc import Callable
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


def attend_pieces(
    query_MKGH: Array, blocks: tuple[Block, ...], slot_N: Array, positions_M: Array
) -> Float[Array, "M KGH"]:
    """Softmax of M / N consecutive positions of slot `slot_N[n]` each, over that slot's cache.

    A position's sums are those of `attend` for a slot of which the cache is shared.
    """
    M, K, G, H = query_MKGH.shape
    size, together = blocks[0].keys.shape[-1], M // len(slot_N)
    longest = jnp.max(positions_M)
    times = (
        partial(_times_common, share=together) if together > 1 else partial(times_cached, share=1)
    )
    state = _empty_softmax(M, K, G, H)
    for index, block in enumerate(blocks):
        start = index * size

        def extend(state, block=block, start=start):
            visible = start + jnp.arange(size) <= positions_M[:, None]
            # gathered block by block: of all slots at once it would be a second cache
            own = Block(block.keys[slot_N], block.values[slot_N])
            return _extend_softmax(state, query_MKGH, own, visible, times)

        # every piece reads the first block
        state = (
            jax.lax.cond(start <= longest, extend, lambda state: state, state)
            if index
            else extend(state)
        )
    return _average(state, query_MKGH)


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
    state = _empty_softmax(S, K, G, H)
    for index, block in enumerate(blocks):
        start = index * size

        def extend(state, share=1, block=block, start=start):
            visible = start + jnp.arange(size) <= positions_S[:, None]
            return _extend_softmax(
                state, query_SKGH, block, visible, partial(times_cached, share=share)
            )

        ways = [lambda state: state, extend]
        way = (start <= longest).astype(jnp.int32)
        if shared is not None:
            # a third way of its own, since a switch computes one branch alone
            ways.append(partial(extend, share=SHARE))
            way += (way > 0) & (start + size <= shared)
        if index == 0:
            # every sequence has a position in the first block
            ways, way = ways[1:], way - 1
        state = jax.lax.switch(way, ways, state)
    return _average(state, query_SKGH)


def _empty_softmax(S: int, K: int, G: int, H: int) -> tuple[Array, Array, Array]:
    """Maximum, sum and weighted values before the first block."""
    return (
        # float32 whatever the cache's dtype: these are sums over the whole context
        jnp.full((S, K, G), MASKED, jnp.float32),
        jnp.zeros((S, K, G), jnp.float32),
        jnp.zeros((S, K, G, H), jnp.float32),
    )


def _average(state: tuple[Array, Array, Array], query_SKGH: Array) -> Float[Array, "S KGH"]:
    _, total, weighted = state
    # never 0 / 0: every sequence sees its own first position
    average = weighted / total[..., None]
    return average.reshape(len(query_SKGH), -1).astype(query_SKGH.dtype)


def _extend_softmax(
    state: tuple[Array, Array, Array],
    query_SKGH: Array,
    block: Block,
    visible_SB: Array,
    times: Callable[[Array, Array], Array],
) -> tuple[Array, Array, Array]:
    highest, total, weighted = state
    scores = times(query_SKGH, block.keys).astype(jnp.float32)
    scores = jnp.where(visible_SB[:, None, None, :], scores, MASKED)
    higher = jnp.maximum(highest, scores.max(-1))
    # what is summed so far was scaled by the old maximum
    kept = jnp.exp(highest - higher)
    # a masked score gives exp of a very large negative number, an exact 0, once anything was seen:
    # the first block always holds the sequence's first position
    terms = jnp.exp(scores - higher[..., None])
    product = times(terms.astype(block.values.dtype), block.values)
    return (
        higher,
        total * kept + terms.sum(-1),
        weighted * kept[..., None] + product.astype(jnp.float32),
    )


def times_cached(rows_SKGX: Array, cached_SKXY: Array, share: int) -> Float[Array, "S K G Y"]:
    """Rows of each slot times what it has cached, which every `share` slots have in common."""
    if share == 1:
        return jnp.einsum("skgx,skxy->skgy", rows_SKGX, cached_SKXY)
    # the first slot's cache stands for its group: they are alike as far as it is read
    return _times_common(rows_SKGX, cached_SKXY[::share], share)


def _times_common(rows_SKGX: Array, cached_NKXY: Array, share: int) -> Float[Array, "S K G Y"]:
    """Rows of every `share` slots times what they have in common."""
    S, K, G, X = rows_SKGX.shape
    # slots of a group as further rows of one product: the common keys are then read once
    rows_NKIGX = jnp.swapaxes(rows_SKGX.reshape(S // share, share, K, G, X), 1, 2)
    rows_NKRX = rows_NKIGX.reshape(S // share, K, share * G, X)
    out_NKRY = jnp.einsum("nkrx,nkxy->nkry", rows_NKRX, cached_NKXY)
    out_NKIGY = out_NKRY.reshape(S // share, K, share, G, -1)
    return jnp.swapaxes(out_NKIGY, 1, 2).reshape(S, K, G, -1)

"""The KV cache of a transformer: its blocks, writes into them, and attention over them.

The cache of a layer is a tuple of blocks of B positions. On a host keys lie as [S, K, H, B], so
that both of attention's products read contiguous memory; each block is a separate array, so that a
block past the longest sequence is skipped without a copy, and one that slots share is read once for
all. On an accelerator, where each such choice would wait for the host, a layer has one block that
every write and every look goes to (`WholeBlock`), and on a GPU a kernel reads each slot as far as
it goes (`decode_kernel`). Leaves out what the keys and values are (`decoder`).

Axes: S sequence slots, B positions of a block, K key/value heads, G query heads per key/value head,
H head size, M positions of pieces of prompts, R prompts of one prefill, P positions of a bucket;
N groups of I slots that share, R rows of a group for one key/value head.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from marin_rl.inference.placement import SLOTS, TENSOR, constrain
from marin_rl.models.axes import dividing, on_each_device
from marin_rl.models.block import MASKED, capped
from marin_rl.models.fused_attention import kernels_for
from marin_rl.models.spec import Spec

# Slots side by side that started from one prompt, and read its cache once for all of them.
SHARE = 8


# Fewest positions of a block, and most blocks of a cache: every block is a
# separate conditional in the compiled step.
BLOCK_MIN = 64
BLOCKS_MAX = 12


# Positions of a step of the GPU's kernel.
KERNEL_POSITIONS = 128


class Block(NamedTuple):
    """B positions of one layer's cache."""

    keys: Float[Array, "S K H B"]
    values: Float[Array, "S K B H"]

    @property
    def columns(self) -> Float[Array, "S K H B"]:
        """Keys as the right side of a product with queries."""
        return self.keys


class WholeBlock(NamedTuple):
    """All positions of one layer's cache, with keys as values lie, for the GPU's kernel."""

    keys: Float[Array, "S K B H"]
    values: Float[Array, "S K B H"]

    @property
    def columns(self) -> Float[Array, "S K H B"]:
        return jnp.swapaxes(self.keys, -1, -2)  # part of the product: nothing is copied


Blocks = tuple[Block, ...] | tuple[WholeBlock]  # of a layer
Cache = tuple[Blocks, ...]


class Limits(NamedTuple):
    """Limits of a layer's attention: how far back it looks, how large a score may be, and sinks.

    A sink [K, G] is a score of each head that has no value.
    """

    window: int | None
    cap: float | None
    sinks: Array | None

    def visible(self, keys: Array, queries: Array) -> Array:
        """Mask of the keys' positions that queries at these positions see."""
        seen = keys <= queries
        return seen if self.window is None else seen & (keys > queries - self.window)


def attend_pieces(
    query_MKGH: Array, blocks: Blocks, slot_N: Array, positions_M: Array, limits: Limits
) -> Float[Array, "M KGH"]:
    """Softmax of M / N consecutive positions of slot `slot_N[n]` each, over that slot's cache.

    A position's sums are those of `attend` for a slot of which the cache is shared.
    """
    size, together = block_positions(blocks), len(query_MKGH) // len(slot_N)
    longest = jnp.max(positions_M)
    times = (
        partial(_times_common, share=together) if together > 1 else partial(times_cached, share=1)
    )
    state = _empty_softmax(query_MKGH, limits.sinks)
    for index, block in enumerate(blocks):
        start = index * size

        def extend(state, block=block, start=start):
            visible = limits.visible(start + jnp.arange(size), positions_M[:, None])
            # gathered block by block: of all slots at once it would be a second cache
            own = jax.tree.map(lambda leaf: leaf[slot_N], block)
            return _extend_softmax(state, query_MKGH, own, visible, times, limits.cap)

        # every piece reads the first block
        state = (
            jax.lax.cond(start <= longest, extend, lambda state: state, state)
            if index
            else extend(state)
        )
    return _average(state, query_MKGH)


def attend(
    query_SKGH: Array,
    blocks: Blocks,
    positions_S: Array,
    longest: Array,
    shared: Array | None,
    limits: Limits,
) -> Float[Array, "S KGH"]:
    """Softmax over each slot's own positions, block by block (online softmax, arXiv:1805.02867).

    A block in which a slot has nothing leaves its maximum, sum and average bitwise as they were. A
    block that slots share is read once for all of them (as in Hydragen, arXiv:2402.05099): each
    slot's products are sums of the same terms, in an order that the matrix library chooses by the
    instruction set and the shapes. The engine shares where it has proven that order to be the same.
    """
    whole = blocks[0]
    if isinstance(whole, WholeBlock) and takes_kernel(query_SKGH, limits):
        return attend_by_kernel(query_SKGH, whole, positions_S, limits)
    size = block_positions(blocks)
    state = _empty_softmax(query_SKGH, limits.sinks)
    for index, block in enumerate(blocks):
        start = index * size

        def extend(state, share=1, block: Any = block, start=start):
            visible = limits.visible(start + jnp.arange(size), positions_S[:, None])
            times = partial(times_cached, share=share)
            return _extend_softmax(state, query_SKGH, block, visible, times, limits.cap)

        ways = [lambda state: state, extend]
        way = (start <= longest).astype(jnp.int32)
        if shared is not None:
            # a third branch: a switch computes only the one that is chosen
            ways.append(partial(extend, share=SHARE))
            way += (way > 0) & (start + size <= shared)
        if index == 0:
            # every sequence has a position in the first block
            ways, way = ways[1:], way - 1
        state = jax.lax.switch(way, ways, state)
    return _average(state, query_SKGH)


def takes_kernel(query_SKGH: Array, limits: Limits) -> bool:
    """True where the kernel computes this attention."""
    size = query_SKGH.shape[-1]
    fits = limits.cap is None and size >= 16 and size & (size - 1) == 0
    return fits and kernels_for(query_SKGH.dtype)


def attend_by_kernel(
    query_SKGH: Array,
    block: WholeBlock,
    positions_S: Array,
    limits: Limits,
    *,
    interpret: bool = False,
) -> Float[Array, "S KGH"]:
    """As `attend`, by a kernel that reads each slot from its window to its position.

    Each device of a mesh does so for its own slots and heads. `interpret` computes the kernel's
    steps on any device.
    """
    # An idle slot reads one position.
    ends_S = jnp.maximum(positions_S, 0) + 1
    starts_S = jnp.maximum(ends_S - (limits.window or block.keys.shape[-2]), 0)
    # Here and not above: other devices do not need it, and Pallas takes a second to import.
    kernel = importlib.import_module("marin_rl.inference.decode_kernel")
    S, K = query_SKGH.shape[:2]
    of_slots = PartitionSpec(dividing(SLOTS, S))
    of_heads = PartitionSpec(*of_slots, dividing(TENSOR, K))
    out_SKGH, total_SKG, highest_SKG = on_each_device(
        partial(kernel.attend, interpret=interpret),
        (of_heads, of_heads, of_heads, of_slots, of_slots),
        of_heads,
    )(query_SKGH, block.keys, block.values, starts_S, ends_S)
    if limits.sinks is not None:  # a further term of the sum
        sinks_KG = limits.sinks.astype(jnp.float32)
        share_SKG = total_SKG / (total_SKG + jnp.exp(sinks_KG - highest_SKG))
        out_SKGH = out_SKGH * share_SKG[..., None]
    return out_SKGH.astype(query_SKGH.dtype).reshape(S, -1)


def _empty_softmax(query_SKGH: Array, sinks_KG: Array | None) -> tuple[Array, Array, Array]:
    """Maximum, sum and weighted values before the first block: those of a sink, or of nothing."""
    S, K, G, H = query_SKGH.shape
    highest = jnp.full((S, K, G), MASKED, jnp.float32)
    if sinks_KG is not None:
        highest = jnp.broadcast_to(sinks_KG.astype(jnp.float32), (S, K, G))
    return (
        # float32 whatever the cache's dtype: these are sums over the whole context
        highest,
        jnp.full((S, K, G), 0.0 if sinks_KG is None else 1.0, jnp.float32),
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
    block: Block | WholeBlock,
    visible_SB: Array,
    times: Callable[[Array, Array], Array],
    cap: float | None,
) -> tuple[Array, Array, Array]:
    highest, total, weighted = state
    scores = capped(times(query_SKGH, block.columns).astype(jnp.float32), cap)
    scores = jnp.where(visible_SB[:, None, None, :], scores, MASKED)
    higher = jnp.maximum(highest, scores.max(-1))
    # the sums so far were scaled by the old maximum
    kept = jnp.exp(highest - higher)
    # a masked score gives exp of a very large negative number, an exact 0, once anything was seen;
    # what a block before a window's start added is then scaled to an exact 0
    terms = jnp.exp(scores - higher[..., None])
    product = times(terms.astype(block.values.dtype), block.values)
    return (
        higher,
        total * kept + terms.sum(-1),
        weighted * kept[..., None] + product.astype(jnp.float32),
    )


def times_cached(rows_SKGX: Array, cached_SKXY: Array, share: int) -> Float[Array, "S K G Y"]:
    """Rows of each slot times its cached block, which every `share` slots have in common."""
    if share == 1:
        return jnp.einsum("skgx,skxy->skgy", rows_SKGX, cached_SKXY)
    # the first slot's cache stands for its group: they are alike as far as it is read
    return _times_common(rows_SKGX, cached_SKXY[::share], share)


def _times_common(rows_SKGX: Array, cached_NKXY: Array, share: int) -> Float[Array, "S K G Y"]:
    """Rows of every `share` slots times their common block."""
    S, K, G, X = rows_SKGX.shape
    # slots of a group as further rows of one product: the common keys are then read once
    rows_NKIGX = jnp.swapaxes(rows_SKGX.reshape(S // share, share, K, G, X), 1, 2)
    rows_NKRX = rows_NKIGX.reshape(S // share, K, share * G, X)
    out_NKRY = jnp.einsum("nkrx,nkxy->nkry", rows_NKRX, cached_NKXY)
    out_NKIGY = out_NKRY.reshape(S // share, K, share, G, -1)
    return jnp.swapaxes(out_NKIGY, 1, 2).reshape(S, K, G, -1)


def block_size(context_length: int, *, whole: bool = False) -> int:
    """Positions of a cache block: a power of two, so that at most BLOCKS_MAX blocks are needed.

    Of a `whole` block: all positions, a multiple of what the GPU's kernel takes at a time.
    """
    if whole:
        return -(-context_length // KERNEL_POSITIONS) * KERNEL_POSITIONS
    return max(BLOCK_MIN, 2 ** math.ceil(math.log2(context_length / BLOCKS_MAX)))


def block_positions(blocks: Blocks) -> int:
    return blocks[0].values.shape[-2]


def empty_cache(
    spec: Spec,
    slots: int,
    context_length: int,
    dtype: jnp.dtype,
    *,
    whole: bool = False,
) -> Cache:
    """Zeros for `slots` sequences of `context_length`, rounded up to whole blocks."""
    size = block_size(context_length, whole=whole)
    keys = (slots, spec.kv_heads, spec.head_size, size)
    values = (slots, spec.kv_heads, size, spec.head_size)

    def empty_layer() -> Blocks:
        if whole:
            return (WholeBlock(jnp.zeros(values, dtype), jnp.zeros(values, dtype)),)
        blocks = range(-(-context_length // size))
        return tuple(Block(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in blocks)

    return tuple(empty_layer() for _ in range(spec.layers))


def in_blocks(blocks: Blocks, size: int, length: int) -> Blocks:
    """A layer's cache in blocks of `size` positions, with zeros behind its own to `length`."""
    keys = jnp.concatenate([block.columns for block in blocks], -1)
    values = jnp.concatenate([block.values for block in blocks], -2)
    more = length - keys.shape[-1]
    keys = jnp.pad(keys, [(0, 0), (0, 0), (0, 0), (0, more)])
    values = jnp.pad(values, [(0, 0), (0, 0), (0, more), (0, 0)])
    if isinstance(blocks[0], WholeBlock):
        return (WholeBlock(jnp.swapaxes(keys, -1, -2), values),)
    count = length // size
    parts = jnp.split(keys, count, axis=-1), jnp.split(values, count, axis=-2)
    return tuple(map(Block, *parts))


def cache_length(cache: Cache) -> int:
    return len(cache[0]) * block_positions(cache[0])


def write(blocks: Blocks, key_SKH: Array, value_SKH: Array, positions_S: Array) -> Blocks:
    """Put each slot's key and value at its position; positions outside a block are dropped."""
    size = block_positions(blocks)
    put: dict[str, Any] = {"mode": "drop", "unique_indices": True}

    def write_one(block: Any, key_KH: Array, value_KH: Array, at: Array) -> Any:
        values = block.values.at[:, at].set(value_KH, **put)
        if isinstance(block, WholeBlock):
            return WholeBlock(block.keys.at[:, at].set(key_KH, **put), values)
        return Block(block.keys.at[:, :, at].set(key_KH, **put), values)

    written: list[Any] = []
    for index, block in enumerate(blocks):
        # every block gets the write, and drops a position outside of it: no branch is needed
        at = positions_S - index * size
        # negative indices would count from the end, so they are sent past it instead
        at = jnp.where(at < 0, size, at)
        # `vmap` over slots: each writes one position, which XLA does in place
        written.append(_spread(jax.vmap(write_one)(block, key_SKH, value_SKH, at)))
    return tuple(written)


def _spread(block: Any) -> Any:
    return jax.tree.map(lambda leaf: constrain(leaf, SLOTS, TENSOR), block)


def write_at(
    blocks: Blocks, key_MKH: Array, value_MKH: Array, slot_M: Array, positions_M: Array
) -> Blocks:
    """Put keys and values at positions of slots; positions outside a block are dropped."""
    size = block_positions(blocks)
    written: list[Any] = []
    for index, block in enumerate(blocks):
        at = positions_M - index * size
        at = jnp.where(at < 0, size, at)  # as in `write`
        of_keys = (slot_M, slice(None), at)
        if not isinstance(block, WholeBlock):
            of_keys = (slot_M, slice(None), slice(None), at)
        keys = block.keys.at[of_keys].set(key_MKH, mode="drop")
        values = block.values.at[slot_M, :, at].set(value_MKH, mode="drop")
        written.append(type(block)(keys, values))
    return tuple(written)


def copy_in(
    cache: Cache, buffer: tuple[tuple[Array, Array], ...], source_S: Array, rows: int
) -> Cache:
    """Write prompt `source_S[s]` < `rows` into each slot s, one slot after the other.

    `buffer` has keys [R, K, H, P] and values [R, K, P, H] of each layer.

    All at once would first gather the rows: as much memory as the cache itself.
    """
    taken_S = source_S < rows
    # slots that take a prompt come first: the loop is over them only
    first_S = jnp.argsort(~taken_S)

    def body(index, cache):
        seq_slot = first_S[index]
        source = source_S[seq_slot]
        return tuple(
            copy_prompt(blocks, *pair, source, seq_slot)
            for blocks, pair in zip(cache, buffer, strict=True)
        )

    cache = jax.lax.fori_loop(0, jnp.sum(taken_S), body, cache)
    return tuple(tuple(_spread(block) for block in blocks) for blocks in cache)


def copy_prompt(blocks: Blocks, keys: Array, values: Array, source: Any, seq_slot: Any) -> Blocks:
    """A layer's cache in which the slot has prompt `source` of `keys` [R, K, H, P] and `values`."""
    size, length = block_positions(blocks), keys.shape[-1]
    cut, update = jax.lax.dynamic_slice_in_dim, jax.lax.dynamic_update_slice
    at = (seq_slot, 0, 0, 0)
    copied: list[Any] = list(blocks)
    for number, start in enumerate(range(0, length, size)):
        # the last block of a short prompt is filled in part: what lies behind is masked until a
        # token is written there
        stop = min(start + size, length)
        block, own_keys = blocks[number], cut(keys[..., start:stop], source, 1)
        if isinstance(block, WholeBlock):
            own_keys = jnp.swapaxes(own_keys, -1, -2)
        own_values = cut(values[:, :, start:stop], source, 1)
        copied[number] = type(block)(
            update(block.keys, own_keys, at), update(block.values, own_values, at)
        )
    return tuple(copied)

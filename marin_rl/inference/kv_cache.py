"""The KV cache of a transformer: its blocks, and what is written into them.

Owns the empty cache, a token's keys and values on their way to their position, and the cache of a
prompt on its way to the slots that begin with it. Leaves out how a block is read (`attention`) and
what the keys and values are (`decoder`).

Axes: S sequence slots, B positions of a block, K key/value heads, H head size, M positions of
pieces of prompts, R prompts of one prefill, P positions of a prompt bucket.

The cache of a layer is a tuple of blocks of B positions. Keys lie as [S, K, H, B], so that both of
attention's products read contiguous memory; each block is an array of its own, so that a block past
the longest sequence is skipped without a copy.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from marin_rl.inference.attention import Block
from marin_rl.inference.placement import SLOTS, TENSOR, constrain
from marin_rl.inference.weights import DecoderSpec

# Fewest positions of a block, and most blocks of a cache: every block is a
# conditional of its own in the compiled step.
BLOCK_MIN = 64
BLOCKS_MAX = 12

Cache = tuple[tuple[Block, ...], ...]


def block_size(context_length: int) -> int:
    """Positions of a cache block: a power of two, so that at most BLOCKS_MAX blocks are needed."""
    return max(BLOCK_MIN, 2 ** math.ceil(math.log2(context_length / BLOCKS_MAX)))


def empty_cache(
    spec: DecoderSpec, slots: int, context_length: int, dtype: jnp.dtype, size: int = 0
) -> Cache:
    """Zeros for `slots` sequences of `context_length`, rounded up to whole blocks.

    Blocks have `size` positions, or those that the context asks for.
    """
    size = size or block_size(context_length)
    blocks = -(-context_length // size)
    keys = (slots, spec.kv_heads, spec.head_size, size)
    values = (slots, spec.kv_heads, size, spec.head_size)
    return tuple(
        tuple(Block(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(blocks))
        for _ in range(spec.layers)
    )


def cache_length(cache: Cache) -> int:
    """Positions that each slot of the cache can hold."""
    return len(cache[0]) * cache[0][0].keys.shape[-1]


def write(
    blocks: tuple[Block, ...], key_SKH: Array, value_SKH: Array, positions_S: Array
) -> tuple[Block, ...]:
    """Put each slot's key and value at its position; positions outside a block are dropped."""
    size = blocks[0].keys.shape[-1]
    written = []
    for index, block in enumerate(blocks):
        # every block gets the write, and drops a position outside of it: no branch is needed
        at = positions_S - index * size
        # negative indices would count from the end, so they are sent past it instead
        at = jnp.where(at < 0, size, at)
        # `vmap` over slots: each writes one position of its own, which XLA does in place
        written.append(_spread(jax.vmap(_write_one)(block, key_SKH, value_SKH, at)))
    return tuple(written)


def _write_one(block: Block, key_KH: Array, value_KH: Array, at: Array) -> Block:
    """Block of a slot, with a key and a value at position `at`."""
    keys = block.keys.at[:, :, at].set(key_KH, mode="drop", unique_indices=True)
    values = block.values.at[:, at].set(value_KH, mode="drop", unique_indices=True)
    return Block(keys, values)


def _spread(block: Block) -> Block:
    """Spread a cache over a mesh: slots over data and fsdp, heads over tensor."""
    return Block(constrain(block.keys, SLOTS, TENSOR), constrain(block.values, SLOTS, TENSOR))


def write_at(
    blocks: tuple[Block, ...], key_MKH: Array, value_MKH: Array, slot_M: Array, positions_M: Array
) -> tuple[Block, ...]:
    """Put keys and values at positions of slots; positions outside a block are dropped."""
    size = blocks[0].keys.shape[-1]
    written = []
    for index, block in enumerate(blocks):
        at = positions_M - index * size
        at = jnp.where(at < 0, size, at)  # as in `write`
        keys = block.keys.at[slot_M, :, :, at].set(key_MKH, mode="drop")
        values = block.values.at[slot_M, :, at].set(value_MKH, mode="drop")
        written.append(Block(keys, values))
    return tuple(written)


def copy_in(
    cache: Cache, buffer: tuple[tuple[Array, Array], ...], source_S: Array, rows: int
) -> Cache:
    """Write prompt `source_S[s]` < `rows` into each slot s, one slot after the other.

    All at once would first gather what is to be written: as much memory as the cache itself.
    """
    size, length = cache[0][0].keys.shape[-1], buffer[0][0].shape[-1]
    taken_S = source_S < rows
    # slots that take a prompt come first, so that the loop is over them alone
    first_S = jnp.argsort(~taken_S)

    def body(index, cache):
        seq_slot = first_S[index]
        source = source_S[seq_slot]
        return tuple(
            tuple(
                _copy_block(block, keys, values, number * size, source, seq_slot)
                if number * size < length
                else block
                for number, block in enumerate(blocks)
            )
            for blocks, (keys, values) in zip(cache, buffer, strict=True)
        )

    cache = jax.lax.fori_loop(0, jnp.sum(taken_S), body, cache)
    return tuple(tuple(_spread(block) for block in blocks) for blocks in cache)


def _copy_block(
    block: Block, keys: Array, values: Array, start: int, source: Array, seq_slot: Array
) -> Block:
    """A block in which the slot has the prompt's positions from `start` on; others untouched."""
    # the last block of a short prompt is filled in part: what lies behind is masked until a token
    # is written there
    stop = start + min(block.keys.shape[-1], keys.shape[-1] - start)
    one_keys = jax.lax.dynamic_slice_in_dim(keys[..., start:stop], source, 1)
    one_values = jax.lax.dynamic_slice_in_dim(values[:, :, start:stop], source, 1)
    update = jax.lax.dynamic_update_slice
    return Block(
        update(block.keys, one_keys, (seq_slot, 0, 0, 0)),
        update(block.values, one_values, (seq_slot, 0, 0, 0)),
    )

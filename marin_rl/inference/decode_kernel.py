"""A GPU's kernel for the attention of a decode step: each slot is read as far as it goes.

As jax's `pallas.ops.gpu.decode_attention` (flash decoding, a slot's positions in several splits),
of several heads and from a window's start. Imported only where it runs, for Pallas takes a second.
Leaves out windows, sinks and other forms (`kv_cache`).

Axes: S sequence slots, B positions, K key/value heads, G query heads of each, H head
size, P splits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Int32

# Positions of a step, and programs that share a long sequence between them: as many as still keep
# all programs few enough to run at once.
POSITIONS, SPLITS_MAX, PROGRAMS_MAX = 128, 16, 2048

# Rows of a product: the fewest that a tensor core takes.
ROWS = 16

_LEAST = float(jnp.finfo(jnp.float32).min)


def attend(
    query_SKGH: Float[Array, "S K G H"],
    keys_SKBH: Float[Array, "S K B H"],
    values_SKBH: Float[Array, "S K B H"],
    starts_S: Int32[Array, " S"],
    ends_S: Int32[Array, " S"],
    *,
    interpret: bool = False,
) -> tuple[Float32[Array, "S K G H"], Float32[Array, "S K G"], Float32[Array, "S K G"]]:
    """Softmax over positions `starts_S` to `ends_S` of each slot; its sum, and its maximum.

    `interpret` computes the kernel's steps on any device.
    """
    S, K, G, H = query_SKGH.shape
    B = keys_SKBH.shape[2]
    splits = SPLITS_MAX
    while splits > 1 and (B % (splits * POSITIONS) or S * K * splits > PROGRAMS_MAX):
        splits //= 2
    of_slot = pl.BlockSpec((None,), lambda i, j, s, k: (s,))
    of_cache = pl.BlockSpec((None, None, B // splits, H), lambda i, j, s, k: (s, k, j, 0))
    of_sums = pl.BlockSpec((None, None, None, ROWS), lambda i, j, s, k: (j, s, k, i))
    out_PSKGH, total_PSKG, highest_PSKG = pl.pallas_call(
        partial(_kernel, heads=G),
        grid=(pl.cdiv(G, ROWS), splits, S, K),
        in_specs=[
            of_slot,
            of_slot,
            pl.BlockSpec((None, None, ROWS, H), lambda i, j, s, k: (s, k, i, 0)),
            of_cache,
            of_cache,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, ROWS, H), lambda i, j, s, k: (j, s, k, i, 0)),
            of_sums,
            of_sums,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, S, K, G, H), jnp.float32),
            *[jax.ShapeDtypeStruct((splits, S, K, G), jnp.float32)] * 2,
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(starts_S, ends_S, query_SKGH, keys_SKBH, values_SKBH)
    highest_SKG = highest_PSKG.max(0)
    # of a split without positions 0, as its sums are
    scale_PSKG = jnp.exp(highest_PSKG - highest_SKG)
    total_SKG = (total_PSKG * scale_PSKG).sum(0)
    out_SKGH = (out_PSKGH * scale_PSKG[..., None]).sum(0) / total_SKG[..., None]
    return out_SKGH, total_SKG, highest_SKG


def _kernel(*refs: Any, heads: int) -> None:
    """A split of a slot: query [ROWS, H], keys and values [positions, H], sums [ROWS]."""
    start_ref, end_ref, query_ref, keys_ref, values_ref, *out_refs = refs
    out_ref, total_ref, highest_ref = out_refs
    size = keys_ref.shape[0]
    positions = min(POSITIONS, size)
    present = jnp.arange(ROWS) < heads - ROWS * pl.program_id(0)
    first = pl.program_id(1) * size
    start = jnp.maximum(start_ref[()] - first, 0)
    end = jnp.minimum(end_ref[()] - first, size)
    query = triton.load(query_ref.at[:, :], mask=present[:, None], other=0)

    def step(index: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, total, highest = state
        at = pl.ds(index * positions, positions)
        scores = triton.dot(query, keys_ref[at, :].T)
        here = index * positions + jnp.arange(positions)
        scores = jnp.where(((here >= start) & (here < end))[None], scores, _LEAST)
        # every step has a position that is seen
        higher = jnp.maximum(highest, scores.max(-1))
        kept, terms = jnp.exp(highest - higher), jnp.exp(scores - higher[:, None])
        values = values_ref[at, :]
        added = triton.dot(terms.astype(values.dtype), values)
        return out * kept[:, None] + added, total * kept + terms.sum(-1), higher

    nothing = (
        jnp.zeros(query_ref.shape, jnp.float32),
        jnp.zeros(ROWS, jnp.float32),
        jnp.full(ROWS, _LEAST, jnp.float32),
    )
    steps = start // positions, jnp.where(start < end, pl.cdiv(end, positions), 0)
    out, total, highest = jax.lax.fori_loop(*steps, step, nothing)
    triton.store(out_ref.at[:, :], out, mask=present[:, None])
    triton.store(total_ref.at[:], total, mask=present)
    triton.store(highest_ref.at[:], highest, mask=present)

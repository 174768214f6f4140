"""Low-rank additions to the matrices of a layer: LoRA, one adapter or none for each sequence.

Owns the arrays of one layer for all adapters that an engine has room for, and what they add to a
product. Leaves out which adapters these are (`adapters`), and the layer itself (`decoder`).

Row 0 stands for no adapter, row i for the i-th. Where every sequence has one token, all adapters
are applied to all of them, and what is not a sequence's own becomes an exact zero at rank R: so
its numbers depend on no other's adapter. Where a sequence has many tokens, as prompts do, it reads
its own adapter alone.

Axes: n adapters, R rank, N sequences, T tokens of each, p parts of a fused matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class LowRank(NamedTuple):
    """Additions of every adapter to a matrix of p parts: `a` [p, n, R, in], `b` [n, R, out] each.

    The scale alpha / rank is multiplied into `b`.
    """

    a: Float[Array, "p n R in"]
    b: tuple[Float[Array, "n R _"], ...]


class GatheredLowRank(NamedTuple):
    """The same, but that each sequence reads its own adapter alone, however few tokens it has.

    For many adapters of a large rank, all of which would take longer than one.
    """

    a: Float[Array, "p n R in"]
    b: tuple[Float[Array, "n R _"], ...]


class LayerAdapters(NamedTuple):
    """Additions to a layer's four matrices; parts are query, key, value, and gate, up."""

    qkv: LowRank | GatheredLowRank
    output: LowRank | GatheredLowRank
    gate_up: LowRank | GatheredLowRank
    down: LowRank | GatheredLowRank


def additions(
    adapters: LowRank | GatheredLowRank, x: Float[Array, "N *T in"], row_N: Int32[Array, " N"]
) -> list[Array]:
    """Additions to each part's product with `x`, [N, *T, out]: of row 0 they are zeros."""
    if isinstance(adapters, LowRank) and x.ndim == 2:
        return _masked(adapters, x, row_N)
    return _gathered(adapters, x, row_N)


def _masked(adapters: LowRank, x_ND: Array, row_N: Array) -> list[Array]:
    # Ranks first and sequences last: every part is contiguous, and the products have one width
    # whatever n is. On a CPU that takes a quarter less time than sequences first, and a sequence's
    # bits are the same however many adapters there are.
    p, n, R, size = adapters.a.shape
    z = jax.lax.dot_general(adapters.a.reshape(p * n * R, size), x_ND, (((1,), (1,)), ((), ())))
    own_nN = jnp.arange(1, n + 1)[:, None] == row_N
    # `where` and not a product: another adapter may make an infinity of these numbers
    z = jnp.where(own_nN[:, None], z.reshape(p, n, R, -1), 0)
    parts = z.reshape(p, n * R, -1)
    rank_first = (((0,), (0,)), ((), ()))
    return [
        jax.lax.dot_general(part, b.reshape(n * R, -1), rank_first)
        for part, b in zip(parts, adapters.b, strict=True)
    ]


def _gathered(adapters: LowRank | GatheredLowRank, x: Array, row_N: Array) -> list[Array]:
    # row 0 reads some adapter all the same, and its result is dropped below: every index is in
    # range
    at_N = jnp.maximum(row_N - 1, 0)
    z = jnp.einsum("n...i,pnri->pn...r", x, adapters.a[:, at_N])
    present = (row_N > 0).reshape(-1, *(1,) * (x.ndim - 1))
    parts = jnp.where(present, z, 0)
    return [
        jnp.einsum("n...r,nro->n...o", part, b[at_N])
        for part, b in zip(parts, adapters.b, strict=True)
    ]

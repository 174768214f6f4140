"""Adam whose moments are 8-bit codes (Dettmers et al., arXiv:2110.02861).

A moment is cut into blocks of consecutive values, each with its largest magnitude as a float32
scale. A code is an entry of the paper's dynamic map: seven decades of 0.1 ** 6 … 1, of 1, 2, 4 …
64 values of each sign, or of twice as many without sign, each the middle of one of equal parts of
its decade; and 0 and 1. Updates are of the moments before they are rounded. One rule is another
than the paper's: of the second moment only 0 becomes 0 (arXiv:2309.01507, section 4.1), for what
is rounded to it would be divided by epsilon in a step without gradient, such as a rare token's.

Small arrays, and those that blocks do not divide, keep float32. Scales of all arrays are one: 1/64
of a parameter's bytes at the most, which a mesh replicates.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from marin_rl.architecture import SIZE_MIN, block_of

DECADES = 7
# Values of an array that is updated in pieces, and pieces where it has no layers: each is larger
# than SIZE_MIN.
LOOPED_MIN, PIECES_MAX = 2**20, 32


@cache
def magnitudes(*, signed: bool) -> Float32[np.ndarray, " _"]:
    """The map's values from 0 to 1: 129 of a signed one, else 256."""
    values = [0.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1)
        values += list(10.0 ** (decade + 1 - DECADES) * (edges[:-1] + edges[1:]) / 2)
    return np.array([*values, 1.0], np.float32)


@cache
def _table(*, signed: bool) -> Float32[np.ndarray, "256"]:
    """Values by code: from 0 up, then those below 0, of which there is no -1."""
    positive = magnitudes(signed=signed)
    return np.concatenate([positive, -positive[1:-1]]) if signed else positive


def quantized(
    values: Float[Array, "*S"], *, signed: bool
) -> tuple[UInt8[Array, "*S"], Float32[Array, " N"]]:
    """Codes of the nearest values of the map, and scales of blocks."""
    blocks, known = _blocks(values), magnitudes(signed=signed)
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    whole = jnp.abs(blocks) / jnp.where(scales > 0, scales, 1)
    # By arithmetic, without a search over 256 values: the decade, and its part.
    decade = sum((whole >= 10.0**power).astype(jnp.int32) for power in range(1 - DECADES, 0))
    parts = jnp.left_shift(1 if signed else 2, decade)
    tens = jnp.asarray(10.0 ** np.arange(DECADES)[::-1], jnp.float32)[decade]
    part = jnp.floor((whole * tens - 0.1) / 0.9 * parts.astype(jnp.float32)).astype(jnp.int32)
    codes = parts + jnp.clip(part, 0, parts - 1) - (0 if signed else 1)
    # Neighbours at the ends of a decade may be nearer.
    middles = jnp.asarray((known[1:] + known[:-1]) / 2)
    codes += (whole > middles[codes]).astype(jnp.int32)
    codes -= (whole <= middles[codes - 1]).astype(jnp.int32)
    if signed:
        last = len(known) - 1
        codes = jnp.where((blocks < 0) & (codes > 0), last + jnp.minimum(codes, last - 1), codes)
    else:
        codes = jnp.maximum(codes, (whole > 0).astype(jnp.int32))
    return codes.astype(jnp.uint8).reshape(values.shape), scales.reshape(-1)


def dequantized(
    codes: UInt8[Array, "*S"], scales: Float32[Array, " N"], *, signed: bool
) -> Float32[Array, "*S"]:
    blocks = _blocks(codes)
    values = jnp.asarray(_table(signed=signed))[blocks.astype(jnp.int32)]
    return (values * scales.reshape(*blocks.shape[:-1], 1)).reshape(codes.shape)


def _blocks(array: Array) -> Array:
    """The array with its blocks as the last axis; no axis before those of blocks is changed."""
    blocks = block_of(array.shape)
    assert blocks is not None, array.shape
    block, axes = blocks
    return array.reshape(*array.shape[: array.ndim - axes], -1, block)


class Adam8bitState(NamedTuple):
    """Moments of each parameter as codes, or in float32, and the scales of their blocks."""

    step: Int32[Array, ""]
    mu: Any
    nu: Any
    mu_scales: Float32[Array, " N"]
    nu_scales: Float32[Array, " N"]


def scale_by_adam_8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam's direction, as `optax.scale_by_adam`."""

    def init(params: optax.Params) -> Adam8bitState:
        def zeros(p: Array) -> Array:
            return jnp.zeros(p.shape, jnp.uint8 if block_of(p.shape) else jnp.float32)

        scales = jnp.zeros(sum(map(_count, jax.tree.leaves(params))), jnp.float32)
        moments = jax.tree.map(zeros, params), jax.tree.map(zeros, params)
        return Adam8bitState(jnp.zeros((), jnp.int32), *moments, scales, scales)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        gradients, structure = jax.tree.flatten(updates)
        ends, step = np.cumsum([_count(gradient) for gradient in gradients])[:-1], state.step + 1

        def moved(g: Array, mu: Array, mu_scales: Array, nu: Array, nu_scales: Array) -> Any:
            stored = block_of(g.shape) is not None
            m = dequantized(mu, mu_scales, signed=True) if stored else mu
            v = dequantized(nu, nu_scales, signed=False) if stored else nu
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            direction = m / (1 - b1**step) / (jnp.sqrt(v / (1 - b2**step)) + eps)
            mu, mu_scales = quantized(m, signed=True) if stored else (m, mu_scales)
            nu, nu_scales = quantized(v, signed=False) if stored else (v, nu_scales)
            return direction, mu, mu_scales, nu, nu_scales

        arrays = zip(
            [gradient.astype(jnp.float32) for gradient in gradients],
            jax.tree.leaves(state.mu),
            jnp.split(state.mu_scales, ends),
            jax.tree.leaves(state.nu),
            jnp.split(state.nu_scales, ends),
            strict=True,
        )
        after = [_in_pieces(moved, *each) for each in arrays]
        directions, mu, mu_scales, nu, nu_scales = (list(each) for each in zip(*after, strict=True))
        moments = structure.unflatten(mu), structure.unflatten(nu)
        scales = jnp.concatenate(mu_scales), jnp.concatenate(nu_scales)
        pairs = zip(directions, gradients, strict=True)
        directions = structure.unflatten([d.astype(gradient.dtype) for d, gradient in pairs])
        return directions, Adam8bitState(step, *moments, *scales)

    return optax.GradientTransformation(init, update)


def _count(array: Array) -> int:
    """Number of an array's blocks."""
    blocks = block_of(array.shape)
    return 0 if blocks is None else array.size // blocks[0]


def _pieces(array: Array) -> int:
    """Parts of a large array's first axis that are updated one after the other.

    No block reaches over that axis. Of stacked layers a mesh shares it out to nobody, and of other
    arrays it may.
    """
    count, *layer = array.shape or (1,)
    blocks = block_of(array.shape)
    if blocks is None or blocks[1] == array.ndim or array.size < LOOPED_MIN:
        return 1
    if len(layer) > 1:
        return count if math.prod(layer) >= SIZE_MIN else 1
    on_mesh = any(size > 1 for size in jax.sharding.get_abstract_mesh().shape.values())
    return 1 if on_mesh else math.gcd(count, PIECES_MAX)


def _in_pieces(moved: Callable[..., Any], *arrays: Array) -> Any:
    """The results for an array: all of a large one at once needs 20 bytes for each value."""
    pieces = _pieces(arrays[0])
    if pieces == 1:
        return moved(*arrays)
    parts = [array.reshape(pieces, -1, *array.shape[1:]) for array in arrays]
    results = jax.lax.map(lambda part: moved(*part), tuple(parts))
    return [result.reshape(-1, *result.shape[2:]) for result in results]

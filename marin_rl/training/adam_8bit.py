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

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from marin_rl.architecture import block_of

DECADES = 7


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
        mu = _Moments(state.mu, state.mu_scales, signed=True)
        nu = _Moments(state.nu, state.nu_scales, signed=False)
        step, moved = state.step + 1, list[Array]()
        for gradient in gradients:
            g = gradient.astype(jnp.float32)
            m = mu.updated(lambda moment, g=g: b1 * moment + (1 - b1) * g)
            v = nu.updated(lambda moment, g=g: b2 * moment + (1 - b2) * g * g)
            direction = m / (1 - b1**step) / (jnp.sqrt(v / (1 - b2**step)) + eps)
            moved.append(direction.astype(gradient.dtype))
        (codes, mu_scales), (others, nu_scales) = mu.stored(), nu.stored()
        moments = structure.unflatten(codes), structure.unflatten(others)
        return structure.unflatten(moved), Adam8bitState(step, *moments, mu_scales, nu_scales)

    return optax.GradientTransformation(init, update)


def _count(array: Array) -> int:
    """Number of an array's blocks."""
    blocks = block_of(array.shape)
    return 0 if blocks is None else array.size // blocks[0]


class _Moments:
    """One of the moments of all arrays, in their order: read, updated, and rounded."""

    def __init__(self, arrays: Any, scales: Array, *, signed: bool) -> None:
        self._arrays, self._signed = iter(jax.tree.leaves(arrays)), signed
        self._scales, self._rounded_scales = scales, [scales[:0]]
        self._rounded: list[Array] = []

    def updated(self, update: Callable[[Array], Array]) -> Array:
        """The next array's moment, updated and not rounded."""
        array = next(self._arrays)
        count = _count(array)
        if not count:
            self._rounded.append(update(array))
            return self._rounded[-1]
        scales, self._scales = jnp.split(self._scales, [count])
        moment = update(dequantized(array, scales, signed=self._signed))
        codes, scales = quantized(moment, signed=self._signed)
        self._rounded.append(codes)
        self._rounded_scales.append(scales)
        return moment

    def stored(self) -> tuple[list[Array], Array]:
        """All arrays as they are stored, and all scales."""
        return self._rounded, jnp.concatenate(self._rounded_scales)

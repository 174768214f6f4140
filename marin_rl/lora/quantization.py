"""Weights quantised by blocks: int8 and NF4, as NumPy arrays.

Owns both formats and the way into them and back, one stacked weight at a time. Every layer is
flattened, filled up with zeros to whole blocks, and each block is divided by its largest magnitude
(absmax). Leaves out the products with such weights (`marin_rl.inference.linear_layers`), which
dequantise to the same numbers.

- `int8`: round(w / scale) in 8 bits, scale = absmax / 127 in float32, one for 128 weights: 1.032
  bytes a weight.
- `nf4`: the nearest of 16 levels, quantiles of a normal distribution, of w / absmax, one absmax for
  64 weights; the absmax minus their mean are themselves 8 bits, in blocks of 256 (Dettmers et al.
  2023, arXiv:2305.14314, section 3 and appendix E): 0.516 bytes a weight. Here the 8 bits are
  integers, where the paper's are floats.

Axes: L layers, n blocks of a layer, B bytes of a block.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float, Float32

from marin_rl.lora.adapter import Shapes, linear_shapes

Scheme = Literal["int8", "nf4"]
SCHEMES: tuple[str, ...] = get_args(Scheme)
BLOCKS: Mapping[str, int] = {"int8": 128, "nf4": 64}
ABSMAX_BLOCK = 256

# Counts up when the same weights would be other bytes.
FORMAT_VERSION = 1

# arXiv:2305.14314, appendix E.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# Arrays of a quantised weight by the last part of their names, PATH:codes and so on.
FIELDS = ("codes", "scales", "absmax_steps", "absmax_mean")

Arrays = dict[str, np.ndarray]


def quantized_shapes(weight: tuple[int, ...], scheme: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a stacked weight `[L, ...]`, by field."""
    layers, size = weight[0], math.prod(weight[1:])
    blocks = -(-size // BLOCKS[scheme])
    if scheme == "int8":
        return {"codes": (layers, blocks, BLOCKS[scheme]), "scales": (layers, blocks)}
    return {
        "codes": (layers, blocks, BLOCKS[scheme] // 2),  # two 4-bit codes in a byte
        "scales": (layers, blocks),
        "absmax_steps": (layers, -(-blocks // ABSMAX_BLOCK)),
        "absmax_mean": (layers,),
    }


def quantized_bytes(weight: tuple[int, ...], scheme: str) -> int:
    sizes = {name: math.prod(shape) for name, shape in quantized_shapes(weight, scheme).items()}
    narrow = ("codes",) if scheme == "int8" else ("codes", "scales")
    return sum(size * (1 if name in narrow else 4) for name, size in sizes.items())


def quantized(weight: Float[np.ndarray, "L ..."], scheme: str) -> Arrays:
    """Quantise a stacked weight; arrays by field, see `quantized_shapes`."""
    of_layer = _int8 if scheme == "int8" else _nf4
    # One layer at a time, so that only one is there in float32 next to the weight.
    layers = [of_layer(_in_blocks(layer, BLOCKS[scheme])) for layer in weight]
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}


def dequantized(arrays: Mapping[str, Any], weight: tuple[int, ...]) -> Float32[np.ndarray, "L ..."]:
    """Weights of the shape `weight` that quantised arrays stand for."""
    flat = dequantized_blocks(np, {name: np.asarray(array) for name, array in arrays.items()})
    return flat.reshape(weight[0], -1)[:, : math.prod(weight[1:])].reshape(weight)


def dequantized_blocks(xp: Any, arrays: Mapping[str, Any]) -> Any:
    """Weights `[..., n, B]` of blocks, padding included; `xp` is NumPy, or JAX's."""
    codes, scales, steps = arrays["codes"], arrays["scales"], arrays.get("absmax_steps")
    if steps is None:
        return codes.astype(np.float32) * scales[..., None]
    # The first half of a block is in the low four bits of its bytes, the second in the high: to
    # interleave what is in a byte takes longer.
    levels = xp.asarray(NF4_LEVELS, np.float32)
    values = xp.concatenate([levels[codes & 15], levels[codes >> 4]], axis=-1)
    steps = xp.repeat(steps, ABSMAX_BLOCK, axis=-1)[..., : scales.shape[-1]]
    absmax = scales.astype(np.float32) * steps + arrays["absmax_mean"][..., None]
    # A magnitude: rounding may take a small one below zero, which would turn signs around.
    return values * xp.maximum(absmax, np.float32(0))[..., None]


def quantize_base(base: Mapping[str, Any], scheme: str) -> dict[str, Any]:
    """A base with the weights of all its linear layers quantised, named PATH:codes and so on."""
    layers = linear_shapes({name: tuple(array.shape) for name, array in base.items()})
    result = dict[str, Any]()
    for path, array in base.items():
        if path not in layers:
            result[path] = array
            continue
        arrays = quantized(np.asarray(array, np.float32), scheme)
        result |= {f"{path}:{field}": part for field, part in arrays.items()}
    return result


def dequantize_base(parameters: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The parameters with quantised weights in float32; `shapes` are those of the base."""
    result = {path: array for path, array in parameters.items() if not is_quantized(path)}
    for path in linear_shapes(shapes):
        names = {field: f"{path}:{field}" for field in FIELDS}
        arrays = {field: parameters[name] for field, name in names.items() if name in parameters}
        if arrays:
            result[path] = dequantized(arrays, shapes[path])
    return result


def is_quantized(name: str) -> bool:
    return name.rpartition(":")[2] in FIELDS


def quantized_digest(base_digest: str, scheme: str | None) -> str:
    """Identity of a base in its quantisation; without one, its own digest."""
    if scheme is None:
        return base_digest
    text = f"{base_digest} {scheme} {FORMAT_VERSION}"
    return hashlib.sha256(text.encode()).hexdigest()


def _in_blocks(layer: np.ndarray, size: int) -> np.ndarray:
    flat = np.asarray(layer, np.float32).reshape(-1)
    return np.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def _int8(blocks: np.ndarray) -> Arrays:
    # 127 and not 128: the codes are symmetric, so that w and -w have the same magnitude.
    scales = np.abs(blocks).max(axis=1) / np.float32(127)
    codes = np.rint(blocks / _divisors(scales)[:, None])
    return {"codes": np.clip(codes, -127, 127).astype(np.int8), "scales": scales}


def _nf4(blocks: np.ndarray) -> Arrays:
    absmax = np.abs(blocks).max(axis=1)
    levels = np.asarray(NF4_LEVELS, np.float32)
    middles = (levels[1:] + levels[:-1]) / 2  # [15], bounds between neighbouring levels
    codes = np.searchsorted(middles, blocks / _divisors(absmax)[:, None]).astype(np.uint8)
    half = blocks.shape[1] // 2
    # In float64, for the sum of many numbers is rounded as its order has it.
    mean = np.float32(absmax.mean(dtype=np.float64))
    # No magnitude is negative: less their mean, both signs of the 8 bits are used.
    apart = absmax - mean
    steps = np.abs(_in_blocks(apart, ABSMAX_BLOCK)).max(axis=1) / np.float32(127)
    of_each = np.repeat(steps, ABSMAX_BLOCK)[: len(absmax)]
    return {
        "codes": codes[:, :half] | (codes[:, half:] << 4),
        "scales": np.rint(apart / _divisors(of_each)).astype(np.int8),
        "absmax_steps": steps,
        "absmax_mean": np.asarray(mean),
    }


def _divisors(scales: np.ndarray) -> np.ndarray:
    """Scales to divide by; a block of zeros has the codes of zero."""
    return np.where(scales > 0, scales, np.float32(1))

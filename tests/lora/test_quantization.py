"""Both formats by hand: codes, scales, bytes, padding, and the identity of a quantised base."""

import numpy as np
import pytest
from support.adapters import SHAPES

from marin_rl.lora.adapter import linear_shapes
from marin_rl.lora.quantization import (
    NF4_LEVELS,
    dequantize_base,
    dequantized,
    is_quantized,
    quantize_base,
    quantized,
    quantized_bytes,
    quantized_digest,
    quantized_shapes,
)


def random_weight(*shape: int) -> np.ndarray:
    """A weight of unit normal numbers."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_int8_divides_by_a_127th_of_the_largest_magnitude_of_a_block():
    weight = np.zeros((1, 256), np.float32)
    weight[0, :4] = [2.54, -1.27, 0.021, 0.009]  # scale 0.02
    weight[0, 128] = -12.7  # scale 0.1
    arrays = quantized(weight, "int8")
    assert arrays["codes"].dtype == np.int8
    assert arrays["codes"][0, 0, :4].tolist() == [127, -64, 1, 0]  # -63.5 rounds to even
    assert arrays["codes"][0, 1, 0] == -127
    np.testing.assert_allclose(arrays["scales"], [[0.02, 0.1]], rtol=1e-6)
    back = dequantized(arrays, weight.shape)
    np.testing.assert_allclose(back[0, :4], [2.54, -1.28, 0.02, 0.0], atol=1e-6)


def test_nf4_takes_the_nearest_level_and_packs_the_halves_of_a_block():
    weight = np.zeros((1, 64), np.float32)
    weight[0, :3] = [2.0, -2.0, 0.17]  # 0.085 of the absmax: nearest 0.0796, level 8
    weight[0, 32:34] = [0.9, -1.4]  # 0.45, level 12; -0.7, level 1
    arrays = quantized(weight, "nf4")
    assert arrays["codes"].dtype == np.uint8
    assert arrays["codes"][0, 0, :3].tolist() == [15 | 12 << 4, 0 | 1 << 4, 8 | 7 << 4]
    levels = [NF4_LEVELS[code] for code in (15, 0, 8)]
    np.testing.assert_allclose(dequantized(arrays, weight.shape)[0, :3], np.multiply(levels, 2.0))


def test_the_second_level_keeps_the_absmax_to_a_254th_of_their_range():
    weight = np.zeros((1, 3 * 64), np.float32)
    weight[0, ::64] = [1.0, 2.0, 6.0]  # mean 3, apart by -2, -1, 3: steps of 3 / 127
    arrays = quantized(weight, "nf4")
    assert arrays["scales"][0].tolist() == [-85, -42, 127]
    np.testing.assert_allclose(arrays["absmax_mean"], [3.0])
    back = dequantized(arrays, weight.shape)[0, ::64]
    np.testing.assert_allclose(back, [3 - 85 * 3 / 127, 3 - 42 * 3 / 127, 6.0], rtol=1e-6)


@pytest.mark.parametrize(("scheme", "limit"), [("int8", 1.05), ("nf4", 0.56)])
def test_bytes_of_a_weight(scheme, limit):
    weight = random_weight(2, 256, 128)
    arrays = quantized(weight, scheme)
    size = sum(array.nbytes for array in arrays.values())
    assert size == quantized_bytes(weight.shape, scheme) <= limit * weight.size
    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes == quantized_shapes(weight.shape, scheme)


@pytest.mark.parametrize(("scheme", "error"), [("int8", 0.012), ("nf4", 0.11)])
def test_the_error_of_normal_weights(scheme, error):
    weight = random_weight(1, 128, 128)
    apart = dequantized(quantized(weight, scheme), weight.shape) - weight
    # Expected: int8 about scale / sqrt(12) for a scale of 2.8 / 127, NF4 about 0.09 (measured).
    assert error / 2 < np.sqrt(np.mean(apart**2)) < error


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_sizes_that_blocks_do_not_divide_are_filled_up_with_zeros(scheme):
    weight = random_weight(2, 10, 7)
    padded = np.zeros((2, 128), np.float32)
    padded[:, :70] = weight.reshape(2, 70)
    whole = dequantized(quantized(padded, scheme), padded.shape)
    own = dequantized(quantized(weight, scheme), weight.shape)
    np.testing.assert_array_equal(own.reshape(2, 70), whole[:, :70])
    assert not whole[:, 70:].any()
    assert not dequantized(quantized(np.zeros_like(padded), scheme), padded.shape).any()


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_only_linear_layers_of_a_base_are_quantised(scheme):
    base = {path: random_weight(*shape) for path, shape in SHAPES.items()}
    parameters = quantize_base(base, scheme)
    kept = {path for path in parameters if not is_quantized(path)}
    assert kept == set(SHAPES) - set(linear_shapes(SHAPES))
    assert all(parameters[path] is base[path] for path in kept)
    back = dequantize_base(parameters, SHAPES)
    assert {path: array.shape for path, array in back.items()} == dict(SHAPES)
    again = quantize_base(back, scheme)
    if scheme == "int8":  # its codes are its own: a second time changes nothing
        names = [name for name in again if name.endswith(":codes")]
        assert all((again[name] == parameters[name]).all() for name in names)


def test_the_identity_of_a_base_is_another_for_each_scheme():
    digests = {quantized_digest("a" * 64, scheme) for scheme in (None, "int8", "nf4")}
    assert len(digests) == 3
    assert quantized_digest("a" * 64, None) == "a" * 64

"""Products in 16 bits: their gradients, and that operands of all of them have 16 bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marin_rl.models.block import NARROW_ROWS, narrow_product, times

TOKENS, WIDTH, VOCABULARY = 12, 64, 200


def graded(dtype: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Logits, and gradients of the mean log-probability of some targets."""
    rng = np.random.default_rng(4)
    states = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), dtype)
    head = jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)) / 8, dtype)
    targets = rng.integers(0, VOCABULARY, TOKENS)

    def loss(states: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = narrow_product(1, states, head)
        chosen = jax.nn.log_softmax(logits)[np.arange(TOKENS), targets]
        return chosen.mean(), logits

    gradients, logits = jax.grad(loss, argnums=(0, 1), has_aux=True)(states, head)
    return logits, gradients


def test_gradients_in_16_bits_are_those_of_float32_but_for_rounding() -> None:
    logits, narrow = graded("bfloat16")
    exact, wide = graded("float32")
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, atol=0.05)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.dtype == jnp.bfloat16
        error = np.abs(np.asarray(ours, np.float32) - np.asarray(theirs))
        # a few units of bfloat16's last place, of the largest
        assert error.max() < 0.02 * np.abs(np.asarray(theirs)).max()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_no_product_has_an_operand_in_float32(platform: str) -> None:
    """XLA on a CPU multiplies 16 bits only where sums in float32 are asked for."""
    shapes = (
        jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.bfloat16),
    )
    loss = lambda states, head: jnp.sum(jnp.exp(narrow_product(1, states, head)))
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*shapes)
    text = program.lower(lowering_platforms=(platform,)).as_text()
    products = re.findall(r"dot_general.*: \((tensor<\S+>), (tensor<\S+>)\) -> (tensor<\S+>)", text)
    assert len(products) == 3  # forward, and the gradients of states and head
    for left, right, result in products:
        assert left.endswith("xbf16>")
        assert right.endswith("xbf16>")
        assert result.endswith("xf32>")


@pytest.mark.parametrize("rows", [NARROW_ROWS - 2, NARROW_ROWS])
def test_a_product_over_two_axes_is_that_of_float32_but_for_rounding(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 4, 16)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(24, 4, 16)), jnp.bfloat16)
    wide_x, wide_weight = (np.asarray(each, np.float64) for each in (x, weight))
    slope = rng.normal(size=(rows, 24))

    def loss(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = times(x, weight, over=2)
        return jnp.sum(slope * out.astype(jnp.float32)), out

    expected = (
        np.einsum("no,okh->nkh", slope, wide_weight),
        np.einsum("no,nkh->okh", slope, wide_x),
        np.einsum("nkh,okh->no", wide_x, wide_weight),
    )
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    for inputs in (x, jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))):
        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(inputs, weight)
        for ours, exact in zip((*gradients, out), expected, strict=True):
            assert ours.dtype == jnp.bfloat16
            assert np.abs(np.asarray(ours, np.float64) - exact).max() < 0.01 * np.abs(exact).max()

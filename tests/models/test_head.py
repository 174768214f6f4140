"""The output head in 16 bits on an accelerator: gradients, and the operands of its products."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.models.block import narrow_head

TOKENS, WIDTH, VOCABULARY = 12, 64, 200


def graded(dtype: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Logits, and gradients of the mean log-probability of some targets."""
    rng = np.random.default_rng(4)
    states = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), dtype)
    head = jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)) / 8, dtype)
    targets = rng.integers(0, VOCABULARY, TOKENS)

    def loss(states: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = narrow_head(states, head)
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


def test_no_product_of_a_gpu_has_an_operand_in_float32() -> None:
    shapes = (
        jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.bfloat16),
    )
    loss = lambda states, head: jnp.sum(jnp.exp(narrow_head(states, head)))
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*shapes)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"dot_general.*: \((tensor<\S+>), (tensor<\S+>)\) -> (tensor<\S+>)", text)
    assert len(products) == 3  # forward, and the gradients of states and head
    for left, right, result in products:
        assert left.endswith("xbf16>")
        assert right.endswith("xbf16>")
        assert result.endswith("xf32>")

"""Adam with 8-bit moments: the map of codes by hand, Adam's directions, curves beside AdamW's."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training.batches import random_batch
from training.steps import take_step

from marin_rl.architecture import block_of, moment_bytes
from marin_rl.config import load_config
from marin_rl.planning import plan
from marin_rl.training.adam_8bit import (
    _pieces,
    dequantized,
    magnitudes,
    quantized,
    scale_by_adam_8bit,
)
from marin_rl.training.compiled_step import CompiledStep, supervised_settings, to_fixed_shape
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.state import first_parameters

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
WIDE = ("policy.model.hidden_size=64", "policy.model.vocab_size=104")
EIGHT = "training.optimizer=adamw_8bit"


def test_the_map_has_the_papers_values():
    signed, unsigned = magnitudes(signed=True), magnitudes(signed=False)
    assert (len(signed), len(unsigned)) == (129, 256)
    # 0, one value around 0.55e-6, two of the next decade, …, 64 of the last, and 1.
    np.testing.assert_allclose(signed[:4], [0, 0.55e-6, 3.25e-6, 7.75e-6], rtol=1e-6)
    np.testing.assert_allclose(signed[-3:], [1 - 3 * 0.9 / 128, 1 - 0.9 / 128, 1], rtol=1e-6)
    np.testing.assert_allclose(unsigned[:4], [0, 0.325e-6, 0.775e-6, 2.125e-6], rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_values_become_the_nearest_of_the_map(signed):
    rng = np.random.default_rng(7)
    known = magnitudes(signed=signed).astype(np.float64)
    scales = np.array([0.03, 0.0, 5.0], np.float32)
    parts = 10.0 ** rng.uniform(-8, 0, (3, 64, 256)) * rng.choice([-1, 1], (3, 64, 256))
    parts[:, :, 0], parts[:, :, 1] = 1, 0  # the largest of each block, and nothing
    if not signed:
        parts = np.abs(parts)
    values = np.asarray(parts * scales[:, None, None], np.float32)
    codes, found = quantized(jnp.asarray(values), signed=signed)
    assert codes.dtype == jnp.uint8
    np.testing.assert_array_equal(np.asarray(found), np.repeat(scales, 64))
    back = np.asarray(dequantized(codes, found, signed=signed), np.float64)
    assert not back[1].any()
    for scale, own, read in zip(scales[::2], values[::2], back[::2], strict=True):
        whole = np.abs(own.astype(np.float64) / np.float64(scale))
        error = np.abs(whole[..., None] - known).min(-1)
        # A second moment that is not 0 is never 0; there is no -1.
        kept = (whole > known[2] / 2) & (whole < known[-2])
        np.testing.assert_allclose(
            np.abs(np.abs(read / scale) - whole)[kept], error[kept], rtol=1e-3, atol=1e-7
        )
        np.testing.assert_array_equal(np.sign(read)[kept], np.sign(own)[kept])
        np.testing.assert_array_equal(read[..., 0], scale)
    if not signed:
        assert (back[0][values[0] > 0] > 0).all()


def test_blocks_lie_in_the_last_axes_that_have_a_power_of_two():
    assert block_of((30, 576, 1536)) == (256, 1)
    assert block_of((30, 3, 3, 64, 576)) == (64, 1)
    assert block_of((30, 1536, 8)) == (256, 2)  # of an adapter of rank 8
    assert block_of((576,)) is None  # small
    assert block_of((4099, 3)) is None  # odd
    assert moment_bytes((64, 256)) == 64 * 256 * 2 + 2 * 4 * 64
    assert moment_bytes((10, 3)) == 8 * 30


@pytest.mark.slow
def test_directions_are_nearly_adams_and_small_arrays_exactly():
    rng = np.random.default_rng(1)
    shapes = {"matrix": (8, 32, 256), "norm": (576,)}
    parameters = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    ours, theirs = scale_by_adam_8bit(0.9, 0.95, 1e-8), optax.scale_by_adam(0.9, 0.95, 1e-8)
    states = ours.init(parameters), theirs.init(parameters)
    assert states[0].mu["matrix"].dtype == jnp.uint8
    assert states[0].mu_scales.shape == (8 * 32,)
    means = {name: rng.normal(0, 1e-3, shape) for name, shape in shapes.items()}
    for step in range(20):
        drawn = {name: mean + rng.normal(0, 1e-3, mean.shape) for name, mean in means.items()}
        gradients = {name: jnp.asarray(each, jnp.float32) for name, each in drawn.items()}
        a, mine = ours.update(gradients, states[0])
        b, other = theirs.update(gradients, states[1])
        states = mine, other
        np.testing.assert_allclose(a["norm"], b["norm"], rtol=1e-5, atol=1e-6)
        difference = np.abs(np.asarray(a["matrix"]) - np.asarray(b["matrix"]))
        assert difference.mean() < 0.02, step
        assert difference.max() < 0.5, step


@pytest.mark.slow
def test_large_arrays_are_updated_piece_by_piece_to_the_same_values(monkeypatch):
    rng = np.random.default_rng(2)
    shapes = {"layers": (3, 32, 256), "words": (1024, 256), "across": (3, 1024, 8)}
    drawn = {n: jnp.asarray(rng.normal(0, 1, s), jnp.float32) for n, s in shapes.items()}

    def updated() -> Any:  # directions and state
        adam = scale_by_adam_8bit(0.9, 0.95, 1e-8)
        _, state = adam.update(drawn, adam.init(drawn))
        return adam.update(drawn, state)

    whole = updated()
    monkeypatch.setattr("marin_rl.training.adam_8bit.LOOPED_MIN", 1)
    assert [_pieces(drawn[name]) for name in shapes] == [3, 32, 3]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(updated()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_step_without_gradient_moves_no_farther_than_adams_would():
    # A value far below its block's largest, as of a token that is seldom seen: its second moment is
    # rounded up from 0, and is not divided by epsilon.
    gradient = np.full((16, 256), 1e-7, np.float32)
    gradient[:, 0] = 1.0
    parameters = {"a": jnp.zeros((16, 256))}
    adam = scale_by_adam_8bit(0.9, 0.95, 1e-8)
    _, state = adam.update({"a": jnp.asarray(gradient)}, adam.init(parameters))
    update, _ = adam.update({"a": jnp.zeros((16, 256))}, state)
    assert np.abs(np.asarray(update["a"])).max() < 1.0


def losses(tokenizer, *overrides: str) -> list[float]:
    config = load_config(DEBUG, [*WIDE, "training.learning_rate=3e-3", *overrides])
    adamw, settings = policy_adamw(config.training), supervised_settings(config)
    program = CompiledStep(config, tokenizer, adamw, settings)
    state, found = program.first_state(first_parameters(config, tokenizer), 0), list[float]()
    for step in range(40):
        rows = to_fixed_shape(random_batch(6, seed=step % 2), 6, 6, program.layout)
        state, metrics, _ = take_step(program, state, rows)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.slow
def test_a_curve_is_adamws_within_two_hundredths(tokenizer):
    theirs, ours = losses(tokenizer), losses(tokenizer, EIGHT)
    assert theirs[-1] < 0.6 * theirs[0]  # it is learned by heart
    np.testing.assert_allclose(ours, theirs, rtol=0.02)


def test_the_plan_counts_a_quarter_of_the_moments():
    ours, theirs = plan(load_config(DEBUG, [*WIDE, EIGHT])), plan(load_config(DEBUG, [*WIDE]))
    assert ours.trained_parameters == theirs.trained_parameters
    assert ours.trained_parameters
    # 4 bytes of parameters, and 8 of moments or 2.125: blocks of 64 have a scale each.
    assert theirs.checkpoint_bytes == 12 * ours.trained_parameters
    assert ours.checkpoint_bytes == pytest.approx(6.125 * ours.trained_parameters, rel=0.01)

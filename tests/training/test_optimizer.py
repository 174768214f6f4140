"""AdamW: the schedule at every step, what decays, and the clip, by hand."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

from marin_rl.config import SFTConfig, TrainingConfig
from marin_rl.lora.adapter import LinearShape
from marin_rl.training.optimizer import (
    learning_rate_schedule,
    make_optimizer,
    policy_adamw,
    scale_by_adam_offloaded,
    sft_adamw,
)


def rates(steps, **settings):
    adamw = policy_adamw(TrainingConfig(**{"learning_rate": 1.0, **settings}))
    return [float(learning_rate_schedule(adamw)(step)) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 0}, [1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1]),
        (
            {"warmup_steps": 0, "schedule": "linear", "schedule_steps": 4},
            [1, 0.75, 0.5, 0.25, 0, 0],
        ),
        (
            {"warmup_steps": 2, "schedule": "linear", "schedule_steps": 6},
            [0.5, 1, 1, 0.75, 0.5, 0.25, 0],
        ),
        ({"warmup_steps": 0, "schedule": "cosine", "schedule_steps": 2}, [1, 0.5, 0, 0]),
        (
            {"warmup_steps": 1, "schedule": "cosine", "schedule_steps": 7, "schedule_restarts": 2},
            [1, 1, 0.5, 1, 0.5, 1, 0.5, 0, 0],
        ),
    ],
)
def test_the_learning_rate_of_every_step(settings, expected):
    np.testing.assert_allclose(rates(len(expected), **settings), expected, atol=1e-6)


def test_the_warm_start_decays_over_its_own_steps():
    schedule = learning_rate_schedule(sft_adamw(SFTConfig(steps=10), TrainingConfig()))
    found = [float(schedule(step)) for step in (0, 5, 9)]
    np.testing.assert_allclose(found, [1e-3, 5e-4, 1e-4], rtol=1e-5)


def test_the_decay_of_a_warm_start_begins_again():
    settings = SFTConfig(steps=8, schedule="cosine", schedule_restarts=1)
    schedule = learning_rate_schedule(sft_adamw(settings, TrainingConfig()))
    found = [float(schedule(step)) for step in (0, 2, 4, 6)]
    np.testing.assert_allclose(found, [1e-3, 5e-4, 1e-3, 5e-4], rtol=1e-5)


def updated(gradient, **settings):
    training = TrainingConfig(**{"learning_rate": 0.1, "warmup_steps": 0, **settings})
    parameters = {"matrix": np.ones((1, 2), np.float32), "norm": np.ones(2, np.float32)}
    optimizer = make_optimizer(policy_adamw(training), {"matrix": True, "norm": False})
    gradients = {"matrix": np.array([gradient], np.float32), "norm": np.zeros(2, np.float32)}
    return jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(parameters), parameters)


def test_only_matrices_decay():
    updates, _ = updated([0.0, 0.0], weight_decay=0.5)
    np.testing.assert_allclose(updates["matrix"], -0.1 * 0.5 * np.ones((1, 2)))
    np.testing.assert_array_equal(updates["norm"], 0)


def test_the_first_step_moves_by_the_rate_for_any_gradient():
    updates, _ = updated([3.0, -0.01])
    np.testing.assert_allclose(updates["matrix"], [[-0.1, 0.1]], rtol=1e-4)


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Five steps of Newton and Schulz with the coefficients of Muon's author, in float64."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def test_adamw_may_be_said_and_is_what_is_not_said():
    assert TrainingConfig(optimizer="adamw") == TrainingConfig()


def test_moments_on_the_host_are_those_of_adam_and_stay_where_an_update_is_refused():
    rng, rates = np.random.default_rng(0), (0.9, 0.95, 1e-8)
    shapes = {"layers": (3, 4, 5), "embeddings": (6, 4), "norm": (4,)}
    expected = optax.scale_by_adam(*rates)
    offloaded = scale_by_adam_offloaded(*rates)
    moved = jax.jit(lambda gradient, state, ok: offloaded.update(gradient, state, ok=ok))
    gradient = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    theirs, ours = expected.init(gradient), jax.jit(offloaded.init)(gradient)
    for _ in range(3):
        directions, ours = moved(gradient, ours, True)
        also, theirs = expected.update(gradient, theirs)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), directions, also)
        gradient = {name: g + 1 for name, g in gradient.items()}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs)
    _, same = moved({n: g * np.nan for n, g in gradient.items()}, ours, False)
    moments = (same.mu, same.nu), (ours.mu, ours.nu)
    jax.tree.map(np.testing.assert_array_equal, *moments)
    assert {each.sharding.memory_kind for each in jax.tree.leaves(moments)} == {"pinned_host"}


def test_muon_orthogonalises_each_layer_and_leaves_the_rest_to_adamw():
    rng = np.random.default_rng(3)
    # Two layers of [out 2 x 3, in 4], and of [out 3, in 2 x 4]; decay 0.5 of ones.
    shapes = {"q": (2, 2, 3, 4), "o": (2, 3, 2, 4), "embedding": (5, 4)}
    linears = {
        "q": LinearShape(layers=2, outputs=(2, 3), inputs=(4,)),
        "o": LinearShape(layers=2, outputs=(3,), inputs=(2, 4)),
    }
    gradients = {name: rng.normal(0, 1e-3, shape) for name, shape in shapes.items()}
    parameters = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    settings = {"learning_rate": 0.1, "warmup_steps": 0, "weight_decay": 0.5}
    adamw = policy_adamw(TrainingConfig(**settings, optimizer="muon"))
    optimizer = make_optimizer(adamw, dict.fromkeys(shapes, True), linears)
    arrays = {name: each.astype(np.float32) for name, each in gradients.items()}
    state = jax.jit(optimizer.init)(parameters)
    updates, _ = jax.jit(optimizer.update)(arrays, state, parameters)
    # Nesterov's momentum of one gradient is a multiple of it, which has the same direction.
    for name, rows, inputs in (("q", 6, 4), ("o", 3, 8)):
        for layer in range(2):
            made = orthogonalised(gradients[name][layer].reshape(rows, inputs))
            expected = -0.1 * (0.2 * np.sqrt(max(rows, inputs)) * made + 0.5)
            found = np.asarray(updates[name][layer]).reshape(rows, inputs)
            np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(
        updates["embedding"], -0.1 * (np.sign(gradients["embedding"]) + 0.5), atol=1e-3
    )


def test_the_gradient_is_clipped_before_the_moments():
    _, state = updated([3.0, 4.0], gradient_clip_norm=1.0, beta1=0.0)
    np.testing.assert_allclose(state[1][0].mu["matrix"], [[0.6, 0.8]], rtol=1e-6)

"""A loss of the user's own: the example of the docs, equal to ours, and what is refused."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from marin_rl.compilation import device_array
from marin_rl.config import ObjectiveConfig, load_config
from marin_rl.errors import ConfigError
from marin_rl.training.custom_loss import check_loss
from marin_rl.training.logprobs import TokenScores
from marin_rl.training.step_loss import step_loss
from marin_rl.training.step_metrics import step_metrics, token_measures
from marin_rl.training.step_types import ForwardOutputs, StepArrays, StepSettings

PAGE = (Path(__file__).parents[2] / "docs/objectives.md").read_text(encoding="utf-8")
PYTHON, YAML = re.search(
    r"## Your own loss.*?```python\n(.*?)```.*?```yaml\n(.*?)```", PAGE, re.DOTALL
).groups()
OTHERS = """
def total(logprobs, advantages, mask):
    return -jnp.sum(logprobs * advantages) / jnp.sum(mask)

def by_token(logprobs, advantages):
    return -logprobs * advantages

def no_logprobs(advantages): return advantages
def unknown(logprobs, entropies): return logprobs
def wrong_shape(logprobs): return logprobs[0]
def text(logprobs): return "loss"
def infinite(logprobs): return logprobs / 0.0
def constant(logprobs): return jnp.ones_like(logprobs)
def nan_gradient(logprobs, mask): return jnp.sqrt(logprobs * 0)
def raises(logprobs): raise KeyError("no such thing")
def wide_metric(logprobs): return logprobs, {"all": logprobs}
def text_metric(logprobs): return logprobs, {"all": "low"}
def vector(logprobs): return logprobs.sum(axis=1)
def odd_name(logprobs): return logprobs, {"a b": 1.0}
def list_of_metrics(logprobs): return logprobs, [1.0]
"""


def objective(folder: Path, name: str, **choice) -> ObjectiveConfig:
    (folder / "losses.py").write_text(PYTHON + OTHERS)
    (folder / "a.yaml").write_text(f"objective: {{loss: 'losses.py:{name}'}}\n")
    loaded = load_config(folder / "a.yaml").objective
    return ObjectiveConfig.model_validate(loaded.model_dump() | choice)


def step(seed: int = 0) -> tuple[StepArrays, TokenScores]:
    """Two microbatches of two rows of six positions; one row is padding, with NaN as logprobs."""
    random = np.random.default_rng(seed)
    shape = (2, 2, 6)
    mask = np.zeros(shape, bool)
    mask[0, 0, 1:5] = mask[0, 1, 2:4] = mask[1, 0, 1:6] = True
    logprobs = -random.uniform(0.1, 2.0, shape).astype(np.float32)
    policy = logprobs + random.normal(0, 0.4, shape).astype(np.float32)
    logprobs[~mask] = np.nan
    arrays = StepArrays(
        token_ids=np.zeros(shape, np.int32),
        mask=mask,
        segment_ids=np.broadcast_to(mask.any(-1, keepdims=True), shape).astype(np.int32),
        positions=np.broadcast_to(np.arange(6, dtype=np.int32), shape),
        policy_logprobs=policy,
        advantages=random.normal(0, 1, (2, 2, 1)).astype(np.float32) * np.ones(shape, np.float32),
    )
    scores = TokenScores(logprobs, np.where(mask, np.float32(1), np.float32(np.nan)))
    return jax.tree.map(device_array, (arrays, scores))


def test_the_example_of_the_docs_with_equal_bounds_is_ppo_clip(tmp_path: Path) -> None:
    shared = {"ratio_level": "token", "aggregation": "token_mean", "entropy_coefficient": 0.01}
    theirs = objective(
        tmp_path, "asymmetric_clip", loss_options={"low": 0.2, "high": 0.3}, **shared
    )
    ours = ObjectiveConfig(surrogate="ppo_clip", clip_low=0.2, clip_high=0.3, **shared)
    arrays, scores = step()

    def loss(chosen: ObjectiveConfig, logprobs: jax.Array) -> jax.Array:
        settings, moved = StepSettings(objective=chosen), scores._replace(logprobs=logprobs)
        return step_loss(settings, ForwardOutputs(moved), None, arrays)[0]

    for function in (loss, jax.grad(loss, argnums=1)):
        function = jax.jit(function, static_argnums=0)
        expected, found = (np.asarray(function(each, scores.logprobs)) for each in (ours, theirs))
        masked = np.isnan(expected)
        assert np.isfinite(np.where(masked, 0.0, found)).all()
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_its_metrics_and_clipped_tokens_are_measured(tmp_path: Path) -> None:
    chosen = objective(tmp_path, "asymmetric_clip", ratio_level="token")
    arrays, scores = step()
    settings = StepSettings(objective=chosen)
    metrics = step_metrics(settings, ForwardOutputs(scores), None, arrays)
    mask = np.asarray(arrays.mask)
    ratio = np.exp(np.asarray(scores.logprobs) - np.asarray(arrays.policy_logprobs))[mask]
    assert float(metrics["loss/custom/above_high"]) == pytest.approx((ratio > 1.28).mean())
    measures = token_measures(settings, ForwardOutputs(scores), arrays)
    assert measures is not None
    signs = np.asarray(arrays.advantages)[mask]
    clipped = ((ratio > 1.28) & (signs > 0)) | ((ratio < 0.8) & (signs < 0))
    assert clipped.any()
    assert np.asarray(measures.clipped)[mask].tolist() == clipped.tolist()


def test_one_number_is_averaged_over_microbatches_by_tokens(tmp_path: Path) -> None:
    arrays, scores = step()

    def loss(name: str) -> jax.Array:
        chosen = StepSettings(objective=objective(tmp_path, name, aggregation="token_mean"))
        of = lambda scores, arrays: step_loss(chosen, ForwardOutputs(scores), None, arrays)[0]
        return jax.jit(of)(scores, arrays)

    total, by_token = loss("total"), loss("by_token")
    assert float(total) == pytest.approx(float(by_token), rel=1e-6)


def test_the_example_of_the_docs_is_reported(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(PYTHON)
    (tmp_path / "a.yaml").write_text(YAML)
    chosen = load_config(tmp_path / "a.yaml").objective
    assert chosen.loss_options == {"high": 0.3, "penalty": 0.01}
    report = check_loss(chosen)
    assert re.fullmatch(
        r"objective\.loss losses\.py:asymmetric_clip: -?[\d.]+ on a small batch; "
        r"loss/custom/above_high",
        report,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_logprobs", r"takes \(advantages\): expected logprobs .* found no logprobs"),
        ("unknown", "loss_options; found entropies too"),
        ("wrong_shape", r"shape \(8,\): expected that of logprobs, \(3, 8\), or one number"),
        ("text", "returned 'loss': expected the loss, an array"),
        ("infinite", "its value is not finite"),
        ("constant", "gradient with respect to logprobs is 0 for every token"),
        ("nan_gradient", "its gradient is not finite"),
        ("raises", "failed: KeyError: 'no such thing'"),
        ("wide_metric", r"metric all has shape \(3, 8\): expected one number"),
        ("text_metric", "metric all is 'low': expected one number"),
        ("vector", r"shape \(3,\): expected that of logprobs, \(3, 8\), or one number"),
        ("odd_name", "expected metrics named by letters"),
        ("list_of_metrics", r"returned \[1.0\] as its metrics: expected a dict"),
        ("total", "returned one number, and objective.aggregation sequence_mean_token_sum needs"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective\.loss losses\.py:{name}.*{message}"):
        check_loss(objective(tmp_path, name))


def test_options_without_a_loss_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_options are arguments of loss"):
        ObjectiveConfig(loss_options={"high": 0.3})

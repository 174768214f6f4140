"""Log-probabilities against the whole forward pass, and the laws of packing and chunking."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hand_made import LENGTH, VOCAB, random_batch, tiny_policy
from levanter.layers.attention import AttentionMask

from marin_rl.training import scoring
from marin_rl.training.model import (
    build_model,
    named_parameters,
    with_gradient_checkpointing,
    with_parameters,
)
from marin_rl.training.scoring import token_logprobs


def model_of(**sizes):
    return build_model(tiny_policy(**sizes), VOCAB, 0)


MODELS = {
    "qwen3": {"family": "qwen3", "head_size": 12},
    "one-layer": {"layers": 1},
}


def arrays_of(batch):
    names = ("token_ids", "segment_ids", "positions")
    mask = jnp.asarray((batch.loss_mask != 0) & (batch.positions > 0))
    return (*(jnp.asarray(getattr(batch, name)) for name in names), mask)


def whole(model, batch, temperature=1.0):
    """Logprobs and entropies by Levanter's own logits of everything, without any chunking."""
    ids = hax.named(jnp.asarray(batch.token_ids), ("batch", "position"))
    segments = hax.named(jnp.asarray(batch.segment_ids), ("batch", "position"))
    positions = hax.named(jnp.asarray(batch.positions), ("batch", "position"))
    mask = AttentionMask.causal().with_segment_ids(segments)
    logits = model(ids, mask, pos_ids=positions).rearrange(("batch", "position", "vocab")).array
    logp = jax.nn.log_softmax(logits / temperature)
    chosen = jnp.take_along_axis(logp[:, :-1], batch.token_ids[:, 1:, None], axis=2)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)[:, :-1]
    shifted = tuple(jnp.pad(scores, ((0, 0), (1, 0))) for scores in (chosen, entropy))
    return tuple(jnp.where(batch.loss_mask != 0, scores, 0.0) for scores in shifted)


jitted = jax.jit(token_logprobs, static_argnames="temperature")


@pytest.mark.parametrize(("name", "temperature"), [("qwen3", 0.7), ("one-layer", 1.0)])
def test_scores_are_those_of_the_whole_forward_pass(name, temperature):
    model, batch = model_of(**MODELS[name]), random_batch(2)
    found = jitted(model, *arrays_of(batch), temperature=temperature)
    truth = jax.jit(lambda model: whole(model, batch, temperature))
    for ours, theirs in zip(found, truth(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def gradients_of(score, model, batch):
    """Gradients of a random combination of logprobs and entropies."""
    rng = np.random.default_rng(1)
    by_logp, by_entropy = rng.standard_normal((2, *batch.token_ids.shape)).astype(np.float32)

    def loss(parameters):
        logprobs, entropies = score(with_parameters(model, parameters), batch)
        return jnp.sum(by_logp * logprobs + by_entropy * entropies)

    return jax.jit(jax.grad(loss))(named_parameters(model))


def ours(model, batch):
    return token_logprobs(model, *arrays_of(batch))


def assert_close(found, expected, tolerance=2e-4):
    for name in expected:
        scale = float(jnp.max(jnp.abs(expected[name]))) + 1e-6
        np.testing.assert_allclose(found[name] / scale, expected[name] / scale, atol=tolerance)


def test_gradients_are_those_of_the_whole_forward_pass(monkeypatch):
    model, batch = model_of(tie_embeddings=False), random_batch(5)
    full = (batch.positions > 0).astype(np.int32)
    batch = dataclasses.replace(batch, loss_mask=full)
    expected = gradients_of(whole, model, batch)
    assert_close(gradients_of(ours, model, batch), expected)
    # Many chunks, the last one partly empty; layers in a scan, recomputed in the backward pass.
    monkeypatch.setattr(scoring, "TOKENS_PER_CHUNK", 7)
    monkeypatch.setattr(scoring, "UNROLLED_LAYERS_MAX", 0)
    assert_close(gradients_of(ours, with_gradient_checkpointing(model), batch), expected)


def test_packed_sequences_score_as_if_alone():
    model, batch = model_of(layers=1), random_batch(2)
    alone = jitted(model, *arrays_of(batch))
    packed = dataclasses.replace(
        batch,
        **{
            name: np.concatenate(getattr(batch, name), axis=0)[None]
            for name in ("token_ids", "loss_mask", "positions", "policy_logprobs", "advantages")
        },
        segment_ids=np.concatenate(batch.segment_ids * np.array([[1], [2]], np.int32))[None],
        returns=np.zeros((1, 2 * LENGTH), np.float32),
    )
    together = jitted(model, *arrays_of(packed))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other[0], one.reshape(-1), rtol=1e-5, atol=1e-5)


def test_nothing_masked_scores_nothing():
    model, batch = model_of(layers=1), random_batch(2)
    ids, segments, positions, mask = arrays_of(batch)
    found = jitted(model, ids, segments, positions, jnp.zeros_like(mask))
    assert all(not np.any(scores) for scores in found)


def test_logits_of_all_tokens_never_exist():
    model = build_model(tiny_policy(layers=1), 4099, 0)  # a number no other array has
    batch = random_batch(32, 32)

    def loss(parameters):
        return jnp.sum(ours(with_parameters(model, parameters), batch).logprobs)

    program = jax.jit(jax.grad(loss)).lower(named_parameters(model)).compile().as_text()
    assert "f32[256,4099]" in program
    assert "1024,4099]" not in program
    assert "32,4099]" not in program

"""Log-probabilities against the whole forward pass, and the laws of packing and chunking."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import others_slow
from support.models import reference_logits
from training.batches import LENGTH, VOCAB, random_batch, tiny_policy

from marin_rl.models import fused_attention
from marin_rl.training import hidden_states
from marin_rl.training import logprobs as trainer_logprobs
from marin_rl.training.logprobs import ALONE, Packing, token_logprobs
from marin_rl.training.model import (
    build_model,
    matrix_mask,
    named_parameters,
    with_gradient_checkpointing,
    with_parameters,
)


def model_of(**sizes):
    return build_model(tiny_policy(**sizes), VOCAB, 0)


MODELS = {"qwen3": {"family": "qwen3", "head_size": 12}, "one-layer": {"layers": 1}}


def uneven(model):
    """The model with norms and biases that are not all the same."""
    rng, matrices = np.random.default_rng(3), matrix_mask(model)
    parameters = named_parameters(model)
    noise = {name: 0.3 * rng.standard_normal(a.shape, np.float32) for name, a in parameters.items()}
    changed = {name: a if matrices[name] else a + noise[name] for name, a in parameters.items()}
    return with_parameters(model, changed)


def arrays_of(batch):
    names = ("token_ids", "segment_ids", "positions")
    mask = jnp.asarray((batch.loss_mask != 0) & (batch.positions > 0))
    return (*(jnp.asarray(getattr(batch, name)) for name in names), mask)


def whole(model, batch, temperature=1.0):
    """Logprobs and entropies by logits of everything, without any chunking."""
    run = partial(reference_logits, model.spec, named_parameters(model))
    logits = jax.vmap(run)(batch.token_ids, batch.segment_ids, batch.positions)
    logp = jax.nn.log_softmax(logits / temperature)
    chosen = jnp.take_along_axis(logp[:, :-1], batch.token_ids[:, 1:, None], axis=2)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)[:, :-1]
    shifted = tuple(jnp.pad(scores, ((0, 0), (1, 0))) for scores in (chosen, entropy))
    return tuple(jnp.where(batch.loss_mask != 0, scores, 0.0) for scores in shifted)


jitted = jax.jit(token_logprobs, static_argnames="temperature")


@pytest.mark.parametrize(("name", "temperature"), [("qwen3", 0.7), ("one-layer", 1.0)])
def test_scores_are_those_of_the_whole_forward_pass(name, temperature):
    model, batch = model_of(**MODELS[name]), random_batch(2)
    found = jitted(model, *arrays_of(batch), temperature=temperature)[:2]
    truth = jax.jit(lambda model: whole(model, batch, temperature))
    for ours, theirs in zip(found, truth(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def gradients_of(score, model, batch):
    """Gradients of a random combination of logprobs and entropies."""
    rng = np.random.default_rng(1)
    by_logp, by_entropy = rng.standard_normal((2, *batch.token_ids.shape)).astype(np.float32)

    def loss(parameters):
        logprobs, entropies = score(with_parameters(model, parameters), batch)[:2]
        return jnp.sum(by_logp * logprobs + by_entropy * entropies)

    return jax.jit(jax.grad(loss))(named_parameters(model))


def ours(model, batch):
    return token_logprobs(model, *arrays_of(batch))


def assert_close(found, expected, tolerance=2e-4):
    for name in expected:
        scale = float(jnp.max(jnp.abs(expected[name]))) + 1e-6
        np.testing.assert_allclose(found[name] / scale, expected[name] / scale, atol=tolerance)


@pytest.mark.slow
def test_gradients_are_those_of_the_whole_forward_pass(monkeypatch):
    model, batch = model_of(tie_embeddings=False), random_batch(5)
    full = (batch.positions > 0).astype(np.int32)
    batch = dataclasses.replace(batch, loss_mask=full)
    expected = gradients_of(whole, model, batch)
    assert_close(gradients_of(ours, model, batch), expected)
    # Many chunks, the last one partly empty; layers in a scan, recomputed in the backward pass.
    monkeypatch.setattr(trainer_logprobs, "TOKENS_PER_CHUNK", 7)
    monkeypatch.setattr(hidden_states, "UNROLLED_LAYERS_MAX", 0)
    assert_close(gradients_of(ours, with_gradient_checkpointing(model), batch), expected)
    offloaded = with_gradient_checkpointing(model, offload=True)
    assert_close(gradients_of(ours, offloaded, batch), expected)
    moved = str(jax.make_jaxpr(partial(gradients_of, ours, batch=batch))(offloaded))
    assert "MemorySpace.Host" in moved


def test_one_layer_scores_with_gradient_checkpointing_as_without():
    """There is no layer before the last, which is not recomputed."""
    model, batch = model_of(**MODELS["one-layer"]), random_batch(2)
    found = jitted(with_gradient_checkpointing(model), *arrays_of(batch))[:2]
    for ours, theirs in zip(found, jitted(model, *arrays_of(batch))[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_layers_have_the_same_gradients_where_a_scan_reads_them_in_place(monkeypatch):
    model, batch = uneven(model_of(layers=3)), random_batch(2)
    expected = gradients_of(ours, model, batch)
    monkeypatch.setattr(hidden_states, "UNROLLED_LAYERS_MAX", 0)
    assert_close(gradients_of(ours, model, batch), expected)


def packed_of(batch):
    """The sequences of a batch of two rows as one row."""
    return dataclasses.replace(
        batch,
        **{
            name: np.concatenate(getattr(batch, name), axis=0)[None]
            for name in ("token_ids", "loss_mask", "positions", "policy_logprobs", "advantages")
        },
        segment_ids=np.concatenate(batch.segment_ids * np.array([[1], [2]], np.int32))[None],
        returns=np.zeros((1, 2 * LENGTH), np.float32),
    )


def test_packed_sequences_score_as_if_alone():
    model, batch = model_of(layers=1), random_batch(2)
    alone = jitted(model, *arrays_of(batch))[:2]
    together = jitted(model, *arrays_of(packed_of(batch)))[:2]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other[0], one.reshape(-1), rtol=1e-5, atol=1e-5)


def test_nothing_masked_scores_nothing():
    model, batch = model_of(layers=1), random_batch(2)
    ids, segments, positions, mask = arrays_of(batch)
    found = jitted(model, ids, segments, positions, jnp.zeros_like(mask))
    assert all(not np.any(scores) for scores in found)


@pytest.mark.slow
def test_logits_of_all_tokens_never_exist():
    model = build_model(tiny_policy(layers=1), 4099, 0)  # a number no other array has
    batch = random_batch(32, 32)

    def loss(parameters):
        return jnp.sum(ours(with_parameters(model, parameters), batch).logprobs)

    program = jax.jit(jax.grad(loss)).lower(named_parameters(model)).compile().as_text()
    assert "f32[256,4099]" in program
    assert "1024,4099]" not in program
    assert "32,4099]" not in program


PROMPT, COMPLETIONS = 5, (3, 1, 6)


def group_apart_and_shared():
    """One group as three rows, and as one row with the prompt once, another group behind it."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(7, VOCAB, PROMPT)
    sampled = [rng.integers(7, VOCAB, count) for count in COMPLETIONS]
    apart = [row(np.concatenate([prompt, ids]), PROMPT, LENGTH) for ids in sampled]
    width = 24
    ids, segments = np.zeros((2, width), np.int32)
    positions, mask = np.zeros((2, width), np.int32)
    places, column = [], PROMPT
    ids[:PROMPT], segments[:PROMPT], positions[:PROMPT] = prompt, 4, np.arange(PROMPT)
    for number, tokens in enumerate(sampled):
        here = slice(column, column + len(tokens))
        ids[here], segments[here], mask[here] = tokens, number + 1, 1
        positions[here] = PROMPT + np.arange(len(tokens))
        places.append(here)
        column += len(tokens)
    other = slice(column, column + 4)  # a sequence of its own, all in one segment
    ids[other], segments[other] = rng.integers(7, VOCAB, 4), 5
    positions[other], mask[other] = np.arange(4), [0, 0, 1, 1]
    apart.append(row(ids[other], 2, LENGTH))
    shared = tuple(jnp.asarray(a[None]) for a in (ids, segments, positions, mask.astype(bool)))
    return (
        tuple(jnp.asarray(np.stack(a)) for a in zip(*apart, strict=True)),
        shared,
        [*places, other],
    )


def row(ids, prompt, width):
    used = np.arange(width) < len(ids)
    padded = np.zeros(width, np.int32)
    padded[: len(ids)] = ids
    mask = used & (np.arange(width) >= prompt)
    return padded, used.astype(np.int32), np.where(used, np.arange(width), 0).astype(np.int32), mask


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3"])
def test_a_prompt_that_is_shared_changes_no_score_and_no_gradient(name):
    model = model_of(**MODELS[name])
    apart, shared, places = group_apart_and_shared()
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((2, place.stop - place.start)) for place in places]
    weights[-1][:, :2] = 0.0  # the prompt of the lone sequence

    def spread(shape, where):
        both = np.zeros((2, *shape), np.float32)
        for (r, columns), values in zip(where, weights, strict=True):
            both[:, r, columns] = values
        return jnp.asarray(both)

    ends = [slice(PROMPT, PROMPT + count) for count in COMPLETIONS] + [slice(0, 4)]
    by_apart = spread(apart[0].shape, list(enumerate(ends)))
    by_shared = spread(shared[0].shape, [(0, place) for place in places])

    def loss(parameters, arrays, by, together):
        scores = token_logprobs(
            with_parameters(model, parameters), *arrays, packing=Packing(shared_prompts=together)
        )
        return jnp.sum(by[0] * scores.logprobs + by[1] * scores.entropies), scores

    graded = jax.jit(jax.grad(loss, has_aux=True), static_argnums=3)
    expected, alone = graded(named_parameters(model), apart, by_apart, False)
    found, together = graded(named_parameters(model), shared, by_shared, True)
    for r, (columns, place) in enumerate(zip(ends, places, strict=True)):
        for ours, theirs in zip(together[:2], alone[:2], strict=True):
            np.testing.assert_allclose(ours[0, place], theirs[r, columns], rtol=2e-5, atol=2e-5)
    for name_, gradient in expected.items():
        scale = np.abs(gradient).max() + 1e-8
        np.testing.assert_allclose(found[name_] / scale, gradient / scale, atol=2e-5)


ROWS = {
    "alone": (ALONE, lambda: arrays_of(random_batch(2))),
    "packed": (Packing(packed_rows=True), lambda: arrays_of(packed_of(random_batch(2)))),
    "shared": (Packing(True, shared_prompts=True), lambda: group_apart_and_shared()[1]),
}


@pytest.mark.parametrize("name", others_slow(ROWS, "shared"))
def test_rows_score_by_the_attention_of_a_gpu_as_by_that_of_a_cpu(name, monkeypatch):
    """As a GPU's model is put together, with XLA's operations in the place of cuDNN's kernel."""
    packing, rows = ROWS[name]
    model, arrays = model_of(**MODELS["qwen3"] | {"layers": 1}), rows()
    expected = jax.jit(partial(token_logprobs, packing=packing))(model, *arrays)[:2]
    taken = []
    kernel = partial(fused_attention.attend_fused, implementation="xla")
    monkeypatch.setattr(hidden_states, "takes_fused", lambda *_: True)
    monkeypatch.setattr(
        hidden_states, "attend_fused", lambda *given: taken.append(given[3]) or kernel(*given)
    )
    found = jax.jit(partial(token_logprobs, packing=packing))(model, *arrays)[:2]
    assert [mask is None for mask in taken] == [name == "alone"]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)

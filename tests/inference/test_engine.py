"""The engine against the model's own forward pass, under load, across swaps and faults."""

import random
from concurrent.futures import Future, wait
from contextlib import closing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.engines import (
    PROGRAMS,
    amid,
    bits,
    engine_of,
    random_requests,
    request_of,
    result_of,
    results_under_load,
    text_of,
)
from support.cases import others_slow, printed_seed
from support.models import FAMILIES, VOCABULARY, full_logits, full_logprobs, tiny_model

from marin_rl.errors import InferenceError, InputError
from marin_rl.inference import execution_plan
from marin_rl.inference.generation import Delta, GenerationRequest
from marin_rl.inference.logprobs import score_tokens
from marin_rl.inference.programs import decode_chunk
from marin_rl.inference.weights import compiled_layers
from marin_rl.types import Sampling


@pytest.mark.usefixtures("itself_compiled_quickly")
@pytest.mark.parametrize("family", others_slow(FAMILIES, "llama"))
def test_logprobs_are_those_of_the_models_own_forward(family):
    model = tiny_model(family)
    with closing(engine_of(model)) as engine:
        for temperature in (1.0, 0.7):
            request = request_of(45, n=3, max_tokens=50, temperature=temperature)
            for sample in result_of(engine, request).samples:
                truth = full_logprobs(model, request.prompt_ids, sample.token_ids, temperature)
                assert len(sample.token_ids) == 50
                assert np.abs(sample.logprobs - truth).max() < 1e-4


@pytest.mark.parametrize("length", others_slow([1, 2, 16, 17, 33, 64], 16, 17))
def test_greedy_tokens_are_the_argmax_of_the_full_forward(engine, model, length):
    request = request_of(length, max_tokens=20, temperature=0.0)
    (sample,) = result_of(engine, request).samples
    logits = full_logits(model, np.concatenate([request.prompt_ids, sample.token_ids]))
    np.testing.assert_array_equal(sample.token_ids, logits[length - 1 : -1].argmax(-1))
    truth = full_logprobs(model, request.prompt_ids, sample.token_ids)
    assert np.abs(sample.logprobs - truth).max() < 1e-4


@pytest.mark.bits
def test_bitwise_the_same_alone_and_under_any_load(engine, model):
    rng = random.Random(printed_seed())
    requests = random_requests(rng, 16)
    alone = [bits(result_of(engine, request)) for request in requests]
    for _ in range(2):
        for index, result in results_under_load(engine, requests, rng):
            assert bits(result) == alone[index], index


@pytest.mark.bits
def test_bitwise_the_same_in_another_engine(engine, model):
    requests = random_requests(random.Random(3), 6)
    here = [bits(result_of(engine, request)) for request in requests]
    with closing(engine_of(model)) as other:
        for request, expected in zip(reversed(requests), reversed(here), strict=True):
            assert bits(result_of(other, request)) == expected


@pytest.mark.bits
def test_samples_of_a_request_draw_with_consecutive_seeds(engine):
    together = result_of(engine, request_of(n=3, seed=40))
    apart = [result_of(engine, request_of(n=1, seed=40 + index)) for index in range(3)]
    assert bits(together) == [pair for result in apart for pair in bits(result)]
    assert len({pair[0] for pair in bits(together)}) == 3


def test_without_a_seed_every_request_differs(engine):
    drawn = {bits(result_of(engine, request_of(seed=None)))[0][0] for _ in range(3)}
    assert len(drawn) == 3


def compiled() -> list[int]:
    """Number of compiled programs of each kind."""
    return [f._cache_size() for f in (*PROGRAMS, score_tokens, compiled_layers)]


@pytest.mark.slow
@pytest.mark.usefixtures("itself_compiled_quickly")
def test_nothing_is_compiled_once_warm(model):
    everything = {
        "logit_bias": ((3, 1.0),),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "min_p": 0.1,
        "top_logprobs": 3,
        "raw_logprobs": True,
        "score_prompt": True,
        "stop": ("never there",),
    }
    with closing(engine_of(model, slots=6)) as engine:
        engine.warm_up()
        before = compiled()
        requests = random_requests(random.Random(5), 12)
        requests += [request_of(40, n=9, **everything), request_of(7, top_logprobs=1)]
        requests += [request_of(90, score_prompt=True, max_tokens=0)]
        wait([engine.submit(request) for request in requests], timeout=120)
        engine.swap(tiny_model(seed=1), 2, "two")
        result_of(engine, requests[0])
        assert engine.stats.copied_prompts > 0
        assert compiled() == before


def test_a_groups_prompt_is_prefilled_once(engine):
    before = engine.stats.prefilled_prompts
    result_of(engine, request_of(20, n=8))
    assert engine.stats.prefilled_prompts == before + 1


def test_requests_that_come_together_start_together(engine, monkeypatch):
    # until the slots are full, the engine waits for more requests
    monkeypatch.setattr("marin_rl.inference.engine.QUIET_S", 3600)
    monkeypatch.setattr("marin_rl.inference.engine.GATHER_S", 3600)
    chunks = engine.stats.chunks
    futures = [engine.submit(request_of(prompt_seed=i, max_tokens=4)) for i in range(8)]
    wait(futures, timeout=120)
    assert engine.stats.chunks == chunks + 1


def test_stop_tokens_end_a_completion_and_belong_to_it(engine):
    (free,) = result_of(engine, request_of()).samples
    end = int(free.token_ids[5])
    first = free.token_ids.tolist().index(end)
    (sample,) = result_of(engine, request_of(stop_token_ids=(end,))).samples
    assert sample.finish_reason == "stop"
    np.testing.assert_array_equal(sample.token_ids, free.token_ids[: first + 1])
    np.testing.assert_array_equal(sample.logprobs, free.logprobs[: first + 1])
    assert free.finish_reason == "length"


def test_a_stop_string_ends_the_tokens_with_the_one_that_completes_it(engine):
    (free,) = result_of(engine, request_of()).samples
    text = text_of(free.token_ids.tolist())
    deltas: list[Delta] = []
    stopping = request_of(stop=(text[5:7], "never there"))
    (sample,) = engine.submit(stopping, deltas.append).result(timeout=120).samples
    at = text.index(text[5:7])
    assert (sample.finish_reason, deltas[-1].finish_reason) == ("stop", "stop")
    np.testing.assert_array_equal(sample.token_ids, free.token_ids[: at + 2])
    np.testing.assert_array_equal(sample.logprobs, free.logprobs[: at + 2])
    ids = np.concatenate([delta.token_ids for delta in deltas])
    np.testing.assert_array_equal(ids, sample.token_ids)
    (whole,) = result_of(engine, request_of(stop=("never there",))).samples
    np.testing.assert_array_equal(whole.token_ids, free.token_ids)
    assert whole.finish_reason == "length"


def test_top_k_logprobs_are_those_of_the_filtered_distribution(engine, model):
    request = request_of(top_k=3, max_tokens=30)
    (sample,) = result_of(engine, request).samples
    logits = full_logits(model, np.concatenate([request.prompt_ids, sample.token_ids]))[9:-1]
    kept = np.sort(logits, axis=-1)[:, -3:].astype(np.float64)
    truth = logits[np.arange(30), sample.token_ids] - np.log(np.exp(kept).sum(-1))
    assert np.abs(sample.logprobs - truth).max() < 1e-4


def test_swapped_weights_are_the_ones_that_sample(model):
    other = tiny_model(seed=9)
    with closing(engine_of(model)) as engine:
        request = request_of()
        before = result_of(engine, request)
        engine.swap(other, 2, "two")
        after = result_of(engine, request)
        assert (before.weight_version, before.parameters_digest) == (1, "one")
        assert (after.weight_version, after.parameters_digest) == (2, "two")
        assert after.samples[0].policy_versions is None
        truth = full_logprobs(other, request.prompt_ids, after.samples[0].token_ids)
        assert np.abs(after.samples[0].logprobs - truth).max() < 1e-4


def pointers(arrays: object) -> set[int]:
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arrays)}


@pytest.mark.bits
def test_arrays_on_a_mesh_are_gathered_and_run_the_same_program(engine, model):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    request = request_of()
    expected = bits(result_of(engine, request))
    compiled = decode_chunk._cache_size()
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays, rest = eqx.partition(model, eqx.is_array)
    try:
        engine.swap(eqx.combine(jax.device_put(arrays, spread), rest), 1, "one")
        assert bits(result_of(engine, request)) == expected
        assert decode_chunk._cache_size() == compiled
    finally:
        engine.swap(model, 1, "one")


def test_a_swap_in_the_middle_has_versions_per_token_and_takes_no_copy(model):
    other = tiny_model(seed=9)
    with closing(engine_of(model)) as engine:
        with amid(engine, request_of(max_tokens=80), delta=3) as (future, _):
            engine.swap(other, 2, "two")
        assert pointers(engine.policy.weights) <= pointers(eqx.filter(other, eqx.is_array))
        result = future.result(timeout=120)
    versions = result.samples[0].policy_versions
    assert result.weight_version == 2
    assert versions is not None
    assert versions.tolist() == [1] * 12 + [2] * 68


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of(90, max_tokens=7), "90 \\+ 7"),
        (request_of(0), "at least one token"),
        (request_of(n=0), "n and max_tokens of at least 1"),
        (request_of(max_tokens=0), "n and max_tokens of at least 1"),
        (request_of(stop_token_ids=tuple(range(17))), "at most 16 stop tokens"),
        (
            GenerationRequest(
                prompt_ids=np.array([5, VOCABULARY], np.int32), sampling=Sampling(max_tokens=1)
            ),
            "from 0 to 102",
        ),
    ],
)
def test_requests_that_can_never_be_served_are_refused_at_once(engine, request_, message):
    with pytest.raises(InputError, match=message):
        engine.submit(request_)


def test_logits_that_are_not_finite_fail_their_requests_and_spoil_nothing_else(model):
    broken = eqx.tree_at(
        lambda m: m.transformer.norm.weight, model, model.transformer.norm.weight * jnp.nan
    )
    with closing(engine_of(model)) as engine:
        healthy = bits(result_of(engine, request_of(n=8)))
        engine.swap(broken, 2, "broken")
        with pytest.raises(InferenceError, match="not finite"):
            result_of(engine, request_of(n=8))
        engine.swap(model, 3, "three")
        assert bits(result_of(engine, request_of(n=8))) == healthy


def test_a_model_of_another_shape_is_refused_and_the_old_one_goes_on(engine):
    with pytest.raises(InputError, match="expected a model like the one loaded"):
        engine.swap(tiny_model("llama"), 5, "five")
    assert engine.policy.weight_version == 1


def test_closing_fails_what_has_not_ended(model):
    engine = engine_of(model)
    futures: list[Future] = [engine.submit(request_of(n=8, max_tokens=80)) for _ in range(3)]
    engine.close()
    for future in futures:
        with pytest.raises(InferenceError, match="closed"):
            future.result(timeout=10)
    with pytest.raises(InferenceError, match="closed"):
        engine.submit(request_of())


def test_a_large_model_is_decoded_from_its_own_memory(model, engine, monkeypatch):
    monkeypatch.setattr(execution_plan, "LANE_WEIGHTS_BYTES_MAX", 0)
    request = request_of(20, temperature=0.0)
    with closing(engine_of(model, lanes=1)) as large:
        result = result_of(large, request)
        (query, *_) = large._runner.memory.decoder(large.policy).layers[1].qkv.parts
    own = np.asarray(model.layers.stacked.self_attn.q_proj.weight.array)[1]
    assert np.shares_memory(np.asarray(query), own)
    expected = result_of(engine, request)
    for one, other in zip(result.samples, expected.samples, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

"""A swap amid completions: which policy's forward, over which cache, each token was drawn by."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from inference.engines import amid, bits, engine_of, prompt_of, request_of, result_of
from support.models import full_logprobs, tiny_model

from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import GenerationRequest, GenerationResult, Sample
from marin_rl.models.module import LanguageModel

OLD, NEW = 1, 2


@pytest.fixture(scope="module")
def other() -> LanguageModel:
    return tiny_model(seed=9)


@pytest.fixture(params=[False, True], ids=["prefilled", "in pieces"])
def recomputing(request: pytest.FixtureRequest, model: LanguageModel) -> Iterator[Engine]:
    engine = engine_of(model, prefix_cache=request.param)
    yield engine
    engine.close()


def swapped_amid(
    engine: Engine,
    request: GenerationRequest,
    other: LanguageModel,
    delta: int = 2,
    *,
    recompute_kv_cache: bool = True,
) -> GenerationResult:
    """The result of a request that finds new weights after its `delta`-th delta."""
    with amid(engine, request, delta) as (future, _):
        engine.swap(other, NEW, "two", recompute_kv_cache=recompute_kv_cache)
    return future.result(timeout=120)


def first_of(sample: Sample) -> int:
    """Number of tokens that the old weights sampled: those before the first of the new ones."""
    assert sample.policy_versions is not None
    versions = sample.policy_versions.tolist()
    count = versions.count(OLD)
    assert versions == [OLD] * count + [NEW] * (len(versions) - count)
    return count


def raw_of(sample: Sample) -> np.ndarray:
    assert sample.raw_logprobs is not None
    return sample.raw_logprobs


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.bits
def test_tokens_before_are_the_old_policys_and_those_after_a_fresh_prefills(
    model, other, recomputing
):
    """Three samples of one prompt, which is prefilled once."""
    request = request_of(max_tokens=30, n=3, raw_logprobs=True)
    old = result_of(recomputing, request)
    result = swapped_amid(recomputing, request, other, delta=4)
    assert (result.weight_version, result.parameters_digest) == (NEW, "two")
    stats = recomputing.stats
    counts = [first_of(sample) for sample in result.samples]
    assert min(counts) > 0
    assert stats.recomputed_sequences == 3
    # of the last token that was sampled, the next step computes the cache
    assert stats.recomputed_tokens == sum(10 + count - 1 for count in counts)
    for index, (sample, before, count) in enumerate(
        zip(result.samples, old.samples, counts, strict=True)
    ):
        np.testing.assert_array_equal(sample.token_ids[:count], before.token_ids[:count])
        assert sample.logprobs[:count].tobytes() == before.logprobs[:count].tobytes()
        assert sample.token_ids.tolist() != before.token_ids.tolist()
        ids = np.concatenate([request.prompt_ids, sample.token_ids[:count]])
        recomputing.reset_prefix_cache()
        going_on = replace(
            request,
            n=1,
            prompt_ids=ids.astype(np.int32),
            sampling=replace(request.sampling, max_tokens=30 - count, seed=7 + index),
        )
        (fresh,) = result_of(recomputing, going_on).samples
        assert sample.token_ids[count:].tolist() == fresh.token_ids.tolist()
        assert sample.logprobs[count:].tobytes() == fresh.logprobs.tobytes()
        expected = full_logprobs(other, ids, sample.token_ids[count:])
        np.testing.assert_allclose(raw_of(sample)[count:], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.bits
def test_without_it_the_cache_of_earlier_positions_stays_the_old_weights(model, other):
    with closing(engine_of(model)) as engine:
        request = request_of(max_tokens=30, raw_logprobs=True)
        result = swapped_amid(engine, request, other, recompute_kv_cache=False)
        (sample,) = result.samples
        count = first_of(sample)
        assert engine.stats.recomputed_sequences == 0
        ids = np.concatenate([request.prompt_ids, sample.token_ids[:count]])
        expected = full_logprobs(other, ids, sample.token_ids[count:])
        assert np.abs(raw_of(sample)[count:] - expected).max() > 1e-3


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.bits
def test_a_recomputed_sequence_leaves_its_cache_to_the_next_turn(model, other):
    with closing(engine_of(model, prefix_cache=True)) as engine:
        request = request_of(max_tokens=30)
        (sample,) = swapped_amid(engine, request, other).samples
        ids = np.concatenate([request.prompt_ids, sample.token_ids, prompt_of(5, seed=3)])
        following = replace(request, prompt_ids=ids.astype(np.int32))
        continued = result_of(engine, following)
        assert continued.cached_tokens == (39 if engine.plan.keeps_prefixes else 0)
        engine.reset_prefix_cache()
        assert bits(result_of(engine, following)) == bits(continued)


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.bits
def test_two_swaps_between_two_chunks_are_one(model, other, recomputing):
    request = request_of(max_tokens=30)
    once = result_of(recomputing, request)
    with amid(recomputing, request) as (future, _):
        recomputing.swap(other, NEW, "two", recompute_kv_cache=True)
        recomputing.swap(model, 3, "one", recompute_kv_cache=True)
    (sample,) = future.result(timeout=120).samples
    assert sample.policy_versions is not None
    assert set(sample.policy_versions.tolist()) == {OLD, 3}
    np.testing.assert_array_equal(sample.token_ids, once.samples[0].token_ids)
    np.testing.assert_allclose(sample.logprobs, once.samples[0].logprobs, atol=1e-5)

"""Chunks that are dispatched before the last is read: in this order, and to the same results."""

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from inference.engines import (
    AcceleratorRunner,
    AheadRunner,
    amid,
    bits,
    engine_of,
    random_requests,
    request_of,
    result_of,
    results_under_load,
    text_of,
    together,
)
from support.cases import printed_seed
from support.models import tiny_model

from marin_rl.errors import InferenceError
from marin_rl.inference.batch import Chunk
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import GenerationRequest
from marin_rl.models.module import LanguageModel

pytestmark = pytest.mark.slow  # a form for accelerators: engines that compile anew


class Recording(AheadRunner):
    """Notes when chunks are dispatched, and when they are read."""

    events: list[str]

    def decode(self, *inputs: Any, **more: Any) -> Callable[[], Chunk]:
        number = sum(event.startswith("dispatch") for event in self.events)
        self.events.append(f"dispatch {number}")
        read = super().decode(*inputs, **more)

        def noted() -> Chunk:
            self.events.append(f"read {number}")
            return read()

        return noted


@pytest.fixture(scope="module")
def ahead(model: LanguageModel) -> Iterator[Engine]:
    Recording.events = []
    with closing(engine_of(model, programs=Recording)) as engine:
        assert engine.plan.ahead
        yield engine


def events_of(engine: Engine, request: GenerationRequest) -> list[str]:
    Recording.events.clear()
    result_of(engine, request)
    engine.pause()  # until the last chunk is read
    engine.resume()
    return [*Recording.events]


def test_a_chunk_is_dispatched_before_the_last_is_read(ahead):
    """Twelve tokens are three chunks of four; the fourth samples nothing."""
    order = "dispatch 0, dispatch 1, read 0, dispatch 2, read 1, dispatch 3, read 2, read 3"
    assert events_of(ahead, request_of()) == order.split(", ")


@pytest.mark.parametrize("wish", [{"repetition_penalty": 1.5}, {"frequency_penalty": 0.4}])
def test_a_chunk_that_needs_the_last_ones_tokens_waits_for_them(ahead, wish):
    order = "dispatch 0, read 0, dispatch 1, read 1, dispatch 2, read 2"
    assert events_of(ahead, request_of(**wish)) == order.split(", ")


def wishes(rng: random.Random) -> dict[str, Any]:
    ids = [rng.randrange(2, 100), rng.randrange(2, 100)]
    return {
        "temperature": rng.choice((0.0, 1.0)),
        "stop": rng.choice(((), (text_of(ids[:1]),), (text_of(ids),))),
        "stop_token_ids": rng.choice(((), tuple(range(10, 20)))),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.0, 1.0, 1.3)),
        "raw_logprobs": rng.choice((False, False, True)),
    }


@pytest.mark.bits
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_results_under_load_are_those_of_an_engine_that_reads_each_chunk_first(model, prefix_cache):
    """Stops, stop strings, penalties and reports; some requests are cancelled on their way."""
    rng = random.Random(printed_seed())
    requests = random_requests(rng, 16, wishes)
    engines = partial(engine_of, model, lanes=1, prefix_cache=prefix_cache)
    with closing(engines()) as each:
        expected = [bits(result_of(each, request)) for request in requests]
    with closing(engines(programs=AheadRunner)) as ahead:
        for _ in range(2):
            doomed = [ahead.submit(request_of(5, n=2, max_tokens=60, seed=i)) for i in range(3)]
            for index, result in results_under_load(ahead, requests, rng):
                doomed[index % 3].cancel()
                assert bits(result) == expected[index], index
        assert ahead.active == 0


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_engine_with_an_accelerators_programs_has_the_results_of_a_cpus(model, prefix_cache):
    rng = random.Random(4)
    requests = random_requests(rng, 10, wishes)
    with closing(engine_of(model)) as engine:
        expected = [result_of(engine, request) for request in requests]
    plan = {"programs": AcceleratorRunner, "prefix_cache": prefix_cache}
    with closing(engine_of(model, **plan)) as engine:
        assert engine.plan.whole
        engine.warm_up()
        for index, result in results_under_load(engine, requests, rng):
            for ours, theirs in zip(result.samples, expected[index].samples, strict=True):
                np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


class Failing(AheadRunner):
    """Loses the device in the chunk of this number."""

    chunks = 0

    def decode(self, *inputs: Any, **more: Any) -> Callable[[], Chunk]:
        self.chunks += 1
        read = super().decode(*inputs, **more)
        return read if self.chunks != 3 else _lost


def _lost() -> Chunk:
    raise jax.errors.JaxRuntimeError(
        "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"
    )


def test_a_device_that_fails_fails_what_has_begun_and_keeps_nothing_of_it(model, ahead):
    with closing(engine_of(model, programs=Failing)) as engine:
        with pytest.raises(InferenceError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*last checkpoint"):
            result_of(engine, request_of(n=8, max_tokens=40))
        assert bits(result_of(engine, request_of(n=8))) == bits(result_of(ahead, request_of(n=8)))


def test_a_row_that_was_cancelled_gives_nothing_to_its_successor(ahead):
    expected = bits(result_of(ahead, request_of(n=8)))
    with amid(ahead, request_of(9, n=8, max_tokens=60, seed=3)) as (future, _):
        future.cancel()  # with a chunk on its way for all eight slots
        following = ahead.submit(request_of(n=8))
    assert bits(following.result(timeout=120)) == expected


def test_a_pause_leaves_no_chunk_on_its_way_and_new_weights_begin_with_the_next(ahead, model):
    other, request = tiny_model(seed=9), request_of(max_tokens=60)
    whole = result_of(ahead, request)
    try:
        with amid(ahead, request) as (future, deltas):
            ahead.swap(other, 2, "two", recompute_kv_cache=True)
        (sample,) = future.result(timeout=120).samples
        assert sample.policy_versions is not None
        # two chunks were read, and a third was on its way
        assert sample.policy_versions.tolist() == [1] * 12 + [2] * 48
        np.testing.assert_array_equal(sample.token_ids[:12], whole.samples[0].token_ids[:12])
        assert [delta.weight_version for delta in deltas] == [1] * 3 + [2] * 12
        continued = replace(
            request,
            prompt_ids=np.concatenate([request.prompt_ids, sample.token_ids[:12]]),
            sampling=replace(request.sampling, max_tokens=48),
        )
        fresh = result_of(ahead, continued)
        np.testing.assert_array_equal(fresh.samples[0].token_ids, sample.token_ids[12:])
    finally:
        ahead.swap(model, 1, "one")
    with together(ahead):
        assert not ahead._steps.in_flight

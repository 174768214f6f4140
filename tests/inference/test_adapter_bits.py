"""Bits of sequences with adapters, by programs as users have them."""

import threading

import numpy as np
import pytest
from inference.engines import amid, bits, engine_of, request_of, result_of, together
from support.engine_adapters import adapter_for, check_logprobs, load, merged

from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import GenerationRequest

pytestmark = [pytest.mark.bits, pytest.mark.isa, pytest.mark.slow]


@pytest.fixture
def engine(adapter_engine: Engine) -> Engine:
    return adapter_engine


def test_other_slots_adapters_change_no_bit(engine, model):
    # alone by half of the bank where that is proven, together by the whole of it
    adapters = [adapter_for(model, seed) for seed in range(3)]
    numbers = [load(engine, adapter) for adapter in adapters]
    requests = [
        request_of(10 + 3 * index, prompt_seed=index, n=1 + index % 2, adapter=number)
        for index, number in enumerate((0, *numbers, 0, *reversed(numbers)))
    ]
    alone = [bits(result_of(engine, request)) for request in requests]
    with together(engine):
        futures = [engine.submit(request) for request in requests]
    assert [bits(future.result(timeout=120)) for future in futures] == alone


def test_other_rows_of_the_bank_change_no_bit(engine, model):
    adapter = adapter_for(model, 7)
    number, results = load(engine, adapter), []
    for seeds in ((), (0, 1), (2, 3)):
        others = [load(engine, adapter_for(model, seed)) for seed in seeds]
        results.append(bits(result_of(engine, request_of(adapter=number))))
        for other in others:
            engine.adapters.unload(other)
    assert results[0] == results[1] == results[2]


def test_loading_amid_a_request_changes_none_of_its_bits(engine, model):
    number = load(engine, adapter_for(model, 1))
    request = request_of(adapter=number)
    expected = bits(result_of(engine, request))
    with amid(engine, request) as (future, _):
        loading = threading.Thread(target=load, args=(engine, adapter_for(model, 2)))
        loading.start()
    loading.join()
    assert bits(future.result(timeout=120)) == expected


def test_a_dialogue_on_an_adapter_goes_on_from_its_own_cache(model):
    engine = engine_of(model, adapters_max=3, adapter_rank_max=8, prefix_cache=True)
    if not engine.plan.keeps_prefixes:
        engine.close()
        pytest.skip("on this machine prefill and decode have other bits: nothing is kept")
    try:
        adapter = adapter_for(model, 8)
        load(engine, adapter_for(model, 9))
        number = load(engine, adapter)
        first = request_of(20, adapter=number)
        completion = result_of(engine, first).samples[0].token_ids
        prompt = np.concatenate([first.prompt_ids, completion, first.prompt_ids[:5]])
        turn = GenerationRequest(
            prompt_ids=prompt.astype(np.int32), sampling=first.sampling, adapter=number
        )
        continued = result_of(engine, turn)
        assert continued.cached_tokens == 31
        engine.reset_prefix_cache()
        assert bits(result_of(engine, turn)) == bits(continued)
        check_logprobs(continued, merged(model, adapter), turn.prompt_ids)
    finally:
        engine.close()

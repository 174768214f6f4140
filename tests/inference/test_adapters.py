"""Adapters in the engine: each sequence with its own, whatever the others have."""

import threading
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.engines import amid, bits, engine_of, request_of, result_of, together
from support.engine_adapters import NATS, adapter_for, check_logprobs, load, merged
from support.models import full_logprobs, tiny_model

from marin_rl.errors import InputError
from marin_rl.inference.adapters import AdapterBank, AdapterGone, BankSizes
from marin_rl.inference.engine import Engine
from marin_rl.inference.linear_layers import LayerAdapters, LowRank

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture
def engine(adapter_engine: Engine) -> Engine:
    return adapter_engine


@pytest.mark.slow
def test_logprobs_are_those_of_the_merged_model(engine, model):
    check_against_merged(engine, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma"])
def test_logprobs_of_other_families_are_those_of_the_merged_model(name):
    model = tiny_model(name)
    with closing(engine_of(model, adapters_max=2, adapter_rank_max=4)) as engine:
        check_against_merged(engine, model)


def check_against_merged(engine, model):
    """The base and adapters of ranks 1 and 4, side by side: each as its merged model."""
    adapters = [adapter_for(model, seed, rank=1 + 3 * seed) for seed in (0, 1)]
    numbers = [0, *(load(engine, adapter) for adapter in adapters)]
    request = request_of(20, raw_logprobs=True, score_prompt=True)
    with together(engine):
        futures = [
            engine.submit(request_of(20, adapter=number, score_prompt=True, n=2))
            for number in numbers
        ]
    results = [future.result(timeout=120) for future in futures]
    models = [model, *(merged(model, adapter) for adapter in adapters)]
    for result, own in zip(results, models, strict=True):
        check_logprobs(result, own, request.prompt_ids)
        scores = full_logprobs(own, request.prompt_ids[:1], request.prompt_ids[1:])
        assert result.prompt_scores is not None
        np.testing.assert_allclose(result.prompt_scores.logprobs[1:], scores, atol=NATS)
    assert len({bits(result)[0] for result in results}) == 3


@pytest.mark.slow
def test_modules_that_an_adapter_leaves_out_add_nothing(engine, model):
    adapter = adapter_for(model, modules=("v_proj", "mlp.up_proj"))
    request = request_of(adapter=load(engine, adapter))
    check_logprobs(result_of(engine, request), merged(model, adapter), request.prompt_ids)


@pytest.mark.slow
def test_a_bank_beyond_the_mask_reads_each_sequences_own(model):
    with closing(engine_of(model, adapters_max=9, adapter_rank_max=8)) as engine:
        adapters = [adapter_for(model, seed, rank=8) for seed in range(9)]
        numbers = [load(engine, adapter) for adapter in adapters]
        with together(engine):
            futures = [engine.submit(request_of(adapter=number)) for number in (0, *numbers)]
        models = [model, *(merged(model, adapter) for adapter in adapters)]
        for future, own in zip(futures, models, strict=True):
            check_logprobs(future.result(timeout=120), own, request_of().prompt_ids)


@pytest.mark.slow
def test_requests_end_on_an_adapter_that_is_unloaded(engine, model):
    adapter = adapter_for(model, 3)
    number = load(engine, adapter)
    request = request_of(adapter=number, max_tokens=40)
    with amid(engine, request) as (future, _):
        waiting = engine.submit(request)
        engine.adapters.unload(number)
        with pytest.raises(AdapterGone, match="expected 0, the base model"):
            engine.submit(request)
    for each in (future, waiting):
        check_logprobs(each.result(timeout=120), merged(model, adapter), request.prompt_ids)
    with pytest.raises(AdapterGone):
        engine.adapters.unload(number)


@pytest.mark.slow
def test_a_row_is_free_once_its_last_request_ended(engine, model):
    numbers = [load(engine, adapter_for(model, seed)) for seed in range(3)]
    with pytest.raises(InputError, match=r"at most 3 adapters .* found 3 loaded and 0 unloaded"):
        load(engine, adapter_for(model, 4))
    with amid(engine, request_of(adapter=numbers[1], max_tokens=40)) as (future, _):
        # in place of one that is in use another row is needed
        with pytest.raises(InputError, match="found 3 loaded and 0 unloaded"):
            engine.adapters.load(
                adapter_for(model, 4),
                name="fourth",
                weight_version=5,
                parameters_digest="fourth",
                in_place_of=numbers[1],
            )
        engine.adapters.unload(numbers[1])
        with pytest.raises(InputError, match="found 2 loaded and 1 unloaded"):
            load(engine, adapter_for(model, 4))
    future.result(timeout=120)
    fourth = adapter_for(model, 4)
    request = request_of(adapter=load(engine, fourth))
    check_logprobs(result_of(engine, request), merged(model, fourth), request.prompt_ids)


@pytest.mark.slow
def test_in_place_new_requests_get_the_new_one_and_old_ones_end_on_theirs(engine, model):
    before, after = adapter_for(model, 5), adapter_for(model, 6)
    number = load(engine, before, "policy")
    request = request_of(adapter=number, max_tokens=40)
    replaced = []

    def replace() -> None:
        replaced.append(
            engine.adapters.load(
                after,
                name="policy",
                weight_version=6,
                parameters_digest="after",
                in_place_of=number,
            )
        )

    loading = threading.Thread(target=replace)
    with amid(engine, request) as (future, _):
        loading.start()
    loading.join()
    check_logprobs(future.result(timeout=120), merged(model, before), request.prompt_ids)
    # by the old number too: a caller may have looked it up just before
    for each in (number, replaced[0].number):
        later = result_of(engine, request_of(adapter=each))
        check_logprobs(later, merged(model, after), request.prompt_ids)
    assert [one.number for one in engine.adapters.loaded] == [replaced[0].number]


@pytest.mark.slow
def test_adapters_of_one_row_share_no_cache(model):
    with closing(engine_of(model, adapters_max=1, adapter_rank_max=8, prefix_cache=True)) as engine:
        prompts = []
        for seed in range(2):
            adapter = adapter_for(model, seed)
            number = load(engine, adapter)
            request = request_of(20, adapter=number)
            result = result_of(engine, request)
            assert result.cached_tokens == 0
            check_logprobs(result, merged(model, adapter), request.prompt_ids)
            prompts.append(request.prompt_ids)
            engine.adapters.unload(number)
        again = result_of(engine, request_of(20))
        assert again.cached_tokens == 0
        check_logprobs(again, model, prompts[0])


@pytest.mark.slow
def test_other_weights_are_refused_while_adapters_are_loaded(engine, model):
    number = load(engine, adapter_for(model))
    with pytest.raises(InputError, match=r"adapters are loaded on the weights one \(adapter\)"):
        engine.swap(tiny_model(seed=9), 2, "two")
    engine.swap(model, 1, "one")  # the same ones are no others
    engine.adapters.unload(number)
    engine.swap(tiny_model(seed=9), 2, "two")
    engine.swap(model, 1, "one")


@pytest.mark.slow
def test_a_write_that_fails_after_an_unload_fails_its_load_alone(engine, model, monkeypatch):
    def unloaded_amid_the_write(*_: object) -> None:
        (adapter,) = engine.adapters.loaded
        engine.adapters.unload(adapter.number)
        raise RuntimeError("no memory")

    expected = bits(result_of(engine, request_of()))
    with monkeypatch.context() as patch:
        patch.setattr(engine.adapters._bank, "write", unloaded_amid_the_write)
        with pytest.raises(RuntimeError, match="no memory"):
            load(engine, adapter_for(model))
    assert bits(result_of(engine, request_of())) == expected, "the engine goes on"
    assert result_of(engine, request_of(adapter=load(engine, adapter_for(model)))).samples


def test_a_lane_on_few_adapters_gets_half_of_the_bank():
    leaf: Any = jax.ShapeDtypeStruct((5, 1, 2), np.dtype(np.float32))
    sizes, ones = BankSizes(adapters=5, rank=1), LowRank(leaf, (leaf,))
    bank = AdapterBank((LayerAdapters(ones, ones, ones, ones),), lambda arrays: arrays)
    values = jnp.arange(1.0, 6.0, dtype=np.float32)
    bank.arrays = jax.tree.map(lambda array: array + values[:, None, None], bank.arrays)

    def own_values(rows):
        """The half or the whole, and the number in the row that each slot is given."""
        chosen, places = bank.used(0, sizes, np.array(rows, np.int32))
        of_bank = np.asarray(chosen[0].down.b[0])[:, 0, 0]
        return chosen, [0 if place == 0 else of_bank[place - 1] for place in places]

    half, values_of = own_values([5, 0, 2, 5])
    assert values_of == [5, 0, 2, 5]
    assert len(half[0].down.b[0]) == 3
    # no other copy while the same rows do
    again, values_of = own_values([0, 2, 2, 0])
    assert again is half
    assert values_of == [0, 2, 2, 0]
    assert own_values([3, 4, 0, 5])[1] == [3, 4, 0, 5]
    whole, values_of = own_values([5, 4, 3, 1])
    assert values_of == [5, 4, 3, 1]
    assert whole is bank.arrays
    # a row that is written is read by the next chunk
    bank.write(5, jax.tree.map(lambda array: 7 + 0 * array[:1], bank.arrays))
    assert own_values([5, 0, 2, 5])[1] == [7, 0, 2, 7]

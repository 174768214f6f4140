"""Dialogues that continue from the KV cache of their last turn: same bits, fewer tokens computed.

Where an engine finds at its start that prefill and decode have other bits on this machine, nothing
is kept, and these tests are skipped.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest
from inference.engines import bits, engine_of, prompt_of, result_of, together
from support.models import tiny_model

from marin_rl.inference.engine import Engine
from marin_rl.inference.engine_step import EngineStats
from marin_rl.inference.generation import GenerationRequest, GenerationResult
from marin_rl.inference.pieces import CALL_STEPS, Extension, packed
from marin_rl.models.module import LanguageModel
from marin_rl.types import Sampling

SLOTS = 4


def keeping_engine(model: LanguageModel, **options: int) -> Engine:
    engine = engine_of(model, **{"slots": SLOTS} | options, prefix_cache=True)
    if not engine.plan.keeps_prefixes:
        engine.close()
        pytest.skip("on this machine prefill and decode have other bits: nothing is kept")
    return engine


@pytest.fixture(scope="module")
def keeping(model: LanguageModel) -> Iterator[Engine]:
    engine = keeping_engine(model)
    yield engine
    engine.close()


def turn_of(prompt: np.ndarray, seed: int, **options: int) -> GenerationRequest:
    sampling = Sampling(max_tokens=9, seed=seed)
    return GenerationRequest(prompt_ids=prompt, sampling=sampling, raw_logprobs=True, **options)


def next_prompt(prompt: np.ndarray, result: GenerationResult, new: int, seed: int) -> np.ndarray:
    parts = prompt, result.samples[0].token_ids, prompt_of(new, seed)
    return np.concatenate(parts).astype(np.int32)


def dialogue(engine: Engine, *, turns: int = 4, prompt_seed: int = 0, reset: bool = False):
    """Results of the turns of a dialogue; `reset` forgets before each of them."""
    prompt, results = prompt_of(20, prompt_seed), []
    for turn in range(turns):
        if reset:
            engine.reset_prefix_cache()
        results.append(result_of(engine, turn_of(prompt, seed=turn)))
        prompt = next_prompt(prompt, results[-1], 5, 100 * prompt_seed + turn)
    return results


def added(engine: Engine, before: EngineStats) -> tuple[int, int]:
    """Tokens of prompts computed and read from the cache since `before`."""
    after = engine.stats
    return (
        after.prefilled_tokens - before.prefilled_tokens,
        after.cached_tokens - before.cached_tokens,
    )


def all_bits(results: Sequence[GenerationResult]) -> list[object]:
    raw = [sample.raw_logprobs for result in results for sample in result.samples]
    return [*map(bits, results), *[None if one is None else one.tobytes() for one in raw]]


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.parametrize(("name", "slots"), [("llama-gqa", 8), ("qwen3", 5)])
def test_every_model_continues_with_the_same_bits(name, slots):
    with closing(keeping_engine(tiny_model(name), slots=slots, lanes=1)) as engine:
        continued = dialogue(engine, turns=3)
        assert [result.cached_tokens for result in continued] == [0, 28, 42]
        assert all_bits(dialogue(engine, turns=3, reset=True)) == all_bits(continued)


@pytest.mark.bits
def test_a_dialogue_computes_its_new_tokens_alone(keeping):
    before = keeping.stats.snapshot()
    continued = dialogue(keeping, prompt_seed=1)
    # of 20 tokens all but the last, then 5 new ones a turn and the last that was sampled
    assert added(keeping, before) == (19 + 3 * 5, 28 + 42 + 56)
    before = keeping.stats.snapshot()
    fresh = dialogue(keeping, prompt_seed=1, reset=True)
    assert added(keeping, before) == (19 + 33 + 47 + 61, 0)
    assert all_bits(fresh) == all_bits(continued)
    assert [result.cached_tokens for result in fresh] == [0, 0, 0, 0]


@pytest.mark.bits
def test_samples_of_one_prompt_start_from_the_kept_turn(keeping):
    first = result_of(keeping, turn_of(prompt_of(20, 2), seed=5))
    prompt = next_prompt(prompt_of(20, 2), first, 5, 6)
    before = keeping.stats.snapshot()
    continued = result_of(keeping, turn_of(prompt, seed=6, n=SLOTS + 2))
    # the samples that come after their siblings ended find the whole prompt in one's slot
    assert added(keeping, before) == (5, 28 + 33)
    assert continued.cached_tokens == 28
    keeping.reset_prefix_cache()
    assert all_bits([result_of(keeping, turn_of(prompt, seed=6, n=SLOTS + 2))]) == all_bits(
        [continued]
    )


@pytest.mark.bits
def test_a_prompt_that_leaves_the_kept_text_is_computed_from_there(keeping):
    first = result_of(keeping, turn_of(prompt_of(20, 3), seed=5))
    prompt = next_prompt(prompt_of(20, 3), first, 5, 6)
    prompt[25] = 2 + (prompt[25] + 1 - 2) % 10
    continued = result_of(keeping, turn_of(prompt, seed=6))
    assert continued.cached_tokens == 25
    keeping.reset_prefix_cache()
    assert all_bits([result_of(keeping, turn_of(prompt, seed=6))]) == all_bits([continued])


def test_under_pressure_the_least_recently_used_goes_first(keeping):
    keeping.reset_prefix_cache()
    prompts = [prompt_of(20, seed) for seed in range(20, 20 + SLOTS)]
    lasts = [result_of(keeping, turn_of(prompt, seed=1)) for prompt in prompts]
    evicted = keeping.stats.evicted_prefixes
    # the first one is used again, so the second is the oldest
    again = next_prompt(prompts[0], lasts[0], 5, 1)
    assert result_of(keeping, turn_of(again, seed=2)).cached_tokens == 28
    assert keeping.stats.evicted_prefixes == evicted
    result_of(keeping, turn_of(prompt_of(20, 40), seed=1))
    assert keeping.stats.evicted_prefixes == evicted + 1
    cached = [
        result_of(keeping, turn_of(next_prompt(prompt, last, 5, 1), seed=3)).cached_tokens
        for prompt, last in zip(prompts[2:], lasts[2:], strict=True)
    ]
    assert cached == [28] * (SLOTS - 2)
    lost = next_prompt(prompts[1], lasts[1], 5, 1)
    assert result_of(keeping, turn_of(lost, seed=3)).cached_tokens == 0


def test_a_newcomer_leaves_the_slot_of_a_dialogue_that_comes_with_it(keeping):
    keeping.reset_prefix_cache()
    prompts = [prompt_of(20, seed) for seed in range(50, 50 + SLOTS)]
    lasts = [result_of(keeping, turn_of(prompt, seed=1)) for prompt in prompts]
    oldest = next_prompt(prompts[0], lasts[0], 5, 1)
    with together(keeping):
        newcomer = keeping.submit(turn_of(prompt_of(20, 60), seed=1))
        later = keeping.submit(turn_of(oldest, seed=2))
    assert newcomer.result(timeout=120).cached_tokens == 0
    assert later.result(timeout=120).cached_tokens == 28


@pytest.mark.bits
def test_other_weights_never_read_it_though_their_version_is_the_same(model):
    with closing(keeping_engine(model)) as engine:
        prompt = prompt_of(20)
        first = result_of(engine, turn_of(prompt, seed=1))
        following = turn_of(next_prompt(prompt, first, 5, 1), seed=2)
        engine.swap(tiny_model(seed=9), 1, "two")
        swapped = result_of(engine, following)
        assert swapped.cached_tokens == 0
        engine.reset_prefix_cache()
        assert bits(result_of(engine, following)) == bits(swapped)
        # nor the first weights' what they had left before
        engine.swap(model, 1, "one")
        assert result_of(engine, following).cached_tokens == 0


def test_a_sequence_that_two_policies_drew_is_not_kept(model):
    other = tiny_model(seed=9)
    with closing(keeping_engine(model)) as engine:
        swaps: list[int] = []

        def swap(_: object) -> None:
            if not swaps:
                swaps.append(1)
                engine.swap(other, 2, "two")

        prompt = prompt_of(20)
        first = engine.submit(turn_of(prompt, seed=1), swap).result(timeout=120)
        assert first.samples[0].policy_versions is not None
        following = turn_of(next_prompt(prompt, first, 5, 1), seed=2)
        assert result_of(engine, following).cached_tokens == 0


def test_adapters_never_read_each_others_cache(keeping):
    keeping.reset_prefix_cache()
    prompt = prompt_of(20, 70)
    first = result_of(keeping, turn_of(prompt, seed=1))
    following = next_prompt(prompt, first, 5, 1)
    kept, weights = keeping._batch.kept, keeping.policy.key
    assert kept.longest(following, weights, adapter=0) is not None
    assert kept.longest(following, weights, adapter=1) is None


@pytest.mark.bits
def test_an_engine_that_slept_starts_over(model):
    with closing(keeping_engine(model)) as engine:
        continued = dialogue(engine, turns=2)
        prompt = next_prompt(prompt_of(20), continued[0], 5, 0)
        engine.sleep()
        again = result_of(engine, turn_of(prompt, seed=1))
        # a request that comes before the caches were given back still finds them
        assert again.cached_tokens in (0, 33)
        assert bits(again) == bits(continued[1])


@pytest.mark.bits
def test_abandoned_and_stopped_sequences_leave_what_they_computed(keeping):
    keeping.reset_prefix_cache()
    prompt = prompt_of(20, 80)
    whole = result_of(keeping, turn_of(prompt, seed=1))
    text = "".join(chr(32 + i) for i in whole.samples[0].token_ids.tolist()[2:4])
    stopping = GenerationRequest(
        prompt_ids=prompt, sampling=Sampling(max_tokens=9, seed=1, stop=(text,))
    )
    keeping.reset_prefix_cache()
    stopped = result_of(keeping, stopping)
    following = next_prompt(prompt, stopped, 5, 1)
    result = result_of(keeping, turn_of(following, seed=2))
    assert 19 < result.cached_tokens <= 20 + len(stopped.samples[0].token_ids)
    keeping.reset_prefix_cache()
    assert bits(result_of(keeping, turn_of(following, seed=2))) == bits(result)


def test_without_the_key_nothing_is_kept(engine):
    assert not engine.plan.keeps_prefixes
    before = engine.stats.snapshot()
    dialogue(engine, turns=2)
    assert added(engine, before) == (19 + 33, 0)


def test_pieces_fill_steps_in_the_order_of_positions():
    prompts = [
        Extension(2, 5, np.arange(7, dtype=np.int32)),
        Extension(0, 0, np.full(3, 9, np.int32)),
    ]
    (call,) = packed(prompts, 4, 2, first=1)
    assert call.tokens_ENT.shape == (CALL_STEPS, 2, 2)
    assert int(call.steps) == 3
    pieces = [
        (int(slot), positions[positions >= 0].tolist(), tokens[positions >= 0].tolist())
        for slot, positions, tokens in zip(
            call.slot_EN.reshape(-1),
            call.positions_ENT.reshape(-1, 2),
            call.tokens_ENT.reshape(-1, 2),
            strict=True,
        )
    ][:6]
    assert pieces == [
        (2, [5], [0]),
        (2, [6, 7], [1, 2]),
        (2, [8, 9], [3, 4]),
        (2, [10, 11], [5, 6]),
        (0, [0], [9]),
        (0, [1, 2], [9, 9]),
    ]

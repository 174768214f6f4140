"""Occupancy of slots under a mixed load, by counting steps: never by a clock."""

import random
import time
from contextlib import closing

import jax
import numpy as np
import pytest
from support.engines import bits, engine_of, prompt_of, request_of, result_of
from support.models import VOCABULARY, tiny_model

from marin_rl.config import EngineConfig
from marin_rl.inference.engine import Engine
from marin_rl.inference.engine_step import EngineStats
from marin_rl.inference.generation import Delta, GenerationRequest
from marin_rl.types import Sampling


class Arrivals:
    """Submits requests one by one, so that a few always wait, until there are no more.

    Runs on the engine's thread, as a listener: so the load is the same in every run.
    """

    def __init__(self, engine: Engine, requests: list[GenerationRequest], waiting: int) -> None:
        self.engine, self.waiting = engine, waiting
        self.requests = requests[::-1]
        self.futures = []
        self.at_the_end: EngineStats | None = None

    def __call__(self, delta: Delta | None = None) -> None:
        while self.requests and self.engine.queued < self.waiting:
            self.futures.append(self.engine.submit(self.requests.pop(), self))
        if not self.requests and self.engine.queued == 0 and self.at_the_end is None:
            self.at_the_end = self.engine.stats.snapshot()


def mixed_requests(seed: int, count: int) -> list[GenerationRequest]:
    """Prompts of 8 to 512 tokens, limits of 8 to 512, ends at random, some groups."""
    rng = random.Random(seed)
    return [
        GenerationRequest(
            prompt_ids=prompt_of(rng.randint(8, 512), index),
            n=rng.choice((1, 1, 1, 4, 8)),
            sampling=Sampling(max_tokens=rng.randint(8, 512), seed=rng.getrandbits(48)),
            stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice((0, 1, 2)))),
        )
        for index in range(count)
    ]


@pytest.mark.usefixtures("itself_compiled_quickly")
@pytest.mark.slow
@pytest.mark.parametrize("chunk_steps", [4, 16, 64])
def test_a_mixed_load_keeps_the_slots_busy(chunk_steps):
    config = EngineConfig(slots=16, chunk_steps=chunk_steps, prefill_rows=4)
    with closing(Engine(tiny_model(context_length=1024), config, context_length=1024)) as engine:
        arrivals = Arrivals(engine, mixed_requests(seed=11, count=60), waiting=6)
        engine.pause()
        arrivals()
        engine.resume()
        samples = 0
        for future in iter_futures(arrivals):
            samples += len(future.result(timeout=200).samples)
        stats = arrivals.at_the_end
        assert stats is not None
        share = stats.busy_slot_steps / stats.slot_steps
        lengths = stats.busy_slot_steps / samples
        print(f"{share:.1%} busy, {lengths:.0f} steps a sample, {stats.chunks} chunks, {stats}")
        assert share >= 0.8
        # groups that got few free slots share their prompt too
        assert stats.prefilled_prompts <= 60 + 3


def iter_futures(arrivals: Arrivals):
    index = 0
    while index < len(arrivals.futures):
        yield arrivals.futures[index]
        index += 1


@pytest.mark.bits
def test_a_group_that_finds_few_free_slots_copies_its_prompt_from_a_sibling(model):
    with closing(engine_of(model)) as engine:
        request = request_of(40, n=21, max_tokens=9)
        expected = [
            bits(result_of(engine, request_of(40, seed=7 + index, max_tokens=9)))[0]
            for index in range(21)
        ]
        before = engine.stats.snapshot()
        blocker = request_of(30, prompt_seed=4, n=5, max_tokens=23)
        engine.pause()
        futures = [engine.submit(blocker), engine.submit(request)]
        engine.resume()
        assert bits(futures[1].result(timeout=120)) == expected
        after = engine.stats.snapshot()
        # the first three start together; each later one has a sibling or comes after all of them
        prefilled = after.prefilled_prompts - before.prefilled_prompts
        copied = after.copied_prompts - before.copied_prompts
        assert copied > 0
        assert prefilled < 2 + 6


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_a_siblings_prompt_is_not_shared_across_a_swap(model):
    other = tiny_model(seed=9)
    with closing(engine_of(model, slots=4, chunk_steps=2)) as engine:
        swapped = False

        def swap_once(delta: Delta) -> None:
            nonlocal swapped
            if not swapped:
                engine.swap(other, 2, "two")
                swapped = True

        # the first four start with the old weights and end at different times
        engine.pause()
        blocker = engine.submit(request_of(3, n=2, max_tokens=6), swap_once)
        future = engine.submit(request_of(40, n=6, max_tokens=11))
        engine.resume()
        samples = future.result(timeout=120).samples
        blocker.result(timeout=120)
        fresh = [sample for sample in samples if sample.policy_versions is None]
        assert len(fresh) >= 2
        alone = {
            bits(result_of(engine, request_of(40, seed=7 + index, max_tokens=11)))[0][0]
            for index in range(6)
        }
        assert {sample.token_ids.tobytes() for sample in fresh} <= alone


@pytest.mark.slow
@pytest.mark.usefixtures("itself_compiled_quickly")
def test_prompts_that_come_while_others_decode_are_let_in_a_few_at_a_time(model):
    with closing(engine_of(model, slots=8, chunk_steps=2)) as engine:
        seated: list[int] = []
        newcomers = []

        def arrive(delta: Delta) -> None:
            if not newcomers:
                newcomers.extend(
                    engine.submit(request_of(60, prompt_seed=9 + i, max_tokens=20))
                    for i in range(7)
                )
            seated.append(engine.active)

        engine.submit(request_of(max_tokens=30), arrive).result(timeout=120)
        for future in newcomers:
            future.result(timeout=120)
        # four chunks' worth of tokens is one bucket of 64: one prompt a round
        assert seated[:5] == [1, 2, 3, 4, 5]


def test_a_chunk_ends_when_every_sequence_has_ended(engine):
    before = engine.stats.snapshot()
    result_of(engine, request_of(n=8, max_tokens=1))
    after = engine.stats.snapshot()
    assert after.slot_steps - before.slot_steps == 8
    assert after.chunks - before.chunks == 1


@pytest.mark.bits
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 63, 64, 65, 90])
def test_prompts_on_either_side_of_a_bucket_give_the_same_in_a_group_and_alone(engine, length):
    together = bits(result_of(engine, request_of(length, n=3, max_tokens=6)))
    apart = [
        bits(result_of(engine, request_of(length, seed=7 + i, max_tokens=6)))[0] for i in (0, 1, 2)
    ]
    assert together == apart


def test_slots_that_are_done_ask_for_nothing(engine):
    wishes = {
        "logit_bias": ((3, 1.0),),
        "presence_penalty": 1.0,
        "top_logprobs": 3,
        "raw_logprobs": True,
        "min_p": 0.1,
    }
    result_of(engine, request_of(n=8, max_tokens=5, **wishes))
    extras = engine._batch.extras
    assert not extras.reported
    assert not extras.constrained
    # the very arrays that were made at the start: nothing is copied to the device
    first = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(extras.on_device(0))]
    assert first == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(extras.on_device(0))]
    for rows in extras._rows.values():
        for array in rows:
            assert (array == np.broadcast_to(array[:1], array.shape)).all()


@pytest.mark.bits
def test_an_engine_that_sleeps_holds_no_caches_and_answers_the_same_once_woken(model):
    with closing(engine_of(model)) as engine:
        request = request_of(20, n=3, max_tokens=9, seed=5)
        expected = bits(result_of(engine, request))
        engine.pause()
        future = engine.submit(request)
        engine.sleep()  # waiting requests are served once it is awake
        engine.resume()
        assert bits(future.result(timeout=120)) == expected
        engine.sleep()
        deadline = time.monotonic() + 30
        while engine._runner.memory.caches and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine._runner.memory.caches
        assert bits(result_of(engine, request)) == expected
        assert engine._runner.memory.caches  # a request ends what was asked before it

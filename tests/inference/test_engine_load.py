"""Occupancy of slots under a mixed load, by counting steps: never by a clock."""

from contextlib import closing

import jax
import numpy as np
import pytest
from inference.engines import bits, engine_of, request_of, result_of, together
from support.cases import others_slow
from support.models import tiny_model
from support.servers import wait_until

from marin_rl.inference.generation import Delta


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
        with together(engine):
            futures = [engine.submit(blocker), engine.submit(request)]
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
        with together(engine):
            blocker = engine.submit(request_of(3, n=2, max_tokens=6), swap_once)
            future = engine.submit(request_of(40, n=6, max_tokens=11))
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
@pytest.mark.parametrize(
    "length", others_slow([15, 16, 17, 31, 32, 33, 63, 64, 65, 90], 16, 17, 64, 90)
)
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
        wait_until(lambda: not engine._runner.memory.caches)
        assert bits(result_of(engine, request)) == expected
        assert engine._runner.memory.caches  # a request ends what was asked before it

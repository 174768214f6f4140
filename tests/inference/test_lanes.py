"""Lanes: the same answers in whichever lane, and all of them change weights between two chunks."""

import random
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest
from inference.engines import (
    bits,
    engine_of,
    random_requests,
    request_of,
    result_of,
    results_under_load,
    together,
)
from support.cases import printed_seed
from support.models import tiny_model
from support.servers import wait_until

from marin_rl.cpu_streams import LANE_SLOTS_MIN, LANE_WEIGHTS_BYTES_MAX, Lanes, lanes_for
from marin_rl.errors import InputError
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import Delta
from marin_rl.inference.weights import fused_weights, read_model
from marin_rl.machine import pool_threads
from marin_rl.models.module import LanguageModel


@pytest.fixture(scope="module")
def laned(model: LanguageModel) -> Iterator[Engine]:
    """Two lanes of four slots."""
    engine = engine_of(model, lanes=2)
    yield engine
    engine.close()


def test_slots_are_parted_evenly_and_in_order():
    lanes = Lanes(3, 12)
    assert [lanes.of(slot) for slot in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    parts = [lanes.part(lane, np.arange(12)) for lane in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(12))


def test_left_to_itself_a_cpu_has_a_lane_for_each_thread_that_a_small_model_fills():
    count = lambda slots, weights_bytes=1, on_mesh=False: (
        lanes_for(0, slots, weights_bytes=weights_bytes, on_mesh=on_mesh).count
    )
    threads = pool_threads()
    full = threads * LANE_SLOTS_MIN
    assert count(full) == threads
    assert count(full - 1) == 1
    assert count(full, weights_bytes=LANE_WEIGHTS_BYTES_MAX + 1) == 1
    assert count(full, on_mesh=True) == 1


def test_lanes_that_cannot_be_are_refused(model):
    with pytest.raises(InputError, match="divide the 8 slots"):
        engine_of(model, lanes=3)
    with pytest.raises(InputError, match="a mesh"):
        lanes_for(2, 8, weights_bytes=1, on_mesh=True)


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_bitwise_the_same_in_every_lane_and_under_any_load(laned):
    rng = random.Random(printed_seed())
    requests = random_requests(rng, 16)
    expected = [bits(result_of(laned, request)) for request in requests]
    for _ in range(2):
        for index, result in results_under_load(laned, requests, rng):
            assert bits(result) == expected[index], index


@pytest.mark.slow
def test_groups_are_spread_over_lanes_and_each_prompt_runs_once_in_a_lane(laned):
    before = laned.stats.snapshot()
    with together(laned):
        futures = [laned.submit(request_of(20, prompt_seed=i, n=4, max_tokens=4)) for i in range(2)]
    wait(futures, timeout=120)
    after = laned.stats.snapshot()
    assert after.prefilled_prompts - before.prefilled_prompts == 2
    assert after.chunks - before.chunks == 1
    assert after.busy_slot_steps - before.busy_slot_steps == 8 * 4
    # one request over both lanes: its prompt runs once in each
    result_of(laned, request_of(20, n=8, max_tokens=4))
    assert laned.stats.prefilled_prompts - after.prefilled_prompts == 2


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.bits
def test_a_late_sibling_copies_the_prompt_within_its_lane(laned):
    requests = [request_of(20, prompt_seed=i, n=7, max_tokens=9 + i) for i in range(3)]
    expected = [bits(result_of(laned, request)) for request in requests]
    before = laned.stats.copied_prompts
    futures = [laned.submit(request) for request in requests]
    assert [bits(future.result(timeout=120)) for future in futures] == expected
    assert laned.stats.copied_prompts > before


@pytest.mark.slow
def test_all_lanes_change_weights_between_the_same_two_chunks(model):
    engine = engine_of(model, lanes=2)
    other = tiny_model(seed=1)
    swapped: list[bool] = []

    def swap_once(_: Delta) -> None:
        if not swapped:
            swapped.append(True)
            engine.swap(other, 2, "two")

    try:
        with together(engine):
            futures = [
                engine.submit(request_of(prompt_seed=i, n=2, max_tokens=12), swap_once)
                for i in range(4)
            ]
        samples = [sample for future in futures for sample in future.result(timeout=120).samples]
    finally:
        engine.close()
    assert len(samples) == 8
    for sample in samples:
        assert sample.policy_versions is not None
        assert sample.policy_versions.tolist() == [1] * 4 + [2] * 8


def copy_kept_s(monkeypatch: pytest.MonkeyPatch, value: float | int) -> None:
    monkeypatch.setattr("marin_rl.inference.engine.COPY_KEPT_S", value)


def wait_until_the_copy_is_gone(engine: Engine) -> None:
    wait_until(lambda: engine._runner.memory.fused is None)


@pytest.mark.slow
def test_an_idle_engine_holds_no_copy_of_the_weights_for_long(laned, monkeypatch):
    copy_kept_s(monkeypatch, 3600)
    result_of(laned, request_of())
    copy = laned._runner.memory.fused
    assert copy is not None
    result_of(laned, request_of())
    assert laned._runner.memory.fused is copy  # one after another share it
    copy_kept_s(monkeypatch, 0.01)
    result_of(laned, request_of())
    wait_until_the_copy_is_gone(laned)


@pytest.mark.parametrize("ends", ["sleep", "pause", "swap"])
def test_the_copys_memory_is_freed_on_request(model, ends, monkeypatch):
    copy_kept_s(monkeypatch, 3600)
    other = tiny_model(seed=1)
    with closing(engine_of(model)) as engine:
        result_of(engine, request_of())
        assert engine._runner.memory.fused is not None
        if ends == "swap":
            engine.swap(other, 2, "two")
        else:
            getattr(engine, ends)()
        wait_until_the_copy_is_gone(engine)


def test_weights_that_are_not_fused_are_the_trainers_own_arrays(model):
    spec, weights = read_model(model)
    fused = fused_weights(spec, weights, jnp.dtype(jnp.float32))
    ours, theirs = fused.ends, weights.ends
    for own, given in ((ours.embedding, theirs.embedding), (ours.head, theirs.head)):
        assert own.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()

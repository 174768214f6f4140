"""Deltas while a request runs, and the engine at rest."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager

import numpy as np
import pytest
from inference.engines import amid, bits, engine_of, request_of, result_of, together
from support.models import tiny_model
from support.servers import wait_until

from marin_rl.errors import InferenceError
from marin_rl.inference.engine import Engine, VersionInUse
from marin_rl.inference.generation import Delta, GenerationRequest, GenerationResult, Policy


def paused_amid(engine: Engine, request: GenerationRequest) -> "Future[GenerationResult]":
    """A request that has come as far as its second chunk when `pause` returns."""
    pausing = threading.Thread(target=engine.pause)
    with amid(engine, request) as (future, _):
        pausing.start()
        wait_until(lambda: engine.paused)
    pausing.join()
    return future


class Listener:
    """Collects a request's deltas, each with whether the future was done by then."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.threads: set[str] = set()
        self.late = False
        self.future: Future[GenerationResult] | None = None

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.threads.add(threading.current_thread().name)
        self.late |= self.future is not None and self.future.done()

    def of(self, index: int) -> list[Delta]:
        return [delta for delta in self.deltas if delta.index == index]


def listen(engine: Engine, request: GenerationRequest) -> Listener:
    listener = Listener()
    listener.future = engine.submit(request, listener)
    return listener


def result(listener: Listener) -> GenerationResult:
    assert listener.future is not None
    return listener.future.result(timeout=120)


def test_deltas_under_load_concatenate_to_the_result(engine):
    listeners = [
        listen(engine, request_of(1 + 3 * index, prompt_seed=index, n=3, max_tokens=1 + 5 * index))
        for index in range(10)
    ]
    for listener in listeners:
        whole = result(listener)
        assert not listener.late
        assert listener.threads == {"engine"}
        for index, sample in enumerate(whole.samples):
            deltas = listener.of(index)
            ids = np.concatenate([delta.token_ids for delta in deltas])
            logprobs = np.concatenate([delta.logprobs for delta in deltas])
            np.testing.assert_array_equal(ids, sample.token_ids)
            np.testing.assert_array_equal(logprobs, sample.logprobs)
            assert [d.finish_reason for d in deltas] == [""] * (len(deltas) - 1) + ["length"]
            assert all(len(d.token_ids) for d in deltas)
            assert {(d.weight_version, d.parameters_digest) for d in deltas} == {(1, "one")}


def test_tokens_are_delivered_while_the_request_runs(engine):
    listener = listen(engine, request_of(max_tokens=40))
    assert len(result(listener).samples[0].token_ids) == 40
    assert [len(delta.token_ids) for delta in listener.deltas] == [4] * 10


@pytest.mark.bits
def test_a_listener_that_fails_takes_its_own_request_down_and_no_other(engine):
    alone = bits(result_of(engine, request_of(n=3)))

    def fail(delta: Delta) -> None:
        raise RuntimeError("no room")

    failed = engine.stats.failed
    broken = engine.submit(request_of(n=3, max_tokens=60), fail)
    healthy = engine.submit(request_of(n=3))
    assert bits(healthy.result(timeout=120)) == alone
    with pytest.raises(InferenceError, match=r"^its listener failed$") as caught:
        broken.result(timeout=120)
    assert str(caught.value.__cause__) == "no room"
    assert engine.stats.failed == failed + 1


def test_no_delta_comes_after_a_request_was_cancelled(model):
    with closing(engine_of(model)) as engine:
        # the first delta of the second chunk: seven more would follow
        with amid(engine, request_of(n=8, max_tokens=80), delta=9) as (running, deltas):
            queued = engine.submit(request_of(n=8, max_tokens=80))
            assert running.cancel()
            assert queued.cancel()
            chunks = engine.stats.chunks
        assert len(result_of(engine, request_of(n=8, max_tokens=2)).samples) == 8
        assert engine.stats.chunks == chunks + 1
        assert len(deltas) == 9
        assert engine.stats.cancelled == 2
        assert (engine.queued, engine.active) == (0, 0)
        assert wait([running, queued], timeout=60).not_done == set()


@pytest.mark.bits
def test_a_paused_engine_runs_no_chunk_and_goes_on_where_it_was(model):
    other = tiny_model(seed=9)
    with closing(engine_of(model)) as engine:
        expected = bits(result_of(engine, request_of(max_tokens=80)))
        running = paused_amid(engine, request_of(max_tokens=80))
        assert engine.paused
        chunks = engine.stats.chunks
        waiting = engine.submit(request_of())
        time.sleep(0.05)
        assert engine.stats.chunks == chunks
        assert (engine.queued, engine.active) == (1, 1)
        assert not running.done()
        engine.resume()
        assert not engine.paused
        assert bits(running.result(timeout=120)) == expected
        assert waiting.result(timeout=120).weight_version == 1

        engine.pause()
        swapped = engine.submit(request_of())
        engine.swap(other, 2, "two")
        engine.resume()
        assert swapped.result(timeout=120).weight_version == 2
        assert swapped.result().samples[0].policy_versions is None


@contextmanager
def held(engine: Engine) -> Iterator[tuple[Future[GenerationResult], threading.Event]]:
    """A request whose first chunk goes on until the event is set; the engine is closed after it."""
    begun, release = threading.Event(), threading.Event()

    def hold(_: Delta) -> None:
        begun.set()
        release.wait(60)

    try:
        running = engine.submit(request_of(), hold)
        assert begun.wait(60)
        yield running, release
    finally:
        release.set()
        engine.close()


def test_a_pause_that_is_taken_back_in_mid_chunk_waits_no_longer(model):
    engine = engine_of(model)
    with held(engine) as (running, release):
        pausing = threading.Thread(target=engine.pause)
        pausing.start()
        wait_until(lambda: engine.paused)
        engine.resume()
        pausing.join(30)
        assert not pausing.is_alive()
        assert not release.is_set()
        release.set()
        assert len(running.result(timeout=120).samples) == 1


def test_other_weights_of_the_same_version_wait_for_running_requests(model):
    engine, other = engine_of(model), tiny_model(seed=9)
    with held(engine) as (running, release):
        with pytest.raises(VersionInUse, match="expected the digest one, found two"):
            engine.swap(other, 1, "two")
        engine.swap(model, 1, "one")
        release.set()
        assert running.result(timeout=120).parameters_digest == "one"
        engine.swap(other, 1, "two")
        assert result_of(engine, request_of()).parameters_digest == "two"


@pytest.mark.bits
def test_a_listener_hears_of_slots_and_may_refuse_its_request(model):
    told: list[int] = []

    def refuse(policy: Policy) -> None:
        raise ValueError(policy.parameters_digest)

    with closing(engine_of(model)) as engine:
        tell = lambda policy: told.append(policy.weight_version)
        scored = engine.submit(request_of(score_prompt=True, max_tokens=0), None, tell)
        assert scored.result(timeout=120)
        assert told == [1]
        assert engine.submit(request_of(n=20), None, tell).result(timeout=120)
        assert len(told) >= 4  # eight slots for twenty samples
        tokens = engine.stats.tokens
        for request in (request_of(), request_of(n=20), request_of(score_prompt=True)):
            with pytest.raises(InferenceError) as caught:
                engine.submit(request, None, refuse).result(timeout=120)
            assert str(caught.value.__cause__) == "one"
        assert (engine.stats.tokens, engine.active, engine.queued) == (tokens, 0, 0)
        expected = bits(engine.submit(request_of()).result(timeout=120))
        assert expected == bits(result_of(engine, request_of()))


class Between(Future[GenerationResult]):
    """A future that ends well, while another thread cancels one in the middle of its callback."""

    def __init__(self, victim: Future[GenerationResult]) -> None:
        super().__init__()
        self._victim = victim

    def cancelled(self) -> bool:
        self._victim.cancel()
        return False


@pytest.mark.slow
@pytest.mark.usefixtures("itself_compiled_quickly")
def test_a_cancellation_at_the_end_of_another_request_takes_effect(model):
    with closing(engine_of(model, chunk_steps=1)) as engine:
        victim = paused_amid(engine, request_of(max_tokens=80))
        engine._pending.note_cancelled(Between(victim))
        engine.resume()
        wait([victim], timeout=60)
        assert result_of(engine, request_of(max_tokens=2))
        assert engine.stats.cancelled == 1
        assert engine.active == 0
        assert engine.stats.tokens < 80


def test_a_client_that_leaves_while_the_engine_is_paused_is_released(model):
    with closing(engine_of(model)) as engine:
        running = paused_amid(engine, request_of(max_tokens=80))
        waiting = [engine.submit(request_of()) for _ in range(3)]
        assert (engine.queued, engine.active) == (3, 1)
        for future in [running, *waiting]:
            assert future.cancel()
        wait_until(lambda: (engine.queued, engine.active) == (0, 0))
        assert engine.paused
        assert engine.stats.cancelled == 4


def test_an_engine_that_dies_fails_every_waiting_request(model, monkeypatch):
    """A request that has left the queue and its slot is known to its caller alone."""
    monkeypatch.setattr(threading, "excepthook", lambda died: None)
    engine = engine_of(model)

    def die(delta: Delta) -> None:
        raise SystemExit

    with together(engine):
        futures = [
            engine.submit(request_of(max_tokens=1), die),
            engine.submit(request_of(max_tokens=1)),
            engine.submit(request_of(n=3, max_tokens=40)),
            engine.submit(request_of(n=20, max_tokens=40)),
        ]
    for future in futures:
        with pytest.raises(InferenceError, match="closed"):
            future.result(timeout=60)
    assert not engine.alive
    engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("itself_compiled_quickly")
def test_scores_of_a_prompt_are_those_of_the_reported_weights(model):
    other, told = tiny_model(seed=9), list[Delta]()

    def swap_once(delta: Delta) -> None:
        told.append(delta)
        if len(told) == 1:
            engine.swap(other, 2, "two")
        if len(told) == 6:
            engine.swap(model, 3, "three")

    def scored() -> np.ndarray:
        scores = result_of(engine, request_of(20, score_prompt=True, max_tokens=0)).prompt_scores
        assert scores is not None
        return scores.logprobs

    with closing(engine_of(model, slots=1)) as engine:
        old = scored()
        request = request_of(20, n=2, score_prompt=True, max_tokens=16)
        result = engine.submit(request, swap_once).result(timeout=120)
        firsts = [delta for delta in told if delta.prompt_scores is not None]
        assert [(delta.index, delta.weight_version) for delta in firsts] == [(0, 1), (1, 2)]
        assert result.weight_version == 3
        engine.swap(other, 4, "two")
        new = scored()
        assert np.abs(new - old)[1:].max() > 0.01
        for scores, expected in ((firsts[0], old), (firsts[1], new), (result, old)):
            assert scores.prompt_scores is not None
            np.testing.assert_array_equal(scores.prompt_scores.logprobs, expected)


def test_a_paused_engine_closes(model):
    engine = engine_of(model)
    engine.pause()
    future = engine.submit(request_of())
    engine.close()
    with pytest.raises(InferenceError, match="closed"):
        future.result(timeout=10)


def test_a_snapshot_stands_still(engine):
    before = engine.stats.snapshot()
    result_of(engine, request_of(20, n=2, max_tokens=6))
    after = engine.stats.snapshot()
    assert after.requests == before.requests + 1
    assert after.prompt_tokens == before.prompt_tokens + 20
    assert after.tokens == before.tokens + 12
    assert after.busy_slot_steps == before.busy_slot_steps + 12
    # two chunks of at most four steps, over eight slots
    assert after.slot_steps == before.slot_steps + 6 * 8

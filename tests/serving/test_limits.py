"""Rates, sizes and deadlines: the arithmetic by hand, then a real server that refuses."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers import CHAT, asks_well, chat_body, serving, talk, wait_until

from marin_rl.config import ServerConfig
from marin_rl.inference.generation import GenerationRequest
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.limits import (
    Rates,
    TokenBucket,
    check_samples,
)
from marin_rl.types import Sampling


class Clock:
    """Clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, 3, clock=clock)
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5]
    clock.now += 0.25
    assert bucket.take() == pytest.approx(0.25)
    clock.now += 0.25
    assert bucket.take() == 0
    clock.now += 60
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5]


@pytest.mark.slow
@given(
    rate=st.floats(0.01, 1e4),
    burst=st.integers(1, 50),
    pauses=st.lists(st.floats(0, 3), max_size=60),
)
def test_a_caller_that_waits_as_asked_is_let_in_and_no_rate_is_exceeded(
    rate: float, burst: int, pauses: list[float]
) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock=clock)
    for let_in, pause in enumerate(pauses, start=1):
        clock.now += pause
        wait_s = bucket.take()
        if wait_s:
            clock.now += wait_s
            assert bucket.take() == 0
        assert let_in <= burst + (clock.now - 100.0) * rate + 1e-3


def test_the_admin_has_no_rate_limit_and_each_token_has_its_own() -> None:
    rates = Rates(ServerConfig(requests_per_second=0.5, requests_burst=1), clock=Clock())
    for caller in ("api", "local", *["admin"] * 100):
        rates.check(caller)
    with pytest.raises(ApiError) as refused:
        rates.check("api")
    assert refused.value.status == 429
    assert refused.value.headers == {"Retry-After": "2", "Retry-After-Ms": "2000"}


def test_a_burst_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="requests_burst: expected with requests_per_second only"):
        ServerConfig(requests_burst=3)


def test_no_rate_means_no_limit() -> None:
    rates = Rates(ServerConfig())
    for _ in range(10_000):
        rates.check("api")


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({"n": 4, "prompts": 8, "queued": 0}, 0, None),
        ({"n": 5, "prompts": 1, "queued": 0}, 400, "n"),
        ({"n": 1, "prompts": 13, "queued": 0}, 400, "prompt"),
        ({"n": 4, "prompts": 2, "queued": 33}, 503, None),
        ({"n": 4, "prompts": 2, "queued": 32}, 0, None),
        # what never fits is nothing to try again
        ({"n": 4, "prompts": 11, "queued": 0}, 400, "n"),
        ({"n": 4, "prompts": 10, "queued": 1}, 503, None),
    ],
)
def test_samples_are_counted(asked: dict[str, int], status: int, param: str | None) -> None:
    config = ServerConfig(samples_max=4, prompts_max=12, samples_queued_max=40)
    if not status:
        check_samples(config, **asked)
        return
    with pytest.raises(ApiError) as refused:
        check_samples(config, **asked)
    assert (refused.value.status, refused.value.body["error"]["param"]) == (status, param)
    assert ("Retry-After" in refused.value.headers) == (status == 503)


def test_too_many_requests_are_a_429_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("marin_rl.serving.http.guard.Rates", partial(Rates, clock=clock))
    with serving(ServerConfig(requests_per_second=2.0, requests_burst=3)) as server:
        answers = [talk(server, "GET", "/v1/models") for _ in range(5)]
        assert [status for status, _, _ in answers] == [200] * 3 + [429] * 2
        status, headers, body = answers[-1]
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        wait_s = int(headers["retry-after-ms"]) / 1000
        assert wait_s == 0.5
        assert int(headers["retry-after"]) == 1
        assert all(talk(server, "GET", "/healthz")[0] == 200 for _ in range(20))
        clock.now += wait_s
        assert talk(server, "GET", "/v1/models")[0] == 200


def test_a_full_queue_is_a_503_that_says_when_to_come_again() -> None:
    with serving(ServerConfig(samples_queued_max=16)) as server:
        status, headers, answer = talk(server, "POST", CHAT, chat_body(n=17))
        assert (status, answer["error"]["code"]) == (400, "limit_exceeded")
        assert "retry-after" not in headers
        server.engine.pause()
        waiting = server.engine.submit(
            GenerationRequest(
                prompt_ids=np.array([4], np.int32), n=9, sampling=Sampling(max_tokens=1)
            )
        )
        status, headers, answer = talk(server, "POST", CHAT, chat_body(n=8))
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
        waiting.cancel()
        server.engine.resume()
        assert asks_well(server)


@pytest.mark.slow
def test_a_request_without_a_slot_in_time_is_a_503_and_leaves_nothing_behind() -> None:
    with serving(ServerConfig(queue_timeout_s=3.0)) as server:
        server.engine.pause()
        try:
            status, headers, answer = talk(server, "POST", CHAT, chat_body(n=3))
        finally:
            server.engine.resume()
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        assert int(headers["retry-after"]) >= 1
        assert asks_well(server)
        assert (server.engine.queued, server.engine.active) == (0, 0)


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_a_504_and_frees_its_slots() -> None:
    with serving(ServerConfig(request_timeout_s=3.0, samples_max=50_000)) as server:
        assert talk(server, "POST", CHAT, chat_body(max_tokens=1))[0] in (200, 504)  # may compile
        status, _, answer = talk(server, "POST", CHAT, chat_body(n=50_000, max_tokens=80))
        assert (status, answer["error"]["code"]) == (504, "request_timeout")
        wait_until(lambda: not (server.engine.queued or server.engine.active))
        assert talk(server, "POST", CHAT, chat_body(max_tokens=1))[0] == 200

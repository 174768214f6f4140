"""Preparation of requests: short ones on the event loop, all that may take long on a thread."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from marin_rl.serving.api.worker_threads import SHORT_BYTES, SHORT_S, ResponseQueue, TokenizeWorker

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "reverse abc"}], "n": 4}


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def where(preparer: TokenizeWorker, body: Any) -> threading.Thread:
    """The thread on which a body is prepared."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found: list[threading.Thread] = []
    done = threading.Event()

    def work() -> None:
        found.append(threading.current_thread())
        done.set()

    preparer.add(data, work)
    assert done.wait(10)
    return found[0]


def used(worker: ThreadPoolExecutor, **options: Any) -> TokenizeWorker:
    """One that has seen that requests take no time."""
    preparer = TokenizeWorker(worker, **options)
    for _ in range(40):
        where(preparer, CHAT)
    return preparer


def test_the_first_are_the_threads_and_short_ones_then_are_not(worker: ThreadPoolExecutor) -> None:
    here = threading.current_thread()
    assert where(TokenizeWorker(worker), CHAT) is not here
    assert where(used(worker), CHAT) is here
    assert where(used(worker, alone=True), CHAT) is not here


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"tools": []},
        CHAT | {"response_format": {"type": "json_object"}},
        b'{"t\\u006fols": []}',
        CHAT | {"user": "x" * SHORT_BYTES},
        {"prompt": ["a"] * 200},
        {"prompt": [[5]] * 200},
    ],
    ids=["tools", "form", "hidden", "large", "prompts", "lists"],
)
def test_long_bodies_go_to_the_thread(worker: ThreadPoolExecutor, body: Any) -> None:
    preparer = used(worker)
    assert where(preparer, body) is not threading.current_thread()
    assert where(preparer, CHAT) is threading.current_thread()


def spin(seconds: float) -> Callable[[], None]:
    def work() -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    return work


def test_slow_bodies_go_to_the_thread_until_they_are_fast_again(
    worker: ThreadPoolExecutor,
) -> None:
    preparer, here = used(worker), threading.current_thread()
    data = json.dumps(CHAT).encode()
    preparer.add(data, spin(10 * SHORT_S))
    assert where(preparer, CHAT) is not here
    assert any(where(preparer, CHAT) is here for _ in range(40))


def test_results_and_errors_reach_the_caller(worker: ThreadPoolExecutor) -> None:
    async def made(preparer: TokenizeWorker) -> int:
        with pytest.raises(KeyError):
            await preparer.run(b"{}", lambda: {}["absent"])
        return await preparer.run(b"{}", lambda: 7)

    for preparer in (TokenizeWorker(worker), used(worker)):
        assert asyncio.run(made(preparer)) == 7


def test_nothing_is_read_that_comes_after_the_end() -> None:
    """Two threads may each find that they finished a request."""

    async def read() -> list[bytes | None]:
        reply = ResponseQueue()
        for _ in range(2):
            reply.add(b"all", last=True)
        reply.fail(ValueError("late"))
        return [await reply.read(), await reply.read()]

    assert asyncio.run(read()) == [b"all", None]

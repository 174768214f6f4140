"""A client of endpoints that come, go, break and lie, against fake servers on loopback."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakes import END, FakePolicyServer, logprob_of
from support.servers import wait_until

from marin_rl.errors import EndpointUnavailable, FleetEmpty, StalePolicy
from marin_rl.inference.client import fleet_watch
from marin_rl.inference.client.answers import Completion
from marin_rl.inference.client.fleet import FleetOptions, Member
from marin_rl.inference.client.fleet_sources import Endpoint, EndpointSource
from marin_rl.inference.client.fleet_watch import EndpointAccess
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.proofs import PolicyProof, compare
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.types import Canary, Message, Sampling

MODEL = served_model_id("policy", 3, "0123456789abcdef")
MESSAGES = (Message(role="user", content="repeat abc"),)
SAMPLING = Sampling(max_tokens=8, seed=1)
CANARY = Canary(temperature=1.0, token_ids=(97,), logprobs=(logprob_of(97, 0),), tolerance=1e-3)

Use = Callable[[PolicyClient], Awaitable[Any]]


def ask(
    source: EndpointSource,
    use: Use,
    *,
    fleet_timeout_s: float = 30.0,
    canary: Canary | None = None,
    **options: Any,
) -> Any:
    async def run() -> Any:
        fleet = FleetOptions(probe_s=0.02, timeout_s=fleet_timeout_s)
        proof: dict[str, Any] = {"proof": PolicyProof(canary=canary)}
        async with PolicyClient(
            source=source, fleet=fleet, model=MODEL, **(proof | options)
        ) as client:
            return await use(client)

    return asyncio.run(run())


def says_a(_text: str, _seed: int) -> str:
    """Answer that begins with the canary's token."""
    return "a"


async def one(client: PolicyClient) -> np.ndarray:
    return (await client.chat(MESSAGES, 1, SAMPLING)).completions[0].token_ids


@pytest.mark.parametrize("first_breaks", ["after it has left the fleet", "at once"])
def test_an_endpoint_that_ends_and_one_that_begins_cost_nothing(tmp_path, first_breaks):
    """One answers as many requests as it is let, and breaks off all further ones as it ends."""
    listed, answered = tmp_path / "fleet.txt", 10
    numbers, busy, ended = itertools.count(), threading.Event(), threading.Event()

    def fault(_body: object) -> str | None:
        if next(numbers) < answered:
            return None
        busy.set()
        ended.wait()
        return "drop"

    async def use(client: PolicyClient) -> int:
        first.fault = fault
        calls = [asyncio.create_task(one(client)) for _ in range(30)]
        await asyncio.to_thread(busy.wait)
        await asyncio.to_thread(first.__exit__, None, None, None)
        listed.write_text(f"{second.url}\n")
        if first_breaks != "at once":
            await asyncio.to_thread(wait_until, lambda: second.looks > 0)
        ended.set()
        answers = await asyncio.gather(*calls)
        assert all(ids.tolist()[-1] == END for ids in answers)
        return len(second.requests)

    first, second = FakePolicyServer(MODEL), FakePolicyServer(MODEL)
    with second:
        first.__enter__()
        listed.write_text(f"{first.url}\n")
        asked = ask(EndpointSource([f"file:{listed}"]), use, in_flight_max=4, attempts_max=1)
    assert asked == 30 - answered


def test_waiting_requests_go_to_an_endpoint_that_comes_later(tmp_path: Path) -> None:
    listed = tmp_path / "fleet.txt"
    listed.write_text("")

    async def use(client: PolicyClient) -> None:
        call = asyncio.create_task(one(client))
        await asyncio.sleep(0.1)
        assert not call.done()
        listed.write_text(f"{server.url}\n")
        await call

    with FakePolicyServer(MODEL) as server:
        ask(EndpointSource([f"file:{listed}"]), use)


def test_an_empty_fleet_is_one_error_that_says_why() -> None:
    class Some(EndpointSource):
        def resolve(self) -> list[Endpoint]:
            refused = Endpoint(url="http://x/v1", refused="other code: expected digest 1, found 2")
            return [refused, Endpoint(url="http://127.0.0.1:9/v1"), Endpoint(url=stale.url)]

    with FakePolicyServer(served_model_id("policy", 2, "f" * 16)) as stale:
        with pytest.raises(FleetEmpty) as caught:
            ask(Some(["registered"]), one, fleet_timeout_s=0.4)
        assert not stale.requests
    told = str(caught.value)
    assert "no endpoint served policy@00003-01234567 for 0.4 s (inference.fleet_timeout_s)" in told
    assert "other code: expected digest 1, found 2" in told
    assert "http://127.0.0.1:9/v1: lost" in told
    assert "serves policy@00002-ffffffff" in told
    assert "--register" in told
    assert not caught.value.transient


@pytest.mark.parametrize("lie", ["tokens", "logprobs"])
def test_an_endpoint_that_joins_answers_the_canary_first(lie: str) -> None:
    async def use(client: PolicyClient) -> None:
        await asyncio.gather(*[one(client) for _ in range(8)])
        await asyncio.to_thread(wait_until, lambda: bool(liar.requests))

    def other(_text: str, _seed: int) -> str:
        return "b"

    canary = CANARY
    if lie == "logprobs":
        canary = Canary(temperature=1.0, token_ids=(97,), logprobs=(-9.0,), tolerance=1e-3)
    script = other if lie == "tokens" else says_a
    with FakePolicyServer(MODEL, says_a) as proven, FakePolicyServer(MODEL, script) as liar:
        source = EndpointSource([proven.url, liar.url])
        ask(source, use, endpoints=(proven.url,), canary=canary)
        assert len(proven.requests) == 8, "it was proven by the trainer"
        assert {body["max_tokens"] for body in liar.requests} == {1}, "the canary alone"


def sampled(ids: Sequence[int], *logprobs: float) -> Completion:
    numbers = np.asarray(logprobs, np.float32)
    return Completion(
        text="", token_ids=np.asarray(ids, np.int32), logprobs=numbers, finish_reason="length"
    )


# Two samples of the canary, with the trainer's log-probabilities.
SAMPLES = [((5, 6, 7, 8), (-1.0, -1.0, -1.0, -1.0)), ((5, 9), (-1.0, -2.0))]


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        # One token far off is rounding, as long as the mean, of 6 tokens and 4 more, is not.
        (sampled((5, 6, 7, 8), -1, -1, -1.9, -1), sampled((5, 9), -1, -2), None),
        (sampled((5, 6, 7, 8), -1, -1, -2.1, -1), sampled((5, 9), -1, -2), "0.110000 nats apart"),
        (sampled((5, 6, 7, 8), *[-1.2] * 4), sampled((5, 9), -1.2, -2.2), "0.120000 nats apart"),
        # Rounding may draw another token: nothing after it is compared.
        (sampled((5, 6, 1, 1), -1, -1, -7, -7), sampled((5, 9), -1, -2), None),
        (sampled((5, 6, 1), -1, -1, -1), sampled((1, 9), -1, -2), "samples other tokens"),
        (sampled((5, 6, 7, 8), -1, -1, float("nan"), -1), sampled((5, 9), -1, -2), "nan nats"),
    ],
)
def test_an_answer_to_the_canary_is_compared_by_its_mean(first, second, error) -> None:
    if error is None:
        compare([first, second], SAMPLES, 0.1)
        return
    with pytest.raises(StalePolicy, match=error):
        compare([first, second], SAMPLES, 0.1)


def test_an_honest_endpoint_joins(tmp_path: Path) -> None:
    async def use(client: PolicyClient) -> None:
        await client.wait_until_ready()
        await asyncio.gather(*[one(client) for _ in range(8)])

    with FakePolicyServer(MODEL, says_a) as proven, FakePolicyServer(MODEL, says_a) as new:
        ask(EndpointSource([proven.url, new.url]), use, endpoints=(proven.url,), canary=CANARY)
        assert (len(proven.requests), len(new.requests)) == (4, 1 + 4)


def test_first_requests_are_spread_over_all_that_were_proven(monkeypatch):
    """The second joins once the first has."""
    monkeypatch.setattr(fleet_watch, "SPREAD_S", 60.0)

    joined = threading.Event()

    class JoinsInTurn(PolicyProof):
        async def admit(self, endpoint: EndpointAccess, *, first: bool) -> None:
            if endpoint.url == second.url:
                await asyncio.to_thread(joined.wait)

        async def check_ready(self, endpoint: EndpointAccess) -> None:
            joined.set()  # the first is looked at again, and is ready

    async def use(client: PolicyClient) -> None:
        await asyncio.gather(*[one(client) for _ in range(8)])

    with FakePolicyServer(MODEL) as first, FakePolicyServer(MODEL) as second:
        both = (first.url, second.url)
        ask(EndpointSource(both), use, endpoints=both, proof=JoinsInTurn())
        assert (len(first.requests), len(second.requests)) == (4, 4)


def test_first_requests_wait_for_no_endpoint_that_is_not_there(monkeypatch):
    monkeypatch.setattr(fleet_watch, "SPREAD_S", 0.05)
    with FakePolicyServer(MODEL) as server:
        proven = (server.url, "http://127.0.0.1:9/v1", "http://not-in-the-source/v1")
        ask(EndpointSource([server.url, proven[1]]), one, endpoints=proven)
        assert len(server.requests) == 1


def test_requests_of_a_session_go_to_one_endpoint() -> None:
    async def use(client: PolicyClient) -> None:
        await client.wait_until_ready()
        for _ in range(4):
            await asyncio.gather(
                *[client.chat(MESSAGES, 1, SAMPLING, session=f"group-{g}") for g in range(4)]
            )

    with FakePolicyServer(MODEL) as first, FakePolicyServer(MODEL) as second:
        ask(EndpointSource([first.url, second.url]), use)
        assert (len(first.requests), len(second.requests)) == (8, 8)


def test_an_endpoint_that_goes_on_to_other_weights_gets_no_more() -> None:
    async def use(client: PolicyClient) -> None:
        await client.wait_until_ready()
        first.model = served_model_id("policy", 4, "f" * 16)
        for _ in range(4):
            await one(client)

    with FakePolicyServer(MODEL) as first, FakePolicyServer(MODEL) as second:
        ask(EndpointSource([first.url, second.url]), use)
        assert len(second.requests) == 4
        assert len(first.requests) <= 2


def test_the_canary_of_a_slow_endpoint_has_the_time_of_a_request(monkeypatch):
    monkeypatch.setattr(fleet_watch, "PROBE_TIMEOUT_S", 0.05)
    with FakePolicyServer(MODEL, says_a, delay_s=0.3) as slow:
        assert ask(EndpointSource([slow.url]), one, canary=CANARY).tolist() == [97, END]
    with FakePolicyServer(MODEL, says_a, delay_s=0.3) as slow, pytest.raises(FleetEmpty) as caught:
        ask(EndpointSource([slow.url]), one, canary=CANARY, timeout_s=0.05, fleet_timeout_s=1.0)
    assert "no answer in 0.05 s" in str(caught.value)


def test_an_endpoint_is_lost_after_several_looks_without_an_answer(monkeypatch, caplog):
    monkeypatch.setattr(fleet_watch, "PROBE_TIMEOUT_S", 0.05)

    async def use(client: PolicyClient) -> None:
        await client.wait_until_ready()
        await asyncio.to_thread(wait_until, lambda: "is lost" in caplog.text)

    with FakePolicyServer(MODEL) as busy, caplog.at_level(logging.WARNING):
        busy.metrics_delay_s = 0.3
        ask(EndpointSource([busy.url]), use)
        # The server may read a look after the client has given it up.
        wait_until(lambda: busy.looks >= fleet_watch.MISSES_MAX)
    assert "no answer in 0.05 s" in caplog.text


def test_an_endpoint_that_comes_back_may_leave_as_many_looks_unanswered_as_before() -> None:
    client = PolicyClient(source=EndpointSource(["http://127.0.0.1:9/v1"]), model=MODEL)
    member = Member(endpoint=Endpoint(url="http://127.0.0.1:9/v1"), missed=fleet_watch.MISSES_MAX)
    client._watch._joined(member)
    assert (member.state, member.missed) == ("ready", 0)


def test_a_client_is_closed_at_the_moment_at_which_it_wakes_to_look() -> None:
    """The watcher's wait ends, and is cancelled before the watcher knows that it ended."""

    async def run() -> None:
        with FakePolicyServer(MODEL) as server:
            source, slowly = EndpointSource([server.url]), FleetOptions(probe_s=60.0)
            client = PolicyClient(source=source, model=MODEL, fleet=slowly)
            async with client:
                await client.wait_until_ready()
                await asyncio.gather(*client._watch._looks.values())
                client._watch._hurry.set()
                watcher = client._watch._watcher
            assert watcher is not None
            assert watcher.cancelled()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_faults_of_an_endpoint_that_lives_are_counted() -> None:
    with FakePolicyServer(MODEL) as server:
        server.fault = lambda _: "500"
        with pytest.raises(EndpointUnavailable, match="500"):
            ask(EndpointSource([server.url]), one, attempts_max=2)
        assert len(server.requests) == 2


def test_queues_of_other_clients_are_heeded() -> None:
    async def use(client: PolicyClient) -> None:
        await client.wait_until_ready()
        for _ in range(6):
            await one(client)

    with FakePolicyServer(MODEL) as busy, FakePolicyServer(MODEL) as idle:
        busy.metrics = "marin_rl_samples_queued 40.0\nmarin_rl_slots_busy 8.0\nmarin_rl_slots 8.0\n"
        idle.metrics = "marin_rl_samples_queued 0.0\nmarin_rl_slots_busy 0.0\nmarin_rl_slots 8.0\n"
        ask(EndpointSource([busy.url, idle.url]), use)
        assert (len(busy.requests), len(idle.requests)) == (0, 6)

"""The client against a fake server that is written independently of our protocol module."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import numpy as np
import orjson
import pytest
from support.cases import others_slow
from support.fakes import END, FakePolicyServer, echo_script, logprob_of, prompt_ids

from marin_rl.errors import (
    BadResponse,
    EndpointUnavailable,
    OutOfMemory,
    RequestRejected,
    StalePolicy,
)
from marin_rl.inference.client.answers import decode_answer
from marin_rl.inference.client.http_client import HttpClient
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import ChatRequest, parse_served_model_id, served_model_id
from marin_rl.inference.client.publishing import Publisher
from marin_rl.types import Message, Sampling

MODEL = served_model_id("policy", 3, "0123456789abcdef")
MESSAGES = (Message(role="user", content="repeat abc"),)


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    with FakePolicyServer(MODEL) as fake:
        yield fake


def ask(
    endpoints: list[str],
    use: Callable[[PolicyClient], Awaitable[Any]] | None = None,
    **options: Any,
) -> Any:
    async def run() -> Any:
        async with PolicyClient(endpoints=endpoints, model=MODEL, **options) as client:
            if use is not None:
                return await use(client)
            return await client.chat(MESSAGES, 4, Sampling(max_tokens=8, seed=1))

    return asyncio.run(run())


@pytest.mark.parametrize("style", ["compact", "content"])
def test_a_group_arrives_exactly_as_it_was_sampled(server: FakePolicyServer, style: str) -> None:
    server.compact = style == "compact"
    answer = ask([server.url])
    prompt = prompt_ids([{"role": "user", "content": "repeat abc"}])
    assert answer.prompt_token_ids.tolist() == prompt
    texts = [echo_script("repeat abc", 1 + i) for i in range(4)]
    assert [c.text for c in answer.completions] == [t[:8] for t in texts]
    for completion in answer.completions:
        ids = completion.token_ids.tolist()
        assert completion.finish_reason == ("stop" if ids[-1] == END else "length")
        exact = np.array([logprob_of(t, i) for i, t in enumerate(ids)], np.float32)
        assert completion.logprobs.dtype == np.float32
        assert completion.logprobs.tobytes() == exact.tobytes()


def test_the_requests_of_a_shard(server: FakePolicyServer) -> None:
    filters: dict[str, Any] = {"top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
    sampling = Sampling(temperature=0.5, max_tokens=5, stop=("\n",), seed=11, **filters)
    ask([server.url], lambda client: client.chat(MESSAGES, 2, sampling))
    assert server.requests == [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "repeat abc"}],
            "n": 2,
            "max_tokens": 5,
            "temperature": 0.5,
            **filters,
            "stop": ["\n"],
            "seed": 11,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "compact_logprobs": True,
        }
    ]


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop"])
def test_faults_that_pass_are_tried_again(server: FakePolicyServer, fault: str) -> None:
    server.faults.extend([fault])
    assert len(ask([server.url]).completions) == 4
    assert len(server.requests) == 2


def in_seconds(seconds: float) -> str:
    """An HTTP date; whole seconds is all it can say."""
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("fault", others_slow(["429", "503"], "429"))
@pytest.mark.parametrize(
    "asked", others_slow([lambda: "0.9", lambda: "1", lambda: in_seconds(2)], first=1)
)
def test_an_endpoint_that_asks_to_be_left_alone_is(server, fault, asked):
    server.faults.extend([fault])
    server.error_headers = {"Retry-After": asked()}
    began = time.monotonic()
    assert len(ask([server.url]).completions) == 4
    assert 0.9 <= time.monotonic() - began < 30
    assert len(server.requests) == 2


def test_meanwhile_another_endpoint_is_asked(server: FakePolicyServer) -> None:
    server.fault = lambda _: "429"
    server.error_headers = {"Retry-After": "60"}

    async def use(client: PolicyClient) -> None:
        for _ in range(5):
            await client.chat(MESSAGES, 1, Sampling(max_tokens=4, seed=1))

    began = time.monotonic()
    with FakePolicyServer(MODEL) as other:
        ask([server.url, other.url], use)
        assert (len(server.requests), len(other.requests)) == (1, 5)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("absurd", ["-1", "soon", "", "nan", "1e400", "Sat, 99 Nov 2026"])
def test_a_header_that_says_nothing_is_as_none(server: FakePolicyServer, absurd: str) -> None:
    server.faults.extend(["429"])
    server.error_headers = {"Retry-After": absurd}
    began = time.monotonic()
    ask([server.url])
    assert time.monotonic() - began < 30


def test_no_endpoint_keeps_a_client_longer_than_an_answer_may_take(server):
    server.faults.extend(["503"])
    server.error_headers = {"Retry-After": "99999999999999999999"}
    began = time.monotonic()
    ask([server.url], timeout_s=1.0)
    assert 0.9 <= time.monotonic() - began < 30


async def update(client: PolicyClient) -> None:
    weights = Publisher(
        kind="update_weights_from_disk", folder="/shared/round-00003", version=3, digest="ab" * 32
    )
    await asyncio.gather(*(client.publish(weights, url) for url in client._watch.fleet.members))


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({"api_key": "call", "admin_key": "manage"}, "Bearer manage"),
        ({"api_key": "call"}, "Bearer call"),
    ],
)
def test_new_weights_are_asked_for_with_the_admin_key_where_there_is_one(server, keys, sent):
    body = {
        "model_path": "/shared/round-00003",
        "weight_version": "3",
        "parameters_digest": "ab" * 32,
    }
    with FakePolicyServer(MODEL) as other:
        ask([server.url, other.url], update, **keys)
        assert server.updates == other.updates == [(sent, body)]

    async def chat(client: PolicyClient) -> None:
        await update(client)
        await client.chat(MESSAGES, 1, Sampling(max_tokens=4, seed=1))

    server.api_key = "call"  # what is no update goes on with the plain key
    ask([server.url], chat, **keys)


def test_an_update_is_retried_and_the_admin_key_is_never_shown(server: FakePolicyServer) -> None:
    server.faults.extend(["503", "drop", "conflict"])
    server.error_code = "busy"  # with another update
    ask([server.url], update, admin_key="manage")
    assert len(server.updates) == 1
    server.fault = lambda _: "unauthorized"
    with pytest.raises(RequestRejected, match="admin_key_variable") as caught:
        ask([server.url], update, admin_key="fault", api_key="scripted")
    assert "***" in str(caught.value)


@pytest.mark.parametrize("code", ["digest_mismatch", "canary_mismatch"])
def test_an_endpoint_with_other_weights_gets_no_further_request(server, code):
    server.faults.extend(["conflict"])
    server.error_code = code
    with pytest.raises(StalePolicy, match="scripted fault conflict"):
        ask([server.url], update)
    assert len(server.requests) == 1


def test_a_request_that_does_not_fit_into_memory_is_not_retried(server: FakePolicyServer) -> None:
    server.faults.extend(["503"])  # which is retried otherwise
    server.error_code = "out_of_memory"
    with pytest.raises(OutOfMemory, match="scripted fault 503") as caught:
        ask([server.url])
    assert not caught.value.transient
    assert len(server.requests) == 1


def test_attempts_are_bounded(server: FakePolicyServer) -> None:
    server.fault = lambda _: "503"
    with pytest.raises(EndpointUnavailable, match="scripted fault 503"):
        ask([server.url], attempts_max=2)
    assert len(server.requests) == 2


def test_a_slow_endpoint_is_unavailable(server: FakePolicyServer) -> None:
    server.fault = lambda _: "slow"
    with pytest.raises(EndpointUnavailable, match=r"no answer in 0\.3 s"):
        ask([server.url], attempts_max=1, timeout_s=0.3)


def test_no_listener_is_no_error() -> None:
    with pytest.raises(EndpointUnavailable, match=r"127\.0\.0\.1:9"):
        ask(["http://127.0.0.1:9/v1"], attempts_max=1)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("reject", RequestRejected, "scripted fault"),
        ("route", RequestRejected, "end in /v1"),
        ("unauthorized", RequestRejected, "api_key_variable"),
        ("wrong-model", StalePolicy, "someone-else"),
        ("missing-ids", BadResponse, "return_token_ids"),
        ("missing-logprobs", BadResponse, "gave no logprobs"),
        ("missing-prompt", BadResponse, "prompt_token_ids"),
        ("short-logprobs", BadResponse, "one logprob per token"),
        ("positive", BadResponse, "at most 0"),
        ("nan", BadResponse, "JSON"),
        ("negative-ids", BadResponse, "from 0"),
        ("fewer", BadResponse, "expected 4 completions"),
        ("not-json", BadResponse, "not JSON"),
    ],
)
def test_faults_that_stay_are_not_tried_again(server, fault, error, words):
    server.compact = fault != "missing-logprobs"
    server.faults.extend([fault])
    with pytest.raises(error, match=words):
        ask([server.url])
    assert len(server.requests) == 1


def test_another_weight_version_is_stale(server: FakePolicyServer) -> None:
    server.model = served_model_id("policy", 2, "fedcba9876543210")
    with pytest.raises(StalePolicy, match="does not exist"):
        ask([server.url])


def test_requests_go_around_the_endpoints_and_past_dead_ones(server: FakePolicyServer) -> None:
    async def use(client: PolicyClient) -> None:
        for _ in range(6):
            await client.chat(MESSAGES, 1, Sampling(max_tokens=4, seed=1))

    with FakePolicyServer(MODEL) as other:
        ask([server.url, other.url, "http://127.0.0.1:9/v1"], use)
        assert (len(server.requests), len(other.requests)) == (3, 3)


def test_requests_in_flight_are_bounded(server: FakePolicyServer) -> None:
    server.delay_s = 0.05

    async def use(client: PolicyClient) -> None:
        sampling = Sampling(max_tokens=4, seed=1)
        await asyncio.gather(*[client.chat(MESSAGES, 1, sampling) for _ in range(12)])

    ask([server.url], use, in_flight_max=3)
    assert server.in_flight_most == 3


def test_the_key_is_sent_but_never_shown(server, monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-this-endpoint")
    server.api_key = "secret-1"
    with caplog.at_level(logging.DEBUG):
        ask([server.url], api_key="secret-1")
        with pytest.raises(RequestRejected) as wrong:
            ask([server.url], api_key="secret-2")
        with pytest.raises(RequestRejected) as none:
            ask([server.url])
    assert "secret" not in str(wrong.value) + caplog.text
    assert "sk-not-for-this-endpoint" not in str(none.value)


def test_models_that_every_endpoint_serves(server: FakePolicyServer) -> None:
    with FakePolicyServer("another") as other:
        assert ask([server.url], PolicyClient.models) == [MODEL]
        assert ask([server.url, other.url], PolicyClient.models) == []


def test_served_model_ids() -> None:
    assert MODEL == "policy@00003-01234567"
    parsed = parse_served_model_id(MODEL)
    assert parsed is not None
    assert (parsed.name, parsed.weight_version, parsed.digest) == ("policy", 3, "01234567")
    far = parse_served_model_id(served_model_id("a@b/c", 123456, "ab" * 32))
    assert far is not None
    assert (far.name, far.weight_version) == ("a@b/c", 123456)
    assert parse_served_model_id("Qwen/Qwen3-0.6B") is None


@pytest.mark.parametrize(
    "change",
    [
        {"choices": []},
        {"choices": "none"},
        {"choices": [3]},
        {"prompt_token_ids": [[1]]},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": ["1"]},
        {"prompt_token_ids": [2**31]},
        {"prompt_token_ids": [2**70]},
        {"prompt_token_ids": [None]},
        {"prompt_token_ids": [[1], [2, 3]]},
        {"prompt_token_ids": 7},
        {"timings": [1]},
        {"timings": {"queue_s": "abc"}},
        {"weight_version": "7"},
        {"weight_version": {"a": 1}},
        {"weight_version": -1},
        {"weight_version": True},
        {"parameters_digest": 7},
    ],
)
def test_absurd_answers_are_refused(change: dict[str, Any]) -> None:
    choice = {"index": 0, "message": {"content": "a"}, "token_ids": [1], "token_logprobs": [-1]}
    good: dict[str, Any] = {"model": "m", "prompt_token_ids": [1], "choices": [choice]}
    assert decode_answer(json.dumps(good).encode()).completions[0].logprobs.tolist() == [-1]
    with pytest.raises(BadResponse, match=r"expected|not JSON"):
        decode_answer(json.dumps(good | change).encode())


def test_the_request_body_is_plain_json() -> None:
    request = ChatRequest(model="m", messages=MESSAGES, n=1, sampling=Sampling(seed=None))
    body = orjson.loads(orjson.dumps(request.body()))
    assert "seed" not in body
    assert "stop" not in body
    assert not {"top_k", "min_p", "repetition_penalty"} & body.keys()


def test_a_server_that_ignores_a_seed_per_prompt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM answers, which knows neither `seeds` nor `compact_logprobs` and ignores them."""
    choice = {
        "index": 0,
        "text": "b",
        "token_ids": [98, END],
        "prompt_token_ids": [97],
        "logprobs": None,
        "finish_reason": "stop",
    }

    async def send(_: HttpClient, *_request: Any, **_options: Any) -> bytes:
        return orjson.dumps({"id": "cmpl-1", "model": MODEL, "choices": [choice]})

    monkeypatch.setattr(HttpClient, "request", send)
    turn = Sampling(max_tokens=2, seed=1)

    async def go_on(client: PolicyClient) -> None:
        await client.chat(MESSAGES, 1, turn, prompt_ids=np.array([97], np.int32))

    with pytest.raises(BadResponse, match=r"turns_per_request is for marin-rl's own server"):
        ask(["http://unused/v1"], go_on, turns_per_request=8)

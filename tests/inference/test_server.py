"""The server over loopback: real HTTP, the real `openai` package, and everything it must refuse."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
from tiny_models import full_logprobs, tiny_model

from marin_rl.config import EngineConfig, InferenceConfig
from marin_rl.errors import ConfigError, InputError, StalePolicy
from marin_rl.inference.bodies import BODY_BYTES_MAX
from marin_rl.inference.client import PolicyClient
from marin_rl.inference.server import PolicyServer
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.model import parameters_digest, save_hf
from marin_rl.types import Message, Sampling

CONTEXT = 96
CONFIG = InferenceConfig(engine=EngineConfig(slots=8, chunk_steps=4, prefill_rows=4))
MESSAGES = [{"role": "user", "content": "abc"}]
DIGEST = "0123456789abcdef"
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


def server_of(model, **options: Any) -> PolicyServer:
    given = {"context_length": CONTEXT, "weight_version": 3, "parameters_digest": DIGEST, **options}
    return PolicyServer(model, character_tokenizer(), CONFIG, **given)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def server(model) -> Iterator[PolicyServer]:
    server = server_of(model)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def asked(server):
    """Send one request; returns status, headers and the JSON of the answer."""

    def ask(method: str, path: str, body: object = None, headers: dict | None = None):
        return talk(server.base_url, method, path, body, headers)

    return ask


def talk(base_url: str, method: str, path: str, body: object = None, headers: dict | None = None):
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, headers or {})
    response = connection.getresponse()
    answer = response.status, dict(response.getheaders()), json.loads(response.read())
    connection.close()
    return answer


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": MESSAGES, "max_tokens": 8, "seed": 1, **fields}


def chat(server: PolicyServer, n: int = 2, **sampling: Any):
    async def ask():
        async with PolicyClient(endpoints=[server.base_url], model=server.model_id) as client:
            return await client.chat(
                [Message(role="user", content="abc")], n, Sampling(**{"seed": 1, **sampling})
            )

    return asyncio.run(ask())


def test_our_client_gets_tokens_and_the_logprobs_of_the_models_own_forward(server, model):
    answer = chat(server, n=4, max_tokens=30, temperature=0.9)
    tokenizer = character_tokenizer()
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert answer.prompt_token_ids.tolist() == expected
    assert answer.model == server.model_id == "policy@00003-01234567"
    assert (answer.weight_version, answer.parameters_digest) == (3, DIGEST)
    assert answer.timings.decode_s > 0
    for completion in answer.completions:
        truth = full_logprobs(model, answer.prompt_token_ids, completion.token_ids, 0.9)
        assert np.abs(completion.logprobs - truth).max() < 1e-4
        ended = completion.finish_reason == "stop"
        assert ended == (completion.token_ids[-1] == tokenizer.eos_token_id)
        shown = completion.token_ids[:-1] if ended else completion.token_ids
        assert completion.text == tokenizer.decode(shown, skip_special_tokens=True)
        assert completion.policy_versions is None


def test_the_openai_package_gets_what_it_knows(server):
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="policy", messages=MESSAGES, n=2, max_tokens=8, seed=1, logprobs=True, user="me"
    )
    ours = chat(server, n=2, max_tokens=8)
    assert answer.model == server.model_id
    assert answer.usage.prompt_tokens == len(ours.prompt_token_ids)
    for choice, completion in zip(answer.choices, ours.completions, strict=True):
        assert choice.message.content == completion.text
        given = np.array([item.logprob for item in choice.logprobs.content], np.float32)
        np.testing.assert_array_equal(given, completion.logprobs)
    listed = [model.id for model in client.models.list()]
    assert listed == [server.model_id, "policy"]
    with pytest.raises(openai.NotFoundError, match="known: policy@00003-01234567, policy"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="unknown field 'logit_bias'"):
        client.chat.completions.create(model="policy", messages=MESSAGES, logit_bias={"1": 1})
    client.close()


def test_plain_completions_take_text_ids_and_batches(asked):
    tokenizer = character_tokenizer()
    ids = [tokenizer.encode("abc"), tokenizer.encode("xy")]
    fields = {"model": "policy", "max_tokens": 5, "n": 2, "seed": 3, "logprobs": 0}
    extra = {"return_token_ids": True}
    _, _, by_text = asked("POST", "/v1/completions", {"prompt": ["abc", "xy"], **fields, **extra})
    _, _, by_ids = asked("POST", "/v1/completions", {"prompt": ids, **fields, **extra})
    assert [choice["index"] for choice in by_text["choices"]] == [0, 1, 2, 3]
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["choices"][3]["prompt_token_ids"] == ids[1]
    assert by_text["usage"]["prompt_tokens"] == 5
    choice = by_text["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    _, _, single = asked("POST", "/v1/completions", {"prompt": ids[0], **fields, **extra})
    assert single["choices"] == by_text["choices"][:2]


def test_tokenize_and_back(asked):
    tokenizer = character_tokenizer()
    _, _, answer = asked("POST", "/tokenize", {"messages": MESSAGES})
    assert answer["tokens"] == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
    _, _, answer = asked("POST", "/tokenize", {"prompt": "abc"})
    assert answer["tokens"] == tokenizer.encode("abc")
    assert asked("POST", "/detokenize", {"tokens": answer["tokens"]})[2] == {"prompt": "abc"}


def test_content_in_parts_is_joined(asked):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert (
        asked("POST", "/tokenize", body)[2] == asked("POST", "/tokenize", {"messages": MESSAGES})[2]
    )


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"n_samples": 4}, "n_samples", "unknown field 'n_samples'"),
        ({"temprature": 1.0}, "temprature", "did you mean 'temperature'?"),
        ({"temperature": True}, "temperature", "found True"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0, found -0.1"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 10**9}, "n", "less than or equal to 4096"),
        ({"n": 2.0}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": 3}, "max_tokens", "either"),
        ({"stop": ["x"] * 500_000}, "stop", "at most 16"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"top_logprobs": 10**9}, "top_logprobs", "less than or equal to 0"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stream": True}, "stream", "does not stream"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "user", "content": "x", "a": 1}]}, "messages.0.a", "unknown field"),
        ({"messages": [{"role": "user", "content": "x" * 95}]}, "messages", "context is 96 tokens"),
        ({"max_tokens": 92}, "messages", "context is 96 tokens"),
    ],
)
def test_what_is_wrong_is_named(asked, fields, param, told):
    status, _, answer = asked("POST", "/v1/chat/completions", chat_body(**fields))
    error = answer["error"]
    assert status == 400
    assert error["param"] == param
    assert told in error["message"]
    assert error["type"] == "invalid_request_error"
    if "context" in told:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"model": "policy", "messages": NaN}', b"[" * 100_000],
)
def test_a_body_that_is_no_object_is_a_400(asked, data):
    for path in POSTS:
        status, _, answer = asked("POST", path, data)
        assert status == 400, answer
        assert "Traceback" not in answer["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(asked, number):
    data = json.dumps(chat_body(temperature=0.5)).replace("0.5", number).encode()
    status, _, answer = asked("POST", "/v1/chat/completions", data)
    assert (status, answer["error"]["param"]) == (400, "temperature")


def test_ids_outside_the_vocabulary_are_refused(asked):
    body = {"model": "policy", "prompt": [5, 103], "max_tokens": 1}
    status, _, answer = asked("POST", "/v1/completions", body)
    assert (status, answer["error"]["message"]) == (400, "expected token ids below 103, found 103")
    assert asked("POST", "/detokenize", {"tokens": [103]})[0] == 400


def test_a_body_too_large_is_refused_before_it_is_read(server):
    connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=30)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", str(BODY_BYTES_MAX + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_stream_of_body_too_large_is_cut_off(server):
    connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=30)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    piece = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    try:
        for _ in range(BODY_BYTES_MAX // 0x100000 + 2):
            connection.send(piece)
    except OSError:
        pass  # the server may close before all is sent
    else:
        assert connection.getresponse().status == 413
    connection.close()


def test_unknown_routes_and_methods_are_told_in_the_same_shape(asked):
    status, _, answer = asked("GET", "/v1/nothing")
    assert (status, answer["error"]["message"]) == (404, "GET /v1/nothing: Not Found")
    assert asked("GET", "/v1/chat/completions")[0] == 405
    assert asked("GET", "/v1/models/policy")[2]["id"] == "policy"
    assert asked("GET", "/v1/models/other")[0] == 404


def test_health(asked):
    assert asked("GET", "/healthz")[0] == 200
    assert asked("GET", "/readyz")[2] == {"status": "ready"}


def test_without_a_token_only_this_machine_is_answered(asked):
    assert asked("GET", "/v1/models", headers={"Host": "evil.example"})[0] == 403
    assert asked("GET", "/v1/models", headers={"Origin": "https://evil.example"})[0] == 403
    assert asked("GET", "/v1/models", headers={"Origin": "http://localhost:3000"})[0] == 200


def test_without_a_token_it_binds_to_loopback_only(server):
    with pytest.raises(ConfigError, match="set a token in the environment variable"):
        server.start("0.0.0.0")


def test_a_port_in_use_is_an_error_that_names_it(server):
    port = urlsplit(server.base_url).port
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        server.start(port=port)


def test_with_a_token_every_route_but_health_asks_for_it(model, monkeypatch):
    monkeypatch.setenv(CONFIG.api_key_variable, "sésame")
    server = server_of(model)
    url = server.start()
    try:
        routes = [
            (m, path) for m in ("GET", "POST", "PUT", "DELETE") for path in every_path(server)
        ]
        assert len(routes) > 30
        for method, path in routes:
            status, headers, _ = talk(url, method, path)
            if path in ("/healthz", "/readyz"):
                assert status in (200, 405)
            else:
                assert status == 401, (method, path)
                assert {k.lower(): v for k, v in headers.items()}["www-authenticate"] == "Bearer"
        for wrong in ("Bearer sesame", "Basic sésame", "Bearer", "sésame", "Bearer sésame x"):
            header = {"Authorization": wrong.encode().decode("latin-1")}
            assert talk(url, "GET", "/v1/models", headers=header)[0] == 401
        right = {"Authorization": "Bearer sésame".encode().decode("latin-1")}
        assert talk(url, "GET", "/v1/models", headers=right)[0] == 200
    finally:
        server.stop()


def every_path(server: PolicyServer) -> list[str]:
    return [*server.routes, "/docs", "/openapi.json", "/redoc", "/", "/metrics"]


def test_a_swap_changes_the_served_id_and_the_old_one_is_stale(model):
    server, other = server_of(model), tiny_model(seed=4)
    server.start()
    try:
        old = server.model_id
        assert server.swap(other, 4, "f" * 64) == server.model_id == "policy@00004-ffffffff"
        answer = chat(server, max_tokens=10)
        truth = full_logprobs(other, answer.prompt_token_ids, answer.completions[0].token_ids)
        assert np.abs(answer.completions[0].logprobs - truth).max() < 1e-4
        assert answer.weight_version == 4

        async def ask_for_the_old():
            async with PolicyClient(endpoints=[server.base_url], model=old) as client:
                await client.chat([Message(role="user", content="a")], 1, Sampling())

        with pytest.raises(StalePolicy, match=r"known: policy@00004-ffffffff, policy"):
            asyncio.run(ask_for_the_old())
    finally:
        server.stop()


def test_weights_from_disk_are_checked_before_the_old_ones_go(model, tmp_path):
    server, other = server_of(model), tiny_model(seed=4)
    url = server.start()
    update = lambda path: talk(url, "POST", "/update_weights_from_disk", {"model_path": str(path)})
    try:
        save_hf(other, character_tokenizer(), tmp_path / "good")
        save_hf(tiny_model("llama"), character_tokenizer(), tmp_path / "shape")
        save_hf(other, character_tokenizer(), tmp_path / "torn")
        weights = tmp_path / "torn" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        for bad in ("absent", "shape", "torn"):
            status, _, answer = update(tmp_path / bad)
            assert (status, answer["error"]["code"]) == (400, "weights_refused")
            assert server.model_id == "policy@00003-01234567"
        status, _, answer = update(tmp_path / "good")
        digest = parameters_digest(other)
        assert (status, answer["model"]) == (200, f"policy@00004-{digest[:8]}")
        assert chat(server).parameters_digest == digest
    finally:
        server.stop()


def test_a_client_that_goes_away_frees_its_slots(server):
    connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=60)
    body = chat_body(n=64, max_tokens=90, seed=5, messages=[{"role": "user", "content": ""}])
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    deadline = time.monotonic() + 30
    while server.engine.queued == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert server.engine.queued > 0
    connection.close()
    while server.engine.queued and time.monotonic() < deadline:
        time.sleep(0.001)
    assert server.engine.queued == 0
    assert len(chat(server, n=8, max_tokens=2).completions) == 8


def test_concurrent_requests_get_what_they_would_get_alone(server):
    def one(index: int) -> bytes:
        body = chat_body(seed=index, n=3, return_token_ids=True, logprobs=True)
        return json.dumps(talk(server.base_url, "POST", POSTS[0], body)[2]["choices"]).encode()

    alone = [one(index) for index in range(12)]
    found: dict[int, bytes] = {}
    threads = [
        threading.Thread(target=lambda index=index: found.update({index: one(index)}))
        for index in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [found[index] for index in range(12)] == alone


def test_a_tokenizer_with_ids_outside_the_vocabulary_is_refused(model):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<|one more|>"])
    with pytest.raises(InputError, match="ids up to 103"):
        PolicyServer(model, tokenizer, CONFIG, context_length=CONTEXT)


SCRIPT = """
import sys
from tiny_models import tiny_model
from marin_rl.config import EngineConfig, InferenceConfig
from marin_rl.inference.server import PolicyServer, serve_forever
from marin_rl.tokenizers import character_tokenizer

config = InferenceConfig(engine=EngineConfig(slots=2, chunk_steps=1, prefill_rows=1))
server = PolicyServer(tiny_model(), character_tokenizer(), config, context_length=32)
sys.exit(serve_forever(server, "127.0.0.1", 0, announce=lambda line: print(line, flush=True)))
"""


@pytest.mark.slow  # a process of its own imports and compiles everything
def test_sigterm_lets_running_requests_finish_and_ends_with_0():
    here = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{here.parent}:{here}"}
    answers: list[tuple] = []
    body = chat_body(n=60, max_tokens=24)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        asking = threading.Thread(target=lambda: answers.append(talk(url, "POST", POSTS[0], body)))
        asking.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        asking.join(timeout=60)
        assert process.wait(timeout=60) == 0
    ((status, _, answer),) = answers
    assert status == 200
    assert len(answer["choices"]) == 60

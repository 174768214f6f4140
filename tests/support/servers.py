"""Small servers of a tiny model, clients for JSON and for raw bytes, and stale ones."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from support.models import full_logprobs, tiny_model

from marin_rl.config import EngineConfig, InferenceConfig, ServerConfig
from marin_rl.models.module import LanguageModel
from marin_rl.serving.server import PolicyServer
from marin_rl.tokenizers import character_tokenizer

CONTEXT = 96
ENGINE = EngineConfig(slots=8, chunk_steps=4, prefill_rows=4)
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "abc"}]


@contextmanager
def serving(server: ServerConfig | None = None, **options: Any) -> Iterator[PolicyServer]:
    """A started server with these limits, stopped at the end."""
    engine = options.pop("engine", ENGINE)
    config = InferenceConfig(engine=engine, server=server or ServerConfig())
    tokenizer = options.pop("tokenizer", None) or character_tokenizer()
    given = {"context_length": CONTEXT, "weight_version": 3, "parameters_digest": "0123456789"}
    model = options.pop("model", None) or tiny_model()
    running = PolicyServer(model, tokenizer, config, **(given | options))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def chat_body(**fields: Any) -> dict[str, Any]:
    """A request for a few tokens."""
    return {"model": "policy", "messages": MESSAGES, "max_tokens": 4, "seed": 1, **fields}


def talk(
    server: PolicyServer | str,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], Any]:
    """One request: status, headers by lower-case name, and the JSON (or text) of the answer."""
    url = server if isinstance(server, str) else server.base_url
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        read = response.read()
        named = {name.lower(): value for name, value in response.getheaders()}
        is_json = named.get("content-type", "").startswith("application/json")
        return response.status, named, json.loads(read) if is_json and read else read.decode()
    finally:
        connection.close()


def wait_until(condition: Callable[[], object], timeout_s: float | int = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def asks_well(server: PolicyServer, headers: dict[str, str] | None = None) -> bool:
    """True if an ordinary request is answered as it should be."""
    status, _, answer = talk(server, "POST", CHAT, chat_body(), headers)
    return status == 200 and answer["usage"]["completion_tokens"] >= 1


def sampled(server: PolicyServer | str, model: str) -> dict[str, Any]:
    """An answer of a few tokens of a served model, with their ids and logprobs."""
    body = chat_body(model=model, return_token_ids=True, compact_logprobs=True, logprobs=True)
    status, _, answer = talk(server, "POST", CHAT, body)
    assert status == 200, answer
    return answer


def check_sampled(answer: dict[str, Any], model: LanguageModel) -> None:
    """The tokens were drawn by this model."""
    choice = answer["choices"][0]
    prompt, tokens = map(np.asarray, (answer["prompt_token_ids"], choice["token_ids"]))
    expected = full_logprobs(model, prompt, tokens)
    np.testing.assert_allclose(choice["token_logprobs"], expected, atol=2e-4)


def raw(server: PolicyServer, timeout_s: float | int = 30) -> socket.socket:
    """A bare connection."""
    parts = urlsplit(server.base_url)
    assert parts.hostname
    assert parts.port
    return socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)

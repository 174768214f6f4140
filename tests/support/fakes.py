"""A small honest policy server on loopback: bytes are tokens, and what it samples is scripted.

It speaks OpenAI's chat route with vLLM's `return_token_ids`, written by hand from vLLM's documents
rather than with our own protocol module, so that client and fake cannot be wrong in the same way.
The same seed gives the same sample; every fault that a server can have is a switch.
"""

import json
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import numpy as np
from support.http_threads import HttpThread

from marin_rl.errors import BridgeFault
from marin_rl.types import Message, ServedPolicy, SlotRef

END = 256
TEMPLATE = "<{role}>{content}"

Script = Callable[[str, int], str]
Fault = Callable[[Mapping[str, Any]], str | None]

STATUSES = {
    "500": 500,
    "503": 503,
    "429": 429,
    "reject": 400,
    "unauthorized": 401,
    "route": 404,
    "conflict": 409,
}


def echo_script(prompt: str, seed: int) -> str:
    """Repeats the last word of the last message; every third seed gets it wrong."""
    word = prompt.split()[-1]
    return word if seed % 3 else word[::-1] + "?"


def prompt_ids(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The prompt as this server's template renders it, one id per byte."""
    text = "".join(TEMPLATE.format(**message) for message in messages) + "<assistant>"
    return list(text.encode())


def bridge(
    dialogue: Sequence[Message], last_id: int, messages: Sequence[Message], tools: Any = ()
) -> np.ndarray:
    """Ids that this server's template puts after a turn whose last token was its end."""
    if last_id != END:
        raise BridgeFault("the turn was cut")
    rendered = prompt_ids([{"role": m.role, "content": m.content} for m in messages])
    return np.array(rendered, np.int32)


def logprob_of(token: int, position: int) -> float:
    """A float32 with no short decimal form, so that any loss on the way shows."""
    return struct.unpack("f", struct.pack("f", -1.0 / (3 + token % 7 + position)))[0]


def served_policy(url: str, model: str, **changes: Any) -> ServedPolicy:
    """A policy that is served at `url`, of weight version 0 if `changes` do not say another."""
    version = changes.get("weight_version", 0)
    values: dict[str, Any] = {
        "endpoints": (url,),
        "model": model,
        "weight_version": version,
        "parameters_digest": "ab" * 32,
        "tokenizer_digest": "t",
        "chat_template_digest": "c",
        "checkpoint": SlotRef(slot=f"checkpoints/round-{version:05d}", sha256="5" * 64),
    }
    return ServedPolicy(**values | changes)


class FakePolicyServer(HttpThread):
    """`with FakePolicyServer(model="policy@00000-00000000") as server: … server.url`."""

    def __init__(
        self,
        model: str,
        script: Script = echo_script,
        *,
        compact: bool = True,
        context_length: int = 4096,
        delay_s: float = 0.0,
        api_key: str | None = None,
        has_chat_tokens: bool = True,
    ) -> None:
        self.model, self.aliases = model, tuple[str, ...]()
        self.script = script
        self.compact = compact
        self.context_length = context_length
        self.delay_s = delay_s
        self.api_key = api_key
        self.has_chat_tokens = has_chat_tokens
        self.extra: dict[str, Any] = {}
        self.metrics = ""
        self.metrics_delay_s, self.looks = 0.0, 0
        self.error_headers: dict[str, str] = {}
        self.error_code: str | None = None
        self.updates: list[tuple[str | None, dict[str, Any]]] = []
        self.faults: deque[str] = deque()
        self.fault: Fault = lambda _body: self.faults.popleft() if self.faults else None
        self.requests: list[dict[str, Any]] = []
        self.in_flight = 0
        self.in_flight_most = 0
        self.lock = threading.Lock()
        super().__init__(_Server(self), "/v1")

    def answer(self, body: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
        """The chat completion for a request, with at most one fault in it."""
        ids = body["tokens"] if "tokens" in body else prompt_ids(body["messages"])
        text = body["messages"][-1]["content"]
        choices = [
            self._choice(index, self.script(text, body.get("seed", 0) + index), body, fault)
            for index in range(body.get("n", 1))
        ]
        answer: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": 0,
            "model": "someone-else" if fault == "wrong-model" else self.model,
            "choices": choices[:-1] if fault == "fewer" else choices[::-1],
            "usage": {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)},
        }
        if fault != "missing-prompt":
            answer["prompt_token_ids"] = ids
        return answer | self.extra

    def plain_answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The plain completion of a prompt of ids or a text, as vLLM gives it.

        Without compact logprobs; the first token of a text is most likely what the script says.
        """
        ids = body["prompt"] if isinstance(body["prompt"], list) else [*body["prompt"].encode()]
        last = bytes(i for i in ids if i != END).decode().rpartition("<user>")[2]
        asked = {
            "tokens": ids,
            "messages": [{"role": "user", "content": last.removesuffix("<assistant>")}],
            "max_tokens": body["max_tokens"],
            "seed": body["seed"],
            "n": body.get("n", 1),
        }
        answer = self.answer(asked, None)
        for choice in answer["choices"]:
            chat = choice.pop("logprobs")["content"]
            choice["text"] = choice.pop("message")["content"]
            choice["prompt_token_ids"] = answer["prompt_token_ids"]
            if body.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": [item["logprob"] for item in chat]}
                said = self.script(last, body["seed"] + choice["index"])
                top = {"\n": -0.1, " A": -4.0, f" {said}": -0.5}
                choice["logprobs"]["top_logprobs"] = [top] if body["logprobs"] else None
        del answer["prompt_token_ids"]
        return answer

    def _choice(
        self, index: int, text: str, body: Mapping[str, Any], fault: str | None
    ) -> dict[str, Any]:
        ids = [*text.encode(), END][: body["max_tokens"]]
        logprobs: list[float] = [logprob_of(token, i) for i, token in enumerate(ids)]
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": bytes(ids).decode(errors="ignore") if ids[-1] != END else text,
            },
            "finish_reason": "stop" if ids[-1] == END else "length",
        }
        if fault == "abort":
            choice["finish_reason"] = "abort"
        _spoil(ids, logprobs, fault)
        if fault != "missing-ids":
            choice["token_ids"] = ids
        if self.compact and body.get("compact_logprobs"):
            choice["token_logprobs"] = logprobs
        elif fault != "missing-logprobs":
            content = [{"token": "", "logprob": p, "top_logprobs": []} for p in logprobs]
            choice["logprobs"] = {"content": content}
        return choice


def _spoil(ids: list[int], logprobs: list[float], fault: str | None) -> None:
    match fault:
        case "missing-logprobs":
            logprobs.clear()
        case "short-logprobs":
            logprobs.pop()
        case "positive":
            logprobs[0] = 0.5
        case "nan":
            logprobs[0] = float("nan")
        case "negative-ids":
            ids[0] = -1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, fake: FakePolicyServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.server.fake.looks += 1
            time.sleep(self.server.fake.metrics_delay_s)
            self._send_bytes(200, self.server.fake.metrics.encode())
            return
        models = [{"id": self.server.fake.model, "object": "model"}]
        self._send(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with fake.lock:
            fake.requests.append(body)
            fake.in_flight += 1
            fake.in_flight_most = max(fake.in_flight, fake.in_flight_most)
        try:
            self._answer(body)
        finally:
            with fake.lock:
                fake.in_flight -= 1

    def _answer(self, body: dict[str, Any]) -> None:
        fake = self.server.fake
        fault = fake.fault(body)
        if self.path == "/update_weights_from_disk" and fault is None:
            fake.updates.append((self.headers["authorization"], body))
            self._send(200, {"success": True, "message": ""})
            return
        time.sleep(5.0 if fault == "slow" else fake.delay_s)
        if fault == "drop":
            self.close_connection = True
        elif fault in STATUSES:
            self._error(STATUSES[fault], f"scripted fault {fault}", code=fake.error_code)
        elif fault == "not-json":
            self._send_bytes(200, b"<html>")
        else:
            self._answer_honestly(body, fault)

    def _answer_honestly(self, body: dict[str, Any], fault: str | None) -> None:
        fake = self.server.fake
        if fake.api_key and self.headers["authorization"] != f"Bearer {fake.api_key}":
            self._error(401, f"wrong key {self.headers['authorization']}")
        elif self.path.endswith("/tokens") and not fake.has_chat_tokens:
            self._send(404, {"detail": "Not Found"})
        elif body["model"] not in (fake.model, *fake.aliases):
            self._error(404, f"The model `{body['model']}` does not exist", param="model")
        elif self.path == "/v1/completions":
            self._send(200, fake.plain_answer(body))
        elif len(prompt_ids(body["messages"])) + body["max_tokens"] > fake.context_length:
            self._error(400, "the prompt is too long", code="context_length_exceeded")
        else:
            self._send(200, fake.answer(body, fault))

    def _error(self, status: int, message: str, **more: str | None) -> None:
        error = {"message": message, "type": "fake", **more}
        self._send_bytes(
            status, json.dumps({"error": error}).encode(), self.server.fake.error_headers
        )

    def _send(self, status: int, body: object) -> None:
        self._send_bytes(status, json.dumps(body).encode())

    def _send_bytes(
        self, status: int, data: bytes, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # the client gave up waiting: a fault of its own

    def log_message(self, format: str, *args: object) -> None:
        pass

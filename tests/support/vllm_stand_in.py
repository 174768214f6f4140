"""A server that speaks vLLM's routes of weights and of generation, over an engine of our own.

What it samples, loads and computes again is real. As in vLLM, the label of weights is a text that
`/update_weight_version` sets, whatever is loaded; tokens have the label of their step. Its reload
leaves the caches of what is under way as they are; a reset with `reset_running_requests` computes
them again.
"""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import httpx
from support.http_threads import HttpThread

from marin_rl.inference.client.protocol import GENERATE_ROUTE
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.checkpoint_loader import Loaded, read_folder

NAME = "policy"
DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out"


class VllmStandIn(HttpThread):
    """`with VllmStandIn(server) as vllm: … vllm.url`; `server` is started and stopped by it.

    `asked` are the paths of its requests for other things than tokens, in order. `loads` turns what
    a folder has into what is loaded, for weights that are wrong; `spoil` changes a choice.
    """

    def __init__(self, server: PolicyServer, *, scale_out: bool = True) -> None:
        self.server, self.scale_out = server, scale_out
        self.asked: list[str] = []
        self.loads: Callable[[Loaded], Loaded] = lambda loaded: loaded
        self.spoil: Callable[[dict[str, Any]], None] = lambda _choice: None
        self._labels = {0: "default"}  # by the engine's own version
        self._loaded: Loaded | None = None
        super().__init__(_Server(self), "/v1")

    @property
    def version(self) -> int:
        """Number of reloads."""
        return self.server.engine.policy.weight_version

    @property
    def label(self) -> str:
        """The label of the weights, as `/weight_info` says it."""
        return self._labels[self.version]

    def __enter__(self) -> Self:
        self.server.start()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self.server.stop()

    def get(self, path: str) -> dict[str, Any] | None:
        """The answer to a GET; None where there is no such route."""
        return {
            "/v1/models": {"data": [{"id": NAME, "object": "model", "owned_by": "vllm"}]},
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": self.server.engine.paused},
        }.get(path)

    def post(self, path: str, query: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a POST of the routes of weights; None where there is no such route."""
        engine = self.server.engine
        match path:
            case "/pause":
                assert parse_qs(query)["mode"] == ["keep"]
                engine.pause()
            case "/resume":
                engine.resume()
            case "/collective_rpc":
                assert engine.paused
                self._reload(body["kwargs"]["weights_path"])
            case "/reset_prefix_cache":
                engine.reset_prefix_cache()
                if parse_qs(query).get("reset_running_requests") == ["true"]:
                    self._swap(recompute_kv_cache=True)
            case "/update_weight_version":
                self._labels[self.version] = body["new_version"]
            case _:
                return None
        return {}

    def _reload(self, folder: str) -> None:
        self._loaded, version = self.loads(read_folder(folder)), self.version + 1
        self._labels[version] = self.label
        self._swap(version)

    def _swap(self, version: int | None = None, *, recompute_kv_cache: bool = False) -> None:
        assert self._loaded is not None
        self.server.engine.swap(
            self._loaded.model,
            self.version if version is None else version,
            self._loaded.parameters_digest,
            recompute_kv_cache=recompute_kv_cache,
        )

    def generate(self, data: bytes) -> tuple[int, bytes]:
        """Status and answer of `/inference/v1/generate`."""
        if not self.scale_out:
            return 403, json.dumps({"error": {"message": DISABLED, "code": 403}}).encode()
        url = self.server.base_url.removesuffix("/v1") + GENERATE_ROUTE
        response = httpx.post(url, content=data, timeout=300, trust_env=False)
        if response.status_code != 200:
            return response.status_code, response.content
        answer = response.json()
        choices = [self._choice(choice) for choice in answer["choices"]]
        # vLLM 0.32 leaves the model out
        return 200, json.dumps({"request_id": answer["request_id"], "choices": choices}).encode()

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        fields = ("index", "token_ids", "logprobs", "finish_reason", "weight_versions")
        choice = {name: choice[name] for name in fields}
        for span in choice["weight_versions"]:
            span["version"] = self._labels[int(span["version"])]
        self.spoil(choice)
        return choice


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, owner: VllmStandIn) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self._owner.get(urlsplit(self.path).path))

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = urlsplit(self.path)
        if parts.path == GENERATE_ROUTE:
            self._send(*self._owner.generate(data))
            return
        body = json.loads(data) if data else {}
        self._owner.asked.append(self.path)
        self._answer(self._owner.post(parts.path, parts.query, body))

    @property
    def _owner(self) -> VllmStandIn:
        assert isinstance(self.server, _Server)
        return self.server.owner

    def _answer(self, answer: dict[str, Any] | None) -> None:
        self._send(404 if answer is None else 200, json.dumps(answer or {}).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

"""The life of an inference server: an engine, its routes, and a thread that answers.

Owns starting and stopping, the port, the table of all routes, and the end of a standalone server
(SIGTERM: no new work, running requests finish, exit). Leaves out what routes do (`api`), and who
may call them (`auth`).
"""

import asyncio
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from io import TextIOBase
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TextIO

import jax.numpy as jnp
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router
from transformers import PreTrainedTokenizerBase

from marin_rl.chat_templates import prove
from marin_rl.compilation import spare_long_lived_objects
from marin_rl.config import InferenceConfig
from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.client.protocol import CHAT_ROUTE
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import STOP_TOKENS_MAX
from marin_rl.inference.growing_runner import GrowingRunner
from marin_rl.inference.runner import Runner
from marin_rl.models.module import LanguageModel
from marin_rl.serving.api.admin import adapter_routes, admin_routes
from marin_rl.serving.api.completions import Chat, ChatTokens, Completions
from marin_rl.serving.api.dialect import Dialect, dumps
from marin_rl.serving.api.generate import IdsToIds, SGLang
from marin_rl.serving.api.request_handler import SamplingEndpoint
from marin_rl.serving.api.routes import (
    STREAM,
    ApiRoute,
    describe,
    errors_at,
    server_routes,
    tokenizer_routes,
)
from marin_rl.serving.api.service import Service
from marin_rl.serving.api.translated import Messages, Responses
from marin_rl.serving.http.access_log import AccessLog, RequestRecord
from marin_rl.serving.http.auth import Keys, Origins, check_reach, http_server, listen
from marin_rl.serving.http.guard import Guard
from marin_rl.serving.http.prometheus import CONTENT_TYPE, METRICS_ROUTE, Telemetry
from marin_rl.serving.text.detokenizer import Detokenizer
from marin_rl.serving.weights.adapters import ServedAdapters
from marin_rl.serving.weights.weight_updates import WeightUpdater
from marin_rl.tokenizers import check_vocabulary, end_token_ids
from marin_rl.training.model import parameter_shapes

START_S = 30.0
ALIVE_S = 1.0
DIALECTS: tuple[type[Dialect], ...] = (
    Chat,
    ChatTokens,
    Completions,
    Responses,
    Messages,
    IdsToIds,
    SGLang,
)

_log = logging.getLogger(__name__)

Report = Callable[[Mapping[str, Any]], None]  # gets a record of each state of a server


class PolicyServer:
    """A policy behind the OpenAI protocol, in this process.

    The bearer token is read from the environment variable `config.api_key_variable`; without one
    the server binds to loopback only. `grows` is the engine's. Raises InputError for a model or
    tokenizer that cannot be served.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        config: InferenceConfig,
        *,
        context_length: int,
        weight_version: int = 0,
        parameters_digest: str = "",
        dtype: jnp.dtype | type = jnp.float32,
        grows: bool = False,
    ) -> None:
        stops, vocabulary = end_token_ids(tokenizer), model.spec.vocabulary
        check_vocabulary(tokenizer, vocabulary)
        prove(tokenizer)
        if len(stops) > STOP_TOKENS_MAX or max(stops) >= vocabulary:
            raise InputError(
                f"expected at most {STOP_TOKENS_MAX} end tokens, with ids below {vocabulary}, in "
                f"the generation_config.json of {tokenizer.name_or_path}, found {list(stops)}"
            )
        self.settings = config.server
        self._keys = Keys.from_environment(config)
        detokenizer = Detokenizer(tokenizer)
        self.engine = Engine(
            model,
            config.engine,
            context_length=context_length,
            weight_version=weight_version,
            parameters_digest=parameters_digest,
            stop_token_ids=stops,
            decode=detokenizer.of,
            dtype=dtype,
            programs=GrowingRunner if grows else Runner,
        )
        self.telemetry = Telemetry(
            self.engine,
            base_id=lambda: self._service.base_id,
            connections=lambda: len(self._uvicorn.server_state.connections) if self._uvicorn else 0,
        )
        self.updater = WeightUpdater(self.engine, model, tokenizer, config, dtype, self.telemetry)
        self.adapters = ServedAdapters(
            self.engine,
            parameter_shapes(model),
            self.telemetry,
            reserved=lambda: [*self._service.names, self._service.base_id],
        )
        self._service = Service(
            self.engine,
            tokenizer,
            detokenizer,
            config.model,
            self.updater,
            self.adapters,
            self.settings,
        )
        self.routes = all_routes(self._service, self.telemetry)
        self._router = Router(list(self.routes))
        self._origins = self._origins_at("127.0.0.1")
        self._guard = Guard(
            self._router,
            config=self.settings,
            keys=self._keys,
            origins=lambda: self._origins,
            on_start=self.telemetry.request_started,
            on_end=self._on_end,
        )
        self._log: AccessLog | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._base_url = ""

    @property
    def model_id(self) -> str:
        return self._service.model_id

    @property
    def base_url(self) -> str:
        assert self._base_url, "the server was not started"
        return self._base_url

    def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        warm_up: bool = False,
        announce: Callable[[str], None] = _log.info,
    ) -> str:
        """Answer requests from a thread; returns the base URL. Port 0 takes a free one.

        `warm_up` compiles all programs first, each with a line to `announce`. Raises ConfigError
        for an address that cannot be bound, or one beyond this machine without a token.
        """
        check_reach(self._keys, host)
        self._origins = self._origins_at(host)
        listener = listen(host, port)
        if warm_up:
            self.engine.warm_up(announce)
        self._uvicorn = http_server(self._guard, self.settings, host)
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([listener],), name="server", daemon=True
        )
        self._thread.start()
        if not _becomes_true(lambda: self._uvicorn is not None and self._uvicorn.started, START_S):
            raise InferenceError(f"the server did not start within {START_S:g} s")
        bound = listener.getsockname()[1]
        self._base_url = f"http://{f'[{host}]' if ':' in host else host}:{bound}/v1"
        return self._base_url

    def add_name(self, name: str) -> None:
        if name not in self._service.known:
            self._service.aliases += (name,)

    def log_requests(self, stream: TextIO | TextIOBase) -> None:
        self._close_log()
        self._log = AccessLog(stream)
        self.telemetry.lines_dropped = self._log.lines_dropped

    def how_to_call(self) -> str:
        """Start message for people: address, which tokens are needed, and an example call."""
        keys, root = self._keys, self.base_url.removesuffix("/v1")
        api, admin = keys.api_variable, keys.admin_variable
        header = f'-H "Authorization: Bearer ${api}" ' if keys.api else ""
        messages = [{"role": "user", "content": "Hi"}]
        body = json.dumps({"model": self._service.name, "messages": messages})
        api_source = f"from {api}" if keys.api else f"{api} is not set: this machine only"
        admin_source = f"from {admin}" if keys.admin else f"{admin} is not set: no admin routes"
        return (
            f"serving {self.model_id} at {self.base_url}\n"
            f"  API token:   {api_source}\n"
            f"  admin token: {admin_source}\n"
            f"  try: curl {root}{CHAT_ROUTE} {header}-H 'Content-Type: application/json' "
            f"-d '{body}'"
        )

    def _origins_at(self, host: str) -> Origins:
        return Origins(self.settings, host, has_token=self._keys.api is not None)

    def drain(self) -> bool:
        """Take no new requests and wait for the running ones; True if all of them finished."""
        self._service.draining = self._service.stopping = True
        self.engine.resume()  # paused requests would never end
        return _becomes_true(lambda: self._service.running == 0, self.settings.drain_timeout_s)

    def stop(self) -> None:
        """Close the port and the engine. Running requests end with an error, streams properly."""
        self._service.draining = self._service.stopping = True
        self.engine.close()
        if self._uvicorn is not None and self._thread is not None:
            self._uvicorn.should_exit = True
            self._thread.join(timeout=START_S)
            self._uvicorn = self._thread = None
        self._service.close()
        self._close_log()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _on_end(self, record: RequestRecord) -> None:
        self.telemetry.request_ended(record)
        if self._log is not None:
            self._log.add(record)


def serve_forever(
    server: PolicyServer,
    host: str,
    port: int,
    *,
    announce: Callable[[str], None] = _log.info,
    report: Report | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; the process's exit code.

    `announce` gets lines for people, `report` a record for each state: compiling, ready, draining,
    ended. 0 after a signal, 1 where the engine died. A second signal ends at once, and so does the
    first one as long as nothing can be asked yet. To be called from the main thread.
    """
    began = time.monotonic()
    report = report or (lambda state: None)
    warm_up = server.engine.growing is None
    programs = server.engine.programs
    report({"state": "compiling", "programs": programs})
    if warm_up:
        announce(f"compiling {programs} programs, or reading them from the cache")
    try:
        _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # one a connection
        if server.settings.access_log:
            server.log_requests(sys.stderr)
        server.start(host, port, warm_up=warm_up, announce=announce)
    except BaseException:
        server.stop()
        raise
    with _signals() as wait_for_signal:
        try:
            spare_long_lived_objects()
            seconds = time.monotonic() - began
            announce(f"compiled in {seconds:.1f} s: ready" if warm_up else "ready")
            announce(server.how_to_call())
            ready = {"url": server.base_url, "model": server.model_id, "compile_s": seconds}
            report({"state": "ready", **ready})
            while not wait_for_signal(ALIVE_S):
                if not server.engine.alive:
                    announce("the engine ended by itself: its last words are above")
                    report({"state": "ended", "exit_code": 1})
                    return 1
            announce("draining: running requests finish, new ones are refused")
            report({"state": "draining"})
            if not server.drain():
                announce("some requests are still running: they end now with an error")
        finally:
            server.stop()
    report({"state": "ended", "exit_code": 0})
    return 0


@contextmanager
def _signals() -> Iterator[Callable[[float], bool]]:
    """Handle SIGTERM and SIGINT; yields a function that waits for one, with a timeout in seconds.

    A second one ends the process at once.
    """
    # which is reentrant: a handler that took a lock could wait for the very thread it interrupts
    requests: SimpleQueue[int] = SimpleQueue()

    def exit_at_once(number: int, frame: FrameType | None) -> None:
        os._exit(1)

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each in previous:
            signal.signal(each, exit_at_once)
        requests.put(number)

    def wait(seconds: float) -> bool:
        try:
            requests.get(timeout=seconds)
        except Empty:
            return False
        return True

    previous = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        for each in previous:
            signal.signal(each, on_signal)
        yield wait
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _becomes_true(condition: Callable[[], bool], timeout_s: float | int) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def all_routes(service: Service, telemetry: Telemetry) -> tuple[ApiRoute, ...]:
    async def metrics(request: Request) -> Response:
        """Return the server's metrics in the Prometheus text format."""
        data = await asyncio.to_thread(telemetry.exposition)
        return Response(data, media_type=CONTENT_TYPE)

    async def openapi(request: Request) -> Response:
        """Return this description."""
        return Response(description(), media_type="application/json")

    @cache
    def description() -> bytes:
        return dumps(describe(routes))

    sampling = (
        ApiRoute(
            dialect.path,
            SamplingEndpoint(service, dialect),
            methods=["POST"],
            request=dialect.request_model,
            response=dialect.response_model,
            summary=dialect.summary,
            responses=errors_at(dialect.path) | (STREAM if dialect.may_stream else {}),
        )
        for dialect in DIALECTS
    )
    routes = (
        *server_routes(service),
        ApiRoute(METRICS_ROUTE, metrics, response_class=PlainTextResponse),
        ApiRoute("/openapi.json", openapi),
        *sampling,
        *tokenizer_routes(service),
        *admin_routes(service),
        *adapter_routes(service),
    )
    return routes

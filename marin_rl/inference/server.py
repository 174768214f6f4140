"""The life of an inference server: an engine, its routes, and a thread that answers.

Owns starting and stopping, the port, new weights for a running server, and the end of a standalone
one (SIGTERM: no new work, running requests finish, exit). Leaves out the routes (`app`).
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import jax.numpy as jnp
import uvicorn
from levanter.models.lm_model import LmHeadModel
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from marin_rl.config import InferenceConfig
from marin_rl.errors import ConfigError, InferenceError, InputError
from marin_rl.inference.app import Service, create_app
from marin_rl.inference.bodies import UpdateWeightsBody
from marin_rl.inference.engine import Engine
from marin_rl.inference.guard import is_loopback
from marin_rl.tokenizers import check_vocabulary, load_tokenizer, tokenizer_digest

DRAIN_S = 30.0
START_S = 30.0
HEADER_BYTES_MAX = 65536

_log = logging.getLogger(__name__)


class PolicyServer:
    """A policy behind the OpenAI protocol, in this process.

    The bearer token is read from the environment variable `config.api_key_variable`; without one
    the server binds to loopback only. Raises InputError for a model or tokenizer that cannot be
    served.
    """

    def __init__(
        self,
        model: LmHeadModel,
        tokenizer: PreTrainedTokenizerBase,
        config: InferenceConfig,
        *,
        context_length: int,
        weight_version: int = 0,
        parameters_digest: str = "",
        dtype: jnp.dtype | type = jnp.float32,
    ) -> None:
        check_vocabulary(tokenizer, model.Vocab.size)
        self._token = os.environ.get(config.api_key_variable) or None
        self._token_variable = config.api_key_variable
        self._tokenizer = tokenizer
        self.engine = Engine(
            model,
            config.engine,
            context_length=context_length,
            weight_version=weight_version,
            parameters_digest=parameters_digest,
            stop_token_ids=stop_token_ids(tokenizer),
            decode=_decoder_of(tokenizer),
            dtype=dtype,
        )
        self._service = Service(self.engine, tokenizer, config.model, self._update_from_disk)
        self._app = create_app(self._service, self._token)
        self._uvicorn: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._base_url = ""

    @property
    def model_id(self) -> str:
        """The id of what is loaded: name, weight version and digest."""
        return self._service.model_id

    @property
    def base_url(self) -> str:
        """What OpenAI clients are given: `http://host:port/v1`."""
        assert self._base_url, "the server was not started"
        return self._base_url

    @property
    def routes(self) -> list[str]:
        """Paths of every route."""
        return [route.path for route in self._app.routes if isinstance(route, Route)]

    def start(self, host: str = "127.0.0.1", port: int = 0, *, warm_up: bool = False) -> str:
        """Answer requests from a thread; returns the base URL. Port 0 takes a free one.

        `warm_up` compiles all programs first. Raises ConfigError for an address that cannot be
        bound, or one beyond this machine without a token.
        """
        if self._token is None and not is_loopback(host):
            raise ConfigError(
                f"a server on {host} is open to others: set a token in the environment variable "
                f"{self._token_variable}, or bind to 127.0.0.1"
            )
        listener = _listen(host, port)
        if warm_up:
            self.engine.warm_up()
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self._app,
                http="h11",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            )
        )
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([listener],), name="server", daemon=True
        )
        self._thread.start()
        _wait_until(lambda: self._uvicorn is not None and self._uvicorn.started, START_S)
        bound = listener.getsockname()[1]
        self._base_url = f"http://{f'[{host}]' if ':' in host else host}:{bound}/v1"
        return self._base_url

    def swap(self, model: LmHeadModel, weight_version: int, parameters_digest: str) -> str:
        """Serve another model's arrays from the next chunk on, without a copy; the new model id.

        Raises InputError, and goes on with the old weights, for a model of another shape.
        """
        self.engine.swap(model, weight_version, parameters_digest)
        return self.model_id

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Take no new requests and wait for the running ones; whether all of them finished."""
        self._service.draining = True
        return _becomes_true(lambda: self._service.running == 0, timeout_s)

    def stop(self) -> None:
        """Close the port and the engine. Running requests get an error."""
        self._service.draining = True
        self.engine.close()
        if self._uvicorn is not None and self._thread is not None:
            self._uvicorn.should_exit = True
            self._thread.join(timeout=START_S)
            self._uvicorn = self._thread = None
        self._service.worker.shutdown(wait=False)

    def _update_from_disk(self, body: UpdateWeightsBody) -> str:
        """Load and check a Hugging Face folder before anything is switched."""
        # the trainer's room: only a server that is asked to load needs it
        from marin_rl.training.model import load_hf, parameters_digest

        tokenizer = load_tokenizer(body.model_path)
        if tokenizer_digest(tokenizer) != tokenizer_digest(self._tokenizer):
            raise InputError(
                f"expected the tokenizer that is served, found another in {body.model_path}"
            )
        model = load_hf(body.model_path)
        given = body.weight_version
        version = self.engine.policy.weight_version + 1 if given is None else int(given)
        return self.swap(model, version, parameters_digest(model))


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What ends a completion: the tokenizer's end token. InputError if it has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise InputError("the tokenizer has no end token: completions would never end")
    return (end,)


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def serve_forever(
    server: PolicyServer, host: str, port: int, *, announce: Callable[[str], None] = _log.info
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; the process's exit code, 0.

    A second signal ends at once. To be called from the main thread.
    """
    asked = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            os._exit(1)
        asked.set()

    previous = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        url = server.start(host, port, warm_up=True)
        announce(f"serving {server.model_id} at {url}")
        asked.wait()
        announce("draining: running requests finish, new ones are refused")
        if not server.drain():
            announce(f"some requests were still running after {DRAIN_S:g} s")
    finally:
        server.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    if not _becomes_true(condition, timeout_s):
        raise InferenceError(f"the server did not start within {timeout_s:g} s")


def _becomes_true(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True

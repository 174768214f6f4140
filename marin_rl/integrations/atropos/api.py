"""The API of atropos 0.4 as its environments use it, over HTTP.

Owns routes, bodies (plain or gzip) and answers. A trainer of atropos has no part here: the run is
the trainer, and takes groups from its files. So the routes that register one, hand batches out or
forget what was accepted are refused. Leaves out what is done with a group (`receiver`) and who may
call (`http.guard`).
"""

import asyncio
import base64
import binascii
import sys
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NoReturn, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marin_rl.config import ServerConfig
from marin_rl.errors import InputError, StorageError
from marin_rl.integrations.atropos.receiver import Receiver
from marin_rl.integrations.atropos.scored_data import ScoredData
from marin_rl.serving.http.auth import Keys, Origins, check_reach, http_server, run_server
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.guard import Guard, read_body
from schemas import Malformed
from schemas.strict_json import JsonLimits, parse_json

RETRY_S = 1

Kind = TypeVar("Kind")
Handler = Callable[[Request], Awaitable[Response]]


class RegisterEnvironment(BaseModel):
    """POST /register-env."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    max_token_length: int = Field(ge=1)
    # Environments are named in rollouts and metrics; one without a name sends null.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None = Field(
        alias="desired_name"
    )
    weight: float = Field(ge=0, le=1e6, allow_inf_nan=False)
    group_size: int
    min_batch_allocation: float | None = Field(default=None, ge=0, le=1)


class EnvironmentNumber(BaseModel):
    """GET /status-env and POST /disconnect-env."""

    env_id: int


_ENVIRONMENT = TypeAdapter(RegisterEnvironment)
_NUMBER = TypeAdapter(EnvironmentNumber)
_GROUP = TypeAdapter(ScoredData)
_GROUPS = TypeAdapter(Annotated[list[ScoredData], Field(max_length=4096)])


class TrajectoryRoutes:
    """The routes of one receiver, which they call one at a time, off the event loop."""

    def __init__(self, receiver: Receiver, settings: ServerConfig) -> None:
        self._receiver, self._settings = receiver, settings
        # One thread: a request that ends early leaves its commit to finish before the next begins.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="receiver")

    def routes(self) -> list[Route]:
        run, config = self._receiver.run, self._receiver.run.config
        fixed: dict[str, dict[str, Any]] = {
            "/": {"message": "AtroposLib API", "run_id": run.run_id},
            "/healthz": {"status": "ok"},
            "/wandb_info": {
                "group": run.run_id,
                "project": config.trackers.wandb_project or "marin-rl",
            },
            "/info": {
                "batch_size": config.rollouts.groups_per_round * config.rollouts.group_size,
                # an environment drops sequences that are as long as this, or longer
                "max_token_len": config.policy.context_length + 1,
            },
        }
        called: tuple[tuple[str, str, Callable[..., Any], Any], ...] = (
            ("GET", "/status", self.status, None),
            ("GET", "/status-env", self.status_env, _NUMBER),
            ("GET", "/latest_example", self.latest_example, None),
            ("GET", "/batch", self.trains_itself, None),
            ("GET", "/reset_data", self.keeps_groups, None),
            ("POST", "/register", self.trains_itself, None),
            ("POST", "/register-env", self.register_env, _ENVIRONMENT),
            ("POST", "/disconnect-env", self.disconnect_env, _NUMBER),
            ("POST", "/scored_data", self.scored_data, _GROUP),
            ("POST", "/scored_data_list", self.scored_data_list, _GROUPS),
        )
        routes = [Route(path, _always(body), methods=["GET"]) for path, body in fixed.items()]
        for method, path, work, kind in called:
            routes.append(Route(path, self._endpoint(work, kind), methods=[method]))
        return routes

    def _endpoint(self, work: Callable[..., Any], kind: Any) -> Handler:
        """Answer with the result of `work`, which gets the body that `kind`, an adapter, reads."""

        async def endpoint(request: Request) -> Response:
            arguments = () if kind is None else (await self._body(request, kind),)
            loop = asyncio.get_running_loop()
            return JSONResponse(await loop.run_in_executor(self._worker, work, *arguments))

        return endpoint

    def status(self) -> dict[str, int]:
        receiver = self._receiver
        counts = {f"groups_{name}": count for name, count in receiver.counts.items()}
        size = receiver.queue_size
        return {"current_step": receiver.round or 0, "queue_size": size, **counts}

    def status_env(self, wanted: EnvironmentNumber) -> dict[str, Any]:
        return self._receiver.status_of(wanted.env_id)

    def latest_example(self) -> dict[str, Any]:
        """The group that was accepted last; empty lists before there is one."""
        if self._receiver.latest is None:
            names = ("tokens", "masks", "scores", "inference_logprobs", "messages")
            return {name: [] for name in names}
        return self._receiver.latest.model_dump(mode="json")

    def register_env(self, wanted: RegisterEnvironment) -> dict[str, Any]:
        """Register an environment for good; it waits while the run has no policy."""
        receiver = self._receiver
        if receiver.round is None:
            return {"status": "wait for trainer to start"}
        environment = receiver.register({**wanted.model_dump(), "name": wanted.name or "env"})
        return {
            "status": "success",
            "env_id": environment.number,
            "wandb_name": environment.real_name,
            "checkpoint_dir": "",
            "starting_step": receiver.round,
            "checkpoint_interval": -1,  # an environment keeps no checkpoints of its own
            "num_steps": receiver.run.config.rounds,
        }

    def disconnect_env(self, wanted: EnvironmentNumber) -> dict[str, Any]:
        self._receiver.disconnect(wanted.env_id)
        return {"status": "success"}

    def scored_data(self, group: ScoredData) -> dict[str, Any]:
        self._receiver.accept([group])
        return {"status": "received"}

    def scored_data_list(self, groups: list[ScoredData]) -> dict[str, Any]:
        self._receiver.accept(groups)
        return {"status": "received", "groups_processed": len(groups)}

    def trains_itself(self) -> NoReturn:
        raise ApiError(
            409,
            f"run {self._receiver.run.run_id} is the trainer of these environments, and takes "
            "groups from its files: expected no other trainer",
            code="no_trainer",
        )

    def keeps_groups(self) -> NoReturn:
        raise ApiError(
            409,
            "groups that were accepted are part of the run and are never deleted: start a run "
            "with another run_id",
            code="durable",
        )

    async def _body(self, request: Request, kind: TypeAdapter[Kind]) -> Kind:
        data = await read_body(request.scope, request.receive)
        try:
            if request.headers.get("content-encoding", "").lower() == "gzip":
                data = _unzipped(data, self._settings.bodies_bytes_max)
            limits = JsonLimits(bytes_max=self._settings.bodies_bytes_max)
            return await asyncio.to_thread(lambda: kind.validate_python(parse_json(data, limits)))
        except (ValidationError, Malformed) as error:
            if kind in (_GROUP, _GROUPS):
                self._receiver.counts["refused"] += 1
            known = isinstance(error, ValidationError)
            raise ApiError(422, _first(error) if known else f"the body: {error}") from None


def _always(body: dict[str, Any]) -> Handler:
    async def answer(request: Request) -> Response:
        return JSONResponse(body)

    return answer


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"])) or "the body"
    return f"{place}: {first['msg']}, found {first['input']!r:.100}"


def _unzipped(data: bytes, bytes_max: int) -> bytes:
    unzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        plain = unzip.decompress(data, bytes_max)
    except zlib.error as error:
        raise ApiError(400, f"expected a body in gzip: {error}") from None
    if unzip.unconsumed_tail:
        raise ApiError(413, f"expected a body of at most {bytes_max} bytes", code="body_too_large")
    if not unzip.eof:
        raise ApiError(400, "expected a body in gzip, found a part of one")
    return plain


def basic_as_bearer(app: ASGIApp) -> ASGIApp:
    """Add ASGI middleware: the password of Basic authentication is a bearer token.

    Environments of atropos send no header of their own, and their HTTP client sends this one for an
    address like http://any:TOKEN@host.
    """

    async def translated(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [(name, _bearer(name, value)) for name, value in scope["headers"]]
        await app(scope, receive, send)

    return translated


def _bearer(name: bytes, value: bytes) -> bytes:
    scheme, _, text = value.partition(b" ")
    if name != b"authorization" or scheme.lower() != b"basic":
        return value
    try:
        return b"Bearer " + base64.b64decode(text.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return value


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, InputError):
        error = ApiError(422, str(error))
    elif isinstance(error, StorageError):
        # Environments try again on 5xx alone.
        error = ApiError(503, f"{type(error).__name__}: {error}", retry_s=RETRY_S)
    assert isinstance(error, ApiError), "handlers are registered by type"
    # nothing is dropped silently
    sys.stderr.write(f"{request.method} {request.url.path}: {error.status}: {error}\n")
    return JSONResponse(error.body, error.status, headers=error.headers)


def trajectory_server(receiver: Receiver, host: str) -> uvicorn.Server:
    """Return a server of the routes, behind the checks that all servers of marin-rl have.

    It was not started. Raises ConfigError for an open address without a token.
    """
    inference = receiver.run.config.inference
    settings, keys = inference.server, Keys.from_environment(inference)
    check_reach(keys, host)
    handlers: dict[Any, Any] = dict.fromkeys((ApiError, InputError, StorageError), _refused)
    routes = TrajectoryRoutes(receiver, settings).routes()
    application = Starlette(routes=routes, exception_handlers=handlers)
    origins = Origins(settings, host, has_token=keys.api is not None)
    guard = Guard(application, config=settings, keys=keys, origins=lambda: origins)
    return http_server(basic_as_bearer(guard), settings, host)


def serve_trajectories(
    receiver: Receiver, host: str, port: int, ready: Callable[[str], None]
) -> None:
    """Answer until a signal; `ready` gets the address. Raises ConfigError for the address."""
    run_server(trajectory_server(receiver, host), host, port, ready)

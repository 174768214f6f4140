"""Routes of the admin: new weights, adapters, pause, drain, resume, status.

Owns what they accept, how each answers, and how refusals are worded; all of them ask for the admin
token. Adapters are loaded by vLLM's and by SGLang's names. Leaves out how weights are loaded,
proven and switched (`weight_updates`, `adapters`), and who may call (`auth`).
"""

import asyncio
import dataclasses
import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from marin_rl.errors import InferenceError, MarinRLError, StalePolicy
from marin_rl.inference.adapters import AdapterGone
from marin_rl.inference.client.protocol import (
    LOAD_ADAPTER_ROUTE,
    SGLANG_LOAD_ADAPTER_ROUTE,
    SGLANG_UNLOAD_ADAPTER_ROUTE,
    UNLOAD_ADAPTER_ROUTE,
    UPDATE_WEIGHTS_ROUTE,
)
from marin_rl.inference.engine import VersionInUse
from marin_rl.serving.api.dialect import json_response
from marin_rl.serving.api.response_models import SGLangAdapters
from marin_rl.serving.api.routes import ERROR, ApiRoute
from marin_rl.serving.api.service import Service
from marin_rl.serving.http.auth import Endpoint, for_admin
from marin_rl.serving.http.errors import ApiError, B, Body, Version, VersionText, parse
from marin_rl.serving.http.guard import read_body
from marin_rl.serving.weights.checkpoint_loader import (
    Places,
    Source,
    checkpoint,
    folder,
    without_paths,
)
from marin_rl.serving.weights.weight_updates import UpdateRunning

ADMIN = "/admin"
DRAIN_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_MAX_S = 3600.0
POLL_S = 0.01
BODY_BYTES_MAX = 2**16

# A folder or root; the operating system has no name with a NUL in it.
Place = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
# What a name may be is checked by `check_adapter_name`, whose error says more.
Name = Annotated[str, Field(min_length=1, max_length=1024)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class NewWeights(Body):
    """`parameters_digest` is the one that the caller expects; an adapter's includes its base."""

    weight_version: Version | VersionText | None = None
    parameters_digest: Digest | None = None

    @property
    def version(self) -> int | None:
        return None if self.weight_version is None else int(self.weight_version)


class UpdateWeightsBody(NewWeights):
    """POST /admin/update_weights_from_disk, and SGLang's name for it.

    Either a Hugging Face folder (`model_path`), or a committed checkpoint of a run (`root`,
    `run_id`, and its `round`, null for the latest). `weight_version` null: the round, else the next
    one. `policy_digest`, next to `parameters_digest`, identifies the policy that these parameters
    are: an adapter that was merged into its base. With `recompute_kv_cache` the cache of running
    requests is computed again.
    """

    model_path: Place | None = None
    root: Place | None = None
    run_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    round: Version | None = None
    policy_digest: Digest | None = None
    recompute_kv_cache: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> "UpdateWeightsBody":
        if (self.model_path is None) == (self.run_id is None):
            raise ValueError("model_path: give either model_path, or root and run_id")
        if (self.root is None) != (self.run_id is None):
            raise ValueError("run_id: root and run_id come together")
        if self.round is not None and self.run_id is None:
            raise ValueError("round: only a run has rounds; give root and run_id")
        if self.policy_digest and (self.parameters_digest is None or self.model_path is None):
            raise ValueError("policy_digest: goes with model_path and its parameters_digest")
        return self

    @property
    def source(self) -> Source:
        if self.model_path is not None:
            return folder(self.model_path, self.parameters_digest, self.policy_digest)
        assert self.root is not None
        assert self.run_id is not None
        return checkpoint(self.root, self.run_id, self.round, self.parameters_digest)


class DrainBody(Body):
    """POST /admin/drain."""

    timeout_s: float = Field(default=DRAIN_TIMEOUT_S, ge=0, le=DRAIN_TIMEOUT_MAX_S)


class NewAdapter(NewWeights):
    """Name of an adapter, and its PEFT folder. The version and the digest are ours."""

    lora_name: Name
    lora_path: Place


class LoadAdapterBody(NewAdapter):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] | None = None


class SGLangLoadAdapterBody(NewAdapter):
    """POST /load_lora_adapter, as SGLang has it. No adapter is ever evicted: all are pinned."""

    pinned: bool = False


class SGLangUnloadAdapterBody(Body):
    """POST /unload_lora_adapter, as SGLang has it."""

    lora_name: Name


class UnloadAdapterBody(SGLangUnloadAdapterBody):
    """POST /v1/unload_lora_adapter, as vLLM has it; the number is not used."""

    lora_int_id: int | None = None


def _post(path: str, endpoint: Endpoint, **details: Any) -> ApiRoute:
    return ApiRoute(path, for_admin(endpoint), methods=["POST"], **details)


async def _read(kind: type[B], request: Request) -> B:
    data = await read_body(request.scope, request.receive, BODY_BYTES_MAX)
    return parse(kind, data or b"{}")


def admin_routes(service: Service) -> list[ApiRoute]:
    """Return the routes that change the server or tell its state."""

    async def update_weights(request: Request) -> Response:
        """New weights from disk: read, proven, switched to."""
        body = await _read(UpdateWeightsBody, request)
        await asyncio.to_thread(_update, service, body)
        done = {"success": True, "message": f"now serving {service.model_id}"}
        return json_response(done | {"model": service.model_id} | status(service))

    async def pause(request: Request) -> Response:
        """No chunk runs until the engine is resumed."""
        _check_goes_on(service)
        await asyncio.to_thread(service.engine.pause)
        return json_response(status(service))

    async def resume(request: Request) -> Response:
        """Go on after a pause or a drain."""
        _check_goes_on(service)
        service.engine.resume()
        service.draining = False
        return json_response(status(service))

    async def drain(request: Request) -> Response:
        """Take no new requests, and wait for the running ones."""
        body = await _read(DrainBody, request)
        await _drain(service, body.timeout_s)
        return json_response({"drained": service.running == 0} | status(service))

    async def get_status(request: Request) -> Response:
        """Return the served weights and the current load."""
        return json_response(status(service))

    may_be_empty = {"requestBody": {"required": False}}
    return [
        _post(f"{ADMIN}{UPDATE_WEIGHTS_ROUTE}", update_weights, request=UpdateWeightsBody),
        _post(UPDATE_WEIGHTS_ROUTE, update_weights, request=UpdateWeightsBody),
        _post(f"{ADMIN}/pause", pause),
        _post(f"{ADMIN}/resume", resume),
        _post(f"{ADMIN}/drain", drain, request=DrainBody, openapi_extra=may_be_empty),
        ApiRoute(f"{ADMIN}/status", for_admin(get_status)),
    ]


def _check_goes_on(service: Service) -> None:
    if service.stopping:
        raise ApiError(409, "the server is shutting down: start another", code="stopping")


async def _drain(service: Service, timeout_s: float) -> None:
    if service.engine.paused:
        message = "the engine is paused, so no request would end: resume first"
        raise ApiError(409, message, code="paused")
    service.draining = True
    for _ in range(math.ceil(timeout_s / POLL_S)):
        if service.running == 0:
            break
        await asyncio.sleep(POLL_S)


def status(service: Service) -> dict[str, Any]:
    """Return the served weights and the load: `running` requests, `queued` samples."""
    engine, updater = service.engine, service.updater
    policy, last = engine.policy, updater.last
    last_update: dict[str, Any] | None = None
    if last is not None:
        last_update = dataclasses.asdict(last)
        last_update["outcome"] = "refused" if last.refused else "switched"
        last_update["seconds_ago"] = max(0.0, time.time() - last.ended_at)
    return {
        "model": service.model_id,
        "weight_version": policy.weight_version,
        "parameters_digest": policy.parameters_digest,
        "paused": engine.paused,
        "draining": service.draining,
        "running": service.running,
        "queued": engine.queued,
        "updating": updater.busy,
        "transfers": updater.transfers,
        "failures": updater.failures,
        "adapters": service.adapters.names,
        "last_update": last_update,
    }


def _update(service: Service, body: UpdateWeightsBody) -> None:
    """Load what is asked for. ApiError says why the old weights go on."""
    source = Places(service.limits.update_roots).only(body.source)
    try:
        again = body.recompute_kv_cache
        service.updater.load(source, body.version, recompute_kv_cache=again)
    except MarinRLError as error:
        message = f"the old weights go on: {source.error_text(error)}"
        if isinstance(error, UpdateRunning | VersionInUse):
            refusal = ApiError(409, message, code="busy", retry_s=1)
        elif isinstance(error, StalePolicy):
            refusal = ApiError(409, message, code="digest_mismatch")
        elif isinstance(error, InferenceError):
            refusal = ApiError(409, message, code="canary_mismatch")
        elif error.transient:
            refusal = ApiError(503, message, code="storage_unavailable", retry_s=5)
        else:
            refusal = ApiError(400, message, code="weights_refused")
        raise refusal from None


def adapter_routes(service: Service) -> list[ApiRoute]:
    def success(body: Any, done: str) -> Response:
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' {done} successfully.")

    def loaded(body: Any, done: str) -> Response:
        names = {name: name for name in service.adapters.names}
        return json_response({"success": True, "loaded_adapters": names})

    def route(path: str, kind: type[Body], who: str, answer: Any, **described: Any) -> ApiRoute:
        loads = issubclass(kind, NewAdapter)

        async def endpoint(request: Request) -> Response:
            body = await _read(kind, request)
            await asyncio.to_thread(_change_adapters, service, body)
            return answer(body, "added" if loads else "removed")

        summary = f"Unload an adapter; requests that were sent before end on it ({who})."
        if loads:
            summary = f"Load an adapter from a PEFT folder under a name ({who})."
        return _post(path, endpoint, request=kind, summary=summary, **described)

    # By `response_class` errors would be described as text too.
    words = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    text: dict[str, Any] = {"responses": ERROR | words}
    names: dict[str, Any] = {"response": SGLangAdapters}
    return [
        route(LOAD_ADAPTER_ROUTE, LoadAdapterBody, "vLLM", success, **text),
        route(UNLOAD_ADAPTER_ROUTE, UnloadAdapterBody, "vLLM", success, **text),
        route(SGLANG_LOAD_ADAPTER_ROUTE, SGLangLoadAdapterBody, "SGLang", loaded, **names),
        route(SGLANG_UNLOAD_ADAPTER_ROUTE, SGLangUnloadAdapterBody, "SGLang", loaded, **names),
    ]


def _change_adapters(service: Service, body: Body) -> None:
    """Load or unload. ApiError 404 for an unknown name, 409 for a wrong promise or a wait."""
    try:
        if isinstance(body, NewAdapter):
            place = body.lora_path
            Places(service.limits.update_roots).check(place)
            service.adapters.load(
                body.lora_name,
                str(Path(place.removeprefix("file://").removeprefix("local://"))),
                in_place=isinstance(body, LoadAdapterBody) and body.load_inplace,
                version=body.version,
                promised=body.parameters_digest,
            )
        else:
            assert isinstance(body, SGLangUnloadAdapterBody)
            service.adapters.unload(body.lora_name)
    except MarinRLError as error:
        message = str(error)
        if isinstance(body, NewAdapter):
            message = without_paths(message, body.lora_path)
        if isinstance(error, AdapterGone):
            refusal = ApiError(404, message, code="model_not_found", param="lora_name")
        elif isinstance(error, UpdateRunning):
            refusal = ApiError(409, message, code="busy", retry_s=1)
        elif isinstance(error, StalePolicy):
            refusal = ApiError(409, message, code="digest_mismatch")
        else:
            refusal = ApiError(400, message, code="adapter_refused")
        raise refusal from None

"""The admin routes: new weights from disk, pause, drain, resume, and what is going on.

Owns what they accept and how refusals are worded; all of them ask for the admin token. Leaves out
how weights are loaded, proven and switched (`weight_updates`), and who may call (`auth`).
"""

import asyncio
import dataclasses
import math
import time
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from marin_rl.errors import InferenceError, MarinRLError, StalePolicy
from marin_rl.inference.client.protocol import UPDATE_WEIGHTS_ROUTE
from marin_rl.inference.engine import VersionInUse
from marin_rl.serving.api.openapi import ApiRoute
from marin_rl.serving.api.service import Service, json_response
from marin_rl.serving.http.auth import Endpoint, for_admin
from marin_rl.serving.http.errors import ApiError, B, Body, Version, VersionText, parse
from marin_rl.serving.http.guard import read_body
from marin_rl.serving.weights.checkpoint_loader import Places, Source, checkpoint, folder
from marin_rl.serving.weights.weight_updates import Update, UpdateRunning

ADMIN = "/admin"
DRAIN_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_MAX_S = 3600.0
POLL_S = 0.01
BODY_BYTES_MAX = 2**16

# A folder or root; the operating system has no name with a NUL in it.
Place = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class UpdateWeightsBody(Body):
    """POST /admin/update_weights_from_disk, and SGLang's name for it.

    Either a Hugging Face folder (`model_path`), or a committed checkpoint of a run (`root`,
    `run_id`, and its `round`, null for the latest). `weight_version` null: the round, else the next
    one. `parameters_digest` is what the caller was promised. `policy_digest`, with it, identifies
    the policy that these parameters are: an adapter that was merged into its base. With
    `recompute_kv_cache` the cache of running requests is computed again.
    """

    model_path: Place | None = None
    root: Place | None = None
    run_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    round: Version | None = None
    weight_version: Version | VersionText | None = None
    parameters_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    policy_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
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
        """The place of the weights."""
        if self.model_path is not None:
            return folder(self.model_path, self.parameters_digest, self.policy_digest)
        assert self.root is not None
        assert self.run_id is not None
        return checkpoint(self.root, self.run_id, self.round, self.parameters_digest)

    @property
    def version(self) -> int | None:
        """The version that is asked for, as a number."""
        return None if self.weight_version is None else int(self.weight_version)


class DrainBody(Body):
    """POST /admin/drain."""

    timeout_s: float = Field(default=DRAIN_TIMEOUT_S, ge=0, le=DRAIN_TIMEOUT_MAX_S)


def admin_routes(service: Service) -> list[ApiRoute]:
    """Every route that changes the server or tells how it is: for the admin alone."""

    async def update_weights(request: Request) -> Response:
        """New weights from disk: read, proven, switched to."""
        body = await admin_body(UpdateWeightsBody, request)
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
        body = await admin_body(DrainBody, request)
        drained = await _drain(service, body.timeout_s)
        return json_response({"drained": drained} | status(service))

    async def get_status(request: Request) -> Response:
        """Return what is served and the current load."""
        return json_response(status(service))

    may_be_empty = {"requestBody": {"required": False}}

    return [
        admin_post(f"{ADMIN}{UPDATE_WEIGHTS_ROUTE}", update_weights, UpdateWeightsBody),
        admin_post(UPDATE_WEIGHTS_ROUTE, update_weights, UpdateWeightsBody),
        admin_post(f"{ADMIN}/pause", pause),
        admin_post(f"{ADMIN}/resume", resume),
        admin_post(f"{ADMIN}/drain", drain, DrainBody, openapi_extra=may_be_empty),
        ApiRoute(f"{ADMIN}/status", for_admin(get_status)),
    ]


def admin_post(
    path: str, endpoint: Endpoint, request: type[BaseModel] | None = None, **details: Any
) -> ApiRoute:
    """A POST route for the admin alone; `details` are those of `ApiRoute`."""
    return ApiRoute(path, for_admin(endpoint), methods=["POST"], request=request, **details)


async def admin_body(kind: type[B], request: Request) -> B:
    """Read a short body; none stands for an empty object. Raises ApiError as `parse` does."""
    data = await read_body(request.scope, request.receive, BODY_BYTES_MAX)
    return parse(kind, data or b"{}")


def _check_goes_on(service: Service) -> None:
    """ApiError 409 where the server ends: its last requests must, too."""
    if service.stopping:
        raise ApiError(409, "the server is shutting down: start another", code="stopping")


def status(service: Service) -> dict[str, Any]:
    """Return what is served and the load: `running` requests, samples that are `queued`."""
    engine, updater = service.engine, service.updater
    policy, stats = engine.policy, updater.stats
    return {
        "model": service.model_id,
        "weight_version": policy.weight_version,
        "parameters_digest": policy.parameters_digest,
        "paused": engine.paused,
        "draining": service.draining,
        "running": service.running,
        "queued": engine.queued,
        "updating": updater.busy,
        "transfers": stats.transfers,
        "failures": stats.failures,
        "adapters": service.adapters.names,
        "last_update": None if stats.last is None else _update_facts(stats.last),
    }


def _update_facts(update: Update) -> dict[str, Any]:
    outcome = "refused" if update.refused else "switched"
    ago_s = max(0.0, time.time() - update.ended_at)
    return dataclasses.asdict(update) | {"outcome": outcome, "seconds_ago": ago_s}


def _update(service: Service, body: UpdateWeightsBody) -> None:
    """Load what is asked for. ApiError says why the old weights go on."""
    source = Places(service.limits.update_roots).only(body.source)
    try:
        again = body.recompute_kv_cache
        service.updater.load(source, body.version, recompute_kv_cache=again)
    except MarinRLError as error:
        raise _refusal(error, f"the old weights go on: {source.error_text(error)}") from None


def _refusal(error: MarinRLError, message: str) -> ApiError:
    """409 for weights that are none of what was promised, 503 for what may pass, else 400."""
    if isinstance(error, UpdateRunning | VersionInUse):
        return ApiError(409, message, code="busy", retry_s=1)
    if isinstance(error, StalePolicy):
        return ApiError(409, message, code="digest_mismatch")
    if isinstance(error, InferenceError):
        return ApiError(409, message, code="canary_mismatch")
    if error.transient:
        return ApiError(503, message, code="storage_unavailable", retry_s=5)
    return ApiError(400, message, code="weights_refused")


async def _drain(service: Service, timeout_s: float) -> bool:
    """Take no new requests, and wait for the running ones; whether all of them ended."""
    if service.engine.paused:
        raise ApiError(
            409, "the engine is paused, so no request would end: resume first", code="paused"
        )
    service.draining = True
    for _ in range(math.ceil(timeout_s / POLL_S)):
        if service.running == 0:
            break
        await asyncio.sleep(POLL_S)
    return service.running == 0

"""Routes that load and unload adapters while the server runs, by vLLM's and by SGLang's names.

Owns what they accept, how each answers, and how refusals are worded. All of them ask for the admin
token, and read only below the roots that weights may be read from. Leaves out what loading does
(`marin_rl.serving.weights.adapters`).
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from marin_rl.errors import MarinRLError, StalePolicy
from marin_rl.inference.adapters import AdapterGone
from marin_rl.inference.client.protocol import (
    LOAD_ADAPTER_ROUTE,
    SGLANG_LOAD_ADAPTER_ROUTE,
    SGLANG_UNLOAD_ADAPTER_ROUTE,
    UNLOAD_ADAPTER_ROUTE,
)
from marin_rl.serving.api.admin import Place, admin_body, admin_post
from marin_rl.serving.api.openapi import ERROR, ApiRoute, SGLangAdapters
from marin_rl.serving.api.service import Service, json_response
from marin_rl.serving.http.errors import ApiError, Body, Version, VersionText
from marin_rl.serving.weights.checkpoint_loader import Places, without_paths
from marin_rl.serving.weights.weight_updates import UpdateRunning

# What a name may be is checked by `check_adapter_name`, whose error says more.
Name = Annotated[str, Field(min_length=1, max_length=1024)]


class NewAdapter(Body):
    """Name of an adapter, and its PEFT folder.

    `weight_version` and `parameters_digest` are ours: the version of the policy, and the digest of
    base and adapter together that the caller was promised.
    """

    lora_name: Name
    lora_path: Place
    weight_version: Version | VersionText | None = None
    parameters_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")

    @property
    def version(self) -> int | None:
        """The version of the policy, as a number."""
        return None if self.weight_version is None else int(self.weight_version)


class LoadAdapterBody(NewAdapter):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] | None = None


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter, as vLLM has it; the number is not used."""

    lora_name: Name
    lora_int_id: int | None = None


class SGLangLoadAdapterBody(NewAdapter):
    """POST /load_lora_adapter, as SGLang has it. No adapter is ever evicted: all are pinned."""

    pinned: bool = False


class SGLangUnloadAdapterBody(Body):
    """POST /unload_lora_adapter, as SGLang has it."""

    lora_name: Name


def adapter_routes(service: Service) -> list[ApiRoute]:
    """The routes that load and unload adapters: for the admin alone."""

    async def load(request: Request) -> Response:
        """Load an adapter from a PEFT folder under a name (vLLM)."""
        body = await admin_body(LoadAdapterBody, request)
        await asyncio.to_thread(_load, service, body, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        """Unload an adapter; requests that were sent before end on it (vLLM)."""
        body = await admin_body(UnloadAdapterBody, request)
        await asyncio.to_thread(_unload, service, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def sglang_load(request: Request) -> Response:
        """Load an adapter from a PEFT folder under a name (SGLang)."""
        body = await admin_body(SGLangLoadAdapterBody, request)
        await asyncio.to_thread(_load, service, body, in_place=False)
        return _loaded(service)

    async def sglang_unload(request: Request) -> Response:
        """Unload an adapter; requests that were sent before end on it (SGLang)."""
        body = await admin_body(SGLangUnloadAdapterBody, request)
        await asyncio.to_thread(_unload, service, body.lora_name)
        return _loaded(service)

    # By `response_class` errors would be described as text too.
    success = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    text: dict[str, Any] = {"responses": ERROR | success}
    return [
        admin_post(LOAD_ADAPTER_ROUTE, load, LoadAdapterBody, **text),
        admin_post(UNLOAD_ADAPTER_ROUTE, unload, UnloadAdapterBody, **text),
        admin_post(
            SGLANG_LOAD_ADAPTER_ROUTE, sglang_load, SGLangLoadAdapterBody, response=SGLangAdapters
        ),
        admin_post(
            SGLANG_UNLOAD_ADAPTER_ROUTE,
            sglang_unload,
            SGLangUnloadAdapterBody,
            response=SGLangAdapters,
        ),
    ]


def _loaded(service: Service) -> Response:
    """SGLang's answer. It gives each adapter's path; here a name stands for it."""
    names = {name: name for name in service.adapters.names}
    return json_response({"success": True, "loaded_adapters": names})


def _load(service: Service, body: NewAdapter, *, in_place: bool) -> None:
    place = body.lora_path
    try:
        Places(service.limits.update_roots).check(place)
        folder = place.removeprefix("file://").removeprefix("local://")
        service.adapters.load_folder(
            body.lora_name,
            str(Path(folder)),
            in_place=in_place,
            version=body.version,
            promised=body.parameters_digest,
        )
    except MarinRLError as error:
        raise _refusal(error, without_paths(str(error), place)) from None


def _unload(service: Service, name: str) -> None:
    try:
        service.adapters.unload(name)
    except MarinRLError as error:
        raise _refusal(error, str(error)) from None


def _refusal(error: MarinRLError, message: str) -> ApiError:
    """404 for an unknown name, 409 for what was not promised or must wait, else 400."""
    if isinstance(error, AdapterGone):
        return ApiError(404, message, code="model_not_found", param="lora_name")
    if isinstance(error, UpdateRunning):
        return ApiError(409, message, code="busy", retry_s=1)
    if isinstance(error, StalePolicy):
        return ApiError(409, message, code="digest_mismatch")
    return ApiError(400, message, code="adapter_refused")

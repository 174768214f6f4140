"""The ASGI application: routes behind their guard, and the API description.

Owns which route a request goes to, and the routes about the server itself: health, models, metrics,
`/openapi.json`. Leaves out what is checked before (`guard`) and the routes of the API (`api`).
"""

import asyncio
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from marin_rl.config import ServerConfig
from marin_rl.inference.client.protocol import MODELS_ROUTE
from marin_rl.serving.api.adapter_routes import adapter_routes
from marin_rl.serving.api.admin import admin_routes
from marin_rl.serving.api.chat import chat_routes
from marin_rl.serving.api.completions import completions_routes
from marin_rl.serving.api.openapi import API_ROUTE, ERROR, ApiRoute, Model, Models, Status, describe
from marin_rl.serving.api.service import Service, json_response
from marin_rl.serving.api.sglang import sglang_routes
from marin_rl.serving.api.token_routes import tokens_routes
from marin_rl.serving.http.access_log import AccessLog, RequestRecord
from marin_rl.serving.http.addresses import Origins
from marin_rl.serving.http.auth import Keys
from marin_rl.serving.http.guard import Guard
from marin_rl.serving.http.prometheus import CONTENT_TYPE, METRICS_ROUTE, Telemetry


class Application:
    """The routes of one server; `guarded` is the ASGI application.

    `origins` follows the address that the server binds; `log` is None until requests are logged.
    """

    def __init__(
        self,
        service: Service,
        config: ServerConfig,
        keys: Keys,
        origins: Origins,
        telemetry: Telemetry,
    ) -> None:
        service.limits = config
        self.origins = origins
        self.log: AccessLog | None = None
        self._telemetry = telemetry
        self.routes = (
            *server_routes(service),
            ApiRoute(METRICS_ROUTE, self._metrics, response_class=PlainTextResponse),
            ApiRoute(API_ROUTE, self._openapi),
            *chat_routes(service),
            *completions_routes(service),
            *tokens_routes(service),
            *sglang_routes(service),
            *admin_routes(service),
            *adapter_routes(service),
        )
        self._exact = {route.path: route for route in self.routes if not route.param_convertors}
        self._router = Router(list(self.routes))
        self.guarded = Guard(
            self._dispatch,
            config=config,
            keys=keys,
            origins=lambda: self.origins,
            on_start=telemetry.request_started,
            on_end=self._on_end,
        )

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route of a request."""
        # a dictionary first: Starlette would match every route's regular expression in turn
        route = self._exact.get(scope["path"])
        if route is not None and scope["method"] in (route.methods or ()):
            scope["route"], scope["path_params"] = route, {}
            await route.app(scope, receive, send)
        else:
            scope["app"] = self  # which makes Starlette raise its refusals
            await self._router(scope, receive, send)

    async def _metrics(self, request: Request) -> Response:
        """Return the server's metrics in the Prometheus text format."""
        data = await asyncio.to_thread(self._telemetry.exposition)
        return Response(data, media_type=CONTENT_TYPE)

    async def _openapi(self, request: Request) -> Response:
        """Return this description."""
        return Response(self._description, media_type="application/json")

    @cached_property
    def _description(self) -> bytes:
        return bytes(json_response(describe(self.routes)).body)

    def _on_end(self, record: RequestRecord) -> None:
        self._telemetry.request_ended(record)
        if self.log is not None:
            self.log.add(record)


def server_routes(service: Service) -> list[ApiRoute]:
    """Routes of health and models."""

    def model_card(model: str) -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": service.created,
            "owned_by": "marin-rl",
            "root": service.name,
            "parent": service.parent_of(model),
            "max_model_len": service.engine.context_length,
        }

    async def healthz(request: Request) -> Response:
        """Return 200 while the process answers."""
        return json_response({"status": "ok"})

    async def readyz(request: Request) -> Response:
        """Return 200 while new work is taken, else 503."""
        ready = service.engine.alive and not (service.draining or service.stopping)
        return json_response({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def models(request: Request) -> Response:
        """List the loaded weights under their own id, and the name that always means them."""
        return json_response({"object": "list", "data": [model_card(m) for m in service.known]})

    async def model(request: Request) -> Response:
        """Return one served model."""
        name = request.path_params["model"]
        service.check_model(name)
        return json_response(model_card(name))

    not_ready = ERROR | {503: {"model": Status, "description": "not ready"}}
    return [
        ApiRoute("/healthz", healthz, response=Status),
        ApiRoute("/health", healthz, response=Status),  # vLLM's and SGLang's name
        ApiRoute("/readyz", readyz, response=Status, responses=not_ready),
        ApiRoute(MODELS_ROUTE, models, response=Models),
        ApiRoute(MODELS_ROUTE + "/{model:path}", model, response=Model),
    ]

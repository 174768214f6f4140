"""The table of all routes, metrics and the API description included.

Leaves out the checks before any route (`guard`) and what routes do (`api`).
"""

import asyncio
from functools import cache

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from marin_rl.serving.api.admin import adapter_routes, admin_routes
from marin_rl.serving.api.completions import Chat, ChatTokens, Completions
from marin_rl.serving.api.dialect import Dialect, dumps
from marin_rl.serving.api.generate import IdsToIds, SGLang
from marin_rl.serving.api.request_handler import SamplingEndpoint
from marin_rl.serving.api.routes import (
    ERROR,
    STREAM,
    ApiRoute,
    describe,
    server_routes,
    tokenizer_routes,
)
from marin_rl.serving.api.service import Service
from marin_rl.serving.http.prometheus import CONTENT_TYPE, METRICS_ROUTE, Telemetry

DIALECTS: tuple[type[Dialect], ...] = (Chat, ChatTokens, Completions, IdsToIds, SGLang)


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
            responses=ERROR | STREAM if dialect.may_stream else ERROR,
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

"""The ASGI application: routes behind their guard, and the API description.

Leaves out the checks before any route (`guard`) and what routes do (`api`).
"""

import asyncio
from functools import cached_property

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from marin_rl.config import ServerConfig
from marin_rl.serving.api.admin import adapter_routes, admin_routes
from marin_rl.serving.api.chat import Chat, ChatTokens
from marin_rl.serving.api.completions import Completions
from marin_rl.serving.api.dialect import Dialect
from marin_rl.serving.api.generate import IdsToIds, SGLang
from marin_rl.serving.api.request_handler import SamplingEndpoint
from marin_rl.serving.api.responses import dumps
from marin_rl.serving.api.routes import (
    ERROR,
    STREAM,
    ApiRoute,
    describe,
    server_routes,
    tokenizer_routes,
)
from marin_rl.serving.api.service import Service
from marin_rl.serving.http.access_log import AccessLog, RequestRecord
from marin_rl.serving.http.auth import Keys, Origins
from marin_rl.serving.http.guard import Guard
from marin_rl.serving.http.prometheus import CONTENT_TYPE, METRICS_ROUTE, Telemetry

DIALECTS: tuple[type[Dialect], ...] = (Chat, ChatTokens, Completions, IdsToIds, SGLang)


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
            ApiRoute("/openapi.json", self._openapi),
            *(
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
            ),
            *tokenizer_routes(service),
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
        return dumps(describe(self.routes))

    def _on_end(self, record: RequestRecord) -> None:
        self._telemetry.request_ended(record)
        if self.log is not None:
            self.log.add(record)

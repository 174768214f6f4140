"""The application: every route behind the gate, and the schema that describes them.

Owns the assembly, and which route a request goes to. Who may call is the `middleware`'s,
what each route does its own module's.
"""

from collections.abc import Sequence
from functools import cache

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from marin_rl.serving.api.admin import admin_routes
from marin_rl.serving.api.catalog import catalog_routes
from marin_rl.serving.api.chat import chat_routes
from marin_rl.serving.api.completions import completions_routes
from marin_rl.serving.api.openapi import SCHEMA_ROUTE, describe
from marin_rl.serving.api.service import Service, json_response
from marin_rl.serving.api.token_routes import tokens_routes
from marin_rl.serving.http.access_log import record_of
from marin_rl.serving.http.auth import as_response
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.middleware import Middleware

ROUTES = (catalog_routes, chat_routes, completions_routes, tokens_routes, admin_routes)


class Application:
    """Routes behind a gate, in ASGI's terms: only the health routes are open without a token."""

    def __init__(self, routes: Sequence[Route], gate: Middleware) -> None:
        self.routes = tuple(routes)
        self._exact = {route.path: route for route in routes if not route.param_convertors}
        self._router = Router(list(routes))
        self._gated = gate.around(self._dispatch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._gated(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """To a route, or to its refusal, in the shape of all errors."""
        try:
            await self._routed(scope, receive, send)
        except (ApiError, HTTPException) as error:
            if record_of(scope).status:  # too late to answer otherwise
                raise
            await as_response(_told(error, scope))(scope, receive, send)

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Most paths are what they say; Starlette knows the rest, and how to refuse."""
        route = self._exact.get(scope["path"])
        if route is not None and scope["method"] in (route.methods or ()):
            scope["route"], scope["path_params"] = route, {}
            await route.app(scope, receive, send)
        else:
            scope["app"] = self  # which makes Starlette raise its refusals
            await self._router(scope, receive, send)


def _told(error: ApiError | HTTPException, scope: Scope) -> ApiError:
    """Unknown routes and methods as our own errors; the path is the client's own."""
    if isinstance(error, ApiError):
        return error
    told = f"{scope['method'][:16]} {scope['path'][:200]}: {error.detail}"
    return ApiError(error.status_code, told, headers=dict(error.headers or {}))


def create_app(service: Service, gate: Middleware) -> Application:
    """All routes, and their description."""
    service.limits = gate.config

    @cache
    def described() -> bytes:
        return bytes(json_response(describe(app.routes)).body)

    async def openapi(request: Request) -> Response:
        """This description."""
        return Response(described(), media_type="application/json")

    routes = [route for made_by in ROUTES for route in made_by(service)]
    app = Application([*routes, *gate.routes, Route(SCHEMA_ROUTE, openapi)], gate)
    return app

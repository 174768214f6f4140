"""`marin-rl view`: the page of a run on this machine, which follows a running run.

Read-only and on loopback only; other machines need a tunnel. Host and Origin are checked, so that
no other page can read a run through a browser. The data has an ETag; while nothing new is
committed, a request costs a listing.
"""

import hashlib
import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import orjson
import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, DispatchFunction, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from marin_rl.config import ServerConfig
from marin_rl.errors import ConfigError, MarinRLError
from marin_rl.pages.document import RunPage, live_html, policy, scripts
from marin_rl.serving.http.auth import Origins, is_loopback, run_server
from marin_rl.serving.http.errors import ApiError

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
HEADERS = {
    "content-security-policy": policy("'self'", connect="'self'") + "; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Latest:
    """The newest data of a page and its ETag, made at most every LOOK_EVERY_S seconds."""

    def __init__(self, page: RunPage) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._made = -LOOK_EVERY_S
        self._body, self._tag = b"", ""

    def get(self) -> tuple[bytes, str]:
        """(JSON, ETag). Raises what reading a run raises."""
        with self._lock:
            if time.monotonic() - self._made >= LOOK_EVERY_S:
                made = orjson.dumps(self._page.page())
                # Without the time it was made, which changes every time.
                content = re.sub(rb'"made_at":"[^"]*"', b"", made)
                tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                if tag != self._tag:
                    self._body, self._tag = made, tag
                self._made = time.monotonic()
            return self._body, self._tag


def _ours_alone(host: str) -> DispatchFunction:
    """Middleware that refuses requests to other hosts than this machine, or of other pages."""
    origins = Origins(ServerConfig(), host, has_token=False)

    async def dispatch(request: Request, answer: RequestResponseEndpoint) -> Response:
        headers = defaultdict[bytes, list[bytes]](list)
        for name, value in request.headers.raw:
            headers[name].append(value)
        try:
            origins.check(headers)
        except ApiError:
            return PlainTextResponse("this page is for this machine only", 403)
        return await answer(request)

    return dispatch


def view_app(page: RunPage, run_id: str, host: str = "127.0.0.1") -> ASGIApp:
    """The application: the page, its scripts and its data. GET and HEAD only."""
    latest = Latest(page)
    texts = {script.name: script.text for script in scripts()}

    async def index(_: Request) -> Response:
        return HTMLResponse(live_html(run_id), headers=HEADERS)

    async def asset(request: Request) -> Response:
        text = texts.get(request.path_params["name"])
        if text is None:
            return PlainTextResponse("no such script", 404, headers=HEADERS)
        return Response(text, media_type="text/javascript", headers=HEADERS)

    async def data(request: Request) -> Response:
        try:
            body, tag = await to_thread.run_sync(latest.get)
        except MarinRLError as error:
            _log.warning("the run cannot be read: %s", error)
            return PlainTextResponse(str(error), 503, headers=HEADERS)
        headers = HEADERS | {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    routes = [Route("/", index), Route("/assets/{name}", asset), Route("/data.json", data)]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, _ours_alone(host))])


def serve_view(
    page: RunPage, run_id: str, host: str, port: int, on_start: Callable[[str], None]
) -> None:
    """Serve on loopback until interrupted; `on_start` gets the URL. Raises ConfigError."""
    if not is_loopback(host):
        raise ConfigError(
            f"view listens on this machine only, found --host {host}: leave it at 127.0.0.1 and "
            f"bring a tunnel, such as `ssh -L {port}:127.0.0.1:{port} MACHINE`"
        )
    app = view_app(page, run_id, host)
    # without a log_config, which would remove the log handlers of this process
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, http="h11", lifespan="off"
    )
    run_server(uvicorn.Server(config), host, port, lambda url: on_start(f"{url}/"))

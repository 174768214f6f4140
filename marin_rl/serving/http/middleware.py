"""Everything that stands between a socket and a route, put together for one server.

Owns the order of the middlewares and the route of the metrics. What each of them does is in
`access_log`, `auth`, `origins`, `limits` and `prometheus`.
"""

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from marin_rl.config import ServerConfig
from marin_rl.serving.http.access_log import AccessLog, RequestLog, RequestRecord
from marin_rl.serving.http.auth import Guard, Keys
from marin_rl.serving.http.origins import Origins
from marin_rl.serving.http.prometheus import CONTENT_TYPE, METRICS_ROUTE, Telemetry


@dataclass(slots=True, kw_only=True)
class Middleware:
    """Middlewares and routes that `create_app` mounts. `origins` changes when the server binds."""

    config: ServerConfig
    keys: Keys
    origins: Origins
    telemetry: Telemetry
    log: AccessLog | None = None

    def around(self, app: ASGIApp) -> RequestLog:
        """An application whose every request passes request log, guard and limits."""
        guard = Guard(app, config=self.config, keys=self.keys, origins=self._origins)
        return RequestLog(  # outermost: it sees what the guard refuses too
            guard,
            on_start=self.telemetry.request_started,
            on_end=self._on_end,
            bodies=self.config.log_prompts,
        )

    @property
    def routes(self) -> list[Route]:
        """The route of the metrics."""
        return [Route(METRICS_ROUTE, self._metrics)]

    def _origins(self) -> Origins:
        return self.origins

    def _on_end(self, record: RequestRecord) -> None:
        self.telemetry.request_ended(record)
        if self.log is not None:
            self.log.add(record)

    async def _metrics(self, request: Request) -> Response:
        """Return the server's metrics in the Prometheus text format."""
        data = await asyncio.to_thread(self.telemetry.exposition)
        return Response(data, media_type=CONTENT_TYPE)

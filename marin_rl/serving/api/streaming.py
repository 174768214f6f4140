"""Answers that are sent while they are made: server-sent events in OpenAI's chunks.

Owns the framing, sending until the end or until the client leaves, how a stream ends when something
fails, and the endpoint of every route that samples. Leaves out what the chunks hold (`chat`,
`completions`) and which text is certain (`detokenizer`).
"""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from marin_rl.serving.api.request_handler import Prepare, RequestHandler, accept
from marin_rl.serving.api.responses import dumps
from marin_rl.serving.api.service import Service
from marin_rl.serving.http.access_log import internal_error
from marin_rl.serving.http.auth import CLIENT_LEFT
from marin_rl.serving.http.errors import ApiError

DONE = b"data: [DONE]\n\n"

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_log = logging.getLogger(__name__)


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(body) + b"\n\n"


class SamplingEndpoint:
    """The endpoint, in ASGI's terms, of a route that samples.

    A request is read, prepared, submitted, written, sent. What fails before the answer's first
    piece is there has a status of its own; what fails later is the last event but `[DONE]`. A
    client that leaves ends the answer, and the request's slots are free at the next chunk.
    """

    def __init__(self, service: Service, prepare: Prepare) -> None:
        self._service = service
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError for what fails before the answer begins."""
        exchange, data = await accept(self._service, scope, receive)
        try:
            exchange.begin(self._prepare, data)
            del data  # an answer may take minutes, and the body some megabytes
            first = await exchange.reply.read()
            assert first is not None, "an answer has at least one piece"
            if exchange.record.stream:
                await _stream(exchange, first, scope, send)
                return
        finally:
            exchange.close()
        length = str(len(first)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first})


async def _stream(exchange: RequestHandler, first: bytes, scope: Scope, send: Send) -> None:
    """Send what comes for a request as it comes."""
    headers = list(_HEADERS)
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    exchange.record.first_token()
    data: bytes | None = first
    try:
        while data is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await exchange.reply.read()
    except ApiError as error:
        await _end_with(error, scope, send)
    except Exception as error:  # noqa: BLE001 the last one who can tell the client anything
        number = exchange.record.request_id
        _log.error("request %s failed in mid-stream", number, exc_info=error)
        await _end_with(internal_error(number), scope, send)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end_with(error: ApiError, scope: Scope, send: Send) -> None:
    """Send an error as a stream's last event, unless the client has left."""
    scope["state"]["reason"] = error.body["error"]["code"] or f"http_{error.status}"
    if error.status != CLIENT_LEFT:
        data = event(error.body) + DONE
        await send({"type": "http.response.body", "body": data, "more_body": True})

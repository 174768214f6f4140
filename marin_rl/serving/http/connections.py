"""Sockets: limits on their number, and on the time that a request may take to arrive.

uvicorn waits for a request's head for ever, keeps every byte of a head that it is given, and
answers malformed HTTP in its own words. The protocol here closes connections that dawdle, bounds
what their parser keeps, makes room by closing the one that was idle for longest, lets a client read
why its body was not taken, and answers in the shape of all our errors. None of this is an option of
uvicorn's: `timeout_keep_alive` stops at the first byte of a head, `limit_concurrency` refuses new
clients rather than idle ones, and `h11_max_incomplete_event_size` is for its slower parser. So its
protocol classes are overridden, which are private: pyproject.toml bounds its version. Leaves out
everything that a request's head says (`auth`).
"""

import logging
import math
import resource
from asyncio import TimerHandle
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar

import orjson
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from marin_rl.config import ServerConfig
from marin_rl.serving.http.errors import ApiError, new_id

# After a refusal the rest of a body is thrown away for so long, or the client may never see why.
LINGER_S = 2.0
# Descriptors that the process needs for other things than connections.
FILES_RESERVED = 128

# uvicorn writes a line for every malformed request, which is for the metrics to count
_quiet = logging.getLogger(f"{__name__}.uvicorn")  # above no logger of ours
_quiet.setLevel(logging.CRITICAL)


STOP_S = 5  # what clients get to take in their last bytes


@dataclass(slots=True, kw_only=True)
class Connections:
    """The connections of one server. Used from its event loop only.

    `on_refused` gets the reason of each connection closed on purpose, `on_count` their number.
    """

    config: ServerConfig
    on_refused: Callable[[str], None]
    on_count: Callable[[int], None]
    connections_max: int = field(init=False)
    # those that wait for a request's head, longest first
    idle: "dict[BoundedProtocol, None]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = max(1, files_max - FILES_RESERVED)
        self.connections_max = min(self.config.connections_max, room)

    def protocol(self) -> "type[BoundedProtocol]":
        """The protocol class that uvicorn makes an instance of for each connection."""
        return type("BoundProtocol", (BoundedProtocol,), {"shared": self})

    def server_of(self, app: ASGIApp) -> uvicorn.Server:
        """A server of `app` over these connections; it was not started."""
        return uvicorn.Server(
            uvicorn.Config(
                app,
                http=self.protocol(),
                ws="none",
                loop="uvloop",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=STOP_S,
            )
        )


class _Flow(FlowControl):
    """Flow control that stops reading while requests wait behind the one that is being answered.

    uvicorn reads on after every answer, so a client that sends requests faster than they are
    answered could fill the memory with them.

    `unsent` is the number of bytes left to send at the last check since writing was paused.
    """

    def __init__(self, transport: Any, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self.unsent: float | int = math.inf

    def pause_writing(self) -> None:
        """Have the response wait until the client has read what was sent."""
        self.unsent = math.inf
        super().pause_writing()

    def resume_reading(self) -> None:
        """Go on reading, unless requests wait that were read already."""
        if not self._waiting:
            super().resume_reading()


class _Outlet:
    """Transport that uvicorn writes answers to, with an end that the connection controls."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Client:
    """The client of a request, as seen from its connection. Used from the event loop only.

    ASGI would have a task wait, for every request, for a message that the client left.
    """

    __slots__ = ("_on_left", "has_sent_all", "left")

    def __init__(self) -> None:
        self.left = False
        self.has_sent_all = False  # of its request
        self._on_left: Callable[[], None] | None = None

    def when_left(self, call: Callable[[], None] | None) -> None:
        """Set the function called when the client leaves, at once if it has; None for none."""
        self._on_left = call
        if self.left and call is not None:
            call()

    def leave(self) -> None:
        """Note that the client is gone; idempotent."""
        if not self.left:
            self.left = True
            self.when_left(self._on_left)


def client_of(scope: Scope) -> Client:
    """Return the client of a request that came through `BoundedProtocol`."""
    client = scope["extensions"][_EXTENSION]
    assert isinstance(client, Client)
    return client


_EXTENSION = "marin_rl.client"


class BoundedProtocol(HttpToolsProtocol):
    """Connection: at most `header_timeout_s` idle or in the head of a request.

    The parser keeps what is no body until it is complete: request lines, headers, trailers,
    extensions of chunks. So all that comes between two pieces of a body, or before the first, is
    counted, and ends the connection beyond `header_bytes_max`; one read more may be kept.
    """

    shared: ClassVar[Connections]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _quiet
        self._answering: RequestResponseCycle | None = None
        self._parser_bytes = 0
        self._head_begun = False
        self._waiting_since = 0.0
        self._taken_at = 0.0
        self._timer: TimerHandle | None = None
        self._lingering = False
        self._ended = False

    def connection_made(self, transport: Any) -> None:
        """Take the connection, at the expense of the one that is idle for longest if need be."""
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport, self.pipeline)
        self._taken_at = self.loop.time()
        self._outlet = _Outlet(transport, self._end)
        shared = self.shared
        if len(self.connections) > shared.connections_max:
            if not shared.idle:
                self._refuse(503, "too many connections: try again later", "too_many_connections")
                return
            next(iter(shared.idle))._drop("evicted")
        shared.on_count(len(self.connections))
        self._wait_for_head()
        self._later(shared.config.header_timeout_s, self._check_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._ended = True
        if self._timer is not None:  # which would keep a connection's memory until then
            self._timer.cancel()
        self.shared.idle.pop(self, None)
        self._abandon_cycle()
        super().connection_lost(exc)
        self.shared.on_count(len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, but not those after the end."""
        if self._lingering or self._ended:
            return
        self._parser_bytes += len(data)
        super().data_received(data)
        bytes_max = self.shared.config.header_bytes_max
        if self._parser_bytes > bytes_max and not (self._lingering or self._ended):
            message = f"expected a request line and headers of at most {bytes_max} bytes"
            self._refuse(431, message, "headers_too_large")

    def on_message_begin(self) -> None:
        """Note the first byte of a head."""
        self._head_begun = True
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {_EXTENSION: Client()}

    def on_headers_complete(self) -> None:
        """Begin a request, whose body may still be to come."""
        self._parser_bytes, self._head_begun = 0, False
        self.shared.idle.pop(self, None)
        super().on_headers_complete()
        cycle: Any = self.cycle
        cycle.transport = self._outlet
        self.headers = []  # trailers, which may come before anybody looks, are no headers
        assert self.parser is not None, "a connection that is open has a parser"
        if self.parser.should_upgrade():  # to what is not spoken here: what follows is no HTTP
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Pass a piece of a body on."""
        self._parser_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request is complete."""
        self._parser_bytes = 0
        scope: Any = self.scope
        client_of(scope).has_sent_all = True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Wait for the next request; or, where the body was not taken, end the connection.

        Takes the place of uvicorn's, whose timer for idle connections any byte would stop.
        """
        self.server_state.total_requests += 1
        if self._lingering or self.transport.is_closing():
            return
        if self._body_is_left():
            self._linger()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(400, "expected a request in HTTP/1.1", "bad_http")

    def _wait_for_head(self) -> None:
        self._waiting_since = self.loop.time()
        self.shared.idle.pop(self, None)
        self.shared.idle[self] = None

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        """Call once, later: a connection has one timer, and not one for each request."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(after_s, call)

    def _check_head(self) -> None:
        if self.transport.is_closing():  # by uvicorn, which waits for clients that do not read
            self._close()
            return
        timeout_s = self.shared.config.header_timeout_s
        if self not in self.shared.idle:
            self._check_reader()
            return
        left_s = self._waiting_since + timeout_s - self.loop.time()
        if left_s > 0:
            self._later(left_s, self._check_head)
        elif self._head_begun:
            message = f"the request's head did not arrive within {timeout_s:g} s"
            self._refuse(408, message, "header_timeout")
        else:
            self._drop("idle")

    def _check_reader(self) -> None:
        """Disconnect a client that reads nothing of its answers for `body_timeout_s`.

        An answer that waits for it has no other end: it would keep the connection for ever.
        """
        config, now = self.shared.config, self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        if not self._flow.write_paused or unsent < self._flow.unsent:
            self._flow.unsent, self._taken_at = unsent, now
        if now - self._taken_at >= config.body_timeout_s:
            self.shared.on_refused("unread")
            self.transport.abort()
        else:
            self._later(min(config.header_timeout_s, config.body_timeout_s), self._check_head)

    def _drop(self, reason: str) -> None:
        """Close a connection that waits for nothing."""
        self.shared.on_refused(reason)
        self._close()

    def _refuse(self, status: int, message: str, reason: str) -> None:
        """Send the refusal, if no response has started, and close."""
        self.shared.on_refused(reason)
        answering = self._answering
        started = answering is not None and answering.response_started
        self._abandon_cycle()
        if answering is None or answering.response_complete or not started:
            self.transport.write(_answer(status, message, reason))
            self._linger()
        else:
            self._close()

    def _abandon_cycle(self) -> None:
        """Tell the request that is being answered, if there is one, that its client is gone."""
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()
            scope: Any = answering.scope
            client_of(scope).leave()

    def _linger(self) -> None:
        """Close our side, and drain what the client still sends for a moment.

        A socket closed with unread bytes resets the connection, and the answer may be lost with it.
        """
        self._lingering = True
        self.shared.idle.pop(self, None)
        self.pipeline.clear()
        self.flow.resume_reading()
        if len(self.connections) > self.shared.connections_max + FILES_RESERVED // 2:
            self._close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._later(LINGER_S, self._close)

    def _end(self) -> None:
        """Close after the last answer, or one that was cut short."""
        if self._lingering or self._ended:
            return
        if self._body_is_left():
            self._linger()
        else:
            self._close()

    def _body_is_left(self) -> bool:
        return self._answering is not None and self._answering.more_body

    def _close(self) -> None:
        self._ended = True
        self.shared.idle.pop(self, None)
        self.transport.close()
        self._abort_if_unread(math.inf)

    def _abort_if_unread(self, unsent: float | int) -> None:
        """Close connections whose client stops reading (slow-read attack)."""
        left = self.transport.get_write_buffer_size()
        if left < unsent:
            self._later(self.shared.config.body_timeout_s, partial(self._abort_if_unread, left))
        else:
            self.transport.abort()


def raise_files_limit() -> None:
    """Let this process open as many files, so connections, as the system allows it to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _answer(status: int, message: str, code: str) -> bytes:
    body = orjson.dumps(ApiError(status, message, code=code).body)
    retry = "Retry-After: 1\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{retry}x-request-id: {new_id()}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body

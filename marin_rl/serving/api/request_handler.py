"""A request's way through the engine: prepared, submitted, scheduled, answered or cancelled.

Owns what a route asks of the engine (`EngineRequest`), the hops between event loop, tokenizer,
engine and writer, deadlines, and what happens when a client leaves. Leaves out how a body is read
and how an answer looks (the routes), and what is sent when (`responses`).
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive, Scope

from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.engine import Policy
from marin_rl.inference.generation import Delta, GenerationRequest, GenerationResult
from marin_rl.serving.api.service import Service
from marin_rl.serving.api.worker_threads import ResponseQueue
from marin_rl.serving.http.access_log import RequestRecord, record_of
from marin_rl.serving.http.auth import client_left, parsed, read_body
from marin_rl.serving.http.connections import client_of
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.limits import deadline_of, draining_error, queue_timeout, request_timeout

_log = logging.getLogger(__name__)

WriteDelta = Callable[[int, Delta], bytes]
WriteEnd = Callable[[Sequence[GenerationResult]], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A parsed request for the engine, and the functions that write its answer (writer's thread).

    `model` is the name, or the id of the weights, that was asked for. `end` makes what is sent when
    every prompt has its samples. A stream has a `delta` too: what is sent when a chunk added
    something to a sample of a prompt.
    """

    model: str
    requests: list[GenerationRequest]
    end: WriteEnd
    delta: WriteDelta | None = None


Prepare = Callable[[Service, bytes], EngineRequest]


class RequestHandler:
    """One request on its way through the engine and back. Made and closed on the event loop."""

    def __init__(self, service: Service, scope: Scope) -> None:
        self.reply = ResponseQueue()
        self.record: RequestRecord = record_of(scope)
        self._service = service
        self._parsed = partial(parsed, scope)
        self._futures: list[Future[GenerationResult]] = []
        self._results: dict[int, GenerationResult] = {}
        self._expected = 0
        self._closed = False
        self._submitted_at = 0.0
        self._seated_at: float | None = None
        self._version: int | None = None
        self._tokens = 0
        self._deadline = deadline_of(scope)
        first = min(self._deadline.queue_at, self._deadline.total_at)
        self._timer = self.reply.loop.call_at(first, self._look_at_the_clock)
        service.running += 1
        self._client = client_of(scope)
        self._client.when_left(self._left)

    def begin(self, prepare: Prepare, data: bytes) -> None:
        """Have a request read, checked and submitted, here where it is short, else by a thread.

        The reply tells what comes of it: ApiError for what is refused, or once the engine is
        closed.
        """
        self._service.preparer.add(data, partial(self._begin, prepare, data))

    def _begin(self, prepare: Prepare, data: bytes) -> None:
        if self._closed:  # the client left while this waited for a thread
            return
        try:
            self._submit(prepare(self._service, data))
        except Exception as error:  # noqa: BLE001 the reader of the reply gets it
            self._raise(error)
        finally:
            self._parsed()
        if self._closed:
            self._cancel()

    def _submit(self, order: EngineRequest) -> None:
        self.record.stream = order.delta is not None
        self.record.prompt_tokens = sum(len(request.prompt_ids) for request in order.requests)
        self._expected = len(order.requests)
        self._submitted_at = time.monotonic()
        seat = partial(self._seat, order.model)
        try:
            for index, request in enumerate(order.requests):
                listen = self._hear if order.delta is None else self._listener(order.delta, index)
                future = self._service.engine.submit(request, listen, seat)
                self._futures.append(future)
                future.add_done_callback(partial(self._done, order.end, index))
        except InputError as error:
            raise ApiError(400, str(error)) from None
        except InferenceError as error:
            raise self._told(error) from None

    def _raise(self, error: BaseException) -> None:
        self._service.writer.put(self.reply, partial(_raised, error))

    def close(self) -> None:
        """Free what the request holds, after its answer was sent or abandoned. Later calls do
        nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._service.running -= 1
        self._timer.cancel()
        self._client.when_left(None)
        self._cancel()
        self._note()

    def _cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def _seat(self, model: str, policy: Policy) -> None:
        """Samples got slots. ApiError 404 where others than the weights asked for would answer."""
        if self._seated_at is None:
            self._seated_at = time.monotonic()
        self._service.check_model(model, policy)
        self._version = policy.weight_version

    def _hear(self, delta: Delta) -> None:
        self._tokens += len(delta.token_ids)
        self._version = delta.weight_version

    def _listener(self, write: WriteDelta, index: int) -> Callable[[Delta], None]:
        writer, reply = self._service.writer, self.reply

        def listen(delta: Delta) -> None:
            self._hear(delta)
            writer.put(reply, lambda: (write(index, delta), False))

        return listen

    def _done(self, write: WriteEnd, index: int, future: "Future[GenerationResult]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._raise(self._told(error))
            return
        self._results[index] = future.result()
        if len(self._results) == self._expected:
            results = [self._results[index] for index in range(self._expected)]
            self._service.writer.put(self.reply, lambda: (write(results), True))

    def _told(self, error: BaseException) -> BaseException:
        if not isinstance(error, InferenceError):
            return error
        if isinstance(error.__cause__, ApiError):
            return error.__cause__
        if self._service.stopping:
            return draining_error()
        number = self.record.request_id
        _log.error("request %s failed: %s (%r)", number, error, error.__cause__)
        told = f"{error}; the server's log has it as {number}"
        return ApiError(500, told, type="server_error", code="engine_failed")

    def _look_at_the_clock(self) -> None:
        """One timer for both deadlines: hardly any request ever meets the first."""
        now, deadline = self.reply.loop.time(), self._deadline
        if now >= deadline.total_at:
            self._fail(request_timeout())
        elif self._seated_at is None and now >= deadline.queue_at:
            self._fail(queue_timeout())
        else:
            waits = self._seated_at is None
            later = min(deadline.queue_at, deadline.total_at) if waits else deadline.total_at
            self._timer = self.reply.loop.call_at(later, self._look_at_the_clock)

    def _left(self) -> None:
        self._fail(client_left())

    def _fail(self, error: ApiError) -> None:
        self._cancel()
        self.reply.fail(error)

    def _note(self) -> None:
        """Tell the record what the request cost, as far as it came."""
        record, results = self.record, list(self._results.values())
        if not results or len(results) < self._expected:
            record.weight_version, record.completion_tokens = self._version, self._tokens
            if self._seated_at is not None:
                record.queue_s = self._seated_at - self._submitted_at
            return
        record.queue_s = max(result.queue_s for result in results)
        record.prefill_s = max(result.prefill_s for result in results)
        record.decode_s = max(result.decode_s for result in results)
        record.weight_version = results[-1].weight_version
        record.completion_tokens = sum(
            len(sample.token_ids) for result in results for sample in result.samples
        )


def _raised(error: BaseException) -> tuple[bytes, bool]:
    raise error


async def accept(service: Service, scope: Scope, receive: Receive) -> tuple[RequestHandler, bytes]:
    """Let a request in: its body, and its way through the engine, which the caller closes.

    ApiError 503 while the server takes no new work.
    """
    data = await read_body(receive)
    if service.draining or service.stopping:
        raise draining_error()
    return RequestHandler(service, scope), data

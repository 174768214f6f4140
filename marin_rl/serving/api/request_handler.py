"""The way of a request that samples: prepare, submit, schedule, write, send.

In order, with the thread that does each step:

1. Event loop: `SamplingEndpoint` reads the body (`read_body`) and makes a `RequestHandler`.
2. `RequestHandler.begin` gives the body to `TokenizeWorker.add`, which runs `_begin` at once on the
   event loop where the body is short, else on a tokenizer thread.
3. `_begin` makes the route's `Dialect` of it: parse, check, render, tokenize. It knows what
   the engine is asked, and writes the response.
4. `_submit` calls `Engine.submit` for each prompt, with the callbacks of steps 5 to 7.
5. Engine thread: `_on_scheduled` when the first sample gets a slot, with the weights that answer.
6. Engine thread: `_on_delta` after each chunk of decode steps. For a stream it queues `delta(...)`
   on the `ResponseWriter`.
7. Engine thread: `_on_done` when a prompt has all its samples. After the last prompt it queues
   `end(...)` on the `ResponseWriter`.
8. Writer thread: runs `delta` and `end` (detokenizing, JSON) and hands the bytes to the event loop,
   where they enter the request's `ResponseQueue`.
9. Event loop: `SamplingEndpoint` reads the queue and sends; then `RequestHandler.close` notes in
   the request's record what it cost.

An error of any step enters the same queue. Deadlines (`_on_timer`) and a client that leaves
(`_watch_client`) cancel the futures of step 4 and enter their error there.

Leaves out how a body is read and what a response holds (`dialect`).
"""

import asyncio
import logging
import math
import time
from concurrent.futures import Future
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from marin_rl.errors import InferenceError, InputError, OutOfMemory
from marin_rl.inference.adapters import AdapterGone
from marin_rl.inference.engine import Policy
from marin_rl.inference.generation import Delta, GenerationResult
from marin_rl.machine import OUT_OF_MEMORY
from marin_rl.serving.api.dialect import Dialect, tokens_of
from marin_rl.serving.api.service import Service
from marin_rl.serving.api.worker_threads import ResponseQueue
from marin_rl.serving.http.access_log import RequestRecord, record_of
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.guard import CLIENT_LEFT, BodyShare, failure, internal_error, read_body

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect the events of a stream otherwise.
    (b"x-accel-buffering", b"no"),
)
_log = logging.getLogger(__name__)


class SamplingEndpoint:
    """The ASGI endpoint of a route that samples.

    An error before the response's first piece has its own status; a later one is the last event
    but `[DONE]`. When a client leaves, the slots of its request are free at the next chunk.
    """

    def __init__(self, service: Service, dialect: type[Dialect]) -> None:
        self._service, self._dialect = service, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError for what fails before the response begins."""
        arrived_at = asyncio.get_running_loop().time()
        data = await read_body(scope, receive)
        if self._service.draining or self._service.stopping:
            raise failure("draining")
        handler = RequestHandler(self._service, scope, receive, arrived_at)
        try:
            handler.begin(self._dialect, data)
            del data  # a response may take minutes, and the body some megabytes
            # Before any header is sent: an error until here has its own status.
            first = await handler.queue.read()
            assert first is not None, "a response has at least one piece"
            if handler.record.stream:
                await _send_stream(handler, first, send)
                return
        finally:
            handler.close()
        await Response(first, media_type="application/json")(scope, receive, send)


async def _send_stream(handler: "RequestHandler", first: bytes, send: Send) -> None:
    """Send the pieces of a response as they come, and an error as the last event."""
    headers, record = list(_STREAM_HEADERS), handler.record
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    record.first_token_s = time.perf_counter() - record.started
    data: bytes | None = first
    try:
        while data is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await handler.queue.read()
    except Exception as error:  # noqa: BLE001 the last one who can tell the client anything
        if not isinstance(error, ApiError):
            _log.error("request %s failed in mid-stream", record.request_id, exc_info=error)
            error = internal_error(record.request_id)
        record.reason = error.code
        if error.status != CLIENT_LEFT:
            assert handler.request is not None, "its response began"
            data = handler.request.failure(error)
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestHandler:
    """Request in the engine, and its response. Made and closed on the event loop.

    `arrived_at` is the loop's time, from which the deadlines count.
    """

    def __init__(self, service: Service, scope: Scope, receive: Receive, arrived_at: float) -> None:
        self.queue = ResponseQueue()
        self.record: RequestRecord = record_of(scope)
        self.request: Dialect | None = None  # once it was prepared
        self._service = service
        self._body_share: BodyShare = scope["state"]["body_share"]
        self._futures: list[Future[GenerationResult]] = []
        self._results: dict[int, GenerationResult] = {}
        self._expected = 0
        self._closed = False
        self._submitted_at = 0.0
        self._scheduled_at: float | None = None
        self._version: int | None = None
        self._tokens = 0
        self._queue_at = arrived_at + service.limits.queue_timeout_s
        self._total_at = arrived_at + service.limits.request_timeout_s
        first = min(self._queue_at, self._total_at)
        self._timer = self.queue.loop.call_at(first, self._on_timer)
        self._client_watch = self.queue.loop.create_task(self._watch_client(receive))
        service.running += 1

    def begin(self, dialect: type[Dialect], data: bytes) -> None:
        """Have a body prepared and submitted; the queue gets the response, or an ApiError."""
        self._service.preparer.add(data, partial(self._begin, dialect, data))

    def _begin(self, dialect: type[Dialect], data: bytes) -> None:
        if self._closed:  # the client left while this waited for a thread
            return
        try:
            self._submit(dialect(self._service, data))
        except Exception as error:  # noqa: BLE001 the reader of the queue gets it
            self._put_error(error)
        finally:
            self._body_share.release()
        if self._closed:  # in the meantime, so `close` has not seen these futures
            self._cancel()

    def _submit(self, request: Dialect) -> None:
        self.request, self.record.stream = request, request.stream
        # Before submitting: a request that is refused by the engine is logged with its size.
        self.record.prompt_tokens = sum(len(prompt.prompt_ids) for prompt in request.requests)
        # Before the first is submitted: its result may come before the last is.
        self._expected = len(request.requests)
        self._submitted_at = time.monotonic()
        on_scheduled = partial(self._on_scheduled, request.model)
        submit = self._service.engine.submit
        try:
            for index, prompt in enumerate(request.requests):
                on_delta = partial(self._on_delta, request, index)
                future = submit(prompt, on_delta, on_scheduled, streams=request.stream)
                self._futures.append(future)
                future.add_done_callback(partial(self._on_done, request, index))
        except AdapterGone as error:  # unloaded since the body was prepared
            raise ApiError(404, str(error), code="model_not_found", param="model") from None
        except InputError as error:
            raise ApiError(400, str(error)) from None
        except InferenceError as error:
            raise self._as_api_error(error) from None

    def _on_scheduled(self, model: str, policy: Policy) -> None:
        """Note the wait for a slot. ApiError 404 where others than the weights asked for answer."""
        if self._scheduled_at is None:
            self._scheduled_at = time.monotonic()
        self._service.check_answers(policy, model)
        self._version = policy.weight_version

    def _on_delta(self, request: Dialect, index: int, delta: Delta) -> None:
        self._tokens += len(delta.token_ids)
        self._version = delta.weight_version
        if request.stream:
            self._service.writer.put(self.queue, lambda: (request.delta(index, delta), False))

    def _on_done(self, request: Dialect, index: int, future: "Future[GenerationResult]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._put_error(self._as_api_error(error))
            return
        self._results[index] = future.result()
        if len(self._results) == self._expected:
            results = [self._results[index] for index in range(self._expected)]
            self._service.writer.put(self.queue, lambda: (request.end(results), True))

    def _put_error(self, error: BaseException) -> None:
        """Have the queue's reader get an error, after all that was written before."""

        def write() -> tuple[bytes, bool]:
            raise error

        self._service.writer.put(self.queue, write)

    def _as_api_error(self, error: BaseException) -> BaseException:
        """Word an engine's error for the client; the cause is in the log only."""
        if isinstance(error, OutOfMemory):
            return ApiError(507, str(error), code=OUT_OF_MEMORY)
        if not isinstance(error, InferenceError):
            return error
        # `check_answers` refused it in `on_scheduled`: the client gets that 404.
        if isinstance(error.__cause__, ApiError):
            return error.__cause__
        if self._service.stopping:
            return failure("draining")
        request_id = self.record.request_id
        _log.error("request %s failed: %s (%r)", request_id, error, error.__cause__)
        message = f"{error}; the server's log has it as {request_id}"
        return ApiError(500, message, code="engine_failed")

    def _on_timer(self) -> None:
        """One timer for both deadlines: hardly any request ever meets the first."""
        now, total_at = self.queue.loop.time(), self._total_at
        queue_at = self._queue_at if self._scheduled_at is None else math.inf
        if now >= total_at:
            self._fail(failure("request_timeout"))
        elif now >= queue_at:
            self._fail(failure("queue_timeout"))
        else:
            self._timer = self.queue.loop.call_at(min(queue_at, total_at), self._on_timer)

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fail(failure("client_left"))

    def _fail(self, error: ApiError) -> None:
        self._cancel()
        self.queue.fail(error)

    def _cancel(self) -> None:
        # Cancelling what has ended already changes nothing.
        for future in self._futures:
            future.cancel()

    def close(self) -> None:
        """Free what the request holds, and note in its record what it cost; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._service.running -= 1
        self._timer.cancel()
        self._client_watch.cancel()
        self._cancel()
        record, results = self.record, list(self._results.values())
        if not results or len(results) < self._expected:
            record.weight_version, record.completion_tokens = self._version, self._tokens
            if self._scheduled_at is not None:
                record.queue_s = self._scheduled_at - self._submitted_at
            return
        # Several prompts are one request: it waited as long as the one that waited longest.
        record.queue_s = max(result.queue_s for result in results)
        record.prefill_s = max(result.prefill_s for result in results)
        record.decode_s = max(result.decode_s for result in results)
        record.weight_version = results[-1].weight_version
        record.completion_tokens = tokens_of(results)

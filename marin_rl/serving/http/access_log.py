"""Access log: a record per request, with its id, its cost and its outcome, and a line of JSON.

uvicorn's own log knows neither tokens nor waiting times. Leaves out the middleware that makes the
records (`guard`) and the metrics (`prometheus`).
"""

import queue
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOBase
from logging.handlers import QueueListener
from typing import Any, TextIO

import orjson
from starlette.types import Scope

LINES_WAITING_MAX = 10_000
LINES_GATHERED_S = 0.05  # for which the first of several lines waits, so that they go together


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Facts of one request; durations in seconds, None for phases that it did not reach.

    Routes set the tokens, the phases and the weight version when they have them; the guard the
    rest. `caller` is "api", "admin", "local", or "open" on the health routes. `route` is the
    template that matched, never the path as it was sent. `body` is None where it is not logged.
    """

    request_id: str
    method: str
    caller: str = ""
    route: str = "(none)"
    status: int = 0
    reason: str = ""
    stream: bool = False
    arrived_at: float
    started: float
    latency_s: float = 0.0
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    first_token_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    weight_version: int | None = None
    body: str | None = None


def record_of(scope: Scope) -> RequestRecord:
    record = scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record


class AccessLog(QueueListener):
    """Writer of one JSON line a request, on a thread: no request waits for a slow pipe.

    Lines are written some at a time, since waking a thread costs more than writing a line: 45 µs a
    request, measured, 10 % of the cost of serving it. Lines that come faster than they can be
    written are dropped and counted.
    """

    def __init__(self, stream: TextIO | TextIOBase) -> None:
        self._waiting: queue.SimpleQueue[RequestRecord | None] = queue.SimpleQueue()
        super().__init__(self._waiting)
        self._stream = stream
        self._dropped = 0
        self.start()
        assert self._thread is not None
        self._thread.name = "access-log"

    def add(self, record: RequestRecord) -> None:
        if self._waiting.qsize() < LINES_WAITING_MAX:
            self._waiting.put(record)
        else:
            self._dropped += 1

    def handle(self, record: RequestRecord) -> None:  # type: ignore[override]
        """Write a record, and the records that come shortly after it."""
        time.sleep(LINES_GATHERED_S)
        records = [record]
        while not self._waiting.empty():
            if (following := self._waiting.get()) is None:  # the end, which the listener must see
                self.enqueue_sentinel()
                break
            records.append(following)
        try:
            self._stream.write("".join(access_line(record) + "\n" for record in records))
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe: the log is lost, the service is not
            self._dropped += len(records)

    def lines_dropped(self) -> int:
        return self._dropped

    def close(self) -> None:
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(timeout=1)


def access_line(record: RequestRecord) -> str:
    """The record as one line of JSON; times in seconds, rounded to 0.01 ms."""
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.arrived_at, UTC).isoformat(timespec="milliseconds"),
        "request_id": record.request_id,
        "caller": record.caller,
        "method": record.method[:16],
        "route": record.route,
        "status": record.status,
        "latency_s": round(record.latency_s, 5),
        "stream": record.stream,
    }
    for name in ("queue_s", "prefill_s", "decode_s", "first_token_s"):
        value = getattr(record, name)
        if value is not None:
            line[name] = round(value, 5)
    if record.weight_version is not None:
        line |= {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "weight_version": record.weight_version,
        }
    if record.reason:
        line["reason"] = record.reason
    if record.body is not None:
        line["body"] = record.body
    return orjson.dumps(line).decode()

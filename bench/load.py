"""A light HTTP client that keeps many requests in flight, and what it saw of them.

Plain asyncio over kept connections: a request costs a tenth of a millisecond of CPU, so that one
core of load is no limit to the server that is measured.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it; seconds from its sending."""

    status: int
    latency_s: float
    first_byte_s: float
    tokens: int


@dataclass(slots=True)
class Load:
    """All requests of one measurement."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Requests that were not answered with 200."""
        return sum(answer.status != 200 for answer in self.answers)

    @property
    def tokens(self) -> int:
        """New tokens of all answers, by the server's own count."""
        return sum(answer.tokens for answer in self.answers)

    def summary(self) -> dict[str, float | int]:
        """Throughput, and latencies in milliseconds."""
        latency = np.array([answer.latency_s for answer in self.answers]) * 1000
        first = np.array([answer.first_byte_s for answer in self.answers]) * 1000
        return {
            "requests": len(self.answers),
            "errors": self.errors,
            "tokens": self.tokens,
            "wall_s": round(self.wall_s, 3),
            "client_cpu_s": round(self.cpu_s, 3),
            "requests_per_s": round(len(self.answers) / self.wall_s, 1),
            "tokens_per_s": round(self.tokens / self.wall_s),
            "p50_ms": round(float(np.percentile(latency, 50)), 1),
            "p99_ms": round(float(np.percentile(latency, 99)), 1),
            "first_byte_p50_ms": round(float(np.percentile(first, 50)), 1),
            "first_byte_p99_ms": round(float(np.percentile(first, 99)), 1),
        }


def post(
    url: str,
    bodies: Sequence[bytes],
    concurrency: int,
    on_answer: Callable[[int], None] | None = None,
) -> Load:
    """Send all bodies, `concurrency` at a time; `on_answer` gets the number of answers so far."""
    return asyncio.run(_post(url, bodies, concurrency, on_answer))


async def _post(
    url: str, bodies: Sequence[bytes], concurrency: int, on_answer: Callable[[int], None] | None
) -> Load:
    load, waiting = Load(), iter(bodies)
    workers = [_worker(url, waiting, load, on_answer) for _ in range(concurrency)]
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*workers)
    load.wall_s, load.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return load


async def _worker(
    url: str, waiting: Iterator[bytes], load: Load, on_answer: Callable[[int], None] | None
) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: "
    for body in waiting:
        started = time.perf_counter()
        writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        status, first, data = await _answer(reader)
        ended = time.perf_counter()
        tokens = _tokens(data) if status == 200 else 0
        load.answers.append(Answer(status, ended - started, first - started, tokens))
        if on_answer is not None:
            on_answer(len(load.answers))
    writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, float, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head[9:12])
    if b"transfer-encoding: chunked" in head:
        first, data = 0.0, []
        while True:
            size = int(await reader.readline(), 16)
            piece = await reader.readexactly(size + 2)
            first = first or time.perf_counter()
            if size == 0:
                return status, first, b"".join(data)
            data.append(piece[:-2])
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    data = await reader.readexactly(length)
    return status, time.perf_counter(), data


def _tokens(data: bytes) -> int:
    """New tokens by the answer's `usage`: of a stream, that of its last chunk."""
    if data.startswith(b"data: "):
        events = data.split(b"\n\n")
        assert events[-2] == b"data: [DONE]", events[-2][:200]
        data = events[-3].removeprefix(b"data: ")
    usage: dict[str, Any] = json.loads(data)["usage"]
    return usage["completion_tokens" if "completion_tokens" in usage else "output_tokens"]

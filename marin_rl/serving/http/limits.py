"""Limits: sizes and rates of requests, and the errors of requests that waited too long.

Owns request rates, the sizes and the queue that a configuration allows, and the memory that the
bodies of all requests may hold together: each body is bounded, but 2,048 at once could fill 32 GB.
Leaves out the shape of a body (`errors`) and reading it (`guard`).
"""

import gc
import math
import threading
import time
from collections.abc import Callable

from marin_rl.config import ServerConfig
from marin_rl.machine import give_back_freed_memory
from marin_rl.serving.http.errors import ApiError

# A rate is met if the bucket misses a whole token by no more than floating point does.
_ROUNDING = 1e-9

# The part of each body that is not counted: ordinary requests go on when the budget is spent.
FREE_BYTES = 2**16
# Freed memory is handed back after a peak of this size, this long after it was released.
TRIM_BYTES = 2**25
TRIM_DELAY_S = 1.0


class TokenBucket:
    """`burst` requests at once, `per_second` in the long run; used from one thread."""

    def __init__(
        self, per_second: float, burst: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._clock = clock
        self._level = self._burst
        self._at = clock()

    def take(self) -> float:
        """Admit a request and return 0, or return the seconds until one will be admitted."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_second)
        self._at = now
        if self._level >= 1 - _ROUNDING:
            self._level -= 1
            return 0.0
        return (1 - self._level) / self._per_second


class Rates:
    """Rate limit by kind of caller; admin is not limited, so that it can always act."""

    def __init__(
        self, config: ServerConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        rate = self._rate = config.requests_per_second
        self._buckets: dict[str, TokenBucket] = {}
        if rate is not None:
            burst = config.requests_burst or max(1, math.ceil(rate))
            for caller in ("api", "local"):
                self._buckets[caller] = TokenBucket(rate, burst, clock=clock)

    def check(self, caller: str) -> None:
        """Raise ApiError 429, with the time to retry at, for a caller above its rate."""
        bucket = self._buckets.get(caller)
        wait_s = 0.0 if bucket is None else bucket.take()
        if wait_s:
            raise ApiError(
                429,
                f"expected at most {self._rate:g} requests a second: try again in {wait_s:.3g} s",
                code="rate_limit_exceeded",
                headers={
                    "Retry-After": str(math.ceil(wait_s)),
                    "Retry-After-Ms": str(math.ceil(1000 * wait_s)),  # what `openai` reads first
                },
            )


def check_samples(config: ServerConfig, *, n: int, prompts: int, queued: int) -> None:
    """Refuse more samples than a request may ask for (400), or than may wait (503)."""
    if n > config.samples_max:
        raise _too_many("n", "samples", n, config.samples_max)
    if prompts > config.prompts_max:
        raise _too_many("prompt", "prompts", prompts, config.prompts_max)
    if n * prompts > config.samples_queued_max:
        raise _too_many("n", "samples of all prompts", n * prompts, config.samples_queued_max)
    if queued + n * prompts > config.samples_queued_max:
        raise _overloaded(f"more than {config.samples_queued_max} samples would wait")


def check_tokens(
    config: ServerConfig, *, prompt_tokens: int, new_tokens: int | None, param: str = "prompt"
) -> None:
    """Refuse a prompt, or a requested number of new tokens, beyond the configured limits (400)."""
    for name, what, count, most in (
        (param, "prompt tokens", prompt_tokens, config.prompt_tokens_max),
        ("max_tokens", "new tokens", new_tokens, config.new_tokens_max),
    ):
        if most is not None and count is not None and count > most:
            raise _too_many(name, what, count, most)


def _too_many(param: str, what: str, count: int, allowed: int) -> ApiError:
    message = f"{param}: expected at most {allowed} {what}, found {count}"
    return ApiError(400, message, param=param, code="limit_exceeded")


def _overloaded(message: str) -> ApiError:
    return ApiError(503, f"{message}: try again later", code="overloaded", retry_s=1)


def body_too_large(bytes_max: int) -> ApiError:
    return ApiError(413, f"expected a body of at most {bytes_max} bytes", code="body_too_large")


def draining_error() -> ApiError:
    return ApiError(503, "the server is shutting down: try again", code="draining", retry_s=5)


def queue_timeout() -> ApiError:
    message = "no slot became free in time: try again later"
    return ApiError(503, message, code="queue_timeout", retry_s=5)


def request_timeout() -> ApiError:
    message = "the answer was not complete in time: ask for fewer tokens or samples"
    return ApiError(504, message, code="request_timeout")


def give_back_bodies() -> None:
    """Free what requests left, and hand it back to the kernel."""
    # The error of a request refers to frames that have its body, and they to the error: such cycles
    # would wait for a collection that a server at rest never comes to.
    gc.collect()
    give_back_freed_memory()


class BodyBudget:
    """Bytes that the bodies of all requests may hold together. Safe from any thread."""

    def __init__(self, bytes_max: int, *, give_back: Callable[[], None] = give_back_bodies) -> None:
        self._bytes_max = bytes_max
        self._give_back = give_back
        self.lock = threading.Lock()
        self._peak = 0
        self.bytes_in_use = 0

    def add(self, count: int) -> None:
        """Reserve `count` bytes; ApiError 503 where too little is left. Negative: return them."""
        with self.lock:
            in_use = self.bytes_in_use + count
            if count > 0 and in_use > self._bytes_max:
                raise _overloaded("the server is busy with other large bodies")
            self.bytes_in_use, self._peak = in_use, max(self._peak, in_use)
            trim = in_use == 0 and self._peak >= TRIM_BYTES
            if in_use == 0:
                self._peak = 0
        if trim:  # the process keeps what is freed, for training steps (see `compilation`)
            timer = threading.Timer(TRIM_DELAY_S, self._give_back)
            timer.daemon = True
            timer.start()


class BodyShare:
    """Share of one body, of at most `bytes_max`, in the budget, until it is released."""

    def __init__(self, budget: BodyBudget, bytes_max: int) -> None:
        self._budget = budget
        self._bytes_max = bytes_max
        self._bytes = 0

    def grow_to(self, size: int) -> None:
        """Reserve room for `size` bytes. ApiError: 413 for too large a body, 503 for no room."""
        if size > self._bytes_max:
            raise body_too_large(self._bytes_max)
        if (count := size - FREE_BYTES - self._bytes) > 0:
            self._budget.add(count)
            self._bytes += count

    def release(self) -> None:
        """Return the share: the body was parsed, or refused. Idempotent."""
        with self._budget.lock:  # a thread and the event loop may both come here
            count, self._bytes = self._bytes, 0
        if count:
            self._budget.add(-count)

"""A budget for the memory of all bodies that are being read or wait to be parsed.

One body is bounded by `body_bytes_max` and each connection has one, so that without a common bound
2,048 connections could fill 32 GB with bodies that never end. Leaves out the limits of one body
(`auth`).
"""

import threading
from collections.abc import Callable

from marin_rl.machine import give_back_freed_memory
from marin_rl.serving.http.errors import ApiError

# The part of each body that is not counted: ordinary requests go on when the budget is spent. All
# connections together hold 128 MiB of it at most, by the default of `connections_max`.
FREE_BYTES = 2**16
# So much was held before freed memory is handed back, and so long after it was let go.
TRIM_BYTES = 2**25
TRIM_DELAY_S = 1.0


class BodyBudget:
    """Bytes that the bodies of all requests may hold together. Safe from any thread."""

    def __init__(
        self, bytes_max: int, *, give_back: Callable[[], None] = give_back_freed_memory
    ) -> None:
        self._bytes_max = bytes_max
        self._give_back = give_back
        self._lock = threading.Lock()
        self._held = 0
        self._peak = 0

    @property
    def held(self) -> int:
        """Bytes that are counted now."""
        return self._held

    def share(self) -> "BodyShare":
        """The part of one body, empty at first."""
        return BodyShare(self)

    def _take(self, count: int) -> bool:
        with self._lock:
            if self._held + count > self._bytes_max:
                return False
            self._held += count
            self._peak = max(self._peak, self._held)
            return True

    def _release(self, count: int) -> None:
        with self._lock:
            self._held -= count
            trim = self._held == 0 and self._peak >= TRIM_BYTES
            if trim:
                self._peak = 0
        if trim:  # the process keeps what is freed, for training steps (see `compilation`)
            timer = threading.Timer(TRIM_DELAY_S, self._give_back)
            timer.daemon = True
            timer.start()


class BodyShare:
    """Share of one body in the budget, until it is released."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._held = 0
        self._released = False

    def grow_to(self, size: int) -> None:
        """Hold the budget for a body of `size` bytes; ApiError 503 where too little is left."""
        with self._lock:
            count = max(0, size - FREE_BYTES) - self._held
            if count <= 0 or self._released:
                return
            if not self._budget._take(count):
                raise _spent()
            self._held += count

    def release(self) -> None:
        """Give back what the body holds: it was parsed, or refused. Later calls change nothing."""
        with self._lock:
            held, self._held, self._released = self._held, 0, True
        if held:
            self._budget._release(held)


def _spent() -> ApiError:
    return ApiError(
        503,
        "the server is busy with other large bodies: try again later, or send less in one request",
        type="server_error",
        code="overloaded",
        headers={"Retry-After": "1"},
    )

"""Coroutines that are awaited from plain functions."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def await_apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await on an event loop of its own: a calling flow may be running one."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(make())).result()

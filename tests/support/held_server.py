"""A policy server that keeps some answers back until a test releases them."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from support.fakes import FakePolicyServer, Script, echo_script


class HeldServer(FakePolicyServer):
    """Answers what `holds` names once `released` is set, and the rest once `others` is.

    `asked` is set by the first request that waits for `released`. `others` is set from the start.
    """

    def __init__(
        self,
        model: str,
        script: Script = echo_script,
        *,
        holds: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        super().__init__(model, script)
        self.holds = holds
        self.released, self.others = threading.Event(), threading.Event()
        self.asked = threading.Event()
        self.others.set()

    def answer(self, body: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
        """The chat completion, once its event is set."""
        held = self.holds(body)
        if held:
            self.asked.set()
        assert (self.released if held else self.others).wait(60)
        return super().answer(body, fault)


async def until(happened: Callable[[], bool]) -> None:
    """Wait for something, at most a minute."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    await asyncio.to_thread(wait)

"""The process of marin-rl that plays and scores, for the reward and the agent loop of this folder.

One process for each of verl's, started at its first use. `marin_rl_relay.json` says by which Python
interpreter, and in which working folder; the environment variable MARIN_RL_PYTHON takes the place
of the interpreter. Both write JSON, an object a line; see `marin_rl/rollouts/relay.py`.
"""

import asyncio
import atexit
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent

Sample = Callable[[list[int], int], Awaitable[dict[str, Any]]]
OnSample = Callable[[int, dict[str, Any]], None]  # of a call's number, and what is asked for


class RelayError(RuntimeError):
    """marin-rl cannot play or score; the message is its own."""


class Relay:
    """A process of marin-rl, and the calls that it has not answered. Thread safe."""

    def __init__(self) -> None:
        settings = json.loads((FOLDER / "marin_rl_relay.json").read_text())
        python = str(os.environ.get("MARIN_RL_PYTHON") or settings["python"])
        configuration = str(FOLDER / "marin_rl.yaml")
        variables = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, "-I", "-m", "marin_rl.rollouts.relay", configuration],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=settings["folder"],
            env=variables,
        )
        atexit.register(self._process.kill)
        ready = json.loads(self._read() or "{}")
        if not ready.get("ready"):
            raise RelayError(ready.get("unfit", f"{python} cannot start marin_rl.rollouts.relay"))
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended = False
        self._waiting: dict[int, tuple[Future[Any], OnSample | None]] = {}
        threading.Thread(target=self._receive, name="marin-rl", daemon=True).start()

    def score(self, example: Any, completion: str) -> dict[str, Any]:
        call = {"call": "score", "example": example, "completion": completion}
        return self._ask(call, None).result()

    async def play(self, example: Any, sample: Sample) -> dict[str, Any]:
        """Play an episode; `sample` gives the tokens after a prompt's ids, up to a number."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[Any] = loop.create_future()
        tasks: set[asyncio.Task[None]] = set()

        async def answer(number: int, wanted: dict[str, Any]) -> None:
            sampled: dict[str, Any] = {"token_ids": []}  # ends the episode there
            try:
                sampled = await sample(wanted["prompt_ids"], wanted["max_tokens"])
            except Exception as error:  # noqa: BLE001 - raised where the episode is awaited
                if not failed.done():
                    failed.set_exception(error)
            self._write({"id": number, "sampled": sampled})

        def begin(number: int, wanted: dict[str, Any]) -> None:
            task = loop.create_task(answer(number, wanted))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def asked(number: int, wanted: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(begin, number, wanted)

        played = asyncio.wrap_future(self._ask({"call": "play", "example": example}, asked))
        await asyncio.wait({played, failed}, return_when=asyncio.FIRST_COMPLETED)
        return await (failed if failed.done() else played)

    def _ask(self, call: dict[str, Any], asked: OnSample | None) -> "Future[dict[str, Any]]":
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._ended:
                future.set_exception(RelayError("marin-rl has ended"))
                return future
            self._waiting[number] = future, asked
        self._write({"id": number, **call})
        return future

    def _write(self, record: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps(record).encode() + b"\n"
        with suppress(OSError), self._lock:  # the thread that reads notices its end
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _receive(self) -> None:
        while line := self._read():
            record = json.loads(line)
            number = record["id"]
            with self._lock:
                future, asked = self._waiting[number]
                if "sample" not in record:
                    del self._waiting[number]
            if "sample" in record:
                assert asked is not None, "scores have no turns"
                asked(number, record["sample"])
            elif "error" in record:
                future.set_exception(RelayError(record["error"]))
            else:
                future.set_result(record["answer"])
        status = self._process.wait()
        with self._lock:
            self._ended = True
            left, self._waiting = self._waiting, {}
        for future, _ in left.values():
            future.set_exception(RelayError(f"marin-rl ended with status {status}"))


@lru_cache(maxsize=1)
def relay() -> Relay:
    """The process of this one, started at its first use."""
    return Relay()

"""Play episodes of a library: the work of a process whose interpreter has it.

`isolated.worker` runs this file in that interpreter, which need not have this package, so it
imports the standard library alone. Settings name an adapter, a file of this folder, and its
options:

    {"adapter": PATH, "options": {...}}

Calls interleave where an adapter's methods are `async`. Each is answered by {"answer": ...} or by
{"error": TEXT}:

    {"call": "row", "split": "train", "index": 0}
    {"call": "start", "episode": 7, "row": {...}, "seed": 5}
    {"call": "step", "episode": 7, "turn": {...}}
    {"call": "close", "episode": 7}
    {"call": "play", "row": {...}, "policy": {...}, "number": 3}
    {"call": "score", "episodes": [7, 8], "seed": 5}

Each episode has the global random numbers of Python and NumPy to itself, which begin with its seed.
"""

import inspect
import json
import sys
from contextlib import nullcontext
from typing import Any

worker: Any = sys.modules["__main__"]  # the script that runs this file

ERROR_CHARACTERS_MAX = 2_000


def begin(settings: dict[str, Any]) -> "Host":
    """The library behind an adapter. Raises ValueError with what it says."""
    try:
        return Host(worker.load_module(settings["adapter"]).begin(settings["options"]))
    except (Exception, SystemExit) as error:
        raise ValueError(_said(error)) from error


class Host:
    """Episodes of a library by their numbers, and calls of the library."""

    def __init__(self, library: Any) -> None:
        self.ready = library.ready
        self._library = library
        self._episodes: dict[int, Any] = {}
        self._states: dict[int, Any] = {}

    def call(self, request: dict[str, Any]) -> Any:
        state = self._states.get(request.get("episode", -1), nullcontext())
        if "seed" in request:
            state = worker.RandomState(request["seed"])
        if request["call"] == "start":
            self._states[request["episode"]] = state
        return self._answer(request), state

    async def _answer(self, request: dict[str, Any]) -> bytes:
        try:
            answer = getattr(self, "_" + request["call"])(request)
            answer = await answer if inspect.isawaitable(answer) else answer
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
            return json.dumps({"error": _said(error)}).encode()
        try:
            return json.dumps({"answer": answer}, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            return json.dumps({"error": f"its answer is not JSON: {error}"}).encode()

    def _row(self, request: dict[str, Any]) -> Any:
        return self._library.row(request["split"], request["index"])

    def _play(self, request: dict[str, Any]) -> Any:
        return self._library.play(request["row"], request["policy"], request["number"])

    def _start(self, request: dict[str, Any]) -> Any:
        episode = self._library.episode(request["row"], request["seed"])
        self._episodes[request["episode"]] = episode
        return episode.start()

    def _step(self, request: dict[str, Any]) -> Any:
        return self._episodes[request["episode"]].step(request["turn"])

    def _score(self, request: dict[str, Any]) -> Any:
        return self._library.score([self._episodes[number] for number in request["episodes"]])

    def _close(self, request: dict[str, Any]) -> Any:
        self._states.pop(request["episode"], None)
        episode = self._episodes.pop(request["episode"], None)
        return None if episode is None else episode.close()


def _said(error: BaseException) -> str:
    """An exception in words, with its cause."""
    words, cause = f"{type(error).__name__}: {error}", error.__cause__
    if cause is not None:
        words += f" (from {type(cause).__name__}: {cause})"
    return words[:ERROR_CHARACTERS_MAX]

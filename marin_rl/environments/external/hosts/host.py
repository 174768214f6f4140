"""Play episodes of a library for another process, over standard input and output.

`external.interpreter` runs this file as a script, in an interpreter that has the library and need
not have this package, so it imports the standard library alone. Both sides write JSON, an object a
line. The first line names an adapter, a file of this folder, and its options:

    {"adapter": PATH, "options": {...}}    answered by {"ready": {...}} or {"unfit": TEXT}

Afterwards calls have an id, and are answered in any order, by {"id": 1, "answer": ...} or
{"id": 1, "error": TEXT}:

    {"id": 1, "call": "row", "split": "train", "index": 0}
    {"id": 2, "call": "start", "episode": 7, "row": {...}, "seed": 5}
    {"id": 3, "call": "step", "episode": 7, "turn": {...}}
    {"id": 4, "call": "close", "episode": 7}
    {"id": 5, "call": "play", "row": {...}, "policy": {...}, "number": 3}
    {"id": 6, "call": "score", "episodes": [7, 8], "seed": 5}

What the library prints goes to standard error. Each episode has the global random numbers of Python
and NumPy to itself, which begin with its seed. The process ends when its input does.
"""

import asyncio
import contextvars
import importlib.util
import inspect
import json
import os
import random
import sys
import threading
import types
from pathlib import Path
from typing import Any

ERROR_CHARACTERS_MAX = 2_000


def main() -> None:
    """Serve one parent until it closes its end."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    hello = json.loads(requests.readline())
    try:
        library = _adapter(hello["adapter"]).begin(hello["options"])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
        _send(answers, {"unfit": _said(error)})
        return
    _send(answers, {"ready": library.ready})
    asyncio.run(_Host(library, answers).serve(requests))


def _adapter(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _Host:
    """The calls of one parent. They interleave where an adapter's methods are `async`."""

    def __init__(self, library: Any, answers: Any) -> None:
        self._library, self._answers = library, answers
        self._episodes: dict[int, Any] = {}
        self._states: dict[int, RandomState] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: Any) -> None:
        """Answer calls. A thread reads them, so that the end of the parent ends a busy process."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(_task)

        def read() -> None:
            for line in requests:
                loop.call_soon_threadsafe(self._begin, json.loads(line))
            os._exit(0)

        threading.Thread(target=read, name="requests", daemon=True).start()
        await asyncio.Event().wait()

    def _begin(self, request: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        number = request["id"]
        try:
            answer = await getattr(self, "_" + request["call"])(request)
            _send(self._answers, {"id": number, "answer": answer})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            _send(self._answers, {"id": number, "error": _said(error)})

    async def _row(self, request: dict[str, Any]) -> Any:
        return self._library.row(request["split"], request["index"])

    async def _play(self, request: dict[str, Any]) -> Any:
        return await self._library.play(request["row"], request["policy"], request["number"])

    async def _start(self, request: dict[str, Any]) -> Any:
        number = request["episode"]
        state = self._states[number] = RandomState(request["seed"])
        with state:
            episode = self._library.episode(request["row"], request["seed"])
        self._episodes[number] = episode
        return await alone(state, episode.start)

    async def _step(self, request: dict[str, Any]) -> Any:
        number = request["episode"]
        return await alone(self._states[number], self._episodes[number].step, request["turn"])

    async def _score(self, request: dict[str, Any]) -> Any:
        episodes = [self._episodes[number] for number in request["episodes"]]
        return await alone(RandomState(request["seed"]), self._library.score, episodes)

    async def _close(self, request: dict[str, Any]) -> None:
        state = self._states.pop(request["episode"], None)
        episode = self._episodes.pop(request["episode"], None)
        if state is not None and episode is not None:
            await alone(state, episode.close)


class RandomState:
    """Global random numbers of one episode, in place while its code runs."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._python = random.Random(seed).getstate()
        self._numpy: Any = None

    def __enter__(self) -> None:
        random.setstate(self._python)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if self._numpy is None:  # the library imported it meanwhile
                self._numpy = numpy.random.RandomState(self._seed % 2**32).get_state()
            numpy.random.set_state(self._numpy)

    def __exit__(self, *_: object) -> None:
        self._python = random.getstate()
        if self._numpy is not None:
            self._numpy = sys.modules["numpy"].random.get_state()


_state: contextvars.ContextVar[RandomState | None] = contextvars.ContextVar("state", default=None)


async def alone(state: RandomState, method: Any, *arguments: Any) -> Any:
    """Call a method, which may be `async`, with the random numbers of its episode in place."""
    _state.set(state)  # also for the tasks that it makes
    with state:
        result = method(*arguments)
    return await _sliced(state, result) if inspect.iscoroutine(result) else result


def _task(loop: Any, coroutine: Any, **options: Any) -> Any:
    """A task; one that an episode makes has the episode's random numbers in place."""
    state = _state.get()
    if state is not None and inspect.iscoroutine(coroutine):
        coroutine = _slices(state, coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


async def _slices(state: RandomState, coroutine: Any) -> Any:
    return await _sliced(state, coroutine)


@types.coroutine
def _sliced(state: RandomState, coroutine: Any) -> Any:
    """Run a coroutine with `state` in place whenever its own code runs."""
    resume = lambda: coroutine.send(None)
    while True:
        try:
            with state:
                waited = resume()
        except StopIteration as end:
            return end.value
        try:
            value = yield waited
            resume = lambda value=value: coroutine.send(value)
        except BaseException as error:  # noqa: BLE001 - thrown in by the event loop
            resume = lambda error=error: coroutine.throw(error)


def _send(answers: Any, record: dict[str, Any]) -> None:
    """Write a line. An answer that is not JSON, or not a finite number, is sent as an error."""
    try:
        line = json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        line = json.dumps({"id": record.get("id"), "error": f"its answer is not JSON: {error}"})
    left = memoryview(line.encode() + b"\n")
    while left:
        left = left[answers.write(left) :]


def _said(error: BaseException) -> str:
    """An exception in words, with those that it came from."""
    words, cause = f"{type(error).__name__}: {error}", error.__cause__
    if cause is not None:
        words += f" (from {type(cause).__name__}: {cause})"
    return words[:ERROR_CHARACTERS_MAX]


if __name__ == "__main__":
    main()

"""Options of all tasks: retried errors, deadlines of stages, and the states they end in.

Prefect's own caches know nothing of files, so they are off: every stage looks at its slot itself
and a task whose slot is already committed ends in a state called "Reused".
"""

import asyncio
import contextvars
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import lru_cache
from typing import Any, TypeVar

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed
from prefect.tasks import Task

from marin_rl.config import FlowConfig
from marin_rl.errors import ConfigError, MarinRLError
from marin_rl.progress import OF_STEPS, ProgressEvent, Stage, publish
from marin_rl.rounds import Stopwatch
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.provenance import code_digest
from marin_rl.storage.runs import Run, RunRef
from marin_rl.types import SlotRef
from tasks.fan_out import nodes_of

RETRY_DELAY_S_MAX = 600.0

# Stages that displays show, by the names of their tasks.
SHOWN: dict[str, Stage] = {
    "begin": "start",
    "fine_tune": "sft",
    "serve": "serve",
    "evaluate": "evaluate",
    "generate": "generate",
    "process": "process",
    "train": "train",
}

Value = TypeVar("Value")
# A task over an async function, as its caller sees it.
StageTask = Callable[..., Awaitable[Value]]


def is_transient(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return True for transient errors, the only ones that Prefect retries."""
    error: Any = state.data
    return isinstance(error, MarinRLError) and error.transient


# Options of `@task` for tasks that call the tasks of stages, and for stages; the rest is in the
# configuration: see `StageRunner`.
GROUP: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
STAGE = {**GROUP, "retry_condition_fn": is_transient, "retry_jitter_factor": 0.5}


class StageRunner:
    """Calls tasks as configured: retries with doubling delays, and a deadline for each try."""

    def __init__(self, config: FlowConfig) -> None:
        self._retries, self._timeout_s = config.retries, config.stage_timeout_s
        self._delays_s = [
            min(config.retry_delay_s * 2**number, RETRY_DELAY_S_MAX)
            for number in range(max(config.retries, 1))
        ]
        self._in_flight_max = config.shards_in_flight_max
        self._watch = Stopwatch()

    @property
    def seconds(self) -> dict[str, float]:
        return self._watch.metrics()

    async def run(self, stage: StageTask[Value], *arguments: Any) -> Value:
        _show(stage, arguments)
        (result,) = await self._results(stage, [arguments])
        self._watch.lap(_task(stage).name)
        return result

    async def each(self, stage: StageTask[Value], calls: Iterable[Sequence[Any]]) -> list[Value]:
        """The results of one task per element of `calls`, in order, a bounded number at once.

        When some fail the others still finish, since what they commit stays; then the first failure
        is raised.
        """
        gate, nodes = asyncio.Semaphore(self._in_flight_max), nodes_of(_task(stage))
        waiting = [*calls]
        for call in waiting[:1]:
            _show(stage, call)

        async def pass_gate(unit: Sequence[Sequence[Any]]) -> list[Value]:
            async with gate:
                return await self._results(stage, unit)

        units = [[call] for call in waiting] if nodes is None else nodes.chunks(waiting)
        outcomes = await asyncio.gather(*map(pass_gate, units), return_exceptions=True)
        self._watch.lap(_task(stage).name)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise failures[0]
        done = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        return [value for values in done for value in values]

    async def _results(
        self, stage: StageTask[Value], calls: Sequence[Sequence[Any]]
    ) -> list[Value]:
        """The results of calls that a node gets together, or of one in this process."""
        task = _task(stage)
        tuned = task.with_options(
            retries=self._retries,
            retry_delay_seconds=self._delays_s,
            timeout_seconds=self._timeout_s,
        )
        if (nodes := nodes_of(task)) is not None:
            return await nodes.call(tuned, calls)
        outcomes = [await tuned(*arguments) for arguments in calls]
        # `as_state` hands back a state; the reference in it carries the lineage.
        return [await each.aresult() if isinstance(each, State) else each for each in outcomes]


def _show(stage: StageTask[Any], arguments: Sequence[Any]) -> None:
    """Publish that a stage begins: its own events come with the first units that are done."""
    name = _task(stage).name
    # Of what learns from pairs, the second argument says whether it is a reward model.
    if (shown := arguments[1] if name == "fit" else SHOWN.get(name)) is not None:
        run, *others = arguments
        round = None if shown in ("start", *OF_STEPS) else others[0]
        publish(ProgressEvent(run_id=run.run_id, stage=shown, round=round))


def _task(stage: StageTask[Any]) -> Task[..., Any]:
    assert isinstance(stage, Task), f"expected a task, found {stage!r}"
    return stage


def open_run(ref: RunRef) -> Run:
    """The run that `ref` names, opened once per process: a remote store is slow to connect.

    Raises ConfigError where another machine gave it out, and this one has other code or another run
    of that name.
    """
    return _opened(json.dumps(asdict(ref), sort_keys=True))


@lru_cache(maxsize=8)
def _opened(reference: str) -> Run:
    fields = json.loads(reference)
    ref = RunRef(**{**fields, "free": tuple(fields["free"])})
    if ref.code not in ("", code_digest()):
        raise ConfigError(
            f"this worker has other code than the trainer of {ref.run_id!r}: expected digest "
            f"{ref.code[:12]}, found {code_digest()[:12]}; install the same version on both"
        )
    run = Run.of(ref)
    if ref.record and (record := run_sha256(run.folder)) != ref.record:
        raise ConfigError(
            f"this worker has another run of the name {ref.run_id!r} at {run.folder.url}: expected "
            f"a run.json with digest {ref.record[:12]}, found {record[:12]}; give workers and "
            "trainer one root"
        )
    return run


def as_state(ref: SlotRef) -> SlotRef:
    """`ref` as a task's result: a state named "Reused" where the slot was committed already."""
    return Completed(name="Reused", data=ref) if ref.reused else ref  # type: ignore[return-value]


async def in_thread(work: Callable[..., Value], *arguments: Any) -> Value:
    """Run blocking work off the event loop, so that deadlines and cancelling take effect.

    The thread is a daemon, since Python cannot interrupt it and a cancelled process must not wait
    for it. Uncommitted work is lost then.
    """
    outcome: Future[Value] = Future()

    def body() -> None:
        outcome.set_running_or_notify_cancel()
        try:
            outcome.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is raised in the task that waits
            outcome.set_exception(error)

    context = contextvars.copy_context()
    name = getattr(work, "__name__", "work")  # a partial has none
    threading.Thread(target=context.run, args=(body,), name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)

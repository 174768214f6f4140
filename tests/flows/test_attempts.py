"""Retries, deadlines and concurrency of stages, on a real Prefect engine."""

import asyncio
import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.context import FlowRunContext

from flows.reports import quieten
from flows.server import prefect_api
from marin_rl.config import FlowConfig
from marin_rl.errors import ConfigError, EndpointUnavailable, StoreUnavailable
from marin_rl.types import SlotRef
from tasks.options import STAGE, StageRunner, in_thread

FAST = FlowConfig(retries=2, retry_delay_s=0.01, shards_in_flight_max=2)


def ref(name: str, *, reused: bool = False) -> SlotRef:
    """A reference to nothing."""
    return SlotRef(slot=name, sha256=f"{name:0>64}", reused=reused)


def run(body: Callable[[], Any]) -> tuple[Any, UUID]:
    """Run an async body as a flow; its result and the flow run's id."""

    @flow(name="test", persist_result=False)
    async def around() -> tuple[Any, UUID]:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        return await body(), context.flow_run.id

    return asyncio.run(around())


@pytest.mark.slow
def test_an_error_is_reported_in_full_once(api: str) -> None:
    """By the caller of `ApiConnection.run`, or by the flow that a worker runs."""
    text = f"round 3, shard 1: 7 of 8 rollouts failed, {'too many ' * 9}\nand a detail"
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # pyright: ignore[reportAttributeAccessIssue]
    loggers = [logging.getLogger(name) for name in ("prefect.task_runs", "prefect.flow_runs")]

    @task(**STAGE)
    async def stage() -> None:
        raise EndpointUnavailable(text)

    @flow(name="test", persist_result=False)
    async def failing() -> None:
        quieten()
        await StageRunner(FAST).run(stage)

    for logger in loggers:
        logger.addHandler(handler)
    try:
        with prefect_api() as connection, pytest.raises(EndpointUnavailable) as raised:
            connection.run(failing)
        called = [record.getMessage() for record in records if record.levelno >= logging.ERROR]
        records.clear()
        with pytest.raises(EndpointUnavailable):
            asyncio.run(failing())
        alone = [record.getMessage() for record in records if record.levelno >= logging.ERROR]
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert str(raised.value) == text
    brief = f"failed: EndpointUnavailable: {text[:69].rstrip()} …"
    assert called == [brief, "failed: EndpointUnavailable"]
    assert alone == [brief, f"failed: EndpointUnavailable: {text}"]
    assert all(record.exc_info is None for record in records)


def test_a_fault_that_can_pass_is_tried_again(api: str) -> None:
    tries = count(1)

    @task(**STAGE)
    async def flaky() -> SlotRef:
        if next(tries) < 3:
            raise StoreUnavailable("503")
        return ref("done")

    result, _ = run(lambda: StageRunner(FAST).run(flaky))
    assert result == ref("done")
    assert next(tries) == 4


@pytest.mark.parametrize("error", [ConfigError("wrong"), OSError("disk")])
def test_a_fault_that_stays_is_not_tried_again(api: str, error: Exception) -> None:
    tries = count(1)

    @task(**STAGE)
    async def broken() -> SlotRef:
        next(tries)
        raise error

    with pytest.raises(type(error), match=str(error)):
        run(lambda: StageRunner(FAST).run(broken))
    assert next(tries) == 2


def test_tries_are_bounded(api: str) -> None:
    tries = count(1)

    @task(**STAGE)
    async def down() -> SlotRef:
        next(tries)
        raise EndpointUnavailable("still down")

    with pytest.raises(EndpointUnavailable, match="still down"):
        run(lambda: StageRunner(FAST).run(down))
    assert next(tries) == 2 + FAST.retries


def test_delays_double_up_to_a_limit() -> None:
    @task(**STAGE)
    async def stage() -> SlotRef:
        return ref("x")

    seen: list[Any] = []

    class Seen(StageRunner):
        async def __call__(self, stage: Any, *arguments: Any) -> Any:
            seen.append(self._delays_s)

    asyncio.run(Seen(FlowConfig(retries=10, retry_delay_s=5))(stage))
    assert seen == [[5, 10, 20, 40, 80, 160, 320, 600, 600, 600]]


def test_a_deadline_ends_blocking_work(api: str) -> None:
    released = threading.Event()

    @task(**STAGE)
    async def stuck() -> SlotRef:
        await in_thread(released.wait)
        return ref("never")

    with pytest.raises(TimeoutError):  # the work itself never ends
        run(lambda: StageRunner(FlowConfig(stage_timeout_s=0.5)).run(stuck))
    released.set()


def test_errors_of_blocking_work_reach_the_caller() -> None:
    def fail(text: str) -> None:
        raise ConfigError(text)

    with pytest.raises(ConfigError, match="the very text"):
        asyncio.run(in_thread(fail, "the very text"))
    assert asyncio.run(in_thread(divmod, 7, 4)) == (1, 3)


def test_results_stay_in_order_and_few_run_at_once(api: str) -> None:
    running = [0, 0]
    two = asyncio.Event()

    @task(**STAGE)
    async def stage(number: int) -> SlotRef:
        running[0] += 1
        running[1] = max(running)
        if running[0] == FAST.shards_in_flight_max:
            two.set()
        await asyncio.wait_for(two.wait(), 60)  # the first would else end before the second begins
        await asyncio.sleep(0.02 * (5 - number))
        running[0] -= 1
        return ref(str(number))

    results, _ = run(lambda: StageRunner(FAST).each(stage, [(n,) for n in range(5)]))
    assert [item.slot for item in results] == ["0", "1", "2", "3", "4"]
    assert running[1] == FAST.shards_in_flight_max


def test_when_one_of_many_fails_the_others_finish(api: str) -> None:
    finished: list[int] = []

    @task(**STAGE)
    async def stage(number: int) -> SlotRef:
        if number == 0:
            raise ConfigError("number 0")
        await asyncio.sleep(0.05)
        finished.append(number)
        return ref(str(number))

    with pytest.raises(ConfigError, match="number 0"):
        run(lambda: StageRunner(FAST).each(stage, [(n,) for n in range(4)]))
    assert sorted(finished) == [1, 2, 3]

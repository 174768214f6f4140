"""Further turns share requests: which ones, in what order, and what a fault costs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from marin_rl.errors import BadResponse, EndpointUnavailable
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.policy_client import IN_FLIGHT, TurnBatches
from marin_rl.inference.client.protocol import ChatRequest, TurnsRequest
from marin_rl.types import Sampling


def turn(number: int, *, n: int = 1, ids: bool = True, **sampling: float | None) -> ChatRequest:
    return ChatRequest(
        model="m",
        messages=(),
        n=n,
        sampling=Sampling(**({"max_tokens": 4, "seed": number} | sampling)),  # type: ignore[arg-type]
        prompt_ids=np.array([number, 9], np.int32) if ids else None,
    )


def echoed(request: TurnsRequest) -> list[ChatAnswer]:
    """Answers whose only token is the seed of their turn."""
    return [
        ChatAnswer(
            model=request.model,
            prompt_token_ids=prompt,
            completions=(
                Completion(
                    text=str(seed),
                    token_ids=np.array([seed], np.int32),
                    logprobs=np.zeros(1, np.float32),
                    finish_reason="stop",
                ),
            ),
        )
        for prompt, seed in zip(request.prompts, request.seeds, strict=True)
    ]


class Endpoint:
    """Answers each request when `release` is set, and keeps their seeds."""

    def __init__(self, reply: Callable[[TurnsRequest], list[ChatAnswer]] = echoed) -> None:
        self.asked: list[list[int]] = []
        self.in_flight = self.in_flight_most = 0
        self.reply, self.release = reply, asyncio.Event()

    async def __call__(self, request: TurnsRequest) -> list[ChatAnswer]:
        self.asked.append(list(request.seeds))
        self.in_flight += 1
        self.in_flight_most = max(self.in_flight_most, self.in_flight)
        await self.release.wait()
        self.in_flight -= 1
        return self.reply(request)


async def settled() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def check(answers: Sequence[ChatAnswer], numbers: Sequence[int]) -> None:
    for answer, number in zip(answers, numbers, strict=True):
        assert answer.prompt_token_ids.tolist() == [number, 9]
        assert answer.completions[0].token_ids.tolist() == [number]


def test_turns_that_are_due_together_are_one_request() -> None:
    async def run() -> None:
        endpoint = Endpoint()
        endpoint.release.set()
        batches = TurnBatches(endpoint, 64)
        check(await asyncio.gather(*(batches.ask(turn(i)) for i in range(5))), range(5))
        assert endpoint.asked == [[0, 1, 2, 3, 4]]

    asyncio.run(run())


def test_turns_that_come_meanwhile_wait_for_one_another() -> None:
    async def run() -> None:
        endpoint = Endpoint()
        batches = TurnBatches(endpoint, 3)
        asks = []
        for number in range(9):
            asks.append(asyncio.create_task(batches.ask(turn(number))))
            await settled()
        assert endpoint.asked == [[0], [1]]
        endpoint.release.set()
        check(await asyncio.gather(*asks), range(9))
        assert endpoint.asked == [[0], [1], [2, 3, 4], [5, 6, 7], [8]]
        assert endpoint.in_flight_most == IN_FLIGHT

    asyncio.run(run())


def test_other_sampling_goes_in_another_request() -> None:
    async def run() -> None:
        endpoint = Endpoint()
        endpoint.release.set()
        batches = TurnBatches(endpoint, 64)
        warm, greedy = (turn(0), turn(2)), turn(1, temperature=0.0)
        check(await asyncio.gather(*map(batches.ask, (warm[0], greedy, warm[1]))), (0, 1, 2))
        assert sorted(endpoint.asked) == [[0, 2], [1]]

    asyncio.run(run())


@pytest.mark.parametrize(
    "other", [turn(0, n=2), turn(0, ids=False), turn(0, seed=None)], ids=["n", "messages", "seed"]
)
def test_only_single_samples_of_exact_ids_with_a_seed_share_requests(other: ChatRequest) -> None:
    batches = TurnBatches(_never, 64)
    assert batches.takes(turn(0))
    assert not batches.takes(other)
    assert not TurnBatches(_never, 1).takes(turn(0))


def test_a_fault_reaches_every_turn_of_its_request() -> None:
    def down(_: TurnsRequest) -> list[ChatAnswer]:
        raise EndpointUnavailable("down")

    def fewer(request: TurnsRequest) -> list[ChatAnswer]:
        return echoed(request)[:-1]

    async def run(reply: Callable[[TurnsRequest], list[ChatAnswer]], kind: type[Exception]) -> None:
        endpoint = Endpoint(reply)
        endpoint.release.set()
        batches = TurnBatches(endpoint, 64)
        faults = await asyncio.gather(
            *(batches.ask(turn(i)) for i in range(3)), return_exceptions=True
        )
        assert [type(fault) for fault in faults] == [kind] * 3

    asyncio.run(run(down, EndpointUnavailable))
    asyncio.run(run(fewer, BadResponse))


def test_a_cancelled_turn_costs_no_other() -> None:
    async def run() -> None:
        endpoint = Endpoint()
        batches = TurnBatches(endpoint, 64)
        first, second = (asyncio.create_task(batches.ask(turn(i))) for i in range(2))
        await settled()
        first.cancel()
        endpoint.release.set()
        check([await second], [1])
        assert first.cancelled()
        await batches.close()

    asyncio.run(run())


def test_closing_cancels_what_is_under_way() -> None:
    async def run() -> None:
        endpoint = Endpoint()
        batches = TurnBatches(endpoint, 64)
        task = asyncio.create_task(batches.ask(turn(0)))
        await settled()
        await batches.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, timeout=5)

    asyncio.run(run())


def _never(_: TurnsRequest) -> Awaitable[list[ChatAnswer]]:
    raise AssertionError("not asked")

"""A client of a fleet that comes and goes: endpoints are looked up, proven and balanced all along.

A request is sent to an endpoint that is ready, and to another one where that is lost; it waits
while none is. An endpoint that joins, or comes back, is asked for the policy's id and for the
canary before it gets a request. Whether it is alive is what it answers now, never a clock.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import takewhile
from typing import Any, Self

import numpy as np

from marin_rl.config import InferenceConfig
from marin_rl.errors import (
    BadResponse,
    ConfigError,
    EndpointUnavailable,
    FleetEmpty,
    InferenceError,
    InputError,
    RequestRejected,
    StalePolicy,
    StorageError,
)
from marin_rl.inference.canary_prompt import CANARY_PROMPT, CANARY_SEED, mean_difference
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.fleet import Fleet, Member, load_in
from marin_rl.inference.client.fleet_sources import EndpointSource
from marin_rl.inference.client.policy_client import (
    PAUSE_FIRST_S,
    PAUSE_MAX_S,
    PolicyClient,
    at_root,
    model_ids,
)
from marin_rl.inference.client.protocol import ChatRequest
from marin_rl.inference.client.publishing import Publisher, Send
from marin_rl.types import Canary, CanarySample, Sampling

PROBE_S = 1.0  # between two looks at a ready endpoint
PROBE_TIMEOUT_S = 10.0  # of a look at a ready endpoint
MISSES_MAX = 3  # looks in a row that a ready endpoint may leave unanswered: it may just be busy
PROBE_PAUSE_MAX_S = 8.0  # between two looks at one that is away
SPREAD_S = 1.0  # for which first requests wait for endpoints that were proven just now

_log = logging.getLogger(__name__)


class FleetClient(PolicyClient):
    """`PolicyClient` over the endpoints that `source` names at the moment.

    `endpoints` are those that the trainer has proven just now; others answer the `canary`
    first, where there is one, and are sent the `weights` first, where those are sent.
    `timeout_s` bounds an answer, the canary's too, `fleet_timeout_s` how long no endpoint is
    ready. Between two looks at an endpoint are `probe_s`.
    """

    probes = False  # an endpoint of another kind may know no requests that go before others

    def __init__(
        self,
        *,
        source: EndpointSource,
        canary: Canary | None = None,
        weights: Publisher | None = None,
        zone: str | None = None,
        fleet_timeout_s: float = 300.0,
        probe_s: float = PROBE_S,
        endpoints: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(endpoints=endpoints or ("",), **options)
        self._source, self._canary, self._weights = source, canary, weights
        self._fleet_timeout_s, self._probe_s = fleet_timeout_s, probe_s
        self._proven_by_trainer = set(endpoints)
        self._fleet = Fleet(zone)
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._due: dict[str, tuple[float, float]] = {}  # when to look again, and the pause
        # One became ready, or the source is wrong; one was lost, so look at once.
        self._changed, self._hurry = asyncio.Event(), asyncio.Event()
        self._awaited, self._spread = set(endpoints), asyncio.Event()
        self._empty_since: float | None = None
        self._fault: ConfigError | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def close(self) -> None:
        """Look no more, and close every connection."""
        tasks = [task for task in (self._watcher, *self._looks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    async def wait_until_ready(self) -> list[str]:
        """URLs of the endpoints that are ready, once there are some. Raises FleetEmpty."""
        await self._member("")
        # Those that were asked at the same time may answer a moment later.
        running = [task for task in self._looks.values() if not task.done()]
        if running:
            await asyncio.wait(running, timeout=PROBE_TIMEOUT_S)
        return sorted(member.url for member in self._fleet.ready)

    async def _send(self, path: str, body: dict[str, Any], session: str) -> bytes:
        failures, samples = 0, _samples(body)
        # Before an endpoint is chosen: what waits here goes to those that join meanwhile.
        async with self._in_flight:
            while True:
                member = await self._member(session)
                member.sent(samples)
                try:
                    # No gate: its place among the requests in flight is taken above.
                    data = await self._attempt(member.url, "POST", path, body, gate=nullcontext())
                    await self._check_sampled(member, data)
                    return data
                except (EndpointUnavailable, StalePolicy) as error:
                    failures += self._failed(member, error)
                    if failures >= self._attempts_max:
                        raise
                finally:
                    # Also of a request that was cancelled, or it would count as work for ever.
                    member.answered(samples)
                    member.not_before = self._not_before.get(member.url, 0.0)
                await asyncio.sleep(_pause_s(failures))

    async def _check_sampled(self, member: Member, data: bytes) -> None:
        """Raise StalePolicy for an answer that this endpoint may not give.

        Nothing is checked here: a request names the weights that are to answer it.
        """

    def _failed(self, member: Member, error: InferenceError) -> int:
        """Take note of a fault; 1 where it counts as one of the request's attempts."""
        if isinstance(error, StalePolicy):
            self._lose(member, str(error))  # it has gone on to other weights, or is another server
        # Nothing was answered, so the next endpoint, or the same one restarted, is asked the same.
        # One that has left the fleet keeps the state in which it left.
        return int(member.state == "ready" and self._fleet.has(member))

    async def _member(self, session: str) -> Member:
        """The endpoint to ask, once there is one. Raises FleetEmpty, ConfigError."""
        await self._wait_for_proven()
        while True:
            member = self._fleet.choose(session, time.monotonic())
            if member is not None:
                return member
            if self._fault is not None:
                raise self._fault
            left_s = self._fleet_timeout_s - self._empty_s()
            if left_s <= 0:
                raise FleetEmpty(
                    f"no endpoint served {self.model} for {self._fleet_timeout_s:g} s "
                    f"(inference.fleet_timeout_s): {self._fleet.state_lines()}. To go on, "
                    f"{self._source.advice} and run again: nothing is lost"
                )
            # No await since `choose`, so no change is missed.
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    async def _wait_for_proven(self) -> None:
        """Wait a moment for each endpoint that was proven just now to be looked at.

        Else the one that answers its look first would be sent all requests of a chunk.
        """
        if self._awaited and not self._spread.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(SPREAD_S):
                    await self._spread.wait()
            self._spread.set()

    def _place_of(self, session: str) -> str:
        return self._fleet.place_of(session)

    def _on_broken(self, url: str) -> None:
        member = self._fleet.members.get(url)
        if member is not None:
            self._lose(member, "refused or broke the connection")

    def _lose(self, member: Member, reason: str) -> None:
        if member.state == "ready":
            _log.warning("endpoint %s is lost: %s", member.url, reason)
            self._due.pop(member.url, None)
            self._hurry.set()
        if member.state != "refused":
            member.state, member.reason = "lost", reason
        member.load = None
        self._empty_s()

    def _empty_s(self) -> float:
        """Seconds for which no endpoint has been ready."""
        now = time.monotonic()
        if self._fleet.ready:
            self._empty_since = None
            return 0.0
        self._empty_since = now if self._empty_since is None else self._empty_since
        return now - self._empty_since

    async def _watch(self) -> None:
        """Look at the source and at every endpoint, until cancelled."""
        while True:
            await self._resolve()
            self._empty_s()
            now = time.monotonic()
            for member in [m for m in self._fleet.members.values() if m.state != "refused"]:
                task = self._looks.get(member.url)
                if (task is None or task.done()) and self._due.get(member.url, (0.0, 0))[0] <= now:
                    self._looks[member.url] = asyncio.create_task(self._look(member))
            # Not `wait_for`, which in Python 3.11 drops a cancellation where the wait has ended.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._probe_s):
                    await self._hurry.wait()
            self._hurry.clear()

    async def _resolve(self) -> None:
        refused = {m.url for m in self._fleet.members.values() if m.state == "refused"}
        try:
            self._fleet.update(await asyncio.to_thread(self._source.resolve))
            self._fault = None
        except StorageError as error:
            _log.warning("cannot look for endpoints, those known go on: %s", error)
        except ConfigError as error:
            # Where endpoints are known they go on: a file may be half written.
            self._fault = error
            self._changed.set()
        for member in self._fleet.members.values():
            refusal = member.state == "refused" and not member.endpoint.awaited
            if refusal and member.url not in refused:
                _log.warning("endpoint %s is refused: %s", member.url, member.reason)

    async def _look(self, member: Member) -> None:
        """Ask an endpoint how it is; make it ready, or lose it."""
        try:
            if member.state == "ready":
                await self._check_ready(member)
            else:
                await self._admit(member)
                self._joined(member)
            member.reported(await self._load(member))
            member.missed = 0
        except EndpointUnavailable as error:
            member.missed += 1
            if member.state != "ready" or member.missed >= MISSES_MAX:
                self._lose(member, str(error))
        except (InferenceError, InputError, OSError) as error:
            self._lose(member, str(error))
        self._awaited.discard(member.url)
        if not self._awaited:
            self._spread.set()
        pause_s = self._probe_s
        if member.state != "ready":
            before_s = self._due.get(member.url, (0.0, self._probe_s / 2))[1]
            pause_s = min(2 * before_s, PROBE_PAUSE_MAX_S)
        # A little early, for the watcher wakes only every `probe_s`.
        self._due[member.url] = time.monotonic() + pause_s - self._probe_s / 2, pause_s

    def _joined(self, member: Member) -> None:
        if member.state == "new":
            _log.info("endpoint %s serves %s", member.url, self.model)
        else:
            _log.warning("endpoint %s is back", member.url)
        member.state, member.reason, member.missed = "ready", "", 0
        self._empty_s()
        self._changed.set()

    async def _check_ready(self, member: Member) -> None:
        """Raise StalePolicy where an endpoint that is ready says that it serves other weights."""
        if self._weights is not None:
            await self._weights.check(self._sender(member))

    async def _admit(self, member: Member) -> None:
        """Raise StalePolicy, BadResponse or what the client raises unless it serves the policy."""
        first = member.url in self._proven_by_trainer
        self._proven_by_trainer.discard(member.url)
        served = model_ids(await self._probe(member, "/models"))
        if self._weights is not None:
            await self._send_weights(member, self._weights, first=first)
            served = model_ids(await self._probe(member, "/models"))
        if self.model not in served:
            shown = ", ".join(sorted(served)) or "no model"
            raise StalePolicy(f"serves {shown:.200}, not {self.model}")
        if self._canary is not None and not first:
            await self._prove(member, self._canary)

    async def _send_weights(self, member: Member, weights: Publisher, *, first: bool) -> None:
        """Have an endpoint load the weights, unless the trainer has just seen it do so."""
        if first:
            try:
                await weights.check(self._sender(member))
                return
            except StalePolicy as error:
                _log.warning("endpoint %s %s", member.url, error)
        await weights.publish(self._sender(member))

    def _sender(self, member: Member) -> Send:
        """Send requests to an endpoint as an admin, past the bound on requests in flight."""
        return partial(self.send_as_admin, member.url, gate=nullcontext())

    async def _prove(self, member: Member, canary: Canary) -> None:
        """Compare an endpoint's answer to the canary with the trainer's numbers."""
        answer = await self._ask_canary(member, canary, self.model)
        self._check(answer, len(canary.samples))
        compare(answer.completions, canary.samples, canary.tolerance)

    async def _ask_canary(self, member: Member, canary: Canary, model: str) -> ChatAnswer:
        """An endpoint's answer to the canary by the weights with this id. Raises as `chat` does."""
        longest = max(len(ids) for ids, _ in canary.samples)
        sampling = Sampling(temperature=canary.temperature, max_tokens=longest, seed=CANARY_SEED)
        request = ChatRequest(
            model=model,
            messages=CANARY_PROMPT,
            n=len(canary.samples),
            sampling=sampling,
            probe=self.probes,
        )
        # In the time of a request: an endpoint may have a queue, where it waits as any other.
        return await self._ask_at(member.url, request, nullcontext())

    async def _load(self, member: Member) -> Any:
        try:
            return load_in(await self._probe(member, at_root(member.url, "/metrics")))
        except (RequestRejected, BadResponse):
            return None  # an endpoint without that route is balanced by what it was sent

    async def _probe(self, member: Member, path: str) -> bytes:
        """Answer of one endpoint to a GET, asked once. Raises as `chat` does."""
        # One that joins may have a queue before it: its canary waits there as any request.
        limit_s = min(PROBE_TIMEOUT_S, self._timeout_s) if member.state == "ready" else None
        return await self._attempt(
            member.url, "GET", path, None, gate=nullcontext(), timeout_s=limit_s
        )


def compare(
    completions: Sequence[Completion], samples: Sequence[CanarySample], tolerance: float
) -> None:
    """Raise StalePolicy unless completions have the canary's tokens with the trainer's numbers.

    Where rounding alone makes an endpoint draw another token than the trainer's did, what comes
    after that is not compared: half of all tokens must be the same.
    """
    expected, measured = list[float](), list[float]()
    for completion, (ids, logprobs) in zip(completions, samples, strict=True):
        same = _common_prefix(completion.token_ids.tolist(), ids)
        expected += logprobs[:same]
        measured += completion.logprobs[:same].tolist()
    if 2 * len(expected) < sum(len(ids) for ids, _ in samples):
        raise StalePolicy(
            f"samples other tokens for the canary: expected {[list(ids) for ids, _ in samples]}, "
            f"found {[completion.token_ids.tolist() for completion in completions]}: other "
            "weights, or numbers of another machine; the next round proves it by itself"
        )
    gap = mean_difference(np.asarray(expected), np.asarray(measured))
    if not gap <= tolerance:
        raise StalePolicy(
            f"expected the trainer's log-probabilities of the canary, found them {gap:.6f} nats "
            f"apart on average, above inference.canary_tolerance ({tolerance:g})"
        )


def _common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """Number of first tokens that are the same."""
    pairs = zip(ids, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _samples(body: dict[str, Any]) -> int:
    """Completions that a request asks for."""
    match body.get("prompt"):
        case [list(), *_] as prompts:
            return len(prompts)
        case _:
            return int(body.get("n") or 1)


def _pause_s(failures: int) -> float:
    """Seconds before the next attempt: none after a lost endpoint, which had no say."""
    if not failures:
        return 0.0
    return random.uniform(0, min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (failures - 1)))


async def ready_endpoints(
    inference: InferenceConfig, source: EndpointSource, model: str, canary: Canary | None = None
) -> tuple[str, ...]:
    """URLs of the endpoints that serve `model` and answer `canary`, once there are some.

    Raises FleetEmpty where there are none for `inference.fleet_timeout_s`.
    """
    client = FleetClient(
        source=source,
        canary=canary,
        model=model,
        api_key=os.environ.get(inference.api_key_variable),
        timeout_s=inference.request_timeout_s,
        fleet_timeout_s=inference.fleet_timeout_s,
    )
    async with client:
        return tuple(await client.wait_until_ready())

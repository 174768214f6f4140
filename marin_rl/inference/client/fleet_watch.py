"""Health checks of a client's endpoints: they are looked up, proven, and looked at all along.

An endpoint that joins, or comes back, is proven before it gets a request, and is looked at from
then on. Whether it is alive is what it answers now, never a clock of another machine. Leaves out
how a request is sent (`policy_client`) and the proofs themselves (`proofs`).
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

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
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.dialects import Dialect, Read
from marin_rl.inference.client.fleet import Fleet, FleetOptions, Member, load_in
from marin_rl.inference.client.fleet_sources import EndpointSource
from marin_rl.inference.client.http_client import HttpClient, Root

PROBE_TIMEOUT_S = 10.0  # of a look at a ready endpoint
MISSES_MAX = 3  # looks in a row that a ready endpoint may leave unanswered: it may just be busy
PROBE_PAUSE_MAX_S = 8.0  # between two looks at one that is away
SPREAD_S = 1.0  # for which first requests wait for endpoints that were proven just now

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAccess:
    """Requests to one endpoint, past the bound on requests in flight, each sent once.

    Answers are not checked. Raises as the client does.
    """

    member: Member
    http: HttpClient
    dialect: Dialect
    options: FleetOptions

    @property
    def model(self) -> str:
        return self.http.model

    @property
    def url(self) -> str:
        return self.member.url

    async def probe(self, path: str) -> bytes:
        # One that joins may have a queue before it: its canary waits there as any request.
        ready = self.member.state == "ready"
        limit_s = min(PROBE_TIMEOUT_S, self.http.timeout_s) if ready else None
        return await self.http.request(self.url, "GET", path, gate=nullcontext(), timeout_s=limit_s)

    async def post(self, path: str, body: dict[str, Any], read: Read) -> list[ChatAnswer]:
        return read(await self.http.request(self.url, "POST", path, body, gate=nullcontext()))

    async def send_as_admin(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        return await self.http.request(
            self.url, method, Root(path), body, admin=True, gate=nullcontext()
        )


class Proof(ABC):
    """Conditions on the endpoints of a client and on their answers.

    Methods raise StalePolicy for other weights, and what requests to the endpoint raise.
    """

    @abstractmethod
    async def admit(self, endpoint: EndpointAccess, *, first: bool) -> None:
        """Prove an endpoint that joins; `first` where the trainer has proven it just now."""

    @abstractmethod
    async def check_ready(self, endpoint: EndpointAccess) -> None:
        """Check which weights a ready endpoint says it serves."""

    @abstractmethod
    async def accept(self, endpoint: EndpointAccess, answer: ChatAnswer) -> ChatAnswer:
        """Return an answer of the endpoint with the policies of its tokens."""


class FleetWatch:
    """Keeps the `fleet` of a client in step with the endpoints that `source` names.

    `proven` are the URLs that the trainer has proven just now. Without a source the fleet is these,
    for good, and nothing is looked at.
    """

    def __init__(
        self,
        http: HttpClient,
        dialect: Dialect,
        options: FleetOptions,
        proof: Proof,
        source: EndpointSource | None,
        proven: Sequence[str],
    ) -> None:
        self._http, self._dialect, self._options = http, dialect, options
        self._proof, self._source = proof, source
        self.fleet = Fleet.of(proven) if source is None else Fleet(options.zone)
        self._proven_by_trainer = set(proven)
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._due: dict[str, tuple[float, float]] = {}  # when to look again, and the pause
        # One became ready, or the source is wrong; one was lost, so look at once.
        self._changed, self._hurry = asyncio.Event(), asyncio.Event()
        self._awaited, self._spread = set(proven), asyncio.Event()
        self._empty_since: float | None = None
        self._fault: ConfigError | None = None
        self._watcher: asyncio.Task[None] | None = None

    def access(self, member: Member) -> EndpointAccess:
        return EndpointAccess(
            member=member, http=self._http, dialect=self._dialect, options=self._options
        )

    def start(self) -> None:
        if self._source is not None:
            self._watcher = asyncio.create_task(self._watch(self._source))

    async def close(self) -> None:
        tasks = [task for task in (self._watcher, *self._looks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_until_ready(self) -> list[str]:
        """URLs of the endpoints that are ready, once there are some. Raises FleetEmpty."""
        await self.member("", ())
        # Those that were asked at the same time may answer a moment later.
        running = [task for task in self._looks.values() if not task.done()]
        if running:
            await asyncio.wait(running, timeout=PROBE_TIMEOUT_S)
        return sorted(member.url for member in self.fleet.ready)

    async def member(self, session: str, tried: Sequence[str]) -> Member:
        """The endpoint to ask, once there is one. Raises FleetEmpty, ConfigError."""
        if self._source is not None and self._awaited and not self._spread.is_set():
            # Each endpoint that was proven just now is looked at first: else the one that answers
            # its look before the others would be sent all requests of a chunk.
            with suppress(TimeoutError):
                async with asyncio.timeout(SPREAD_S):
                    await self._spread.wait()
            self._spread.set()
        while True:
            member = self.fleet.choose(session, time.monotonic(), tried)
            if member is not None:
                return member
            if self._fault is not None:
                raise self._fault
            assert self._source is not None, "endpoints of a plain list are always ready"
            left_s = self._options.timeout_s - self._empty_s()
            if left_s <= 0:
                raise FleetEmpty(
                    f"no endpoint served {self._http.model} for {self._options.timeout_s:g} s "
                    f"(inference.fleet_timeout_s): {self.fleet.state_lines()}. To go on, "
                    f"{self._source.advice} and run again: nothing is lost"
                )
            # No await since `choose`, so no change is missed.
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def failed(self, member: Member, error: InferenceError) -> int:
        """Take note of a fault; 1 where it counts as one of the request's attempts.

        Raises a StalePolicy of a plain list of endpoints, none of which is expected to change.
        """
        if isinstance(error, StalePolicy):
            if self._source is None:
                raise error
            self._lose(member, str(error))  # it has gone on to other weights, or is another server
        # Nothing was answered, so the next endpoint, or the same one restarted, is asked the same.
        # One that has left the fleet keeps the state in which it left; come again, it is another.
        stays = self.fleet.members.get(member.url) is member
        return int(member.state == "ready" and stays)

    def on_broken(self, url: str) -> None:
        member = self.fleet.members.get(url)
        if member is not None and self._source is not None:
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
        if self.fleet.ready:
            self._empty_since = None
            return 0.0
        self._empty_since = now if self._empty_since is None else self._empty_since
        return now - self._empty_since

    async def _watch(self, source: EndpointSource) -> None:
        """Look at the source and at every endpoint, until cancelled."""
        while True:
            await self._resolve(source)
            self._empty_s()
            now = time.monotonic()
            for member in [m for m in self.fleet.members.values() if m.state != "refused"]:
                task = self._looks.get(member.url)
                if (task is None or task.done()) and self._due.get(member.url, (0.0, 0))[0] <= now:
                    self._looks[member.url] = asyncio.create_task(self._look(member))
            # Not `wait_for`, which in Python 3.11 drops a cancellation where the wait has ended.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.probe_s):
                    await self._hurry.wait()
            self._hurry.clear()

    async def _resolve(self, source: EndpointSource) -> None:
        refused = {m.url for m in self.fleet.members.values() if m.state == "refused"}
        try:
            self.fleet.update(await asyncio.to_thread(source.resolve))
            self._fault = None
        except StorageError as error:
            _log.warning("cannot look for endpoints, those known go on: %s", error)
        except ConfigError as error:
            # Known endpoints stay in use: a file may be half written.
            self._fault = error
            self._changed.set()
        for member in self.fleet.members.values():
            refusal = member.state == "refused" and not member.endpoint.awaited
            if refusal and member.url not in refused:
                _log.warning("endpoint %s is refused: %s", member.url, member.reason)

    async def _look(self, member: Member) -> None:
        """Ask an endpoint how it is; make it ready, or lose it."""
        endpoint = self.access(member)
        try:
            if member.state == "ready":
                await self._proof.check_ready(endpoint)
            else:
                first = member.url in self._proven_by_trainer
                self._proven_by_trainer.discard(member.url)
                await self._proof.admit(endpoint, first=first)
                self._joined(member)
            try:
                member.reported(load_in(await endpoint.probe(Root("/metrics"))))
            except (RequestRejected, BadResponse):
                member.reported(None)  # without that route, only our own requests count as its load
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
        pause_s = self._options.probe_s
        if member.state != "ready":
            before_s = self._due.get(member.url, (0.0, self._options.probe_s / 2))[1]
            pause_s = min(2 * before_s, PROBE_PAUSE_MAX_S)
        # A little early, for the watcher wakes only every `probe_s`.
        self._due[member.url] = time.monotonic() + pause_s - self._options.probe_s / 2, pause_s

    def _joined(self, member: Member) -> None:
        if member.state == "new":
            _log.info("endpoint %s serves %s", member.url, self._http.model)
        else:
            _log.warning("endpoint %s is back", member.url)
        member.state, member.reason, member.missed = "ready", "", 0
        self._empty_s()
        self._changed.set()

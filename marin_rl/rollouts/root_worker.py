"""A worker that samples a window of groups, and has nothing but the run's root and its endpoints.

    the trainer's order (`storage.workers`) ─► proof of the endpoints ─► claim ─► groups ─► commit

Any number of them work for a run, next to whatever else samples for it. What they commit is what
any worker commits; claims spare work and decide nothing. Where the trainer closes the sampling, or
goes on to the next policy, a worker begins no further group. Needs no Prefect and no JAX.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from marin_rl.config import Config, override, parse_config
from marin_rl.environments.checks import environment_of
from marin_rl.errors import (
    ConfigError,
    CorruptObject,
    InferenceError,
    MarinRLError,
)
from marin_rl.inference.client.fleet_client import ready_endpoints
from marin_rl.inference.client.fleet_sources import EndpointSource, worker_board
from marin_rl.rollouts.interruption import Interruption
from marin_rl.rollouts.streaming import (
    Claimant,
    begun_by,
    now_utc,
    open_chunks,
    open_groups_max,
    sample_chunk,
)
from marin_rl.rollouts.worker_pulse import LOOK_S, Pulse
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.provenance import code_digest
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.intakes import Settled, intake_ref, settled_before
from marin_rl.storage.tables.stream import GroupStream, stream_fingerprint
from marin_rl.storage.workers import (
    BEAT_S,
    SAMPLING_KEY,
    WORKERS,
    SamplingOrder,
    WorkerWatch,
)
from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for
from marin_rl.types import ServedPolicy

_log = logging.getLogger(__name__)


def new_worker_name() -> str:
    """A name that no other worker has."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40].strip("-")
    return f"{WORKERS}{host or 'host'}-{os.getpid()}-{secrets.token_hex(3)}"


def stream_digest(config: Config, policy: ServedPolicy) -> str:
    """Fingerprint of the groups that this process samples with a policy's tokenizer."""
    version = environment_of(config).version
    names = policy.tokenizer_digest, policy.chat_template_digest
    return stream_fingerprint(config, version, *names)


@dataclass(slots=True)
class RootWorker:
    """Samples chunks of a run until it ends; without `follow`, until there are none to sample.

    `run` has the settings of this process, its endpoints among them. `chunks_max` are sampled at
    once. `report` gets a line for people and a record of each thing that happens.
    """

    run: Run
    name: str = field(default_factory=new_worker_name)
    follow: bool = False
    chunks_max: int = 1
    report: Callable[[str, dict[str, Any]], None] = lambda _line, _record: None
    beat_s: float | int = BEAT_S
    _tokenizer: TokenizerIdentity | None = None
    _policy: ServedPolicy | None = None
    _tasks: dict[int, "asyncio.Task[int]"] = field(default_factory=dict[int, "asyncio.Task[int]"])
    _failures: int = 0
    _taken: int = 0

    async def work(self) -> int:
        """Sample; return the number of groups that were sampled.

        Raises ConfigError for a run that such workers cannot sample for, or whose trainer has other
        code, settings or tokenizer; what sampling fails by more often than `flow.retries`.
        """
        if reason := self.run.config.without_root_workers:
            raise ConfigError(f"run {self.run.run_id!r}: {reason}")
        pulse = await asyncio.to_thread(
            Pulse, self.run, worker_board(self.run), self.name, self.beat_s
        )
        watch = WorkerWatch(pulse.board)
        await asyncio.to_thread(pulse.start)
        try:
            while await self._step(pulse, watch):
                pass
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await asyncio.to_thread(pulse.stop)
        return pulse.groups

    async def _step(self, pulse: Pulse, watch: WorkerWatch) -> bool:
        """Do what the order says, for a moment; False where there is nothing more to do."""
        order = pulse.order
        if order is not None and order.state == "open":
            try:
                if await self._take(pulse, order):
                    await self._fill(pulse, watch, order)
            except MarinRLError as error:
                await self._failed(pulse, order, error)
            if not (self._tasks or self.follow or self._failures):
                return False
        elif not self._tasks and not (self.follow and (order is None or order.state == "closed")):
            return False
        await self._wait(pulse)
        return True

    async def _take(self, pulse: Pulse, order: SamplingOrder) -> bool:
        """Turn to the policy of an order; False while chunks of the one before are under way.

        Where new weights come in flight, these go on with them.
        """
        begun, goes_on = pulse.begun, self._goes_on(pulse)
        if self._policy is not None and begun is not None:
            if not order.replaces(begun) and not pulse.interruption.requested:
                pulse.begun = order
                return True
            if self._tasks and not goes_on:
                self._leave(begun, order)
                return False
        if self._policy is None or begun is None or order.replaces(begun):
            if (policy := await self._checked(pulse, order)) is None:
                return False
            self._policy = policy
        # In this order: the thread compares what is ordered with what is begun.
        pulse.version, pulse.begun = order.policy.weight_version, order
        if not goes_on:
            pulse.interruption = Interruption()
        return True

    def _leave(self, begun: SamplingOrder, order: SamplingOrder) -> None:
        """Cancel what is under way by an order that another one has replaced."""
        if order.replaces(begun):  # its endpoints have gone on: what is left cannot end
            for task in self._tasks.values():
                task.cancel()

    def _goes_on(self, pulse: Pulse) -> bool:
        """True if chunks under way go on with the policy of the next order."""
        return self.run.config.in_flight_updates and not pulse.interruption.requested

    async def _checked(self, pulse: Pulse, order: SamplingOrder) -> ServedPolicy | None:
        """The policy of an order, checked and proven; None where another order came first."""
        await asyncio.to_thread(self._check, order)
        policy = await self._proven_in_time(pulse, order)
        if policy is not None:
            line = f"policy {order.policy.model}: proven at {', '.join(policy.endpoints)}"
            self.report(line, {"state": "proven", "model": order.policy.model})
        return policy

    async def _proven_in_time(self, pulse: Pulse, order: SamplingOrder) -> ServedPolicy | None:
        """The proven policy of an order; None where another order came first."""
        proof = asyncio.ensure_future(self._proven(order.policy))
        try:
            while not (await asyncio.wait([proof], timeout=LOOK_S))[0]:
                latest = pulse.order
                if latest is None or latest.state != "open" or latest.replaces(order):
                    return None
            return proof.result()
        finally:
            proof.cancel()
            await asyncio.gather(proof, return_exceptions=True)

    def _check(self, order: SamplingOrder) -> None:
        """Refuse to sample for a trainer of another kind. Raises ConfigError, CorruptObject."""
        if self._tokenizer is None:
            self._tokenizer = TokenizerIdentity.of(tokenizer_for(self.run.config.policy))
        ours, policy = self._tokenizer, order.policy
        for what, expected, actual in (
            ("another run of this name", order.run_sha256, run_sha256(self.run.folder)),
            ("other code", order.code, code_digest()),
            ("another tokenizer", policy.tokenizer_digest, ours.tokenizer_digest),
            ("another chat template", policy.chat_template_digest, ours.chat_template_digest),
            (
                "other settings, or other code of an environment,",
                order.stream,
                stream_digest(self.run.config, policy),
            ),
        ):
            if actual != expected:
                raise ConfigError(
                    f"this worker has {what} than the trainer of {self.run.run_id!r}: expected "
                    f"digest {expected[:12]}, found {actual[:12]}; give both the same version of "
                    "marin-rl, the same configuration and files"
                )
        recorded = manifest_of(self.run.store, policy.checkpoint).extra["parameters_digest"]
        if recorded != policy.parameters_digest:
            raise CorruptObject(
                f"{self.run.folder.url_of(SAMPLING_KEY)}: expected the parameters of "
                f"{policy.checkpoint.slot}, {str(recorded)[:12]}, found "
                f"{policy.parameters_digest[:12]}"
            )

    async def _proven(self, policy: ServedPolicy) -> ServedPolicy:
        """The policy with the endpoints that answer its canary as the trainer does.

        Raises FleetEmpty where none does for `inference.fleet_timeout_s`.
        """
        config = self.run.config
        source = EndpointSource.of(config, policy.tokenizer_digest, policy.chat_template_digest)
        endpoints = await ready_endpoints(config.inference, source, policy.model, policy.canary)
        return replace(policy, endpoints=endpoints)

    async def _fill(self, pulse: Pulse, watch: WorkerWatch, order: SamplingOrder) -> None:
        """Claim and begin chunks while there is room."""
        if len(self._tasks) >= self.chunks_max:
            return
        run = ordered_run(self.run, order)
        stream = GroupStream(run, fingerprint=order.stream)
        settled = await asyncio.to_thread(self._settled, run, order)
        await asyncio.to_thread(stream.look)
        claiming = {claim.worker for claim in stream.claims.values()}
        gone = await asyncio.to_thread(watch.gone, claiming)
        version = order.policy.weight_version
        claimant = Claimant(
            worker=self.name,
            most=open_groups_max(run.config, version, self._taken),
            now=now_utc(),
            oldest=self._taken - run.config.staleness_rounds_max,
            busy={*self._tasks},
            gone=gone,
        )
        try:
            for chunk in open_chunks(stream, settled, claimant):
                if not (pulse.chunks or await asyncio.to_thread(pulse.may_begin, order, chunk)):
                    break
                begun = begun_by(stream, chunk, claimant)
                began = version if begun is None else begun
                if await asyncio.to_thread(stream.claim, chunk, self.name, began, claimant.now):
                    self._begin(pulse, run, chunk, settled)
                if len(self._tasks) >= self.chunks_max:
                    return
        finally:
            announced, pulse.chunks = pulse.chunks, tuple(sorted(self._tasks))
        if announced and not pulse.chunks:  # a trainer may wait for what others had claimed before
            await asyncio.to_thread(pulse.write)

    def _begin(self, pulse: Pulse, run: Run, chunk: int, settled: Settled) -> None:
        assert self._policy is not None, "it is proven first"
        policy, interruption = self._policy, pulse.interruption
        sampling = sample_chunk(run, chunk, policy, self.name, settled, interruption)
        self._tasks[chunk] = asyncio.ensure_future(sampling)
        pulse.chunks = tuple(sorted(self._tasks))

    def _settled(self, run: Run, order: SamplingOrder) -> Settled:
        """Numbers that the intakes of all rounds so far have settled; counts the rounds."""
        self._taken = max(self._taken, order.rounds_taken)
        while self._taken < run.config.rounds and intake_ref(run, self._taken) is not None:
            self._taken += 1
        return settled_before(run, self._taken)

    async def _wait(self, pulse: Pulse) -> None:
        """Wait for a chunk to end, or for a moment."""
        if not self._tasks:
            await asyncio.sleep(LOOK_S)
            return
        running, begun = [*self._tasks.values()], pulse.begun
        await asyncio.wait(running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        ended = {chunk: task for chunk, task in self._tasks.items() if task.done()}
        for chunk, task in ended.items():
            del self._tasks[chunk]
            pulse.chunks = tuple(sorted(self._tasks))
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                self._failures = 0
                pulse.groups += task.result()
                line = f"chunk {chunk}: {task.result()} groups by policy {pulse.version}"
                record = {"state": "sampled", "chunk": chunk, "groups": task.result()}
                self.report(line, record)
            else:
                await self._failed(pulse, begun, error)
        if ended:
            await asyncio.to_thread(pulse.write)  # a trainer may wait for these chunks

    async def _failed(
        self, pulse: Pulse, begun: SamplingOrder | None, error: BaseException
    ) -> None:
        """Go on after a fault, where that can help. Raises the error where it cannot.

        Endpoints that have gone on to the next policy are no fault.
        """
        order = await asyncio.to_thread(pulse.look)
        moved = order is None or begun is None or order.state != "open" or order.replaces(begun)
        if isinstance(error, InferenceError) and moved:
            _log.info("worker %s leaves what it cannot end: %s", self.name, error)
            return
        flow = self.run.config.flow
        self._failures += 1
        passes = isinstance(error, MarinRLError) and error.transient
        if not passes or self._failures > flow.retries:
            raise error
        _log.warning("worker %s tries again: %s", self.name, error)
        await asyncio.sleep(flow.retry_delay_s)


def ordered_run(run: Run, order: SamplingOrder) -> Run:
    """The run with the settings that its trainer shares with all workers."""
    shared = {
        "rounds": order.rounds,
        "asynchrony.max_inflight_groups": order.groups_open_max,
        "asynchrony.claim_s": order.claim_s,
        "asynchrony.commit_every_s": order.commit_every_s,
    }
    changes = [f"{key}={json.dumps(value)}" for key, value in shared.items()]
    config = parse_config(override(run.config.model_dump(mode="json"), changes))
    return replace(run, config=config)

"""Sampling into a stream (`asynchrony.sampler: windowed`): chunks of groups, claimed and committed.

A group is committed as soon as it is finished, by whichever policy this process was given. What a
group asks for depends on its number alone, so any worker may sample any chunk. Leaves out what a
round takes of the stream (`storage.tables.intakes`).
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock
from typing import Any, TypeVar

from marin_rl.config import Config
from marin_rl.environments.base import Environment
from marin_rl.environments.checks import environment_of
from marin_rl.errors import StorageError
from marin_rl.inference.client.fleet_sources import sampling_board
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.generate import group_request, refuse_if_mostly_errors, sample_groups
from marin_rl.rollouts.in_flight import in_flight_client
from marin_rl.rollouts.interruption import Interruption
from marin_rl.rollouts.partial import PartialSampling
from marin_rl.rollouts.trajectories import GroupRequest
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.intakes import Settled
from marin_rl.storage.tables.packs import PackChain
from marin_rl.storage.tables.partials import partials_of_stream
from marin_rl.storage.tables.stream import (
    Claim,
    GroupStream,
    chunk_size,
    groups_in,
    numbers_of,
    stream_fingerprint,
)
from marin_rl.storage.tables.streamed import number_of
from marin_rl.types import Rollout, RolloutGroup, ServedPolicy

TARGET_POLL_S = 0.5

T = TypeVar("T")

_log = logging.getLogger(__name__)


def open_groups_max(config: Config, version: int, rounds_taken: int) -> int:
    """Number of groups that may be claimed and not settled while checkpoint `version` samples.

    `max_inflight_groups`; and no more than the rounds within the bound of staleness will take, for
    what they leave would be too old for later ones. With dynamic sampling that number is not known.
    """
    most, groups = config.inflight_groups_max, config.rollouts.groups_per_round
    if config.samples_on:
        return most
    rounds = min(version + config.staleness_rounds_max + 1, config.rounds) - rounds_taken
    return max(0, min(most, rounds * groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A worker that claims chunks: its name, those it samples already, and its clock.

    `most` bounds the groups that are claimed and not settled, its own and those of others, but for
    those of policies before `oldest`, which no further round can take.
    """

    worker: str
    most: int
    now: datetime
    oldest: int = 0
    busy: Collection[int] = ()


def open_chunks(stream: GroupStream, settled: Settled, claimant: Claimant) -> Iterator[int]:
    """Yield the chunks that a worker may sample now, in order, as long as there is room.

    Chunks with a live claim of another worker are left out, as are those that this worker samples
    already. A worker that starts again goes on with its own claims.
    """
    config = stream.run.config
    # Counted from claims and intakes alone, so that a restart changes nothing.
    chunk, counted = settled.floor // chunk_size(config), 0
    while counted < claimant.most:
        claim, left = stream.claims.get(chunk), settled.left(numbers_of(config, chunk))
        taken = chunk in claimant.busy or _is_anothers(claim, claimant, config)
        if not (taken or stream.has(left)):
            yield chunk
        if claim is None or claim.policy_version >= claimant.oldest:
            counted += len(left)
        chunk += 1


def _is_anothers(claim: Claim | None, claimant: Claimant, config: Config) -> bool:
    """True if a claim leaves its chunk to another worker."""
    if claim is None or claim.worker == claimant.worker:
        return False
    return claim.is_live(claimant.now, _claim_s(config))


def begun_by(stream: GroupStream, chunk: int, claimant: Claimant) -> int | None:
    """The policy that began a chunk which a worker goes on with; None where it begins it.

    Groups that are sampled in pieces are as old as their first piece; those that no round could
    take any more are begun again.
    """
    claim = stream.claims.get(chunk)
    if stream.run.config.piece_tokens is None or claim is None:
        return None
    return claim.policy_version if claim.policy_version >= claimant.oldest else None


def is_finished(stream: GroupStream, settled: Settled, chunk: int) -> bool:
    """True if every group of a chunk is committed, or was settled."""
    return stream.has(settled.left(numbers_of(stream.run.config, chunk)))


def under_way(stream: GroupStream, settled: Settled, now: datetime) -> list[int]:
    """Policy versions of the live claims on groups that are not finished."""
    seconds = _claim_s(stream.run.config)
    return [
        claim.policy_version
        for chunk, claim in stream.claims.items()
        if claim.is_live(now, seconds) and not is_finished(stream, settled, chunk)
    ]


def _claim_s(config: Config) -> float:
    return config.asynchrony.seconds_of_claims if config.asynchrony else 0.0


def stream_requests(
    run: Run, numbers: Collection[int], environment: Environment
) -> list[GroupRequest]:
    """Requests of groups by their numbers, in order."""
    config, train_seed = run.config, run.config.environment.train_seed
    return [
        group_request(
            config,
            group_id_of(number),
            environment.example(train_seed, number, "train"),
            run.seed_of("sample", "stream", number),
        )
        for number in numbers
    ]


def group_id_of(number: int) -> str:
    """The id of a group of the stream, in whichever round it is taken."""
    return f"stream/group-{number:08d}"


@dataclass(frozen=True, slots=True)
class _Committing:
    """Commits groups of the stream as they are finished: what `sample_groups` calls pieces."""

    stream: GroupStream
    packs: PackChain
    takes_members: bool = False  # a claim is of whole groups

    def read(self) -> dict[str, dict[int, Rollout]]:
        """Members of groups that are finished, by group and index."""
        groups = [*self.packs.read(), *groups_in(self.stream.run, self.packs.numbers)]
        return {g.group_id: {r.index_in_group: r for r in g.rollouts} for g in groups}

    def commit(self, group: RolloutGroup) -> dict[int, Rollout]:
        """Commit a whole group; one that lacks members waits until its chunk is judged."""
        if len(group.rollouts) == group.group_size:
            self.add(group)
        return {}

    def add(self, group: RolloutGroup) -> None:
        """Commit a whole group."""
        number = number_of(group.group_id)
        self.stream.commit(number, group, self.packs.policy, self.packs.worker)

    def flush(self) -> None:
        """Commit what waits for further groups: nothing does."""

    async def flushing(self, sampling: Coroutine[Any, Any, T]) -> T:
        """Sample, with what is finished committed in time."""
        return await sampling


@dataclass(frozen=True, slots=True)
class _Packing(_Committing):
    """Commits the groups that have ended since the last commit as one object, every so often."""

    every_s: float = 1.0
    waiting: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    lock: Lock = field(default_factory=Lock)  # groups end in several threads

    def add(self, group: RolloutGroup) -> None:
        """Have a group committed with the next pack."""
        self.waiting.append(group)

    def flush(self) -> None:
        """Commit the groups that wait. Raises as `PackChain.append`; they wait on then."""
        with self.lock:
            groups = [*self.waiting]
            self.packs.append(groups)
            del self.waiting[: len(groups)]

    async def flushing(self, sampling: Coroutine[Any, Any, T]) -> T:
        """Sample, with a commit every so often, and a last one however sampling ends."""
        tasks = asyncio.ensure_future(sampling), asyncio.ensure_future(self._flush_regularly())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1].done():
                tasks[1].result()  # raises what a commit failed by
            return await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.flush)

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.every_s)
            await asyncio.to_thread(self.flush)


def _committing(
    run: Run, chunk: int, policy: ServedPolicy, worker: str, environment: Environment
) -> _Committing:
    """Return the committer of a chunk's groups that the run's configuration asks for."""
    decided = stream_fingerprint(
        run.config, environment.version, policy.tokenizer_digest, policy.chat_template_digest
    )
    stream = GroupStream(run, fingerprint=decided)
    numbers = numbers_of(run.config, chunk)
    packs = PackChain(
        run=run, numbers=numbers, policy=policy, fingerprint=decided, worker=worker
    )  # fmt: skip
    every_s = run.config.asynchrony.commit_every_s if run.config.asynchrony else None
    if every_s is None:
        return _Committing(stream, packs)
    return _Packing(stream, packs, every_s=every_s)


async def sample_chunk(
    run: Run,
    chunk: int,
    policy: ServedPolicy,
    worker: str,
    settled: Settled | None = None,
    interruption: Interruption | None = None,
) -> int:
    """Sample and commit the groups of a chunk that are not finished; the number of its groups.

    Those that `interruption` leaves out are not counted; they are committed as far as they got,
    where completions are sampled in pieces. Raises as `generate_shard` does; the groups that
    are committed by then stay.
    """
    environment = environment_of(run.config)
    committing = _committing(run, chunk, policy, worker, environment)
    # What a round took may be gone from the stream since.
    left = [n for n in numbers_of(run.config, chunk) if n not in (settled or Settled())]
    requests = stream_requests(run, left, environment)
    progress = ProgressEvent(
        run_id=run.run_id,
        stage="generate",
        round=policy.weight_version,
        message=f"chunk {chunk}",
    )
    partials = partials_of_stream(run, committing.packs.fingerprint, policy, worker)
    # No round that starts from this checkpoint could take groups of earlier policies.
    oldest = policy.weight_version - run.config.staleness_rounds_max
    partial = PartialSampling.of(run.config, partials, interruption, oldest=oldest)
    sampling = sample_groups(
        run.config,
        policy,
        environment,
        requests,
        progress,
        connect=in_flight_client(run, policy),
        pieces=committing,
        partial_sampling=partial,
        interruption=interruption,
    )
    groups = await committing.flushing(sampling)
    refuse_if_mostly_errors(
        groups, run.config.rollouts.errors_max_fraction, f"chunk {chunk} of the stream"
    )
    await asyncio.to_thread(_commit_rest, committing, groups)
    return len(groups)


def _commit_rest(committing: _Committing, groups: list[RolloutGroup]) -> None:
    """Commit the groups with members that failed, which were not committed on the way."""
    for group in groups:
        if any(rollout.status in ("error", "aborted") for rollout in group.rollouts):
            committing.commit(group)
    committing.flush()


def now_utc() -> datetime:
    """The time by this machine's clock."""
    return datetime.now(UTC)


async def watch_target(run: Run, policy: ServedPolicy, interruption: Interruption) -> None:
    """Request an interruption once the flow of a run pauses, or samples by another policy.

    With `in_flight_updates` another policy ends nothing. For nodes of a pool or cluster: they get
    no request of another machine.
    """
    board = sampling_board(run)
    while True:
        try:
            target = await asyncio.to_thread(board.read)
        except StorageError as error:
            _log.warning("cannot read the sampling target of %s: %s", run.run_id, error)
        else:
            paused = target is None or not target.open
            moved = target is not None and target.checkpoint != policy.checkpoint
            if paused or (moved and not run.config.in_flight_updates):
                interruption.request(between_groups=True)
                return
        await asyncio.sleep(TARGET_POLL_S)

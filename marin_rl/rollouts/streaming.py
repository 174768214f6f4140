"""Sampling into a stream, and the rounds that take of it (`asynchrony.sampler: windowed`).

Groups are claimed by chunks and committed as they end, by whichever policy this process was given.
What a group asks for depends on its number alone, so any worker may sample any chunk. A round looks
at the stream, decides, and commits its intake. Leaves out the records (`storage.tables`).
"""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock

from marin_rl.config import Config
from marin_rl.environments.base import Environment
from marin_rl.environments.checks import environment_of
from marin_rl.errors import StorageError
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.clients import stream_client
from marin_rl.rollouts.generate import (
    SamplingJob,
    group_request,
    refuse_if_mostly_errors,
    sample_groups,
)
from marin_rl.rollouts.partial import in_pieces
from marin_rl.rollouts.sampler import EarlyGroups, Members, Sampling
from marin_rl.rollouts.trajectories import GroupRequest, Interruption, interruptible
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.group_log import GroupLog, groups_of_chunk, partials_of_stream
from marin_rl.storage.tables.intakes import (
    Intake,
    Settled,
    commit_intake,
    decide,
    intake_ref,
    settled_before,
)
from marin_rl.storage.tables.stream import (
    GroupStream,
    chunk_size,
    groups_alone,
    numbers_of,
    stream_fingerprint,
)
from marin_rl.types import Rollout, RolloutGroup, ServedPolicy, SlotRef

CHUNK = "chunk"  # the chain of a chunk's groups in its log
TARGET_POLL_S = 0.5

_log = logging.getLogger(__name__)


def open_groups_max(config: Config, version: int, rounds_taken: int) -> int:
    """Number of groups that may be claimed and not settled while checkpoint `version` samples.

    `limits.max_inflight_groups`; and no more than the rounds within the bound of staleness will
    take, for what they leave would be too old for later ones. With dynamic sampling that number is
    not known.
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

    Chunks with a live claim of another worker, and chunks that this worker samples already, are
    left out. A worker that is started again resumes its own claims.
    """
    config = stream.run.config
    # Counted from claims and intakes alone, so that a restart changes nothing.
    chunk, counted = settled.floor // chunk_size(config), 0
    while counted < claimant.most:
        claim, left = stream.claims.get(chunk), settled.left(numbers_of(config, chunk))
        claimed_by_other = (
            claim is not None
            and claim.worker != claimant.worker
            and claim.is_live(claimant.now, config.ahead.seconds_of_claims)
        )
        if not (claimed_by_other or chunk in claimant.busy or stream.has(left)):
            yield chunk
        if claim is None or claim.policy_version >= claimant.oldest:
            counted += len(left)
        chunk += 1


def begun_by(stream: GroupStream, chunk: int, claimant: Claimant) -> int | None:
    """Policy version of a chunk that a worker resumes; None for one that it begins.

    Groups that are sampled in pieces are as old as their first piece. Those that are too old for
    any further round are begun again.
    """
    claim = stream.claims.get(chunk)
    if stream.run.config.piece_tokens is None or claim is None:
        return None
    return claim.policy_version if claim.policy_version >= claimant.oldest else None


def is_finished(stream: GroupStream, settled: Settled, chunk: int) -> bool:
    return stream.has(settled.left(numbers_of(stream.run.config, chunk)))


def under_way(stream: GroupStream, settled: Settled, now: datetime) -> list[int]:
    """Policy versions of the live claims on groups that are not finished."""
    seconds = stream.run.config.ahead.seconds_of_claims
    return [
        claim.policy_version
        for chunk, claim in stream.claims.items()
        if claim.is_live(now, seconds) and not is_finished(stream, settled, chunk)
    ]


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
    return f"stream/group-{number:08d}"


class ChunkLog(EarlyGroups):
    """Log of a chunk, which commits whole groups that ended since the last commit as one object.

    `every_s` are the seconds between commits; 0: a group is committed as soon as it ends.
    """

    takes_groups = True  # and no members: a claim is of whole groups

    def __init__(self, log: GroupLog, numbers: range, every_s: float) -> None:
        super().__init__()
        self._log, self._numbers, self._every_s = log, numbers, every_s
        self._waiting = list[RolloutGroup]()
        self._lock = Lock()  # groups end in several threads

    def read(self, group_ids: Sequence[str]) -> dict[str, dict[int, Rollout]]:
        packed = self._log.read([CHUNK]).get(CHUNK, [])
        groups = [*packed, *groups_alone(self._log.run, self._numbers)]
        return {g.group_id: {r.index_in_group: r for r in g.rollouts} for g in groups}

    def commit(self, group: RolloutGroup) -> Members:
        """Commit a whole group; one that lacks members waits until its chunk is judged."""
        if len(group.rollouts) == group.group_size:
            self._waiting.append(group)
            if not self._every_s:
                self.flush()
        return {}

    def flush(self) -> None:
        """Commit the groups that wait. Raises as `GroupLog.complete`; they wait on then."""
        with self._lock:
            groups = [*self._waiting]
            self._log.complete(CHUNK, groups)
            del self._waiting[: len(groups)]

    async def collect(self, sampling: Sampling) -> list[RolloutGroup]:
        """Groups, with a commit every so often, and a last one however sampling ends."""
        collecting = super().collect(sampling)
        if not self._every_s:
            return await collecting
        tasks = asyncio.ensure_future(collecting), asyncio.ensure_future(self._flush_regularly())
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
            await asyncio.sleep(self._every_s)
            await asyncio.to_thread(self.flush)

    def commit_failed(self, groups: Sequence[RolloutGroup]) -> None:
        """Commit the groups with members that failed, which were not committed as they ended."""
        failed = (
            group
            for group in groups
            if any(rollout.status in ("error", "aborted") for rollout in group.rollouts)
        )
        for group in failed:
            self.commit(group)
        self.flush()


async def sample_chunk(
    run: Run,
    chunk: int,
    policy: ServedPolicy,
    worker: str,
    settled: Settled | None = None,
    interruption: Interruption | None = None,
) -> int:
    """Sample and commit the groups of a chunk that are not finished; the number of its groups.

    Groups that `interruption` leaves out are not counted; they are committed as far as they got,
    where completions are sampled in pieces. Raises as `generate_shard` does; the groups that
    are committed by then stay.
    """
    config, environment = run.config, environment_of(run.config)
    interruption = interruption or Interruption()
    fingerprint = stream_fingerprint(
        config, environment.version, policy.tokenizer_digest, policy.chat_template_digest
    )
    numbers = numbers_of(config, chunk)
    log = ChunkLog(
        groups_of_chunk(run, numbers, fingerprint, policy, worker),
        numbers,
        config.ahead.bounds.commit_every_s or 0.0,
    )
    # What a round took may be gone from the stream since.
    left = [number for number in numbers if number not in (settled or Settled())]
    requests = stream_requests(run, left, environment)
    client = stream_client(run, policy)
    if config.piece_tokens is None:
        at_once = config.inference.requests_in_flight_max * (
            config.inference.turns_per_request or 1
        )
        client = interruptible(client, interruption, at_once)
    else:
        # No round that starts from this checkpoint could take groups of earlier policies.
        oldest = policy.weight_version - config.staleness_rounds_max
        partials = partials_of_stream(run, fingerprint, policy, worker)
        client = in_pieces(config, client, partials, requests, interruption, oldest=oldest)
    progress = ProgressEvent(
        run_id=run.run_id, stage="generate", round=policy.weight_version, message=f"chunk {chunk}"
    )
    job = SamplingJob(config=config, policy=policy, environment=environment, progress=progress)
    groups = await sample_groups(job, requests, client, log)
    refuse_if_mostly_errors(
        groups, config.rollouts.errors_max_fraction, f"chunk {chunk} of the stream"
    )
    await asyncio.to_thread(log.commit_failed, groups)
    return len(groups)


_streams: dict[str, GroupStream] = {}  # by run: objects of a stream are read once


def is_ready(run: Run, round: int, *, ended: bool = False) -> bool:
    """True if a round can take its groups now. Raises as `take_groups`."""
    return intake_ref(run, round) is not None or _decided(run, round, ended=ended) is not None


def take_groups(run: Run, round: int, *, ended: bool = False) -> SlotRef | None:
    """The committed intake of a round; None while there are too few groups.

    With `ended`, no further groups are sampled, and none under way is waited for. Raises
    CommitConflict for groups of a worker with other settings, CorruptObject, StorageError.
    """
    existing = intake_ref(run, round)
    if existing is not None:
        return existing
    intake = _decided(run, round, ended=ended)
    return None if intake is None else commit_intake(run, intake)


def _decided(run: Run, round: int, *, ended: bool) -> Intake | None:
    stream, settled = _streams.get(run.folder.url), settled_before(run, round)
    if stream is None:
        names = committed_manifest(run.store, checkpoint_slot(0)).extra
        digests = str(names["tokenizer_digest"]), str(names["chat_template_digest"])
        version = environment_of(run.config).version
        stream = GroupStream(run, fingerprint=stream_fingerprint(run.config, version, *digests))
        _streams[run.folder.url] = stream
    stream.look()
    versions = under_way(stream, settled, now_utc())
    return decide(
        round, stream.groups.values(), settled, run.config, under_way=versions, ended=ended
    )


def now_utc() -> datetime:
    return datetime.now(UTC)


async def watch_target(run: Run, policy: ServedPolicy, interruption: Interruption) -> None:
    """Request an interruption once the flow of a run pauses, or samples by another policy.

    With `in_flight_updates` another policy ends nothing. For nodes of a pool or cluster: they get
    no request of another machine.
    """
    board = board_of(run.config.inference, run.folder)
    while True:
        try:
            target = await asyncio.to_thread(board.sampling_target)
        except StorageError as error:
            _log.warning("cannot read the sampling target of %s: %s", run.run_id, error)
        else:
            paused = target is None or not target.open
            moved = target is not None and target.checkpoint != policy.checkpoint
            if paused or (moved and not run.config.in_flight_updates):
                interruption.request(between_groups=True)
                return
        await asyncio.sleep(TARGET_POLL_S)

"""The generate stage: one shard of a round's rollouts, sampled, scored and committed.

    requests (examples, seeds) ─► sample_groups(job, requests, client, log) ─► commit_shard
    GroupSampler.sample ─► EpisodeDriver.play_group ─► client.chat ─► Scorer ─► log.commit

What a shard asks for depends on the run's content, the round and the shard alone, so shards may be
made in any order, at once, or again. Groups are sampled concurrently and scored as they arrive.
Nothing is visible before the one create that commits all. Leaves out one group's sampling
and what is durable before its shard (`sampler`).
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from marin_rl.config import Config, fingerprint_fields
from marin_rl.environments.base import Environment
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import EnvironmentPart, part_for, parts_of, sampling_for
from marin_rl.environments.scoring import scorer_for
from marin_rl.errors import (
    Abstained,
    EnvironmentTimeout,
    InferenceError,
    MarinRLError,
    RewardFault,
    ToolFault,
)
from marin_rl.inference.client.protocol import ChatClient
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.rollouts.clients import policy_client
from marin_rl.rollouts.curriculum import Curriculum, chosen_example, decide
from marin_rl.rollouts.episode import Bridge, EpisodeDriver
from marin_rl.rollouts.partial import in_pieces
from marin_rl.rollouts.rewards import STAMP, RewardScorer, add_model_reward
from marin_rl.rollouts.rollout_producer import RolloutProducer
from marin_rl.rollouts.sampler import (
    CommittedMembers,
    EarlyGroups,
    GroupSampler,
    ProgressMeter,
    first_done,
    pushed_groups,
)
from marin_rl.rollouts.teaching import STAMP as TEACHER_STAMP
from marin_rl.rollouts.teaching import Teacher, add_teacher_logprobs, teacher_fields
from marin_rl.rollouts.tool_turns import ToolTurns
from marin_rl.rollouts.trajectories import REQUEST_FAULTS, TURNS_MAX_DEFAULT, GroupRequest
from marin_rl.storage.commits import fingerprint, parent_of
from marin_rl.storage.runs import Run, round_name
from marin_rl.storage.tables.group_log import members_of_shard, partials_of_shard
from marin_rl.storage.tables.rollouts import commit_shard, commit_tables, shard_ref
from marin_rl.tokenizers import template_options, tokenizer_for, unlisted_end_ids
from marin_rl.types import Example, RolloutGroup, Sampling, ServedPolicy, SlotRef
from schemas.tables import CONTENT_VERSION, UNFINISHED


async def generate_shard(
    run: Run,
    round: int,
    shard: int,
    policy: ServedPolicy,
    scorer: RewardScorer | None = None,
    teacher: Teacher | None = None,
) -> SlotRef:
    """Commit one shard of a round, or return the one that is committed already.

    `scorer` is the reward model that `environment.reward_model` names, `teacher` that of
    `distillation`; None without them.
    A completion that fails becomes a rollout with status "error". Raises StalePolicy, the fault
    that most rollouts share (EndpointUnavailable, RequestRejected, BadResponse, RewardFault) where
    more than `rollouts.errors_max_fraction` failed, InputError, and StorageError. Nothing is
    committed then, nor when the call is cancelled.
    """
    environment = environment_of(run.config)
    curriculum = await asyncio.to_thread(decide, run, round, policy.weight_version)
    digest = shard_fingerprint(run, round, shard, policy, environment, scorer, curriculum, teacher)
    existing = await asyncio.to_thread(shard_ref, run, round, shard, digest)
    if existing is not None:
        return existing
    progress = ProgressEvent(
        run_id=run.run_id, stage="generate", round=round, message=f"shard {shard}"
    )
    requests = shard_requests(run, round, shard, environment, curriculum)
    if run.config.rollouts.source == "pushed":
        pushed = await pushed_groups(run, round, shard, replace(progress, total=len(requests)))
        return await asyncio.to_thread(commit_tables, run, round, shard, pushed, digest)
    client = policy_client(run.config, policy)
    if run.config.piece_tokens is not None:
        partials = partials_of_shard(run, round, shard, digest, policy)
        client = in_pieces(run.config, client, partials, requests)
    job = SamplingJob(config=run.config, policy=policy, environment=environment, progress=progress)
    log = _log_of(run, round, shard, digest, policy, requests)
    groups = await sample_groups(job, requests, client, log)
    refuse_if_mostly_errors(
        groups, run.config.rollouts.errors_max_fraction, f"{round_name(round)}, shard {shard}"
    )
    stamp: dict[str, str] = {}
    if scorer is not None and (settings := run.config.environment.reward_model) is not None:
        groups = await asyncio.to_thread(add_model_reward, groups, settings, scorer)
        stamp = {STAMP: scorer.identity.parameters_digest}
    if teacher is not None:
        scored = add_teacher_logprobs, groups, run.config, environment, teacher
        groups = await asyncio.to_thread(*scored)
        stamp |= {TEACHER_STAMP: teacher.identity}
    return await asyncio.to_thread(commit_shard, run, round, shard, groups, digest, policy, stamp)


async def committed_shard(
    run: Run,
    round: int,
    shard: int,
    policy: ServedPolicy,
    scorer: RewardScorer | None = None,
    teacher: Teacher | None = None,
) -> SlotRef | None:
    """The shard that `generate_shard` would return without sampling; None where it would sample.

    Raises CommitConflict where another content is committed, StorageError.
    """
    environment = await asyncio.to_thread(environment_of, run.config)
    curriculum = await asyncio.to_thread(decide, run, round, policy.weight_version)
    digest = shard_fingerprint(run, round, shard, policy, environment, scorer, curriculum, teacher)
    return await asyncio.to_thread(shard_ref, run, round, shard, digest)


def shard_fingerprint(
    run: Run,
    round: int,
    shard: int,
    policy: ServedPolicy,
    environment: Environment,
    scorer: RewardScorer | None = None,
    curriculum: Curriculum | None = None,
    teacher: Teacher | None = None,
) -> str:
    """Digest of the settings, the policy and the scorers that decide a shard's content."""
    config = run.config
    assert (teacher is None) == (config.rollout_teacher is None), "see `generate_shard`"
    assert (scorer is None) == (config.environment.reward_model is None), "see `generate_shard`"
    fields = sampling_fields(config, round, policy) | {
        "shard": shard,
        "environment_version": environment.version,
        "rollouts": fingerprint_fields(config.rollouts),
    }
    if config.examples_per_round != config.rollouts.groups_per_round:
        fields["candidates"] = [config.candidates_per_batch, config.sample_batches_max]
    if config.ahead.select == "first_done":
        fields["select"] = "first_done"
    if config.piece_tokens is not None:
        fields["piece_tokens"] = config.piece_tokens  # the borders of pieces decide last bits
    if scorer is not None:
        fields["reward_model"] = asdict(scorer.identity)
    if teacher is not None and config.distillation is not None:
        fields["distillation"] = teacher_fields(config.distillation, teacher)
    if curriculum is not None:
        fields["curriculum"] = curriculum.record
    return fingerprint("shard", fields, (parent_of(policy.checkpoint),), CONTENT_VERSION)


def _log_of(
    run: Run,
    round: int,
    shard: int,
    digest: str,
    policy: ServedPolicy,
    requests: Sequence[GroupRequest],
) -> EarlyGroups:
    """The log of a shard, which ends sampling by the first groups where a round selects those."""
    rollouts, collect = run.config.rollouts, None
    if run.config.ahead.select == "first_done":
        groups, shards = rollouts.groups_per_round, rollouts.shards_per_round
        count = groups * (shard + 1) // shards - groups * shard // shards
        least = rollouts.group_size_min
        collect = partial(
            first_done, policy=policy, requests=requests, count=count, members_min=least
        )
    if rollouts.commit_groups or run.config.piece_tokens is not None:
        members = members_of_shard(run, round, shard, digest, policy)
        return CommittedMembers(members, collect)
    return EarlyGroups(collect)


def sampling_fields(config: Config, round: int, policy: ServedPolicy) -> dict[str, Any]:
    """Fields of a fingerprint that every sampled slot has: settings, seed and policy."""
    return {
        "round": round,
        "seed": config.seed,
        "environment": fingerprint_fields(config.environment),
        "sampling": fingerprint_fields(config.sampling),
        "parameters": policy.parameters_digest,
        "tokenizer": policy.tokenizer_digest,
        "chat_template": policy.chat_template_digest,
    }


def examples_of(
    config: Config, round: int, shard: int, environment: Environment | None = None
) -> list[Example]:
    """The examples of a shard. Every round takes fresh ones; shards differ by a group at most."""
    environment = environment or environment_of(config)
    seed, first = config.environment.train_seed, round * config.examples_per_round
    return [environment.example(seed, first + g, "train") for g in groups_of_shard(config, shard)]


def groups_of_shard(config: Config, shard: int) -> range:
    """Numbers of a shard's groups in its round.

    Shards from `shards_per_round` on are those of further sample batches.
    """
    groups, shards = config.candidates_per_batch, config.rollouts.shards_per_round
    return range(groups * shard // shards, groups * (shard + 1) // shards)


def shard_requests(
    run: Run, round: int, shard: int, environment: Environment, curriculum: Curriculum | None = None
) -> list[GroupRequest]:
    """Requests of a shard, in order; of the examples that a curriculum chooses, where one does."""
    config, numbers = run.config, groups_of_shard(run.config, shard)
    if curriculum is None:
        examples = examples_of(config, round, shard, environment)
    else:
        examples = [chosen_example(run, round, n, environment, curriculum) for n in numbers]
    name = round_name(round)
    return [
        group_request(
            config, f"{name}/group-{number:05d}", example, run.seed_of("sample", round, number)
        )
        for number, example in zip(numbers, examples, strict=True)
    ]


def group_request(config: Config, group_id: str, example: Example, seed: int) -> GroupRequest:
    """The request of a group to train on, sampled as the example's environment asks for."""
    sampling = sampling_for(config.sampling, config.environment, example.environment)
    return GroupRequest(
        group_id=group_id,
        example=example,
        size=config.rollouts.group_size,
        greedy=bool(config.rollouts.greedy_baseline),
        sampling=Sampling(**sampling.model_dump(), seed=seed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingJob:
    """The policy and the environment that groups are sampled by, as `config` says.

    `progress` is published with its numbers as each group is done. `bridge` joins the turns of
    episodes that have several; None as the policy's chat template does.
    """

    config: Config
    policy: ServedPolicy
    environment: Environment
    progress: ProgressEvent
    bridge: Bridge | None = None


async def sample_groups(
    job: SamplingJob,
    requests: Sequence[GroupRequest],
    client: AbstractAsyncContextManager[ChatClient],
    log: EarlyGroups | None = None,
) -> list[RolloutGroup]:
    """Sample and score groups concurrently; in the order of `requests`.

    How completions are asked for is the client's: whole, in pieces, or interrupted. What is durable
    before all have ended, and how many are waited for, is the log's. Raises what no single group
    can bear: StalePolicy, InputError. Cancelling cancels every request.
    """
    log, settings = log or EarlyGroups(), job.config.environment
    meter = ProgressMeter(replace(job.progress, total=len(requests)))
    async with client as connected:
        finished = await asyncio.to_thread(log.read, [request.group_id for request in requests])
        samplers = {
            part.label: GroupSampler(
                _driver_of(job, part, connected),
                scorer_for(part.environment, part.config),
                meter.count,
                log,
                finished,
            )
            for part in parts_of(job.environment, settings)
        }
        labels = [part_for(job.environment, settings, r.example).label for r in requests]
        pairs = zip(labels, requests, strict=True)
        return await log.collect([samplers[label].sample(request) for label, request in pairs])


def _driver_of(
    job: SamplingJob, part: EnvironmentPart, client: ChatClient
) -> EpisodeDriver | RolloutProducer:
    config = job.config
    if not part.environment.returns_rollouts:
        own = part.environment.own_prompts
        segments = own or part.config.on_broken_prefix == "segments"
        return episode_driver(config, part, client, job.policy, job.bridge, segments=segments)
    return RolloutProducer(
        policy=job.policy,
        environment=part.environment,
        settings=part.config,
        config=config,
        vocabulary=max(len(tokenizer_for(config.policy)), config.policy.model.vocab_size or 0),
    )


def episode_driver(
    config: Config,
    part: EnvironmentPart,
    client: ChatClient,
    policy: ServedPolicy,
    bridge: Bridge | None,
    *,
    segments: bool,
) -> EpisodeDriver:
    """The driver of an environment's episodes; without `bridge`, the template joins turns."""
    options = template_options(config.policy, part.config)
    template = TemplateBridge(config.policy, options if part.config.chat_template_options else None)
    return EpisodeDriver(
        client=client,
        policy=policy,
        environment=part.environment,
        settings=part.config,
        bridge=bridge or template,
        render=template.prompt if segments else None,
        tool_turns=ToolTurns(config.policy, part.config),
        turns_max=part.config.turns_max or TURNS_MAX_DEFAULT,
        context_length=config.policy.context_length,
        template_options=options,
        # The embedded engine has them.
        stop_token_ids=unlisted_end_ids(config.policy) if config.inference.endpoints else (),
    )


def refuse_if_mostly_errors(
    groups: Sequence[RolloutGroup], errors_max_fraction: float, what: str
) -> None:
    """Raise the commonest fault where the share of failed rollouts is above the limit."""
    rollouts = [
        rollout
        for group in groups
        for rollout in group.rollouts
        if rollout.finish_reason != UNFINISHED  # cancelled by this process
    ]
    errors = [
        rollout.error or "EndpointUnavailable: the endpoint aborted the completion"
        for rollout in rollouts
        if rollout.status in ("error", "aborted")
    ]
    errors = [error for error in errors if not error.startswith(f"{Abstained.__name__}:")]
    if len(errors) <= errors_max_fraction * len(rollouts):
        return
    (kind, _), *_ = Counter(error.partition(":")[0] for error in errors).most_common(1)
    example = next(error for error in errors if error.startswith(kind))
    raise _FAULTS.get(kind, InferenceError)(
        f"{what}: {len(errors)} of {len(rollouts)} rollouts failed, above rollouts."
        f"errors_max_fraction ({errors_max_fraction:g}); the commonest: {example}"
    )


_FAULTS: dict[str, type[MarinRLError]] = {
    kind.__name__: kind for kind in (*REQUEST_FAULTS, RewardFault, EnvironmentTimeout, ToolFault)
}

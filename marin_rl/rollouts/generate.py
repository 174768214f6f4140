"""The generate stage: one shard of a round's rollouts, sampled, scored and committed.

What a shard asks for depends on the run's content, the round and the shard alone: its examples, and
a seed per sample. So shards may be made in any order, at once, or again. Groups are sampled
concurrently and scored as they arrive. Nothing is visible before the one create that commits all;
with `rollouts.commit_groups` each group is durable before that, under a private name. Leaves out
one group's sampling (`sampler`).
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from typing import Any

from marin_rl.config import Config, fingerprint_fields
from marin_rl.environments.base import Environment
from marin_rl.environments.checks import environment_of
from marin_rl.environments.finished import ReturnsRollouts
from marin_rl.environments.mixture import Part, part_for, parts_of, sampling_for
from marin_rl.environments.scoring import scorer_for
from marin_rl.errors import (
    Abstained,
    EnvironmentTimeout,
    InferenceError,
    MarinRLError,
    RewardFault,
    ToolFault,
)
from marin_rl.inference.client.chat_client import ChatClient
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.proofs import PolicyProof
from marin_rl.inference.client.publishing import Publisher
from marin_rl.inference.client.routes import client_of
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.rollouts.concurrent import all_of
from marin_rl.rollouts.curriculum import Curriculum, chosen_example, decide
from marin_rl.rollouts.early_end import first_done
from marin_rl.rollouts.episode import Bridge, EpisodeDriver
from marin_rl.rollouts.finished import FinishedDriver
from marin_rl.rollouts.in_flight import fleet_options
from marin_rl.rollouts.interruption import Interrupted, InterruptibleClient, Interruption
from marin_rl.rollouts.partial import PartialSampling
from marin_rl.rollouts.pushed import pushed_groups
from marin_rl.rollouts.rewards import STAMP, RewardScorer, add_model_reward
from marin_rl.rollouts.sampler import GroupSampler, Meter, Pieces
from marin_rl.rollouts.tool_turns import ToolTurns
from marin_rl.rollouts.trajectories import REQUEST_FAULTS, TURNS_MAX_DEFAULT, GroupRequest
from marin_rl.storage.commits import fingerprint, parent_of
from marin_rl.storage.runs import Run, round_name
from marin_rl.storage.tables.partials import partials_of_shard
from marin_rl.storage.tables.pieces import ShardPieces
from marin_rl.storage.tables.rollouts import commit_shard, commit_tables, shard_ref
from marin_rl.tokenizers import template_options, unlisted_end_ids
from marin_rl.types import Example, RolloutGroup, Sampling, ServedPolicy, SlotRef
from schemas.rollouts import CONTENT_VERSION, UNFINISHED

Connect = Callable[..., PolicyClient]


async def generate_shard(
    run: Run, round: int, shard: int, policy: ServedPolicy, scorer: RewardScorer | None = None
) -> SlotRef:
    """Commit one shard of a round, or return the one that is committed already.

    `scorer` is the reward model that `environment.reward_model` names, and None without that.
    A completion that fails becomes a rollout with status "error". Raises StalePolicy, the fault
    that most rollouts share (EndpointUnavailable, RequestRejected, BadResponse, RewardFault) where
    more than `rollouts.errors_max_fraction` failed, InputError, and StorageError. Nothing is
    committed then, nor when the call is cancelled.
    """
    environment = environment_of(run.config)
    curriculum = await asyncio.to_thread(decide, run, round, policy.weight_version)
    digest = shard_fingerprint(run, round, shard, policy, environment, scorer, curriculum)
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
    partial = PartialSampling.of(run.config, partials_of_shard(run, round, shard, digest, policy))
    pieces = None
    if run.config.rollouts.commit_groups or partial is not None:
        pieces = ShardPieces(run, round, shard, digest, policy)
    groups = await sample_groups(
        run.config,
        policy,
        environment,
        requests,
        progress,
        pieces=pieces,
        first=groups_taken_of(run.config, shard),
        partial_sampling=partial,
    )
    refuse_if_mostly_errors(
        groups, run.config.rollouts.errors_max_fraction, f"{round_name(round)}, shard {shard}"
    )
    stamp: dict[str, str] = {}
    if scorer is not None and (settings := run.config.environment.reward_model) is not None:
        groups = await asyncio.to_thread(add_model_reward, groups, settings, scorer)
        stamp = {STAMP: scorer.identity.parameters_digest}
    return await asyncio.to_thread(commit_shard, run, round, shard, groups, digest, policy, stamp)


async def committed_shard(
    run: Run, round: int, shard: int, policy: ServedPolicy, scorer: RewardScorer | None = None
) -> SlotRef | None:
    """The shard that `generate_shard` would return without sampling; None where it would sample.

    Raises CommitConflict where another content is committed, StorageError.
    """
    environment = await asyncio.to_thread(environment_of, run.config)
    curriculum = await asyncio.to_thread(decide, run, round, policy.weight_version)
    digest = shard_fingerprint(run, round, shard, policy, environment, scorer, curriculum)
    return await asyncio.to_thread(shard_ref, run, round, shard, digest)


def shard_fingerprint(
    run: Run,
    round: int,
    shard: int,
    policy: ServedPolicy,
    environment: Environment,
    scorer: RewardScorer | None = None,
    curriculum: Curriculum | None = None,
) -> str:
    """Digest of the settings, the policy and the scorers that decide a shard's content."""
    config = run.config
    assert (scorer is None) == (config.environment.reward_model is None), "see `generate_shard`"
    fields = sampling_fields(config, round, policy) | {
        "shard": shard,
        "environment_version": environment.version,
        "rollouts": fingerprint_fields(config.rollouts),
        **candidate_fields(config),
    }
    if scorer is not None:
        fields["reward_model"] = asdict(scorer.identity)
    if curriculum is not None:
        fields["curriculum"] = curriculum.record
    return fingerprint("shard", fields, (parent_of(policy.checkpoint),), CONTENT_VERSION)


def groups_taken_of(config: Config, shard: int) -> int | None:
    """Number of finished groups with which a shard ends (`select: first_done`); None for all."""
    if config.asynchrony is None or config.asynchrony.select != "first_done":
        return None
    groups, shards = config.rollouts.groups_per_round, config.rollouts.shards_per_round
    return groups * (shard + 1) // shards - groups * shard // shards


def candidate_fields(config: Config) -> dict[str, Any]:
    """Fields of a shard's fingerprint where a round samples other groups than it takes."""
    fields: dict[str, Any] = {}
    if config.examples_per_round != config.rollouts.groups_per_round:
        fields["candidates"] = [config.candidates_per_batch, config.sample_batches_max]
    if config.asynchrony is not None and config.asynchrony.select == "first_done":
        fields["select"] = "first_done"
    if config.piece_tokens is not None:
        fields["piece_tokens"] = config.piece_tokens  # the borders of pieces decide last bits
    return fields


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
    run: Run,
    round: int,
    shard: int,
    environment: Environment,
    curriculum: Curriculum | None = None,
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


async def sample_groups(  # noqa: PLR0913 - what is sampled, by whom, and how it ends
    config: Config,
    policy: ServedPolicy,
    environment: Environment,
    requests: Sequence[GroupRequest],
    progress: ProgressEvent,
    *,
    connect: Connect | None = None,
    bridge: Bridge | None = None,
    pieces: Pieces | None = None,
    first: int | None = None,
    partial_sampling: PartialSampling | None = None,
    interruption: Interruption | None = None,
) -> list[RolloutGroup]:
    """Sample and score groups concurrently; they come back in the order of `requests`.

    With `pieces`, members that are committed are not sampled again, and groups are committed as
    they are finished, or their members as those end. With `first`, that many finished groups are
    waited for, and the others are cancelled: see `first_done`. With `partial_sampling`, groups
    that are interrupted are committed as far as they got, and left out; without it, groups that
    have not begun when `interruption` is requested between groups are left out.

    `connect` makes the client, by default that of `inference.route`. `bridge` joins the turns of
    episodes that have several, by default as the policy's chat template does. Publishes `progress`
    with its numbers as each group is done. Raises what no single group can bear: StalePolicy,
    InputError. Cancelling cancels every request.
    """
    meter = Meter(replace(progress, total=len(requests)))
    template = TemplateBridge(config.policy)
    finished = await asyncio.to_thread(pieces.read) if pieces is not None else {}
    async with _connected(config, policy, connect, template) as connected:
        client: ChatClient = connected
        if partial_sampling is not None:
            client = await partial_sampling.client(connected, policy, requests)
        elif interruption is not None:
            inference = config.inference
            at_once = inference.requests_in_flight_max * (inference.turns_per_request or 1)
            client = InterruptibleClient(connected, interruption, at_once)
        samplers = {
            part.label: GroupSampler(
                _driver_of(config, policy, part, client, bridge, template),
                scorer_for(part.environment, part.config),
                meter.count,
                pieces,
                finished,
            )
            for part in parts_of(environment, config.environment)
        }
        labels = [part_for(environment, config.environment, r.example).label for r in requests]
        pairs = zip(labels, requests, strict=True)
        sampling = [samplers[label].sample(request) for label, request in pairs]
        if partial_sampling is not None or interruption is not None:
            return [group for group in await all_of(map(_unless_interrupted, sampling)) if group]
        if first is None:
            return await all_of(sampling)
        return await first_done(sampling, requests, policy, first, config.rollouts.group_size_min)


def _connected(
    config: Config, policy: ServedPolicy, connect: Connect | None, template: TemplateBridge
) -> AbstractAsyncContextManager[ChatClient]:
    """The client of a policy's endpoints, by `connect` or as the configuration says."""
    inference = config.inference
    options: dict[str, Any] = {}
    if connect is None:
        connect = client_of(inference, template)
        # A policy with a canary is served by a fleet, which the client proves as it joins.
        if policy.canary is not None:
            options = fleet_options(config, policy)
            options["proof"] = PolicyProof(
                canary=policy.canary, weights=_sent_weights(config, policy)
            )
            options["admin_key"] = os.environ.get(inference.server.admin_key_variable)
    return connect(
        endpoints=policy.endpoints,
        model=policy.model,
        api_key=os.environ.get(inference.api_key_variable),
        timeout_s=inference.request_timeout_s,
        attempts_max=inference.request_attempts_max,
        in_flight_max=inference.requests_in_flight_max,
        turns_per_request=inference.turns_per_request or 1,
        **options,
    )


def _driver_of(
    config: Config,
    policy: ServedPolicy,
    part: Part,
    client: ChatClient,
    bridge: Bridge | None,
    template: TemplateBridge,
) -> EpisodeDriver | FinishedDriver:
    """The driver of an environment; `template` joins turns unless there is another `bridge`."""
    if isinstance(part.environment, ReturnsRollouts):
        from marin_rl.tokenizers import tokenizer_for  # seconds, which others do not need

        return FinishedDriver(
            policy=policy,
            environment=part.environment,
            settings=part.config,
            config=config,
            vocabulary=max(len(tokenizer_for(config.policy)), config.policy.model.vocab_size or 0),
        )
    options = template_options(config.policy, part.config)
    if part.config.chat_template_options:
        template = TemplateBridge(config.policy, options)
    return EpisodeDriver(
        client=client,
        policy=policy,
        environment=part.environment,
        settings=part.config,
        bridge=bridge or template,
        render=template.prompt if part.config.on_broken_prefix == "segments" else None,
        tool_turns=ToolTurns(config.policy, part.config),
        turns_max=part.config.turns_max or TURNS_MAX_DEFAULT,
        context_length=config.policy.context_length,
        template_options=options,
        stop_token_ids=_asked_ends(config),
    )


def _asked_ends(config: Config) -> tuple[int, ...]:
    """End tokens that endpoints are asked for; the embedded engine has them."""
    return unlisted_end_ids(config.policy) if config.inference.endpoints else ()


async def _unless_interrupted(
    sampling: Coroutine[Any, Any, RolloutGroup],
) -> RolloutGroup | None:
    """A group; None where it was interrupted."""
    try:
        return await sampling
    except Interrupted:
        return None


def _sent_weights(config: Config, policy: ServedPolicy) -> Publisher | None:
    """The weights that endpoints are sent; None where they have, or take, them by themselves."""
    publish = config.inference.publish
    if policy.weights is None or (
        publish != "vllm_reload" and publish != "update_weights_from_disk"
    ):
        return None
    return Publisher(
        kind=publish,
        folder=policy.weights,
        version=policy.weight_version,
        digest=policy.parameters_digest,
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

"""The evaluate stage: a policy's answers to held-out examples, kept row by row and summed up.

The rows have the shape of rollouts and lie in one Parquet object, named for the attempt, which the
slot's manifest names and thereby commits. Examples and sampling seeds are the same for every round,
so that two evaluations differ by the policy alone.
"""

import asyncio
from collections.abc import Sequence

from marin_rl.config import content
from marin_rl.environments.base import Environment, environment_of
from marin_rl.rollouts.assemble import GroupRequest
from marin_rl.rollouts.generate import refuse_if_mostly_errors, sample_groups
from marin_rl.storage.commits import (
    commit_manifest,
    committed_as,
    fingerprint,
    new_attempt,
    new_manifest,
    parent_of,
    part_of,
    ref_of,
)
from marin_rl.storage.rollouts import encode_shard
from marin_rl.storage.runs import Run, evals_slot, round_name
from marin_rl.types import RolloutGroup, Sampling, ServedPolicy, SlotRef
from schemas.rollouts import SCHEMA_VERSION


async def evaluate_round(run: Run, round: int, policy: ServedPolicy) -> SlotRef:
    """Commit the evaluation of checkpoint `round`, or return it where it is committed already.

    The reference's summary holds the `eval/*` metrics. Raises as `generate_shard` does.
    """
    environment = environment_of(run.config)
    decided = evaluation_fingerprint(run, round, policy, environment)
    found = await asyncio.to_thread(committed_as, run.store, evals_slot(round), decided)
    if found is not None:
        return found
    requests = evaluation_requests(run, round, environment)
    groups = await sample_groups(run, policy, environment, requests, stage="evaluate", round=round)
    refuse_if_mostly_errors(
        groups, run.config.rollouts.errors_max_fraction, f"evaluation of {round_name(round)}"
    )
    return await asyncio.to_thread(_commit, run, round, groups, decided, policy)


def evaluation_fingerprint(
    run: Run, round: int, policy: ServedPolicy, environment: Environment
) -> str:
    """Digest of all that decides what an evaluation asks for, and of whom."""
    config = run.config
    decides = {
        "round": round,
        "seed": config.seed,
        "environment": content(config.environment),
        "environment_version": environment.version,
        "sampling": content(config.sampling),
        "evaluation": content(config.evaluation),
        "parameters": policy.parameters_digest,
        "tokenizer": policy.tokenizer_digest,
        "chat_template": policy.chat_template_digest,
    }
    return fingerprint("evaluation", decides, (parent_of(policy.checkpoint),), SCHEMA_VERSION)


def evaluation_requests(run: Run, round: int, environment: Environment) -> list[GroupRequest]:
    """What an evaluation asks for: the same in every round but for the groups' names."""
    config = run.config
    temperature = {"temperature": config.evaluation.temperature}
    settings = config.sampling.model_copy(update=temperature).model_dump()
    return [
        GroupRequest(
            group_id=f"eval/{round_name(round)}/group-{index:05d}",
            example=environment.example(config.environment.eval_seed, index, "eval"),
            size=config.evaluation.samples,
            sampling=Sampling(**settings, seed=run.seed_of("evaluate", index)),
        )
        for index in range(config.evaluation.examples)
    ]


def evaluation_metrics(groups: Sequence[RolloutGroup], pass_threshold: float) -> dict[str, float]:
    """The `eval/*` metrics. A failed rollout is never right; means are over those with a reward."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [r.n_completion_tokens for r in rollouts if r.status in ("complete", "truncated")]
    result = {
        "eval/accuracy": sum(reward >= pass_threshold for reward in rewards) / len(rollouts),
        "eval/examples": float(len(groups)),
        "eval/errors": sum(r.status == "error" for r in rollouts) / len(rollouts),
    }
    if rewards:
        result["eval/reward_mean"] = sum(rewards) / len(rewards)
    if lengths:
        result["eval/mean_length"] = sum(lengths) / len(lengths)
    return result


def _commit(
    run: Run, round: int, groups: Sequence[RolloutGroup], decided: str, policy: ServedPolicy
) -> SlotRef:
    slot, attempt = evals_slot(round), new_attempt()
    data = encode_shard(
        groups,
        run_id=run.run_id,
        round=round,
        shard=0,
        attempt=attempt,
        replica="",
        fingerprint=decided,
        policy=policy,
    )
    name = f"evals-{attempt}.parquet"
    run.store.put_part(f"{slot}/{name}", data)
    manifest = new_manifest(
        slot,
        attempt=attempt,
        fingerprint=decided,
        parents=(parent_of(policy.checkpoint),),
        parts=(part_of(name, data, rows=sum(len(group.rollouts) for group in groups)),),
        totals=evaluation_metrics(groups, run.config.evaluation.pass_threshold),
    )
    winner = commit_manifest(run.store, manifest)
    return ref_of(winner, reused=winner.attempt != attempt)

"""The evaluate stage: a policy's answers to held-out examples, kept row by row and summed up.

The rows have the shape of rollouts and lie in one Parquet object, named for the attempt, which the
slot's manifest names and thereby commits. Examples and sampling seeds are the same for every round,
so that two evaluations differ by the policy alone.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marin_rl.config import Config, EvaluationConfig, fingerprint_fields
from marin_rl.environments.base import Environment, answer_in
from marin_rl.environments.scoring import Judge
from marin_rl.rollouts.assemble import GroupRequest
from marin_rl.rollouts.estimates import estimate, majority_at_k, mean_at_k, pass_at_k
from marin_rl.rollouts.generate import refuse_if_mostly_errors, sample_groups
from marin_rl.rollouts.held_out import HeldOut, held_out_sets
from marin_rl.storage.commits import (
    commit_manifest,
    find_commit,
    fingerprint,
    new_attempt,
    new_manifest,
    parent_of,
    part_of,
    ref_of,
)
from marin_rl.storage.runs import Run, evals_slot, round_name
from marin_rl.storage.tables.rollouts import encode_shard
from marin_rl.types import Rollout, RolloutGroup, Sampling, ServedPolicy, SlotRef
from schemas.rollouts import SCHEMA_VERSION


async def evaluate_round(run: Run, round: int, policy: ServedPolicy) -> SlotRef:
    """Commit the evaluation of checkpoint `round`, or return it where it is committed already.

    The reference's summary holds the `eval/*` metrics. Raises as `generate_shard` does.
    """
    sets = held_out_sets(run.config)
    decided = evaluation_fingerprint(run, round, policy, sets)
    found = await asyncio.to_thread(find_commit, run.store, evals_slot(round), decided)
    if found is not None:
        return found
    groups: list[RolloutGroup] = []
    for held_out in sets:
        # scored by its own environment alone, and under its time limit
        config = run.config.model_copy(update={"environment": held_out.config})
        requests = evaluation_requests(run, round, held_out)
        groups += await sample_groups(
            config, policy, held_out.environment, requests, stage="evaluate", round=round
        )
    refuse_if_mostly_errors(
        groups, run.config.rollouts.errors_max_fraction, f"evaluation of {round_name(round)}"
    )
    judges = {item.name: Judge(item.environment, item.config) for item in sets}
    metrics = await asyncio.to_thread(
        evaluation_metrics,
        groups,
        run.config.evaluation,
        judges.get(None) or {name: judge for name, judge in judges.items() if name is not None},
    )
    return await asyncio.to_thread(_commit, run, round, groups, metrics, decided, policy)


def evaluation_fingerprint(
    run: Run, round: int, policy: ServedPolicy, sets: Sequence[HeldOut]
) -> str:
    """Digest of all that decides what an evaluation asks for, and of whom."""
    config = run.config
    versions = {held_out.name: held_out.environment.version for held_out in sets}
    own = {"environment_version": versions[None]} if None in versions else {"versions": versions}
    decides = {
        "round": round,
        "seed": config.seed,
        "environment": fingerprint_fields(config.environment),
        **own,
        "sampling": fingerprint_fields(config.sampling),
        "evaluation": fingerprint_fields(config.evaluation),
        "parameters": policy.parameters_digest,
        "tokenizer": policy.tokenizer_digest,
        "chat_template": policy.chat_template_digest,
    }
    return fingerprint("evaluation", decides, (parent_of(policy.checkpoint),), SCHEMA_VERSION)


def evaluation_requests(run: Run, round: int, held_out: HeldOut) -> list[GroupRequest]:
    """Requests of an evaluation: the same in every round but for the groups' names."""
    return requests_of(run.config, f"eval/{round_name(round)}", held_out, run.seed_of)


def requests_of(
    config: Config, name: str, held_out: HeldOut, seed_of: Callable[..., int]
) -> list[GroupRequest]:
    """Requests of an evaluation under this name; `seed_of("evaluate", i)` is example i's seed."""
    temperature = {"temperature": config.evaluation.temperature}
    settings = config.sampling.model_copy(update=temperature).model_dump()
    of = () if held_out.name is None else (held_out.name,)
    return [
        GroupRequest(
            group_id="/".join((name, *of, f"group-{index:05d}")),
            example=held_out.example(index),
            size=config.evaluation.samples,
            sampling=Sampling(**settings, seed=seed_of("evaluate", *of, index)),
        )
        for index in range(held_out.examples)
    ]


def evaluation_metrics(
    groups: Sequence[RolloutGroup],
    evaluation: EvaluationConfig,
    judge: Environment | Judge | Mapping[str, Judge],
) -> dict[str, float]:
    """The `eval/*` metrics. A failed rollout is never right; means are over those with a reward.

    `judge`, one or by the name that examples carry, says what a completion's answer is, where votes
    are counted. Raises InputError where its function cannot be imported.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [r.n_completion_tokens for r in rollouts if r.n_completion_tokens]
    judged = [_judged(group, evaluation.pass_threshold, judge) for group in groups]
    result = {
        "eval/accuracy": sum(int(j.right_N.sum()) for j in judged) / len(rollouts),
        "eval/examples": float(len(groups)),
        "eval/errors": sum(r.status == "error" for r in rollouts) / len(rollouts),
        **_estimates("eval", judged, evaluation.k),
    }
    if rewards:
        result["eval/reward_mean"] = sum(rewards) / len(rewards)
    if lengths:
        result["eval/mean_length"] = sum(lengths) / len(lengths)
    for name in sorted({judged_group.environment for judged_group in judged}):
        own = [judged_group for judged_group in judged if judged_group.environment == name]
        result |= _estimates(f"eval/{name}", own, evaluation.k)
    return result


@dataclass(frozen=True, slots=True)
class _Judged:
    """The N samples of one example: which are right, and what each answered."""

    environment: str
    right_N: np.ndarray
    answers: tuple[str | None, ...]


def _judged(
    group: RolloutGroup, threshold: float, judge: Environment | Judge | Mapping[str, Judge]
) -> _Judged:
    if isinstance(judge, Mapping):
        judge = judge[group.example.environment]
    right = [r.reward is not None and r.reward >= threshold for r in group.rollouts]
    said = [_said(rollout) for rollout in group.rollouts]
    texts = [text for text in said if text is not None]
    found = iter(
        judge.answers(texts) if isinstance(judge, Judge) else [answer_in(judge, t) for t in texts]
    )
    answers = tuple(None if text is None else next(found) for text in said)
    return _Judged(group.example.environment, np.array(right, np.bool_), answers)


def _said(rollout: Rollout) -> str | None:
    """The completion that a sample votes with; a failed one does not vote."""
    if rollout.reward is None:
        return None
    said = [turn.content for turn in rollout.turns if turn.role == "assistant"]
    return said[-1] if said else None


def _estimates(prefix: str, judged: Sequence[_Judged], ks: Sequence[int]) -> dict[str, float]:
    """pass@k, mean@k and majority@k of examples, with their intervals."""
    result: dict[str, float] = {}
    for k in ks:
        found = {
            "pass": [pass_at_k(j.right_N, k) for j in judged],
            "mean": [mean_at_k(j.right_N, k) for j in judged],
            "majority": [majority_at_k(j.right_N, j.answers, k) for j in judged],
        }
        for kind, values in found.items():
            of, name = estimate(np.array(values, np.float64)), f"{prefix}/{kind}@{k}"
            result |= {name: of.value, f"{name}/low": of.low, f"{name}/high": of.high}
    return result


def _commit(
    run: Run,
    round: int,
    groups: Sequence[RolloutGroup],
    metrics: Mapping[str, float],
    decided: str,
    policy: ServedPolicy,
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
        totals=metrics,
    )
    winner = commit_manifest(run.store, manifest)
    return ref_of(winner, reused=winner.attempt != attempt)

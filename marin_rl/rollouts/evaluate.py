"""The evaluate stage: a policy's answers to held-out examples, kept row by row and summed up.

The rows have the shape of rollouts and lie in one Parquet object, named for the attempt, which the
slot's manifest names and thereby commits. Examples and sampling seeds are the same for every round,
so that two evaluations differ by the policy alone. What is asked are the held-out examples of the
run's environment, or named sets; no example of a fixed set counts twice. Leaves out the formulas
(`estimates`).

Axes: N samples of an example.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from marin_rl.config import Config, EvaluationConfig, fingerprint_fields
from marin_rl.environments.checks import check_seeds_apart, entries_of, environment_of
from marin_rl.environments.registry import (
    EnvironmentPart,
    construct,
    labelled,
    loaded_environment,
    parts_of,
    sampling_for,
)
from marin_rl.environments.scoring import answers_in
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.clients import Connect, policy_client
from marin_rl.rollouts.estimates import estimate, majority_at_k, mean_at_k, pass_at_k
from marin_rl.rollouts.generate import (
    SamplingJob,
    refuse_if_mostly_errors,
    sample_groups,
    sampling_fields,
)
from marin_rl.rollouts.trajectories import GroupRequest, last_completion
from marin_rl.storage.commits import commit_slot, find_commit, fingerprint, new_attempt, parent_of
from marin_rl.storage.runs import Run, evals_slot, round_name
from marin_rl.storage.tables.parquet import put_part
from marin_rl.storage.tables.rollouts import encode_shard
from marin_rl.types import Example, Rollout, RolloutGroup, Sampling, ServedPolicy, SlotRef
from schemas.tables import CONTENT_VERSION

# Environments that say what a completion's answer is, by the name that examples carry; None: all.
Extractors = Mapping[str | None, EnvironmentPart]


# Requests at once to the engine in this process, where both ends of a connection are open files.
EMBEDDED_IN_FLIGHT_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out examples of one environment.

    A named set's examples carry its label as their environment's, which separates metrics and rows.
    """

    part: EnvironmentPart
    examples: int
    of_list: bool = False  # one of the run's own list, whose examples have ids with its label

    @property
    def name(self) -> str | None:
        """None for the run's only environment."""
        return self.part.label or None

    def example(self, index: int) -> Example:
        example = self.part.environment.example(self.part.config.eval_seed, index, "eval")
        if self.name is None:
            return example
        own = replace(example, environment=self.name)
        return labelled(example, self.name) if self.of_list else own


def held_out_sets(config: Config) -> tuple[HeldOut, ...]:
    """The sets of a run's evaluation, with their examples loaded.

    Raises ConfigError for an unknown environment, wrong options, or seeds from which training and
    evaluation would meet; InputError where there are no examples.
    """
    named = config.evaluation.sets
    if named is None:
        parts = parts_of(environment_of(config), config.environment)
        return tuple(_held_out(part, config, of_list=bool(part.label)) for part in parts)
    used, examples = config.rounds * config.examples_reserved, config.evaluation.examples
    for name, chosen in named.items():
        for key, own in entries_of(config.environment).items():
            if chosen.name == own.name:
                check_seeds_apart(
                    own,
                    chosen,
                    train_examples=used,
                    eval_examples=examples,
                    section=key,
                    held_out_section=f"evaluation.sets.{name}",
                )
    loaded = {name: loaded_environment(named[name], "eval") for name in sorted(named)}
    return tuple(
        _held_out(EnvironmentPart(label=name, config=named[name], environment=environment), config)
        for name, environment in loaded.items()
    )


def extractors_of(config: Config) -> Extractors:
    """Extractors of an evaluation's answers: the run's environment, or that of each named set."""
    sets = config.evaluation.sets
    if sets is None:
        parts = parts_of(construct(config.environment), config.environment)
        return {part.label or None: part for part in parts}
    return {
        name: EnvironmentPart(label=name, config=chosen, environment=construct(chosen))
        for name, chosen in sets.items()
    }


def _held_out(part: EnvironmentPart, config: Config, *, of_list: bool = False) -> HeldOut:
    examples, size = config.evaluation.examples, part.environment.eval_size
    examples = examples if size is None else min(examples, size)
    return HeldOut(part=part, examples=examples, of_list=of_list)


async def evaluate_round(run: Run, round: int, policy: ServedPolicy) -> SlotRef:
    """Commit the evaluation of checkpoint `round`, or return it where it is committed already.

    The reference's summary holds the `eval/*` metrics. Raises as `generate_shard` does.
    """
    sets = held_out_sets(run.config)
    versions = {held_out.name: held_out.part.environment.version for held_out in sets}
    own = {"environment_version": versions[None]} if None in versions else {"versions": versions}
    fields = sampling_fields(run.config, round, policy) | own
    fields["evaluation"] = fingerprint_fields(run.config.evaluation)
    digest = fingerprint("evaluation", fields, (parent_of(policy.checkpoint),), CONTENT_VERSION)
    existing = await asyncio.to_thread(find_commit, run.store, evals_slot(round), digest)
    if existing is not None:
        return existing
    groups = await answered(run.config, policy, sets, round_name(round), run.seed_of, round)
    extractors = {held_out.name: held_out.part for held_out in sets}
    metrics = await asyncio.to_thread(evaluation_metrics, groups, run.config.evaluation, extractors)
    return await asyncio.to_thread(_commit, run, round, groups, metrics, digest, policy)


async def answered(
    config: Config,
    policy: ServedPolicy,
    sets: Sequence[HeldOut],
    name: str,
    seed_of: Callable[..., int],
    round: int,
    connect: Connect | None = None,
) -> list[RolloutGroup]:
    """Sample and score the held-out examples of all sets, as the evaluation `name`.

    The requests of all rounds are the same but for the groups' names. Raises as `generate_shard`.
    """
    groups: list[RolloutGroup] = []
    inference = config.inference
    at_once = inference.requests_in_flight_max
    if not inference.endpoints:  # an example has few samples: fewer than the engine has slots
        at_once = max(at_once, min(inference.engine.slots, EMBEDDED_IN_FLIGHT_MAX))
    for held_out in sets:
        # a set is scored by its own environment, under that one's time limit
        own = config.model_copy(update={"environment": held_out.part.config})
        job = SamplingJob(
            config=own,
            policy=policy,
            environment=held_out.part.environment,
            progress=ProgressEvent(run_id=config.run_id, stage="evaluate", round=round),
        )
        requests = requests_of(config, f"eval/{name}", held_out, seed_of)
        client = policy_client(own, policy, connect, in_flight_max=at_once)
        groups += await sample_groups(job, requests, client)
    refuse_if_mostly_errors(groups, config.rollouts.errors_max_fraction, f"evaluation of {name}")
    return groups


def requests_of(
    config: Config, name: str, held_out: HeldOut, seed_of: Callable[..., int]
) -> list[GroupRequest]:
    """Requests of an evaluation under this name; `seed_of("evaluate", i)` is example i's seed."""
    temperature, mixed = {"temperature": config.evaluation.temperature}, config.environment
    of = () if held_out.name is None else (held_out.name,)
    return [
        GroupRequest(
            group_id="/".join((name, *of, f"group-{index:05d}")),
            example=example,
            size=config.evaluation.samples,
            sampling=Sampling(
                **sampling_for(config.sampling, mixed, example.environment)
                .model_copy(update=temperature)
                .model_dump(),
                seed=seed_of("evaluate", *of, index),
            ),
        )
        for index, example in enumerate(map(held_out.example, range(held_out.examples)))
    ]


def evaluation_metrics(
    groups: Sequence[RolloutGroup], evaluation: EvaluationConfig, extractors: Extractors
) -> dict[str, float]:
    """The `eval/*` metrics. A failed rollout is never right; means are over those with a reward.

    `extractors` say what a completion's answer is, where votes are counted. Raises InputError where
    their functions cannot be imported.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [r.n_completion_tokens for r in rollouts if r.n_completion_tokens]
    graded = [_graded(group, evaluation.pass_threshold, extractors) for group in groups]
    result = {
        "eval/accuracy": sum(int(g.right_N.sum()) for g in graded) / len(rollouts),
        "eval/examples": float(len(groups)),
        "eval/errors": sum(r.status == "error" for r in rollouts) / len(rollouts),
        **_estimates("eval", graded, evaluation.k),
    }
    if rewards:
        result["eval/reward_mean"] = sum(rewards) / len(rewards)
    if lengths:
        result["eval/mean_length"] = sum(lengths) / len(lengths)
    turns = [n for n in map(sampled_turns, rollouts) if n]
    if max(turns, default=0) > 1:
        result["eval/mean_turns"] = sum(turns) / len(turns)
    for name in sorted({each.environment for each in graded}):
        own = [each for each in graded if each.environment == name]
        result |= _estimates(f"eval/{name}", own, evaluation.k)
    return result


def sampled_turns(rollout: Rollout) -> int:
    """Number of turns that were sampled, unlike turns of the model in an example's prompt."""
    return sum(turn.inference_metadata is not None for turn in rollout.turns)


@dataclass(frozen=True, slots=True)
class _Graded:
    """The N samples of one example: which are right, and what each answered."""

    environment: str
    right_N: np.ndarray
    answers: tuple[str | None, ...]


def _graded(group: RolloutGroup, threshold: float, extractors: Extractors) -> _Graded:
    extractor = extractors[None if None in extractors else group.example.environment]
    right = [r.reward is not None and r.reward >= threshold for r in group.rollouts]
    # a failed sample has no vote
    votes = [None if r.reward is None else last_completion(r) for r in group.rollouts]
    texts = [text for text in votes if text is not None]
    extracted = iter(answers_in(extractor.environment, extractor.config, texts))
    answers = tuple(None if text is None else next(extracted) for text in votes)
    return _Graded(group.example.environment, np.array(right, np.bool_), answers)


def _estimates(prefix: str, graded: Sequence[_Graded], ks: Sequence[int]) -> dict[str, float]:
    """pass@k, mean@k and majority@k of examples, with their intervals."""
    result: dict[str, float] = {}
    for k in ks:
        by_example = {
            "pass": [pass_at_k(g.right_N, k) for g in graded],
            "mean": [mean_at_k(g.right_N, k) for g in graded],
            "majority": [majority_at_k(g.right_N, g.answers, k) for g in graded],
        }
        for kind, values in by_example.items():
            of, name = estimate(np.array(values, np.float64)), f"{prefix}/{kind}@{k}"
            result |= {name: of.value, f"{name}/low": of.low, f"{name}/high": of.high}
    return result


def _commit(
    run: Run,
    round: int,
    groups: Sequence[RolloutGroup],
    metrics: Mapping[str, float],
    digest: str,
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
        fingerprint=digest,
        policy=policy,
    )
    rows = sum(len(group.rollouts) for group in groups)
    part = put_part(run.store, slot, f"evals-{attempt}.parquet", data, rows=rows)
    return commit_slot(
        run.store,
        slot,
        attempt=attempt,
        fingerprint=digest,
        parents=(parent_of(policy.checkpoint),),
        parts=(part,),
        totals=metrics,
    )

"""Teachers of distillation: log-probabilities of sampled tokens, a column of the shard.

A teacher may be a model of this process, or behind an endpoint of vLLM, SGLang or `marin-rl serve`:
its identity is then the id of its model, which answers must name where the route does.

Scoring is done by the owner of the teacher (a `Teacher`); nothing here knows of devices. It happens
for a shard at once, when all of its completions are there and before it is committed: what is
committed is never scored again. What a teacher alone reads comes before the prompt; the ids of the
completion follow as they were sampled.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice, takewhile
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.config import Config, DistillationConfig, fingerprint_fields
from marin_rl.environments.base import Environment
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import part_for
from marin_rl.errors import InferenceError, InputError, ObjectMissing
from marin_rl.inference.client.answers import read_object, read_token_ids
from marin_rl.inference.client.dialects import CompletionsScores, SGLangScores
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.proofs import CANARY_PROMPT, mean_difference
from marin_rl.inference.client.protocol import TOKENIZE_ROUTE, is_version_of, parse_served_model_id
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.layout import POLICY_SLOTS, rollouts_slot
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run, checkpoint_named, checkpoint_slot, committed
from marin_rl.storage.tables.records import groups_of
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.tokenizers import template_options
from marin_rl.types import Example, Message, Rollout, RolloutGroup, Sampling, SlotRef

KEY = "distillation.checkpoint"
# Nats a token, between two scores of the same ids: of a teacher here, and of one whose server may
# compute them in bfloat16, in other batches, or on another replica.
DRIFT_MAX, ENDPOINT_DRIFT_MAX = 1e-3, 0.1
STAMP = "teacher"  # in the footer of a shard and the manifest of a round: its identity


@runtime_checkable
class Teacher(Protocol):
    """A teacher that is ready to score. Equal `identity` gives equal scores of the same ids."""

    @property
    def identity(self) -> str: ...

    def score(
        self, sequences: Sequence[Int32[np.ndarray, " _"]], first: Sequence[int]
    ) -> list[Float32[np.ndarray, " _"]]:
        """Log-probabilities (nats, temperature 1) of each sequence's tokens from `first` on."""
        ...


def teacher_fields(settings: DistillationConfig, teacher: Teacher) -> dict[str, Any]:
    """Fields of a shard's fingerprint: the teacher, and what it reads of which rollouts."""
    fields = fingerprint_fields(settings)
    kept = {name: fields[name] for name in ("context", "environments") if name in fields}
    return {"teacher": teacher.identity, **kept}


def add_teacher_logprobs(
    groups: Sequence[RolloutGroup], config: Config, environment: Environment, teacher: Teacher
) -> list[RolloutGroup]:
    """The groups with the teacher's log-probabilities in every rollout that has trained tokens.

    Raises InputError where the teacher's numbers are not finite, or no context can be placed.
    """
    assert config.distillation is not None, "the configuration names a teacher"
    prompts = Prompts(config, environment)
    reads = {
        rollout.rollout_id: _reads(rollout, group.example, prompts)
        for group in groups
        if config.distillation.covers(group.example.environment)
        for rollout in group.rollouts
    }
    flat = [read for each in reads.values() for read in each]
    scores = iter(teacher.score([ids for *_, ids in flat], [first for _, first, _ in flat]))

    def scored(rollout: Rollout) -> Rollout:
        if not reads.get(rollout.rollout_id):
            return rollout
        logprobs = np.zeros(len(rollout.token_ids), np.float32)
        for at, *_ in reads[rollout.rollout_id]:
            score = next(scores)
            logprobs[at : at + len(score)] = score
        logprobs = np.where(rollout.loss_mask != 0, logprobs, np.float32(0))
        if not np.isfinite(logprobs).all():
            raise InputError(
                f"the teacher gave {rollout.rollout_id} log-probabilities that are not finite: "
                f"found {logprobs[~np.isfinite(logprobs)][0]}; expected weights that are finite in "
                "policy.compute_dtype"
            )
        return replace(rollout, teacher_logprobs=logprobs)

    return [replace(group, rollouts=tuple(map(scored, group.rollouts))) for group in groups]


def _reads(
    rollout: Rollout, example: Example, prompts: "Prompts"
) -> list[tuple[int, int, Int32[np.ndarray, " _"]]]:
    """By segment: places of its first scored token in the rollout and in the ids read; these."""
    lengths = rollout.segment_lengths or (len(rollout.token_ids),)
    reads = list[tuple[int, int, np.ndarray]]()
    for start, end in zip(accumulate(lengths, initial=0), accumulate(lengths), strict=False):
        trained = np.flatnonzero(rollout.loss_mask[start:end])
        if not len(trained):
            continue
        # Nothing precedes a segment's first token: it is never trained on.
        lead = max(int(trained[0]), 1)
        ids = rollout.token_ids[start:end]
        before = ids[:lead] if not prompts.context else prompts.of(rollout, example, ids[:lead])
        read = np.concatenate([before, ids[lead:]]).astype(np.int32)
        reads.append((start + lead, len(before), read))
    return reads


class Prompts:
    """Prompts as the teacher reads them: those of the policy with the context before them."""

    def __init__(self, config: Config, environment: Environment) -> None:
        settings = config.distillation
        self._config, self._environment = config, environment
        self.context = tuple(
            Message(role=each.role, content=each.content)
            for each in (settings and settings.context) or ()
        )
        self._known: dict[tuple[str, tuple[Message, ...]], tuple[np.ndarray, np.ndarray]] = {}

    def of(
        self, rollout: Rollout, example: Example, prompt: Int32[np.ndarray, " _"]
    ) -> Int32[np.ndarray, " _"]:
        """Ids of a rollout's prompt after the context. InputError for other ids than `prompt`."""
        plain, taught = self.rendered(example, opening(rollout))
        if not np.array_equal(plain, prompt):
            raise InputError(
                f"distillation.context: the prompt of {rollout.rollout_id} is not what the chat "
                f"template makes of its messages (expected {len(plain)} tokens, found "
                f"{len(prompt)}), so nothing can be put before them; leave the context out"
            )
        return taught

    def rendered(
        self, example: Example, messages: Sequence[Message]
    ) -> tuple[Int32[np.ndarray, " _"], Int32[np.ndarray, " _"]]:
        """Ids of a prompt without the context, and with it. Raises BridgeFault, InputError."""
        key = example.environment, tuple(messages)
        if key not in self._known:
            part = part_for(self._environment, self._config.environment, example)
            options = template_options(self._config.policy, part.config)
            template, tools = TemplateBridge(self._config.policy, options), ()
            if not part.environment.returns_rollouts:
                tools = part.environment.tools_offered()
            self._known[key] = (
                template.prompt(messages, tools),
                template.prompt(with_context(messages, self.context), tools),
            )
        return self._known[key]


def opening(rollout: Rollout) -> list[Message]:
    """Messages before the first turn of the policy."""
    turns = takewhile(lambda turn: turn.inference_metadata is None, rollout.turns)
    return [turn.message for turn in turns]


def taught_prompts(run: Run, rounds: Sequence[int]) -> dict[bytes, Int32[np.ndarray, " _"]]:
    """Ids of the prompts of sealed rounds as the teacher reads them, by the policy's, as bytes.

    Raises as `Prompts.rendered` and `iter_shards` do.
    """
    prompts, taught = Prompts(run.config, environment_of(run.config)), dict[bytes, np.ndarray]()
    for round in rounds:
        for group in (group for table in iter_shards(run, round) for group in groups_of(table)):
            for messages in filter(None, map(opening, group.rollouts)):
                plain, whole = prompts.rendered(group.example, messages)
                taught[plain.astype(np.int32).tobytes()] = whole
    return taught


def with_context(messages: Sequence[Message], context: Sequence[Message]) -> list[Message]:
    """Messages after a context; a system message stays first unless the context begins with one."""
    leads = [message.role == "system" for message in (*messages[:1], *context[:1])]
    first = 1 if leads == [True, False] else 0
    return [*messages[:first], *context, *messages[first:]]


def teacher_checkpoint(run: Run) -> tuple[Run, SlotRef]:
    """The run and checkpoint of a teacher that is one. Raises ConfigError, ObjectMissing."""
    settings, slot = run.config.distillation, checkpoint_slot(0)
    assert settings is not None, "the configuration names a teacher"
    if settings.checkpoint is not None:
        options = run.config.storage_options
        return checkpoint_named(settings.checkpoint, POLICY_SLOTS, KEY, options)
    ref = committed(run, slot)
    if ref is None:
        raise ObjectMissing(
            f"{run.store.url_of(slot)} is not committed: expected the run's first checkpoint, "
            "which is the teacher of distillation"
        )
    return run, ref


def prove_teacher(run: Run, teacher: Teacher) -> None:
    """Raise InputError for a teacher that contradicts itself, or is another than in last rounds."""
    check_steady(run.config, teacher)
    check_recorded(run, teacher)


def check_steady(config: Config, teacher: Teacher) -> None:
    """Raise InputError for a teacher that scores the same ids differently."""
    remote = config.distillation is not None and config.distillation.endpoint is not None
    prompt = TemplateBridge(config.policy).prompt(CANARY_PROMPT)
    # Several at once of a server: requests may go to several replicas behind one address.
    at_once, most = (4, ENDPOINT_DRIFT_MAX) if remote else (1, DRIFT_MAX)
    asked = [prompt] * at_once, [1] * at_once
    scores = np.array([each for _ in range(2) for each in teacher.score(*asked)])
    drift = float(np.ptp(scores, axis=0).mean())
    if not drift <= most:  # NaN is none
        raise InputError(
            f"distillation: the teacher gave the same {len(prompt)} tokens log-probabilities that "
            f"differ by {drift:g} nats on average: expected at most {most:g}, and finite ones"
        )


def check_recorded(run: Run, teacher: Teacher) -> None:
    """Raise InputError for another teacher than that of the run's last sealed round.

    One behind an endpoint, whose id may outlive its weights, scores a group of that round again.
    """
    first = run.ancestors[-1].through_round if run.ancestors else 0  # a fork may have another
    sealed = [
        each.round for each in progress(run).values() if each.rollouts and each.round >= first
    ]
    manifest = read_manifest(run.store, rollouts_slot(sealed[-1])) if sealed else None
    recorded = manifest[0].extra.get(STAMP, []) if manifest else []
    if recorded and recorded != [teacher.identity]:
        raise another_teacher(teacher, sealed[-1], recorded)
    settings = run.config.distillation
    if recorded and settings is not None and settings.endpoint is not None:
        _check_scores(run, sealed[-1], teacher)


def another_teacher(teacher: Teacher, round: int, recorded: Sequence[str]) -> InputError:
    return InputError(
        f"distillation: the teacher is {teacher.identity}, but that of round {round} was "
        f"{', '.join(recorded)}: restore the one that the run began with, or fork the run"
    )


def _check_scores(run: Run, round: int, teacher: Teacher) -> None:
    """Raise InputError unless a teacher gives the first group that it scored its numbers again."""
    groups = (group for table in iter_shards(run, round) for group in groups_of(table))
    scored = (g for g in groups if any(r.teacher_logprobs is not None for r in g.rollouts))
    for group in islice(scored, 1):
        (again,) = add_teacher_logprobs([group], run.config, environment_of(run.config), teacher)
        pairs = [
            (one.teacher_logprobs[one.loss_mask != 0], other.teacher_logprobs[one.loss_mask != 0])
            for one, other in zip(group.rollouts, again.rollouts, strict=True)
            if one.teacher_logprobs is not None and other.teacher_logprobs is not None
        ]
        expected, measured = map(np.concatenate, zip(*pairs, strict=True))
        gap = mean_difference(expected, measured)
        if not gap <= ENDPOINT_DRIFT_MAX:
            raise InputError(
                f"distillation: the teacher {teacher.identity} gives {group.group_id} "
                f"log-probabilities that differ by {gap:g} nats on average from those of the run, "
                f"expected at most {ENDPOINT_DRIFT_MAX:g}: it has other weights under the same id; "
                "restore those that the run began with, or fork the run"
            )


Value = TypeVar("Value")


class EndpointTeacher:
    """A teacher that a server has: a `Teacher`. Thread safe; not for a thread with an event loop.

    Methods raise the errors of the client, which name the teacher.
    """

    def __init__(self, config: Config, *, attempts_max: int | None = None) -> None:
        settings, inference = config.distillation, config.inference
        assert settings is not None, "the configuration names a teacher"
        assert settings.endpoint is not None, "the configuration names an endpoint"
        self._endpoint = settings.endpoint.rstrip("/")
        scores = SGLangScores if settings.route == "sglang" else CompletionsScores
        self._dialect = scores(TemplateBridge(config.policy))
        self._options: dict[str, Any] = {
            "api_key": os.environ.get(settings.api_key_variable),
            "timeout_s": inference.request_timeout_s,
            "attempts_max": attempts_max or inference.request_attempts_max,
            "in_flight_max": inference.requests_in_flight_max,
        }
        self.identity = settings.model or ""
        served, wanted = self._ask(PolicyClient.models), settings.model
        fit = [id for id in served if wanted is None or id == wanted or is_version_of(id, wanted)]
        # A name of our own servers stands for whatever version they serve.
        fit = [id for id in fit if parse_served_model_id(id) is not None] or fit
        if len(fit) != 1:
            raise InputError(
                f"distillation: the teacher at {self._endpoint} serves "
                f"{', '.join(served) or 'no model'}: set distillation.model to one of them, found "
                f"{wanted or 'null'}"
            )
        (self.identity,) = fit  # with its version where ids have one

    def score(
        self, sequences: Sequence[Int32[np.ndarray, " _"]], first: Sequence[int]
    ) -> list[Float32[np.ndarray, " _"]]:
        """Log-probabilities of each sequence's tokens from `first` on."""

        async def scored(client: PolicyClient) -> list[Float32[np.ndarray, " _"]]:
            asked = (client.chat((), 1, Sampling(max_tokens=1), prompt_ids=i) for i in sequences)
            return [each.completions[0].logprobs for each in await asyncio.gather(*asked)]

        scores = zip(self._ask(scored), first, strict=True)
        return [logprobs[start:] for logprobs, start in scores]

    def tokenized(self, bodies: Sequence[Mapping[str, Any]]) -> tuple[list[list[int]], int | None]:
        """Ids of texts or messages by the endpoint's tokenizer, and the length of its context.

        Each body is one of /tokenize. Raises BadResponse for an answer without ids.
        """

        async def asked(client: PolicyClient) -> list[Mapping[str, Any]]:
            named = [{"model": self.identity, **body} for body in bodies]
            posts = (client.post_as_admin(self._endpoint, TOKENIZE_ROUTE, each) for each in named)
            return [read_object(data) for data in await asyncio.gather(*posts)]

        answers = self._ask(asked)
        ids = [read_token_ids(answer.get("tokens"), "tokens").tolist() for answer in answers]
        return ids, next((each.get("max_model_len") for each in answers), None)

    def _ask(self, work: Callable[[PolicyClient], Awaitable[Value]]) -> Value:
        """Result of `work` with a client of the endpoint, which belongs to one event loop."""

        async def apart() -> Value:
            async with PolicyClient(
                endpoints=(self._endpoint,),
                model=self.identity,
                dialect=self._dialect,
                **self._options,
            ) as client:
                return await work(client)

        try:
            return asyncio.run(apart())
        except InferenceError as error:
            raise type(error)(f"distillation: the teacher at {self._endpoint}: {error}") from error

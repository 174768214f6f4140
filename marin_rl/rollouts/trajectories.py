"""Trajectories: the turns of a member of a group, why it ended, its request, and its score.

Owns the seed of each turn, the named ends of episodes, the checks of an endpoint's answers, and
what ends sampling early: an error, a request, or an environment that answers otherwise than
recorded. A request to end is heard where nothing is lost: between two pieces of completions, or
before a group. Leaves out how turns are sampled (`episode`) and the rollouts that they become
(`assemble`).
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from marin_rl.environments.base import checked_components
from marin_rl.environments.episode import StepResult
from marin_rl.environments.scoring import Scorer, fault_of
from marin_rl.errors import (
    BadResponse,
    EndpointUnavailable,
    EnvironmentTimeout,
    MarinRLError,
    RequestRejected,
    StalePolicy,
    ToolFault,
)
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.protocol import ChatClient, ChatRequest
from marin_rl.types import (
    Example,
    Message,
    RewardComponent,
    Rollout,
    RolloutGroup,
    Sampling,
    ServedPolicy,
    TurnTiming,
)

# Finish reasons of episodes that something else than the environment or the model ended.
MAX_TURNS = "max_turns"  # `environment.turns_max`
CONTEXT = "context"  # no room for a further turn in `policy.context_length`
BRIDGE = "bridge"  # the chat template cannot go on with the environment's messages
TIMEOUT = "timeout"  # a call of the environment took longer than `environment.step_timeout_s`
ENVIRONMENT_ERROR = "environment_error"  # the environment raised, or its process ended
TOOL_ERROR = "tool_error"  # the environment raised ToolFault
ABORTED = "aborted"  # the endpoint failed a request
LENGTH = "length"  # a turn was cut at `sampling.max_tokens`; or `environment.tokens_max` is reached
SEED_BITS = 48
TURNS_MAX_DEFAULT = 64  # of an episode, where `environment.turns_max` is null

# Endpoint errors that fail one request; a stale policy always ends the shard.
REQUEST_FAULTS = (EndpointUnavailable, RequestRejected, BadResponse)

Score = tuple[RewardComponent, ...] | MarinRLError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Request to sample a group: its example, its name, and the sampling with the request's seed.

    Member i is drawn with `sampling.seed + i`; with `greedy`, the last one at temperature 0.
    `members` are the indices to sample; None: all.
    """

    group_id: str
    example: Example
    size: int
    sampling: Sampling
    greedy: bool = False
    members: tuple[int, ...] | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(range(self.size)) if self.members is None else self.members

    def sampling_of(self, index: int, turn: int | str = 0) -> Sampling:
        """Return the sampling of a member's turn; every turn has its own seed."""
        seed = self.sampling.seed
        if seed is not None:
            seed = turn_seed(seed + index, turn)
        sampling = replace(self.sampling, seed=seed)
        if self.greedy and index == self.size - 1:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=None)
        return sampling

    def group_of(self, rollouts: tuple[Rollout, ...]) -> RolloutGroup:
        return RolloutGroup(
            group_id=self.group_id, example=self.example, rollouts=rollouts, group_size=self.size
        )


def turn_seed(seed: int, turn: int | str) -> int:
    """Return the seed of a member's turn, by its number or by what it asks.

    The one of number 0 is the member's own.
    """
    if turn == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Sampled turn: the completion, the answer that it came in, and the environment's step.

    Prompts extend the turn before them within a `segment`, which counts from 0. `environment_s` are
    the seconds that the step took.
    """

    answer: ChatAnswer
    completion: Completion
    sampling: Sampling
    result: StepResult
    segment: int = 0
    environment_s: float | None = None

    @property
    def timing(self) -> TurnTiming:
        server = self.answer.timings
        return TurnTiming(
            queue_s=server.queue_s,
            prefill_s=server.prefill_s,
            decode_s=server.decode_s,
            environment_s=self.environment_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The turns of one member, and why it ended.

    `fault` is set where the environment or a request of a later turn failed; then the turns are
    kept for people, and nothing is trained on. `unanswered` is the last turn where the environment
    did not answer it; it is not among `turns`. `start_s` are the seconds of the episode's start.
    """

    messages: tuple[Message, ...]  # of the first prompt
    turns: tuple[SampledTurn, ...]
    finish_reason: str
    fault: MarinRLError | None = None
    unanswered: SampledTurn | None = None
    start_s: float | None = None

    @property
    def reward(self) -> float | None:
        received = [turn.result.received for turn in self.turns]
        rewards = [reward for reward in received if reward is not None]
        return float(sum(rewards)) if rewards else None

    @property
    def dialogue(self) -> tuple[Message, ...]:
        said = [m for t in self.turns for m in (as_message(t.completion), *t.result.messages)]
        return tuple(said[: len(said) - len(self.turns[-1].result.messages)])

    @property
    def scored(self) -> bool:
        """True where the environment scores the finished episode."""
        return self.reward is None or any(turn.result.scored for turn in self.turns)


def unused(turns: Sequence[SampledTurn]) -> set[int]:
    """Return the turns, by number, that a program asked for again and did not go on from.

    Of turns after the same prompt, it uses those that it goes on from, or, without any, the last.
    """
    parents = set[int]()
    for number, turn in enumerate(turns[:-1]):
        if turn.result.opening is None:
            parents.add(number if turn.result.parent is None else turn.result.parent)
    alike = defaultdict[bytes, list[int]](list)
    for number, turn in enumerate(turns):
        alike[turn.answer.prompt_token_ids.tobytes()].append(number)
    used = {n for same in alike.values() for n in parents.intersection(same) or same[-1:]}
    return set(range(len(turns))) - used


def too_long(tokens: int, limit: int) -> str:
    """Return why a prompt leaves no room, in the words that agents know from Anthropic's API."""
    return f"prompt is too long: {tokens} tokens > {limit - 1} maximum"


def end_of(fault: MarinRLError) -> str:
    """Return the finish reason of an episode that a fault of its environment ended."""
    match fault:
        case EndpointUnavailable() | RequestRejected() | BadResponse():
            return ABORTED
        case EnvironmentTimeout():
            return TIMEOUT
        case ToolFault():
            return TOOL_ERROR
        case _:
            return ENVIRONMENT_ERROR


def as_message(completion: Completion) -> Message:
    return Message(role="assistant", content=completion.text, tool_calls=completion.tool_calls)


def check_identity(answer: ChatAnswer, policy: ServedPolicy) -> None:
    """Raise StalePolicy for samples of other parameters.

    Servers of ours name the parameters they sampled with; others only the model id.
    """
    sampled_with, expected = answer.parameters_digest, policy.parameters_digest
    if sampled_with is not None and sampled_with != expected:
        raise StalePolicy(
            f"expected samples of the parameters {expected}, found {sampled_with}: the "
            "endpoint serves other weights than this round's"
        )


def check_prompt(answer: ChatAnswer, ids: Int32[np.ndarray, " P"]) -> None:
    """Raise BadResponse where an endpoint continued other ids than it was sent."""
    if not np.array_equal(answer.prompt_token_ids, ids):
        raise BadResponse(
            f"expected the {len(ids)} prompt ids that were sent, found "
            f"{len(answer.prompt_token_ids)} others: the endpoint rendered the messages again"
        )


async def score_group(
    scorer: Scorer, example: Example, trajectories: Sequence[Trajectory]
) -> list[Score]:
    """Scores of a finished group: its steps' rewards, else the environment's for its last turns.

    What the environment scores goes to a worker in one message. Raises InputError where no worker
    can be started.
    """
    finished = [t for t in trajectories if t.fault is None and t.scored]
    lasts = [t.turns[-1].completion for t in finished]
    texts, ids = [last.text for last in lasts], [last.token_ids for last in lasts]
    dialogues = [t.dialogue for t in finished] if any(len(t.turns) > 1 for t in finished) else []
    scored = iter(await scorer.score(example, texts, ids, dialogues) if finished else [])
    scores: list[Score] = []
    for trajectory in trajectories:
        if trajectory.fault is not None:
            scores.append(trajectory.fault)
            continue
        score = next(scored) if trajectory.scored else ()
        if trajectory.reward is not None and not isinstance(score, MarinRLError):
            score = (RewardComponent(name="steps", value=trajectory.reward), *score)
        try:
            if score and not isinstance(score, MarinRLError):
                score = checked_components(score)
        except ValueError as error:
            score = fault_of(error)
        scores.append(score)
    return scores


def last_completion(rollout: Rollout) -> str | None:
    texts = [turn.content for turn in rollout.turns if turn.role == "assistant"]
    return texts[-1] if texts else None


Value = TypeVar("Value")


class Interrupted(Exception):
    """Sampling ended at the border of two pieces, or before a group began."""


class Diverged(Exception):
    """An environment answered a recorded turn otherwise than when that was sampled."""


async def all_of(calls: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Results of concurrent calls, in order; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def all_ended(calls: Iterable[Coroutine[Any, Any, Value]]) -> list[Value | Interrupted]:
    """As `all_of`, with an Interrupted in place of a result: other calls reach their own border."""

    async def ended(call: Coroutine[Any, Any, Value]) -> Value | Interrupted:
        try:
            return await call
        except Interrupted as interrupted:
            return interrupted

    return await all_of(map(ended, calls))


async def results_unless_interrupted(calls: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """As `all_of`; raises Interrupted once all calls have ended, if one was interrupted."""
    results = await all_ended(calls)
    for result in results:
        if isinstance(result, Interrupted):
            raise result
    return [result for result in results if not isinstance(result, Interrupted)]


@dataclass(slots=True)
class Interruption:
    """Request to end sampling at the next border of pieces, or also before the next group."""

    requested: bool = False
    between_groups: bool = False

    def request(self, *, between_groups: bool = False) -> None:
        """End sampling after the pieces that are under way.

        With `between_groups`, samplers of whole completions begin no further group either.
        """
        self.requested = True
        self.between_groups |= between_groups


@asynccontextmanager
async def interruptible(
    client: AbstractAsyncContextManager[ChatClient], interruption: Interruption, at_once: int
) -> AsyncIterator[ChatClient]:
    """Yield a client with at most `at_once` concurrent requests; groups may be interrupted."""
    async with client as connected:
        yield InterruptibleClient(connected, interruption, at_once)


class InterruptibleClient(ChatClient):
    """Client that begins no group once an interruption is requested between groups.

    At most `in_flight_max` requests are under way, so that waiting groups have not begun. Groups
    that have begun are finished.
    """

    def __init__(self, client: ChatClient, interruption: Interruption, in_flight_max: int) -> None:
        self.model, self.gives_ids = client.model, client.gives_ids
        self._client, self._interruption = client, interruption
        self._gate = asyncio.Semaphore(in_flight_max)
        self._begun = set[str]()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        async with self._gate:
            if self._interruption.between_groups and request.session not in self._begun:
                raise Interrupted
            self._begun.add(request.session)  # the id of a group
            return await self._client.answer(request)

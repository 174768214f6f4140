"""Episodes driven against a policy: the one place that asks the inference client for samples.

Token in, token out. The first turns of a group are one request; from then on members go on by
themselves, and the prompt of a turn is

    ids of the last prompt + ids that were sampled from it + bridge(new messages)

so that sampled ids are never rendered to text and tokenized again. Owns the order of turns, the
seed of each, and the checks of what an endpoint answers. Leaves out what an episode does
(`environments.episode`), scores, and the rollouts that trajectories become (`assemble`).
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from marin_rl.environments.base import Environment
from marin_rl.environments.episode import Episode, StepResult, episode_of
from marin_rl.environments.scoring import Scorer, fault_of
from marin_rl.errors import (
    BadResponse,
    EndpointUnavailable,
    InputError,
    MarinRLError,
    RequestRejected,
    StalePolicy,
)
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import ChatAnswer, Completion
from marin_rl.types import (
    Example,
    Message,
    RewardComponent,
    Rollout,
    Sampling,
    ServedPolicy,
    Turn,
)

TURNS_MAX = 64
MAX_TURNS = "max_turns"  # finish reason of an episode that TURNS_MAX ended
SEED_BITS = 48

# Errors of an endpoint that cost what was asked of it; a stale policy always ends the shard.
REQUEST_FAULTS = (EndpointUnavailable, RequestRejected, BadResponse)

_log = logging.getLogger(__name__)

Value = TypeVar("Value")
Score = tuple[RewardComponent, ...] | MarinRLError

# Ids that the chat template puts between a sampled turn, its stop token included, and the next.
Bridge = Callable[[Sequence[Message]], Int32[np.ndarray, " n"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Request to sample a group: its example, its name, and the sampling with the request's seed.

    Member i is drawn with `sampling.seed + i`; with `greedy`, the last one at temperature 0.
    """

    group_id: str
    example: Example
    size: int
    sampling: Sampling
    greedy: bool = False

    def sampling_of(self, index: int, turn: int = 0) -> Sampling:
        """Return the sampling of a turn of one member; every turn has a seed of its own."""
        seed = self.sampling.seed
        if seed is not None:
            seed = turn_seed(seed + index, turn)
        sampling = replace(self.sampling, seed=seed)
        if self.greedy and index == self.size - 1:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
        return sampling


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a member's turn: the first turn's is the member's own."""
    if turn == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Sampled turn: the completion, the answer that it came in, and the environment's step."""

    answer: ChatAnswer
    completion: Completion
    sampling: Sampling
    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The turns of one member, and why it ended.

    `fault` is set where the environment or a request of a later turn failed; then `text` is kept
    for people, and nothing is trained on.
    """

    messages: tuple[Message, ...]  # of the first prompt
    turns: tuple[SampledTurn, ...]
    text: str  # of the last completion
    finish_reason: str
    fault: MarinRLError | None = None

    @property
    def reward(self) -> float | None:
        """Sum of the steps' rewards; None where no step has one."""
        rewards = [turn.result.reward for turn in self.turns if turn.result.reward is not None]
        return float(sum(rewards)) if rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeDriver:
    """Plays the episodes of groups against one served policy.

    Without a `bridge` episodes have one turn, and one that goes on is an InputError.
    """

    client: PolicyClient
    policy: ServedPolicy
    environment: Environment
    bridge: Bridge | None = None

    async def play_group(self, request: GroupRequest) -> list[Trajectory]:
        """Play every member of a group, concurrently; in the order of the members.

        Raises what costs the whole group (`REQUEST_FAULTS` in the first turn), StalePolicy where
        the endpoint serves other weights, and InputError for episodes that cannot be played.
        """
        episodes = [episode_of(self.environment, request.example) for _ in range(request.size)]
        try:
            messages = _first_messages(episodes)
            sampled = await self._first_turns(request, messages)
            members = zip(episodes, sampled, strict=True)
            played = [
                self._play(request, index, episode, messages, *first)
                for index, (episode, first) in enumerate(members)
            ]
            return await all_of(played)
        finally:
            for episode in episodes:
                await _close(episode)

    async def _first_turns(
        self, request: GroupRequest, messages: Sequence[Message]
    ) -> list[tuple[ChatAnswer, Completion]]:
        """Completions in the order of the members; the greedy one is a request of its own."""
        if request.greedy:
            last = request.size - 1
            answers = await all_of(
                [
                    self.client.chat(messages, last, request.sampling),
                    self.client.chat(messages, 1, request.sampling_of(last)),
                ]
            )
        else:
            answers = [await self.client.chat(messages, request.size, request.sampling)]
        for answer in answers:
            self._check_identity(answer)
        return [(answer, completion) for answer in answers for completion in answer.completions]

    async def _play(
        self,
        request: GroupRequest,
        index: int,
        episode: Episode,
        messages: Sequence[Message],
        answer: ChatAnswer,
        completion: Completion,
    ) -> Trajectory:
        """Play a member from its first completion to its end."""
        turns: list[SampledTurn] = []
        dialogue = list(messages)
        reason, fault = completion.finish_reason, None
        while True:
            sampling = request.sampling_of(index, len(turns))
            reply = Message(role="assistant", content=completion.text)
            try:
                result = await episode.step(_as_turn(answer, completion))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
                fault = fault_of(error)
                break
            turns.append(
                SampledTurn(answer=answer, completion=completion, sampling=sampling, result=result)
            )
            reason = completion.finish_reason
            # a turn that was cut has no stop token, which new messages must follow
            if result.done or reason != "stop":
                break
            if len(turns) == TURNS_MAX:
                reason = MAX_TURNS
                break
            dialogue += [reply, *result.messages]
            try:
                answer = await self._go_on(request, index, dialogue, turns)
            except REQUEST_FAULTS as error:
                fault = error
                break
            (completion,) = answer.completions
        return Trajectory(
            messages=tuple(messages),
            turns=tuple(turns),
            text=completion.text,
            finish_reason=reason,
            fault=fault,
        )

    async def _go_on(
        self,
        request: GroupRequest,
        index: int,
        dialogue: Sequence[Message],
        turns: Sequence[SampledTurn],
    ) -> ChatAnswer:
        """Sample a member's next turn from the exact ids of the turns before it."""
        last, sampling = turns[-1], request.sampling_of(index, len(turns))
        if not len(last.answer.prompt_token_ids):  # an endpoint of texts, never trained on
            return await self.client.chat(dialogue, 1, sampling)
        if self.bridge is None:
            raise InputError(
                f"the environment {self.environment.name!r} has episodes of several turns: expected"
                " a bridge from its chat template, found none"
            )
        ids = np.concatenate(
            [
                last.answer.prompt_token_ids,
                last.completion.token_ids,
                self.bridge(last.result.messages),
            ]
        )
        answer = await self.client.chat(dialogue, 1, sampling, prompt_ids=ids)
        self._check_identity(answer)
        if not np.array_equal(answer.prompt_token_ids, ids):
            raise BadResponse(
                f"expected the {len(ids)} prompt ids that were sent, found "
                f"{len(answer.prompt_token_ids)} others: the endpoint rendered the messages again"
            )
        return answer

    def _check_identity(self, answer: ChatAnswer) -> None:
        """Servers of ours name the parameters they sampled with; others only the model id."""
        sampled_with, expected = answer.parameters_digest, self.policy.parameters_digest
        if sampled_with is not None and sampled_with != expected:
            raise StalePolicy(
                f"expected samples of the parameters {expected}, found {sampled_with}: the "
                "endpoint serves other weights than this round's"
            )


async def all_of(calls: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Results of concurrent calls, in order; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _close(episode: Episode) -> None:
    try:
        await episode.close()
    except Exception:  # noqa: BLE001 - other people's code; what was played stays valid
        _log.exception("an episode could not be closed")


def _first_messages(episodes: Sequence[Episode]) -> Sequence[Message]:
    """The first prompt, which all members of a group share. Raises InputError."""
    starts = [episode.start() for episode in episodes]
    messages, tools = starts[0]
    if any(start != starts[0] for start in starts[1:]):
        raise InputError("expected the episodes of one example to start alike, found two starts")
    if tools:
        raise InputError(
            f"an episode offers {len(tools)} tools: requests of this client cannot carry them yet"
        )
    return messages


def _as_turn(answer: ChatAnswer, completion: Completion) -> Turn:
    start = len(answer.prompt_token_ids)
    return Turn(
        role="assistant",
        content=completion.text,
        start=start,
        end=start + len(completion.token_ids),
        logprobs=completion.logprobs,
    )


async def score_group(
    scorer: Scorer, example: Example, trajectories: Sequence[Trajectory]
) -> list[Score]:
    """Scores of a finished group: its steps' rewards, else the environment's for its last turns.

    What the environment scores goes to a worker in one message. Raises InputError where no worker
    can be started.
    """
    finished = [t for t in trajectories if t.fault is None and t.reward is None]
    scored = iter(await scorer.score(example, [t.text for t in finished]) if finished else [])
    scores: list[Score] = []
    for trajectory in trajectories:
        if trajectory.fault is not None:
            scores.append(trajectory.fault)
        elif trajectory.reward is not None:
            scores.append((RewardComponent(name="steps", value=trajectory.reward),))
        else:
            scores.append(next(scored))
    return scores


def last_completion(rollout: Rollout) -> str | None:
    """The text of the last sampled turn; None where nothing was sampled."""
    texts = [turn.content for turn in rollout.turns if turn.role == "assistant"]
    return texts[-1] if texts else None

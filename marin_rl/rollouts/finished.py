"""Trajectories out of rollouts that an environment sampled by itself, and their checks.

What comes from outside is checked before anything is trained on: ids within the vocabulary, the
order of what was sampled, finite logprobs, a reward. Leaves out who sampled (`environments`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.environments.episode import StepResult
from marin_rl.environments.episode_pool import finished_rollouts
from marin_rl.environments.finished import (
    FinishedMessage,
    FinishedRollout,
    PolicyAddress,
    check_numbers,
)
from marin_rl.errors import RewardFault
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.rollouts.trajectories import (
    ENVIRONMENT_ERROR,
    LENGTH,
    TURNS_MAX_DEFAULT,
    GroupRequest,
    SampledTurn,
    Trajectory,
)
from marin_rl.types import Example, Message, ServedPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedDriver:
    """Asks an environment for the rollouts of groups, sampled from one served policy.

    `vocabulary` is the number of ids of the policy.
    """

    policy: ServedPolicy
    environment: Environment
    settings: EnvironmentConfig
    config: Config
    vocabulary: int

    async def play_group(self, request: GroupRequest) -> list[Trajectory]:
        """Trajectories of the members that are asked for, in their order.

        Raises EndpointUnavailable where the environment's own server cannot be reached, InputError
        where its process cannot be started.
        """
        address = PolicyAddress(
            endpoints=self.policy.endpoints,
            model=self.policy.model,
            tokenizer=self.config.policy.tokenizer,
            sampling=tuple(map(request.sampling_of, request.indices)),
            api_key_variable=self.config.inference.api_key_variable,
            context_length=self.config.policy.context_length,
            turns_max=self.settings.turns_max or TURNS_MAX_DEFAULT,
        )
        rollouts = await finished_rollouts(
            self.environment, self.settings, request.example, address
        )
        return [
            checked_trajectory(
                rollout,
                request,
                index,
                model=self.policy.model,
                vocabulary=self.vocabulary,
                context_length=self.config.policy.context_length,
            )
            for index, rollout in zip(request.indices, rollouts, strict=True)
        ]


def checked_trajectory(
    rollout: FinishedRollout | RewardFault,
    request: GroupRequest,
    index: int,
    *,
    model: str,
    vocabulary: int,
    context_length: int,
) -> Trajectory:
    """The trajectory of a member; one with a fault where the rollout cannot be trained on."""
    if isinstance(rollout, RewardFault):
        return _failed(request.example, rollout)
    try:
        turns = tuple(_turns(rollout, request, index, model, vocabulary, context_length))
    except ValueError as error:
        return _failed(request.example, RewardFault(f"a rollout of the environment: {error}"))
    first = next(n for n, message in enumerate(rollout.messages) if message.sampled)
    return Trajectory(
        messages=tuple(map(_message, rollout.messages[:first])),
        turns=turns,
        text=turns[-1].completion.text,
        finish_reason=LENGTH if rollout.truncated else "stop",
    )


def _failed(example: Example, fault: RewardFault) -> Trajectory:
    return Trajectory(
        messages=example.messages,
        turns=(),
        text="",
        finish_reason=ENVIRONMENT_ERROR,
        fault=fault,
    )


def _turns(
    rollout: FinishedRollout,
    request: GroupRequest,
    index: int,
    model: str,
    vocabulary: int,
    context_length: int,
) -> Iterator[SampledTurn]:
    """Yield the sampled turns, each with its whole prompt. Raises ValueError."""
    check_numbers(rollout)
    messages = rollout.messages
    places = [n for n, message in enumerate(messages) if message.sampled]
    if not places:
        raise ValueError("expected a message that was sampled, found none")
    if messages[0].sampled and len(messages[0].token_ids) == len(messages[0].logprobs):
        raise ValueError("expected ids of a prompt before the first sampled id, found none")
    segment, before = 0, list[int]()
    for number, message in enumerate(messages):
        if message.begins_segment and number:
            segment, before = segment + 1, []
        ids = _checked_ids(message, number, vocabulary)
        if message.sampled:
            prompt, sampled = before + ids[: -len(message.logprobs)], ids[-len(message.logprobs) :]
            if len(prompt) + len(sampled) > context_length:
                raise ValueError(
                    f"message {number} ends at id {len(prompt) + len(sampled)}: expected at most "
                    f"{context_length}, policy.context_length"
                )
            following = takewhile(lambda each: not each.sampled, messages[number + 1 :])
            yield SampledTurn(
                answer=ChatAnswer(
                    model=model, prompt_token_ids=np.array(prompt, np.int32), completions=()
                ),
                completion=_completion(message, sampled),
                sampling=request.sampling_of(index),
                result=_result(rollout, following, last=number == places[-1]),
                segment=segment,
            )
        before = before + ids


def _result(
    rollout: FinishedRollout, following: Iterable[FinishedMessage], *, last: bool
) -> StepResult:
    messages = tuple(map(_message, following))
    if not last:
        return StepResult(messages=messages)
    return StepResult(messages=messages, reward=rollout.reward, done=True, info=rollout.info)


def _checked_ids(message: FinishedMessage, number: int, vocabulary: int) -> list[int]:
    ids = list(message.token_ids)
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:
        raise ValueError(f"message {number}: expected ids below {vocabulary}, found {wrong[0]}")
    if len(message.logprobs) > len(ids):
        raise ValueError(
            f"message {number}: expected a logprob for each sampled id, found "
            f"{len(message.logprobs)} for {len(ids)} ids"
        )
    if message.sampled and message.role != "assistant":
        raise ValueError(f"message {number}: a message of {message.role} has sampled ids")
    return ids


def _completion(message: FinishedMessage, sampled: list[int]) -> Completion:
    logprobs = np.array(message.logprobs, np.float64)
    return Completion(
        text=message.content,
        token_ids=np.array(sampled, np.int32),
        logprobs=np.minimum(logprobs, 0).astype(np.float32),
        finish_reason="stop",
        tool_calls=message.tool_calls,
    )


def _message(message: FinishedMessage) -> Message:
    return Message(
        role=message.role,
        content=message.content,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )

"""Trajectories of rollouts that the environment sampled, and their checks.

What comes from outside is checked before anything is trained on: ids within the vocabulary, the
order of what was sampled, finite logprobs, a reward. Leaves out who sampled (`environments`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.environments.episode import (
    FinishedMessage,
    FinishedRollout,
    PolicyAddress,
    StepResult,
    check_numbers,
)
from marin_rl.environments.episode_pool import finished_rollouts
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
from marin_rl.types import Message, Sampling, ServedPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProducer:
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
            self._trajectory(rollout, request, index)
            for index, rollout in zip(request.indices, rollouts, strict=True)
        ]

    def _trajectory(
        self, rollout: FinishedRollout | RewardFault, request: GroupRequest, index: int
    ) -> Trajectory:
        """The trajectory of a member; one with a fault where the rollout cannot be trained on."""
        try:
            if isinstance(rollout, RewardFault):
                raise rollout
            turns = tuple(self._turns(rollout, request.sampling_of(index)))
        except (RewardFault, ValueError) as error:
            fault = error
            if not isinstance(fault, RewardFault):
                fault = RewardFault(f"a rollout of the environment: {error}")
            return Trajectory(
                messages=request.example.messages,
                turns=(),
                finish_reason=ENVIRONMENT_ERROR,
                fault=fault,
            )
        first = next(n for n, message in enumerate(rollout.messages) if message.sampled)
        return Trajectory(
            messages=tuple(map(_message, rollout.messages[:first])),
            turns=turns,
            finish_reason=LENGTH if rollout.truncated else "stop",
        )

    def _turns(self, rollout: FinishedRollout, sampling: Sampling) -> Iterator[SampledTurn]:
        """Yield the sampled turns, each with its whole prompt. Raises ValueError."""
        check_numbers(rollout)
        messages, length_max = rollout.messages, self.config.policy.context_length
        places = [n for n, message in enumerate(messages) if message.sampled]
        if not places:
            raise ValueError("expected a message that was sampled, found none")
        if messages[0].sampled and len(messages[0].token_ids) == len(messages[0].logprobs):
            raise ValueError("expected ids of a prompt before the first sampled id, found none")
        segment, before = 0, list[int]()
        for number, message in enumerate(messages):
            if message.begins_segment and number:
                segment, before = segment + 1, []
            _check_ids(message, number, self.vocabulary)
            before = [*before, *message.token_ids]
            if not message.sampled:
                continue
            if len(before) > length_max:
                raise ValueError(
                    f"message {number} ends at id {len(before)}: expected at most {length_max}, "
                    "policy.context_length"
                )
            prompt, sampled = before[: -len(message.logprobs)], before[-len(message.logprobs) :]
            following = takewhile(lambda each: not each.sampled, messages[number + 1 :])
            result = StepResult(messages=tuple(map(_message, following)))
            if number == places[-1]:
                result = replace(result, reward=rollout.reward, done=True, info=rollout.info)
            yield SampledTurn(
                answer=ChatAnswer(
                    model=self.policy.model,
                    prompt_token_ids=np.array(prompt, np.int32),
                    completions=(),
                ),
                completion=_completion(message, sampled),
                sampling=sampling,
                result=result,
                segment=segment,
            )


def _check_ids(message: FinishedMessage, number: int, vocabulary: int) -> None:
    ids = message.token_ids
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:
        raise ValueError(f"message {number}: expected ids below {vocabulary}, found {wrong[0]}")
    if len(message.logprobs) > len(ids):
        raise ValueError(
            f"message {number}: expected a logprob for each sampled id, found "
            f"{len(message.logprobs)} for {len(ids)} ids"
        )
    if message.sampled and message.role != "assistant":
        raise ValueError(f"message {number}: a message of {message.role} has sampled ids")


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

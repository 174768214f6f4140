"""Rollouts out of trajectories and their scores: arrays, turns, spans.

Pure but for the clock: nothing is asked for here, and nothing is written.

Axes: T tokens of a rollout, n of a part of it.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.environments.base import reward_of
from marin_rl.errors import BadResponse, MarinRLError
from marin_rl.rollouts.episode import (
    MAX_TURNS,
    GroupRequest,
    SampledTurn,
    Score,
    Trajectory,
)
from marin_rl.types import (
    InferenceMetadata,
    Message,
    Rollout,
    ServedPolicy,
    Status,
    Timing,
    Turn,
)

_STATUS_OF: dict[str, Status] = {
    "length": "truncated",
    MAX_TURNS: "truncated",
    "abort": "aborted",
    "error": "aborted",
}


class RolloutMaker:
    """Makes the rollouts of one group, which share example, policy and the clock."""

    def __init__(self, policy: ServedPolicy, request: GroupRequest, started_at: datetime) -> None:
        self._policy = policy
        self._request = request
        self._timing = Timing(
            started_at=started_at,
            finished_at=datetime.now(UTC),
            worker=f"{platform.node()}:{os.getpid()}",
        )

    def sampled(self, index: int, trajectory: Trajectory, score: Score) -> Rollout:
        """The rollout of a trajectory; an error where its score is a fault.

        Answers without the prompt's ids are text alone: their rollouts have no tokens.
        """
        if isinstance(score, MarinRLError):
            return self.failed(index, score, trajectory.text)
        for turn in trajectory.turns:
            if not len(turn.completion.token_ids) and len(turn.answer.prompt_token_ids):
                return self.failed(index, BadResponse("the completion has no tokens"))
        status = _STATUS_OF.get(trajectory.finish_reason, "complete")
        reward = None if status == "aborted" else reward_of(score)
        tokens = _tokens_of(self._policy.weight_version, trajectory.turns)
        n_sampled = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
        timings = [turn.answer.timings for turn in trajectory.turns]
        return Rollout(
            rollout_id=self._name(index),
            index_in_group=index,
            status=status,
            reward=reward,
            reward_components=score,
            finish_reason=trajectory.finish_reason,
            token_ids=tokens.ids,
            loss_mask=tokens.mask,
            logprobs=tokens.logprobs,
            policy_versions=tokens.versions,
            policy_version_min=tokens.version_min,
            policy_version_max=tokens.version_max,
            n_prompt_tokens=len(tokens.ids) - n_sampled,
            n_completion_tokens=n_sampled,
            sampling=self._request.sampling_of(index),
            turns=tuple(self._turns(trajectory, reward)),
            timing=replace(
                self._timing,
                queue_s=sum(t.queue_s for t in timings),
                prefill_s=sum(t.prefill_s for t in timings),
                decode_s=sum(t.decode_s for t in timings),
            ),
        )

    def failed(self, index: int, error: MarinRLError, text: str | None = None) -> Rollout:
        """A failed rollout with its reason; `text`, where there is one, is kept for inspection."""
        version = self._policy.weight_version
        turns = _turns_of(self._request.example.messages)
        if text is not None:
            turns = (*turns, Turn(role="assistant", content=text))
        return Rollout(
            rollout_id=self._name(index),
            index_in_group=index,
            status="error",
            reward=None,
            error=f"{type(error).__name__}: {error}",
            token_ids=np.zeros(0, np.int32),
            loss_mask=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            policy_version_min=version,
            policy_version_max=version,
            n_prompt_tokens=0,
            n_completion_tokens=0,
            sampling=self._request.sampling_of(index),
            turns=turns,
            timing=self._timing,
        )

    def _name(self, index: int) -> str:
        return f"{self._request.group_id}/{index:03d}"

    def _turns(self, trajectory: Trajectory, reward: float | None) -> Iterator[Turn]:
        """Turns in the order the model saw them; a turn's reward is its step's.

        Where only the finished episode is scored, its last turn has the rollout's reward.
        """
        messages, end = trajectory.messages, 0
        for number, turn in enumerate(trajectory.turns, start=1):
            start = len(turn.answer.prompt_token_ids)
            yield from _turns_of(messages, end, start)
            end = start + len(turn.completion.token_ids)
            by_group = trajectory.reward is None and number == len(trajectory.turns)
            yield Turn(
                role="assistant",
                content=turn.completion.text,
                start=start,
                end=end,
                reward=reward if by_group else turn.result.reward,
                logprobs=turn.completion.logprobs,
                inference_metadata=InferenceMetadata(
                    model=turn.answer.model,
                    weight_version=self._policy.weight_version,
                    sampling=turn.sampling,
                    request_id=turn.answer.request_id,
                    finish_reason=turn.completion.finish_reason,
                ),
            )
            messages = turn.result.messages


def _turns_of(
    messages: Sequence[Message], start: int | None = None, end: int | None = None
) -> tuple[Turn, ...]:
    """Turns of messages that were rendered together.

    A single one spans all their tokens; of several, no one says which tokens are whose.
    """
    if len(messages) > 1:
        start = end = None
    return tuple(Turn(role=m.role, content=m.content, start=start, end=end) for m in messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Everything the model saw, in order: arrays of length T, the mask 1 where it was sampled."""

    ids: Int32[np.ndarray, " T"]
    mask: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    versions: Int32[np.ndarray, " T"] | None
    version_min: int
    version_max: int


def _tokens_of(version: int, turns: Sequence[SampledTurn]) -> _Tokens:
    """Join turns, each of whose prompts extends the turn before it.

    Versions are by token as soon as weights were swapped within any turn; what was not sampled has
    that of the next sampled token. `version` is that of turns without a swap.
    """
    mask: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    context: list[np.ndarray] = []
    sampled: list[np.ndarray] = []
    end = 0
    for turn in turns:
        n_context = len(turn.answer.prompt_token_ids) - end
        n_sampled = len(turn.completion.token_ids)
        mask += [np.zeros(n_context, np.int32), np.ones(n_sampled, np.int32)]
        logprobs += [np.zeros(n_context, np.float32), turn.completion.logprobs]
        versions = turn.completion.policy_versions
        if versions is None:
            versions = np.full(n_sampled, version, np.int32)
        # what was not sampled has no version of its own: it gets that of the next sampled token
        context.append(np.full(n_context, versions[0] if n_sampled else version, np.int32))
        sampled.append(versions)
        end += n_context + n_sampled
    mixed = any(turn.completion.policy_versions is not None for turn in turns)
    by_token = [part for pair in zip(context, sampled, strict=True) for part in pair]
    return _Tokens(
        ids=np.concatenate([turns[-1].answer.prompt_token_ids, turns[-1].completion.token_ids]),
        mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(by_token) if mixed else None,
        version_min=int(np.concatenate(sampled).min()) if mixed else version,
        version_max=int(np.concatenate(sampled).max()) if mixed else version,
    )

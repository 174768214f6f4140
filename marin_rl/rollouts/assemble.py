"""Rollouts out of what an endpoint answered and what the scorer said of it: arrays, turns, spans.

Pure but for the clock: nothing is asked for here, and nothing is written.
"""

import os
import platform
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.environments.base import reward_of
from marin_rl.environments.scoring import Score
from marin_rl.errors import BadResponse, MarinRLError, RewardFault
from marin_rl.inference.client.protocol import ChatAnswer, Completion
from marin_rl.types import (
    Example,
    InferenceMetadata,
    Rollout,
    Sampling,
    ServedPolicy,
    Status,
    Timing,
    Turn,
)

_STATUS_OF: dict[str, Status] = {"length": "truncated", "abort": "aborted", "error": "aborted"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One group to sample: its example, its name, and the sampling with the request's seed.

    Sample i is drawn with `sampling.seed + i`; with `greedy`, the last one at temperature 0.
    """

    group_id: str
    example: Example
    size: int
    sampling: Sampling
    greedy: bool = False

    def sampling_of(self, index: int) -> Sampling:
        """Return the sampling of one member."""
        seed = self.sampling.seed
        sampling = replace(self.sampling, seed=None if seed is None else seed + index)
        if self.greedy and index == self.size - 1:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
        return sampling


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

    def sampled(
        self, index: int, answer: ChatAnswer, completion: Completion, score: Score
    ) -> Rollout:
        """The rollout of a completion that arrived; an error where its score is a fault.

        An answer without the prompt's ids is text alone: its rollouts have no tokens.
        """
        if isinstance(score, RewardFault):
            return self.failed(index, score, completion.text)
        if not len(completion.token_ids) and len(answer.prompt_token_ids):
            return self.failed(index, BadResponse("the completion has no tokens"))
        status = _STATUS_OF.get(completion.finish_reason, "complete")
        reward = None if status == "aborted" else reward_of(score)
        tokens = _tokens_of(self._policy.weight_version, answer, completion)
        return Rollout(
            rollout_id=self._name(index),
            index_in_group=index,
            status=status,
            reward=reward,
            reward_components=score,
            finish_reason=completion.finish_reason,
            token_ids=tokens.ids,
            loss_mask=tokens.mask,
            logprobs=tokens.logprobs,
            policy_versions=tokens.versions,
            policy_version_min=tokens.version_min,
            policy_version_max=tokens.version_max,
            n_prompt_tokens=tokens.n_prompt,
            n_completion_tokens=len(completion.token_ids),
            sampling=self._sampling(index),
            turns=(
                *self._prompt_turns(tokens.n_prompt),
                self._answer_turn(index, answer, completion, tokens.n_prompt, reward),
            ),
            timing=replace(
                self._timing,
                queue_s=answer.timings.queue_s,
                prefill_s=answer.timings.prefill_s,
                decode_s=answer.timings.decode_s,
            ),
        )

    def failed(self, index: int, error: MarinRLError, text: str | None = None) -> Rollout:
        """A rollout that says why there is none; `text` is kept for people where there is one."""
        version = self._policy.weight_version
        turns = self._prompt_turns(None)
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
            sampling=self._sampling(index),
            turns=turns,
            timing=self._timing,
        )

    def _name(self, index: int) -> str:
        return f"{self._request.group_id}/{index:03d}"

    def _sampling(self, index: int) -> Sampling:
        return self._request.sampling_of(index)

    def _prompt_turns(self, n_prompt: int | None) -> tuple[Turn, ...]:
        """Turns of the prompt's messages; a single one spans all the prompt's tokens, several have
        no spans.
        """
        messages = self._request.example.messages
        if len(messages) == 1 and n_prompt is not None:
            message = messages[0]
            return (Turn(role=message.role, content=message.content, start=0, end=n_prompt),)
        return tuple(Turn(role=m.role, content=m.content) for m in messages)

    def _answer_turn(
        self,
        index: int,
        answer: ChatAnswer,
        completion: Completion,
        n_prompt: int,
        reward: float | None,
    ) -> Turn:
        return Turn(
            role="assistant",
            content=completion.text,
            start=n_prompt,
            end=n_prompt + len(completion.token_ids),
            reward=reward,
            logprobs=completion.logprobs,
            inference_metadata=InferenceMetadata(
                model=answer.model,
                weight_version=self._policy.weight_version,
                sampling=self._sampling(index),
                request_id=answer.request_id,
                finish_reason=completion.finish_reason,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Prompt and completion in one: arrays of length T, the first `n_prompt` not sampled."""

    ids: Int32[np.ndarray, " T"]
    mask: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    versions: Int32[np.ndarray, " T"] | None
    version_min: int
    version_max: int
    n_prompt: int


def _tokens_of(version: int, answer: ChatAnswer, completion: Completion) -> _Tokens:
    prompt = answer.prompt_token_ids
    n_prompt, n_sampled = len(prompt), len(completion.token_ids)
    nothing = np.zeros(n_prompt, np.int32)
    sampled = completion.policy_versions
    versions = None
    if sampled is not None:
        versions = np.concatenate([np.full(n_prompt, sampled[0], np.int32), sampled])
    return _Tokens(
        ids=np.concatenate([prompt, completion.token_ids]),
        mask=np.concatenate([nothing, np.ones(n_sampled, np.int32)]),
        logprobs=np.concatenate([nothing.astype(np.float32), completion.logprobs]),
        versions=versions,
        version_min=version if sampled is None else int(sampled.min()),
        version_max=version if sampled is None else int(sampled.max()),
        n_prompt=n_prompt,
    )

"""Environments that sample by themselves and return finished rollouts, with their token ids.

Owns the protocol and its records. An environment is asked for the rollouts of an example, with the
address of the policy; it asks that for completions as it likes, and returns messages, each with the
ids that it added to the sequence. A user's environment does that in a process with limits: it may
block, print, fork or end its process, which costs the rollouts that it was asked for. Leaves out
the other checks of what comes back, and what a run makes of it (`rollouts.finished`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from marin_rl.finite import LOGPROB_MIN, fit_logprobs, reward_number
from marin_rl.types import Role, Sampling, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAddress:
    """Address of a served policy, and the sampling of a group of rollouts from it.

    `endpoints` are base URLs that end in /v1. A request for `model` is refused by the server once
    it has other weights. `sampling` has an entry for each member, with a seed of its own.
    `api_key_variable` names the environment variable that has the key, if the server wants one.
    """

    endpoints: tuple[str, ...]
    model: str
    tokenizer: str
    sampling: tuple[Sampling, ...]
    api_key_variable: str
    context_length: int
    turns_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMessage:
    """Message of a rollout, and the ids that it added to the sequence.

    A message that the policy sampled has a logprob (nats, of the sampling distribution) for each of
    its last `len(logprobs)` ids: those were sampled, others are the chat template's. The others of
    a rollout have no logprobs. A message with `begins_segment` starts a new sequence: the ids of
    messages before it are not part of its prompt.
    """

    role: Role
    content: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    begins_segment: bool = False

    @property
    def sampled(self) -> bool:
        return len(self.logprobs) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """Rollout that an environment has sampled and scored.

    `reward` is a number, or numbers by name that add up. `truncated` says that a limit ended it.
    """

    messages: tuple[FinishedMessage, ...]
    reward: float | Mapping[str, float]
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


def check_numbers(rollout: FinishedRollout) -> None:
    """Raise ValueError for a logprob or a reward that cannot be trained on, or no reward."""
    for number, message in enumerate(rollout.messages):
        logprobs = np.asarray(message.logprobs, np.float64)
        if not np.isfinite(logprobs).all():
            raise ValueError(f"message {number}: expected finite logprobs")
        if not fit_logprobs(logprobs).all():
            raise ValueError(
                f"message {number}: expected logprobs of at most 0 and at least {LOGPROB_MIN:g}, "
                f"found {logprobs.min()} to {logprobs.max()}"
            )
    reward = rollout.reward
    values = list(reward.values()) if isinstance(reward, Mapping) else [reward]
    if not values:
        raise ValueError(f"expected a finite reward, found {reward!r:.80}")
    reward_number(sum(reward_number(value, "reward") for value in values), "reward")

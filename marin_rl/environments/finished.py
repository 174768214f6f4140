"""Environments that sample by themselves and return finished rollouts, with their token ids.

Owns the protocol and its records. An environment is asked for the rollouts of an example, with the
address of the policy; it asks that for completions as it likes, and returns messages, each with the
ids that it added to the sequence. A user's environment does that in a process with limits: it may
block, print, fork or end its process, which costs the rollouts that it was asked for. Leaves out
the other checks of what comes back, and what a run makes of it (`rollouts.finished`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import orjson
from pydantic import TypeAdapter, ValidationError

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.environments.scoring import EnvironmentPool, PoolsInUse, fault_of
from marin_rl.errors import EndpointUnavailable, EnvironmentTimeout, RewardFault
from marin_rl.finite import LOGPROB_MIN, fit_logprobs, reward_number
from marin_rl.isolated.pool import WorkerFault
from marin_rl.types import Example, Role, Sampling, ToolCall


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


@runtime_checkable
class ReturnsRollouts(Protocol):
    """Optional part of an environment: it samples from the policy by itself.

    `rollouts` gives a rollout or a fault for each entry of `policy.sampling`, in order. It may
    raise anything; EndpointUnavailable says that its own server cannot be reached.
    """

    async def rollouts(
        self, example: Example, policy: PolicyAddress
    ) -> Sequence[FinishedRollout | RewardFault]: ...


ROLLOUTS_TIMEOUT_S = 3600.0  # of all rollouts of an example, unless the configuration says other

_ROLLOUT = TypeAdapter(FinishedRollout | str)

Rollouts = Sequence[FinishedRollout | RewardFault]


async def finished_rollouts(
    environment: Environment, config: EnvironmentConfig, example: Example, policy: PolicyAddress
) -> Rollouts:
    """The rollouts of an example, one per entry of `policy.sampling`; faults where they failed.

    Raises EndpointUnavailable where the environment's server cannot be reached, InputError for a
    worker that cannot be started.
    """
    assert isinstance(environment, ReturnsRollouts), environment.name
    size, limit_s = len(policy.sampling), config.step_timeout_s or ROLLOUTS_TIMEOUT_S
    try:
        if environment.workers:
            rollouts = await pools.of(environment, config).rollouts(example, policy)
        else:
            async with asyncio.timeout(limit_s):
                rollouts = await environment.rollouts(example, policy)
    except EndpointUnavailable:
        raise
    except TimeoutError:
        late = f"the rollouts of example {example.example_id} took longer than {limit_s:g} s"
        return [EnvironmentTimeout(late)] * size
    except Exception as error:  # noqa: BLE001 - it is other people's code
        return [fault_of(error)] * size
    if len(rollouts) != size:
        wrong = f"the environment returned {len(rollouts)} rollouts: expected {size}"
        return [RewardFault(wrong)] * size
    return rollouts


class _Pool(EnvironmentPool):
    """Workers in which an environment samples."""

    def __init__(self, environment: Environment, config: EnvironmentConfig) -> None:
        limit_s = config.step_timeout_s or ROLLOUTS_TIMEOUT_S
        super().__init__("return rollouts", environment, config, limit_s)

    async def rollouts(self, example: Example, policy: PolicyAddress) -> Rollouts:
        worker = await asyncio.to_thread(self.assign)
        try:
            request = orjson.dumps({"example": example, "policy": policy})
            answer = await asyncio.wrap_future(worker.call(request))
        except WorkerFault as fault:
            if fault.limit == "wall":
                raise TimeoutError from None
            raise RewardFault(f"the environment ended its process ({fault})") from None
        finally:
            self.release(worker)
        if "unavailable" in answer:
            raise EndpointUnavailable(answer["unavailable"])
        if "fault" in answer:
            raise RewardFault(answer["fault"])
        return list(map(_decoded, answer["rollouts"]))


pools = PoolsInUse(_Pool)


def _decoded(record: Any) -> FinishedRollout | RewardFault:
    """Return a rollout of a worker's answer, or its fault."""
    try:
        rollout = _ROLLOUT.validate_python(record)
    except ValidationError as error:
        return fault_of(error)
    return RewardFault(rollout) if isinstance(rollout, str) else rollout

"""A user's environment that returns finished rollouts, in a process with limits.

It may block, print, fork or end its process: that costs the rollouts that it was asked for. Both
ends are here: the pool of this process, and `begin`, which the worker runs.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import orjson
from pydantic import TypeAdapter, ValidationError

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.environments.finished import (
    FinishedRollout,
    PolicyAddress,
    ReturnsRollouts,
    check_numbers,
)
from marin_rl.environments.scoring import fault_of
from marin_rl.environments.worker import constructed
from marin_rl.environments.worker_pools import EnvironmentPool, PoolsInUse
from marin_rl.errors import EndpointUnavailable, EnvironmentTimeout, RewardFault
from marin_rl.isolated.pool import WorkerFault
from marin_rl.types import Example

ROLLOUTS_TIMEOUT_S = 3600.0  # of all rollouts of an example, unless the configuration says other

_EXAMPLE = TypeAdapter(Example)
_POLICY = TypeAdapter(PolicyAddress)
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
    """Workers of one environment."""

    def __init__(self, environment: Environment, config: EnvironmentConfig) -> None:
        limit_s = config.step_timeout_s or ROLLOUTS_TIMEOUT_S
        super().__init__("marin_rl.environments.finished_pool", environment, config, limit_s)

    async def rollouts(self, example: Example, policy: PolicyAddress) -> Rollouts:
        """Rollouts of a worker. Raises RewardFault, EndpointUnavailable, InputError."""
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


def _encoded(rollout: object) -> orjson.Fragment | str:
    """Return the JSON of a rollout, or its fault in words, so that one costs no other."""
    if isinstance(rollout, RewardFault):
        return str(rollout)
    try:
        if not isinstance(rollout, FinishedRollout):
            raise TypeError(f"expected a FinishedRollout, found {type(rollout).__name__}")
        check_numbers(rollout)  # JSON has null in the place of NaN
        return orjson.Fragment(orjson.dumps(rollout, option=orjson.OPT_SERIALIZE_NUMPY))
    except (TypeError, ValueError) as error:
        return str(fault_of(error))


def begin(settings: Mapping[str, Any]) -> "_Worker":
    """Construct the environment of `settings`. Raises InputError where it cannot be imported."""
    return _Worker(constructed(settings, "return rollouts", examples=True))


class _Worker:
    """The calls of a worker process; see `isolated.worker.Handler`."""

    def __init__(self, environment: Environment) -> None:
        assert isinstance(environment, ReturnsRollouts), environment.name
        self._environment = environment

    def call(
        self, request: Mapping[str, Any]
    ) -> tuple[Coroutine[Any, Any, bytes], Callable[[], AbstractContextManager[object]]]:
        """The call that answers a request."""
        return self._answer(request), nullcontext

    async def _answer(self, record: Mapping[str, Any]) -> bytes:
        example = _EXAMPLE.validate_python(record["example"])
        policy = _POLICY.validate_python(record["policy"])
        random.seed(example.seed)
        np.random.seed(example.seed % 2**32)  # noqa: NPY002 - the one that old code draws from
        try:
            rollouts = await self._environment.rollouts(example, policy)
            return orjson.dumps({"rollouts": list(map(_encoded, rollouts))})
        except EndpointUnavailable as error:
            return orjson.dumps({"unavailable": str(error)})
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
            return orjson.dumps({"fault": str(fault_of(error))})

"""Worker processes of environments: their setup, and one pool for each environment in use.

Leaves out the processes themselves (`marin_rl.isolated`), and what is asked of them: scores
(`scoring`), turns of episodes (`episode_pool`), finished rollouts (`finished_pool`).
"""

import atexit
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.isolated.calls import CallPool
from marin_rl.isolated.pool import WorkerLimits
from marin_rl.isolated.processes import clean_environment
from marin_rl.user_code import packed_sources

ANSWER_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Limits, settings and environment variables of a process that runs an environment's code."""

    limits: WorkerLimits
    settings: dict[str, Any]
    variables: dict[str, str]


def worker_setup(environment: Environment, config: EnvironmentConfig, wall_s: float) -> WorkerSetup:
    """Return the setup of workers that construct `environment` again (`worker.constructed`)."""
    settings = config.model_dump(mode="json")
    return WorkerSetup(
        limits=WorkerLimits(
            wall_s=wall_s,
            memory_bytes=config.reward_memory_bytes_max,
            answer_bytes=ANSWER_BYTES_MAX,
            sealed=False,  # rewards and environments are the user's code: they may write files
        ),
        settings={
            "module": type(environment).__module__,
            "environment": settings,
            "code": packed_sources(settings),
        },
        variables=clean_environment(config.pass_environment),
    )


class EnvironmentPool(CallPool):
    """Workers that run `module` with an environment; a call may take `wall_s`."""

    def __init__(
        self, module: str, environment: Environment, config: EnvironmentConfig, wall_s: float
    ) -> None:
        setup = worker_setup(environment, config, wall_s)
        super().__init__(
            module,
            setup.limits,
            environment.workers,
            settings=setup.settings,
            environment=setup.variables,
            name="environment",
        )


@runtime_checkable
class Closes(Protocol):
    """Something with processes that can be ended."""

    def close(self) -> None:
        """End the processes."""
        ...


PoolT = TypeVar("PoolT", bound=Closes)


class PoolsInUse(Generic[PoolT]):
    """Pools of this process by environment, version and settings. Thread safe.

    One is made at its first use, and all are closed when the process ends.
    """

    def __init__(self, make: Callable[[Environment, EnvironmentConfig], PoolT]) -> None:
        self._make = make
        self._pools: dict[tuple[str, str], PoolT] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    def __len__(self) -> int:
        return len(self._pools)

    def of(self, environment: Environment, config: EnvironmentConfig) -> PoolT:
        """Return the pool of an environment."""
        key = config.model_dump_json(), environment.version
        with self._lock:
            if key not in self._pools:
                self._pools[key] = self._make(environment, config)
            return self._pools[key]

    def close(self) -> None:
        """Close all of them; one that is used again is another."""
        with self._lock:
            for pool in self._pools.values():
                pool.close()
            self._pools.clear()

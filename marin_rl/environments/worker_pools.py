"""Worker processes of environments, and one pool for each environment in use.

Leaves out the processes themselves (`marin_rl.isolated`), and what is asked of them: scores
(`scoring`), turns of episodes (`episode_pool`), finished rollouts (`finished`).
"""

import atexit
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, runtime_checkable

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.isolated.pool import Pool, WorkerLimits, WorkerSpec
from marin_rl.isolated.processes import clean_environment
from marin_rl.user_code import packed_sources

ANSWER_BYTES_MAX = 4 << 20


class EnvironmentPool(Pool):
    """Workers with an environment, which serve a `purpose` (`worker`). A call may take `wall_s`."""

    def __init__(
        self, purpose: str, environment: Environment, config: EnvironmentConfig, wall_s: float
    ) -> None:
        settings = config.model_dump(mode="json")
        spec = WorkerSpec(
            module="marin_rl.environments.worker",
            limits=WorkerLimits(
                wall_s=wall_s,
                memory_bytes=config.reward_memory_bytes_max,
                answer_bytes=ANSWER_BYTES_MAX,
                sealed=False,  # rewards and environments are the user's code: they may write files
            ),
            settings={
                "purpose": purpose,
                "module": type(environment).__module__,
                "environment": settings,
                "code": packed_sources(settings),
            },
            environment=clean_environment(config.pass_environment),
            name="environment",
        )
        super().__init__(spec, environment.workers)


@runtime_checkable
class Closes(Protocol):
    """Something with processes that can be ended."""

    def close(self) -> None: ...


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
        with self._lock:
            for pool in self._pools.values():
                pool.close()
            self._pools.clear()

"""Places where `generate` and `evaluate` run: in this process, or on a Prefect work pool.

A node gets references alone and answers with a commit in the store, which decides what is true: a
node that is lost costs what it had not committed, and two at one shard end in one commit. A pool
needs a Prefect API that the nodes reach, and remote endpoints. Leaves out which stages there are
(`tasks.generate`) and their retries (`tasks.options`).
"""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments.flow_runs import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling
from prefect.tasks import Task

from marin_rl.config import Config, FlowConfig
from marin_rl.errors import ConfigError, StageFailed, WorkerLost
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.provenance import code_digest
from marin_rl.storage.runs import RunRef
from marin_rl.storage.stores.filesystem import open_store

POLL_S = 1.0
PATIENCE_S = 60.0  # until a line says that no worker has taken a flow run
PENDING_S_MAX = 600.0  # between a worker's taking a flow run and its process's beginning

GENERATE_SHARDS, EVALUATE = "generate-shards", "evaluate-checkpoint"  # flows of `flows.stages`

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """A stage's counterpart that has a work pool do the work of several calls.

    `pack` makes its arguments of theirs.
    """

    task: Task[..., Any]
    pack: Callable[[Sequence[Sequence[Any]]], Sequence[Any]]


pooled: dict[str, Pooled] = {}  # by name of the stage; `tasks.generate` fills it


class WorkPool:
    """Flow runs of deployments, one for some shards, which the workers of a pool take."""

    def __init__(self, flow: FlowConfig) -> None:
        self.flow = flow
        self._references: dict[str, RunRef] = {}

    def chunks(self, calls: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
        """As many equal parts as may be in flight at once, or parts of `shards_per_flow_run`."""
        count = self.flow.shards_in_flight_max
        size = self.flow.shards_per_flow_run or -(-len(calls) // count)
        return [list(calls[at : at + size]) for at in range(0, len(calls), max(size, 1))]

    async def call(self, tuned: Task[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Results of some calls, by the stage's counterpart with the same retries."""
        counterpart = pooled[tuned.name]
        task = counterpart.task.with_options(
            retries=tuned.retries,
            retry_delay_seconds=tuned.retry_delay_seconds or 0,
            timeout_seconds=tuned.timeout_seconds,
        )
        return await task(*counterpart.pack([self.for_nodes(call) for call in calls]))

    def for_nodes(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of a call, whose run reference says what another machine must have."""
        return [self._demanding(a) if isinstance(a, RunRef) else a for a in arguments]

    def _demanding(self, run: RunRef) -> RunRef:
        # One object for one run: Prefect knows arguments by their address.
        name = f"{run.root}\0{run.run_id}"
        if name not in self._references:
            folder = open_store(run.root, run.storage_options).at(run.run_id)
            needed = {"code": code_digest(), "record": run_sha256(folder)}
            self._references[name] = dataclasses.replace(run, **needed)
        return self._references[name]


_current: ContextVar[WorkPool | None] = ContextVar("work-pool", default=None)


def pool_of(stage: Task[..., Any]) -> WorkPool | None:
    """The pool whose workers run a stage; None where it runs in this process."""
    return _current.get() if stage.name in pooled else None


@contextmanager
def fanning_out(config: Config, *, shared_api: bool) -> Iterator[None]:
    """Have stages run as `flow.runner` says inside the block.

    `shared_api` says that other machines reach the Prefect API of this flow. Raises ConfigError
    where they do not, and without the deployments.
    """
    flow = config.flow
    if flow.runner == "local":
        yield
        return
    if not shared_api:
        raise ConfigError(
            f"flow.runner is {flow.runner}, but this flow reports to a temporary Prefect server "
            "that no other machine reaches: set PREFECT_API_URL to a server that the workers use "
            "(make up starts one)"
        )
    with ExitStack() as stack:
        token = _current.set(_pool(flow))
        stack.callback(_current.reset, token)
        yield


def _pool(flow: FlowConfig) -> WorkPool:
    client: SyncPrefectClient
    with get_client(sync_client=True) as client:
        for name in (GENERATE_SHARDS, EVALUATE):
            try:
                client.read_deployment_by_name(f"{name}/{flow.deployment}")
            except ObjectNotFound:
                raise ConfigError(
                    f"flow.runner work_pool: no deployment {name}/{flow.deployment} on this "
                    "Prefect server: register it (prefect --no-prompt deploy --all), or set "
                    "flow.deployment"
                ) from None
    return WorkPool(flow)


async def play_on_pool(flow: str, deployment: str, name: str, parameters: dict[str, Any]) -> None:
    """Have a worker play a deployment's flow, and wait for its end.

    Raises WorkerLost where the flow run crashed, StageFailed where it failed or was cancelled.
    Cancelling this cancels the flow run.
    """
    run = await arun_deployment(
        f"{flow}/{deployment}",
        parameters=parameters,
        flow_run_name=name,
        timeout=0,
        as_subflow=True,
    )
    try:
        ended = await _ended(run.id, name)
    except asyncio.CancelledError:
        await asyncio.shield(_cancel(run.id))
        raise
    state = ended.state
    assert state is not None, "it has ended"
    if state.type == StateType.COMPLETED:
        return
    message = f"flow run {name} ({run.id}) ended as {state.name}: {state.message or 'no message'}"
    if state.type == StateType.CRASHED:
        raise WorkerLost(f"{message}; what it committed stays, and the rest is given out again")
    raise StageFailed(f"{message}; its log is on its page: prefect flow-run logs {run.id}")


async def _ended(run_id: UUID, name: str) -> FlowRun:
    """The flow run once it has ended. Raises WorkerLost where its worker never began it."""
    waits: Counter[StateType] = Counter()  # looks that saw it so
    async with get_client() as client:
        while True:
            run = await client.read_flow_run(run_id)
            assert run.state is not None, "every flow run has a state"
            if run.state.is_final():
                return run
            waits[run.state.type] += 1
            if waits[StateType.SCHEDULED] * POLL_S == PATIENCE_S:
                _log.warning(
                    "no worker has taken flow run %s for %g s: start one (prefect worker start "
                    "--pool %s)",
                    name,
                    PATIENCE_S,
                    run.work_pool_name,
                )
            # It has no heartbeat yet by which the server would see that its worker died.
            if waits[StateType.PENDING] * POLL_S > PENDING_S_MAX:
                await _cancel(run_id)
                raise WorkerLost(
                    f"a worker took flow run {name} and never began it: given out again"
                )
            await asyncio.sleep(POLL_S)


async def _cancel(run_id: UUID) -> None:
    async with get_client() as client:
        await client.set_flow_run_state(run_id, Cancelling())

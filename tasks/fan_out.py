"""Places where stages that sample run: in this process, on a Prefect work pool, on a Ray cluster.

A node gets references alone and answers with a commit in the store, which decides what is true: a
node that is lost costs what it had not committed, and two at one shard end in one commit. Both ways
need a Prefect API that the nodes reach, and remote endpoints. Leaves out which stages there are
(`tasks.generate`) and their retries (`tasks.options`).
"""

import asyncio
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import PrefectClient, SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.context import FlowRunContext
from prefect.deployments.flow_runs import arun_deployment
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.settings import get_current_settings
from prefect.states import Cancelling
from prefect.tasks import Task
from prefect.utilities.callables import get_call_parameters

from marin_rl.config import Config, FlowConfig
from marin_rl.errors import ConfigError, ServerUnavailable, StageFailed, WorkerLost
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.provenance import code_digest
from marin_rl.storage.runs import RunRef
from marin_rl.storage.stores.filesystem import open_store

POLL_S = 1.0
LOOKS = 10  # of a flow run that a worker has taken, for one look at the worker
PATIENCE_S = 60.0  # until a line says that no worker has taken a flow run
TOO_MANY, SERVER_ERRORS = 429, 500  # statuses of requests that may be answered later

# Flows of `flows.stages`.
GENERATE_SHARDS, SAMPLE_CHUNK = "generate-shards", "sample-chunk"
EVALUATE = "evaluate-checkpoint"

_log = logging.getLogger(__name__)


# Counterparts of stages for a work pool, each with a function that makes its arguments of those of
# several calls; by name of the stage. `tasks.generate` fills it.
Pack = Callable[[Sequence[Sequence[Any]]], Sequence[Any]]
pooled: dict[str, tuple[Task[..., Any], Pack]] = {}


class Nodes(ABC):
    """Base: machines that run the stages of `pooled`, and what they are given."""

    def __init__(self, flow: FlowConfig) -> None:
        self.flow = flow
        self._references: dict[str, RunRef] = {}

    def chunks(self, calls: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
        """Calls by the unit that a node gets, in order."""
        return [[call] for call in calls]

    @abstractmethod
    async def call(self, tuned: Task[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Results of the calls of one unit; `tuned` is the stage with its retries and deadline."""

    def for_nodes(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of a call, whose run reference says what another machine must have."""

        def demanding(run: RunRef) -> RunRef:
            # One object for one run: Prefect knows arguments by their address.
            name = f"{run.root}\0{run.run_id}"
            if name not in self._references:
                folder = open_store(run.root, run.storage_options).at(run.run_id)
                needed = {"code": code_digest(), "record": run_sha256(folder)}
                self._references[name] = dataclasses.replace(run, **needed)
            return self._references[name]

        return [demanding(a) if isinstance(a, RunRef) else a for a in arguments]


class WorkPool(Nodes):
    """Flow runs of deployments, one for some shards, which the workers of a pool take."""

    def chunks(self, calls: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
        """As many equal parts as may be in flight at once, or parts of `shards_per_flow_run`."""
        count = self.flow.shards_in_flight_max
        size = self.flow.shards_per_flow_run or -(-len(calls) // count)
        return [list(calls[at : at + size]) for at in range(0, len(calls), max(size, 1))]

    async def call(self, tuned: Task[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
        counterpart, pack = pooled[tuned.name]
        task = counterpart.with_options(
            retries=tuned.retries,
            retry_delay_seconds=tuned.retry_delay_seconds or 0,
            timeout_seconds=tuned.timeout_seconds,
        )
        return await task(*pack([self.for_nodes(call) for call in calls]))


class RayCluster(Nodes):
    """Tasks on a Ray cluster, through prefect-ray's task runner."""

    def __init__(self, flow: FlowConfig, runner: Any) -> None:
        super().__init__(flow)
        self._runner = runner

    async def call(self, tuned: Task[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
        """The result of one call. Raises WorkerLost where Ray lost more nodes than `retries`."""
        ((*arguments,),) = calls
        parameters = get_call_parameters(tuned.fn, tuple(self.for_nodes(arguments)), {})
        # A context variable: it counts where `submit` is called.
        options = import_module("prefect_ray.context").remote_options
        reserved = {str(name): each for name, each in (self.flow.ray_resources or {}).items()}
        # By Ray, where a node is lost; errors of a stage are retried by Prefect, on its node.
        retries = {"max_retries": self.flow.retries, **reserved.get(tuned.name, {})}
        with _flow_that_travels(), options(**retries):
            reference = self._runner.submit(tuned, parameters=parameters).wrapped_future
        ray = import_module("ray")
        try:
            state = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            raise WorkerLost(
                f"{tuned.name}: the Ray cluster lost what ran it ({error}); what it committed stays"
            ) from None
        return [await state.aresult()]


def _nothing() -> None:
    """The body of a flow that no node runs."""


@contextmanager
def _flow_that_travels() -> Iterator[None]:
    """A context of the flow run whose flow can be sent to a node: the real body may hold locks."""
    context = FlowRunContext.get()
    assert context is not None, "stages are called in a flow"
    assert context.flow is not None, "see above"
    with context.model_copy(update={"flow": Flow(_nothing, name=context.flow.name)}):
        yield


_current: ContextVar[Nodes | None] = ContextVar("nodes", default=None)


def nodes_of(stage: Task[..., Any]) -> Nodes | None:
    """The machines that run a stage; None where it runs in this process."""
    return _current.get() if stage.name in pooled else None


@contextmanager
def fanning_out(config: Config, *, shared_api: bool) -> Iterator[None]:
    """Have stages run as `flow.runner` says inside the block.

    `shared_api` says that other machines reach the Prefect API of this flow. Raises ConfigError
    where they do not, without the deployments, without Ray or its cluster.
    """
    flow = config.flow
    if flow.runner == "local":
        yield
        return
    if not shared_api:
        raise ConfigError(
            f"flow.runner is {flow.runner}, but this flow reports to a temporary Prefect server "
            "that no other machine reaches: set PREFECT_API_URL to a server that the workers use "
            "(`prefect server start` starts one)"
        )
    with ExitStack() as stack:
        nodes = _pool(config) if flow.runner == "work_pool" else stack.enter_context(_ray(flow))
        token = _current.set(nodes)
        stack.callback(_current.reset, token)
        yield


def _pool(config: Config) -> WorkPool:
    flow = config.flow
    client: SyncPrefectClient
    with get_client(sync_client=True) as client:
        for name in (SAMPLE_CHUNK if config.windowed else GENERATE_SHARDS, EVALUATE):
            try:
                client.read_deployment_by_name(f"{name}/{flow.deployment}")
            except ObjectNotFound:
                raise ConfigError(
                    f"flow.runner work_pool: no deployment {name}/{flow.deployment} on this "
                    "Prefect server: register it (prefect --no-prompt deploy --all), or set "
                    "flow.deployment"
                ) from None
    return WorkPool(flow)


@contextmanager
def _ray(flow: FlowConfig) -> Iterator[RayCluster]:
    try:
        task_runner = import_module("prefect_ray").RayTaskRunner
    except ImportError as error:
        raise ConfigError(
            f"flow.runner ray needs a package that is missing ({error}): pip install "
            "'marin-rl[ray]', the same version on every node"
        ) from None
    # Nodes have an environment of their own; without the API's address each of them would start a
    # Prefect server for itself.
    api = {"PREFECT_API_URL": str(get_current_settings().api.url)}
    options = {"runtime_env": {"env_vars": api}, "log_to_driver": False}
    runner = task_runner(address=flow.ray_address, init_kwargs=options)
    try:
        runner.__enter__()
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"flow.ray_address: no Ray cluster answers at {flow.ray_address} ({error}): start one "
            "(ray start --head) or set its address"
        ) from None
    try:
        yield RayCluster(flow, runner)
    finally:
        runner.__exit__(None, None, None)


async def play_on_pool(
    flow: str, config: FlowConfig, name: str, parameters: dict[str, Any]
) -> None:
    """Have a worker play the flow of a deployment, and wait for its end.

    Raises WorkerLost where the flow run crashed, StageFailed where it failed or was cancelled,
    ServerUnavailable. Cancelling this cancels the flow run.
    """
    with _server_may_be_away(name):
        run = await arun_deployment(
            f"{flow}/{config.deployment}",
            parameters=parameters,
            flow_run_name=name,
            timeout=0,
            as_subflow=True,
        )
        try:
            ended = await _ended(run.id, name, config.seconds_pending)
        except asyncio.CancelledError:
            with suppress(httpx.HTTPError):  # of a server that does not hear of it
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


@contextmanager
def _server_may_be_away(name: str) -> Iterator[None]:
    """Raise ServerUnavailable for what Prefect's client has tried for a minute or two."""
    try:
        yield
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        if status is not None and status < SERVER_ERRORS and status != TOO_MANY:
            raise
        raise ServerUnavailable(
            f"the Prefect server did not take or show flow run {name} ({error!r}): look after the "
            "server at PREFECT_API_URL; nothing is lost, and of work that is given out twice the "
            "first commit stays"
        ) from None


async def _ended(run_id: UUID, name: str, pending_s: float) -> FlowRun:
    """The flow run once it has ended. Raises WorkerLost where its worker is gone."""
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
            looks = waits[run.state.type]
            pending = run.state.type == StateType.PENDING
            late = pending and looks * POLL_S > pending_s
            if late or (looks % LOOKS == 1 and await _is_abandoned(client, run)):
                await _cancel(run_id)
                did = "never began it" if pending else "died as it began"
                raise WorkerLost(f"a worker took flow run {name} and {did}: given out again")
            await asyncio.sleep(POLL_S)


async def _is_abandoned(client: PrefectClient, run: FlowRun) -> bool:
    """True once the worker of a flow run is gone, and nothing else would tell that the run is.

    The server's automation marks silent runs as crashed from their first heartbeat on. One that has
    such a heartbeat may outlive its worker, and is left to it.
    """
    if run.state is None or run.state.type not in (StateType.PENDING, StateType.RUNNING):
        return False
    taken_by = run.labels.get("prefect.worker.name")
    if taken_by is None or run.work_pool_name is None:
        return False
    workers = await client.read_workers_for_work_pool(run.work_pool_name)
    # A worker that is started again under its name is another process, and online.
    if any(w.status != WorkerStatus.OFFLINE for w in workers if w.name == taken_by):
        return False
    if run.state.type == StateType.PENDING:
        return True
    heartbeats = EventFilter(
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
    )
    return not (await client.read_events(heartbeats, limit=1)).events


async def _cancel(run_id: UUID) -> None:
    async with get_client() as client:
        await client.set_flow_run_state(run_id, Cancelling())

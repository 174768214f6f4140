"""Stages on other machines: two workers of a pool, two nodes of a Ray cluster; one of each killed.

A node, and an endpoint, are killed and others added in the middle of a run, which ends in the slots
and parameters of an undisturbed local one.
"""

import asyncio
import importlib.util
import json
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import flow, get_client, task
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import Event
from prefect.events.clients import get_events_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Completed, Pending, Running
from pydantic import TypeAdapter
from support.faults import outcome
from support.flow_runs import DEBUG, debug
from support.machines import FLEET, Machines
from support.nodes import RayCluster, pool_worker, wait

from flows.rl_loop import start
from flows.server import free_port
from marin_rl.config import Config, FlowConfig, load_config, parse_config
from marin_rl.errors import ConfigError
from marin_rl.storage.provenance import code_digest
from marin_rl.storage.runs import Run, RunRef
from marin_rl.types import ServedPolicy, SlotRef
from tasks import fan_out
from tasks.fan_out import WorkPool, _is_abandoned, fanning_out, play_on_pool
from tasks.generate import generate
from tasks.options import STAGE, StageRunner, open_run

ROUNDS = 2

pytestmark = pytest.mark.timeout(3000)


@pytest.fixture(scope="module")
def alone(api: str, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run that nothing disturbed."""
    config = debug(tmp_path_factory.mktemp("alone"), f"rounds={ROUNDS}")
    start(config)
    return config


def pending_flow_runs(environment: Mapping[str, str]) -> int:
    """Number of flow runs that a worker has taken, and that have not begun."""
    pending = {"flow_runs": {"state": {"type": {"any_": ["PENDING"]}}}}
    url = f"{environment['PREFECT_API_URL']}/flow_runs/count"
    return httpx.post(url, json=pending).raise_for_status().json()


@pytest.mark.slow
@pytest.mark.bits
def test_two_workers_of_a_pool(alone: Config, tmp_path: Path, ended: ExitStack) -> None:
    machines = Machines(
        tmp_path,
        ended,
        f"rounds={ROUNDS}",
        "flow.runner=work_pool",
        "flow.shards_per_flow_run=1",
        "flow.retries=5",
    )
    machines.site.deploy()
    endpoints = [machines.serve("first"), machines.serve("second")]
    workers = [pool_worker(tmp_path, machines.environment, name) for name in ("one", "two")]
    for worker in workers:
        ended.callback(worker.end)
    flow = machines.play()
    wait(lambda: machines.shards(0) > 0, "the first shard", flow)
    # One that is lost between its taking and its beginning is given out again after minutes.
    wait(lambda: pending_flow_runs(machines.environment) == 0, "flow runs to begin", flow)
    endpoints[0].kill()
    workers[0].kill()
    ended.callback(pool_worker(tmp_path, machines.environment, "three").end)
    machines.serve("third")
    machines.finish(flow)
    assert outcome(alone).same_as(outcome(machines.config)) == []


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("prefect_ray") is None, reason="needs the extra: marin-rl[ray]"
)


@pytest.mark.slow
@pytest.mark.bits
@needs_ray
def test_two_nodes_of_a_ray_cluster(alone: Config, tmp_path: Path, ended: ExitStack) -> None:
    cluster = RayCluster(tmp_path, free_port())
    ended.callback(cluster.end)
    second = cluster.add("second")
    machines = Machines(
        tmp_path,
        ended,
        f"rounds={ROUNDS}",
        "flow.runner=ray",
        f"flow.ray_address={cluster.address}",
        "flow.retries=5",
    )
    endpoints = [machines.serve("first"), machines.serve("other")]
    flow = machines.play(cluster.environment)
    wait(lambda: machines.shards(0) > 0, "the first shard", flow)
    second.kill()
    endpoints[0].kill()
    cluster.add("third")
    machines.serve("third-endpoint")
    machines.finish(flow)
    assert outcome(alone).same_as(outcome(machines.config)) == []


@pytest.mark.parametrize(
    ("flow", "expected"),
    [
        ({"runner": "work_pool"}, "inference.endpoints is empty"),
        ({"runner": "ray"}, "ray_address is null"),
        ({"runner": "ray", "ray_address": "10.0.0.1:6379"}, "inference.endpoints is empty"),
        ({"ray_resources": {"train": {"num_cpus": 1}}}, "ray_resources"),
        ({"pending_timeout_s": 0}, "pending_timeout_s"),
        ({"runner": "dask"}, "runner"),
        ({"shards_in_flight_max": 0}, "shards_in_flight_max"),
        ({"shards_per_flow_run": 0}, "shards_per_flow_run"),
    ],
)
def test_runners_that_cannot_work_are_refused(flow: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_config({"flow": flow})


def test_a_temporary_prefect_server_is_no_place_to_meet(tmp_path: Path) -> None:
    config = debug(tmp_path, *FLEET, "flow.runner=work_pool")
    with (
        pytest.raises(ConfigError, match="temporary Prefect server"),
        fanning_out(config, shared_api=False),
    ):
        pass


def test_deployments_and_packages_that_are_missing_are_named(api: str, tmp_path: Path) -> None:
    pool = debug(tmp_path, *FLEET, "flow.runner=work_pool", "flow.deployment=nowhere")
    with pytest.raises(ConfigError, match="generate-shards/nowhere"):
        start(pool)
    assert not (tmp_path / "whole/run.json").exists(), "no run was begun"
    if importlib.util.find_spec("prefect_ray") is None:
        ray = debug(tmp_path, *FLEET, "flow.runner=ray", "flow.ray_address=127.0.0.1:9")
        with pytest.raises(ConfigError, match=r"marin-rl\[ray\]"):
            fanning_out(ray, shared_api=True).__enter__()


def test_a_worker_of_another_kind_refuses_by_digest(tmp_path: Path) -> None:
    ours, theirs = (Run.create_or_open(debug(tmp_path / name)) for name in ("ours", "theirs"))
    (given,) = WorkPool(ours.config.flow).for_nodes([ours.reference])
    assert open_run(given).config == ours.config
    sent = json.loads(json.dumps(asdict(given)))  # as a parameter of a flow run
    assert TypeAdapter(RunRef).validate_python(sent) == given
    with pytest.raises(ConfigError, match=f"other code.*000000000000, found {code_digest()[:12]}"):
        open_run(replace(given, code="0" * 64))
    with pytest.raises(ConfigError, match="another run of the name 'whole'"):
        open_run(replace(given, root=theirs.config.root))  # its machine calls another place so
    ref = SlotRef(slot="checkpoints/round-00000", sha256="f" * 64)
    policy = ServedPolicy(
        endpoints=("http://a/v1",),
        model="policy",
        weight_version=0,
        parameters_digest="1" * 64,
        tokenizer_digest="2" * 64,
        chat_template_digest="3" * 64,
        checkpoint=ref,
    )
    call = generate.fn(given, 0, 0, policy)
    with pytest.raises(ConfigError, match=r"another tokenizer.*expected digest 222222222222"):
        asyncio.run(call)


def test_shards_are_divided_among_flow_runs() -> None:
    flow = load_config(DEBUG, [*FLEET, "flow.runner=work_pool", "flow.shards_in_flight_max=3"]).flow
    calls = [("run", 0, shard, "policy") for shard in range(7)]
    assert [[c[2] for c in part] for part in WorkPool(flow).chunks(calls)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    single = WorkPool(flow.model_copy(update={"shards_per_flow_run": 5}))
    assert [len(part) for part in single.chunks(calls)] == [5, 2]


PENDING = {"pending_timeout_s": 1, "retries": 1, "retry_delay_s": 0, "deployment": "pending"}


@task(**STAGE)
async def given_out(flow: FlowConfig) -> None:
    """A stage that a worker of a pool plays."""
    await play_on_pool("never-begun", flow, "shards", {})


async def next_flow_run(client: PrefectClient, *earlier: FlowRun) -> FlowRun:
    """A flow run of the pool that no worker has taken, once there is one."""
    while True:
        found = await client.get_scheduled_flow_runs_for_work_pool("pending")
        for each in found:
            if each.flow_run.id not in {run.id for run in earlier}:
                return each.flow_run
        await asyncio.sleep(0.25)


async def worker_that_dies_once(taken: list[FlowRun], *states: State) -> None:
    """Bring a flow run into `states` and die, then play all others to their ends."""
    async with get_client() as client:
        await client.send_worker_heartbeat("pending", "mortal", heartbeat_interval_seconds=1)
        taken.append(await next_flow_run(client))
        await client.update_flow_run_labels(taken[0].id, {"prefect.worker.name": "mortal"})
        for state in states:
            await client.set_flow_run_state(taken[0].id, state)
        while True:  # more than one, where the server's answer to a flow run came too late
            taken.append(await next_flow_run(client, *taken))
            for state in (Running(), Completed()):
                await client.set_flow_run_state(taken[-1].id, state)


async def deploy_never_begun(client: PrefectClient) -> UUID:
    """The deployment whose flow runs no process plays."""
    await client.create_work_pool(WorkPoolCreate(name="pending", type="process"), overwrite=True)
    flow_id = await client.create_flow_from_name("never-begun")
    return await client.create_deployment(flow_id, "pending", work_pool_name="pending")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "pending_s"),
    [
        ((Pending(),), 1),
        # waits until the server has missed the worker
        ((Pending(), Running()), 600),
    ],
)
def test_a_flow_run_that_its_worker_abandons_is_given_out_again(standing_api, states, pending_s):
    """A worker dies before it begins a flow run, or before the run's first heartbeat."""
    settings = PENDING | {"pending_timeout_s": pending_s, "retries": 3}
    config = parse_config({"flow": settings}).flow
    taken = list[FlowRun]()

    @flow(persist_result=False)
    async def trainer() -> None:
        async with asyncio.TaskGroup() as both:
            worker = both.create_task(worker_that_dies_once(taken, *states))
            await StageRunner(config).run(given_out, config)
            worker.cancel()

    async def play() -> list[FlowRun]:
        async with get_client() as client:
            await deploy_never_begun(client)
            await trainer()
            return [await client.read_flow_run(run.id) for run in taken]

    first, *others = asyncio.run(play())
    assert {run.name for run in (first, *others)} == {"shards"}
    assert first.state_type in (StateType.CANCELLING, StateType.CANCELLED)
    assert StateType.COMPLETED in {run.state_type for run in others}


def answered(status: int) -> PrefectHTTPStatusError:
    """An error of Prefect's client for the status of an answer."""
    request = httpx.Request("POST", "http://127.0.0.1/api/task_runs/")
    response = httpx.Response(status, request=request)
    return PrefectHTTPStatusError(str(status), request=request, response=response)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answered(503), 2),
        pytest.param(answered(429), 2, marks=pytest.mark.slow),
        (answered(409), 1),
        pytest.param(httpx.ConnectTimeout("no answer"), 2, marks=pytest.mark.slow),
    ],
)
def test_work_is_given_out_again_once_the_server_answers(api, monkeypatch, error, expected):
    """Prefect's client has tried for long by then; the stage's retries go on."""
    give_out, tries = fan_out.arun_deployment, list[str]()

    async def away_once(name: str, **named: Any) -> FlowRun:
        tries.append(name)
        if len(tries) == 1:
            raise error
        return await give_out(name, **named)

    async def worker() -> None:
        async with get_client() as client:
            run = await next_flow_run(client)
            for state in (Running(), Completed()):
                await client.set_flow_run_state(run.id, state)

    config = parse_config({"flow": PENDING}).flow

    @flow(persist_result=False)
    async def trainer() -> None:
        plays = asyncio.ensure_future(worker())
        try:
            await StageRunner(config).run(given_out, config)
        finally:
            plays.cancel()

    async def play() -> None:
        async with get_client() as client:
            await deploy_never_begun(client)
        await trainer()

    monkeypatch.setattr(fan_out, "arun_deployment", away_once)
    with nullcontext() if expected == 2 else pytest.raises(type(error)):
        asyncio.run(play())
    assert tries == ["never-begun/pending"] * expected


def test_work_that_is_cancelled_ends_so_whether_or_not_the_server_hears_of_it(monkeypatch):
    """An error of the server in its place would be tried again."""
    config, waiting = parse_config({"flow": PENDING}).flow, asyncio.Event()

    async def given(*_: object, **__: object) -> FlowRun:
        return FlowRun(flow_id=UUID(int=1))

    async def never_ended(*_: object) -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def unheard(_: UUID) -> None:
        raise httpx.ConnectTimeout("no answer")

    for name, replaced in (
        ("arun_deployment", given), ("_ended", never_ended), ("_cancel", unheard),
    ):  # fmt: skip
        monkeypatch.setattr(fan_out, name, replaced)

    async def play() -> bool:
        stage = asyncio.create_task(play_on_pool("never-begun", config, "shards", {}))
        await waiting.wait()
        stage.cancel()
        await asyncio.wait([stage])
        return stage.cancelled()

    assert asyncio.run(play())


@pytest.mark.slow
def test_a_flow_run_with_a_heartbeat_may_outlive_its_worker(standing_api: str) -> None:
    async def becomes(client: PrefectClient, run: FlowRun, *, abandoned: bool) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(250):
                while await _is_abandoned(client, run) != abandoned:  # noqa: ASYNC110 - a server
                    await asyncio.sleep(0.2)
                return True
        return False

    async def play() -> tuple[bool, bool]:
        async with get_client() as client:
            run = await client.create_flow_run_from_deployment(await deploy_never_begun(client))
            await client.send_worker_heartbeat("pending", "short", heartbeat_interval_seconds=1)
            await client.update_flow_run_labels(run.id, {"prefect.worker.name": "short"})
            for state in (Pending(), Running()):
                await client.set_flow_run_state(run.id, state)
            run = await client.read_flow_run(run.id)
            silent = await becomes(client, run, abandoned=True)
            resource = {"prefect.resource.id": f"prefect.flow-run.{run.id}"}
            # `emit_event` would go to the server that this process first spoke to.
            async with get_events_client() as events:
                await events.emit(Event(event="prefect.flow-run.heartbeat", resource=resource))
            heard_of = await becomes(client, run, abandoned=False)
            await client.set_flow_run_state(run.id, Completed())
        return silent, heard_of

    silent, heard_of = asyncio.run(play())
    assert silent, "its worker is gone, and no heartbeat would tell that it is"
    assert heard_of, "the server's automation looks after it"

"""Runs that other machines sample for are suspended in the middle of sampling, and resumed.

Their flow is a deployment's, which a worker of the pool plays. The endpoint is paused while
requests wait there, so that groups are under way when the flow run is suspended; none is lost.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.flow_runs import suspend_flow_run
from prefect.settings import temporary_settings
from support.faults import outcome
from support.flow_runs import debug
from support.machines import Machines, Site
from support.nodes import RayCluster, pool_worker, ray_environment, wait
from support.streams import checked, stream_of

from flows.rl_loop import start
from flows.server import free_port
from marin_rl.errors import RunLocked
from marin_rl.inference.client.fleet import load_in
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.rollouts.streaming import is_finished
from marin_rl.storage.fleet import Heartbeat
from marin_rl.storage.tables.intakes import Settled
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.fsck import check_run

HAS_RAY = importlib.util.find_spec("prefect_ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs the extra: marin-rl[ray]")
ROUNDS, ADMIN_KEY = 3, "a-token-of-the-tests"
UNFINISHED = {"Scheduled", "Pending", "Running"}  # a part that was given out again is cancelled
ONE_BY_ONE = "inference.requests_in_flight_max=1"  # of a process: the other groups wait
WINDOW = (
    "policy.init=random",
    "rollouts.groups_per_round=16",
    "rollouts.shards_per_round=1",  # chunks of a whole round
    "asynchrony.max_staleness=2",
    "asynchrony.sampler=windowed",
)
AHEAD = (
    "asynchrony.max_staleness=1",
    "rollouts.groups_per_round=16",
    "rollouts.shards_per_round=4",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def module_ended() -> Iterator[ExitStack]:
    """As `ended`, once the tests of this module are over."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, module_ended: ExitStack) -> Site:
    """A Prefect server, the deployments, and two workers of their pool, who may use Ray."""
    site = Site(tmp_path_factory.mktemp("site"), module_ended)
    site.deploy()
    environment = site.environment | ray_environment(site.folder)
    for name in ("one", "two"):
        module_ended.callback(pool_worker(site.folder, environment, name).end)
    return site


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[SyncPrefectClient]:
    """A client of the site's server."""
    with SyncPrefectClient(site.url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of who may pause an endpoint; servers of these tests inherit it."""
    monkeypatch.setenv("MARIN_RL_ADMIN_KEY", ADMIN_KEY)


class Endpoint:
    """The one endpoint of a run, which its operator may pause."""

    def __init__(self, machines: Machines) -> None:
        self._run, self._server = machines.run, machines.serve("endpoint")
        self._root = ""

    def pause(self) -> None:
        """Let requests wait."""
        (beat,) = board_of(self._run.config.inference, self._run.folder).heartbeats()
        assert isinstance(beat, Heartbeat)
        self._root = beat.url.removesuffix("/v1")
        self._ask("pause")

    def resume(self) -> None:
        """Answer what waits."""
        self._ask("resume")

    def _ask(self, route: str) -> None:
        key = {"authorization": f"Bearer {ADMIN_KEY}"}
        httpx.post(f"{self._root}/admin/{route}", headers=key, timeout=600).raise_for_status()

    @property
    def busy(self) -> bool:
        """True while it samples, or requests wait."""
        load = load_in(httpx.get(f"{self._root}/metrics", timeout=600).content)
        assert load is not None
        return load.waiting + load.running > 0

    @property
    def requests(self) -> int:
        """Completions that it was asked for."""
        return self._server.requests


class Suspendable:
    """A run whose flow a worker of the pool plays."""

    def __init__(self, client: SyncPrefectClient, machines: Machines) -> None:
        self.client, self.machines, self.run = client, machines, machines.run
        deployment = client.read_deployment_by_name("rl-loop/demo")
        parameters = {"config": machines.config.model_dump(mode="json")}
        self.flow_run: UUID = client.create_flow_run_from_deployment(
            deployment.id, parameters=parameters
        ).id

    @property
    def state(self) -> str:
        """The name of the flow run's state."""
        state = self.client.read_flow_run(self.flow_run).state
        assert state is not None
        assert state.type not in ("FAILED", "CRASHED", "CANCELLED"), state.message
        return str(state.name)

    @property
    def parts(self) -> list[str]:
        """The names of the states of flow runs that this one gave out."""
        of_this = FlowRunFilterParentFlowRunId(any_=[self.flow_run])
        runs = self.client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=of_this))
        return [str(run.state_name) for run in runs]

    @property
    def free(self) -> bool:
        """True if no process works on the run."""
        try:
            with self.run.lock():
                return True
        except RunLocked:
            return False

    def unfinished(self) -> bool:
        """True while chunks that are claimed, or shards of round 0, are not whole."""
        if not self.run.config.windowed:
            return self.machines.shards(0) < self.run.config.rollouts.shards_per_round
        stream = stream_of(self.run)
        return any(not is_finished(stream, Settled(), chunk) for chunk in stream.claims)

    def paused_amid_sampling(self, endpoint: Endpoint) -> None:
        """Pause the endpoint while groups are under way; it may have to be tried again."""
        while True:
            wait(self._has_begun, f"sampling, in state {self.state}")
            endpoint.pause()
            if self.unfinished():
                wait(lambda: endpoint.busy or not self.unfinished(), "a request that waits")
            if endpoint.busy and self.unfinished():
                return
            endpoint.resume()

    def _has_begun(self) -> bool:
        assert self.state, "it did not fail"
        if not self.run.config.windowed:
            return self.machines.shards(0) > 0
        return bool(stream_of(self.run).claims) and self.unfinished()


def suspended_and_resumed(client: SyncPrefectClient, machines: Machines) -> None:
    """Play a run, suspended in the middle of its sampling, to its end."""
    endpoint, windowed = Endpoint(machines), machines.config.windowed
    played = Suspendable(client, machines)
    played.paused_amid_sampling(endpoint)
    with temporary_settings(updates={"api.url": machines.site.url}):
        suspend_flow_run(flow_run_id=played.flow_run, timeout=3000)
    if windowed:
        wait(lambda: not may_sample(machines), "the target to be closed")
    assert not played.free, "it waits for what is under way"
    endpoint.resume()
    wait(lambda: played.free, "the flow to end")
    assert played.state == "Suspended"
    assert not UNFINISHED & {*played.parts}, "what was under way has ended by itself"
    assert not endpoint.busy
    asked, groups = endpoint.requests, {*stream_of(machines.run).groups}
    print(f"{len(groups)} groups wait in the stream")
    assert all(item.balanced for item in audit_run(machines.run))
    faults = check_run(machines.config.root, machines.run.run_id).faults
    assert [fault for fault in faults if not fault.harmless] == []
    assert endpoint.requests == asked, "nothing samples"
    assert stream_of(machines.run).groups.keys() == groups, "see above"
    client.resume_flow_run(played.flow_run)
    wait(lambda: played.state == "Completed", "the end of the flow")
    assert not may_sample(machines)
    assert not UNFINISHED & {*played.parts}
    if machines.config.flow.runner == "work_pool":
        assert "Completed" in played.parts


def may_sample(machines: Machines) -> bool:
    """True while nodes are to sample by a policy."""
    target = board_of(machines.run.config.inference, machines.run.folder).sampling_target()
    return target is not None and target.open


@pytest.mark.parametrize("runner", ["work_pool", pytest.param("ray", marks=needs_ray)])
def test_a_window_is_suspended_and_goes_on(client, site, tmp_path, ended, runner):
    overrides = [f"rounds={ROUNDS}", f"flow.runner={runner}", ONE_BY_ONE, *WINDOW]
    if runner == "ray":
        cluster = RayCluster(site.folder, free_port())
        ended.callback(cluster.end)
        cluster.add("second")
        overrides.append(f"flow.ray_address={cluster.address}")
    machines = Machines(tmp_path, ended, *overrides, site=site)
    suspended_and_resumed(client, machines)
    checked(machines.config)


@pytest.mark.bits
def test_rounds_in_order_are_suspended_and_end_in_the_same_bits(api, client, site, tmp_path, ended):
    """Sampled ahead of training: what is trained ends, too, and no shard under way is lost."""
    alone = debug(tmp_path / "alone", f"rounds={ROUNDS}", *AHEAD)
    start(alone)
    pool = ("flow.runner=work_pool", "flow.shards_per_flow_run=1")
    machines = Machines(tmp_path, ended, f"rounds={ROUNDS}", ONE_BY_ONE, *pool, *AHEAD, site=site)
    suspended_and_resumed(client, machines)
    assert outcome(alone).same_as(outcome(machines.config)) == []

"""Begin and end of every flow: resolve the configuration, open and lock the run, watch it.

The run's lock keeps a second process on this machine away. Trackers and reports listen to progress
events; neither can stop the flow.
"""

import importlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prefect import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.runtime import flow_run

from flows.reports import quieten, reporting
from flows.server import current_connection, prefect_api
from marin_rl.commands.hosts import several
from marin_rl.config import Config, load_config, override, parse_config, pin_files
from marin_rl.doctor.stages import EVALUATE, OF_PAIRS
from marin_rl.errors import ConfigError
from marin_rl.integrations import integration
from marin_rl.machine import share_one_heap
from marin_rl.processes import joined
from marin_rl.progress import ProgressEvent, listening, publish
from marin_rl.rollouts.pinned import as_begun, record_rows
from marin_rl.runtime import release
from marin_rl.storage.run_progress import is_closed
from marin_rl.storage.runs import Run, RunRef, committed_checkpoint, latest_checkpoint
from marin_rl.trust import try_to_remember
from marin_rl.types import SlotRef
from tasks.fan_out import fanning_out

Source = str | dict[str, Any]

# What takes seconds to import, and every flow needs.
HEAVY = ("marin_rl.training.loop", "marin_rl.serving.server", "marin_rl.doctor.engines")


def flow_run_name() -> str:
    """The name of a flow run: that of the run it works on, or of the file that says which."""
    parameters = flow_run.parameters
    config = parameters["config"]
    return parameters.get("run_id") or (
        Path(config).stem if isinstance(config, str) else config["run_id"]
    )


def start_flow(flow: Flow[Any, Any], config: Config, **named: Any) -> Any:
    """Run a flow in this process; `flows.server` says with which Prefect API."""
    with prefect_api(warm=HEAVY) as connection:
        return connection.run(flow, config.model_dump(mode="json"), **named)


def resolve_config(
    config: Source,
    run_id: str | None = None,
    overrides: list[str] | None = None,
    rounds: int | None = None,
) -> Config:
    """The configuration that a flow's parameters stand for: a YAML file or the tree, overridden.

    Raises ConfigError naming every wrong key.
    """
    named = {"run_id": run_id, "rounds": rounds}
    changes = [
        *(overrides or []),
        *(f"{key}={json.dumps(value)}" for key, value in named.items() if value),
    ]
    if isinstance(config, str):
        return load_config(config, changes)
    return parse_config(pin_files(override(config, changes)))


@contextmanager
def open_session(config: Config, flow: str) -> Iterator[RunRef]:
    """The run of `config`, created or continued, checked, locked and watched while the block runs.

    The stages of `flow` pass before anything is written. Every flow but an evaluation makes the run
    its user's own, with these settings.
    A flow hands this one reference to all of its tasks: Prefect knows objects by their address, and
    would take a later one for whatever result lay there before.

    Raises what `check_all` finds, ConfigError when the run exists with another content or is one of
    several processes, RunLocked.
    """
    if flow != EVALUATE and joined() is None and several(config) is not None:
        raise ConfigError(
            "distributed names several processes, but this one is alone: expected `marin-rl run` "
            "on every host, or `marin-rl launch`; a flow of one process has no section distributed"
        )
    quieten()
    publish(ProgressEvent(run_id=config.run_id, stage="start", total=config.rounds))
    # Here, for Levanter's attention cannot be imported by two threads at once: a worker's flow run
    # that trains while it samples would do so, and fail. By hand `prefect_api` has done it already.
    share_one_heap()  # before they start threads
    for module in HEAVY:
        importlib.import_module(module)
    # Seconds of imports, in which a server of this process starts.
    from marin_rl.doctor.engines import check_all

    check_all(config, flow)
    with ExitStack() as stack:
        # Before the run is created: a runner that cannot work is no reason to begin one.
        connection = current_connection()
        temporary = connection is not None and connection.temporary
        stack.enter_context(fanning_out(config, shared_api=not temporary))
        run = Run.create_or_open(config, as_begun)
        stack.enter_context(run.lock())
        if flow != EVALUATE and flow not in OF_PAIRS:
            record_rows(run)
        if flow != EVALUATE:
            try_to_remember(run)
        named = config.trackers
        if named.tensorboard or named.wandb_project or named.trackio_project:
            trackers = integration("trackers").open_trackers(config)
            stack.callback(trackers.close)
            stack.enter_context(listening(trackers.listen))
        stack.enter_context(reporting(run))
        stack.callback(release, run)
        yield run.reference


async def pause_if_suspended() -> None:
    """Raise Prefect's Pause where a deployment's flow run was suspended meanwhile.

    Prefect tells a running flow by an event, which a busy server may drop. One that heard it ends
    even if it was resumed since: another process goes on, and tasks of this one begin no more.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return  # only a worker could start it again
    context.flow_run_suspension_request.raise_if_requested()
    with suppress(httpx.HTTPError, PrefectHTTPStatusError):  # of a server that is away for a moment
        async with get_client() as client:
            state = (await client.read_flow_run(context.flow_run.id)).state
        if state is not None and state.is_paused():
            raise Pause(state=state)


def resume_point(run: Run) -> SlotRef | None:
    """The checkpoint to go on from, None in a new run.

    It is the latest, but for rounds that ended without their metrics, of which there are several:
    they are played again, which finds everything else committed.
    """
    latest = latest_checkpoint(run)
    if latest is None:
        return None
    round = last = latest.number
    ahead = max(run.config.max_staleness, 1)
    while round and last - round <= ahead and not is_closed(run, round - 1):
        round -= 1
    return committed_checkpoint(run, round) or latest

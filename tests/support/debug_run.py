"""configs/debug.yaml with a warm start, as the tests of whole runs play it."""

from dataclasses import dataclass, field
from pathlib import Path

from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort

from marin_rl.config import Config, load_config
from marin_rl.progress import ProgressEvent
from marin_rl.types import SlotRef

REPOSITORY = Path(__file__).parents[2]
DEBUG = REPOSITORY / "configs" / "debug.yaml"
ROUNDS, SHARDS = 3, 2


def debug(root: Path, *overrides: str) -> Config:
    """The configuration below `root`, always under one name: samples depend on it."""
    return load_config(DEBUG, [f"root={root}", "run_id=whole", "policy.init=sft", *overrides])


def latest_flow_run(name: str) -> FlowRun:
    """The flow run of this name that was started last."""
    with get_client(sync_client=True) as client:
        newest_first = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC)
    return next(run for run in newest_first if run.name == name)


@dataclass(slots=True)
class Played:
    """A run that was played once by a flow run, and what was heard of it."""

    flow_run: FlowRun
    config: Config
    checkpoint: SlotRef
    events: list[ProgressEvent] = field(default_factory=list)

"""The flow "sft": a run's supervised warm start, in segments that each end in a checkpoint.

    given or random weights ──► fine_tune ──► sft/step-00250 ──► fine_tune ──► sft/step-00500

`rl-loop` plays the same segments first where `policy.init` is "sft", and starts from the last one.
"""

from prefect import flow

from flows.session import Source, flow_run_name, open_session, resolve_config, start_flow
from marin_rl.config import Config
from marin_rl.doctor.stages import SFT
from marin_rl.storage.runs import RunRef, latest_sft
from marin_rl.types import SlotRef
from tasks.options import StageRunner, open_run
from tasks.train import fine_tune


@flow(name="sft", flow_run_name=flow_run_name, persist_result=False)
async def sft(
    config: Source, run_id: str | None = None, overrides: list[str] | None = None
) -> SlotRef:
    """Warm-start the run that `config` describes, or go on where its last segment ended."""
    with open_session(resolve_config(config, run_id, overrides), SFT) as run:
        return await warm_start(run)


async def warm_start(run: RunRef) -> SlotRef:
    """The checkpoint after `sft.steps` optimizer steps, from the last one that is committed."""
    config, reached = open_run(run).config, latest_sft(open_run(run))
    stages = StageRunner(config.flow)
    while reached is None or reached.number < config.sft.steps:
        reached = await stages.run(fine_tune, run, reached.number if reached else 0)
    return reached


def start(config: Config) -> SlotRef:
    return start_flow(sft, config)

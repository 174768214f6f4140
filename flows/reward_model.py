"""The flow "reward-model": a reward model from preference pairs, in segments that are committed.

    pairs ──► prepare ──► pairs/ ──► fit ──► reward_model/step-00100 ──► fit ──► …/step-00200

Where `policy.init` is "sft", the warm start is played first, and its result is the trunk.
"""

from prefect import flow

from flows.session import Source, flow_run_name, open_session, resolve_config, start_flow
from flows.sft import warm_start
from marin_rl.config import Config
from marin_rl.doctor.stages import REWARD_MODEL
from marin_rl.storage.runs import LATEST_OF_PAIRS, RunRef
from marin_rl.types import PairSection, SlotRef
from tasks.options import StageRunner, open_run
from tasks.train import fit, prepare


@flow(name="reward-model", flow_run_name=flow_run_name, persist_result=False)
async def reward_model(
    config: Source, run_id: str | None = None, overrides: list[str] | None = None
) -> SlotRef:
    """Train the reward model that `config` describes, or go on where its last segment ended."""
    with open_session(resolve_config(config, run_id, overrides), REWARD_MODEL) as run:
        return await learn(run, "reward_model")


async def learn(run: RunRef, section: PairSection) -> SlotRef:
    """The checkpoint after all steps of a section, from the last one that is committed."""
    config = open_run(run).config
    steps = config.pair_training(section).steps
    if config.policy.init == "sft":
        await warm_start(run)
    stages = StageRunner(config.flow)
    pairs = await stages.run(prepare, run, section)
    reached = LATEST_OF_PAIRS[section](open_run(run))
    while reached is None or reached.number < steps:
        reached = await stages.run(fit, run, section, reached.number if reached else 0, pairs)
    return reached


def start(config: Config) -> SlotRef:
    return start_flow(reward_model, config)

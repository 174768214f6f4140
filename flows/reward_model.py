"""The flow "reward-model": a reward model from preference pairs, in segments that are committed.

    pairs ──► prepare ──► pairs/ ──► fit ──► reward_model/step-00100 ──► fit ──► …/step-00200

Where `policy.init` is "sft", the warm start is played first, and its result is the trunk.
"""

from prefect import flow

from flows.session import Source, flow_run_name, open_session, resolve_config, start_flow
from flows.sft import steps_of, warm_start
from marin_rl.config import Config
from marin_rl.doctor.stages import REWARD_MODEL
from marin_rl.storage.runs import RunRef, latest_reward_model
from marin_rl.types import SlotRef
from tasks.options import StageRunner, open_run
from tasks.train import fit, prepare


@flow(name="reward-model", flow_run_name=flow_run_name, persist_result=False)
async def reward_model(
    config: Source, run_id: str | None = None, overrides: list[str] | None = None
) -> SlotRef:
    """Train the reward model that `config` describes, or go on where its last segment ended."""
    with open_session(resolve_config(config, run_id, overrides), REWARD_MODEL) as run:
        return await learn(run)


async def learn(run: RunRef) -> SlotRef:
    """The checkpoint after `reward_model.steps` steps, from the last one that is committed."""
    config = open_run(run).config
    assert config.reward_model is not None, "checked before the run was opened"
    if config.policy.init == "sft":
        await warm_start(run)
    stages = StageRunner(config.flow)
    pairs = await stages.run(prepare, run)
    reached = latest_reward_model(open_run(run))
    while reached is None or steps_of(reached) < config.reward_model.steps:
        reached = await stages.run(fit, run, steps_of(reached), pairs)
    return reached


def start(config: Config) -> SlotRef:
    return start_flow(reward_model, config)

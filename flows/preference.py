"""The flow "preference": a policy that learns from preference pairs, in segments of steps.

    pairs ──► prepare ──► pairs/ ──► fit ──► preference/step-00100 ──► fit ──► …/step-00200

`prepare` scores the pairs by the policy as it begins, which is the reference. Other runs start from
the result (`policy.init` "checkpoint").
"""

from prefect import flow

from flows.reward_model import learn
from flows.session import Source, flow_run_name, open_session, resolve_config, start_flow
from marin_rl.config import Config
from marin_rl.doctor.stages import PREFERENCE
from marin_rl.types import SlotRef


@flow(name="preference", flow_run_name=flow_run_name, persist_result=False)
async def preference(
    config: Source, run_id: str | None = None, overrides: list[str] | None = None
) -> SlotRef:
    """Train the policy that `config` describes on its pairs, or go on where it ended."""
    with open_session(resolve_config(config, run_id, overrides), PREFERENCE) as run:
        return await learn(run, "preference")


def start(config: Config) -> SlotRef:
    return start_flow(preference, config)

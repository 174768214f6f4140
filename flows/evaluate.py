"""The flow "evaluate": evaluate one committed checkpoint on the environment's evaluation examples.

    checkpoint r ──► serve ──► evaluate ──► evals/round-r

`rl-loop` does the same for the checkpoint it ends with.
"""

from prefect import flow

from flows.session import Source, flow_run_name, open_session, resolve_config, start_flow
from marin_rl.config import Config
from marin_rl.doctor.stages import EVALUATE
from marin_rl.errors import ConfigError
from marin_rl.storage.runs import Run, RunRef, checkpoint_at, committed, evals_slot
from marin_rl.types import SlotRef
from tasks.generate import evaluate
from tasks.options import StageRunner, open_run
from tasks.train import serve


@flow(name="evaluate", flow_run_name=flow_run_name, persist_result=False)
async def evaluate_run(
    config: Source,
    run_id: str | None = None,
    overrides: list[str] | None = None,
    round: int | None = None,
) -> SlotRef:
    """Evaluate checkpoint `round` of a run, or its latest.

    Raises ObjectMissing without either, ConfigError for one that a fork shares.
    """
    chosen = resolve_config(config, run_id, overrides)
    check_own(chosen, round)
    with open_session(chosen, EVALUATE) as reference:
        return await measure(reference, checkpoint_at(open_run(reference), round))


def check_own(config: Config, round: int | None) -> None:
    """Raise ConfigError for a checkpoint that a fork shares, unless its evaluation is committed.

    The evaluation would belong to the ancestor, and nothing is written to an ancestor through a
    fork. Raises ObjectMissing for an unknown run, rather than creating it.
    """
    run = Run.open(config.root, config.run_id, config.storage_options)
    if round is None or (owner := run.player_of(round)) == run.run_id:
        return
    if committed(run, evals_slot(round)) is None:
        raise ConfigError(
            f"checkpoint {round} of {run.run_id!r} is that of {owner!r}, which it was forked from: "
            f"evaluate it there, and the fork has it too: marin-rl evaluate {owner} --round {round}"
        )


async def measure(run: RunRef, checkpoint: SlotRef) -> SlotRef:
    """Serve and evaluate a checkpoint, unless its evaluation is committed."""
    round = checkpoint.number
    if (evaluation := committed(open_run(run), evals_slot(round))) is not None:
        return evaluation
    stages = StageRunner(open_run(run).config.flow)
    policy = await stages.run(serve, run, round, checkpoint)
    return await stages.run(evaluate, run, round, policy)


def start(config: Config, round: int | None = None) -> SlotRef:
    check_own(config, round)  # before a server is started
    return start_flow(evaluate_run, config, round=round)

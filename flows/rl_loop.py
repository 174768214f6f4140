"""The flow "rl-loop": rounds of generate, process and train over one policy.

    checkpoint r ─► serve ─► generate, task by shard ─► seal ─► process ─► train ─► checkpoint r+1
                   └───────────── sample ─────────────────┘   └────── learn ──────┘

A round is a task that calls the tasks of its stages, not a subflow. Both are one node of the graph
that opens to its stages, but a subflow waits for eight answers of the server: 0.1 to 0.2 s, and 2 s
more whenever SQLite is busy. Tasks report in the background: 0.03 to 0.06 s a round, and a slow
server never delays training.
"""

from concurrent.futures import Future

from prefect import flow

from flows import session
from flows.evaluate import measure
from flows.play import InOrder, play_in_turn
from flows.sft import warm_start
from flows.window import Window
from marin_rl.config import Config
from marin_rl.doctor.stages import RL
from marin_rl.storage.runs import RunRef
from marin_rl.types import SlotRef
from tasks.options import StageRunner, open_run
from tasks.train import begin


@flow(name="rl-loop", flow_run_name=session.flow_run_name, persist_result=False)
async def rl_loop(
    config: session.Source,
    run_id: str | None = None,
    overrides: list[str] | None = None,
    rounds: int | None = None,
) -> SlotRef:
    """Start the run that `config` describes, or go on where its committed files say it stopped.

    `config` is a YAML file or the tree itself; returns the checkpoint after the last round.
    """
    with session.open_session(session.resolve_config(config, run_id, overrides, rounds), RL) as run:
        checkpoint = session.resume_point(open_run(run)) or await first_checkpoint(run)
        checkpoint = await play_rounds(run, checkpoint)
        await measure(run, checkpoint)
    return checkpoint


async def play_rounds(run: RunRef, checkpoint: SlotRef) -> SlotRef:
    """Play the rounds after `checkpoint` as `asynchrony` says; return the last checkpoint."""
    config = open_run(run).config
    if config.windowed:
        return await Window(run, checkpoint).play()
    if config.max_staleness:
        return await InOrder(run, checkpoint).play()
    return await play_in_turn(run, checkpoint)


async def first_checkpoint(run: RunRef) -> SlotRef:
    """Checkpoint 0: weights of a folder, random ones, or those of a warm start that runs first."""
    config = open_run(run).config
    warm = await warm_start(run) if config.policy.init == "sft" else None
    return await StageRunner(config.flow).run(begin, run, warm)


def start(config: Config, stop: Future[None] | None = None) -> SlotRef:
    """Run the flow in this process; `flows.server` says with which Prefect API.

    Setting a result of `stop` ends it as Ctrl-C does, with KeyboardInterrupt.
    """
    return session.start_flow(rl_loop, config, stop=stop)

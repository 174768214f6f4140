"""The flow "rl-loop": rounds of generate, process and train over one policy.

    checkpoint r ─► serve ─► generate, task by shard ─► seal ─► process ─► train ─► checkpoint r+1
                   └───────────── sample ─────────────────┘   └────── learn ──────┘

A round is a task that calls the tasks of its stages, not a subflow. Both are one node of the graph
that opens to its stages, but a subflow waits for eight answers of the server: 0.1 to 0.2 s, and 2 s
more whenever SQLite is busy. Tasks report in the background: 0.03 to 0.06 s a round, and a slow
server never delays training.
"""

from concurrent.futures import Future

from prefect import flow, task

from flows.connection import play_flow
from flows.evaluate import measure, round_after
from flows.server import prefect_api
from flows.session import (
    HEAVY,
    Source,
    flow_run_name,
    open_session,
    pause_if_suspended,
    resolve_config,
    resume_point,
)
from flows.sft import warm_start
from marin_rl.config import Config
from marin_rl.rounds import transfer_metrics
from marin_rl.storage.runs import RunRef
from marin_rl.types import ServedPolicy, SlotRef
from tasks.generate import evaluate, generate, seal
from tasks.options import GROUP, StageRunner, open_run
from tasks.process import process, publish
from tasks.train import begin, serve, train


@flow(name="rl-loop", flow_run_name=flow_run_name, persist_result=False)
async def rl_loop(
    config: Source,
    run_id: str | None = None,
    overrides: list[str] | None = None,
    rounds: int | None = None,
) -> SlotRef:
    """Start the run that `config` describes, or go on where its committed files say it stopped.

    `config` is a YAML file or the tree itself; returns the checkpoint after the last round.
    """
    with open_session(resolve_config(config, run_id, overrides, rounds)) as run:
        checkpoint = resume_point(open_run(run)) or await first_checkpoint(run)
        for round in range(round_after(checkpoint), open_run(run).config.rounds):
            await pause_if_suspended()
            checkpoint = await run_round(run, round, checkpoint)
        await measure(run, checkpoint)
    return checkpoint


async def first_checkpoint(run: RunRef) -> SlotRef:
    """Checkpoint 0: weights of a folder, random ones, or those of a warm start that runs first."""
    config = open_run(run).config
    warm = await warm_start(run) if config.policy.init == "sft" else None
    return await StageRunner(config.flow).run(begin, run, warm)


@task(name="round", task_run_name="round-{round:05d}", **GROUP)
async def run_round(run: RunRef, round: int, checkpoint: SlotRef) -> SlotRef:
    """Run a round: sample with checkpoint `round`, learn, and return checkpoint `round + 1`."""
    stages = StageRunner(open_run(run).config.flow)
    policy, rollouts = await sample(stages, run, round, checkpoint)
    return await learn(stages, run, round, checkpoint, policy, rollouts)


async def sample(
    stages: StageRunner, run: RunRef, round: int, checkpoint: SlotRef
) -> tuple[ServedPolicy, SlotRef]:
    """Serve a checkpoint and seal the round's rollouts: needs no trainer."""
    config = open_run(run).config
    policy = await stages.run(serve, run, round, checkpoint)
    if round % config.evaluation.every_rounds == 0:
        await stages.run(evaluate, run, round, policy)
    shards = range(config.rollouts.shards_per_round)
    parts = await stages.each(generate, [(run, round, shard, policy) for shard in shards])
    return policy, await stages.run(seal, run, round, parts, policy)


async def learn(
    stages: StageRunner,
    run: RunRef,
    round: int,
    checkpoint: SlotRef,
    policy: ServedPolicy,
    rollouts: SlotRef,
) -> SlotRef:
    """Train on sealed rollouts, and publish the round: needs no endpoint."""
    batches = await stages.run(process, run, round, rollouts)
    trained = await stages.run(train, run, round, batches, checkpoint)
    updates = int(batches.summary["steps"]) * open_run(run).config.training.epochs
    measured = {**stages.seconds, **transfer_metrics(policy.transfer, updates)}
    await stages.run(publish, run, round, trained, measured)
    return trained


def start(config: Config, stop: Future[None] | None = None) -> SlotRef:
    """Run the flow in this process; `flows.server` says with which Prefect API.

    Setting a result of `stop` ends it as Ctrl-C does, with KeyboardInterrupt.
    """
    with prefect_api(warm=HEAVY):
        return play_flow(rl_loop, config.model_dump(mode="json"), stop=stop)

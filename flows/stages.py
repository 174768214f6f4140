"""Flows that workers of a Prefect work pool play for another machine's rl-loop: a stage each.

    rl-loop ─► generate-shards (some shards of a round) · sample-chunk (groups of a stream)
            ─► evaluate-checkpoint

Each is a flow run of its own, with the tasks of its stage inside, retried and shown as all tasks
are. What it did is which slots are committed; it returns nothing.
"""

from typing import Any

from prefect import flow
from pydantic import TypeAdapter

from flows.reports import quieten
from marin_rl.rollouts.trajectories import Interruption
from marin_rl.storage.runs import RunRef
from marin_rl.types import ServedPolicy
from tasks.fan_out import EVALUATE, GENERATE_SHARDS, SAMPLE_CHUNK
from tasks.generate import evaluate, generate, sample
from tasks.options import StageRunner, open_run

_RUN, _POLICY = TypeAdapter(RunRef), TypeAdapter(ServedPolicy)
Parameters = dict[str, Any]


def _given(run: Parameters, policy: Parameters) -> tuple[RunRef, ServedPolicy, StageRunner]:
    """Configuration that a trainer gave out with a stage, and a runner of its stages."""
    quieten()
    reference = _RUN.validate_python(run)
    return reference, _POLICY.validate_python(policy), StageRunner(open_run(reference).config.flow)


@flow(name=GENERATE_SHARDS, persist_result=False)
async def generate_shards(
    run: Parameters, round: int, shards: list[int], policy: Parameters
) -> None:
    """Commit some shards of a round, as the trainer that gave them out asks."""
    reference, served, stages = _given(run, policy)
    await stages.each(generate, [(reference, round, shard, served) for shard in shards])


@flow(name=SAMPLE_CHUNK, persist_result=False)
async def sample_a_chunk(
    run: Parameters, chunk: int, policy: Parameters, worker: str, floor: int
) -> None:
    """Commit the groups of a chunk of the stream that are not finished."""
    reference, served, stages = _given(run, policy)
    await stages.run(sample, reference, chunk, served, worker, floor, Interruption())


@flow(name=EVALUATE, persist_result=False)
async def evaluate_checkpoint(run: Parameters, round: int, policy: Parameters) -> None:
    """Commit the evaluation of checkpoint `round`."""
    reference, served, stages = _given(run, policy)
    await stages.run(evaluate, reference, round, served)

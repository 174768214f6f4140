"""PPO with a critic learns which letter is paid for, from groups of one; its rewards climb."""

import asyncio
from pathlib import Path

import pytest

from marin_rl.batching.build import build_round
from marin_rl.config import load_config
from marin_rl.rollouts.generate import generate_shard
from marin_rl.runtime import RunRuntime
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import seal_round

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
ROUNDS = 20
# A warm start that shows what answers look like, with eight letters; one of them is paid for.
SETTINGS = (
    "recipe=recipes/ppo.yaml", "policy.init=sft", "sft.steps=60", "sft.sequences_per_step=32",
    "sft.microbatch_sequences=32", "sft.steps_per_checkpoint=60", "sft.learning_rate=3e-3",
    "sft.environment={name: echo, options: {alphabet: abcdefgh, letters_max: 1}}",
    "environment.options={alphabet: a, letters_max: 1}", "sampling.max_tokens=4",
    "rollouts.group_size=1", "rollouts.groups_per_round=64", "rollouts.shards_per_round=1",
    "inference.engine.slots=64", "inference.engine.chunk_steps=4",
    "inference.engine.prefill_rows=64", "training.microbatch_sequences=64",
    "batching.length_buckets=[32,64]", "training.learning_rate=3e-3",
    "training.critic.learning_rate=3e-3", "objective.kl_coefficient=0",
)  # fmt: skip


def play(run: Run) -> list[dict[str, float]]:
    """The metrics of every round, of rollouts and of training."""
    runtime, told = RunRuntime(run), []
    try:
        runtime.run_sft_segment(0)
        checkpoint = runtime.init_policy()
        for round in range(ROUNDS):
            policy = runtime.serve(checkpoint)
            part = asyncio.run(generate_shard(run, round, 0, policy))
            batches = build_round(run, round, seal_round(run, round, [part], (checkpoint,)))
            checkpoint = runtime.train_round(round, batches, checkpoint)
            told.append({**batches.summary, **checkpoint.summary})
    finally:
        runtime.close()
    return told


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    told = play(Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *SETTINGS])))
    rewards = [each["reward"] for each in told]
    explained = [each["critic/explained_variance"] for each in told]
    assert all(each["rollouts/consumed"] == 64 for each in told)
    assert sum(rewards[:4]) / 4 < 0.5, rewards
    assert sum(rewards[-4:]) / 4 > 0.8, rewards
    assert max(sum(explained[i : i + 5]) / 5 for i in range(ROUNDS - 5)) > 0.1, explained

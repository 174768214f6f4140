"""Tiny policies and batches made by hand, without any rollouts behind them."""

from typing import Any

import jax
import numpy as np
import pyarrow as pa

from marin_rl.config import ModelConfig, PolicyConfig
from marin_rl.storage.commits import new_attempt
from marin_rl.storage.runs import Run, batches_slot
from marin_rl.storage.tables.batches import BatchWriter, StepRows, commit_batches
from marin_rl.types import SlotRef, TrainingBatch

LENGTH = 16
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_compiled: list[str] = []


def _note(event: str, _seconds: float, **_: Any) -> None:
    if event == COMPILE_EVENT:
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


def compilations() -> int:
    """Number of programs this process has compiled so far."""
    return len(_compiled)


VOCAB = 103


def tiny_policy(**model: Any) -> PolicyConfig:
    """Two layers of width 16."""
    sizes = {
        "hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 24,
        "initializer_range": 0.3,
    }  # fmt: skip
    return PolicyConfig(model=ModelConfig(**(sizes | model)), context_length=64)


def random_batch(rows: int, length: int = LENGTH, seed: int = 0) -> TrainingBatch:
    """Prompts and completions of random lengths, one sequence per row, right-padded."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(length // 2, length + 1, rows)[:, None]
    starts = rng.integers(2, length // 2, rows)[:, None]
    position = np.broadcast_to(np.arange(length), (rows, length))
    inside = position < ends
    mask = inside & (position >= starts)
    advantages = rng.standard_normal((rows, 1))
    return TrainingBatch(
        token_ids=np.where(inside, rng.integers(7, VOCAB, (rows, length)), 0).astype(np.int32),
        loss_mask=mask.astype(np.int32),
        segment_ids=inside.astype(np.int32),
        positions=np.where(inside, position, 0).astype(np.int32),
        policy_logprobs=np.where(mask, rng.normal(-4.6, 0.3, (rows, length)), 0).astype(np.float32),
        advantages=np.where(mask, advantages, 0).astype(np.float32),
        returns=np.zeros((rows, length), np.float32),
    )


def commit_round(run: Run, round: int, steps: list[TrainingBatch], length: int) -> SlotRef:
    """Commit hand-made batches as those of a round."""
    attempt = new_attempt()
    writer = BatchWriter(run.store, batches_slot(round), attempt, length)
    for batch in steps:
        names = [[f"{round}-{row}"] for row in range(len(batch.token_ids))]
        arrays = {
            name: getattr(batch, name)
            for name in (
                "token_ids", "loss_mask", "segment_ids", "positions", "policy_logprobs",
                "advantages", "returns",
            )
        }  # fmt: skip
        writer.write(
            StepRows(
                arrays=arrays,
                rollout_ids=pa.array(names),
                environments=pa.array([["echo"]] * len(names)),
            )
        )
    return commit_batches(
        run,
        round,
        attempt=attempt,
        fingerprint="0" * 64,
        parents=[],
        parts=writer.close(),
        totals={"length": float(length), "steps": float(len(steps))},
        extra={},
    )

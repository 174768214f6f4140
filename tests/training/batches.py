"""Tiny policies, batches made by hand, and six training steps on one: the curves in golden/.

The curves are the same on every machine to float32 rounding: weights and batch are NumPy's by seed,
and AdamW's epsilon is so large that a gradient near zero does not decide a step's direction.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from training.steps import make_step

from marin_rl.config import ModelConfig, ObjectiveConfig, PolicyConfig, TrainingConfig
from marin_rl.storage.commits import commit_slot, new_attempt
from marin_rl.storage.runs import Run, batches_slot
from marin_rl.storage.tables.batches import BatchWriter, StepRows
from marin_rl.training.model import build_model, matrix_mask, named_parameters
from marin_rl.training.optimizer import learning_rate_schedule, make_optimizer, policy_adamw
from marin_rl.training.state import fresh_state
from marin_rl.training.step_types import Reference, StepSettings, step_arrays
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
    return commit_slot(
        run.store,
        batches_slot(round),
        attempt=attempt,
        fingerprint="0" * 64,
        parents=[],
        parts=writer.close(),
        totals={"length": float(length), "steps": float(len(steps))},
        extra={},
    )


FILE = Path(__file__).parents[1] / "golden/loss-curves.json"
STEPS = 6
KEPT = ("loss", "grad_norm", "entropy", "kl")
TRAINING = TrainingConfig(learning_rate=3e-2, warmup_steps=2, epsilon=1e-3, weight_decay=0.1)

Curves = dict[str, dict[str, list[float]]]

OBJECTIVES = {
    "supervised": (None, {}),
    "grpo": (
        ObjectiveConfig(
            advantage="grpo",
            ratio_level="token",
            aggregation="sequence_mean_token_mean",
            kl_coefficient=0.04,
            entropy_coefficient=0.01,
        ),
        {},
    ),
    "cispo with corrections, qwen3": (
        ObjectiveConfig(
            surrogate="cispo",
            ratio_level="token",
            aggregation="token_mean",
            importance_correction="truncated",
            kl_coefficient=0.1,
            kl_estimator="k3_k2_gradient",
        ),
        {"family": "qwen3", "head_size": 12, "tie_embeddings": False, "layers": 2},
    ),
}


def played(name: str) -> dict[str, list[float]]:
    """One curve: the metrics of `KEPT` that a step has, step by step."""
    objective, sizes = OBJECTIVES[name]
    return _curve(objective, {"layers": 1, **sizes})


def stored() -> Curves:
    """The curves of golden/loss-curves.json."""
    return json.loads(FILE.read_text())["curves"]


def _curve(objective: ObjectiveConfig | None, sizes: dict) -> dict[str, list[float]]:
    model = build_model(tiny_policy(**sizes), VOCAB, 0)
    adamw = policy_adamw(TRAINING)
    optimizer = make_optimizer(adamw, matrix_mask(model))
    step = make_step(
        model, optimizer, learning_rate_schedule(adamw), StepSettings(objective=objective)
    )
    state = fresh_state(named_parameters(model), optimizer, 0)
    reference = None
    if objective is not None:
        far = named_parameters(build_model(tiny_policy(**sizes), VOCAB, 1))
        reference = Reference(far, np.float32(objective.kl_coefficient))
    arrays, used = step_arrays(random_batch(7, seed=0), 4, 2)
    curve: dict[str, list[float]] = {}
    for _ in range(STEPS):
        state, metrics, _ = step(state, reference, arrays, used)
        for name in KEPT:
            if name in metrics:
                curve.setdefault(name, []).append(float(metrics[name]))
    return curve

"""Metrics of six steps of tiny models on a fixed batch: the curves that golden/ keeps.

The same numbers come out of any machine to float32 rounding: weights and batch are NumPy's by seed,
and AdamW's epsilon is large enough that no gradient of nearly nothing decides a step's direction.
"""

import json
from pathlib import Path

import numpy as np
from support.steps import make_step
from support.tiny_batches import VOCAB, random_batch, tiny_policy

from marin_rl.config import ObjectiveConfig, TrainingConfig
from marin_rl.training.model import build_model, matrix_mask, named_parameters
from marin_rl.training.optimizer import learning_rate_schedule, make_optimizer, policy_adamw
from marin_rl.training.state import fresh_state
from marin_rl.training.step import step_arrays
from marin_rl.training.step_types import Reference, StepSettings

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

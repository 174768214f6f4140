"""Training: the policy's optimizer, its critic, a warm start, a reward model.

Leaves out the objective (objective.py).
"""

from typing import Literal

from pydantic import Field, model_validator

from marin_rl.config.sampling import EnvironmentConfig
from marin_rl.config.section import PLAN, Count, Section, optional_field


class CriticConfig(Section):
    """Critic: a value function as PPO has it; needs objective.advantage gae."""

    trunk: Literal["own", "shared"] = Field(
        default="own",
        description="own: a second model that begins as a copy of the policy; shared: a head "
        "on the policy's model",
    )
    learning_rate: float = Field(
        default=3e-4, gt=0, le=1, description="peak AdamW step size of its own parameters"
    )
    value_coefficient: float = Field(
        default=0.1, gt=0, le=100, description="weight of the value loss relative to the policy's"
    )
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        le=1e6,
        description="largest change of a value from the one before the round; null: not clipped",
    )
    warmup_rounds: int = Field(
        default=0, ge=0, description="number of first rounds that train the critic only"
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount from token to token")
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="lambda of GAE: 1, returns minus values; 0, one-step temporal differences",
    )


class TrainingConfig(Section):
    """The optimizer and its schedule."""

    learning_rate: float = Field(default=3e-4, gt=0, le=1, description="peak AdamW step size")
    warmup_steps: int = Field(default=5, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="decay after warm-up"
    )
    schedule_steps: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps until the decay ends; needed unless constant",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment")
    epsilon: float = Field(default=1e-8, gt=0, lt=1, description="AdamW epsilon")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="decoupled; matrices only")
    gradient_clip_norm: float = Field(default=1.0, gt=0, description="global norm of the gradient")
    epochs: Count = Field(default=1, le=100, description="passes over a round's batches")
    microbatch_sequences: Count = Field(
        default=16, description="rows per forward and backward pass"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations, save memory"
    )
    nonfinite_updates_max: Count = Field(
        default=3,
        description="consecutive updates that were not finite, after which the run ends",
        json_schema_extra=PLAN,
    )
    critic: CriticConfig | None = optional_field(description="a value function; null: none")

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> "TrainingConfig":
        if self.schedule != "constant" and self.schedule_steps is None:
            raise ValueError(f"schedule '{self.schedule}' needs schedule_steps")
        return self


class SFTConfig(Section):
    """Supervised warm start on (prompt, answer) pairs of an environment."""

    environment: EnvironmentConfig | None = Field(
        default=None, description="null: the run's environment"
    )
    steps: Count = Field(default=500, description="optimizer steps")
    sequences_per_step: Count = Field(default=64, description="examples per step")
    microbatch_sequences: Count = Field(
        default=64, description="rows per forward and backward pass"
    )
    learning_rate: float = Field(default=1e-3, gt=0, le=1, description="peak AdamW step size")
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="linear", description="decay of the learning rate over `steps`"
    )
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="decoupled; matrices only")
    gradient_clip_norm: float = Field(default=1.0, gt=0, description="global norm of the gradient")
    steps_per_checkpoint: Count = Field(
        default=250, description="steps between committed checkpoints of the warm start"
    )


class RewardModelConfig(Section):
    """A reward model that is trained from preference pairs (docs/reward-models.md)."""

    pairs: str = Field(description="JSONL or Parquet file of preference pairs")
    held_out_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="share of prompts whose pairs are held out"
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="smallest difference between the rewards of chosen and rejected; a pair's "
        "own margin takes precedence",
    )
    steps: Count = Field(default=200, description="optimizer steps")
    pairs_per_step: Count = Field(default=32, description="pairs per step")
    microbatch_pairs: Count = Field(default=32, description="pairs per forward and backward pass")
    learning_rate: float = Field(default=1e-4, gt=0, le=1, description="peak AdamW step size")
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="linear", description="decay of the learning rate over `steps`"
    )
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="decoupled; matrices only")
    gradient_clip_norm: float = Field(default=1.0, gt=0, description="global norm of the gradient")
    steps_per_checkpoint: Count = Field(
        default=100, description="steps between committed checkpoints of the reward model"
    )

"""Sampling: an environment and its rewards, sampling parameters, rollouts per round.

Leaves out where completions come from (serving.py) and what is evaluated (orchestration.py).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from marin_rl.config.section import OMIT_IF_NONE, RUNTIME_ONLY, Count, Seconds, Section

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class LearnedRewardConfig(Section):
    """A trained reward model as a component of the reward (docs/reward-models.md)."""

    checkpoint: str = Field(
        description="manifest of the reward model: ROOT/RUN_ID/reward_model/step-00200"
    )
    name: str = Field(
        default="reward_model",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="name of the component",
    )
    weight: float = Field(default=1.0, description="weight of the component in the reward")
    environment_weight: float = Field(
        default=1.0, description="factor of the environment's own weights; 0: only record them"
    )
    normalise: bool = Field(
        default=True, description="take off the mean of its pairs' rewards, divide by their std"
    )
    offset: float = Field(default=0.0, description="added after that")
    clip: float | None = Field(
        default=None, gt=0, le=1e6, description="bound of the value's size at last; null: none"
    )


class EnvironmentConfig(Section):
    """An environment by its registered name, with options of its own."""

    name: str = Field(default="echo", description="registered name: reasoning_gym, echo, chat, …")
    options: dict[str, Any] = Field(
        default={}, description="passed to the environment, checked by it"
    )
    train_seed: int = Field(default=0, ge=0, lt=2**63, description="base seed of training examples")
    eval_seed: int = Field(
        default=1_000_000_000, ge=0, lt=2**63, description="base seed of held-out examples"
    )
    reward_timeout_s: Seconds = Field(default=10.0, description="seconds for scoring one rollout")
    reward_memory_bytes_max: int = Field(
        default=8 * 2**30,
        ge=256 * 2**20,
        le=2**50,
        description="memory of a process that scores; beyond it a rollout is a fault",
        json_schema_extra=RUNTIME_ONLY,
    )
    pass_environment: tuple[VariableName, ...] = Field(
        default=(),
        max_length=64,
        description="names of environment variables that scoring may see, such as a judge's key",
        json_schema_extra=RUNTIME_ONLY,
    )
    reward_model: LearnedRewardConfig | None = Field(
        default=None,
        description="a reward model whose word counts too; null: none",
        json_schema_extra=OMIT_IF_NONE,
    )


class SamplingConfig(Section):
    """Sampling parameters; the seed of each completion is derived, never configured."""

    temperature: float = Field(
        default=1.0, ge=0, le=10, description="softmax temperature; 0 is greedy"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass; 1 is off")
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest tokens; 0 is off")
    max_tokens: Count = Field(default=32, le=1_000_000, description="new tokens per completion")
    stop: tuple[str, ...] = Field(
        default=(), max_length=16, description="strings that end a completion"
    )

    @property
    def narrowed(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary (top_k, top_p, min_p), with its
        logprobs.
        """
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


class RolloutsConfig(Section):
    """Number of rollouts in a round, and their division into shards."""

    groups_per_round: Count = Field(default=16, le=1_000_000, description="prompts per round")
    group_size: Count = Field(
        default=8,
        le=4096,
        description="completions per prompt; 1 only with objective.advantage gae, reinforce or "
        "reinforce_batch",
    )
    group_size_min: Count = Field(
        default=2,
        le=4096,
        description="valid completions below which a group is marked short; 1 as group_size",
    )
    greedy_baseline: Literal[True] | None = Field(
        default=None,
        description="true: the last completion of each group is sampled at temperature 0, as the "
        "baseline of objective.advantage remax, and not trained on; null: none is",
        json_schema_extra=OMIT_IF_NONE,
    )
    shards_per_round: Count = Field(default=1, le=100_000, description="Parquet objects per round")
    errors_max_fraction: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of failed rollouts above which a shard is not committed",
    )

    @model_validator(mode="after")
    def _shards_hold_groups(self) -> "RolloutsConfig":
        if self.shards_per_round > self.groups_per_round:
            raise ValueError(
                f"shards_per_round ({self.shards_per_round}) cannot exceed groups_per_round "
                f"({self.groups_per_round}): a shard holds at least one group"
            )
        if self.group_size_min > self.group_size:
            raise ValueError(
                f"rollouts.group_size_min ({self.group_size_min}) cannot exceed "
                f"rollouts.group_size ({self.group_size})"
            )
        return self

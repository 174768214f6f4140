"""Settings around the rounds: evaluation, trackers, retries, and retention of old rounds.

Leaves out what a round does, which is all in the other sections.
"""

from typing import Literal

from pydantic import Field, model_validator

from marin_rl.config.sampling import EnvironmentConfig
from marin_rl.config.section import (
    OMIT_IF_NONE,
    PLAN,
    RUNTIME_ONLY,
    Count,
    Seconds,
    Section,
    SetName,
)


class EvaluationConfig(Section):
    """Evaluation of checkpoints during the run."""

    every_rounds: Count = Field(
        default=10, description="rounds between evaluations", json_schema_extra=PLAN
    )
    examples: Count = Field(default=256, le=1_000_000, description="held-out examples")
    samples: Count = Field(default=1, le=4096, description="completions per example")
    k: tuple[Count, ...] = Field(
        default=(1,),
        min_length=1,
        max_length=16,
        description="pass@k, mean@k and majority@k; at most `samples`",
    )
    sets: dict[SetName, EnvironmentConfig] | None = Field(
        default=None,
        min_length=1,
        description="environments to evaluate on, by a name of yours; null: the run's own",
        json_schema_extra=OMIT_IF_NONE,
    )
    temperature: float = Field(default=0.0, ge=0, le=10, description="0 is greedy")
    pass_threshold: float = Field(
        default=1.0, description="reward from which an answer counts as right"
    )

    @model_validator(mode="after")
    def _enough_samples(self) -> "EvaluationConfig":
        if max(self.k) > self.samples:
            raise ValueError(
                f"k reaches {max(self.k)}, but samples is {self.samples}: take as many samples"
            )
        for name, chosen in (self.sets or {}).items():
            if chosen.reward_model is not None:
                raise ValueError(
                    f"sets.{name}.reward_model: an evaluation never asks a reward model; remove it"
                )
        return self


class TrackersConfig(Section):
    """Trackers of metrics; one that fails never stops a run."""

    jsonl: bool = Field(
        default=True, description="metrics.jsonl in the run", json_schema_extra=RUNTIME_ONLY
    )
    tensorboard: str | None = Field(
        default=None, description="log folder", json_schema_extra=RUNTIME_ONLY
    )
    wandb_project: str | None = Field(
        default=None, description="W&B project", json_schema_extra=RUNTIME_ONLY
    )
    wandb_mode: Literal["online", "offline"] = Field(
        default="offline", description="W&B mode", json_schema_extra=RUNTIME_ONLY
    )
    trackio_project: str | None = Field(
        default=None, min_length=1, description="trackio project", json_schema_extra=RUNTIME_ONLY
    )


class FlowConfig(Section):
    """Retries, deadlines and concurrency of the orchestrator."""

    shards_in_flight_max: Count = Field(
        default=4, description="generate tasks at once", json_schema_extra=RUNTIME_ONLY
    )
    retries: int = Field(
        default=3,
        ge=0,
        le=100,
        description="per task, transient faults only",
        json_schema_extra=RUNTIME_ONLY,
    )
    retry_delay_s: float = Field(
        default=5.0,
        ge=0,
        le=3600,
        description="first back-off, doubles",
        json_schema_extra=RUNTIME_ONLY,
    )
    stage_timeout_s: Seconds = Field(
        default=6 * 3600.0, description="per stage", json_schema_extra=RUNTIME_ONLY
    )


class RetentionConfig(Section):
    """Retention of old checkpoints, applied by `marin-rl gc` and after every round.

    Prunes only arrays of checkpoints; their manifests and scores, rollouts, batches, evaluations
    and metrics stay.
    """

    checkpoints_last: int | None = Field(
        default=None,
        ge=2,
        description="number of latest checkpoints whose arrays are kept; null keeps all",
        json_schema_extra=PLAN,
    )
    checkpoints_every: int | None = Field(
        default=None,
        ge=1,
        description="and of the checkpoint of every n-th round",
        json_schema_extra=PLAN,
    )
    age_s: Seconds = Field(
        default=3600.0,
        description="`gc` takes files of killed processes that are older, local roots",
        json_schema_extra=PLAN,
    )

    @model_validator(mode="after")
    def _every_needs_last(self) -> "RetentionConfig":
        if self.checkpoints_every is not None and self.checkpoints_last is None:
            raise ValueError(
                f"retention.checkpoints_every is {self.checkpoints_every}, which means nothing "
                "without retention.checkpoints_last: set that too"
            )
        return self

"""Settings around the rounds: evaluation, trackers, retries, checkpoints, and their retention.

Leaves out what a round does, which is all in the other sections.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from marin_rl.config.sampling import EnvironmentConfig
from marin_rl.config.section import (
    Count,
    Seconds,
    Section,
    SetName,
    field,
    optional_field,
    plan_field,
    runtime_field,
)

# Of a training state, from which writing it takes as long as training a round does on a CPU.
STATE_BYTES_LARGE = 2**28
# Each is a level of calls when a state is found again, besides the time.
EveryRounds = Annotated[int, Field(ge=1, le=100)]
PENDING_S = 600.0  # a busy machine takes minutes to start a process and import


class EvaluationConfig(Section):
    """Evaluation of checkpoints during the run."""

    every_rounds: Count = plan_field(10, "rounds between evaluations")
    examples: Count = field(256, "held-out examples", le=1_000_000)
    samples: Count = field(1, "completions per example", le=4096)
    k: tuple[Count, ...] = field(
        (1,), "pass@k, mean@k and majority@k; at most `samples`", min_length=1, max_length=16
    )
    sets: dict[SetName, EnvironmentConfig] | None = optional_field(
        "environments to evaluate on, by a name of yours; null: the run's own", min_length=1
    )
    temperature: float = field(0.0, "sampling temperature of evaluations; 0 is greedy", ge=0, le=10)
    pass_threshold: float = field(1.0, "reward from which an answer counts as right")
    patience: int | None = optional_field(
        "evaluations in a row that are no better than the best one, by `retention.best`, after "
        "which the run ends; null: all rounds are played",
        plan=True,
        ge=1,
        le=1_000_000,
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

    jsonl: bool = runtime_field(True, "metrics.jsonl in the run")
    tensorboard: str | None = runtime_field(None, "log folder")
    wandb_project: str | None = runtime_field(None, "W&B project")
    wandb_mode: Literal["online", "offline"] = runtime_field("offline", "W&B mode")
    trackio_project: str | None = runtime_field(None, "trackio project", min_length=1)


class FlowConfig(Section):
    """Retries, deadlines and concurrency of the orchestrator."""

    shards_in_flight_max: Count = runtime_field(4, "generate tasks at once")
    runner: Literal["local", "work_pool", "ray"] = runtime_field(
        "local",
        "where shards are sampled and checkpoints evaluated: in the flow's process, by workers "
        "of a Prefect work pool, or on a Ray cluster. All but local need inference.endpoints",
    )
    deployment: str = runtime_field(
        "prod",
        "with runner work_pool: the name behind generate-shards/, sample-chunk/ and "
        "evaluate-checkpoint/",
        pattern=r"^[A-Za-z0-9_.-]{1,100}$",
    )
    shards_per_flow_run: int | None = runtime_field(
        None,
        "with runner work_pool: shards of one flow run, which takes seconds to start; null: a "
        "round's shards in shards_in_flight_max equal parts",
        ge=1,
    )
    pending_timeout_s: Seconds | None = optional_field(
        "with runner work_pool: seconds between a worker's taking a flow run and its "
        "beginning, after which its work is given out again, as it is once Prefect marks the "
        f"worker offline; null: {PENDING_S:g}",
        runtime_only=True,
    )
    ray_address: str | None = optional_field(
        "with runner ray: address of the cluster, HOST:PORT or ray://HOST:PORT",
        runtime_only=True,
        pattern=r"^\S{1,300}$",
    )
    ray_resources: dict[Literal["generate", "sample", "evaluate"], dict[str, float]] | None = (
        optional_field(
            "with runner ray: what a task of a stage reserves, such as {generate: {num_cpus: 2}}; "
            "null: one processor",
            runtime_only=True,
        )
    )
    retries: int = runtime_field(3, "per task, transient faults only", ge=0, le=100)
    retry_delay_s: float = runtime_field(5.0, "first back-off, doubles", ge=0, le=3600)
    stage_timeout_s: Seconds = runtime_field(6 * 3600.0, "per stage")

    @model_validator(mode="after")
    def _ray_has_an_address(self) -> "FlowConfig":
        if self.runner == "ray" and self.ray_address is None:
            raise ValueError(
                "runner is ray, but ray_address is null: expected the address of a cluster, such "
                "as 10.0.0.1:6379"
            )
        return self

    @property
    def seconds_pending(self) -> float:
        return self.pending_timeout_s or PENDING_S


class DistributedConfig(Section):
    """Processes that train together, each of which runs the same command.

    What is null is taken from the environment, which wins over what is here: MARIN_RL_COORDINATOR,
    MARIN_RL_PROCESSES, MARIN_RL_PROCESS_ID. JAX detects the others by Slurm, Kubernetes, Open MPI
    or a TPU pod.
    """

    coordinator: str | None = runtime_field(
        None, "HOST:PORT at which process 0 is to be found", pattern=r"^\S{1,250}:[0-9]{1,5}$"
    )
    processes: int | None = runtime_field(None, "number of processes", ge=1, le=100_000)
    process_id: int | None = runtime_field(None, "number of this process, from 0", ge=0)
    timeout_s: Seconds = runtime_field(300.0, "seconds in which all processes are to come")


class CheckpointsConfig(Section):
    """Arrays of checkpoints, one of which is committed after every round."""

    optimizer_every_rounds: Literal["auto"] | EveryRounds = plan_field(
        "auto",
        "rounds from a checkpoint that holds the optimizer's state to the next. Those between hold "
        "the policy's parameters; whoever continues from one trains the rounds since again, to the "
        "same bits. auto: 8 on a CPU for a training state of 256 MB or more, else 1",
    )

    def optimizer_every(self, state_bytes: int, *, on_host: bool) -> int:
        """Rounds from one checkpoint with optimizer state to the next; `auto` goes by its size."""
        if self.optimizer_every_rounds != "auto":
            return self.optimizer_every_rounds
        return 8 if on_host and state_bytes >= STATE_BYTES_LARGE else 1


class RetentionConfig(Section):
    """Retention of old checkpoints, applied by `marin-rl gc` and after every round.

    Prunes only arrays of checkpoints; their manifests and scores, rollouts, batches, evaluations
    and metrics stay.
    """

    checkpoints_last: int | None = plan_field(
        None, "number of latest checkpoints whose arrays are kept; null: all", ge=2
    )
    checkpoints_every: int | None = plan_field(
        None, "in addition, keep the arrays of every n-th round's checkpoint", ge=1
    )
    best: Annotated[str, Field(pattern=r"^eval/\S{1,200}$")] | None = optional_field(
        "in addition, keep the arrays of the best checkpoint, which has the highest value of this "
        "metric of evaluations, the first of equals; null: none, and eval/accuracy for "
        "evaluation.patience",
        plan=True,
    )
    age_s: Seconds = plan_field(
        3600.0, "age in seconds from which `gc` deletes files of killed processes (local roots)"
    )

    @model_validator(mode="after")
    def _every_needs_last(self) -> "RetentionConfig":
        if self.checkpoints_every is not None and self.checkpoints_last is None:
            raise ValueError(
                f"retention.checkpoints_every is {self.checkpoints_every}, which means nothing "
                "without retention.checkpoints_last: set that too"
            )
        return self

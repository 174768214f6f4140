"""Training: filters, batches, the policy's optimizer, its critic, a teacher, and what comes before.

Leaves out the objective (objective.py).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from marin_rl.config.sampling import EnvironmentConfig
from marin_rl.config.section import (
    Count,
    Section,
    field,
    null_if,
    optional_field,
    plan_field,
    runtime_field,
)
from marin_rl.config.serving import KeyVariable


class FiltersConfig(Section):
    """Filters before training; every drop is counted in the dispositions."""

    zero_signal: bool = field(
        True,
        "drop groups whose rewards are all equal, unless the objective has a KL term or an "
        "entropy bonus to learn from",
    )
    truncated: bool = field(False, "drop completions cut off at max_tokens")


# Layouts of rows in which a group's prompt lies once.
SHARING = ("shared_prompt", "auto")


class BatchingConfig(Section):
    """Padding and packing of sequences into rows."""

    length_buckets: tuple[Count, ...] = field(
        (), "padded lengths allowed, ascending; empty: 32, 48, 64, 96, 128, …"
    )
    sequences_per_step: int | None = field(
        None,
        "rollouts of one optimizer step, however many rows they fill; null: the whole round",
        ge=1,
    )
    packing: Literal["none", "sequences", "shared_prompt", "auto"] | None = optional_field(
        "none: one sequence per row; sequences: several per row; shared_prompt: several "
        "completions of a group per row, behind one copy of their prompt; auto: the same, in rows "
        "for a whole group, and several examples of a warm start per row; null: auto on one CPU "
        "device, else, and with length_buckets, none",
        as_begun=True,
    )
    row_tokens: int | None = field(
        None, "length of a packed row; needed by sequences and shared_prompt", ge=2, le=10_000_000
    )
    staleness_rounds_max: int = field(
        0,
        "largest age of a rollout: rounds between the policy that sampled it and the round that "
        "trains on it; older rollouts are dropped as stale. At least asynchrony.max_staleness; "
        "where rounds alternate, every rollout has age 0, but for groups that are pushed "
        "(rollouts.source)",
        ge=0,
        le=1000,
    )

    @model_validator(mode="after")
    def _buckets_ascend(self) -> "BatchingConfig":
        if list(self.length_buckets) != sorted(set(self.length_buckets)):
            raise ValueError("length_buckets must ascend without repeats")
        if self.layout in ("sequences", "shared_prompt") and self.row_tokens is None:
            raise ValueError(f"packing {self.packing} needs row_tokens")
        if self.layout == "auto" and self.row_tokens is not None:
            raise ValueError("packing auto chooses the length of rows: remove row_tokens")
        return self

    @property
    def layout(self) -> str:
        return self.packing or "none"

    @property
    def shares_prompts(self) -> bool:
        return self.layout in SHARING

    @property
    def packs_examples(self) -> bool:
        return self.layout == "auto"


class CriticConfig(Section):
    """Critic: a value function as PPO has it; needs objective.advantage gae."""

    trunk: Literal["own", "shared"] = field(
        "own",
        "own: a second model that begins as a copy of the policy; shared: a head on the policy's "
        "model",
    )
    learning_rate: float = field(3e-4, "peak AdamW step size of its own parameters", gt=0, le=1)
    value_coefficient: float = field(
        0.1, "weight of the value loss relative to the policy's", gt=0, le=100
    )
    value_clip: float | None = field(
        0.2,
        "largest change of a value from the one before the round; null: not clipped",
        gt=0,
        le=1e6,
    )
    warmup_rounds: int = field(0, "number of first rounds that train the critic only", ge=0)
    gamma: float = field(1.0, "discount from token to token", gt=0, le=1)
    gae_lambda: float = field(
        0.95, "lambda of GAE: 1, returns minus values; 0, one-step temporal differences", ge=0, le=1
    )


RESTARTS = "times that the decay begins again at the peak, after equal parts of it; null: never"
Restarts = Annotated[int | None, Field(ge=1, le=10_000)]


def _restarts_need_a_decay(settings: Any) -> Any:
    if settings.schedule == "constant" and settings.schedule_restarts is not None:
        raise ValueError("schedule 'constant' has no restarts: expected linear or cosine")
    return settings


class TrainingConfig(Section):
    """The optimizer and its schedule."""

    learning_rate: float = field(3e-4, "peak AdamW step size", gt=0, le=1)
    warmup_steps: int = field(5, "optimizer steps of linear warm-up", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = field("constant", "decay after warm-up")
    schedule_steps: int | None = field(
        None, "optimizer steps until the decay ends; needed unless constant", ge=1
    )
    schedule_restarts: Restarts = optional_field(RESTARTS)
    optimizer: Annotated[
        Literal["adamw", "adamw_offload", "adamw_8bit", "muon"] | None, null_if("adamw")
    ] = optional_field(
        "adamw; adamw_offload: AdamW with its moments in the host's memory, from which updates "
        "read them layer by layer; adamw_8bit: AdamW with moments in 8 bits, a quarter of their "
        "memory; muon: Muon for the matrices of layers, AdamW for the rest, with one learning "
        "rate; of rounds, warm starts and preferences; null: adamw"
    )
    beta1: float = field(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = field(0.95, "decay of the second moment", ge=0, lt=1)
    epsilon: float = field(1e-8, "AdamW epsilon", gt=0, lt=1)
    weight_decay: float = field(0.0, "decoupled; matrices only", ge=0, le=10)
    gradient_clip_norm: float = field(1.0, "global norm of the gradient", gt=0)
    epochs: Count = field(1, "passes over a round's batches", le=100)
    microbatch_sequences: Count = field(16, "rows per forward and backward pass")
    gradient_checkpointing: bool | Literal["offload"] = field(
        False,
        "recompute activations, save memory; offload: with the inputs of layers in the host's "
        "memory",
    )
    nonfinite_updates_max: Count = plan_field(
        3, "consecutive updates that were not finite, after which the run ends"
    )
    critic: CriticConfig | None = optional_field("a value function; null: none")
    load_balance_coefficient: float | None = optional_field(
        "weight of the load-balancing loss of a model's experts, X sum_x f_x P_x as in "
        "transformers, over trained tokens; null: none",
        gt=0,
        le=10,
    )

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> "TrainingConfig":
        if self.schedule != "constant" and self.schedule_steps is None:
            raise ValueError(f"schedule '{self.schedule}' needs schedule_steps")
        return self

    _restarts = model_validator(mode="after")(_restarts_need_a_decay)


class SFTConfig(Section):
    """Supervised warm start on (prompt, answer) pairs of an environment."""

    environment: EnvironmentConfig | None = field(None, "null: the run's environment")
    train_on: Annotated[Literal["last", "all", "flagged"] | None, null_if("last")] = optional_field(
        "answers of a conversation that are learned: all of the assistant's; flagged: those "
        "without train: false or weight: 0; null: the last"
    )
    steps: Count = field(500, "optimizer steps")
    sequences_per_step: Count = field(64, "examples per step")
    microbatch_sequences: Count = field(64, "rows per forward and backward pass")
    learning_rate: float = field(1e-3, "peak AdamW step size", gt=0, le=1)
    warmup_steps: int = field(0, "optimizer steps of linear warm-up", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = field(
        "linear", "decay of the learning rate over `steps`"
    )
    schedule_restarts: Restarts = optional_field(RESTARTS)
    weight_decay: float = field(0.0, "decoupled; matrices only", ge=0, le=10)
    gradient_clip_norm: float = field(1.0, "global norm of the gradient", gt=0)
    steps_per_checkpoint: Count = field(
        250, "steps between committed checkpoints of the warm start"
    )

    _restarts = model_validator(mode="after")(_restarts_need_a_decay)


class ContextMessage(Section):
    """A message that a teacher reads before the prompt."""

    role: Literal["system", "user", "assistant"] = Field(description="role of the message")
    content: str = Field(description="text of the message")


class DivergenceConfig(Section):
    """A divergence of the teacher and the policy over tokens, as a loss of its own.

    Generalised Jensen-Shannon: beta KL(teacher || m) + (1 - beta) KL(policy || m), with m the
    mixture beta teacher + (1 - beta) policy (GKD, arXiv:2306.13649, eq. 1).
    """

    beta: float = field(
        0.5,
        "0: KL(teacher || policy), forward; 1: KL(policy || teacher), reverse; between: Jensen-"
        "Shannon's, generalised",
        ge=0,
        le=1,
    )
    top_k: int | None = optional_field(
        "compare the teacher's so many likeliest tokens, and the rest as one; null: all tokens",
        ge=1,
        le=1024,
    )


class DistillationConfig(Section):
    """A teacher that scores what the policy samples (docs/distillation.md).

    Without `folder`, `checkpoint` and `endpoint` it is the run's own first checkpoint.
    """

    folder: str | None = optional_field("Hugging Face folder of the teacher")
    checkpoint: str | None = optional_field(
        "checkpoint of the teacher: ROOT/RUN_ID/checkpoints/round-00012"
    )
    endpoint: str | None = optional_field(
        "base URL, ending in /v1, of a server that scores prompts: vLLM's, SGLang's, marin-rl's",
        runtime_only=True,
        pattern=r"^https?://[^\s]+$",
    )
    route: Literal["completions", "sglang"] | None = optional_field(
        "how the endpoint is asked: by prompt_logprobs on /v1/completions, as vLLM and marin-rl "
        "have it, or by SGLang's /generate; null: completions",
        runtime_only=True,
    )
    model: str | None = optional_field(
        "id of the endpoint's model, or its name without a version; null: the only one it serves",
        runtime_only=True,
    )
    api_key_variable: KeyVariable = runtime_field(
        "MARIN_RL_TEACHER_API_KEY",
        "environment variable, MARIN_RL_*, that holds the bearer token of the endpoint",
    )
    context: tuple[ContextMessage, ...] | None = optional_field(
        "messages that the teacher alone reads before the prompt: example turns, or a system "
        "message; null: it reads the prompt as it is",
        min_length=1,
        max_length=64,
    )
    coefficient: float = field(
        1.0,
        "weight of log(teacher / policy) in the advantage of a token, or of `loss`; 0: measured",
        ge=0,
        le=1000,
    )
    environments: tuple[str, ...] | None = optional_field(
        "environments, by their labels in the list, whose rollouts the teacher scores; null: all",
        min_length=1,
        max_length=64,
    )

    loss: DivergenceConfig | None = optional_field(
        "learn by the divergence to a teacher whose weights are here; null: by advantages"
    )

    @model_validator(mode="after")
    def _one_teacher(self) -> "DistillationConfig":
        named = [name for name in ("folder", "checkpoint", "endpoint") if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are two teachers: expected one of them")
        if "endpoint" not in named and (self.route or self.model):
            raise ValueError("route and model are those of an endpoint: expected one, found null")
        given = [name for name in ("endpoint", "environments") if getattr(self, name)]
        if self.loss is not None and given:
            raise ValueError(
                "loss compares all tokens that the policy and a teacher beside it give for the "
                f"same rows: expected {given[0]} null, or loss null"
            )
        return self

    @property
    def is_self(self) -> bool:
        return not (self.folder or self.checkpoint or self.endpoint)

    def covers(self, environment: str) -> bool:
        """True if the teacher scores the rollouts of this environment."""
        return self.environments is None or environment in self.environments


MICROBATCH_PAIRS = 32  # where no number is configured, and the run chose none


class PairTrainingConfig(Section):
    """Keys that a reward model and a policy that learns from preference pairs have alike."""

    pairs: str = Field(
        description="JSONL or Parquet file of preference pairs, or the folder of a run whose "
        "groups give them"
    )
    held_out_fraction: float = field(0.1, "share of prompts whose pairs are held out", ge=0, lt=1)
    steps: Count = field(200, "optimizer steps")
    pairs_per_step: Count = field(32, "pairs per step")
    microbatch_pairs: int | None = optional_field(
        "pairs per forward and backward pass; null: on a CPU up to 32, with activations of at most "
        "a quarter of what training keeps, or 256 MB; else, and for kto, 32",
        as_begun=True,
        ge=1,
    )
    learning_rate: float = field(1e-4, "peak AdamW step size", gt=0, le=1)
    warmup_steps: int = field(0, "optimizer steps of linear warm-up", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = field(
        "linear", "decay of the learning rate over `steps`"
    )
    schedule_restarts: Restarts = optional_field(RESTARTS)
    weight_decay: float = field(0.0, "decoupled; matrices only", ge=0, le=10)
    gradient_clip_norm: float = field(1.0, "global norm of the gradient", gt=0)
    steps_per_checkpoint: Count = field(100, "steps between committed checkpoints")

    _restarts = model_validator(mode="after")(_restarts_need_a_decay)

    @property
    def labelled(self) -> bool:
        """True if single answers with labels are learned, in place of pairs."""
        return False

    @property
    def pairs_at_once(self) -> int:
        return self.microbatch_pairs or MICROBATCH_PAIRS


class RewardModelConfig(PairTrainingConfig):
    """A reward model that is trained from preference pairs (docs/reward-models.md)."""

    margin: float = field(
        0.0,
        "smallest difference between the rewards of chosen and rejected; a pair's own margin "
        "takes precedence",
        ge=0,
        le=1000,
    )


class PreferenceLossConfig(Section):
    """The loss of a pair (docs/preferences.md), of log-ratios to the reference where it has one."""

    type: Literal[
        "sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "simpo", "orpo", "kto"
    ] = field(
        "sigmoid",
        "sigmoid: DPO, with label_smoothing cDPO; simpo, orpo: no reference; kto: answers with a "
        "label, without pairs",
    )  # fmt: skip
    beta: float = field(
        0.1, "weight of a difference of log-probabilities; simpo is usually given 2", gt=0, le=100
    )
    normalise: Literal["type", "sum", "mean"] = field(
        "type",
        "log-probabilities of an answer summed over its tokens, or their mean; type: mean for ipo, "
        "simpo and orpo, else sum",
    )
    label_smoothing: float = field(
        0.0, "share of pairs taken to be the wrong way round; sigmoid, robust, simpo", ge=0, lt=0.5
    )
    target_margin: float = field(
        0.0, "gamma of simpo: margin of beta times the difference; usually 0.3 to 0.5 beta", ge=0
    )
    sft_coefficient: float = field(
        0.0, "weight of the mean negative log-likelihood of chosen answers", ge=0, le=100
    )
    desirable_weight: float | None = optional_field(
        "kto: weight of desirable answers; null: 1", gt=0, le=1000
    )
    undesirable_weight: float | None = optional_field(
        "kto: weight of the others; null: 1", gt=0, le=1000
    )

    @model_validator(mode="after")
    def _each_key_is_used(self) -> "PreferenceLossConfig":
        if self.label_smoothing and self.type not in ("sigmoid", "robust", "simpo"):
            raise ValueError(f"type {self.type} has no label_smoothing; leave it out")
        if self.target_margin and self.type != "simpo":
            raise ValueError(f"type {self.type} has no target_margin; it is simpo's")
        if (self.desirable_weight or self.undesirable_weight) and self.type != "kto":
            raise ValueError(f"type {self.type} has no desirable_weight; it is kto's")
        if self.normalise != "type" and self.type in ("simpo", "orpo"):
            raise ValueError(f"type {self.type} is of mean log-probabilities; leave normalise out")
        return self

    @property
    def has_reference(self) -> bool:
        return self.type not in ("simpo", "orpo")

    @property
    def of_means(self) -> bool:
        of_type = self.normalise == "type" and self.type in ("ipo", "simpo", "orpo")
        return of_type or self.normalise == "mean"


class PreferenceConfig(PairTrainingConfig):
    """A policy that is trained on preference pairs, without sampling (docs/preferences.md)."""

    loss: PreferenceLossConfig = PreferenceLossConfig()
    learning_rate: float = field(1e-6, "peak AdamW step size", gt=0, le=1)

    @property
    def labelled(self) -> bool:
        return self.loss.type == "kto"

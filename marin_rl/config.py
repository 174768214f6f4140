"""The one configuration tree: frozen, typed, ranged, resolved once and written into the run.

Fields marked `free` may differ when a run is continued: they change how, when or how far a run
goes, never what its slots contain. All others are the run's *content* and are part of fingerprints.
Loading from YAML and overriding by dotted keys is `load_config`; no other file is read here.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from marin_rl.errors import ConfigError

FREE: dict[str, Any] = {"free": True}

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


class Section(BaseModel):
    """Base of every node: unknown keys are errors, values never change, NaN is refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class ModelConfig(Section):
    """Architecture of a policy that is built here; ignored where `policy.hf_path` is given."""

    family: Literal["llama", "qwen3"] = Field(default="llama", description="Levanter model family")
    hidden_size: Count = Field(default=128, le=65536, description="width of the residual stream")
    layers: Count = Field(default=3, le=512, description="number of transformer blocks")
    heads: Count = Field(default=4, le=512, description="attention heads")
    kv_heads: Count = Field(default=4, le=512, description="key/value heads (divides heads)")
    intermediate_size: Count = Field(default=352, le=1_000_000, description="width of the MLP")
    head_size: int | None = Field(
        default=None, ge=2, le=1024, description="per head; null: hidden/heads"
    )
    rope_theta: float = Field(default=10_000.0, gt=1, description="base of the rotary embedding")
    norm_epsilon: float = Field(default=1e-5, gt=0, lt=1, description="epsilon inside RMSNorm")
    initializer_range: float = Field(default=0.02, gt=0, le=1, description="std of initial weights")
    tie_embeddings: bool = Field(default=True, description="output head shares the input embedding")
    vocab_size: int | None = Field(
        default=None,
        ge=2,
        le=10_000_000,
        description="rows of the embedding; null: the tokenizer's",
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads: found {self.kv_heads} and {self.heads}")
        if self.head_size is None and self.hidden_size % self.heads:
            raise ValueError(
                f"heads must divide hidden_size: found {self.heads} and {self.hidden_size}"
            )
        return self


class PolicyConfig(Section):
    """Which model is trained and where its first parameters come from."""

    init: Literal["random", "sft", "hf", "checkpoint"] = Field(
        default="random",
        description="random; sft: warm start by the `sft` section; hf: folder `hf_path`; "
        "checkpoint: slot `checkpoint` of another run",
    )
    hf_path: str | None = Field(default=None, description="local Hugging Face model folder")
    checkpoint: str | None = Field(
        default=None, description="manifest to start from: ROOT/RUN_ID/checkpoints/round-00012"
    )
    tokenizer: str = Field(
        default="characters", description="'characters' (built in) or a local tokenizer folder"
    )
    model: ModelConfig = ModelConfig()
    context_length: Count = Field(
        default=128, le=10_000_000, description="tokens of prompt and completion together"
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of activations; master weights stay float32"
    )

    @model_validator(mode="after")
    def _source_is_named(self) -> "PolicyConfig":
        if self.init == "hf" and not self.hf_path:
            raise ValueError("init 'hf' needs hf_path, a local model folder")
        if self.init == "checkpoint" and not self.checkpoint:
            raise ValueError("init 'checkpoint' needs checkpoint, ROOT/RUN_ID/checkpoints/round-N")
        return self


class EnvironmentConfig(Section):
    """An environment by its registered name, with options of its own."""

    name: str = Field(default="echo", description="registered name: reasoning_gym, echo, chat, …")
    options: dict[str, Any] = Field(
        default={}, description="passed to the environment, checked by it"
    )
    train_seed: int = Field(default=0, ge=0, lt=2**31, description="base seed of training examples")
    eval_seed: int = Field(
        default=1_000_000_000, ge=0, lt=2**31, description="base seed of held-out examples"
    )
    reward_timeout_s: Seconds = Field(default=10.0, description="seconds for scoring one rollout")


class SamplingConfig(Section):
    """How completions are sampled; the seed of each is derived, never configured."""

    temperature: float = Field(
        default=1.0, ge=0, le=10, description="softmax temperature; 0 is greedy"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass; 1 is off")
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest tokens; 0 is off")
    max_tokens: Count = Field(default=32, le=1_000_000, description="new tokens per completion")
    stop: tuple[str, ...] = Field(
        default=(), max_length=16, description="strings that end a completion"
    )


class RolloutsConfig(Section):
    """How much is sampled in a round and how it is cut into shards."""

    groups_per_round: Count = Field(default=16, le=1_000_000, description="prompts per round")
    group_size: int = Field(
        default=8, ge=2, le=4096, description="completions per prompt (at least 2)"
    )
    group_size_min: int = Field(
        default=2,
        ge=2,
        le=4096,
        description="valid completions below which a group is marked short",
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
            raise ValueError("group_size_min cannot exceed group_size")
        return self


class EngineConfig(Section):
    """The embedded engine: fixed slots, decoded in chunks."""

    slots: Count = Field(default=128, le=65536, description="sequences decoded side by side")
    chunk_steps: Count = Field(
        default=16, le=4096, description="decode steps on the device between two looks at the queue"
    )
    prefill_rows: Count = Field(default=16, le=65536, description="prompts prefilled in one call")


class InferenceConfig(Section):
    """Where completions come from: the embedded server, or remote OpenAI-compatible endpoints."""

    endpoints: tuple[str, ...] = Field(
        default=(),
        description="base URLs ending in /v1; empty: serve from this process",
        json_schema_extra=FREE,
    )
    model: str = Field(default="policy", description="name the policy is served under")
    api_key_variable: str = Field(
        default="MARIN_RL_API_KEY",
        description="environment variable that holds the bearer token",
        json_schema_extra=FREE,
    )
    publish: Literal["none", "update_weights_from_disk"] = Field(
        default="none",
        description="how remote endpoints take new weights: by SGLang's route, or not at all",
        json_schema_extra=FREE,
    )
    publish_root: str | None = Field(
        default=None,
        description="folder that this process and the endpoints share; null: the run's exports/",
        json_schema_extra=FREE,
    )
    requests_in_flight_max: Count = Field(
        default=64, le=65536, description="concurrent requests of one shard", json_schema_extra=FREE
    )
    request_timeout_s: Seconds = Field(
        default=600.0, description="seconds for one completion request", json_schema_extra=FREE
    )
    request_attempts_max: Count = Field(
        default=5, le=100, description="tries per request, with back-off", json_schema_extra=FREE
    )
    canary_tolerance: float = Field(
        default=1e-3,
        gt=0,
        le=10,
        description="largest |engine - trainer| of a canary logprob, in nats",
        json_schema_extra=FREE,
    )
    engine: EngineConfig = EngineConfig()


class FiltersConfig(Section):
    """What is dropped before training; every drop is counted in the dispositions."""

    zero_signal: bool = Field(default=True, description="drop groups whose rewards are all equal")
    truncated: bool = Field(default=False, description="drop completions cut off at max_tokens")


class BatchingConfig(Section):
    """How sequences become rows."""

    length_buckets: tuple[Count, ...] = Field(
        default=(), description="padded lengths allowed, ascending; empty: powers of two from 32"
    )
    sequences_per_step: int | None = Field(
        default=None, ge=1, description="rows of one optimizer step; null: the whole round"
    )
    staleness_rounds_max: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="rounds a rollout may be older than its training round",
    )

    @model_validator(mode="after")
    def _buckets_ascend(self) -> "BatchingConfig":
        if list(self.length_buckets) != sorted(set(self.length_buckets)):
            raise ValueError("length_buckets must ascend without repeats")
        return self


class ObjectiveConfig(Section):
    """What is maximised: orthogonal choices instead of named trainers."""

    advantage: Literal["rloo", "grpo", "dr_grpo"] = Field(
        default="rloo", description="group baseline"
    )
    surrogate: Literal["reinforce", "ppo_clip"] = Field(
        default="ppo_clip", description="how the importance ratio enters"
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="sequence", description="ratio of each token, or of the whole completion"
    )
    clip_low: float = Field(
        default=0.2, ge=0, lt=1, description="ratio is clipped below 1 - clip_low"
    )
    clip_high: float = Field(
        default=0.2, ge=0, le=100, description="ratio is clipped above 1 + clip_high"
    )
    aggregation: Literal[
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
    ] = Field(default="sequence_mean_token_sum", description="how token losses become one number")
    kl_coefficient: float = Field(
        default=0.0, ge=0, le=100, description="weight of KL to the reference"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Schulman's estimators"
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
        default=3, description="refused updates in a row that end the run", json_schema_extra=FREE
    )

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
        default="linear", description="decay over `steps`"
    )
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="decoupled; matrices only")
    gradient_clip_norm: float = Field(default=1.0, gt=0, description="global norm of the gradient")
    steps_per_checkpoint: Count = Field(
        default=250, description="steps between committed checkpoints of the warm start"
    )


class EvaluationConfig(Section):
    """Held-out evaluation along the way."""

    every_rounds: Count = Field(
        default=10, description="rounds between evaluations", json_schema_extra=FREE
    )
    examples: Count = Field(default=256, le=1_000_000, description="held-out examples")
    samples: Count = Field(default=1, le=4096, description="completions per example")
    temperature: float = Field(default=0.0, ge=0, le=10, description="0 is greedy")
    pass_threshold: float = Field(
        default=1.0, description="reward from which an answer counts as right"
    )


class MeshConfig(Section):
    """Device mesh of the training step; 1 on an axis switches it off, -1 takes what is left."""

    data: int = Field(default=1, ge=-1, description="data parallel", json_schema_extra=FREE)
    fsdp: int = Field(
        default=1, ge=-1, description="parameters and optimizer sharded", json_schema_extra=FREE
    )
    tensor: int = Field(default=1, ge=1, description="tensor parallel", json_schema_extra=FREE)

    @model_validator(mode="after")
    def _sizes(self) -> "MeshConfig":
        if 0 in (self.data, self.fsdp) or (self.data, self.fsdp).count(-1) > 1:
            raise ValueError("axis sizes are at least 1, and only one of them may be -1")
        return self


class TrackersConfig(Section):
    """Where else metrics go; a tracker that fails never stops a run."""

    jsonl: bool = Field(
        default=True, description="metrics.jsonl in the run", json_schema_extra=FREE
    )
    tensorboard: str | None = Field(default=None, description="log folder", json_schema_extra=FREE)
    wandb_project: str | None = Field(
        default=None, description="W&B project", json_schema_extra=FREE
    )
    wandb_mode: Literal["online", "offline"] = Field(
        default="offline", description="W&B mode", json_schema_extra=FREE
    )


class FlowConfig(Section):
    """How the orchestrator treats faults."""

    shards_in_flight_max: Count = Field(
        default=4, description="generate tasks at once", json_schema_extra=FREE
    )
    retries: int = Field(
        default=3,
        ge=0,
        le=100,
        description="per task, transient faults only",
        json_schema_extra=FREE,
    )
    retry_delay_s: float = Field(
        default=5.0, ge=0, le=3600, description="first back-off, doubles", json_schema_extra=FREE
    )
    stage_timeout_s: Seconds = Field(
        default=6 * 3600.0, description="per stage", json_schema_extra=FREE
    )


class Config(Section):
    """A whole run."""

    run_id: str = Field(
        default="debug", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="name of the run"
    )
    root: str = Field(
        default="runs", description="folder or fsspec URL that holds runs", json_schema_extra=FREE
    )
    storage_options: dict[str, Any] = Field(
        default={},
        description="fsspec options (endpoint, project; never secrets)",
        json_schema_extra=FREE,
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="root of every random number of the run"
    )
    rounds: Count = Field(
        default=10, le=1_000_000, description="rounds to reach", json_schema_extra=FREE
    )
    policy: PolicyConfig = PolicyConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    inference: InferenceConfig = InferenceConfig()
    filters: FiltersConfig = FiltersConfig()
    batching: BatchingConfig = BatchingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    training: TrainingConfig = TrainingConfig()
    sft: SFTConfig = SFTConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    mesh: MeshConfig = MeshConfig()
    trackers: TrackersConfig = TrackersConfig()
    flow: FlowConfig = FlowConfig()

    @model_validator(mode="after")
    def _lengths_fit(self) -> "Config":
        if self.sampling.max_tokens >= self.policy.context_length:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"policy.context_length ({self.policy.context_length})"
            )
        buckets = self.batching.length_buckets
        if buckets and buckets[-1] < self.policy.context_length:
            raise ValueError(
                f"batching.length_buckets end at {buckets[-1]}: the largest must reach "
                f"policy.context_length ({self.policy.context_length})"
            )
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, validate.

    Raises ConfigError naming the file and every wrong key, with the nearest known one.
    """
    file = Path(path)
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {file}: expected a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected keys and values, found {type(tree).__name__}")
    return parse_config(override(tree, overrides), source=str(file))


def parse_config(tree: Mapping[str, Any], source: str = "configuration") -> Config:
    """Validate a plain tree. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_describe(item) for item in error.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def override(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `tree` with each `a.b.c=value` set; values are read as YAML."""
    result: dict[str, Any] = json.loads(json.dumps(tree))
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item!r}: expected dotted.key=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {item!r}: the value is not valid YAML") from error
        *parents, leaf = key.strip().split(".")
        node = result
        for name in parents:
            child = node.get(name)
            if child is None:
                child = node[name] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"--set {item!r}: {name!r} is a value, not a section")
            node = child
        node[leaf] = value
    return result


def content(node: Section) -> dict[str, Any]:
    """The part of a section that decides what its slots contain: everything but free fields."""
    result: dict[str, Any] = {}
    for name, info in type(node).model_fields.items():
        if is_free(info):
            continue
        value = getattr(node, name)
        if isinstance(value, Section):
            inner = content(value)
            if inner:
                result[name] = inner
        else:
            result[name] = json.loads(json.dumps(value))
    return result


def is_free(info: FieldInfo) -> bool:
    """Whether a key may differ when a run is continued."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("free"))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ, each as `key: old -> new`, sorted."""
    lines: list[str] = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {json.dumps(a)} -> {json.dumps(b)}")
    return lines


def free_keys(section: type[Section] = Config, prefix: str = "") -> list[str]:
    """Dotted names of the keys that may differ when a run is continued."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        if is_free(info):
            keys.append(prefix + name)
        elif (inner := section_of(info.annotation)) is not None:
            keys += free_keys(inner, f"{prefix}{name}.")
    return keys


def known_keys(section: type[Section] = Config, prefix: str = "") -> list[str]:
    """Dotted names of every key of the tree, sections included."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        if (inner := section_of(info.annotation)) is not None:
            keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def section_of(annotation: Any) -> type[Section] | None:
    """The section behind an annotation `Section` or `Section | None`, if it is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _describe(item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(whole configuration)"
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{_nearest(key)}"
    found = "" if isinstance(item["input"], dict | BaseModel) else f", found {item['input']!r}"
    return f"{key}: {item['msg']}{found}"


def _nearest(key: str) -> str:
    known = known_keys()
    parent, _, leaf = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {f'{parent}.' if parent else ''}{close[0]}?"
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else f"; known: {', '.join(siblings)}"

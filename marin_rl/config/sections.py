"""Sections of a whole run, and the numbers that follow from several of them.

Leaves out what must fit together across them (`checks`), and reading a file (`loading`).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic.fields import FieldInfo

from marin_rl.config.asynchrony import AsynchronyConfig
from marin_rl.config.files import section_at
from marin_rl.config.objective import ObjectiveConfig
from marin_rl.config.orchestration import (
    CheckpointsConfig,
    DistributedConfig,
    EvaluationConfig,
    FlowConfig,
    RetentionConfig,
    TrackersConfig,
)
from marin_rl.config.policy import MeshConfig, PolicyConfig
from marin_rl.config.sampling import EnvironmentConfig, RolloutsConfig, SamplingConfig
from marin_rl.config.section import (
    Count,
    Section,
    field,
    is_plan,
    is_runtime_only,
    null_if,
    optional_field,
    plan_field,
    runtime_field,
    section_of,
)
from marin_rl.config.serving import InferenceConfig
from marin_rl.config.training import (
    BatchingConfig,
    DistillationConfig,
    FiltersConfig,
    PairTrainingConfig,
    PreferenceConfig,
    RewardModelConfig,
    SFTConfig,
    TrainingConfig,
)
from marin_rl.errors import ConfigError

RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class RunSections(Section):
    """Sections of a run: what is trained, on what, how, and for how many rounds."""

    run_id: str = field("debug", "name of the run", pattern=RUN_ID_PATTERN)
    root: str = runtime_field("runs", "folder or fsspec URL that holds runs")
    storage_options: dict[str, Any] = runtime_field(
        {}, "fsspec options (endpoint, project; never secrets)"
    )
    seed: int = field(0, "root, with run_id, of every random number of the run", ge=0, lt=2**31)
    rounds: Count = plan_field(10, "number of rounds to train", le=1_000_000)
    policy: PolicyConfig = PolicyConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    inference: InferenceConfig = InferenceConfig()
    filters: FiltersConfig = FiltersConfig()
    batching: BatchingConfig = BatchingConfig()
    asynchrony: Annotated[AsynchronyConfig | None, null_if(AsynchronyConfig())] = optional_field(
        description="sampling ahead of training, and of more groups than a round takes; null: "
        "sampling and training alternate, and a round takes what it samples"
    )
    objective: ObjectiveConfig = ObjectiveConfig()
    distillation: DistillationConfig | None = optional_field(
        description="a teacher that the policy learns from, beside rewards or alone; null: none"
    )
    training: TrainingConfig = TrainingConfig()
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig | None = optional_field(
        description="settings of `marin-rl reward-model`; null: this run trains no reward model"
    )
    preference: PreferenceConfig | None = optional_field(
        description="settings of `marin-rl preference`; null: this run learns from no pairs"
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig | None = optional_field(
        description="processes that share the mesh, on one or several hosts; null: one process, "
        "unless the environment names several",
        runtime_only=True,
    )
    trackers: TrackersConfig = TrackersConfig()
    flow: FlowConfig = FlowConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    retention: RetentionConfig = RetentionConfig()

    @property
    def folder(self) -> str:
        """Folder or URL of the run, `ROOT/RUN_ID`."""
        return f"{self.root.rstrip('/')}/{self.run_id}"

    @property
    def ahead(self) -> AsynchronyConfig:
        """Settings of sampling ahead, also where the section is null."""
        return self.asynchrony or AsynchronyConfig()

    @property
    def rollout_teacher(self) -> DistillationConfig | None:
        """Distillation whose teacher scores rollouts, before they are committed."""
        settings = self.distillation
        return settings if settings is not None and settings.loss is None else None

    def pair_training(self, section: str) -> PairTrainingConfig:
        """The section "reward_model" or "preference". Raises ConfigError without it."""
        settings = getattr(self, section)
        if settings is None:
            raise ConfigError(
                f"there is no section {section}: add one that names the file of preference pairs "
                f"({section}.pairs)"
            )
        return settings

    @property
    def max_staleness(self) -> int:
        """Rounds between the policy that samples a round and the round."""
        return self.ahead.max_staleness

    @property
    def windowed(self) -> bool:
        """True if rounds take finished groups of a stream, in place of sampling their own."""
        return self.ahead.sampler is not None

    @property
    def piece_tokens(self) -> int | None:
        """Tokens of a piece of a completion; None where completions are sampled whole."""
        return self.ahead.partial_tokens

    @property
    def in_flight_updates(self) -> bool:
        """True if new weights are served while completions are sampled, which go on with them."""
        return bool(self.ahead.in_flight_updates)

    @property
    def recompute_kv_cache(self) -> bool:
        """True if new weights compute the cache of completions under way again."""
        return self.ahead.in_flight_updates is True

    @property
    def mixes_policies(self) -> bool:
        """True if the tokens of a rollout may be of several policies."""
        return self.in_flight_updates or self.piece_tokens is not None

    @property
    def inflight_groups_max(self) -> int:
        """Number of groups that are claimed and not yet taken, at most (`windowed`)."""
        usual = self.rollouts.groups_per_round * (self.max_staleness + 1)
        return self.ahead.bounds.max_inflight_groups or usual

    @property
    def samples_on(self) -> bool:
        return self.ahead.dynamic_sampling is not None

    @property
    def candidates_per_batch(self) -> int:
        """Number of groups that are sampled for a round at once."""
        factor = Fraction(str(self.ahead.over_sampling_factor or 1))
        return math.ceil(self.rollouts.groups_per_round * factor)

    @property
    def sample_batches_max(self) -> int:
        """Sample batches of a round, at most; each has `candidates_per_batch` groups."""
        return self.ahead.dynamic_sampling or 1

    @property
    def examples_per_round(self) -> int:
        """Number of examples that are set aside for a round, sampled or not."""
        return self.candidates_per_batch * self.sample_batches_max

    @property
    def examples_reserved(self) -> int:
        """Number of examples of an environment that a round's curriculum chooses from."""
        return self.examples_per_round * self.ahead.choices

    @property
    def staleness_rounds_max(self) -> int:
        """Largest age of a rollout that is trained on, in rounds."""
        return max(self.batching.staleness_rounds_max, self.max_staleness)


# Keys and values (`key=value`) of earlier versions that decided what a run trains on, and what to
# use instead: a run that recorded one can be read, and is not gone on with.
WITHDRAWN_CONTENT = {
    "asynchrony.select=best": "set group_filter (score and min), and over_sampling.select index "
    "or first_done",
    "asynchrony.curriculum=weights": "give the entries of environment a weight, or set curriculum "
    "solve_rate",
    "asynchrony.curriculum_weights": "give the entries of environment a weight, or set curriculum "
    "solve_rate",
}
# All of them.
WITHDRAWN = {
    **{
        f"inference.{name}": "servers read checkpoints from the root, which is faster: remove it"
        for name in ("flight", "flight_certificate", "flight_key", "flight_ca")
    },
    **{
        f"inference.server.{name}": "a reverse proxy bounds heads of requests and slow clients, "
        "see docs/serving.md: remove it"
        for name in ("header_bytes_max", "header_timeout_s", "body_timeout_s")
    },
    "flow.runner=root": "use work_pool or ray, and have servers of other machines join the run's "
    "fleet (inference.endpoints: registered, marin-rl serve RUN --register)",
    **WITHDRAWN_CONTENT,
}

# Keys that have another place now: runs that recorded one are gone on with.
RENAMED = {
    f"asynchrony.{name}": f"set asynchrony.{instead}"
    for name, instead in {
        "over_staleness": "sampler windowed_wait in place of wait, or windowed in place of drop",
        "recompute_kv_cache": "in_flight_updates keep_kv_cache in place of false, or true",
        "partial_rollout": "partial_tokens 1024 in place of true, or null",
        "max_sample_batches": "dynamic_sampling to the number of batches",
        "over_sampling_factor": "over_sampling.factor",
        "select": "over_sampling.select",
        "group_filter_min": "group_filter.min, and group_filter.score to the name of the filter",
        "curriculum_window_rounds": "curriculum to the number of rounds",
        "max_inflight_groups": "limits.max_inflight_groups",
        "claim_s": "limits.claim_s",
        "commit_every_s": "limits.commit_every_s",
        "shared_device": "limits.shared_device",
    }.items()
}


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


def known_keys() -> list[str]:
    return [key for key, _ in _fields_of(RunSections)]


def free_keys() -> list[str]:
    return [key for key, info in _fields_of(RunSections) if is_runtime_only(info)]


def outward_keys() -> list[str]:
    """Dotted names of the free keys that no run.json decides, but only their user."""
    fields = _fields_of(RunSections)
    return [key for key, info in fields if is_runtime_only(info) and not is_plan(info)]


def _fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield prefix + name, info
        if (inner := section_of(info.annotation)) is not None:
            yield from _fields_of(inner, f"{prefix}{name}.")


def value_at(node: Section | dict[str, Any], key: str) -> Any:
    """Value of a dotted key of a section, or of its tree; None below one that is null."""
    value: Any = node
    for name in key.split("."):
        if isinstance(value, tuple):
            value = value[int(name)] if int(name) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            value = None if value is None else getattr(value, name)
    return value


def withdrawn_in(tree: Mapping[str, Any]) -> list[str]:
    """Withdrawn keys and values (`key=value`) that a recorded configuration has."""
    names = list[str]()
    for name in WITHDRAWN:
        key, _, withdrawn = name.partition("=")
        section, _, leaf = key.rpartition(".")
        value = section_at(tree, section).get(leaf)
        if value is not None and withdrawn in ("", value):
            names.append(name)
    return names


def without(tree: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a nested mapping without the dotted `keys`."""
    heads: dict[str, list[str]] = {}
    for key in keys:
        head, _, subkey = key.partition(".")
        heads.setdefault(head, []).append(subkey)
    return {
        name: without(value, [subkey for subkey in heads.get(name, ()) if subkey])
        if isinstance(value, Mapping)
        else value
        for name, value in tree.items()
        if "" not in heads.get(name, ())
    }

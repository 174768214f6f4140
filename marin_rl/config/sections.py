"""Sections of a whole run, and the numbers that follow from several of them.

Leaves out what must fit together across them (`checks`), and reading a file (`loading`).
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from marin_rl.config.asynchrony import AsynchronyConfig, ReplayConfig
from marin_rl.config.objective import ObjectiveConfig
from marin_rl.config.orchestration import (
    EvaluationConfig,
    FlowConfig,
    RetentionConfig,
    TrackersConfig,
)
from marin_rl.config.policy import MeshConfig, PolicyConfig
from marin_rl.config.sampling import EnvironmentConfig, RolloutsConfig, SamplingConfig
from marin_rl.config.section import PLAN, Count, Section, optional_field, runtime_field
from marin_rl.config.serving import InferenceConfig
from marin_rl.config.training import (
    BatchingConfig,
    FiltersConfig,
    RewardModelConfig,
    SFTConfig,
    TrainingConfig,
)

RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


def _null_if_default(section: AsynchronyConfig | None) -> AsynchronyConfig | None:
    # So that a run which says 0 is the run that says nothing.
    return None if section == AsynchronyConfig() else section


class RunSections(Section):
    """Sections of a run: what is trained, on what, how, and for how many rounds."""

    run_id: str = Field(default="debug", pattern=RUN_ID_PATTERN, description="name of the run")
    root: str = runtime_field(default="runs", description="folder or fsspec URL that holds runs")
    storage_options: dict[str, Any] = runtime_field(
        default={}, description="fsspec options (endpoint, project; never secrets)"
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="root, with run_id, of every random number of the run",
    )
    rounds: Count = Field(
        default=10, le=1_000_000, description="number of rounds to train", json_schema_extra=PLAN
    )
    policy: PolicyConfig = PolicyConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    inference: InferenceConfig = InferenceConfig()
    filters: FiltersConfig = FiltersConfig()
    batching: BatchingConfig = BatchingConfig()
    asynchrony: Annotated[AsynchronyConfig | None, AfterValidator(_null_if_default)] = (
        optional_field(
            description="sampling ahead of training, and of more groups than a round takes; null: "
            "sampling and training alternate, and a round takes what it samples"
        )
    )
    objective: ObjectiveConfig = ObjectiveConfig()
    training: TrainingConfig = TrainingConfig()
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig | None = optional_field(
        description="settings of `marin-rl reward-model`; null: this run trains no reward model"
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    mesh: MeshConfig = MeshConfig()
    trackers: TrackersConfig = TrackersConfig()
    flow: FlowConfig = FlowConfig()
    retention: RetentionConfig = RetentionConfig()

    @property
    def max_staleness(self) -> int:
        """Rounds between the policy that samples a round and the round."""
        return self.asynchrony.max_staleness if self.asynchrony else 0

    @property
    def selects_groups(self) -> bool:
        """True if a round may take fewer groups than are sampled for it."""
        return self.asynchrony is not None and self.asynchrony.selects_groups

    @property
    def windowed(self) -> bool:
        """True if rounds take finished groups of a stream, in place of sampling their own."""
        return self.asynchrony is not None and self.asynchrony.sampler is not None

    @property
    def piece_tokens(self) -> int | None:
        """Tokens of a piece of a completion; None where completions are sampled whole."""
        return self.asynchrony.partial_tokens if self.asynchrony else None

    @property
    def in_flight_updates(self) -> bool:
        """True if new weights are served while completions are sampled, which go on with them."""
        return self.asynchrony is not None and bool(self.asynchrony.in_flight_updates)

    @property
    def recompute_kv_cache(self) -> bool:
        """True if new weights compute the cache of completions under way again."""
        return self.asynchrony is not None and self.asynchrony.in_flight_updates is True

    @property
    def mixes_policies(self) -> bool:
        """True if the tokens of a rollout may be of several policies."""
        return self.in_flight_updates or self.piece_tokens is not None

    @property
    def inflight_groups_max(self) -> int:
        """Number of groups that are claimed and not yet taken, at most (`windowed`)."""
        chosen = self.asynchrony.bounds.max_inflight_groups if self.asynchrony else None
        return chosen or self.rollouts.groups_per_round * (self.max_staleness + 1)

    @property
    def varies(self) -> bool:
        """True if the number of a round's rollouts does not follow from its number."""
        return self.samples_on or self.windowed

    @property
    def samples_on(self) -> bool:
        """True if further groups are sampled where a round has too few with a signal."""
        return self.asynchrony is not None and self.asynchrony.dynamic_sampling is not None

    @property
    def candidates_per_batch(self) -> int:
        """Number of groups that are sampled for a round at once."""
        groups = self.rollouts.groups_per_round
        return self.asynchrony.candidates(groups) if self.asynchrony else groups

    @property
    def sample_batches_max(self) -> int:
        """Number of times that these groups are sampled for a round at most."""
        return (self.asynchrony and self.asynchrony.dynamic_sampling) or 1

    @property
    def examples_per_round(self) -> int:
        """Number of examples that a round has to itself, sampled or not."""
        return self.candidates_per_batch * self.sample_batches_max

    @property
    def curriculum(self) -> str | None:
        """Rule by which the examples of a round follow from earlier rounds, if they do."""
        return "solve_rate" if self.asynchrony and self.asynchrony.curriculum else None

    @property
    def examples_reserved(self) -> int:
        """Number of examples of an environment that are a round's, chosen or not."""
        return self.examples_per_round * (self.asynchrony.choices if self.asynchrony else 1)

    @property
    def replay(self) -> ReplayConfig | None:
        """Settings of groups that later rounds train on again, if they do."""
        return self.asynchrony.replay if self.asynchrony else None

    @property
    def staleness_rounds_max(self) -> int:
        """Largest age of a rollout that is trained on, in rounds."""
        return max(self.batching.staleness_rounds_max, self.max_staleness)

"""A whole run: every section, and what must fit together across them.

What must fit within a section stands with it.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from marin_rl.config.asynchrony import AsynchronyConfig, ReplayConfig
from marin_rl.config.batching import BatchingConfig, FiltersConfig
from marin_rl.config.estimators import GROUPS_OF_ONE
from marin_rl.config.in_flight import check_endpoints, check_objective
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
from marin_rl.config.training import RewardModelConfig, SFTConfig, TrainingConfig

RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


def _null_if_default(section: AsynchronyConfig | None) -> AsynchronyConfig | None:
    # So that a run which says 0 is the run that says nothing.
    return None if section == AsynchronyConfig() else section


class Config(Section):
    """A whole run: what is trained, on what, how, and for how many rounds."""

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any],
        overrides: Sequence[str] | Mapping[str, Any] = (),
    ) -> "Config":
        """Read a configuration and validate it.

        Args:
            source: a YAML file, or a nested mapping as a YAML file holds it. Files that a mapping
                names are relative to the current folder, those of a YAML file to its own.
            overrides: values by dotted key, `{"training.learning_rate": 1e-4}`, or as the command
                line takes them, `["training.learning_rate=1e-4"]`.

        Raises:
            ConfigError: naming every wrong key, with the nearest known one.
        """
        # By name, for loading.py is built on this module.
        loading = import_module("marin_rl.config.loading")
        changes = loading.as_overrides(overrides)
        load = loading.load_tree if isinstance(source, Mapping) else loading.load_config
        return load(source, changes)

    run_id: str = Field(default="debug", pattern=RUN_ID_PATTERN, description="name of the run")
    root: str = runtime_field(default="runs", description="folder or fsspec URL that holds runs")
    storage_options: dict[str, Any] = runtime_field(
        default={}, description="fsspec options (endpoint, project; never secrets)"
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="root of every random number of the run"
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
        return self.asynchrony is not None and self.asynchrony.sampler == "windowed"

    @property
    def piece_tokens(self) -> int | None:
        """Tokens of a piece of a completion; None where completions are sampled whole."""
        return self.asynchrony.piece_tokens if self.asynchrony else None

    @property
    def in_flight_updates(self) -> bool:
        """True if new weights are served while completions are sampled, which go on with them."""
        return self.asynchrony is not None and bool(self.asynchrony.in_flight_updates)

    @property
    def recompute_kv_cache(self) -> bool:
        """True if new weights compute the cache of completions under way again."""
        chosen = self.asynchrony.recompute_kv_cache if self.asynchrony else None
        return self.in_flight_updates and chosen is None

    @property
    def mixes_policies(self) -> bool:
        """True if the tokens of a rollout may be of several policies."""
        return self.in_flight_updates or self.piece_tokens is not None

    @property
    def inflight_groups_max(self) -> int:
        """Number of groups that are claimed and not yet taken, at most (`windowed`)."""
        chosen = self.asynchrony.max_inflight_groups if self.asynchrony else None
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
        return self.asynchrony.sample_batches_max if self.asynchrony else 1

    @property
    def examples_per_round(self) -> int:
        """Number of examples that a round has to itself, sampled or not."""
        return self.candidates_per_batch * self.sample_batches_max

    @property
    def curriculum(self) -> str | None:
        """Rule by which the examples of a round follow from earlier rounds, if they do."""
        return self.asynchrony.curriculum if self.asynchrony else None

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

    @model_validator(mode="after")
    def _pushed_groups_are_finished(self) -> "Config":
        """Refuse settings of sampling and scoring that pushed groups cannot follow."""
        if self.rollouts.source != "pushed":
            return self
        if self.environment.reward_model is not None:
            raise ValueError(
                "environment.reward_model: groups that are pushed (rollouts.source) have their "
                "scores already; remove it"
            )
        if self.max_staleness:
            raise ValueError(
                f"asynchrony.max_staleness is {self.max_staleness}: environments that push groups "
                "(rollouts.source) are ahead of the rounds by themselves; expected 0"
            )
        return self

    @model_validator(mode="after")
    def _merges_an_adapter(self) -> "Config":
        if self.inference.serve_merged is not None and self.policy.lora is None:
            raise ValueError(
                "inference.serve_merged is about policies with an adapter, and policy.lora is "
                "null: remove it, or set policy.lora.rank"
            )
        return self

    @model_validator(mode="after")
    def _quantised_bases_fit(self) -> "Config":
        """Refuse what would need the base as it was before it was quantised, or cut."""
        scheme, critic = self.policy.quantize_base, self.training.critic
        if scheme is None:
            return self
        if critic is not None and critic.trunk == "own":
            raise ValueError(
                f"training.critic.trunk own with policy.quantize_base {scheme}: a second adapter "
                "on a quantised base is not supported; expected trunk shared, or no critic"
            )
        if self.inference.engine.adapters_max:
            raise ValueError(
                f"inference.engine.adapters_max {self.inference.engine.adapters_max} with "
                f"policy.quantize_base {scheme}: no adapters are loaded next to a quantised base; "
                "expected null, or the run's adapter exported and served with its base as it was "
                "(serve --model FOLDER --adapter)"
            )
        if self.inference.serve_merged is not None:
            raise ValueError(
                f"inference.serve_merged with policy.quantize_base {scheme}: adapters are not "
                "loaded next to a quantised base, and merged it would not be one; leave it out"
            )
        if self.inference.endpoints and self.inference.publish == "lora_adapter":
            raise ValueError(
                f"inference.publish lora_adapter with policy.quantize_base {scheme}: endpoints "
                "apply the adapter to the base as it was, which is another policy than the one "
                "that is trained; expected update_weights_from_disk, or no endpoints"
            )
        if self.mesh.fsdp != 1 or self.mesh.tensor != 1:
            raise ValueError(
                f"policy.quantize_base {scheme} on a mesh: a quantised base is whole on each "
                f"device; expected mesh.fsdp 1 and mesh.tensor 1, found {self.mesh.fsdp} and "
                f"{self.mesh.tensor}"
            )
        return self

    @model_validator(mode="after")
    def _selects_groups(self) -> "Config":
        """Refuse to choose among groups where there is nothing to choose by."""
        if not self.selects_groups:
            return self
        if self.rollouts.source == "pushed":
            raise ValueError(
                "asynchrony.dynamic_sampling, over_sampling_factor and group_filter choose among "
                "groups that the run samples: found rollouts.source pushed; expected null"
            )
        within = self.objective.estimator.within_groups
        if self.samples_on and not (within and self.filters.zero_signal):
            found = f"filters.zero_signal {self.filters.zero_signal}".lower()
            found = found if within else f"objective.advantage {self.objective.advantage}"
            raise ValueError(
                "asynchrony.dynamic_sampling filter samples until enough groups have rewards that "
                "differ: expected an advantage within groups (grpo, rloo, …) and "
                f"filters.zero_signal true, found {found}"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_knows_environments(self) -> "Config":
        if self.curriculum is None:
            return self
        if self.rollouts.source == "pushed":
            raise ValueError(
                f"asynchrony.curriculum {self.curriculum} chooses what the run samples: found "
                "rollouts.source pushed; expected none"
            )
        weights = (self.asynchrony.curriculum_weights if self.asynchrony else None) or {}
        labels = {entry.shown_label for entry in self.environment.mixture or ()}
        for first, of_round in weights.items():
            if not labels or set(of_round) != labels:
                raise ValueError(
                    f"asynchrony.curriculum_weights of round {first}: expected a weight of each "
                    f"environment of a list, {', '.join(sorted(labels)) or 'found no list'}; found "
                    f"{', '.join(sorted(of_round))}"
                )
        return self

    @model_validator(mode="after")
    def _replay_is_within_the_bound(self) -> "Config":
        replay, most = self.replay, self.staleness_rounds_max
        if replay is None:
            return self
        if self.rollouts.source == "pushed":
            raise ValueError(
                "asynchrony.replay uses groups again that the run samples: found rollouts.source "
                "pushed; expected replay null"
            )
        oldest = replay.window_rounds + (0 if self.windowed else self.max_staleness)
        if oldest > most:
            raise ValueError(
                f"asynchrony.replay.window_rounds {replay.window_rounds} would train on groups "
                f"that are {oldest} rounds old, and nothing older than {most} is trained on: set "
                f"batching.staleness_rounds_max={oldest}, or a smaller window"
            )
        return self

    @model_validator(mode="after")
    def _window_holds_a_round(self) -> "Config":
        groups, most = self.rollouts.groups_per_round, self.inflight_groups_max
        if self.windowed and most < groups:
            raise ValueError(
                f"asynchrony.max_inflight_groups is {most}, so that no round would ever have its "
                f"rollouts.groups_per_round ({groups}) groups: expected at least {groups}"
            )
        if self.windowed and self.environment.reward_model is not None:
            raise ValueError(
                "environment.reward_model judges a round's groups together: expected asynchrony."
                "sampler in_order, found windowed"
            )
        return self

    @model_validator(mode="after")
    def _weights_may_change(self) -> "Config":
        if self.in_flight_updates:
            check_objective(self.objective)
            check_endpoints(self.inference)
        return self

    @model_validator(mode="after")
    def _pieces_can_be_joined(self) -> "Config":
        if self.piece_tokens is not None and self.rollouts.source == "pushed":
            raise ValueError(
                "asynchrony.partial_rollout keeps what the run samples: found rollouts.source "
                "pushed; expected false"
            )
        return self

    @model_validator(mode="after")
    def _samples_ahead(self) -> "Config":
        """Refuse what cannot be sampled by an older checkpoint than the latest."""
        ahead, kept = self.max_staleness, self.retention.checkpoints_last
        if ahead and kept is not None and kept <= ahead:
            raise ValueError(
                f"retention.checkpoints_last is {kept}, but asynchrony.max_staleness {ahead} "
                f"samples with checkpoints that old: expected at least {ahead + 1}"
            )
        refuses = self.asynchrony is not None and self.asynchrony.shared_device == "refuse"
        if refuses and not self.inference.endpoints:
            raise ValueError(
                f"asynchrony.max_staleness is {ahead}, but the embedded engine samples on the "
                "device that trains, and asynchrony.shared_device is refuse: expected "
                "inference.endpoints (`marin-rl serve` on other devices), shared_device "
                "time_sliced, or max_staleness 0"
            )
        if ahead and self.inference.endpoints and self.inference.publish == "none":
            raise ValueError(
                f"asynchrony.max_staleness is {ahead}, but inference.publish none leaves it to the "
                "endpoints which checkpoint they serve: set inference.publish to "
                "update_weights_from_disk or pull, so that they keep one until a round is sampled"
            )
        return self

    @model_validator(mode="after")
    def _other_machines_reach_the_policy(self) -> "Config":
        if self.flow.runner != "local" and not self.inference.endpoints:
            raise ValueError(
                f"flow.runner is {self.flow.runner}, but inference.endpoints is empty: the "
                "embedded engine answers this process alone; expected endpoints, such as registered"
            )
        if self.flow.runner == "root" and (reason := self.without_root_workers):
            raise ValueError(f"flow.runner root: {reason}")
        return self

    @property
    def without_root_workers(self) -> str:
        """Reason why `marin-rl sample` cannot sample for this run; empty where it can."""
        if not self.windowed:
            return (
                "workers that have the root alone sample a window of groups: expected "
                "asynchrony.sampler windowed, found in_order"
            )
        if not self.inference.has_fleet or self.inference.publish == "vllm_reload":
            return (
                "workers that have the root alone prove each endpoint by its exact model id and "
                "the trainer's canary: expected inference.publish pull (endpoints such as "
                "registered), or a fleet that is sent weights under a name for each version; found "
                f"publish {self.inference.publish} and endpoints "
                f"{', '.join(self.inference.endpoints) or 'none'}"
            )
        return ""

    @model_validator(mode="after")
    def _lengths_fit(self) -> "Config":
        sampled = self.reward_model is None  # nothing is sampled to train a reward model
        if sampled and self.sampling.max_tokens >= self.policy.context_length:
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
        if self.sft.environment is not None and self.sft.environment.reward_model is not None:
            raise ValueError("sft.environment.reward_model: a warm start scores nothing; remove it")
        self._lists_fit()
        row = self.batching.row_tokens
        if self.batching.packing != "none" and row is not None and row < self.policy.context_length:
            raise ValueError(
                f"batching.row_tokens is {row}: a row must hold policy.context_length "
                f"({self.policy.context_length})"
            )
        return self

    def _lists_fit(self) -> None:
        """Refuse lists of environments where one is expected, and limits above the run's."""
        others = {"sft.environment": self.sft.environment}
        others |= {f"evaluation.sets.{n}": e for n, e in (self.evaluation.sets or {}).items()}
        for key, chosen in others.items():
            if chosen is not None and chosen.mixture is not None:
                raise ValueError(f"{key}: expected one environment, found a list")
        for place, entry in enumerate(self.environment.mixture or ()):
            own = entry.sampling and entry.sampling.max_tokens
            if own and own > self.sampling.max_tokens:
                raise ValueError(
                    f"environment.{place}.sampling.max_tokens ({own}) is above sampling.max_tokens "
                    f"({self.sampling.max_tokens}), the limit of the run: raise that"
                )

    @model_validator(mode="after")
    def _critic_and_groups(self) -> "Config":
        estimator, rollouts = self.objective.estimator, self.rollouts
        if estimator.needs_critic and self.training.critic is None:
            raise ValueError(
                f"objective.advantage {estimator.name} needs a critic: expected training.critic, "
                "found null (the recipe ppo sets both)"
            )
        if self.training.critic is not None and not estimator.needs_critic:
            raise ValueError(
                "training.critic is for objective.advantage gae: found "
                f"{self.objective.advantage}, which would not look at its values"
            )
        if estimator.within_groups and min(rollouts.group_size, rollouts.group_size_min) < 2:
            raise ValueError(
                "rollouts.group_size and group_size_min are at least 2, for a baseline of the "
                f"group needs others: found {rollouts.group_size} and {rollouts.group_size_min}; 1 "
                f"needs objective.advantage {', '.join(GROUPS_OF_ONE)}"
            )
        self._greedy_goes_together()
        k = self.objective.pass_k
        if "k" in estimator.inputs and k >= rollouts.group_size:
            raise ValueError(
                f"objective.pass_k is {k} and rollouts.group_size {rollouts.group_size}: the best "
                "of k tells members of a group apart only where k is less than there are of them"
            )
        return self

    def _greedy_goes_together(self) -> None:
        needs, greedy = "greedy_G" in self.objective.estimator.inputs, self.rollouts.greedy_baseline
        if needs != bool(greedy):
            raise ValueError(
                "objective.advantage remax and rollouts.greedy_baseline true need each other: "
                f"found {self.objective.advantage} and {'true' if greedy else 'null'}"
            )
        if greedy and self.sampling.temperature == 0:
            raise ValueError(
                "rollouts.greedy_baseline with sampling.temperature 0: every completion would be "
                "the baseline itself; expected a temperature above 0"
            )

    @model_validator(mode="after")
    def _kl_is_of_all_tokens(self) -> "Config":
        """Refuse KL in the reward under narrowed sampling: the two distributions would differ in
        support.
        """
        sampling = self.sampling
        if sampling.narrowed and self.objective.kl_in_reward:
            raise ValueError(
                f"sampling.top_p {sampling.top_p:g} and top_k {sampling.top_k} with "
                "objective.kl_placement reward: the sampler's log-probabilities are those of the "
                "tokens that these leave, the reference's of all tokens, so a policy that is the "
                "reference itself would lose reward for every token. Set kl_placement to loss, or "
                "sample with top_p 1 and top_k 0"
            )
        return self

    @model_validator(mode="after")
    def _ratio_is_near_one(self) -> "Config":
        """Refuse objectives whose importance ratios do not match the freshness of their samples."""
        objective, sampling = self.objective, self.sampling
        if objective.importance_correction != "none":
            return self
        if sampling.narrowed and objective.surrogate != "reinforce":
            raise ValueError(
                f"sampling.top_p {sampling.top_p:g} and top_k {sampling.top_k} with "
                "objective.importance_correction none: log-probabilities are those of the tokens "
                "that these leave, the trainer's of all tokens, so ratios are far from 1 before "
                "the first update. Set importance_correction to truncated or masked, whose ratio "
                "is the trainer's own, or sample with top_p 1 and top_k 0"
            )
        stale, ahead = self.staleness_rounds_max, self.max_staleness
        if stale and objective.surrogate == "reinforce":
            key = "asynchrony.max_staleness" if ahead else "batching.staleness_rounds_max"
            raise ValueError(
                f"{key} is {stale}, but objective.surrogate reinforce takes every rollout for one "
                "of the policy that it updates: set objective.importance_correction to truncated "
                "or masked, or choose a surrogate with a ratio (ppo_clip, say)"
            )
        return self

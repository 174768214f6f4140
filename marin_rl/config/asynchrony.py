"""Settings of what is sampled for a round, by which policy, and what of it the round takes.

Leaves out the machines that sample (serving.py, orchestration.py). Every key but `max_staleness` is
null by default and then leaves no trace; the names of defaults (`none`, `index`, …) stand for null.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator

from marin_rl.config.section import (
    Count,
    Seconds,
    Section,
    optional_field,
)
from marin_rl.user_code import parse_spec

# Filters of groups by name, with the least score that passes; None: it must be configured.
GROUP_FILTERS: Mapping[str, float | None] = MappingProxyType(
    {
        "reward_std_nonzero": 0.0,
        "min_reward": None,
        "diversity": 0.5,
        "reasonable_length": 0.5,
        "quality_and_diversity": -math.inf,
    }
)
SAMPLE_BATCHES_MAX = 10

CLAIM_S = 3600.0  # of a claim on groups, by the clock of who reads it
PARTIAL_TOKENS = 1024  # of a piece of a completion

# Examples that a curriculum chooses each one of a round from, so that it can leave some out.
CURRICULUM_CHOICES = 4
CURRICULUM_WINDOW_ROUNDS = 8

_SPELLED = {
    "curriculum": "none", "dynamic_sampling": "none", "in_flight_updates": False,
    "over_staleness": "drop", "partial_rollout": False, "recompute_kv_cache": True,
    "sampler": "in_order", "select": "index",
    "shared_device": "time_sliced",
}  # fmt: skip

# Keys that say more of another one, its mode that they need, and what it is by default.
_SETTINGS_OF = {
    "max_sample_batches": ("dynamic_sampling", "filter", "none"),
    "recompute_kv_cache": ("in_flight_updates", "true", "false"),
    "partial_tokens": ("partial_rollout", "true", "false"),
    "curriculum_window_rounds": ("curriculum", "solve_rate", "none"),
    "shared_device": ("max_staleness", "of 1 to 8", "0"),
    "over_staleness": ("sampler", "windowed", "in_order"),
    "max_inflight_groups": ("sampler", "windowed", "in_order"),
    "claim_s": ("sampler", "windowed", "in_order"),
    "commit_every_s": ("sampler", "windowed", "in_order"),
}


class ReplayConfig(Section):
    """Groups that later rounds train on again."""

    max_uses: int = Field(
        default=2, ge=2, le=64, description="rounds that train on a group, its own among them"
    )
    window_rounds: int = Field(
        default=1,
        ge=1,
        le=64,
        description="rounds after its own that may train on a group, within the bound of staleness",
    )
    groups: Count | None = optional_field(
        description="groups that a round trains on again, at most; null: rollouts.groups_per_round"
    )
    select: Literal["by_group", "prioritised"] | None = optional_field(
        description="order in which groups are used again: null or newest, those of the latest "
        "rounds first; by_group, those with the fewest uses first; prioritised, those with the "
        "largest mean absolute advantage first"
    )

    @model_validator(mode="before")
    @classmethod
    def _newest_by_name(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("select") == "newest":
            return {**value, "select": None}
        return value


class AsynchronyConfig(Section):
    """Sampling of rounds during the training of earlier ones, and of more groups than are taken."""

    max_staleness: int = Field(
        default=0,
        ge=0,
        le=8,
        description="round r is sampled by checkpoint max(0, r - max_staleness), while earlier "
        "rounds are trained; 0: sampling and training alternate",
    )
    shared_device: Literal["refuse"] | None = optional_field(
        runtime_only=True,
        description="max_staleness with the embedded engine, which samples on the device that "
        "trains: null or time_sliced, they take it in turn; refuse, the run is refused",
    )
    sampler: Literal["windowed"] | None = optional_field(
        description="null or in_order: the policy of a round follows from its number; windowed: "
        "groups are sampled by the latest policy and committed as they end, and an intake record "
        "names what each round takes of them"
    )
    over_staleness: Literal["wait"] | None = optional_field(
        description="windowed: null or drop, a round takes what is finished, and groups that get "
        "older than max_staleness are dropped as stale; wait, it waits for groups under way that "
        "would be too old for the next round"
    )
    max_inflight_groups: Count | None = optional_field(
        runtime_only=True,
        description="windowed: groups that are sampled or being sampled and not yet taken; at "
        "least rollouts.groups_per_round. null: groups_per_round * (max_staleness + 1)",
    )
    claim_s: Seconds | None = optional_field(
        runtime_only=True,
        description="windowed: seconds after which another worker samples groups that one claimed "
        "and did not finish; null: 3600",
    )
    commit_every_s: Seconds | None = optional_field(
        runtime_only=True,
        description="windowed: groups of a chunk that end within this time are committed as "
        "one object, which a killed worker loses with those under way; null: a group is committed "
        "as soon as it ends",
    )
    in_flight_updates: Literal[True] | None = optional_field(
        description="windowed: true, a new checkpoint is served while completions are sampled, "
        "which go on with it, and each token has the version of its policy; null or false: what is "
        "under way is finished first"
    )
    recompute_kv_cache: Literal[False] | None = optional_field(
        description="in_flight_updates: null or true, the new weights compute the cache of "
        "completions under way again; false, they go on over what the old ones left, and tokens "
        "are of no single policy's forward"
    )
    partial_rollout: Literal[True] | None = optional_field(
        description="true: completions are sampled in pieces of partial_tokens tokens, and the "
        "pieces of unfinished ones are kept: a process that starts again goes on with them, and "
        "with sampler windowed the next policy does, as soon as it is there. null or false: a "
        "completion is finished by the policy that began it"
    )
    partial_tokens: Count | None = optional_field(
        le=1_000_000,
        description="partial_rollout: tokens of a piece, at whose end a completion may be "
        f"interrupted; null: {PARTIAL_TOKENS}",
    )
    dynamic_sampling: Literal["filter"] | None = optional_field(
        description="filter: further groups are sampled until a round has "
        "rollouts.groups_per_round of them whose rewards differ (DAPO); null or none: a round "
        "trains on what is left of its groups"
    )
    max_sample_batches: Count | None = optional_field(
        le=1000,
        description="dynamic_sampling: batches of rollouts.groups_per_round groups that are "
        f"sampled at most; then the round is short. null: {SAMPLE_BATCHES_MAX}",
    )
    over_sampling_factor: float | None = optional_field(
        gt=1,
        le=64,
        description="groups that are sampled for each one that the round takes, rounded up; "
        "null: 1",
    )
    select: Literal["first_done"] | None = optional_field(
        description="groups that a round takes of those that pass: null or index, the first by "
        "number; first_done, those that were finished first, the others are cancelled"
    )
    group_filter: str | None = optional_field(
        min_length=1,
        description=f"score of a group: {', '.join(GROUP_FILTERS)}, or FILE.py:function; groups "
        "below group_filter_min are not trained on; null: every group passes",
    )
    group_filter_min: float | None = optional_field(
        description="least score of a group that passes; null: the filter's own (docs)"
    )

    curriculum: Literal["solve_rate"] | None = optional_field(
        description="solve_rate: environments whose groups are solved in part are sampled more, "
        "examples that were always or never solved less, by the rounds that are trained; null "
        "or none: as environment says"
    )
    curriculum_window_rounds: Count | None = optional_field(
        description="solve_rate: trained rounds that solve rates are of; null: "
        f"{CURRICULUM_WINDOW_ROUNDS}"
    )
    replay: ReplayConfig | None = optional_field(
        description="groups that later rounds train on again; null: a group is trained on in one "
        "round"
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_name(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {k: None if v is not None and _SPELLED.get(k) == v else v for k, v in value.items()}

    @model_validator(mode="after")
    def _keys_go_together(self) -> "AsynchronyConfig":
        for name, (key, mode, default) in _SETTINGS_OF.items():
            value = getattr(self, name)
            if value is not None and not getattr(self, key):
                raise ValueError(
                    f"{name} is {str(value).lower()}, a setting of {key} {mode}: expected {key} "
                    f"{mode}, found {default}"
                )
        if self.select is not None and not (self.over_sampling_factor or self.dynamic_sampling):
            raise ValueError(
                f"select {self.select} chooses among more groups than a round takes: set "
                "over_sampling_factor (1.5, say) or dynamic_sampling filter"
            )
        self._check_filter()
        self._check_window()
        if self.partial_rollout and self.select == "first_done":
            raise ValueError(
                "partial_rollout with select first_done: what a round cancels belongs to its own "
                "examples, and no later round goes on with it; expected sampler windowed, whose "
                "groups belong to no round until they are finished, or partial_rollout false"
            )
        return self

    def _check_window(self) -> None:
        if self.sampler is None:
            if self.in_flight_updates:
                raise ValueError(
                    "in_flight_updates with sampler in_order: there the policy of a round follows "
                    "from its number, and here from the moment at which a checkpoint comes; "
                    "expected sampler windowed, or in_flight_updates false"
                )
            return
        if self.max_staleness == 0:
            raise ValueError(
                "sampler windowed takes groups of earlier policies: expected max_staleness of 1 to "
                "8, found 0"
            )
        if self.over_sampling_factor or self.select:
            raise ValueError(
                "sampler windowed takes the oldest finished groups: expected "
                "over_sampling_factor null and select index, found "
                f"{self.over_sampling_factor} and {self.select or 'index'}"
            )
        if self.curriculum is not None:
            raise ValueError(
                f"curriculum {self.curriculum} is decided once a round, and groups of sampler "
                "windowed belong to none when they are sampled: expected sampler in_order, which "
                "max_staleness overlaps with training too"
            )

    def _check_filter(self) -> None:
        name, least = self.group_filter, self.group_filter_min
        known = ", ".join(GROUP_FILTERS)
        if name is None:
            if least is not None:
                raise ValueError(
                    f"group_filter_min is {least:g}, the least score of group_filter: found null "
                    f"there; expected one of {known}, or FILE.py:function"
                )
        elif name not in GROUP_FILTERS and parse_spec(name) is None:
            raise ValueError(
                f"group_filter {name!r} is not known: expected one of {known}, or FILE.py:function"
            )
        elif least is None and GROUP_FILTERS.get(name, 0.0) is None:
            raise ValueError(f"group_filter {name} needs group_filter_min: found null")

    @property
    def piece_tokens(self) -> int | None:
        """Tokens of a piece of a completion; None where completions are sampled whole."""
        return self.partial_tokens or PARTIAL_TOKENS if self.partial_rollout else None

    @property
    def curriculum_window(self) -> int:
        """Number of trained rounds that solve rates are of."""
        return self.curriculum_window_rounds or CURRICULUM_WINDOW_ROUNDS

    @property
    def choices(self) -> int:
        """Number of examples that each one of a round is chosen from."""
        return CURRICULUM_CHOICES if self.curriculum else 1

    @property
    def selects_groups(self) -> bool:
        """True if a round may take fewer groups than are sampled for it."""
        return any((self.dynamic_sampling, self.over_sampling_factor, self.group_filter))

    @property
    def sample_batches_max(self) -> int:
        """Number of times that a round's groups are sampled at most."""
        if self.dynamic_sampling is None:
            return 1
        return self.max_sample_batches or SAMPLE_BATCHES_MAX

    @property
    def seconds_of_claims(self) -> float:
        """Seconds for which groups are left to the worker that claimed them."""
        return self.claim_s or CLAIM_S

    def candidates(self, groups: int) -> int:
        """Number of groups in a sample batch of a round that takes `groups` of them."""
        return math.ceil(groups * Fraction(str(self.over_sampling_factor or 1)))

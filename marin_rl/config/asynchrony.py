"""Settings of what is sampled for a round, by which policy, and what of it the round takes.

Leaves out the machines that sample (serving.py, orchestration.py). Every key but `max_staleness` is
null by default and then leaves no trace; the names of defaults (`none`, `index`, …) stand for null.
Runs of older versions recorded other keys: `of_older_version`.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from marin_rl.config.section import Count, Seconds, Section, field, null_if, optional_field
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


def _names(of: Mapping[Any, Any]) -> BeforeValidator:
    """Names of values; False and True may be among them, and 0 and 1 stay numbers."""

    def value(given: Any) -> Any:
        return of[given] if isinstance(given, str | bool) and given in of else given

    return BeforeValidator(value)


SharedDevice = Annotated[Literal["refuse"] | None, _names({"time_sliced": None})]
ReplayOrder = Annotated[Literal["by_group", "prioritised"] | None, _names({"newest": None})]
Sampler = Annotated[Literal["windowed", "windowed_wait"] | None, _names({"in_order": None})]
InFlight = Annotated[Literal[True, "keep_kv_cache"] | None, _names({False: None})]
PieceTokens = Annotated[Count | None, _names({False: None, True: PARTIAL_TOKENS})]
Batches = Annotated[Count | None, _names({"none": None, "filter": SAMPLE_BATCHES_MAX})]
CurriculumWindow = Annotated[
    Count | None, _names({"none": None, "solve_rate": CURRICULUM_WINDOW_ROUNDS})
]


def of_older_version(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The section as it is now, from the keys that a run of an older version recorded."""
    tree = dict(recorded)

    def taken(name: str) -> Any:
        return tree.pop(name, None)

    modes = {
        "sampler": "windowed_wait" if taken("over_staleness") == "wait" else None,
        "in_flight_updates": "keep_kv_cache" if taken("recompute_kv_cache") is False else None,
        "partial_tokens": taken("partial_tokens") or taken("partial_rollout"),
        "dynamic_sampling": taken("max_sample_batches"),
        "curriculum": taken("curriculum_window_rounds"),
        "over_sampling": _said(factor=taken("over_sampling_factor"), select=taken("select")),
    }
    taken("partial_rollout")
    least = taken("group_filter_min")
    if isinstance(tree.get("group_filter"), str):
        tree["group_filter"] = _said(score=tree["group_filter"], min=least)
    limits = {name: taken(name) for name in LimitsConfig.model_fields}
    modes["limits"] = _said(**(limits | (taken("limits") or {})))
    return tree | _said(**modes)


def _said(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {})}


class OverSamplingConfig(Section):
    """Groups of which a round takes some."""

    factor: float | None = optional_field(
        "groups that are sampled for each one that the round takes, rounded up; null: 1",
        gt=1,
        le=64,
    )
    select: Annotated[Literal["first_done"] | None, _names({"index": None})] = optional_field(
        "groups that a round takes of those that pass: null or index, the first by number; "
        "first_done, those that were finished first, the others are cancelled"
    )

    @model_validator(mode="before")
    @classmethod
    def _factor_alone(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping | OverSamplingConfig) else {"factor": value}


class GroupFilterConfig(Section):
    """Groups that are trained on, by a score of each."""

    score: str = Field(
        min_length=1,
        description=f"score of a group: {', '.join(GROUP_FILTERS)}, or FILE.py:function",
    )
    min: float | None = optional_field(
        "least score of a group that passes; null: the score's own (docs)"
    )

    @model_validator(mode="before")
    @classmethod
    def _score_alone(cls, value: Any) -> Any:
        return {"score": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_known(self) -> "GroupFilterConfig":
        if self.score not in GROUP_FILTERS and parse_spec(self.score) is None:
            raise ValueError(
                f"score {self.score!r} is not known: expected one of {', '.join(GROUP_FILTERS)}, "
                "or FILE.py:function"
            )
        if self.min is None and GROUP_FILTERS.get(self.score, 0.0) is None:
            raise ValueError(f"score {self.score} needs min, the least that passes: found null")
        return self


class LimitsConfig(Section):
    """Bounds and times of sampling ahead, which change no group."""

    max_inflight_groups: Count | None = optional_field(
        "windowed: groups that are sampled or being sampled and not yet taken; at least "
        "rollouts.groups_per_round. null: groups_per_round * (max_staleness + 1)",
        runtime_only=True,
    )
    claim_s: Seconds | None = optional_field(
        "windowed: seconds after which another worker samples groups that one claimed "
        "and did not finish; null: 3600",
        runtime_only=True,
    )
    commit_every_s: Seconds | None = optional_field(
        "windowed: groups of a chunk that end within this time are committed as one object, which "
        "a killed worker loses with those under way; null: a group is committed as soon as it ends",
        runtime_only=True,
    )
    shared_device: SharedDevice = optional_field(
        "max_staleness with the embedded engine, which samples on the device that "
        "trains: null or time_sliced, they take it in turn; refuse, the run is refused",
        runtime_only=True,
    )


class ReplayConfig(Section):
    """Groups that later rounds train on again."""

    max_uses: int = field(2, "rounds that train on a group, its own among them", ge=2, le=64)
    window_rounds: int = field(
        1,
        "rounds after its own that may train on a group, within the bound of staleness",
        ge=1,
        le=64,
    )
    groups: Count | None = optional_field(
        "groups that a round trains on again, at most; null: rollouts.groups_per_round"
    )
    select: ReplayOrder = optional_field(
        "order in which groups are used again: null or newest, those of the latest rounds first; "
        "by_group, those with the fewest uses first; prioritised, those with the largest mean "
        "absolute advantage first"
    )


class AsynchronyConfig(Section):
    """Sampling of rounds during the training of earlier ones, and of more groups than are taken."""

    max_staleness: int = field(
        0,
        "round r is sampled by checkpoint max(0, r - max_staleness), while earlier rounds are "
        "trained; 0: sampling and training alternate",
        ge=0,
        le=8,
    )
    sampler: Sampler = optional_field(
        "null or in_order: the policy of a round follows from its number; windowed: groups are "
        "sampled by the latest policy and committed as they end, and an intake record names what "
        "each round takes of them: what is finished, without groups that got older than "
        "max_staleness; windowed_wait: a round also waits for groups under way that would be too "
        "old for the next round"
    )
    in_flight_updates: InFlight = optional_field(
        "windowed: true, a new checkpoint is served while completions are sampled, which go on "
        "with it, and each token has the version of its policy: the new weights compute the "
        "cache of completions under way again; keep_kv_cache, they go on over what the old ones "
        "left, and tokens are of no single policy's forward; null or false: what is under way is "
        "finished first"
    )
    partial_tokens: PieceTokens = optional_field(
        "completions are sampled in pieces of so many tokens, and the pieces of unfinished ones "
        "are kept: a process that starts again goes on with them, and with sampler windowed the "
        f"next policy does, as soon as it is there; true: {PARTIAL_TOKENS}. null or false: a "
        "completion is finished by the policy that began it",
        le=1_000_000,
    )
    dynamic_sampling: Batches = optional_field(
        "further groups are sampled until a round has rollouts.groups_per_round of them whose "
        "rewards differ (DAPO), in so many batches of groups_per_round groups at most; filter: "
        f"{SAMPLE_BATCHES_MAX}. null or none: a round trains on what is left of its groups",
        le=1000,
    )
    over_sampling: Annotated[OverSamplingConfig | None, null_if(OverSamplingConfig())] = (
        optional_field(
            "groups that are sampled for a round of which it takes some; a number is the factor; "
            "null: a round takes what it samples"
        )
    )
    group_filter: GroupFilterConfig | None = optional_field(
        "groups below the least score are not trained on; a name is the score; null: every group "
        "passes"
    )
    curriculum: CurriculumWindow = optional_field(
        "environments whose groups are solved in part are sampled more, examples that were "
        "always or never solved less, by the solve rates of so many trained rounds; solve_rate: "
        f"{CURRICULUM_WINDOW_ROUNDS}; null or none: as environment says"
    )
    replay: ReplayConfig | None = optional_field(
        "groups that later rounds train on again; null: a group is trained on in one round"
    )
    limits: Annotated[LimitsConfig | None, null_if(LimitsConfig())] = optional_field(
        "bounds and times, which may change when a run is continued; null: defaults"
    )

    @model_validator(mode="after")
    def _keys_go_together(self) -> "AsynchronyConfig":
        limits = self.bounds
        if limits.shared_device is not None and not self.max_staleness:
            raise ValueError(
                f"limits.shared_device is {limits.shared_device}, a setting of sampling ahead: "
                "expected max_staleness of 1 to 8, found 0"
            )
        if self.select is not None and not (self.over_sampling_factor or self.dynamic_sampling):
            raise ValueError(
                f"over_sampling.select {self.select} chooses among more groups than a round takes: "
                "set over_sampling.factor (1.5, say) or dynamic_sampling filter"
            )
        if self.partial_tokens and self.select == "first_done":
            raise ValueError(
                "partial_tokens with over_sampling.select first_done: what a round cancels belongs "
                "to its own examples, and no later round goes on with it; expected sampler "
                "windowed, whose groups belong to no round until they are finished, or "
                "partial_tokens null"
            )
        if self.sampler is None:
            for name in ("max_inflight_groups", "claim_s", "commit_every_s"):
                if (value := getattr(limits, name)) is not None:
                    raise ValueError(
                        f"limits.{name} is {value}, a setting of sampler windowed: expected "
                        "sampler windowed, found in_order"
                    )
            if self.in_flight_updates:
                raise ValueError(
                    "in_flight_updates with sampler in_order: there the policy of a round follows "
                    "from its number, and here from the moment at which a checkpoint comes; "
                    "expected sampler windowed, or in_flight_updates false"
                )
        else:
            self._check_window()
        return self

    def _check_window(self) -> None:
        if self.max_staleness == 0:
            raise ValueError(
                f"sampler {self.sampler} takes groups of earlier policies: expected max_staleness "
                "of 1 to 8, found 0"
            )
        if self.over_sampling is not None:
            raise ValueError(
                f"sampler {self.sampler} takes the oldest finished groups: expected over_sampling "
                f"null, found {self.over_sampling.model_dump()}"
            )
        if self.curriculum is not None:
            raise ValueError(
                f"curriculum is decided once a round, and groups of sampler {self.sampler} belong "
                "to none when they are sampled: expected sampler in_order, which max_staleness "
                "overlaps with training too"
            )

    @property
    def bounds(self) -> LimitsConfig:
        return self.limits or LimitsConfig()

    @property
    def over_sampling_factor(self) -> float | None:
        return self.over_sampling.factor if self.over_sampling else None

    @property
    def select(self) -> Literal["first_done"] | None:
        return self.over_sampling.select if self.over_sampling else None

    @property
    def choices(self) -> int:
        return CURRICULUM_CHOICES if self.curriculum else 1

    @property
    def selects_groups(self) -> bool:
        return any((self.dynamic_sampling, self.over_sampling_factor, self.group_filter))

    @property
    def seconds_of_claims(self) -> float:
        """Seconds for which groups are left to the worker that claimed them."""
        return self.bounds.claim_s or CLAIM_S

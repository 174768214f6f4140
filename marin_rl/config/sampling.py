"""Sampling: an environment and its rewards, sampling parameters, rollouts per round.

Leaves out where completions come from (serving.py) and what is evaluated (orchestration.py).
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from marin_rl.config.section import (
    Count,
    Seconds,
    Section,
    SetName,
    TemplateOptions,
    field,
    optional_field,
    runtime_field,
)

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class LearnedRewardConfig(Section):
    """A trained reward model as a component of the reward (docs/reward-models.md)."""

    checkpoint: str = Field(
        description="checkpoint of the reward model: ROOT/RUN_ID/reward_model/step-00200"
    )
    name: str = field(
        "reward_model", "name of the component", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
    )
    weight: float = field(1.0, "weight of the component in the reward")
    environment_weight: float = field(
        1.0, "factor of the environment's own weights; 0: only record them"
    )
    normalise: bool = field(
        True,
        "subtract the mean reward of the answers in its pairs and divide by their standard "
        "deviation",
    )
    offset: float = field(0.0, "added to the reward after normalising")
    clip: float | None = field(
        None, "bound of the absolute value, applied last; null: no bound", gt=0, le=1e6
    )


RowNumber = Annotated[int, Field(ge=0)]


def _mode_or_rows(value: Any) -> Any:
    """One error for a value that is neither: pydantic has one for each of the two."""
    rows = isinstance(value, list | tuple) and all(
        type(each) is int and each >= 0 for each in value
    )
    if value not in (None, "refuse", "drop") and not rows:
        raise ValueError("expected refuse, drop, or a list of row numbers from 0 on")
    return value


class EnvironmentConfig(Section):
    """An environment by its registered name, with options of its own."""

    name: str = field(
        "echo",
        "chat, code, echo, game, gymnasium, judge, math, openenv, python, reasoning_gym, "
        "repository, suite, textarena, verifiers, FILE.py:Class, or another registered name",
    )
    options: dict[str, Any] = field(
        {}, "options of the environment, listed at the end of this page"
    )
    train_seed: int = field(0, "base seed of training examples", ge=0, lt=2**63)
    eval_seed: int = field(1_000_000_000, "base seed of held-out examples", ge=0, lt=2**63)
    reward_timeout_s: Seconds = field(10.0, "seconds for scoring one rollout")
    reward_memory_bytes_max: int = runtime_field(
        8 * 2**30,
        "memory limit of a scoring process, in bytes; a rollout that exceeds it fails",
        ge=256 * 2**20,
        le=2**50,
    )
    pass_environment: tuple[VariableName, ...] = runtime_field(
        (),
        "names of environment variables that scoring may see, such as a judge's key",
        max_length=64,
    )
    chat_template_options: TemplateOptions | None = optional_field(
        "values of variables that the chat template reads, for the prompts of this environment; "
        "they win over policy.chat_template_options"
    )
    long_prompts: Annotated[
        Literal["refuse", "drop"] | tuple[RowNumber, ...] | None, BeforeValidator(_mode_or_rows)
    ] = optional_field(
        as_begun="drop",
        description="rows of a file whose prompts leave no room for sampling.max_tokens in "
        "policy.context_length. refuse: the run does not start; drop: they are left out, of "
        "training and of evaluation, and run.json has their numbers (from 0), which may be given "
        "too; null: refuse",
    )
    turns_max: Count | None = optional_field(
        "turns of the model after which an episode is ended; null: 64", le=10_000
    )
    tool_output_characters_max: Count | None = optional_field(
        "characters of a tool's result that the model reads, cut after a whole token; null: 16384",
        le=10_000_000,
    )
    tool_output_tokens_max: Count | None = optional_field(
        "tokens of a tool's result that the model reads; null: no limit but characters",
        le=10_000_000,
    )
    tokens_max: Count | None = optional_field(
        "tokens in all, prompts included, after which an episode is ended; null: no limit but "
        "policy.context_length, which is that of a segment",
        le=100_000_000,
    )
    on_broken_prefix: Literal["end", "segments"] | None = optional_field(
        "where the chat template writes earlier turns of an episode differently once it goes on "
        "(without their reasoning, say). end: the episode ends with stop reason `bridge`; "
        "segments: it goes on in a new segment with a prompt of its own, which is trained as a "
        "row of its own, and so is such an answer of a warm start; null: end"
    )
    step_timeout_s: Seconds | None = optional_field(
        "seconds for each start, step and close of an episode; null: reward_timeout_s"
    )
    reward_model: LearnedRewardConfig | None = optional_field(
        "a trained reward model whose score is added to the reward; null: none"
    )
    mixture: "tuple[MixtureEntry, ...] | None" = optional_field(
        "several environments in one run; `environment` may also be this list itself "
        "(docs/your-environment.md)",
        max_length=64,
    )

    @model_validator(mode="before")
    @classmethod
    def _list_is_a_mixture(cls, value: Any) -> Any:
        return as_mixture(value)

    @model_validator(mode="after")
    def _mixture_alone(self) -> "EnvironmentConfig":
        if (self.name == MIXTURE) != (self.mixture is not None):
            raise ValueError(f"expected a list of environments with the name {MIXTURE} only")
        if self.mixture is None:
            return self
        if wrong := sorted(_changed(self) - _OF_MIXTURES):
            raise ValueError(
                f"{', '.join(wrong)}: every environment of a list has its own; set it there"
            )
        _check_entries(self.mixture)
        return self


class EntrySampling(Section):
    """Limits of sampling of one environment of several; null: those of `sampling`."""

    max_tokens: Count | None = optional_field(
        "new tokens per completion, at most sampling.max_tokens"
    )
    stop: tuple[str, ...] | None = optional_field("strings that end a completion", max_length=16)

    @model_validator(mode="before")
    @classmethod
    def _one_distribution(cls, value: Any) -> Any:
        shared = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = [name for name in shared if name in value]
        if found:
            raise ValueError(
                f"{', '.join(found)}: the trainer's log-probabilities are at one temperature, so "
                "all environments of a run share it; set sampling."
                f"{found[0]}. An environment of a list may set max_tokens and stop"
            )
        return value


class MixtureEntry(EnvironmentConfig):
    """One of several environments of a run: its share of the groups, and its own limits."""

    weight: float = field(1.0, "share of the groups", gt=0, le=10_000)
    label: SetName | None = optional_field(
        "name in rollouts and metrics; null: the environment's own"
    )
    sampling: EntrySampling | None = optional_field("limits of its own")

    @property
    def shown_label(self) -> str:
        """The name of its rollouts and metrics: the label, else that of the environment."""
        return self.label or self.name.partition("#")[0].rpartition(":")[2]


MIXTURE = "mixture"
CYCLE_MAX = 10_000  # groups after which the order of the environments repeats
# What holds for all environments of a list together.
_OF_MIXTURES = frozenset(
    ("name", "mixture", "reward_model", "pass_environment", "reward_memory_bytes_max")
)


def as_mixture(value: Any) -> Any:
    """Return a list of environments as the section that holds it; anything else as it is."""
    if isinstance(value, list | tuple):
        return {"name": MIXTURE, "mixture": list(value)}
    if isinstance(value, dict) and value.get("mixture") is not None:
        return {"name": MIXTURE, **value}
    return value


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Smallest whole numbers of the same ratio. ValueError for a sum above CYCLE_MAX."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    common = math.gcd(*counts)
    counts = [count // common for count in counts]
    if sum(counts) > CYCLE_MAX:
        raise ValueError(
            f"weights {', '.join(f'{weight:g}' for weight in weights)}: expected a ratio of whole "
            f"numbers that add up to {CYCLE_MAX} at most, found {sum(counts)}; write 1 and 2 in "
            "place of 0.333 and 0.667"
        )
    return tuple(counts)


def _changed(config: EnvironmentConfig) -> set[str]:
    fields = EnvironmentConfig.model_fields.items()
    return {name for name, info in fields if getattr(config, name) != info.default}


def _check_entries(entries: "Sequence[MixtureEntry]") -> None:
    """Raise ValueError for entries that no run can have together."""
    if len(entries) < 2:
        raise ValueError(f"a list of environments has at least two, found {len(entries)}")
    for place, entry in enumerate(entries):
        if entry.mixture is not None:
            raise ValueError(f"{place}: an environment of a list cannot be a list itself")
        if wrong := sorted(_changed(entry) & _OF_MIXTURES - {"name"}):
            raise ValueError(
                f"{place}.{wrong[0]}: it holds for all environments together; set "
                f"environment.{wrong[0]} next to environment.mixture (--set does)"
            )
    labels = [entry.shown_label for entry in entries]
    if twice := [label for label in labels if labels.count(label) > 1]:
        first, second, *_ = (n for n, label in enumerate(labels) if label == twice[0])
        raise ValueError(
            f"environments {first} and {second} are both called {twice[0]!r}: give each a `label` "
            "of its own, which names their rollouts and metrics"
        )
    whole_weights([entry.weight for entry in entries])


class SamplingConfig(Section):
    """Sampling parameters; the seed of each completion is derived, never configured."""

    temperature: float = field(1.0, "softmax temperature; 0 is greedy", ge=0, le=10)
    top_p: float = field(1.0, "nucleus mass; 1 is off", gt=0, le=1)
    top_k: int = field(0, "keep the k likeliest tokens; 0 is off", ge=0)
    max_tokens: Count = field(32, "new tokens per completion", le=1_000_000)
    stop: tuple[str, ...] = field((), "strings that end a completion", max_length=16)
    min_p: float | None = optional_field(
        "keep the tokens of at least this share of the likeliest one's probability; null: off",
        gt=0,
        le=1,
    )
    repetition_penalty: float | None = optional_field(
        "divide positive logits of the tokens of prompt and completion so far by it, and multiply "
        "negative ones; null: off",
        ge=0.01,
        le=10,
    )

    @property
    def changes(self) -> str:
        """Everything but the temperature that changes the model's distribution, for messages."""
        further = ("min_p", self.min_p), ("repetition_penalty", self.repetition_penalty)
        shown = "".join(f", {name} {value:g}" for name, value in further if value is not None)
        return f"sampling.top_p {self.top_p:g} and top_k {self.top_k}{shown}"

    @property
    def changed(self) -> bool:
        """True if the logprobs of sampled tokens are not the model's at the temperature."""
        filtered = self.top_p < 1 or self.top_k > 0 or self.min_p is not None
        return (self.temperature > 0 and filtered) or self.repetition_penalty not in (None, 1)


class RolloutsConfig(Section):
    """Number of rollouts in a round, and their division into shards."""

    groups_per_round: Count = field(16, "prompts per round", le=1_000_000)
    group_size: Count = field(
        8,
        "completions per prompt; 1 only with objective.advantage gae, reinforce or reinforce_batch",
        le=4096,
    )
    group_size_min: Count = field(
        2,
        "smallest number of valid completions with which a group is trained on; 1 under the same "
        "conditions as group_size 1",
        le=4096,
    )
    greedy_baseline: Literal[True] | None = optional_field(
        "true: the last completion of each group is sampled at temperature 0, as the baseline of "
        "objective.advantage remax, and is not trained on; null: off"
    )
    source: Literal["pushed"] | None = optional_field(
        "pushed: groups that environments push to `marin-rl serve-trajectories`, in the order in "
        "which they were accepted; null: the run samples its own"
    )
    push_timeout_s: Seconds | None = optional_field(
        "seconds without another pushed group after which a round fails; null: 3600",
        runtime_only=True,
    )
    shards_per_round: Count = field(1, "Parquet objects per round", le=100_000)
    errors_max_fraction: float = field(
        0.5, "share of failed rollouts above which a shard is not committed", ge=0, le=1
    )

    commit_groups: Literal[True] | None = optional_field(
        "true: each group, and each member with several turns, is committed as soon as it is "
        "finished, so that a killed process costs what is in flight only, and a retry asks for "
        "what is missing; null: off",
        runtime_only=True,
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
        if self.source == "pushed" and (self.greedy_baseline or self.commit_groups):
            raise ValueError(
                "source pushed: expected greedy_baseline and commit_groups null; environments "
                "choose their own sampling, and each group is committed as it arrives"
            )
        return self


EnvironmentConfig.model_rebuild()

"""Batching of rollouts: filters, padded lengths, packing, staleness.

Leaves out advantages (objective.py).
"""

from typing import Literal

from pydantic import Field, model_validator

from marin_rl.config.section import Count, Section


class FiltersConfig(Section):
    """Filters before training; every drop is counted in the dispositions."""

    zero_signal: bool = Field(
        default=True,
        description="drop groups whose rewards are all equal, unless the objective has a "
        "KL term or an entropy bonus to learn from",
    )
    truncated: bool = Field(default=False, description="drop completions cut off at max_tokens")


class BatchingConfig(Section):
    """Padding and packing of sequences into rows."""

    length_buckets: tuple[Count, ...] = Field(
        default=(), description="padded lengths allowed, ascending; empty: 32, 48, 64, 96, 128, …"
    )
    sequences_per_step: int | None = Field(
        default=None,
        ge=1,
        description="rollouts of one optimizer step, however many rows they fill; null: the whole "
        "round",
    )
    packing: Literal["none", "sequences", "shared_prompt"] = Field(
        default="none",
        description="none: one sequence per row; sequences: several per row; shared_prompt: "
        "several completions of a group per row, behind one copy of their prompt",
    )
    row_tokens: int | None = Field(
        default=None, ge=2, le=10_000_000, description="length of a packed row; needed by packing"
    )
    staleness_rounds_max: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="largest age of a rollout: rounds between the policy that sampled it and "
        "the round that trains on it; older rollouts are dropped as stale. "
        "At least asynchrony.max_staleness; where rounds alternate, every rollout has age 0, but "
        "for groups that are pushed (rollouts.source)",
    )

    @model_validator(mode="after")
    def _buckets_ascend(self) -> "BatchingConfig":
        if list(self.length_buckets) != sorted(set(self.length_buckets)):
            raise ValueError("length_buckets must ascend without repeats")
        if self.packing != "none" and self.row_tokens is None:
            raise ValueError(f"packing {self.packing} needs row_tokens")
        return self

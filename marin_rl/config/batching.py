"""Batching of rollouts: filters, padded lengths, packing, staleness.

Leaves out advantages (objective.py).
"""

from typing import Literal

from pydantic import model_validator

from marin_rl.config.section import Count, Section, field


class FiltersConfig(Section):
    """Filters before training; every drop is counted in the dispositions."""

    zero_signal: bool = field(
        True,
        "drop groups whose rewards are all equal, unless the objective has a KL term or an "
        "entropy bonus to learn from",
    )
    truncated: bool = field(False, "drop completions cut off at max_tokens")


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
    packing: Literal["none", "sequences", "shared_prompt"] = field(
        "none",
        "none: one sequence per row; sequences: several per row; shared_prompt: several "
        "completions of a group per row, behind one copy of their prompt",
    )
    row_tokens: int | None = field(
        None, "length of a packed row; needed by packing", ge=2, le=10_000_000
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
        if self.packing != "none" and self.row_tokens is None:
            raise ValueError(f"packing {self.packing} needs row_tokens")
        return self

"""Registry of metrics: its name, unit and formula, and whether the files give it again.

Names are the field's own (TRL's and Huang's "N implementation details of RLHF"), so that curves can
be laid over those of other trainers. The table is metrics.csv, the source of docs/metrics.md; a
round's row holds only its names, or names that follow its patterns (`rewards/{component}/mean`).
Computing is elsewhere: over rollouts in batching/round_metrics.py, over tokens in the step.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np

# Under the variance of returns in critic/explained_variance, where they are all but equal; verl's.
EXPLAINED_VARIANCE_MIN = 1e-5
LARGEST = float(np.finfo(np.float32).max)  # stands in a row for what overflows float32

Recomputable = Literal["yes", "one epoch", "no"]
OverSteps = Literal["mean", "first", "last", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """Definition of a metric. `formula` is over the rollouts or tokens of one round.

    `recomputable` says whether the committed files alone give the number again: "one epoch" does
    where each batch is trained on once, for the scores are those of the first pass (for
    more see `KL_OF_REWARDS`). Then both numbers agree within `relative` of the expected or
    `absolute`, the larger. `over_steps` is how the numbers of several optimizer steps become that
    of the round. Rows of earlier versions lack all that have the same `late`, a generation's name.
    """

    name: str
    unit: str
    formula: str
    recomputable: Recomputable = "no"
    relative: float = 1e-9
    absolute: float = 1e-9
    over_steps: OverSteps = "mean"
    late: str = ""

    def allows(self, expected: float, recorded: float) -> bool:
        """True if `recorded` agrees with `expected` within the tolerance; NaN agrees with NaN."""
        if np.isnan(expected) or np.isnan(recorded):
            return bool(np.isnan(expected) and np.isnan(recorded))
        return abs(recorded - expected) <= max(self.absolute, self.relative * abs(expected))


# Defaults of the definition's fields by the column `kind` of the table: over rollouts, in float64;
# over trained tokens, on the device in float32, and again from the scores in float64; and of a
# clock, of memory or of weights, which no file gives again.
KINDS: Mapping[str, Mapping[str, str]] = {
    "counted": {"recomputable": "yes"},
    "scored": {"recomputable": "one epoch", "relative": "1e-3", "absolute": "1e-6"},
    "timed": {"recomputable": "no"},
}


def parse_definition(row: dict[str, str]) -> Definition:
    """Parse a row of the table. Raises KeyError, TypeError or ValueError for a malformed one."""
    filled = dict(KINDS[row.pop("kind")]) | {name: text for name, text in row.items() if text}
    again, steps = filled.get("recomputable"), filled.get("over_steps", "mean")
    if again not in get_args(Recomputable) or steps not in get_args(OverSteps):
        raise ValueError(
            f"metrics.csv, {row['name']}: expected recomputable of {get_args(Recomputable)} and "
            f"over_steps of {get_args(OverSteps)}, found {again!r} and {steps!r}"
        )
    numbers = {name: float(filled[name]) for name in ("relative", "absolute") if name in filled}
    return Definition(**{**filled, **numbers, "unit": row["unit"]})


with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _table:
    DEFINITIONS = tuple(parse_definition(row) for row in csv.DictReader(_table))

# Unless the KL is a term of the loss, these are the sampler's, before the first update.
KL_OF_REWARDS = ("kl", "objective/kl", "objective/non_score_reward", "objective/rlhf_reward")


@lru_cache(maxsize=4096)
def definition_of(name: str) -> Definition | None:
    """The definition that a metric's name follows: its own before a pattern; None without one."""
    matches = [item for item in DEFINITIONS if fnmatchcase(name, item.name)]
    return max(matches, key=lambda item: (item.name == name, len(item.name)), default=None)


def is_defined(name: str) -> bool:
    return definition_of(name) is not None


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a round from those of its optimizer steps; none for no steps.

    What compares trainer and sampler means something only before the first update of the round. A
    step that was refused leaves no number in the means unless it has a finite one; where no step
    has, the round has NaN.
    """
    names = sorted({name for step in steps for name in step})
    return {name: _reduced(name, [step[name] for step in steps if name in step]) for name in names}


def _reduced(name: str, values: Sequence[float]) -> float:
    definition = definition_of(name)
    assert definition is not None, f"the training step gives {name}, which is not defined"
    match definition.over_steps:
        case "first":
            return values[0]
        case "last":
            return values[-1]
        case "sum":
            return float(np.sum(values))
        case "mean":
            finite = [value for value in values if np.isfinite(value)]
            return float(np.mean(finite)) if finite else math.nan

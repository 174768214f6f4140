"""The curves of a run: which metrics make which chart, with bands where an interval is known.

Pure functions of metric rows and of reward spreads; what a metric means is `marin_rl.metrics`'
business. A chart whose metrics a run does not have is named instead of drawn empty.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from marin_rl.pages.records import Chart, Line, Number
from marin_rl.rollouts.estimates import estimate_of_groups, wilson

Rows = Sequence[Mapping[str, Any]]

CURVE_POINTS_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean reward of one round and its 95 % interval; the group is the unit that is drawn."""

    round: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A chart to be: metric names (a trailing `/*` takes all below) and what they are called."""

    key: str
    title: str
    unit: str
    about: str
    metrics: Mapping[str, str]
    kind: Literal["lines", "stack"] = "lines"
    logarithmic: bool = False
    without: tuple[str, ...] = ()


PLANS = (
    _Plan(
        key="components",
        title="Reward components",
        unit="reward",
        about="Mean of each reward component, unweighted, over all rollouts of the round.",
        metrics={"rewards/*/mean": "{}"},
    ),
    _Plan(
        key="kl",
        title="KL",
        unit="nats",
        about="KL to the reference policy, and how far an update moved the policy (approx. KL).",
        metrics={
            "kl": "to the reference, per token",
            "objective/kl": "to the reference, per sequence",
            "policy/approxkl_avg": "approx. KL of the update",
        },
    ),
    _Plan(
        key="entropy",
        title="Entropy",
        unit="nats per token",
        about="Mean entropy of the policy over trained tokens.",
        metrics={"entropy": "entropy"},
    ),
    _Plan(
        key="lengths",
        title="Completion lengths",
        unit="tokens",
        about="Sampled tokens per rollout: mean, shortest, longest, and held-out.",
        metrics={
            "completions/mean_length": "mean",
            "completions/min_length": "shortest",
            "completions/max_length": "longest",
            "eval/mean_length": "held-out mean",
        },
    ),
    _Plan(
        key="shares",
        title="Cut off, failed, without signal",
        unit="fraction",
        about="Rollouts cut off at the token limit, rollouts that failed, and groups whose rewards "
        "are all equal and so teach nothing.",
        metrics={
            "completions/clipped_ratio": "cut off",
            "rollouts/errors": "failed",
            "frac_reward_zero_std": "groups without signal",
        },
    ),
    _Plan(
        key="clipping",
        title="Clip fraction",
        unit="fraction",
        about="Tokens (or sequences, by the objective's level) whose ratio left the bounds.",
        metrics={
            "clip_ratio/low": "below the lower bound",
            "clip_ratio/high": "above the upper bound",
            "policy/clipfrac_avg": "beyond either",
        },
    ),
    _Plan(
        key="staleness",
        title="Staleness",
        unit="rounds",
        about="Age of the policy that sampled the consumed rollouts.",
        metrics={"staleness/mean": "mean", "staleness/max": "oldest"},
    ),
    _Plan(
        key="mismatch",
        title="Sampler against trainer",
        unit="nats",
        about="How far the logprobs of sampler and trainer lie apart for the same tokens.",
        metrics={
            "mismatch_kl": "mismatch KL",
            "sampling/logp_difference/mean": "mean difference",
            "sampling/logp_difference/max": "largest difference",
        },
        logarithmic=True,
    ),
    _Plan(
        key="fates",
        title="What became of rollouts",
        unit="rollouts",
        about="Rollouts consumed, filtered, stale and failed; together they are all of a round.",
        metrics={
            "rollouts/consumed": "consumed",
            "rollouts/filtered": "filtered",
            "rollouts/stale": "stale",
            "rollouts/failed": "failed",
        },
        kind="stack",
    ),
    _Plan(
        key="times",
        title="Time per stage",
        unit="s",
        about="Wall seconds of each stage of a round.",
        metrics={"timing_s/*": "{}"},
        kind="stack",
        without=("timing_s/round",),
    ),
    _Plan(
        key="throughput",
        title="Throughput",
        unit="tokens/s",
        about="Sampled tokens per second of generation.",
        metrics={"perf/tokens_per_second": "sampled tokens"},
    ),
    _Plan(
        key="loss",
        title="Loss",
        unit="",
        about="What was minimised. Its level says little in reinforcement learning.",
        metrics={"loss": "loss"},
    ),
    _Plan(
        key="gradient",
        title="Gradient norm",
        unit="",
        about="Global norm of the gradient before clipping.",
        metrics={"grad_norm": "gradient norm"},
    ),
    _Plan(
        key="rate",
        title="Learning rate",
        unit="",
        about="Learning rate of the round's last optimizer step.",
        metrics={"lr": "learning rate"},
    ),
)


def make_charts(
    rows: Rows, training: Sequence[Spread], held_out: Sequence[Spread]
) -> tuple[list[Chart], list[str]]:
    """The charts that have data, and the titles of those that have none.

    `rows` are metric rows by round, ascending; the spreads are of training and evaluation rewards.
    Of more than CURVE_POINTS_MAX rounds, an even selection is drawn.
    """
    rows = _thinned(rows)
    kept = {row["round"] for row in rows} | {spread.round for spread in held_out}
    charts = [_rewards(rows, [s for s in training if s.round in kept], held_out)]
    charts += [_chart(plan, rows) for plan in PLANS]
    return (
        [chart for chart in charts if chart.lines],
        [chart.title for chart in charts if not chart.lines],
    )


def spread_of(round: int, groups: Sequence[Sequence[float]]) -> Spread | None:
    """Mean of all rewards and its interval, for which rollouts of a group are not independent.

    None without rewards.
    """
    found = estimate_of_groups(groups)
    if found is None:
        return None
    return Spread(round=round, mean=found.value, low=found.low, high=found.high)


def _rewards(rows: Rows, training: Sequence[Spread], held_out: Sequence[Spread]) -> Chart:
    lines = [_band("training reward", training), _band("held-out reward", held_out)]
    lines.append(_accuracy(rows))
    return Chart(
        key="reward",
        title="Reward",
        unit="reward, accuracy",
        about="Mean reward of training and held-out rollouts and held-out accuracy, each with its "
        "95 % interval.",
        lines=[line for line in lines if line is not None],
    )


def _band(name: str, spreads: Sequence[Spread]) -> Line | None:
    if not spreads:
        return None
    return Line(
        name=name,
        x=[s.round for s in spreads],
        y=[s.mean for s in spreads],
        low=[s.low for s in spreads],
        high=[s.high for s in spreads],
    )


def _accuracy(rows: Rows) -> Line | None:
    found = [row for row in rows if row.get("eval/accuracy") is not None]
    if not found:
        return None
    trials = [row.get("eval/examples") or 0.0 for row in found]
    y = [row["eval/accuracy"] for row in found]
    bounds = [wilson(share, n) for share, n in zip(y, trials, strict=True)]
    return Line(
        name="held-out accuracy",
        x=[row["round"] for row in found],
        y=y,
        low=[low for low, _ in bounds],
        high=[high for _, high in bounds],
    )


def _chart(plan: _Plan, rows: Rows) -> Chart:
    present = sorted({name for row in rows for name, value in row.items() if value is not None})
    lines = []
    for pattern, label in plan.metrics.items():
        for name in present:
            found = _matched(pattern, name)
            if found is not None and name not in plan.without:
                lines.append(_line(name, label.format(found), rows))
    return Chart(
        key=plan.key,
        title=plan.title,
        unit=plan.unit,
        about=plan.about,
        lines=[line for line in lines if line is not None],
        kind=plan.kind,
        logarithmic=plan.logarithmic,
    )


def _matched(pattern: str, name: str) -> str | None:
    """Part of a name that the `*` of a pattern matches; None where they do not match."""
    head, star, tail = pattern.partition("*")
    if not star:
        return "" if pattern == name else None
    if name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail):
        return name[len(head) : len(name) - len(tail)]
    return None


def _line(name: str, label: str, rows: Rows) -> Line | None:
    points = [(row["round"], _finite(row.get(name))) for row in rows]
    points = [(x, y) for x, y in points if y is not None]
    if not points:
        return None
    return Line(name=label, x=[x for x, _ in points], y=[y for _, y in points])


def _finite(value: Any) -> Number:
    return float(value) if value is not None and math.isfinite(value) else None


def _thinned(rows: Rows) -> Rows:
    if len(rows) <= CURVE_POINTS_MAX:
        return rows
    step = (len(rows) - 1) / (CURVE_POINTS_MAX - 1)
    return [rows[round(index * step)] for index in range(CURVE_POINTS_MAX)]

"""pass@k, mean@k and majority@k of several samples per example, and the interval of every mean.

Pure functions of one example's n samples in the order they were drawn; a mean over examples and its
interval come last. Samples are drawn alike, so any k of them stand for k samples: pass@k takes all
subsets, the other two cut the n into n // k runs of k and leave out what remains.

Axes: N samples of an example, E examples.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

Z95 = 1.959963984540054  # the 97.5 % quantile of the normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over examples, and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(right_N: Bool[np.ndarray, " N"], k: int) -> float:
    """Chance that one of k samples is right: 1 - C(n - c, k) / C(n, k), for c right ones of n.

    Unbiased, and computed as the product of 1 - k / i over i from n - c + 1 to n, which no n
    overflows (Chen et al. 2021, arXiv:2107.03374, eq. 1 and figure 3).
    """
    n, c = len(right_N), int(right_N.sum())
    _check(n, k)
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_at_k(right_N: Bool[np.ndarray, " N"], k: int) -> float:
    runs = _runs(len(right_N), k)
    return float(right_N[: runs * k].mean())


def majority_at_k(right_N: Bool[np.ndarray, " N"], answers: Sequence[str | None], k: int) -> float:
    """Share of the runs of k samples whose commonest answer is right.

    A sample without an answer (None) has no vote, and a run without votes is wrong. Of equally
    common answers the one that was given first wins; it is as right as the first sample that gave
    it.
    """
    runs = _runs(len(right_N), k)
    assert len(answers) == len(right_N), (len(answers), len(right_N))
    won = 0
    for start in range(0, runs * k, k):
        run = list(answers[start : start + k])
        # most_common keeps the order in which equals were first met.
        for winner, _ in Counter(each for each in run if each is not None).most_common(1):
            won += bool(right_N[start + run.index(winner)])
    return won / runs


def wilson(mean: float, effective: float | int) -> tuple[float, float]:
    """Wilson's score interval (1927) for a mean in [0, 1] of `effective` independent draws.

    95 %; with nothing drawn, all of [0, 1].
    """
    if effective <= 0:
        return 0.0, 1.0
    n, p = effective, mean
    shrunk = 1.0 + Z95**2 / n
    middle = (p + Z95**2 / (2 * n)) / shrunk
    half = Z95 / shrunk * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    # Rounding may put a bound a hair on the wrong side of a value of exactly 0 or 1.
    return max(0.0, min(middle - half, p)), min(1.0, max(middle + half, p))


def held_out_accuracies(rows: Sequence[Mapping[str, Any]]) -> dict[int, Estimate]:
    """`eval/accuracy` with its interval by round, of the rows of metrics that have one.

    Wilson's interval for the number of examples, as for `mean@1`.
    """
    result: dict[int, Estimate] = {}
    for row in rows:
        if (accuracy := row.get("eval/accuracy")) is not None:
            low, high = wilson(accuracy, row.get("eval/examples") or 0)
            result[row["round"]] = Estimate(value=accuracy, low=low, high=high)
    return result


def estimate(value_E: Float64[np.ndarray, " E"]) -> Estimate:
    """The mean of values in [0, 1], one per example, with its Wilson score interval.

    Where values are 0 or 1 this is Wilson's interval (1927) for a share of examples. Values between
    have a smaller variance than p (1 - p), so that the interval is wider than it need be, never
    narrower; unlike a bootstrap it needs no seed, and has a width where all examples agree.
    """
    p = float(value_E.mean())
    low, high = wilson(p, len(value_E))
    return Estimate(value=p, low=low, high=high)


def estimate_of_groups(
    groups: Sequence[Sequence[float] | Float64[np.ndarray, " _"]],
) -> Estimate | None:
    """The mean of all rewards of groups of rollouts, and its 95 % interval; None without rewards.

    Wilson's interval on the scale from the lowest to the highest reward, [0, 1] included, with an
    effective number of draws for the number of rewards: rollouts of one prompt are not independent
    (`effective_draws`). It covers the mean in 93 to 97 % of all samples where the rarer of two
    outcomes is in about ten groups, and in 93 to 99 % where it is in fewer; docs/report.md has the
    figures. It has a width where all rewards are equal.
    """
    filled = [np.asarray(group, np.float64) for group in groups if len(group)]
    if not filled:
        return None
    value_N, size_P = np.concatenate(filled), np.array([len(group) for group in filled], np.int64)
    low, high = min(0.0, float(value_N.min())), max(1.0, float(value_N.max()))
    share_N = (value_N - low) / (high - low)
    below, above = wilson(float(share_N.mean()), effective_draws(share_N, size_P))
    # The mean is summed exactly, as it is shown; a bound may not lie on its wrong side.
    mean = math.fsum(value_N) / len(value_N)
    return Estimate(
        value=mean,
        low=min(mean, low + (high - low) * below),
        high=max(mean, low + (high - low) * above),
    )


def effective_draws(share_N: Float64[np.ndarray, " N"], size_P: Int64[np.ndarray, " P"]) -> float:
    """Independent draws of 0 or 1 whose mean would vary as the mean of these shares does.

    The N shares, in [0, 1], lie group by group, `size_P` to a group. With design effect D and
    k the variance of a share over p (1 - p), that is `N / (D k)` (Kish 1965; Franco, Little, Louis
    and Slud 2019, "Comparative Study of Confidence Intervals for Proportions in Complex Sample
    Surveys", of which Wilson's with a modelled design effect did best).

    `D = 1 + (M - 1) r`, M = sum of squared sizes / N, r the correlation within groups by analysis
    of variance (Fisher), in [0, 1]. Where few groups have the rarer outcome, that is known badly
    and low more often than not: with i such groups, r is first raised by the factor
    `1 + 4 / (i + 1)`, and then averaged with 1, with weights i^3 and 3^3. Both numbers were chosen
    by simulation (tests/rollouts/test_estimates.py). k is 1 for shares of 0 and 1; two draws of
    the widest kind are added to it, so that equal shares do not make it 0.
    """
    n, groups = len(share_N), len(size_P)
    ends_P = np.cumsum(size_P)
    sum_P = np.add.reduceat(share_N, ends_P - size_P)
    mean_P, p = sum_P / size_P, float(share_N.mean())
    within = float(((share_N - np.repeat(mean_P, size_P)) ** 2).sum())
    between = float((size_P * (mean_P - p) ** 2).sum())
    rarer = min(int((mean_P > 0).sum()), int((mean_P < 1).sum()))
    correlation = _correlation(within, between, size_P) if groups > 1 else 1.0
    correlation = min(1.0, correlation * (1 + 4 / (rarer + 1)))
    correlation = (rarer**3 * correlation + 3**3) / (rarer**3 + 3**3)
    design = 1 + (float((size_P**2).sum()) / n - 1) * correlation
    wide = (p * n + 2) / (n + 4)  # Agresti and Coull's centre: above 0 and below 1
    widest = 2 * wide * (1 - wide)
    spread = (within + between + widest) / (n * p * (1 - p) + widest)
    return n / (design * spread)


def _correlation(within: float, between: float, size_P: Int64[np.ndarray, " P"]) -> float:
    """Correlation of two members of a group, in [0, 1], from the two sums of squares."""
    n, groups = int(size_P.sum()), len(size_P)
    per_group = (n - float((size_P**2).sum()) / n) / (groups - 1)
    between_mean = between / (groups - 1)
    within_mean = within / (n - groups) if n > groups else between_mean
    total = between_mean + (per_group - 1) * within_mean
    return min(1.0, max(0.0, (between_mean - within_mean) / total)) if total > 0 else 0.0


def _runs(n: int, k: int) -> int:
    _check(n, k)
    return n // k


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"expected a k from 1 to the {n} samples there are, found {k}")

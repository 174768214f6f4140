"""pass@k, mean@k and majority@k of several samples per example, and how sure one may be of them.

Pure functions of one example's n samples in the order they were drawn; a mean over examples and its
interval come last. Samples are drawn alike, so any k of them stand for k samples: pass@k takes all
subsets, the other two cut the n into n // k runs of k and leave out what remains.

Axes: N samples of an example, E examples.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

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
    """Share of right samples in the runs of k."""
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
    won = [
        _winner_is_right(right_N[start : start + k], answers[start : start + k])
        for start in range(0, runs * k, k)
    ]
    return sum(won) / runs


def _winner_is_right(right_N: Bool[np.ndarray, " N"], answers: Sequence[str | None]) -> bool:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    # most_common keeps the order in which equals were first met.
    ((winner, _),) = votes.most_common(1)
    return bool(right_N[list(answers).index(winner)])


def estimate(value_E: Float64[np.ndarray, " E"]) -> Estimate:
    """The mean of values in [0, 1], one per example, with its Wilson score interval.

    Where values are 0 or 1 this is Wilson's interval (1927) for a share of examples. Values between
    have a smaller variance than p (1 - p), so that the interval is wider than it need be, never
    narrower; unlike a bootstrap it needs no seed, and has a width where all examples agree.
    """
    n, p = len(value_E), float(value_E.mean())
    shrunk = 1.0 + Z95**2 / n
    middle = (p + Z95**2 / (2 * n)) / shrunk
    half = Z95 / shrunk * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    # Rounding may put a bound a hair on the wrong side of a value of exactly 0 or 1.
    low, high = max(0.0, min(middle - half, p)), min(1.0, max(middle + half, p))
    return Estimate(value=p, low=low, high=high)


def _runs(n: int, k: int) -> int:
    _check(n, k)
    return n // k


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"expected a k from 1 to the {n} samples there are, found {k}")

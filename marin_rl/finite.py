"""Numbers that are trained on: rewards, scores and log-probabilities, checked where they enter.

Batches store them as float32 and losses square them, so that finite is not enough: each is checked
in that type, within bounds that leave room for sums and squares. Leaves out who is at fault, which
the caller names.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

REWARD_MAX = 1e15  # its square is finite in float32, summed over 1e8 tokens too
# In nats; float32 softmax may round a certainty to a hair above probability 1.
LOGPROB_MIN, LOGPROB_SLACK = -1e5, 1e-5

BOUNDS = f"between -{REWARD_MAX:g} and {REWARD_MAX:g}: scale or clip it"


def number(value: Any) -> float:
    """`value` as a float, if it is one real number or bool; a string is not. Raises ValueError."""
    refused = isinstance(value, str | bytes | complex | np.complexfloating)
    refused = refused or getattr(getattr(value, "dtype", None), "kind", "") in ("U", "S")
    if refused or not hasattr(type(value), "__float__"):
        raise ValueError(f"expected a number, found {shown(value)}")
    try:
        return float(value.item() if getattr(value, "ndim", 0) else value)
    except OverflowError:  # an integer beyond float64
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several
        raise ValueError(f"expected a number, found {shown(value)}") from None


def reward_number(value: Any, what: str = "number") -> float:
    """`value` as a float that can be trained on. Raises ValueError that says what it should be."""
    result = number(value)
    if not math.isfinite(result) and not isinstance(value, int):
        raise ValueError(f"expected a finite {what}, found {shown(value)}")
    if abs(result) > REWARD_MAX:
        raise ValueError(f"expected a {what} {BOUNDS}; found {shown(value)}")
    return result


def fit_rewards(values: Any) -> Bool[np.ndarray, "*N"]:
    """True for each value that can be trained on as a reward; False for NaN."""
    return np.asarray(np.abs(np.asarray(values, np.float64)) <= REWARD_MAX)


def usable_rewards(values: Any) -> Float64[np.ndarray, "*N"]:
    wide = np.asarray(values, np.float64)
    return np.where(fit_rewards(wide), wide, np.nan)


def fit_logprobs(values: Any) -> Bool[np.ndarray, "*N"]:
    wide = np.asarray(values, np.float64)
    return np.asarray((wide >= LOGPROB_MIN) & (wide <= LOGPROB_SLACK))


def shown(value: Any) -> str:
    """The start of a value's `repr`, in one line."""
    try:
        return " ".join(f"{value!r:.80}".split())
    except ValueError:  # Python writes no integers of thousands of digits
        return f"an integer of {value.bit_length()} bits"

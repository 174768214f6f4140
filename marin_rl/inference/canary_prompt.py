"""The canary's prompt, its size, and how far its numbers are apart: what needs no JAX.

What is done with its answer is in `marin_rl.serving.weights.canary`.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from marin_rl.types import Message

CANARY_PROMPT = (Message(role="user", content="Which policy are you?"),)
CANARY_SEED = 20_240_229
# A mean over few tokens is less steady: it counts this number of further ones without a difference.
EXACT_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySize:
    """Samples of the canary, and tokens of each at most.

    Several samples side by side cost an engine as many steps as one of them, and give tokens enough
    also where a policy ends after one or two. A `probe` goes before requests that wait.
    """

    samples: int = 8
    tokens: int = 4
    probe: bool = False

    @classmethod
    def in_flight(cls, room: int, *, probe: bool) -> "CanarySize":
        """One sample, whose tokens have one order where new weights may come between them.

        `room` is what the context leaves for it.
        """
        return cls(samples=1, tokens=min(PROBE_TOKENS, room), probe=probe)


CANARY = CanarySize()
PROBE_TOKENS = 16  # that servers accept of a probe


def mean_difference(expected: Float[np.ndarray, " N"], measured: Float[np.ndarray, " N"]) -> float:
    """Mean |difference| of log-probabilities, in nats; NaN if one is.

    That is the sum divided by N + EXACT_TOKENS.
    """
    return float(np.abs(measured - expected).sum() / (len(expected) + EXACT_TOKENS))

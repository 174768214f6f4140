"""Checks of an endpoint's answers: the parameters that sampled them, and the ids they go on from.

Leaves out what is asked for (`episode`, `partial`).
"""

import numpy as np
from jaxtyping import Int32

from marin_rl.errors import BadResponse, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.types import ServedPolicy


def check_identity(answer: ChatAnswer, policy: ServedPolicy) -> None:
    """Raise StalePolicy for samples of other parameters.

    Servers of ours name the parameters they sampled with; others only the model id.
    """
    sampled_with, expected = answer.parameters_digest, policy.parameters_digest
    if sampled_with is not None and sampled_with != expected:
        raise StalePolicy(
            f"expected samples of the parameters {expected}, found {sampled_with}: the "
            "endpoint serves other weights than this round's"
        )


def check_prompt(answer: ChatAnswer, ids: Int32[np.ndarray, " P"]) -> None:
    """Raise BadResponse where an endpoint went on from other ids than it was sent."""
    if not np.array_equal(answer.prompt_token_ids, ids):
        raise BadResponse(
            f"expected the {len(ids)} prompt ids that were sent, found "
            f"{len(answer.prompt_token_ids)} others: the endpoint rendered the messages again"
        )

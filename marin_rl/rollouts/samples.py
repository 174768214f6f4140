"""Rollouts as samples of one sequence each: the tokens of a prompt, and those of its response."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.types import Rollout, Turn

UNTRAINED_LABEL = -100.0  # of atropos's masks, as PyTorch's cross entropy ignores it
UNTRAINED_LOGPROB = 1.0  # of atropos: no logprob is above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A segment of a rollout: the messages and tokens of its prompt, and those that followed.

    `mask` is 1 on the tokens that the policy sampled, which `logprobs` are of; 0 elsewhere.
    """

    segment: int
    prompt: Sequence[Turn]
    response: Sequence[Turn]
    prompt_ids: Int32[np.ndarray, " P"]
    response_ids: Int32[np.ndarray, " R"]
    mask: Int32[np.ndarray, " R"]
    logprobs: Float32[np.ndarray, " R"]


def samples_of(rollout: Rollout) -> list[Sample]:
    """The segments of a rollout, in order."""
    lengths = rollout.segment_lengths or (len(rollout.token_ids),)
    ends = list(accumulate(lengths))
    return [
        _sample(rollout, number, end - length, end)
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]


def _sample(rollout: Rollout, number: int, start: int, end: int) -> Sample:
    mask = rollout.loss_mask[start:end]
    lead = start + (int(mask.argmax()) if mask.any() else end - start)
    first, last = _span(rollout.turns, start, end)
    return Sample(
        segment=number,
        prompt=rollout.turns[:first],
        response=rollout.turns[first:last],
        prompt_ids=rollout.token_ids[start:lead],
        response_ids=rollout.token_ids[lead:end],
        mask=rollout.loss_mask[lead:end],
        logprobs=rollout.logprobs[lead:end],
    )


def _span(turns: Sequence[Turn], start: int, end: int) -> tuple[int, int]:
    """The first sampled turn of a segment, and the turn after its last one."""
    first, last, after = len(turns), 0, len(turns)
    for place, turn in enumerate(turns):
        if turn.inference_metadata is None:
            continue
        begins = start if turn.start is None else turn.start  # unknown only where all is one prompt
        if begins >= end:
            # What stands between was first read in the next segment's prompt.
            return first, last + 1
        if begins >= start:
            first, last = min(first, place), place
    return first, after

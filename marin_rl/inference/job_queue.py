"""Admission: bounds of a request, and the queue of those that wait.

Owns the check of a request against what the engine could ever serve, and the queue of requests
whose samples have no slot yet. Leaves out when samples get slots (`engine`).
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from marin_rl.errors import InputError
from marin_rl.inference.batch import Job
from marin_rl.inference.slots import (
    LOGIT_BIAS_MAX,
    STOP_TOKENS_MAX,
    TOP_LOGPROBS_MAX,
    GenerationRequest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounds:
    """Limits of an engine: token ids, tokens of prompt and completion, its own stop tokens."""

    vocabulary: int
    context_length: int
    stop_tokens: int
    has_decode: bool

    def check(self, request: GenerationRequest) -> None:
        """Raises InputError for a request that could never be served."""
        self._check_lengths(request)
        self._check_stops(request)
        self._check_bias(request)
        _check_numbers(request)

    def _check_lengths(self, request: GenerationRequest) -> None:
        prompt, tokens_max = request.prompt_ids, request.sampling.max_tokens
        least = 0 if request.score_prompt else 1
        if request.n < 1 or tokens_max < least:
            raise InputError(
                f"expected n and max_tokens of at least 1 (max_tokens of 0 only to score a "
                f"prompt), found {request.n} and {tokens_max}"
            )
        if len(prompt) == 0:
            raise InputError("expected a prompt of at least one token, found none")
        # as numbers without a sign, those below 0 are the largest
        if prompt.view(np.uint32).max() >= self.vocabulary:
            raise InputError(
                f"expected token ids from 0 to {self.vocabulary - 1}, found "
                f"{prompt.min()} to {prompt.max()}"
            )
        if len(prompt) + tokens_max > self.context_length:
            raise InputError(
                f"expected prompt and max_tokens within the context of {self.context_length} "
                f"tokens, found {len(prompt)} + {tokens_max}"
            )

    def _check_stops(self, request: GenerationRequest) -> None:
        stops = self.stop_tokens + len(request.stop_token_ids)
        if stops > STOP_TOKENS_MAX:
            raise InputError(f"expected at most {STOP_TOKENS_MAX} stop tokens, found {stops}")
        if request.sampling.stop and not self.has_decode:
            raise InputError("stop strings need an engine with a tokenizer")
        if "" in request.sampling.stop:
            raise InputError("expected stop strings of at least one character, found an empty one")

    def _check_bias(self, request: GenerationRequest) -> None:
        ids = [token for token, _ in request.logit_bias]
        if len(ids) > LOGIT_BIAS_MAX or len(set(ids)) < len(ids):
            raise InputError(
                f"expected a logit_bias for at most {LOGIT_BIAS_MAX} distinct tokens, found "
                f"{len(ids)} entries for {len(set(ids))} tokens"
            )
        if ids and (min(ids) < 0 or max(ids) >= self.vocabulary):
            raise InputError(
                f"expected logit_bias for tokens from 0 to {self.vocabulary - 1}, found "
                f"{min(ids)} to {max(ids)}"
            )
        if not all(math.isfinite(value) for _, value in request.logit_bias):
            raise InputError("expected finite values in logit_bias")


def _check_numbers(request: GenerationRequest) -> None:
    if not 0 <= request.min_p <= 1:
        raise InputError(f"expected min_p from 0 to 1, found {request.min_p}")
    repetition = request.repetition_penalty
    if not (math.isfinite(repetition) and repetition > 0):
        raise InputError(f"expected a repetition_penalty above 0, found {repetition}")
    if not math.isfinite(request.presence_penalty + request.frequency_penalty):
        raise InputError("expected finite presence and frequency penalties")
    if not 0 <= request.top_logprobs <= TOP_LOGPROBS_MAX:
        raise InputError(
            f"expected top_logprobs from 0 to {TOP_LOGPROBS_MAX}, found {request.top_logprobs}"
        )


class JobQueue:
    """Requests with samples that wait, first come first served. Not locked: its owner is."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Samples that have no slot yet."""
        return self._waiting

    @property
    def head(self) -> Job:
        """The request that is served next."""
        return self._jobs[0]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def append(self, job: Job) -> None:
        """Let a new request wait."""
        self._jobs.append(job)
        self._waiting += job.waiting

    def take(self, samples: int) -> None:
        """Record that `samples` samples of the head left the queue; the head leaves with its last
        one.
        """
        job = self._jobs[0]
        job.handed_out += samples
        self._waiting -= samples
        if job.waiting == 0:
            self._jobs.popleft()

    def discard(self, jobs: list[Job]) -> None:
        """Remove cancelled or failed requests from the queue, as far as they are in it."""
        gone = {id(job) for job in jobs}
        kept = [job for job in self._jobs if id(job) not in gone]
        if len(kept) < len(self._jobs):
            self._jobs = deque(kept)
            self._waiting = sum(job.waiting for job in kept)

"""A request on its way through the engine: its job, its samples, and the prefixes they begin with.

Owns what belongs to one request or one sample, and what must be equal for a cached prefix to serve
another. Leaves out the arrays of all slots (`batch`) and the order of requests (`scheduler`).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from marin_rl.inference.adapters import LoadedAdapter
from marin_rl.inference.generation import (
    Delta,
    GenerationRequest,
    GenerationResult,
    PromptScores,
    Sample,
    TokenConstraint,
)
from marin_rl.inference.stops import StopWatch


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request on its way: samples get sequence slots in the order of their index."""

    request: GenerationRequest
    future: "Future[GenerationResult]"
    adapter: LoadedAdapter | None = None  # None: the base model
    on_delta: Callable[[Delta], None] | None = None
    on_scheduled: Callable[[Any], None] | None = None  # given the policy
    streams: bool = False  # `on_delta` sends each token on
    seed: int
    stop_tokens: tuple[int, ...]
    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0  # 0 until it is scheduled; monotonic seconds, as the others
    prefilled_at: float = 0.0
    handed_out: int = 0  # samples that have had a sequence slot
    finished: "dict[int, RunningSequence]" = field(default_factory=dict)
    prompt_scores: PromptScores | None = None
    scored_by: "WeightsKey | None" = None
    cached_tokens: int = 0  # positions of the prompt that an earlier request had computed
    ended: bool = False
    # Owner of its cached prefixes, which outlive it: the job itself would keep its result in
    # memory.
    key: object = field(default_factory=object)

    @property
    def waiting(self) -> int:
        """Samples that have no sequence slot yet."""
        return self.request.n - self.handed_out

    @property
    def row(self) -> int:
        """Row of the adapter in the engine's bank; 0 for the base model."""
        return 0 if self.adapter is None else self.adapter.row

    @property
    def load(self) -> int:
        """Number of the adapter's load; 0 for the base model."""
        return 0 if self.adapter is None else self.adapter.number


@dataclass(frozen=True, slots=True, eq=False)
class WeightsKey:
    """Identity of one load of weights: equal to nothing but itself, and outlives the arrays.

    A weight version is not enough: a checkpoint's version is its round, which two runs share.
    """


class PrefixKey(NamedTuple):
    """Conditions under which cached keys and values are the same bits.

    `owner` bounds their use: it is the key of the request that they were computed for, whose other
    samples start from them. `adapter` is the number of its load, never its row, which another
    adapter may have had before.
    """

    owner: object
    weights: WeightsKey
    adapter: int


class CachedPrefix(NamedTuple):
    """Tokens that a slot's cache begins with, until the slot is assigned again."""

    lane: int
    seq_slot: int
    token_ids: Int32[np.ndarray, " P"]
    key: PrefixKey


@dataclass(slots=True, kw_only=True, eq=False)
class RunningSequence:
    """Sample in a sequence slot, and what each chunk added to it."""

    job: Job
    index: int
    prefix: CachedPrefix | None = None  # none where only a prompt was scored
    used: int = 0  # order by which its slot's prefix is evicted
    stop_watch: StopWatch | None = None
    constraint: TokenConstraint | None = None
    accepted: int = 0  # tokens that the constraint was given
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish_reason: str = ""

    def sample(self, final_version: int) -> Sample:
        """The finished completion, as seen from the version that the request ended with."""
        # a delta is of one version: weights change between chunks only
        versions = np.repeat(
            np.array([delta.weight_version for delta in self.deltas], np.int32),
            [len(delta.token_ids) for delta in self.deltas],
        )
        return Sample(
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(d.logprobs for d in self.deltas)]),
            finish_reason=self.finish_reason,
            # one version is the usual case, and the result names it: no array of it in every sample
            policy_versions=None if (versions == final_version).all() else versions,
            raw_logprobs=_joined([delta.raw_logprobs for delta in self.deltas]),
            top_ids=_joined([delta.top_ids for delta in self.deltas]),
            top_logprobs=_joined([delta.top_logprobs for delta in self.deltas]),
        )


def _joined(parts: list[np.ndarray | None]) -> np.ndarray | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None

"""Requests on their way through the engine: what is asked, its bounds, and what comes back.

Owns what belongs to one request or one sample, the identity of the weights that sample it, and what
must be equal for a cached prefix to serve another. Leaves out the arrays of all slots (`batch`) and
the order of requests (`scheduler`).

Axes: P tokens of a prompt, T of a completion, K likeliest tokens, W words of 32 tokens.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from marin_rl.errors import InputError
from marin_rl.inference.adapters import LoadedAdapter
from marin_rl.inference.stops import StopStringScanner
from marin_rl.inference.weights import Weights
from marin_rl.types import Sampling

# Stop tokens that a sequence can have, the model's own included.
STOP_TOKENS_MAX = 16
LOGIT_BIAS_MAX = 300
TOP_LOGPROBS_MAX = 20


@runtime_checkable
class TokenConstraint(Protocol):
    """Constraint on the next tokens of one sample. Made and used only on the engine's thread.

    Stop tokens are allowed by the mask exactly where the text may end.
    """

    def mask(self) -> UInt32[np.ndarray, " W"]:
        """The tokens that may come next: bit i of word w stands for token 32 w + i."""
        ...

    def accept(self, token: int) -> None:
        """Take note of a token that was sampled under the last mask."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """`n` samples of one prompt; sample i draws with `sampling.seed + i`.

    `stop_token_ids` are used in addition to the engine's own; a seed of None is drawn by the
    engine. The raw logits pass, in this order: `logit_bias` (token id and what is added to its
    logit), the repetition penalty over prompt and output (arXiv:1909.05858: 1 is off),
    `frequency_penalty` and `presence_penalty` over the output (OpenAI's meaning: 0 is off), the
    constraint's mask, the temperature, min_p (tokens less likely than this share of the likeliest
    one are left out), top_k and top_p. `constraint` is called once per sample.

    `top_logprobs` asks for that many likeliest tokens for each sampled one, `raw_logprobs` for
    logprobs of the model's own distribution (temperature 1 and nothing else applied) next to those
    of the sampling distribution, `score_prompt` for those of the prompt's tokens; only with it may
    `sampling.max_tokens` be 0. `adapter` is the number of the load of the adapter to sample with
    (`Engine.adapters.load`); 0 is the base model. A `probe` is scheduled before requests that wait.
    """

    prompt_ids: Int32[np.ndarray, " P"]
    n: int = 1
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    raw_logprobs: bool = False
    score_prompt: bool = False
    constraint: Callable[[], TokenConstraint] | None = None
    adapter: int = 0
    probe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Tokens that one chunk added to sample `index`, and the policy that sampled them.

    Logprobs are as in `Sample`. `finish_reason` is empty while the sample goes on. A sample's first
    delta has the prompt's scores where they were asked for, those of the policy that is named here.
    `adapter_name` is empty for the base model.
    """

    index: int
    token_ids: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    raw_logprobs: Float32[np.ndarray, " T"] | None
    top_ids: Int32[np.ndarray, "T K"] | None
    top_logprobs: Float32[np.ndarray, "T K"] | None
    weight_version: int
    parameters_digest: str
    finish_reason: str
    prompt_scores: "PromptScores | None" = None
    adapter_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Completion: ids with a final stop token included, a logprob (nats) for each.

    Logprobs are those of the distribution the token was drawn from; a greedy token's is that at
    temperature 1. `top_ids` are the likeliest tokens first, of the model's own distribution where
    the request asked for raw logprobs, else of the sampling distribution; tokens that a filter or
    mask leaves out have a logprob of -inf. `policy_versions` is None where every token was sampled
    with the result's `weight_version`.
    """

    token_ids: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    finish_reason: str
    policy_versions: Int32[np.ndarray, " T"] | None = None
    raw_logprobs: Float32[np.ndarray, " T"] | None = None
    top_ids: Int32[np.ndarray, "T K"] | None = None
    top_logprobs: Float32[np.ndarray, "T K"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Logprobs (nats) of a prompt's tokens under the model's own distribution.

    Nothing precedes the first token: its logprob and the top ones of its row are nan.
    """

    logprobs: Float32[np.ndarray, " P"]
    top_ids: Int32[np.ndarray, "P K"] | None = None
    top_logprobs: Float32[np.ndarray, "P K"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """Samples of a request, and the policy that was loaded when the last of them ended.

    The prompt's scores are that policy's. Of the prompt, `cached_tokens` were not computed again,
    as an earlier request had left them in the cache. Durations are in seconds. With `max_tokens` 0
    samples have no tokens, and end with reason "length": only scores were requested.
    """

    samples: tuple[Sample, ...]
    weight_version: int
    parameters_digest: str
    queue_s: float
    prefill_s: float
    decode_s: float
    prompt_scores: PromptScores | None = None
    cached_tokens: int = 0
    adapter_name: str = ""  # empty: the base model


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounds:
    """Limits of an engine: token ids, tokens of prompt and completion, stop tokens."""

    vocabulary: int
    context_length: int
    stop_tokens: int
    has_decode: bool

    def check(self, request: GenerationRequest) -> None:
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
    if not 0 <= (request.sampling.min_p or 0) <= 1:
        raise InputError(f"expected min_p from 0 to 1, found {request.sampling.min_p}")
    repetition = request.sampling.repetition_penalty
    if repetition is not None and not (math.isfinite(repetition) and repetition > 0):
        raise InputError(f"expected a repetition_penalty above 0, found {repetition}")
    # infinities of either sign and NaN all show in the sum
    if not math.isfinite(request.presence_penalty + request.frequency_penalty):
        raise InputError("expected finite presence and frequency penalties")
    if not 0 <= request.top_logprobs <= TOP_LOGPROBS_MAX:
        raise InputError(
            f"expected top_logprobs from 0 to {TOP_LOGPROBS_MAX}, found {request.top_logprobs}"
        )


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
    stop_scanner: StopStringScanner | None = None
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


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """Loaded weights: references to the model's arrays, and the identity of this load.

    With `recompute_kv_cache`, sequences that other weights began have their caches computed again.
    """

    weights: Weights
    weight_version: int
    parameters_digest: str
    key: WeightsKey
    adapter_name: str = ""  # empty: the base model
    recompute_kv_cache: bool = False

    def with_adapter(self, adapter: LoadedAdapter | None) -> "Policy":
        """The policy of requests on an adapter: its identity, over the same weights."""
        if adapter is None:
            return self
        return replace(
            self,
            weight_version=adapter.weight_version,
            parameters_digest=adapter.parameters_digest,
            adapter_name=adapter.name,
        )

"""Requests to the engine and its results.

Owns the nouns that cross the engine's border: a request, a constraint on its text, one chunk's
delta, a finished sample, a result. Leaves out the assignment of sequence slots (`scheduler`) and
all arithmetic.

Axes: P positions of a prompt, T tokens of a completion, K likeliest tokens, W words of a mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from marin_rl.types import Sampling

# Stop tokens that a sequence can have, the model's own included.
STOP_TOKENS_MAX = 16
LOGIT_BIAS_MAX = 300
TOP_LOGPROBS_MAX = 20


@runtime_checkable
class TokenConstraint(Protocol):
    """Constraint on the next tokens of one sample. Made and used on the engine's thread alone.

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
    logit), `repetition_penalty` over prompt and output (arXiv:1909.05858: 1 is off),
    `frequency_penalty` and `presence_penalty` over the output (OpenAI's meaning: 0 is off), the
    constraint's mask, the temperature, `min_p` (tokens less likely than this share of the likeliest
    one are left out; 0 is off), top_k and top_p. `constraint` is called once per sample.

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
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
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
    samples have no tokens, and end with reason "length": the scores alone are asked for.
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

"""JSON of responses, complete or as server-sent events.

Owns the text of a finished sample, its log-probabilities in OpenAI's two shapes, and what responses
of all dialects have in common. Pure functions, run on the writer's thread.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson
from jaxtyping import Float32, Int32
from starlette.responses import Response

from marin_rl.inference.client.answers import ServerTimings
from marin_rl.inference.generation import Delta, GenerationResult, Sample
from marin_rl.inference.stops import text_before_stop
from marin_rl.serving.text.detokenizer import Detokenizer, IncrementalDetokenizer

# What OpenAI gives for a token that cannot be drawn: JSON has no minus infinity.
NEVER = -9999.0
DONE = b"data: [DONE]\n\n"  # ends a stream of server-sent events


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDecoding:
    """Conversion of samples to text: stop strings, and special tokens kept or left out."""

    detokenizer: Detokenizer
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    special: bool = False

    def incremental(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.detokenizer, self.stop, special=self.special)

    def new_text(self, text: IncrementalDetokenizer, ids: Sequence[int], finish_reason: str) -> str:
        """Text that a sample gains by more tokens; all the remaining text if they are the last."""
        if not finish_reason:
            return text.feed(ids)
        text.ids.extend(ids)
        return text.finish(self.text(text.ids, finish_reason))

    def text(self, ids: Sequence[int], finish_reason: str) -> str:
        """The text of a finished sample: without its stop token, and cut before a stop string."""
        if finish_reason != "stop" or not ids:
            return self.detokenizer.of(ids, special=self.special)
        if ids[-1] in self.stop_token_ids:
            return self.detokenizer.of(ids[:-1], special=self.special)
        decode = partial(self.detokenizer.of, special=self.special)
        return text_before_stop(decode, ids, self.stop)


# a token and its logprob, the likeliest tokens in its place and their logprobs
ScoredToken = tuple[int, float, list[int], list[float]]


def scored_tokens(
    ids: Int32[np.ndarray, " T"],
    logprobs: Float32[np.ndarray, " T"],
    top_ids: Int32[np.ndarray, "T K"] | None,
    top_logprobs: Float32[np.ndarray, "T K"] | None,
) -> list[ScoredToken]:
    if top_ids is None or top_logprobs is None:
        top_ids, top_logprobs = np.zeros((len(ids), 0), np.int32), np.zeros((len(ids), 0), "f4")
    # clamped for JSON; nan, of a prompt's first token, stays
    clamped = np.maximum(top_logprobs, np.float32(NEVER))
    columns = ids.tolist(), logprobs.tolist(), top_ids.tolist(), clamped.tolist()
    return list(zip(*columns, strict=True))


def sampled_tokens(sampled: Sample | Delta, *, raw: bool = False) -> list[ScoredToken]:
    chosen = sampled.raw_logprobs if raw else sampled.logprobs
    assert chosen is not None, "raw logprobs were not asked of the engine"
    return scored_tokens(sampled.token_ids, chosen, sampled.top_ids, sampled.top_logprobs)


def chat_logprobs(detokenizer: Detokenizer, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Log-probabilities as chat has them."""

    def scored(token: int, logprob: float) -> dict[str, Any]:
        piece = detokenizer.piece(token)
        return {"token": piece.text, "logprob": logprob, "bytes": piece.data}

    content = []
    for token, logprob, ids, logprobs in tokens:
        top = [scored(*likely) for likely in zip(ids, logprobs, strict=True)]
        content.append(scored(token, logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def plain_logprobs(
    detokenizer: Detokenizer, tokens: Sequence[ScoredToken], offsets: Sequence[int]
) -> dict[str, Any]:
    """Log-probabilities as plain completions have them."""

    def likely(token: int, logprob: float, ids: list[int], logprobs: list[float]) -> Any:
        """Logprobs of the likeliest tokens, and of the one that is there, by text."""
        if math.isnan(logprob):
            return None
        by_text: dict[str, float] = {}
        for other, value in [*zip(ids, logprobs, strict=True), (token, logprob)]:
            by_text.setdefault(detokenizer.piece(other).text, value)
        return by_text

    return {
        "tokens": [detokenizer.piece(token).text for token, *_ in tokens],
        "token_logprobs": [None if math.isnan(value) else value for _, value, *_ in tokens],
        "top_logprobs": [likely(*scored) for scored in tokens],
        "text_offset": offsets,
    }


def usage(
    prompts: Sequence[Int32[np.ndarray, " _"]], results: Sequence[GenerationResult]
) -> dict[str, Any]:
    """Token usage: prompt, completion, total, and the prompts' tokens that were in the cache."""
    prompted, sampled = sum(map(len, prompts)), tokens_of(results)
    return {
        "prompt_tokens": prompted,
        "completion_tokens": sampled,
        "total_tokens": prompted + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in results)},
    }


def tokens_of(results: Sequence[GenerationResult]) -> int:
    return sum(len(sample.token_ids) for result in results for sample in result.samples)


def timings(result: GenerationResult) -> ServerTimings:
    return ServerTimings(
        queue_s=result.queue_s, prefill_s=result.prefill_s, decode_s=result.decode_s
    )


def complete_response(
    top: dict[str, Any],
    choices: list[dict[str, Any]],
    prompts: Sequence[Int32[np.ndarray, " _"]],
    results: Sequence[GenerationResult],
    **more: Any,
) -> bytes:
    """The JSON of a response that is sent at once; it names the weights of the last prompt."""
    last = results[-1]
    body = {"choices": choices, "usage": usage(prompts, results), **more}
    identity = {"weight_version": last.weight_version, "parameters_digest": last.parameters_digest}
    return dumps(top | body | identity)


def dumps(body: Any) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + dumps(body) + b"\n\n"


def json_response(body: Any, status: int = 200) -> Response:
    return Response(dumps(body), status, media_type="application/json")

"""JSON of responses, complete or as server-sent events.

Owns the text of a finished sample, its log-probabilities in OpenAI's two shapes, and the JSON of
chat and plain completions. Pure functions, run on the writer's thread. Leaves out routes (`chat`,
`completions`, `token_routes`), sending (`request_handler`), and the compact form that `protocol`
reads.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson
from jaxtyping import Float32, Int32

from marin_rl.inference.client.answers import ServerTimings
from marin_rl.inference.client.protocol import call_body
from marin_rl.inference.generation import Delta, GenerationResult, PromptScores, Sample
from marin_rl.inference.stops import text_before_stop
from marin_rl.serving.http.errors import new_id
from marin_rl.serving.text.detokenizer import Detokenizer, IncrementalDetokenizer, Offsets
from marin_rl.tool_calls import ParsedAnswer
from marin_rl.types import ToolCall

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
        """A sample's text that has only begun."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Tokens with their log-probabilities, of the requested distribution."""

    ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    @staticmethod
    def of(sampled: Sample | Delta, *, raw: bool) -> "Scores":
        """Those of a sample, or of what a chunk added to it."""
        chosen = sampled.raw_logprobs if raw else sampled.logprobs
        assert chosen is not None, "raw logprobs were not asked of the engine"
        tops = (sampled.top_ids, sampled.top_logprobs)
        return _scores(sampled.token_ids, chosen, *tops)

    @staticmethod
    def of_prompt(prompt: Int32[np.ndarray, " P"], scores: PromptScores) -> "Scores":
        """Those of a prompt; the first one's is nan."""
        return _scores(prompt, scores.logprobs, scores.top_ids, scores.top_logprobs)


def _scores(
    ids: Int32[np.ndarray, " T"],
    logprobs: Float32[np.ndarray, " T"],
    top_ids: Int32[np.ndarray, "T K"] | None,
    top_logprobs: Float32[np.ndarray, "T K"] | None,
) -> Scores:
    if top_ids is None or top_logprobs is None:
        top_ids, top_logprobs = np.zeros((len(ids), 0), np.int32), np.zeros((len(ids), 0), "f4")
    # clamped for JSON; nan, of a prompt's first token, stays
    return Scores(
        ids=ids.tolist(),
        logprobs=logprobs.tolist(),
        top_ids=top_ids.tolist(),
        top_logprobs=np.maximum(top_logprobs, np.float32(NEVER)).tolist(),
    )


def chat_logprobs(detokenizer: Detokenizer, scores: Scores) -> dict[str, Any]:
    """Log-probabilities as chat has them."""
    content = []
    for token, logprob, ids, logprobs in zip(
        scores.ids, scores.logprobs, scores.top_ids, scores.top_logprobs, strict=True
    ):
        top = [_scored(detokenizer, *likely) for likely in zip(ids, logprobs, strict=True)]
        content.append(_scored(detokenizer, token, logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _scored(detokenizer: Detokenizer, token: int, logprob: float) -> dict[str, Any]:
    piece = detokenizer.piece(token)
    return {"token": piece.text, "logprob": logprob, "bytes": piece.data}


def plain_logprobs(detokenizer: Detokenizer, scores: Scores, offsets: Offsets) -> dict[str, Any]:
    """Log-probabilities as plain completions have them; `offsets` go on where they were."""
    return {
        "tokens": [detokenizer.piece(token).text for token in scores.ids],
        "token_logprobs": [_finite(logprob) for logprob in scores.logprobs],
        "top_logprobs": [
            _likely(detokenizer, *row)
            for row in zip(
                scores.ids, scores.logprobs, scores.top_ids, scores.top_logprobs, strict=True
            )
        ],
        "text_offset": offsets.of(scores.ids),
    }


def _finite(logprob: float) -> float | None:
    return None if math.isnan(logprob) else logprob


def _likely(
    detokenizer: Detokenizer, token: int, logprob: float, ids: list[int], logprobs: list[float]
) -> dict[str, float] | None:
    """The likeliest tokens by text, and the one that is there."""
    if math.isnan(logprob):
        return None
    by_text: dict[str, float] = {}
    for other, value in [*zip(ids, logprobs, strict=True), (token, logprob)]:
        by_text.setdefault(detokenizer.piece(other).text, value)
    return by_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHeader:
    """Fields at the top of every answer of one request, complete or in chunks."""

    id: str
    created: int

    @staticmethod
    def new(kind: str) -> "ResponseHeader":
        """A new one, of the kind "chatcmpl" or "cmpl"."""
        return ResponseHeader(id=f"{kind}-{new_id()}", created=int(time.time()))

    def body(self, kind: str, model: str, fingerprint: str) -> dict[str, Any]:
        """Its fields; `kind` is the object's."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": model,
            "system_fingerprint": fingerprint,
        }


def usage(
    prompts: Sequence[Int32[np.ndarray, " _"]], results: Sequence[GenerationResult]
) -> dict[str, Any]:
    """Token usage: prompt, completion, total, and the prompts' tokens that were in the cache."""
    prompted, sampled = sum(map(len, prompts)), tokens_of(results)
    cached = sum(result.cached_tokens for result in results)
    return {
        "prompt_tokens": prompted,
        "completion_tokens": sampled,
        "total_tokens": prompted + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def tokens_of(results: Sequence[GenerationResult]) -> int:
    """Number of sampled tokens."""
    return sum(len(sample.token_ids) for result in results for sample in result.samples)


def identity(result: GenerationResult | Delta) -> dict[str, Any]:
    """Our own addition: which weights answered."""
    return {"weight_version": result.weight_version, "parameters_digest": result.parameters_digest}


def timings(result: GenerationResult) -> ServerTimings:
    """Our own addition: where the time went."""
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
    """The JSON of an answer that is sent at once; `top` is what its header says."""
    body = {"choices": choices, "usage": usage(prompts, results)}
    return dumps(top | body | more | identity(results[-1]))


def message(parsed: ParsedAnswer) -> dict[str, Any]:
    """An assistant's message."""
    body: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.calls:
        body["tool_calls"] = [call_body(call) for call in parsed.calls]
    return body


def call_delta(index: int, call: ToolCall) -> dict[str, Any]:
    """A call as streams have it."""
    return {"index": index, **call_body(call)}


def finish_reason(reason: str, calls: int) -> str:
    """The finish reason of a sample, in OpenAI's words."""
    return "tool_calls" if calls and reason == "stop" else reason


def dumps(body: Any) -> bytes:
    """JSON, of arrays too."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def event(body: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + dumps(body) + b"\n\n"

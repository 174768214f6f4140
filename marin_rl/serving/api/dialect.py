"""Dialects: what a route that samples asks of the engine, and how it words the response.

Each route is a class (`completions`, `generate`) and each request an instance of it. Owns the steps
that chat and plain completions have in common, and what responses of all dialects do: usage,
log-probabilities in OpenAI's two shapes, and JSON, complete or as server-sent events. Leaves out
threads and deadlines (`request_handler`).
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import orjson
from jaxtyping import Float32, Int32
from pydantic import BaseModel
from starlette.responses import Response

from marin_rl.inference.client.answers import ServerTimings
from marin_rl.inference.generation import Delta, GenerationRequest, GenerationResult, Sample
from marin_rl.serving.api.requests import SamplingBody
from marin_rl.serving.api.service import Prompt, Service
from marin_rl.serving.http.errors import ApiError, Body, new_id, parse
from marin_rl.serving.text.detokenizer import Detokenizer

B = TypeVar("B", bound=SamplingBody)

# What OpenAI gives for a token that cannot be drawn: JSON has no minus infinity.
NEVER = -9999.0
DONE = b"data: [DONE]\n\n"  # ends a stream of server-sent events


class Dialect(ABC):
    """A parsed request for the engine, and the writer of its response.

    Made of a body, on the tokenizing thread; raises ApiError. `model` is the name, or the id of the
    weights, that was asked for. The writing thread calls the methods.
    """

    path: ClassVar[str]
    request_model: ClassVar[type[Body]]
    response_model: ClassVar[type[BaseModel]]
    summary: ClassVar[str]
    may_stream: ClassVar[bool] = False

    model: str
    requests: list[GenerationRequest]
    stream: bool = False

    @abstractmethod
    def __init__(self, service: Service, data: bytes) -> None: ...

    @abstractmethod
    def end(self, results: Sequence[GenerationResult]) -> bytes:
        """The bytes that are sent when every prompt has its samples."""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The bytes of a stream for what a chunk added to a sample.

        Empty if nothing shows yet, and where responses are always whole.
        """
        return b""

    def failure(self, error: ApiError) -> bytes:
        """The last bytes of a stream that cannot be completed."""
        return event(error.body) + DONE


class TextDialect(Dialect, Generic[B]):
    """OpenAI's chat and plain completions, whole or as a stream of chunks."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    may_stream = True

    def __init__(self, service: Service, data: bytes) -> None:
        body = self._read(data)
        self._body, (self.model, self._adapter) = service.checked(body, body.model)
        self.stream, self._service = bool(body.stream), service
        self._id, self._created = f"{self.id_prefix}-{new_id()}", int(time.time())
        self._prompts = self._encoded()
        self._decoding = service.decoding(self._body)

    def _read(self, data: bytes) -> B:
        return parse(self.request_model, data)  # type: ignore[return-value] - each has its own

    @abstractmethod
    def _encoded(self) -> list[Prompt]: ...

    @abstractmethod
    def _choice(self, prompt: int, result: GenerationResult, sample: Sample) -> dict[str, Any]:
        """A finished sample, except for its index."""

    def _top_of_response(self, result: GenerationResult) -> dict[str, Any]:
        return {}

    def _chunks_of_unsampled(self, results: Sequence[GenerationResult]) -> bytes:
        return b""

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        if self.stream:
            data = self._chunks_of_unsampled(results)
            if self._body.include_usage:
                counts = usage(self._prompts, results)
                data += event(self._chunk(results[-1], []) | {"usage": counts})
            return data + DONE
        choices: list[dict[str, Any]] = []
        for prompt, result in enumerate(results):
            for sample in result.samples or [NOTHING] * self._body.samples:
                choice = self._choice(prompt, result, sample)
                # of the weights that the response names, unless its tokens name others
                older = result.weight_version != results[-1].weight_version
                if older and choice["policy_versions"] is None:
                    choice["policy_versions"] = [result.weight_version] * len(sample.token_ids)
                choices.append({"index": len(choices), **choice})
        top, more = self._top(self.kind, results[-1]), self._top_of_response(results[-1])
        return complete_response(top, choices, self._prompts, results, **more)

    def _top(self, kind: str, source: GenerationResult | Delta) -> dict[str, Any]:
        """Fields at the top of a response or chunk; `source` has the weight version."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.id_of(source),
            "system_fingerprint": self._service.fingerprint(source.parameters_digest),
        }

    def _chunk(
        self, source: GenerationResult | Delta, choices: list[dict[str, Any]], **more: Any
    ) -> dict[str, Any]:
        # where usage was asked for, the last chunk has it
        pending = {"usage": None} if self._body.include_usage else {}
        version = {"weight_version": source.weight_version}
        return self._top(self.chunk_kind, source) | pending | version | more | {"choices": choices}


# a token and its logprob, the likeliest tokens in its place and their logprobs
ScoredToken = tuple[int, float, list[int], list[float]]


# What a response with max_tokens 0 holds for each sample.
NOTHING = Sample(
    token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="length"
)


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


def prompt_logprobs(
    detokenizer: Detokenizer, prompt: Int32[np.ndarray, " T"], result: GenerationResult, top: int
) -> list[dict[str, Any] | None]:
    """As vLLM has it: null, then each token by its id, first, with the likeliest after it.

    The rank of a token that is none of the `top` likeliest is given as the next, for clients sort
    by it.
    """
    scores, name = result.prompt_scores, detokenizer.name
    assert scores is not None, "the engine was asked for them"
    columns = prompt, scores.logprobs, scores.top_ids, scores.top_logprobs
    places: list[dict[str, Any] | None] = [None]
    for token, logprob, ids, logprobs in scored_tokens(*columns)[1:]:
        ranks = {other: rank for rank, other in enumerate(ids[:top], 1)}
        place: dict[str, Any] = {}
        for id, value in ({token: logprob} | dict(zip(ranks, logprobs, strict=False))).items():
            rank = ranks.get(id, top + 1)
            place[str(id)] = {"logprob": value, "rank": rank, "decoded_token": name(id)}
        places.append(place)
    return places


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

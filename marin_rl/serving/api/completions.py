"""POST /v1/completions: one prompt or a list of them, as text or ids, with or without their scores.

Owns what plain completions ask of the engine and how their answers are written, whole or in chunks.
Prompt p's samples have the indices p * n + i, and draw with the seeds seed + p * n + i, or with
seeds[p] + i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.inference.client.protocol import COMPLETIONS_ROUTE
from marin_rl.inference.generation import Delta, GenerationResult, PromptScores, Sample
from marin_rl.serving.api.openapi import ApiRoute, TextCompletion
from marin_rl.serving.api.request_handler import EngineRequest, SamplingEndpoint
from marin_rl.serving.api.requests import CompletionBody
from marin_rl.serving.api.responses import (
    DONE,
    ResponseHeader,
    Scores,
    TextDecoding,
    complete_response,
    event,
    plain_logprobs,
    timings,
    usage,
)
from marin_rl.serving.api.service import Service
from marin_rl.serving.http.errors import parse
from marin_rl.serving.text.detokenizer import IncrementalDetokenizer, Offsets

NEW_TOKENS = 16  # OpenAI's default

Prompt = Int32[np.ndarray, " _"]  # each of its own length


def completions_routes(service: Service) -> list[ApiRoute]:
    """The route of plain completions."""
    route = ApiRoute(
        COMPLETIONS_ROUTE,
        SamplingEndpoint(service, _prepare),
        methods=["POST"],
        request=CompletionBody,
        response=TextCompletion,
        streams=True,
        summary="Continuations of texts, or of token ids.",
    )
    return [route]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Parsed request for completions, for streamed and for complete answers."""

    service: Service
    body: CompletionBody
    prompts: list[Prompt]
    decoding: TextDecoding
    header: ResponseHeader

    def echoed(self, prompt: int) -> str:
        """The text that stands before each completion of a prompt."""
        if not self.body.echo:
            return ""
        text_or_ids = self.body.prompts[prompt]
        if isinstance(text_or_ids, str):
            return text_or_ids
        return self.decoding.detokenizer.of(text_or_ids)

    @property
    def scored(self) -> bool:
        """True if the answer contains the logprobs of the prompts."""
        return bool(self.body.echo) and self.body.logprobs is not None


def _prepare(service: Service, data: bytes) -> EngineRequest:
    """Read a body and prepare what it asks for. ApiError for what is refused."""
    body = service.with_stop_tokens(parse(CompletionBody, data))
    target = service.target(body.model)
    service.check_fields(body, prompts=len(body.prompts))
    prompts = [_encoded(service, prompt) for prompt in body.prompts]
    plain = Plain(
        service=service,
        body=body,
        prompts=prompts,
        decoding=service.decoding(body),
        header=ResponseHeader.new("cmpl"),
    )
    requests = []
    for number, prompt in enumerate(prompts):
        limit = service.new_tokens(prompt, body.max_tokens, param="prompt")
        if body.max_tokens is None:
            limit = min(limit, NEW_TOKENS)
        requests.append(
            body.request(
                prompt,
                limit,
                number=number,
                top_logprobs=body.logprobs or 0,
                raw_logprobs=body.raw,
                score_prompt=plain.scored or limit == 0,
                adapter=target.load,
            )
        )
    if not body.stream:
        return EngineRequest(model=target.model, requests=requests, end=partial(_complete, plain))
    stream = PlainStream(plain)
    return EngineRequest(model=target.model, requests=requests, end=stream.end, delta=stream.delta)


def _encoded(service: Service, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        return service.encode(prompt)
    service.check_ids(prompt, "prompt")
    return np.asarray(prompt, np.int32)


def _complete(plain: Plain, results: Sequence[GenerationResult]) -> bytes:
    """The JSON of an answer when all samples of all prompts are there.

    It names the weights of its last prompt; where those of another were older, its tokens say so.
    """
    final = results[-1].weight_version
    choices: list[dict[str, Any]] = []
    for prompt, result in enumerate(results):
        for sample in result.samples or (_NOTHING,) * plain.body.samples:
            choice = _finished(plain, prompt, result, sample)
            if choice["policy_versions"] is None and result.weight_version != final:
                choice["policy_versions"] = [result.weight_version] * len(sample.token_ids)
            choices.append({"index": len(choices), **choice})
    top = plain.service.top(plain.header, "text_completion", results[-1])
    return complete_response(top, choices, plain.prompts, results)


def _finished(
    plain: Plain, prompt: int, result: GenerationResult, sample: Sample
) -> dict[str, Any]:
    body = plain.body
    text = plain.decoding.text(sample.token_ids.tolist(), sample.finish_reason)
    choice: dict[str, Any] = {
        "text": plain.echoed(prompt) + text,
        "finish_reason": sample.finish_reason,
        "logprobs": None,
        "policy_versions": sample.policy_versions,
    }
    if body.compact_logprobs:
        choice["token_logprobs"] = sample.raw_logprobs if body.raw else sample.logprobs
        choice["timings"] = timings(result)
    elif body.logprobs is not None:
        offsets = Offsets(plain.decoding.detokenizer, len(plain.echoed(prompt)))
        choice["logprobs"] = _logprobs(plain, prompt, result.prompt_scores, sample, offsets)
    if body.return_token_ids:
        ids = {"prompt_token_ids": plain.prompts[prompt], "token_ids": sample.token_ids}
        choice |= ids
    return choice


def _logprobs(
    plain: Plain,
    prompt: int,
    prompt_scores: PromptScores | None,
    sampled: Sample | Delta,
    offsets: Offsets,
) -> dict[str, Any]:
    """Log-probabilities of sampled tokens, after those of the prompt where it is scored.

    `offsets` are those of the sampled tokens.
    """
    detokenizer, parts = plain.decoding.detokenizer, []
    if prompt_scores is not None and plain.scored:
        scores = Scores.of_prompt(plain.prompts[prompt], prompt_scores)
        parts.append(plain_logprobs(detokenizer, scores, Offsets(detokenizer)))
    if len(sampled.token_ids):
        scores = Scores.of(sampled, raw=plain.body.raw)
        parts.append(plain_logprobs(detokenizer, scores, offsets))
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for part in parts for item in part[name]] for name in names}


# What an answer with max_tokens 0 holds for each sample.
_NOTHING = Sample(
    token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="length"
)


@dataclass(slots=True)
class _SampleState:
    """State of a sample's stream."""

    text: IncrementalDetokenizer
    offsets: Offsets


class PlainStream:
    """Writes the chunks of plain completions."""

    def __init__(self, plain: Plain) -> None:
        self._plain = plain
        self._samples: dict[int, _SampleState] = {}

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The chunk for what a sample gained; nothing where there is nothing to tell yet."""
        plain, body = self._plain, self._plain.body
        index = prompt * body.samples + delta.index
        state, first = self._samples.get(index), False
        echoed = ""
        if state is None:
            first, echoed = True, plain.echoed(prompt)
            offsets = Offsets(plain.decoding.detokenizer, len(echoed))
            state = self._samples[index] = _SampleState(plain.decoding.incremental(), offsets)
        ids = delta.token_ids.tolist()
        text = echoed + plain.decoding.new_text(state.text, ids, delta.finish_reason)
        if not (text or delta.finish_reason or body.return_token_ids or body.logprobs is not None):
            return b""
        choice = _choice(index, text, delta.finish_reason)
        if body.logprobs is not None:
            choice["logprobs"] = _logprobs(plain, prompt, delta.prompt_scores, delta, state.offsets)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if body.return_token_ids and first:
            choice["prompt_token_ids"] = plain.prompts[prompt]
        return event(self._chunk(delta) | {"choices": [choice]})

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        """Choices without tokens, the usage if requested, and the end."""
        plain, data = self._plain, b""
        for index in range(len(results) * plain.body.samples):
            if index not in self._samples:
                prompt = index // plain.body.samples
                choice = _choice(index, plain.echoed(prompt), "length")
                if plain.scored:
                    scores = results[prompt].prompt_scores
                    offsets = Offsets(plain.decoding.detokenizer)
                    choice["logprobs"] = _logprobs(plain, prompt, scores, _NOTHING, offsets)
                if plain.body.return_token_ids:
                    choice |= {"prompt_token_ids": plain.prompts[prompt], "token_ids": []}
                data += event(self._chunk(results[prompt]) | {"choices": [choice]})
        if plain.body.include_usage:
            counts = usage(plain.prompts, results)
            data += event(self._chunk(results[-1]) | {"choices": [], "usage": counts})
        return data + DONE

    def _chunk(self, source: Delta | GenerationResult) -> dict[str, Any]:
        plain = self._plain
        return plain.service.chunk(plain.header, "text_completion", source, plain.body)


def _choice(index: int, text: str, finish_reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason or None}

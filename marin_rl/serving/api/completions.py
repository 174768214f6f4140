"""POST /v1/completions: one prompt or a list of them, as text or ids, with or without their scores.

Owns what plain completions ask of the engine and how their responses are written, whole or in
chunks. Prompt p's samples have the indices p * n + i, and draw with the seeds seed + p * n + i, or
with seeds[p] + i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from marin_rl.inference.generation import Delta, GenerationResult, PromptScores, Sample
from marin_rl.serving.api.request_handler import EngineRequest
from marin_rl.serving.api.requests import CompletionBody
from marin_rl.serving.api.responses import (
    DONE,
    Scores,
    complete_response,
    event,
    plain_logprobs,
    timings,
    usage,
)
from marin_rl.serving.api.service import Prompt, Service
from marin_rl.serving.http.errors import parse
from marin_rl.serving.text.detokenizer import IncrementalDetokenizer, Offsets

NEW_TOKENS = 16  # OpenAI's default
# What a response with max_tokens 0 holds for each sample.
_NOTHING = Sample(
    token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="length"
)


def prepare_completions(service: Service, data: bytes) -> EngineRequest:
    """Read a body and make the engine's request. Raises ApiError."""
    body = parse(CompletionBody, data)
    body, target = service.checked(body, body.model, prompts=len(body.prompts))
    prompts = [service.prompt(prompt, "prompt") for prompt in body.prompts]
    plain, requests = Completions(service, body, prompts), []
    for number, prompt in enumerate(prompts):
        limit = service.new_tokens(prompt, body.max_tokens, param="prompt", default=NEW_TOKENS)
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
    if body.stream:
        return EngineRequest(target.model, requests, plain.end, plain.delta)
    return EngineRequest(target.model, requests, plain.complete)


@dataclass(slots=True)
class _SampleState:
    """State of a sample's stream."""

    text: IncrementalDetokenizer
    offsets: Offsets


class Completions:
    """A request for plain completions, and the writer of its response.

    `scored` tells that the response contains the logprobs of the prompts.
    """

    def __init__(self, service: Service, body: CompletionBody, prompts: list[Prompt]) -> None:
        self._service, self._body, self._prompts = service, body, prompts
        self._decoding = service.decoding(body)
        self._header = service.header("cmpl")
        self._samples: dict[int, _SampleState] = {}
        self.scored = bool(body.echo) and body.logprobs is not None

    def _echoed(self, prompt: int) -> str:
        """The text that stands before each completion of a prompt."""
        if not self._body.echo:
            return ""
        text_or_ids = self._body.prompts[prompt]
        if isinstance(text_or_ids, str):
            return text_or_ids
        return self._service.detokenizer.of(text_or_ids)

    def complete(self, results: Sequence[GenerationResult]) -> bytes:
        """The JSON of a response when all samples of all prompts are there.

        It names the weights of its last prompt; where those of another were older, its tokens say
        so.
        """
        final = results[-1].weight_version
        choices: list[dict[str, Any]] = []
        for prompt, result in enumerate(results):
            for sample in result.samples or (_NOTHING,) * self._body.samples:
                choice = self._choice(prompt, result, sample)
                if choice["policy_versions"] is None and result.weight_version != final:
                    choice["policy_versions"] = [result.weight_version] * len(sample.token_ids)
                choices.append({"index": len(choices), **choice})
        top = self._service.top(self._header, "text_completion", results[-1])
        return complete_response(top, choices, self._prompts, results)

    def _choice(self, prompt: int, result: GenerationResult, sample: Sample) -> dict[str, Any]:
        body, echoed = self._body, self._echoed(prompt)
        text = self._decoding.text(sample.token_ids.tolist(), sample.finish_reason)
        choice: dict[str, Any] = {
            "text": echoed + text,
            "finish_reason": sample.finish_reason,
            "logprobs": None,
            "policy_versions": sample.policy_versions,
        }
        if body.compact_logprobs:
            choice["token_logprobs"] = sample.raw_logprobs if body.raw else sample.logprobs
            choice["timings"] = timings(result)
        elif body.logprobs is not None:
            offsets = Offsets(self._service.detokenizer, len(echoed))
            choice["logprobs"] = self._logprobs(prompt, result.prompt_scores, sample, offsets)
        if body.return_token_ids:
            choice |= {"prompt_token_ids": self._prompts[prompt], "token_ids": sample.token_ids}
        return choice

    def _logprobs(
        self,
        prompt: int,
        prompt_scores: PromptScores | None,
        sampled: Sample | Delta,
        offsets: Offsets,
    ) -> dict[str, Any]:
        """Log-probabilities of sampled tokens, after those of the prompt where it is scored.

        `offsets` are those of the sampled tokens.
        """
        detokenizer, parts = self._service.detokenizer, []
        if prompt_scores is not None and self.scored:
            scores = Scores.of_prompt(self._prompts[prompt], prompt_scores)
            parts.append(plain_logprobs(detokenizer, scores, Offsets(detokenizer)))
        if len(sampled.token_ids):
            scores = Scores.of(sampled, raw=self._body.raw)
            parts.append(plain_logprobs(detokenizer, scores, offsets))
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [item for part in parts for item in part[name]] for name in names}

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The chunk for what a sample gained; empty while there is nothing to send yet."""
        body, index = self._body, prompt * self._body.samples + delta.index
        state, echoed = self._samples.get(index), ""
        first = state is None
        if state is None:
            echoed = self._echoed(prompt)
            offsets = Offsets(self._service.detokenizer, len(echoed))
            state = self._samples[index] = _SampleState(self._decoding.incremental(), offsets)
        ids = delta.token_ids.tolist()
        text = echoed + self._decoding.new_text(state.text, ids, delta.finish_reason)
        if not (text or delta.finish_reason or body.return_token_ids or body.logprobs is not None):
            return b""
        more: dict[str, Any] = {}
        if body.logprobs is not None:
            scores = delta.prompt_scores
            more["logprobs"] = self._logprobs(prompt, scores, delta, state.offsets)
        if body.return_token_ids:
            more["token_ids"] = delta.token_ids
            if first:
                more["prompt_token_ids"] = self._prompts[prompt]
        return self._event(delta, index, text, delta.finish_reason, more)

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        """Choices without tokens, the usage if requested, and the end of a stream."""
        data = b""
        for index in range(len(results) * self._body.samples):
            if index in self._samples:
                continue
            prompt = index // self._body.samples
            more: dict[str, Any] = {}
            if self.scored:
                scores, offsets = results[prompt].prompt_scores, Offsets(self._service.detokenizer)
                more["logprobs"] = self._logprobs(prompt, scores, _NOTHING, offsets)
            if self._body.return_token_ids:
                more |= {"prompt_token_ids": self._prompts[prompt], "token_ids": []}
            data += self._event(results[prompt], index, self._echoed(prompt), "length", more)
        if self._body.include_usage:
            counts = usage(self._prompts, results)
            data += event(self._chunk(results[-1]) | {"choices": [], "usage": counts})
        return data + DONE

    def _event(
        self, source: Delta | GenerationResult, index: int, text: str, reason: str, more: Any
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason or None}
        return event(self._chunk(source) | {"choices": [choice | more]})

    def _chunk(self, source: Delta | GenerationResult) -> dict[str, Any]:
        usage = self._body.include_usage
        return self._service.chunk(self._header, "text_completion", source, usage=usage)

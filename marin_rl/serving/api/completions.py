"""POST /v1/completions: one prompt or a list of them, as text or ids, with or without their scores.

Owns what plain completions ask of the engine and how their responses are written, whole or in
chunks. Prompt p's samples have the indices p * n + i, and draw with the seeds seed + p * n + i, or
with seeds[p] + i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from marin_rl.inference.client.protocol import COMPLETIONS_ROUTE
from marin_rl.inference.generation import Delta, GenerationResult, PromptScores, Sample
from marin_rl.serving.api.dialect import TextDialect
from marin_rl.serving.api.requests import CompletionBody
from marin_rl.serving.api.response_models import TextCompletion
from marin_rl.serving.api.responses import (
    event,
    plain_logprobs,
    sampled_tokens,
    scored_tokens,
    timings,
)
from marin_rl.serving.api.service import Prompt, Service
from marin_rl.serving.text.detokenizer import IncrementalDetokenizer, Offsets

NEW_TOKENS = 16  # OpenAI's default
# What a response with max_tokens 0 holds for each sample.
_NOTHING = Sample(
    token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="length"
)


@dataclass(slots=True)
class _SampleState:
    text: IncrementalDetokenizer
    offsets: Offsets


class Completions(TextDialect[CompletionBody]):
    """POST /v1/completions."""

    path, request_model, response_model = COMPLETIONS_ROUTE, CompletionBody, TextCompletion
    summary = "Continuations of texts, or of token ids."
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, service: Service, data: bytes) -> None:
        super().__init__(service, data)
        body, self._states = self._body, dict[int, _SampleState]()
        # the response contains the logprobs of the prompts
        self._scored = bool(body.echo) and body.logprobs is not None
        self.requests = []
        for number, prompt in enumerate(self._prompts):
            limit = service.new_tokens(prompt, body.max_tokens, param="prompt", default=NEW_TOKENS)
            request = body.request(
                prompt,
                limit,
                number=number,
                top_logprobs=body.logprobs or 0,
                raw_logprobs=body.raw,
                score_prompt=self._scored or limit == 0,
                adapter=self._adapter,
            )
            self.requests.append(request)

    def _encoded(self) -> list[Prompt]:
        return [self._service.prompt(prompt, "prompt") for prompt in self._body.prompts]

    def _echoed(self, prompt: int) -> str:
        """The text that stands before each completion of a prompt."""
        if not self._body.echo:
            return ""
        text_or_ids = self._body.prompts[prompt]
        if isinstance(text_or_ids, str):
            return text_or_ids
        return self._service.detokenizer.of(text_or_ids)

    def _samples(self, result: GenerationResult) -> Sequence[Sample]:
        return result.samples or (_NOTHING,) * self._body.samples

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
        detokenizer, tokens, places = self._service.detokenizer, [], []
        if prompt_scores is not None and self._scored:
            ids, scores = self._prompts[prompt], prompt_scores
            tokens += scored_tokens(ids, scores.logprobs, scores.top_ids, scores.top_logprobs)
            places += Offsets(detokenizer).of(ids.tolist())
        if len(sampled.token_ids):
            tokens += sampled_tokens(sampled, raw=self._body.raw)
            places += offsets.of(sampled.token_ids.tolist())
        return plain_logprobs(detokenizer, tokens, places)

    def delta(self, prompt: int, delta: Delta) -> bytes:
        body, index = self._body, prompt * self._body.samples + delta.index
        state, echoed = self._states.get(index), ""
        first = state is None
        if state is None:
            echoed = self._echoed(prompt)
            offsets = Offsets(self._service.detokenizer, len(echoed))
            state = self._states[index] = _SampleState(self._decoding.incremental(), offsets)
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

    def _unsampled(self, results: Sequence[GenerationResult]) -> bytes:
        data = b""
        for index in range(len(results) * self._body.samples):
            if index in self._states:
                continue
            prompt = index // self._body.samples
            more: dict[str, Any] = {}
            if self._scored:
                scores, offsets = results[prompt].prompt_scores, Offsets(self._service.detokenizer)
                more["logprobs"] = self._logprobs(prompt, scores, _NOTHING, offsets)
            if self._body.return_token_ids:
                more |= {"prompt_token_ids": self._prompts[prompt], "token_ids": []}
            data += self._event(results[prompt], index, self._echoed(prompt), "length", more)
        return data

    def _event(
        self, source: Delta | GenerationResult, index: int, text: str, reason: str, more: Any
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason or None}
        return event(self._chunk(source, [choice | more]))

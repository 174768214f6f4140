"""OpenAI's completions: of chats, with a twin that takes the prompt's exact ids, and of prompts.

Owns what they ask of the engine (a rendered prompt, a form or calls that must be kept, scores of a
prompt) and how their responses are written, whole or in chunks. Prompt p's samples have the indices
p * n + i, and draw with the seeds seed + p * n + i, or with seeds[p] + i. Leaves out rendering
(`templates`) and forms (`constraints`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from marin_rl.inference.client.protocol import (
    CHAT_ROUTE,
    CHAT_TOKENS_ROUTE,
    COMPLETIONS_ROUTE,
    call_body,
)
from marin_rl.inference.generation import Delta, GenerationResult, PromptScores, Sample
from marin_rl.serving.api.dialect import (
    NOTHING,
    TextDialect,
    chat_logprobs,
    event,
    plain_logprobs,
    prompt_logprobs,
    sampled_tokens,
    scored_tokens,
    timings,
)
from marin_rl.serving.api.requests import ChatBody, ChatTokensBody, CompletionBody
from marin_rl.serving.api.response_models import ChatCompletion, TextCompletion
from marin_rl.serving.api.service import Prompt, Service
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.text.constraints import FORCED_KINDS, MakeWalker, forced_calls_grammar
from marin_rl.serving.text.detokenizer import IncrementalDetokenizer, Offsets
from marin_rl.tool_calls import ParsedAnswer, ToolCallStream, parameters_of, parse_tool_calls
from marin_rl.types import ToolCall

NEW_TOKENS = 16  # OpenAI's default


@dataclass(slots=True)
class _ChatState:
    text: IncrementalDetokenizer
    calls: ToolCallStream | None
    started: bool = False
    called: int = 0


class Chat(TextDialect[ChatBody]):
    """POST /v1/chat/completions."""

    path, request_model, response_model = CHAT_ROUTE, ChatBody, ChatCompletion
    summary = "Samples of a conversation's next message."
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    param = "messages"

    def __init__(self, service: Service, data: bytes) -> None:
        super().__init__(service, data)
        body, self._states = self._body, dict[int, _ChatState]()
        self._parameters = parameters_of(self._tools)
        self._form = service.tool_format if self._tools else None
        self._calls_max = 1 if body.parallel_tool_calls is False else None
        if self._form is not None and self._form.special:
            self._decoding = service.decoding(body, special=True)
        (prompt,) = self._prompts
        request = body.request(
            prompt,
            self._new_tokens(prompt),
            top_logprobs=body.top_logprobs or 0,
            raw_logprobs=body.raw,
            constraint=self._constraint(),
            adapter=self._adapter,
            probe=bool(body.probe),
        )
        self.requests = [request]

    def _new_tokens(self, prompt: Prompt) -> int:
        return self._service.new_tokens(prompt, self._body.new_tokens_max, param=self.param)

    @cached_property
    def _tools(self) -> list[dict[str, Any]]:
        return [] if self._body.tool_choice == "none" else self._body.offered

    def _encoded(self) -> list[Prompt]:
        body, options = self._body, self._body.chat_template_kwargs
        return [self._service.chat_ids(body.messages, tools=self._tools, options=options)]

    def _constraint(self) -> MakeWalker | None:
        """The constraint on the form of the response, or None. ApiError 400 for a wrong one."""
        body, tool_choice = self._body, self._body.tool_choice
        constraints = self._service.constraints
        if tool_choice in (None, "none", "auto"):
            return constraints.response_format(body.form)
        if self._form is None or self._form.kind not in FORCED_KINDS:
            raise ApiError(
                400,
                "tool_choice: the chat template of this model defines no form of calls that could "
                "be enforced; expected 'auto' or 'none'",
                param="tool_choice",
            )
        if body.form is not None and body.form["type"] != "text":
            raise ApiError(
                400,
                "response_format: expected none together with a tool_choice that asks for a call",
                param="response_format",
            )
        named = None if isinstance(tool_choice, str | None) else tool_choice.function.name
        tools = [tool for tool in self._tools if named in (None, tool["function"]["name"])]
        several = self._calls_max is None and named is None
        grammar = forced_calls_grammar(self._form, tools, self._service.tokenizer, several=several)
        return constraints.grammar(grammar, param="tools")

    def _top_of_response(self, result: GenerationResult) -> dict[str, Any]:
        ids = {"prompt_token_ids": self._prompts[0]} if self._body.return_token_ids else {}
        return {"timings": timings(result), **ids}

    def _choice(self, prompt: int, result: GenerationResult, sample: Sample) -> dict[str, Any]:
        body = self._body
        text = self._decoding.text(sample.token_ids.tolist(), sample.finish_reason)
        parsed = ParsedAnswer(content=text, calls=())
        if self._form is not None:
            parsed = parse_tool_calls(self._form, text, self._parameters, most=self._calls_max)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            message["tool_calls"] = [call_body(call) for call in parsed.calls]
        choice: dict[str, Any] = {
            "message": message,
            "finish_reason": _finish_reason(sample.finish_reason, len(parsed.calls)),
            "logprobs": None,
            "policy_versions": sample.policy_versions,
        }
        if body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        if body.logprobs and body.compact_logprobs:
            choice["token_logprobs"] = sample.raw_logprobs if body.raw else sample.logprobs
        elif body.logprobs:
            choice["logprobs"] = self._logprobs(sample)
        return choice

    def _logprobs(self, sampled: Sample | Delta) -> dict[str, Any]:
        tokens = sampled_tokens(sampled, raw=self._body.raw)
        return chat_logprobs(self._service.detokenizer, tokens)

    def delta(self, prompt: int, delta: Delta) -> bytes:
        body, state = self._body, self._states.get(delta.index)
        first = not self._states
        if state is None:
            calls = None if self._form is None else ToolCallStream(self._form, self._parameters)
            state = _ChatState(self._decoding.incremental(), calls)
            self._states[delta.index] = state
        message = self._message_delta(state, delta)
        state.started = True
        if not (message or delta.finish_reason or body.logprobs or body.return_token_ids):
            return b""
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": message,
            "logprobs": self._logprobs(delta) if body.logprobs else None,
            "finish_reason": _finish_reason(delta.finish_reason, state.called) or None,
        }
        more: dict[str, Any] = {}
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                more["prompt_token_ids"] = self._prompts[0]
        return event(self._chunk(delta, [choice], **more))

    def _message_delta(self, state: _ChatState, delta: Delta) -> dict[str, Any]:
        text = self._decoding.new_text(state.text, delta.token_ids.tolist(), delta.finish_reason)
        fields: dict[str, Any] = {} if state.started else {"role": "assistant"}
        if state.calls is None:
            if text or not state.started:
                fields["content"] = text
            return fields
        pieces = state.calls.feed(text) if text else []
        if delta.finish_reason:
            pieces += state.calls.finish()
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        if self._calls_max is not None:
            calls = calls[: self._calls_max - state.called]
        if content:
            fields["content"] = content
        if calls:
            numbered = enumerate(calls, state.called)
            fields["tool_calls"] = [{"index": index, **call_body(call)} for index, call in numbered]
            state.called += len(calls)
        return fields


class ChatTokens(Chat):
    """POST /v1/chat/completions/tokens."""

    path, request_model = CHAT_TOKENS_ROUTE, ChatTokensBody
    summary = "The same, where the caller knows the prompt's ids: the messages are not rendered."
    param = "tokens"

    def _encoded(self) -> list[Prompt]:
        assert isinstance(self._body, ChatTokensBody)
        return [self._service.prompt(self._body.tokens, "tokens")]


def _finish_reason(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason


class Completions(TextDialect[CompletionBody]):
    """POST /v1/completions."""

    path, request_model, response_model = COMPLETIONS_ROUTE, CompletionBody, TextCompletion
    summary = "Continuations of texts, or of token ids."
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, service: Service, data: bytes) -> None:
        super().__init__(service, data)
        body = self._body
        self._states: dict[int, tuple[IncrementalDetokenizer, Offsets]] = {}
        # the response contains the logprobs of the prompts
        self._scored = bool(body.echo) and body.logprobs is not None
        self.requests = []
        for number, prompt in enumerate(self._prompts):
            limit = service.new_tokens(prompt, body.max_tokens, param="prompt", default=NEW_TOKENS)
            request = body.request(
                prompt,
                limit,
                number=number,
                top_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0),
                raw_logprobs=body.raw,
                score_prompt=self._scored or limit == 0 or body.prompt_logprobs is not None,
                adapter=self._adapter,
            )
            self.requests.append(request)

    def _encoded(self) -> list[Prompt]:
        return [self._service.prompt(prompt, "prompt") for prompt in self._body.prompts]

    def _echoed(self, prompt: int) -> str:
        if not self._body.echo:
            return ""
        text_or_ids = self._body.prompts[prompt]
        if isinstance(text_or_ids, str):
            return text_or_ids
        return self._service.detokenizer.of(text_or_ids)

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
        if (top := body.prompt_logprobs) is not None:
            described = self._service.detokenizer, self._prompts[prompt]
            choice["prompt_logprobs"] = prompt_logprobs(*described, result, top)
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
        # prompt_logprobs may have asked the engine for more of them
        top = self._body.logprobs or 0
        tokens = [(token, value, ids[:top], likely[:top]) for token, value, ids, likely in tokens]
        return plain_logprobs(detokenizer, tokens, places)

    def delta(self, prompt: int, delta: Delta) -> bytes:
        body, index = self._body, prompt * self._body.samples + delta.index
        first, echoed = index not in self._states, ""
        if first:
            echoed = self._echoed(prompt)
            offsets = Offsets(self._service.detokenizer, len(echoed))
            self._states[index] = self._decoding.incremental(), offsets
        growing, offsets = self._states[index]
        text = echoed + self._decoding.new_text(
            growing, delta.token_ids.tolist(), delta.finish_reason
        )
        if not (text or delta.finish_reason or body.return_token_ids or body.logprobs is not None):
            return b""
        more: dict[str, Any] = {}
        if body.logprobs is not None:
            more["logprobs"] = self._logprobs(prompt, delta.prompt_scores, delta, offsets)
        if body.return_token_ids:
            more["token_ids"] = delta.token_ids
            if first:
                more["prompt_token_ids"] = self._prompts[prompt]
        return self._event(delta, index, text, delta.finish_reason, more)

    def _chunks_of_unsampled(self, results: Sequence[GenerationResult]) -> bytes:
        data = b""
        for index in range(len(results) * self._body.samples):
            if index in self._states:
                continue
            prompt = index // self._body.samples
            more: dict[str, Any] = {}
            if self._scored:
                scores, offsets = results[prompt].prompt_scores, Offsets(self._service.detokenizer)
                more["logprobs"] = self._logprobs(prompt, scores, NOTHING, offsets)
            if self._body.return_token_ids:
                more |= {"prompt_token_ids": self._prompts[prompt], "token_ids": []}
            data += self._event(results[prompt], index, self._echoed(prompt), "length", more)
        return data

    def _event(
        self, source: Delta | GenerationResult, index: int, text: str, reason: str, more: Any
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason or None}
        return event(self._chunk(source, [choice | more]))

"""POST /v1/chat/completions, and its twin that takes the prompt's exact ids.

Owns what chat asks of the engine (a rendered prompt, a form or calls that must be kept) and how its
responses are written, whole or in chunks. Leaves out rendering (`templates`) and forms
(`constraints`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marin_rl.inference.client.protocol import call_body
from marin_rl.inference.generation import Delta, GenerationResult, Sample
from marin_rl.serving.api.request_handler import EngineRequest
from marin_rl.serving.api.requests import ChatBody, ChatTokensBody
from marin_rl.serving.api.responses import (
    DONE,
    Scores,
    chat_logprobs,
    complete_response,
    event,
    timings,
    usage,
)
from marin_rl.serving.api.service import Prompt, Service
from marin_rl.serving.http.errors import ApiError, parse
from marin_rl.serving.text.constraints import MakeWalker, forced_calls_grammar
from marin_rl.serving.text.detokenizer import IncrementalDetokenizer
from marin_rl.tool_calls import ParsedAnswer, ToolCallStream, parse_tool_calls
from marin_rl.types import ToolCall


def prepare_chat(kind: type[ChatBody], service: Service, data: bytes) -> EngineRequest:
    """Read a body and make the engine's request. Raises ApiError."""
    body = parse(kind, data)
    body, target = service.checked(body, body.model)
    chat = Chat(service, body)
    param = "tokens" if isinstance(body, ChatTokensBody) else "messages"
    request = body.request(
        chat.prompt,
        service.new_tokens(chat.prompt, body.new_tokens_max, param=param),
        top_logprobs=body.top_logprobs or 0,
        raw_logprobs=body.raw,
        constraint=chat.constraint(),
        adapter=target.load,
        probe=bool(body.probe),
    )
    if body.stream:
        return EngineRequest(target.model, [request], chat.end, chat.delta)
    return EngineRequest(target.model, [request], chat.complete)


@dataclass(slots=True)
class _SampleState:
    """State of a sample's stream."""

    text: IncrementalDetokenizer
    calls: ToolCallStream | None
    started: bool = False
    called: int = 0


class Chat:
    """A chat request, and the writer of its response."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._service, self._body = service, body
        self._tools = [] if body.tool_choice == "none" else body.offered
        self._names = [tool["function"]["name"] for tool in self._tools]
        self._form = service.tool_format if self._tools else None
        self._calls_max = 1 if body.parallel_tool_calls is False else None
        special = self._form is not None and self._form.special
        self._decoding = service.decoding(body, special=special)
        if isinstance(body, ChatTokensBody):
            self.prompt: Prompt = service.prompt(body.tokens, "tokens")
        else:
            options = body.chat_template_kwargs
            self.prompt = service.chat_ids(body.messages, tools=self._tools, options=options)
        self._header = service.header("chatcmpl")
        self._samples: dict[int, _SampleState] = {}
        self._prompt_sent = False

    def constraint(self) -> MakeWalker | None:
        """The constraint on the form of the response, or None. ApiError 400 for a wrong one."""
        body, constraints = self._body, self._service.constraints
        if not body.must_call:
            return constraints.response_format(body.form)
        if self._form is None:
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
        tool_choice = body.tool_choice
        named = None if isinstance(tool_choice, str | None) else tool_choice.function.name
        tools = [tool for tool in self._tools if named in (None, tool["function"]["name"])]
        several = self._calls_max is None and named is None
        grammar = forced_calls_grammar(self._form, tools, self._service.tokenizer, several=several)
        return constraints.grammar(grammar, param="tools")

    def complete(self, results: Sequence[GenerationResult]) -> bytes:
        """The JSON of a response whose samples are all there."""
        (result,) = results
        top = self._service.top(self._header, "chat.completion", result)
        choices = [self._choice(index, sample) for index, sample in enumerate(result.samples)]
        more: dict[str, Any] = {"timings": timings(result)}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = self.prompt
        return complete_response(top, choices, [self.prompt], results, **more)

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        body = self._body
        text = self._decoding.text(sample.token_ids.tolist(), sample.finish_reason)
        parsed = ParsedAnswer(content=text, calls=())
        if self._form is not None:
            parsed = parse_tool_calls(self._form, text, self._names, most=self._calls_max)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            message["tool_calls"] = [call_body(call) for call in parsed.calls]
        choice: dict[str, Any] = {
            "index": index,
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
        scores = Scores.of(sampled, raw=self._body.raw)
        return chat_logprobs(self._service.detokenizer, scores)

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The chunk for what a sample gained; empty while there is nothing to send yet."""
        body, state = self._body, self._samples.get(delta.index)
        if state is None:
            calls = None if self._form is None else ToolCallStream(self._form, self._names)
            state = _SampleState(self._decoding.incremental(), calls)
            self._samples[delta.index] = state
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
        chunk = self._chunk(delta)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if not self._prompt_sent:
                self._prompt_sent = True
                chunk["prompt_token_ids"] = self.prompt
        chunk["choices"] = [choice]
        return event(chunk)

    def _message_delta(self, state: _SampleState, delta: Delta) -> dict[str, Any]:
        """The fields of the message that one delta adds."""
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

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        """The usage, if requested, and the end of a stream."""
        if not self._body.include_usage:
            return DONE
        chunk = self._chunk(results[0])
        return event(chunk | {"choices": [], "usage": usage([self.prompt], results)}) + DONE

    def _chunk(self, source: Delta | GenerationResult) -> dict[str, Any]:
        usage = self._body.include_usage
        return self._service.chunk(self._header, "chat.completion.chunk", source, usage=usage)


def _finish_reason(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason

"""POST /v1/chat/completions, and its twin that takes the prompt's exact ids.

Owns what chat asks of the engine (a rendered prompt, a form or calls that must be kept) and how its
answers are written, whole or in chunks. Leaves out rendering (`templates`), calls (`tools`)
and forms (`constraints`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.inference.client.protocol import CHAT_ROUTE, CHAT_TOKENS_ROUTE
from marin_rl.inference.generation import Delta, GenerationResult, Sample
from marin_rl.serving.api.openapi import ApiRoute, ChatCompletion
from marin_rl.serving.api.request_handler import EngineRequest, SamplingEndpoint
from marin_rl.serving.api.requests import ChatBody, ChatTokensBody
from marin_rl.serving.api.responses import (
    DONE,
    ResponseHeader,
    Scores,
    TextDecoding,
    call_delta,
    chat_logprobs,
    complete_response,
    event,
    finish_reason,
    message,
    timings,
    usage,
)
from marin_rl.serving.api.service import Service
from marin_rl.serving.http.errors import ApiError, parse
from marin_rl.serving.text.constraints import MakeWalker
from marin_rl.serving.text.detokenizer import IncrementalDetokenizer
from marin_rl.serving.text.tools import forced_calls_grammar
from marin_rl.tool_calls import ParsedAnswer, ToolCallStream, ToolFormat, parse_tool_calls
from marin_rl.types import ToolCall

Prompt = Int32[np.ndarray, " P"]


def chat_routes(service: Service) -> list[ApiRoute]:
    """The routes of conversations."""

    def route(path: str, body: type[ChatBody], summary: str) -> ApiRoute:
        return ApiRoute(
            path,
            SamplingEndpoint(service, partial(_prepare, body)),
            methods=["POST"],
            request=body,
            response=ChatCompletion,
            streams=True,
            summary=summary,
        )

    return [
        route(CHAT_ROUTE, ChatBody, "Samples of a conversation's next message."),
        route(
            CHAT_TOKENS_ROUTE,
            ChatTokensBody,
            "The same, where the caller knows the prompt's ids: the messages are not rendered.",
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Parsed chat request, for streamed and for complete answers."""

    service: Service
    body: ChatBody
    prompt: Prompt
    decoding: TextDecoding
    header: ResponseHeader
    tools: list[dict[str, Any]]
    form: ToolFormat | None

    def calls(self) -> ToolCallStream | None:
        """A reader of tool calls, where any can come."""
        return None if self.form is None else ToolCallStream(self.form, self.names)

    @property
    def names(self) -> list[str]:
        """Names of the tools that may be called."""
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def calls_max(self) -> int | None:
        """Largest number of calls in one answer, or None for no limit."""
        return 1 if self.body.parallel_tool_calls is False else None


def _prepare(kind: type[ChatBody], service: Service, data: bytes) -> EngineRequest:
    """Read a body and prepare what it asks for. ApiError for what is refused."""
    body = service.with_stop_tokens(parse(kind, data))
    target = service.target(body.model)
    service.check_fields(body, prompts=1)
    tools = [] if body.tool_choice == "none" else body.offered
    form = service.tool_format if tools else None
    prompt = _prompt(service, body, tools)
    param = "tokens" if isinstance(body, ChatTokensBody) else "messages"
    chat = Chat(
        service=service,
        body=body,
        prompt=prompt,
        decoding=service.decoding(body, special=form is not None and form.special),
        header=ResponseHeader.new("chatcmpl"),
        tools=tools,
        form=form,
    )
    request = body.request(
        prompt,
        service.new_tokens(prompt, body.new_tokens_max, param=param),
        top_logprobs=body.top_logprobs or 0,
        raw_logprobs=body.raw,
        constraint=_constraint(chat),
        adapter=target.load,
        probe=bool(body.probe),
    )
    if not body.stream:
        return EngineRequest(model=target.model, requests=[request], end=partial(_complete, chat))
    stream = ChatStream(chat)
    return EngineRequest(model=target.model, requests=[request], end=stream.end, delta=stream.delta)


def _prompt(service: Service, body: ChatBody, tools: list[dict[str, Any]]) -> Prompt:
    if isinstance(body, ChatTokensBody):
        service.check_ids(body.tokens)
        return np.asarray(body.tokens, np.int32)
    return service.chat_ids(
        [message.as_template_message() for message in body.messages],
        tools=tools,
        options=body.chat_template_kwargs,
    )


def _constraint(chat: Chat) -> MakeWalker | None:
    """The constraint on the answer's form, or None."""
    body, constraints = chat.body, chat.service.constraints
    if not body.must_call:
        return constraints.response_format(body.form)
    if chat.form is None:
        raise ApiError(
            400,
            "tool_choice: the chat template of this model defines no form of calls that could be "
            "enforced; expected 'auto' or 'none'",
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
    tools = [tool for tool in chat.tools if named in (None, tool["function"]["name"])]
    several = body.parallel_tool_calls is not False and named is None
    grammar = forced_calls_grammar(chat.form, tools, chat.service.tokenizer, several=several)
    return constraints.grammar(grammar, param="tools")


def _complete(chat: Chat, results: Sequence[GenerationResult]) -> bytes:
    """The JSON of an answer whose samples are all there."""
    (result,) = results
    top = chat.service.top(chat.header, "chat.completion", result)
    choices = [_choice(chat, index, sample) for index, sample in enumerate(result.samples)]
    more: dict[str, Any] = {"timings": timings(result)}
    if chat.body.return_token_ids:
        more["prompt_token_ids"] = chat.prompt
    return complete_response(top, choices, [chat.prompt], results, **more)


def _choice(chat: Chat, index: int, sample: Sample) -> dict[str, Any]:
    body = chat.body
    text = chat.decoding.text(sample.token_ids.tolist(), sample.finish_reason)
    parsed = _parsed(chat, text)
    choice: dict[str, Any] = {
        "index": index,
        "message": message(parsed),
        "finish_reason": finish_reason(sample.finish_reason, len(parsed.calls)),
        "logprobs": None,
        "policy_versions": sample.policy_versions,
    }
    if body.return_token_ids:
        choice["token_ids"] = sample.token_ids
    if body.logprobs and body.compact_logprobs:
        choice["token_logprobs"] = sample.raw_logprobs if body.raw else sample.logprobs
    elif body.logprobs:
        scores = Scores.of(sample, raw=body.raw)
        choice["logprobs"] = chat_logprobs(chat.decoding.detokenizer, scores)
    return choice


def _parsed(chat: Chat, text: str) -> ParsedAnswer:
    """A whole text's content and calls."""
    if chat.form is None:
        return ParsedAnswer(content=text, calls=())
    return parse_tool_calls(chat.form, text, chat.names, most=chat.calls_max)


@dataclass(slots=True)
class _SampleState:
    """State of a sample's stream."""

    text: IncrementalDetokenizer
    calls: ToolCallStream | None
    started: bool = False
    called: int = 0


class ChatStream:
    """Writes the chunks of a chat completion."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._samples: dict[int, _SampleState] = {}
        self._prompt_sent = False

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The chunk for what a sample gained; nothing where there is nothing to tell yet."""
        chat = self._chat
        state = self._samples.get(delta.index)
        if state is None:
            state = _SampleState(chat.decoding.incremental(), chat.calls())
            self._samples[delta.index] = state
        fields = self._message_delta(state, delta)
        choice = self._choice(state, delta, fields)
        if choice is None:
            return b""
        chunk = self._chunk(delta)
        if chat.body.return_token_ids and not self._prompt_sent:
            self._prompt_sent = True
            chunk["prompt_token_ids"] = chat.prompt
        chunk["choices"] = [choice]
        return event(chunk)

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        """The usage, if requested, and the end."""
        if not self._chat.body.include_usage:
            return DONE
        chunk = self._chunk(results[0])
        chunk |= {"choices": [], "usage": usage([self._chat.prompt], results)}
        return event(chunk) + DONE

    def _chunk(self, source: Delta | GenerationResult) -> dict[str, Any]:
        chat = self._chat
        return chat.service.chunk(chat.header, "chat.completion.chunk", source, chat.body)

    def _message_delta(self, state: _SampleState, delta: Delta) -> dict[str, Any]:
        """The message fields of one delta."""
        ids = delta.token_ids.tolist()
        text = self._chat.decoding.new_text(state.text, ids, delta.finish_reason)
        fields: dict[str, Any] = {}
        if not state.started:
            fields["role"] = "assistant"
        if state.calls is None:
            return fields | ({"content": text} if text or not state.started else {})
        pieces = state.calls.feed(text) if text else []
        if delta.finish_reason:
            pieces += state.calls.finish()
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        if self._chat.calls_max is not None:
            calls = calls[: self._chat.calls_max - state.called]
        if content:
            fields["content"] = content
        if calls:
            fields["tool_calls"] = [
                call_delta(state.called + number, call) for number, call in enumerate(calls)
            ]
            state.called += len(calls)
        return fields

    def _choice(
        self, state: _SampleState, delta: Delta, fields: dict[str, Any]
    ) -> dict[str, Any] | None:
        body = self._chat.body
        state.started = True
        if not (fields or delta.finish_reason or body.logprobs or body.return_token_ids):
            return None
        reason = finish_reason(delta.finish_reason, state.called) or None
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": fields,
            "logprobs": None,
            "finish_reason": reason,
        }
        if body.logprobs:
            scores = Scores.of(delta, raw=body.raw)
            choice["logprobs"] = chat_logprobs(self._chat.decoding.detokenizer, scores)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

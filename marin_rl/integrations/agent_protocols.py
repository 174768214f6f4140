"""Model APIs that agents speak: OpenAI's Chat Completions and Responses, Anthropic's Messages.

Each protocol reads the messages and tools of a request, and writes an answer whole or as the events
of a stream. Bookkeeping of clients (`cache_control`, ids of items, reasoning, labels) is left out,
so that a conversation which goes on is seen to. Leaves out connections and sessions
(`agent_gateway`).
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from marin_rl.environments.episode import Tool, function_tool
from marin_rl.types import Message, ToolCall

Event = tuple[str | None, Any]  # name of a server-sent event, if it has one, and its data
_BILLING = "x-anthropic-billing-header"  # of Claude Code: it names the client's version
_SPLIT = "__"  # between a namespace and its tool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """Request of an agent: the conversation so far, the tools that it offers, and its stops."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """Turn of the policy, as agents get it."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    prompt_tokens: int
    completion_tokens: int


class ModelProtocol(ABC):
    """One model API. `parse` raises ValueError for a request that cannot be answered."""

    def __init__(self, model: str) -> None:
        self.model = model

    @abstractmethod
    def parse(self, body: Mapping[str, Any]) -> ModelCall: ...

    @abstractmethod
    def whole(self, answer: ModelAnswer) -> dict[str, Any]: ...

    @abstractmethod
    def events(self, call: ModelCall, answer: ModelAnswer) -> Iterator[Event]: ...

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class ChatCompletions(ModelProtocol):
    """`POST /v1/chat/completions`."""

    def parse(self, body: Mapping[str, Any]) -> ModelCall:
        if body.get("n") not in (None, 1):
            raise ValueError(f"n: expected 1, found {body['n']!r:.40}")
        messages = list[Message]()
        for number, item in enumerate(_listed(body, "messages")):
            where = f"messages[{number}]"
            role, text = item.get("role"), _text(item.get("content"), where)
            match role:
                case "system" | "developer":
                    messages.append(Message(role="system", content=text))
                case "user":
                    messages.append(Message(role="user", content=text))
                case "assistant":
                    calls = [_chat_call(call, where) for call in item.get("tool_calls") or ()]
                    _add_assistant(messages, text, calls)
                case "tool":
                    messages.append(_result(messages, item.get("tool_call_id"), text, where))
                case _:
                    raise ValueError(f"{where}.role: expected a role, found {role!r:.40}")
        stop = body.get("stop") or ()
        return ModelCall(
            messages=tuple(messages),
            tools=tuple(
                _function(tool.get("function"), "tools") for tool in body.get("tools") or ()
            ),
            stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
            stream=bool(body.get("stream")),
            with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )

    def whole(self, answer: ModelAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
        if answer.tool_calls:
            message["tool_calls"] = [*map(_chat_tool_call, answer.tool_calls)]
        else:
            message["content"] = answer.text
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _why(answer)}
        return self._head("chat.completion", [choice]) | {"usage": _chat_usage(answer)}

    def events(self, call: ModelCall, answer: ModelAnswer) -> Iterator[Event]:
        delta: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            delta["tool_calls"] = [
                {"index": index} | _chat_tool_call(each)
                for index, each in enumerate(answer.tool_calls)
            ]
        head = self._head("chat.completion.chunk", [])
        for part, reason in ((delta, None), ({}, _why(answer))):
            yield None, head | {"choices": [{"index": 0, "delta": part, "finish_reason": reason}]}
        if call.with_usage:
            yield None, head | {"usage": _chat_usage(answer)}
        yield None, "[DONE]"

    def _head(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": _new_id("chatcmpl-"),
            "object": kind,
            "created": 0,  # answers are equal from time to time
            "model": self.model,
            "choices": choices,
        }


class Responses(ModelProtocol):
    """`POST /v1/responses`."""

    def parse(self, body: Mapping[str, Any]) -> ModelCall:
        if body.get("previous_response_id") is not None:
            raise ValueError(
                "previous_response_id: nothing is stored here: expected all items in input"
            )
        messages = list[Message]()
        if body.get("instructions"):
            messages.append(Message(role="system", content=str(body["instructions"])))
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        for number, item in enumerate(_listed({"input": items}, "input")):
            self._read(messages, item, f"input[{number}]")
        if not messages:
            raise ValueError("input: expected at least one message")
        tools = map(_response_tools, body.get("tools") or ())
        return ModelCall(
            messages=tuple(messages),
            tools=tuple(chain.from_iterable(tools)),
            stream=bool(body.get("stream")),
        )

    def _read(self, messages: list[Message], item: Mapping[str, Any], where: str) -> None:
        match item.get("type", "message"):
            case "message":
                role, text = item.get("role"), _text(item.get("content"), where)
                if role == "assistant":
                    _add_assistant(messages, text, [])
                elif role in ("user", "system", "developer"):
                    kind = "user" if role == "user" else "system"
                    messages.append(Message(role=kind, content=text))
                else:
                    raise ValueError(f"{where}.role: expected a role, found {role!r:.40}")
            case "function_call":
                name = f"{item['namespace']}{_SPLIT}" if item.get("namespace") else ""
                call = ToolCall(
                    id=str(item.get("call_id")),
                    name=f"{name}{item.get('name')}",
                    arguments=_json_object(item.get("arguments"), where),
                )
                _add_assistant(messages, "", [call])
            case "function_call_output":
                text = _text(item.get("output"), where)
                messages.append(_result(messages, item.get("call_id"), text, where))
            case "reasoning":
                pass  # the policy's own reasoning is part of its text
            case kind:
                raise ValueError(f"{where}: items of type {kind!r:.40} cannot be read")

    def whole(self, answer: ModelAnswer) -> dict[str, Any]:
        return self._response("completed", answer, [*self._items(answer)])

    def _items(self, answer: ModelAnswer) -> Iterator[dict[str, Any]]:
        if answer.text or not answer.tool_calls:
            part = {"type": "output_text", "text": answer.text, "annotations": []}
            head = {"id": _new_id("msg_"), "type": "message", "role": "assistant"}
            yield head | {"status": "completed", "content": [part]}
        for call in answer.tool_calls:
            space, split, name = call.name.rpartition(_SPLIT)
            yield {
                "id": _new_id("fc_"),
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                "name": name,
                "arguments": call.arguments,
            } | ({"namespace": space} if split else {})

    def events(self, call: ModelCall, answer: ModelAnswer) -> Iterator[Event]:
        items = [*self._items(answer)]
        begun = self._response("in_progress", None, [])
        told: list[tuple[str, dict[str, Any]]] = [
            (f"response.{kind}", {"response": begun}) for kind in ("created", "in_progress")
        ]
        for place, item in enumerate(items):
            at: dict[str, Any] = {"output_index": place}
            told.append(("response.output_item.added", at | {"item": _unfilled(item)}))
            at |= {"item_id": item["id"]}
            if item["type"] == "message":
                (part,) = item["content"]
                at |= {"content_index": 0}
                empty, text = part | {"text": ""}, part["text"]
                told += [
                    ("response.content_part.added", at | {"part": empty}),
                    ("response.output_text.delta", at | {"delta": text, "logprobs": []}),
                    ("response.output_text.done", at | {"text": text, "logprobs": []}),
                    ("response.content_part.done", at | {"part": part}),
                ]
            else:
                text = item["arguments"]
                told += [
                    ("response.function_call_arguments.delta", at | {"delta": text}),
                    ("response.function_call_arguments.done", at | {"arguments": text}),
                ]
            told.append(("response.output_item.done", {"output_index": place, "item": item}))
        ended = self._response("completed", answer, items) | {"id": begun["id"]}
        told.append(("response.completed", {"response": ended}))
        for number, (kind, data) in enumerate(told):
            yield kind, {"type": kind, "sequence_number": number} | data

    def _response(
        self, status: str, answer: ModelAnswer | None, output: list[Any]
    ) -> dict[str, Any]:
        usage = None
        if answer is not None:
            usage = {
                "input_tokens": answer.prompt_tokens,
                "output_tokens": answer.completion_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            }
        return {
            "id": _new_id("resp_"),
            "object": "response",
            "created_at": 0,
            "status": status,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "usage": usage,
        }


class AnthropicMessages(ModelProtocol):
    """`POST /v1/messages`."""

    def parse(self, body: Mapping[str, Any]) -> ModelCall:
        messages = list[Message]()
        if system := _text(body.get("system"), "system"):
            messages.append(Message(role="system", content=system))
        for number, item in enumerate(_listed(body, "messages")):
            where, role, content = f"messages[{number}]", item.get("role"), item.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if role in ("assistant", "user"):
                read = self._assistant if role == "assistant" else self._user
                read(messages, _listed({"content": blocks}, "content"), where)
            elif role == "system":
                messages.append(Message(role="system", content=_text(content, where)))
            else:
                raise ValueError(f"{where}.role: expected user or assistant, found {role!r:.40}")
        tools = [
            function_tool(
                str(tool.get("name")), tool.get("description") or "", tool["input_schema"]
            )
            for tool in body.get("tools") or ()
            if "input_schema" in tool  # others run at the provider
        ]
        return ModelCall(
            messages=tuple(messages),
            tools=tuple(tools),
            stop=tuple(map(str, body.get("stop_sequences") or ())),
            stream=bool(body.get("stream")),
        )

    def _assistant(
        self, messages: list[Message], blocks: Sequence[Mapping[str, Any]], where: str
    ) -> None:
        text = [b for b in blocks if b.get("type") not in (*_THOUGHT, "tool_use")]
        calls = [
            ToolCall(
                id=str(b["id"]), name=str(b["name"]), arguments=_json_object(b["input"], where)
            )
            for b in blocks
            if b.get("type") == "tool_use"
        ]
        _add_assistant(messages, _text(text, where), calls)

    def _user(
        self, messages: list[Message], blocks: Sequence[Mapping[str, Any]], where: str
    ) -> None:
        said = list[Mapping[str, Any]]()
        for block in blocks:
            if block.get("type") != "tool_result":
                said.append(block)
                continue
            text = _text(block.get("content"), where)
            messages.append(_result(messages, block.get("tool_use_id"), text, where))
        if said:
            messages.append(Message(role="user", content=_text(said, where)))

    def whole(self, answer: ModelAnswer) -> dict[str, Any]:
        return self._head(answer) | {
            "content": [*self._blocks(answer)],
            "stop_reason": self._reason(answer),
            "stop_sequence": None,
        }

    def _head(self, answer: ModelAnswer) -> dict[str, Any]:
        usage = {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }
        head = {"id": _new_id("msg_"), "type": "message", "role": "assistant"}
        return head | {"model": self.model, "usage": usage}

    def _blocks(self, answer: ModelAnswer) -> Iterator[dict[str, Any]]:
        if answer.text or not answer.tool_calls:
            yield {"type": "text", "text": answer.text}
        for call in answer.tool_calls:
            arguments = json.loads(call.arguments)
            yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def _reason(self, answer: ModelAnswer) -> str:
        return "tool_use" if answer.tool_calls else "end_turn"

    def events(self, call: ModelCall, answer: ModelAnswer) -> Iterator[Event]:
        begun = self._head(answer) | {"content": [], "stop_reason": None, "stop_sequence": None}
        told: list[tuple[str, dict[str, Any]]] = [("message_start", {"message": begun})]
        for index, block in enumerate(self._blocks(answer)):
            if block["type"] == "text":
                empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                text = json.dumps(block["input"], ensure_ascii=False)
                empty = block | {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": text}
            told += [
                ("content_block_start", {"index": index, "content_block": empty}),
                ("content_block_delta", {"index": index, "delta": delta}),
                ("content_block_stop", {"index": index}),
            ]
        ended = {"stop_reason": self._reason(answer), "stop_sequence": None}
        usage = {"output_tokens": answer.completion_tokens}
        told += [("message_delta", {"delta": ended, "usage": usage}), ("message_stop", {})]
        for kind, data in told:
            yield kind, {"type": kind} | data

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


_THOUGHT = ("thinking", "redacted_thinking")


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def _why(answer: ModelAnswer) -> str:
    return "tool_calls" if answer.tool_calls else "stop"


def _chat_usage(answer: ModelAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _chat_tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _unfilled(item: Mapping[str, Any]) -> dict[str, Any]:
    """An output item of a response as it is announced."""
    empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
    return {**item, "status": "in_progress", **empty}


def _listed(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = body.get(name)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"{name}: expected a list of objects, found {value!r:.80}")
    return value


def _text(content: Any, where: str) -> str:
    """The text of a message's content: a text, or parts that are texts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = list[str]()
    for part in _listed({"content": content}, "content"):
        if part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type")
            raise ValueError(f"{where}: the policy reads text alone, found a part {kind!r:.40}")
        text = str(part.get("text", ""))
        if not text.startswith(_BILLING):
            parts.append(text)
    return "\n".join(parts)


def _chat_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"{where}.tool_calls: expected calls of functions, found {call!r:.80}")
    arguments = _json_object(function.get("arguments"), where)
    return ToolCall(id=str(call.get("id")), name=str(function.get("name")), arguments=arguments)


def _json_object(arguments: Any, where: str) -> str:
    """Arguments of a call as canonical JSON."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected arguments as an object, found {arguments!r:.80}")
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _function(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ValueError(f"{where}: expected functions with a name, found {tool!r:.80}")
    schema = tool.get("parameters") or {"type": "object", "properties": {}}
    return function_tool(tool["name"], tool.get("description") or "", schema)


def _response_tools(tool: Mapping[str, Any]) -> list[Tool]:
    """Functions of an entry of a response's tools; none of one that the provider runs."""
    match tool.get("type"):
        case "function":
            return [_function(tool, "tools")]
        case "namespace":
            space = tool["name"]
            return [
                _function({**each, "name": f"{space}{_SPLIT}{each['name']}"}, "tools")
                for each in tool.get("tools") or ()
            ]
        case _:
            return []


def _add_assistant(messages: list[Message], text: str, calls: Sequence[ToolCall]) -> None:
    """Append what the assistant said; protocols of items have its text and calls apart."""
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        text, calls = "\n".join(filter(None, (last.content, text))), (*last.tool_calls, *calls)
    messages.append(Message(role="assistant", content=text, tool_calls=tuple(calls)))


def _result(messages: Sequence[Message], call_id: Any, text: str, where: str) -> Message:
    """The result of a tool, with the name that its call has."""
    for message in reversed(messages):
        for call in message.tool_calls:
            if call.id == call_id:
                return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
    raise ValueError(f"{where}: the result of a call {call_id!r:.40} that is not there")


def comparable(message: Message) -> Message:
    """A message without what clients may write otherwise: ids, and spaces around its text."""
    calls = tuple(
        replace(call, id="", arguments=_json_object(call.arguments, "arguments"))
        for call in message.tool_calls
    )
    return replace(
        message, content=message.content.strip(), tool_calls=calls, tool_call_id=None, name=None
    )

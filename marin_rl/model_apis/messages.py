"""`POST /v1/messages` of Anthropic."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from marin_rl.model_apis.call import (
    Event,
    ItemApi,
    ModelAnswer,
    ModelCall,
    Piece,
    Reader,
    Reasoning,
    function_of,
    json_object,
    listed,
    new_id,
    options_of,
    stops_of,
    text_of,
)
from marin_rl.types import ToolCall

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Block = Mapping[str, Any]


class AnthropicMessages(ItemApi):
    """`POST /v1/messages`."""

    def __init__(self, call: ModelCall, **head: Any) -> None:
        super().__init__(call, **head)
        self._id = new_id("msg_")

    @staticmethod
    def parse(body: Mapping[str, Any]) -> ModelCall:
        reader = Reader()
        if system := text_of(body.get("system"), "system"):
            reader.say("system", system, "system")
        for number, item in enumerate(listed(body, "messages")):
            where, role, content = f"messages[{number}]", item.get("role"), item.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            match role:
                case "assistant":
                    _read_answer(reader, listed({"content": blocks}, "content"), where)
                case "user":
                    _read_user(reader, listed({"content": blocks}, "content"), where)
                case "system":
                    reader.say("system", text_of(content, where), where)
                case _:
                    raise ValueError(
                        f"{where}.role: expected user or assistant, found {role!r:.40}"
                    )
        # others run at the provider
        tools = [tool for tool in body.get("tools") or () if "input_schema" in tool]
        return ModelCall(
            messages=tuple(reader.messages),
            tools=tuple(function_of(tool, "input_schema") for tool in tools),
            stop=stops_of(body.get("stop_sequences")),
            stream=bool(body.get("stream")),
            reasoning=reader.reasoning,
            options=_options(body, has_tools=bool(tools)),
        )

    @staticmethod
    def error(
        status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> dict[str, Any]:
        kind = "api_error" if status >= 500 else "invalid_request_error"
        error = {"type": _ERROR_TYPES.get(status, kind), "message": message}
        return {"type": "error", "error": error}

    def begin(self) -> list[Event]:
        usage = _usage(self.prompt_tokens, 0)
        return [self._event("message_start", message=self._message(None, None, usage))]

    def open(self, first: Piece) -> list[Event]:
        return [self._event("content_block_start", index=self._place, content_block=_block(first))]

    def fill(self, first: Piece, text: str) -> list[Event]:
        kind, name = _DELTAS[type(first)]
        delta = {"type": kind, name: text}
        return [self._event("content_block_delta", index=self._place, delta=delta)]

    def close(self, first: Piece, text: str) -> list[Event]:
        ended = self._event("content_block_stop", index=self._place)
        self.items.append(_block(first, text))
        return [ended]

    def finish(self, answer: ModelAnswer) -> list[Event]:
        reasons = dict(zip(("stop_reason", "stop_sequence"), self._reasons(answer), strict=True))
        usage = {"output_tokens": answer.completion_tokens}
        ended = self._event("message_delta", delta=reasons, usage=usage)
        return [ended, self._event("message_stop")]

    def body(self, answer: ModelAnswer) -> dict[str, Any]:
        self._complete()
        usage = _usage(answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
        return self._message(*self._reasons(answer), usage)

    def failed(self, error: Mapping[str, Any]) -> list[Event]:
        return [("error", error)]

    @property
    def _place(self) -> int:
        return len(self.items)

    def _event(self, kind: str, **data: Any) -> Event:
        return kind, {"type": kind} | data

    def _reasons(self, answer: ModelAnswer) -> tuple[str, str | None]:
        if answer.cut:
            return "max_tokens", None
        if any(item["type"] == "tool_use" for item in self.items):
            return "tool_use", None
        return ("end_turn", None) if answer.stop is None else ("stop_sequence", answer.stop)

    def _message(self, reason: str | None, stop: str | None, usage: Any) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.model}
        ended = {"stop_reason": reason, "stop_sequence": stop, "usage": usage}
        return head | {"content": [*self.items]} | ended


_DELTAS = {
    str: ("text_delta", "text"),
    Reasoning: ("thinking_delta", "thinking"),
    ToolCall: ("input_json_delta", "partial_json"),
}


def _block(first: Piece, text: str = "") -> dict[str, Any]:
    match first:
        case ToolCall():
            arguments = json.loads(text or "{}")
            return {"type": "tool_use", "id": first.id, "name": first.name, "input": arguments}
        case Reasoning():
            return {"type": "thinking", "thinking": text, "signature": ""}
        case _:
            return {"type": "text", "text": text}


def _usage(prompt: int, completion: int, cached: int = 0) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "output_tokens": completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _read_answer(reader: Reader, blocks: Sequence[Block], where: str) -> None:
    said, calls, thoughts = list[Block](), list[ToolCall](), list[str]()
    for block in blocks:
        match block.get("type"):
            case "tool_use":
                arguments = json_object(block["input"], where)
                calls.append(
                    ToolCall(id=str(block["id"]), name=str(block["name"]), arguments=arguments)
                )
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case _:
                said.append(block)
    reader.answer(text_of(said, where), calls, "\n".join(thoughts))


def _read_user(reader: Reader, blocks: Sequence[Block], where: str) -> None:
    said = list[Block]()
    for block in blocks:
        if block.get("type") == "tool_result":
            reader.result(block.get("tool_use_id"), text_of(block.get("content"), where), where)
        else:
            said.append(block)
    if said:
        reader.say("user", text_of(said, where), where)


def _options(body: Mapping[str, Any], *, has_tools: bool) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    options = options_of(body, **{name: name for name in names})
    choice = body.get("tool_choice")
    if has_tools and isinstance(choice, dict):
        kind, named = choice.get("type"), {"name": choice.get("name")}
        is_named = kind == "tool"
        options["tool_choice"] = (
            {"type": "function", "function": named} if is_named else _CHOICES.get(str(kind), kind)
        )
        if choice.get("disable_parallel_tool_use"):
            options["parallel_tool_calls"] = False
    form = (body.get("output_config") or {}).get("format")
    if isinstance(form, dict):
        schema = {"name": "answer", "schema": form.get("schema")}
        options["response_format"] = {"type": form.get("type"), "json_schema": schema}
    return options

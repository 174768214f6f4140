"""`POST /v1/chat/completions` of OpenAI."""

from collections.abc import Mapping
from typing import Any

from marin_rl.inference.client.protocol import call_body
from marin_rl.model_apis.call import (
    Event,
    ModelAnswer,
    ModelApi,
    ModelCall,
    Piece,
    Reader,
    function_of,
    json_object,
    listed,
    new_id,
    stops_of,
    text_of,
)
from marin_rl.types import ToolCall


class ChatCompletions(ModelApi):
    """`POST /v1/chat/completions`, with one choice."""

    def __init__(self, call: ModelCall, **head: Any) -> None:
        super().__init__(call, **head)
        self._id = new_id("chatcmpl-")
        self._text, self._calls = list[str](), list[dict[str, Any]]()
        self._begun = False

    @staticmethod
    def parse(body: Mapping[str, Any]) -> ModelCall:
        if body.get("n") not in (None, 1):
            raise ValueError(f"n: expected 1, found {body['n']!r:.40}")
        reader = Reader()
        for number, item in enumerate(listed(body, "messages")):
            where = f"messages[{number}]"
            role, text = item.get("role"), text_of(item.get("content"), where)
            match role:
                case "assistant":
                    reader.answer(
                        text, [_call(call, where) for call in item.get("tool_calls") or ()]
                    )
                case "tool":
                    reader.result(item.get("tool_call_id"), text, where)
                case _:
                    reader.say(str(role), text, where)
        return ModelCall(
            messages=tuple(reader.messages),
            tools=tuple(function_of(tool.get("function")) for tool in body.get("tools") or ()),
            stop=stops_of(body.get("stop")),
            stream=bool(body.get("stream")),
            with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )

    def add(self, piece: Piece) -> list[Event]:
        delta: dict[str, Any] = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        if isinstance(piece, ToolCall):
            self._calls.append(call_body(piece))
            delta["tool_calls"] = [{"index": len(self._calls) - 1, **self._calls[-1]}]
        else:
            self._text.append(piece)
            delta["content"] = piece
        return [self._chunk(delta, None)]

    def end(self, answer: ModelAnswer) -> list[Event]:
        events = [] if self._begun else self.add("")
        events.append(self._chunk({}, self._reason(answer)))
        if self.call.with_usage:
            events.append((None, self._head("chat.completion.chunk", [], usage=_usage(answer))))
        return [*events, (None, "[DONE]")]

    def body(self, answer: ModelAnswer) -> dict[str, Any]:
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls}
        choice = {"index": 0, "message": message, "logprobs": None}
        choice |= {"finish_reason": self._reason(answer)}
        return self._head("chat.completion", [choice], usage=_usage(answer))

    def _reason(self, answer: ModelAnswer) -> str:
        return "length" if answer.cut else "tool_calls" if self._calls else "stop"

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return None, self._head("chat.completion.chunk", [choice])

    def _head(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices, **more}


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"{where}.tool_calls: expected calls of functions, found {call!r:.80}")
    arguments = json_object(function.get("arguments"), where)
    return ToolCall(id=str(call.get("id")), name=str(function.get("name")), arguments=arguments)


def _usage(answer: ModelAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }

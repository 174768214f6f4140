"""A call of a model and its answer, whatever API they are in, and what the APIs have in common.

Owns the calls and answers that the APIs are translated from and into (`chat`, `responses`,
`messages`), the order of events of a streamed answer, and the reading of parts. Bookkeeping of
clients (`cache_control`, ids of items, labels) is left out, so that a conversation which goes on is
seen to. Leaves out connections (`serving`, `integrations.agent_gateway`) and what a server allows.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from marin_rl.environments.episode import Tool, function_tool
from marin_rl.inference.client.protocol import message_body
from marin_rl.tool_calls import arguments_text, no_constant
from marin_rl.types import Message, ToolCall

Event = tuple[str | None, Any]  # name of a server-sent event, if it has one, and its data
_BILLING = "x-anthropic-billing-header"  # of Claude Code: it names the client's version
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class Reasoning(str):
    """Text of an answer that is the model's reasoning, and no part of what it says."""

    __slots__ = ()


Piece = str | ToolCall  # of an answer: reasoning, text, or a call


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """Request of a client: the conversation so far, the tools that it offers, and its stops.

    `reasoning` is that of the assistant's messages, by their number. `options` are further fields
    as Chat Completions has them.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    reasoning: Mapping[int, str] = field(default_factory=dict[int, str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def chat_body(self, model: Any) -> dict[str, Any]:
        """The same request of Chat Completions."""
        messages = [*map(message_body, self.messages)]
        for number, text in self.reasoning.items():
            messages[number]["reasoning_content"] = text
        lists = {"tools": [*map(dict, self.tools)], "stop": [*self.stop]}
        asked = {name: value for name, value in lists.items() if value} | dict(self.options)
        return {"model": model, "messages": messages, "stream": self.stream, **asked}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """Turn of the policy, as clients get it.

    `cut` says that it ended at the limit of tokens; `stop` is the stop string that ended it.
    """

    prompt_tokens: int
    completion_tokens: int
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    cached_tokens: int = 0
    cut: bool = False
    stop: str | None = None

    @property
    def pieces(self) -> Iterator[Piece]:
        if self.reasoning:
            yield Reasoning(self.reasoning)
        if self.text:
            yield self.text
        yield from self.tool_calls


class ModelApi(ABC):
    """One model API: `read` reads its requests, and an instance writes one answer.

    `created` is in seconds since 1970.
    """

    def __init__(
        self, call: ModelCall, *, model: str, prompt_tokens: int, created: int = 0
    ) -> None:
        self.call, self.model = call, model
        self.prompt_tokens, self.created = prompt_tokens, created

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ModelCall:
        """The call of a body. Raises ValueError for one that cannot be answered."""
        try:
            return cls.parse(body)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"a field, or an entry of a list, is missing or of another type: {error}"
            ) from error

    @staticmethod
    @abstractmethod
    def parse(body: Mapping[str, Any]) -> ModelCall:
        """As `read`, but raises whatever Python does for a value of another type."""

    @staticmethod
    def error(
        status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> dict[str, Any]:
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @abstractmethod
    def add(self, piece: Piece) -> list[Event]:
        """Events of a further piece of the answer."""

    @abstractmethod
    def end(self, answer: ModelAnswer) -> list[Event]:
        """Last events of the answer, whose pieces were added."""

    @abstractmethod
    def body(self, answer: ModelAnswer) -> dict[str, Any]:
        """The answer as a whole, whose pieces were added."""

    def failed(self, error: Mapping[str, Any]) -> list[Event]:
        """Last events where the answer cannot be completed; `error` is a body of `error`."""
        return [(None, error)]

    def whole(self, answer: ModelAnswer) -> dict[str, Any]:
        for piece in answer.pieces:
            self.add(piece)
        return self.body(answer)

    def events(self, answer: ModelAnswer) -> Iterator[Event]:
        for piece in answer.pieces:
            yield from self.add(piece)
        yield from self.end(answer)


class ItemApi(ModelApi):
    """A model API whose answers are lists of items, which streams open, fill and close in turn."""

    def __init__(self, call: ModelCall, **head: Any) -> None:
        super().__init__(call, **head)
        self.items: list[dict[str, Any]] = []  # those that are complete
        self._piece: Piece | None = None  # the first one of the item that is open
        self._text: list[str] = []
        self._begun = False

    @abstractmethod
    def begin(self) -> list[Event]: ...

    @abstractmethod
    def open(self, first: Piece) -> list[Event]: ...

    @abstractmethod
    def fill(self, first: Piece, text: str) -> list[Event]: ...

    @abstractmethod
    def close(self, first: Piece, text: str) -> list[Event]:
        """Append the item to `items`; returns its last events."""

    @abstractmethod
    def finish(self, answer: ModelAnswer) -> list[Event]: ...

    def add(self, piece: Piece) -> list[Event]:
        events = [] if self._begun else self.begin()
        self._begun = True
        if isinstance(piece, ToolCall) or type(piece) is not type(self._piece):
            events += self._close()
            self._piece = piece
            events += self.open(piece)
        assert self._piece is not None, "an item is open"
        self._text.append(piece.arguments if isinstance(piece, ToolCall) else piece)
        return events + (self.fill(self._piece, self._text[-1]) if self._text[-1] else [])

    def end(self, answer: ModelAnswer) -> list[Event]:
        return self._complete() + self.finish(answer)

    def _complete(self) -> list[Event]:
        """Close the last item; an answer without any has an empty text."""
        events = [] if self._begun else self.add("")
        return events + self._close()

    def _close(self) -> list[Event]:
        first, text, self._piece, self._text = self._piece, "".join(self._text), None, []
        return [] if first is None else self.close(first, text)


class Reader:
    """Messages of a conversation, as they are read one after another."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reasoning: dict[int, str] = {}

    def say(self, role: str, text: str, where: str) -> None:
        """Append what anyone but a tool said. Raises ValueError for an unknown role."""
        match role:
            case "system" | "developer":
                self.messages.append(Message(role="system", content=text))
            case "user":
                self.messages.append(Message(role="user", content=text))
            case "assistant":
                self.answer(text)
            case _:
                raise ValueError(f"{where}.role: expected a role, found {role!r:.40}")

    def answer(self, text: str = "", calls: Sequence[ToolCall] = (), reasoning: str = "") -> None:
        """Append what the assistant said; APIs of items have its text and calls apart."""
        if self.messages and self.messages[-1].role == "assistant":
            last = self.messages.pop()
            text, calls = "\n".join(filter(None, (last.content, text))), (*last.tool_calls, *calls)
        if reasoning:
            before = self.reasoning.get(len(self.messages))
            self.reasoning[len(self.messages)] = "\n".join(filter(None, (before, reasoning)))
        self.messages.append(Message(role="assistant", content=text, tool_calls=tuple(calls)))

    def result(self, call_id: Any, text: str, where: str) -> None:
        """Append the result of a tool, with the name that its call has."""
        for message in reversed(self.messages):
            for call in message.tool_calls:
                if call.id == call_id:
                    self.messages.append(
                        Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
                    )
                    return
        raise ValueError(f"{where}: the result of a call {call_id!r:.40} that is not there")


def server_sent(events: Iterable[Event]) -> bytes:
    """Events as they are sent, one after another."""
    data = bytearray()
    for name, body in events:
        text = body.encode() if isinstance(body, str) else orjson.dumps(body)
        data += (f"event: {name}\n".encode() if name is not None else b"") + b"data: " + text
        data += b"\n\n"
    return bytes(data)


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def options_of(body: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Fields of a body that are set, by their names in Chat Completions."""
    return {name: body[own] for name, own in names.items() if body.get(own) is not None}


def stops_of(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value or ()))


def listed(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = body.get(name)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"{name}: expected a list of objects, found {value!r:.80}")
    return value


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a text, or parts that are texts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = list[str]()
    for part in listed({"content": content}, "content"):
        if part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type")
            raise ValueError(f"{where}: the policy reads text alone, found a part {kind!r:.40}")
        text = str(part.get("text", ""))
        if not text.startswith(_BILLING):
            parts.append(text)
    return "\n".join(parts)


def json_object(arguments: Any, where: str, *, sort_keys: bool = False) -> str:
    """Arguments of a call as JSON of one object."""
    try:
        value = arguments
        if isinstance(arguments, str | None):
            value = json.loads(arguments or "{}", parse_constant=no_constant)
        if isinstance(value, dict):
            return arguments_text(value, sort_keys=sort_keys)
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"{where}: expected arguments as an object, found {arguments!r:.80}")


def function_of(tool: Any, schema: str = "parameters") -> Tool:
    """A function of `tools`, whose JSON schema is in the field `schema`."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ValueError(f"tools: expected functions with a name, found {tool!r:.80}")
    parameters = tool.get(schema) or {"type": "object", "properties": {}}
    return function_tool(tool["name"], tool.get("description") or "", parameters)


def comparable(message: Message) -> Message:
    """A message without what clients may write otherwise: ids, and spaces around its text."""
    calls = tuple(
        replace(call, id="", arguments=json_object(call.arguments, "arguments", sort_keys=True))
        for call in message.tool_calls
    )
    return replace(
        message, content=message.content.strip(), tool_calls=calls, tool_call_id=None, name=None
    )

"""`POST /v1/responses` of OpenAI. Nothing is stored: a request brings all items."""

from collections.abc import Iterator, Mapping
from typing import Any

from marin_rl.environments.episode import Tool
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
    text_of,
)
from marin_rl.types import ToolCall

_SPLIT = "__"  # between a namespace and its tool


class Responses(ItemApi):
    """`POST /v1/responses`."""

    def __init__(self, call: ModelCall, **head: Any) -> None:
        super().__init__(call, **head)
        self._id, self._item_id, self._sent = new_id("resp_"), "", 0

    @staticmethod
    def parse(body: Mapping[str, Any]) -> ModelCall:
        if body.get("previous_response_id") is not None:
            raise ValueError(
                "previous_response_id: nothing is stored here: expected all items in input"
            )
        reader = Reader()
        if body.get("instructions"):
            reader.say("system", str(body["instructions"]), "instructions")
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        for number, item in enumerate(listed({"input": items}, "input")):
            _read(reader, item, f"input[{number}]")
        if not reader.messages:
            raise ValueError("input: expected at least one message")
        tools = tuple(tool for each in body.get("tools") or () for tool in _functions(each))
        return ModelCall(
            messages=tuple(reader.messages),
            tools=tools,
            stream=bool(body.get("stream")),
            reasoning=reader.reasoning,
            options=_options(body, has_tools=bool(tools)),
        )

    def begin(self) -> list[Event]:
        begun = self._response("in_progress", None)
        kinds = "response.created", "response.in_progress"
        return [self._event(kind, response=begun) for kind in kinds]

    def open(self, first: Piece) -> list[Event]:
        self._item_id = new_id(_PREFIXES[type(first)])
        item = self._item(first, "", "in_progress")
        events = [self._event("response.output_item.added", output_index=self._place, item=item)]
        if type(first) is str:
            events.append(self._part("response.content_part.added", part=_part("")))
        return events

    def fill(self, first: Piece, text: str) -> list[Event]:
        more = {"logprobs": []} if type(first) is str else {}
        return [self._part(f"response.{_FILLED[type(first)]}.delta", delta=text, **more)]

    def close(self, first: Piece, text: str) -> list[Event]:
        name = f"response.{_FILLED[type(first)]}.done"
        match first:
            case ToolCall():
                events = [self._part(name, arguments=text, name=first.name)]
            case Reasoning():
                events = [self._part(name, text=text)]
            case _:
                events = [
                    self._part(name, text=text, logprobs=[]),
                    self._part("response.content_part.done", part=_part(text)),
                ]
        item = self._item(first, text, "completed")
        events.append(self._event("response.output_item.done", output_index=self._place, item=item))
        self.items.append(item)
        return events

    def finish(self, answer: ModelAnswer) -> list[Event]:
        status = "incomplete" if answer.cut else "completed"
        return [self._event(f"response.{status}", response=self._response(status, answer))]

    def body(self, answer: ModelAnswer) -> dict[str, Any]:
        self._complete()
        return self._response("incomplete" if answer.cut else "completed", answer)

    def failed(self, error: Mapping[str, Any]) -> list[Event]:
        message, code = error["error"]["message"], error["error"]["code"] or "server_error"
        response = self._response("failed", None) | {"error": {"message": message, "code": code}}
        return [self._event("response.failed", response=response)]

    @property
    def _place(self) -> int:
        return len(self.items)

    def _event(self, kind: str, **data: Any) -> Event:
        number, self._sent = self._sent, self._sent + 1
        return kind, {"type": kind, "sequence_number": number} | data

    def _part(self, kind: str, **data: Any) -> Event:
        at = {"output_index": self._place, "item_id": self._item_id}
        return self._event(
            kind, **at, **({} if "arguments" in kind else {"content_index": 0}), **data
        )

    def _item(self, first: Piece, text: str, status: str) -> dict[str, Any]:
        head = {"id": self._item_id, "status": status}
        match first:
            case ToolCall():
                space, split, name = first.name.rpartition(_SPLIT)
                call = {"type": "function_call", "call_id": first.id, "name": name}
                return head | call | {"arguments": text} | ({"namespace": space} if split else {})
            case Reasoning():
                content = [{"type": "reasoning_text", "text": text}] if text else []
                return head | {"type": "reasoning", "summary": [], "content": content}
            case _:
                content = [] if status == "in_progress" else [_part(text)]
                return head | {"type": "message", "role": "assistant", "content": content}

    def _response(self, status: str, answer: ModelAnswer | None) -> dict[str, Any]:
        usage = None
        if answer is not None:
            usage = {
                "input_tokens": answer.prompt_tokens,
                "output_tokens": answer.completion_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens},
                "output_tokens_details": {"reasoning_tokens": 0},
            }
        cut = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [*self.items],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": None,
            "metadata": {},
            "usage": usage,
        }


_PREFIXES = {str: "msg_", Reasoning: "rs_", ToolCall: "fc_"}
_FILLED = {str: "output_text", Reasoning: "reasoning_text", ToolCall: "function_call_arguments"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _read(reader: Reader, item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            reader.say(str(item.get("role")), text_of(item.get("content"), where), where)
        case "function_call":
            space = f"{item['namespace']}{_SPLIT}" if item.get("namespace") else ""
            call = ToolCall(
                id=str(item.get("call_id")),
                name=f"{space}{item.get('name')}",
                arguments=json_object(item.get("arguments"), where),
            )
            reader.answer(calls=[call])
        case "function_call_output":
            reader.result(item.get("call_id"), text_of(item.get("output"), where), where)
        case "reasoning":
            parts = item.get("content") or ()  # none where another provider encrypted it
            if text := "".join(str(part.get("text", "")) for part in parts):
                reader.answer(reasoning=text)
        case kind:
            raise ValueError(f"{where}: items of type {kind!r:.40} cannot be read")


def _functions(tool: Mapping[str, Any]) -> Iterator[Tool]:
    """Functions of an entry of `tools`; none of one that the provider runs."""
    match tool.get("type"):
        case "function":
            yield function_of(tool)
        case "namespace":
            for each in tool.get("tools") or ():
                yield function_of({**each, "name": f"{tool['name']}{_SPLIT}{each['name']}"})


def _options(body: Mapping[str, Any], *, has_tools: bool) -> dict[str, Any]:
    names = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"}
    options = options_of(body, **names, seed="seed")
    if has_tools:
        options |= options_of(body, parallel_tool_calls="parallel_tool_calls")
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        options |= {"tool_choice": choice} if choice is not None else {}
    form = (body.get("text") or {}).get("format")
    if isinstance(form, dict):
        kind, schema = form.get("type"), {k: v for k, v in form.items() if k != "type"}
        wrapped = {"json_schema": schema} if kind == "json_schema" else {}
        options["response_format"] = {"type": kind, **wrapped}
    return options

"""From messages to token ids, by the chat template of the model folder and no other.

Owns the shape in which templates expect messages and tools, and the limits under which they run.
The sandbox itself, which refuses attributes and may be rendered by several threads, is `sandbox`'s;
reading a completion back into tool calls is `tools`'.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import orjson
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

from marin_rl.errors import InputError
from marin_rl.serving.bodies import ApiError
from marin_rl.serving.sandbox import LimitExceeded, compile_template, render
from marin_rl.tokenizers import encoder_of

TOLD_CHARACTERS_MAX = 300


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise InputError unless the tokenizer's chat template can be compiled."""
    for tools in (None, [_NO_TOOL]):
        try:
            compile_template(_template(tokenizer, tools))
        except jinja2.TemplateError as error:
            raise InputError(
                f"the chat template of the model folder is wrong: {_told(error)}; expected a "
                "template that the sandbox can compile"
            ) from None


class ChatPrompts:
    """The way from conversations to token ids, by the tokenizer's own template.

    What it needs of the tokenizer is looked up once: transformers takes longer for that than a
    rendering does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._plain = _template(tokenizer, None)
        self._with_tools = _template(tokenizer, [_NO_TOOL])
        self._special = dict(tokenizer.special_tokens_map)
        self._encode = encoder_of(tokenizer)

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        opening: bool = True,
    ) -> Int32[np.ndarray, " P"]:
        """Token ids of a conversation.

        Messages and tools are as OpenAI's clients send them; `opening` ends the ids with the
        assistant's opening. Raises ApiError: 400 where the template refuses the messages, 500 where
        the template itself is at fault.
        """
        text = self.text(messages, tools=tools, opening=opening)
        return np.asarray(self._encode(text, False), np.int32)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        opening: bool = True,
    ) -> str:
        """The text that `ids` encodes; raises what that raises."""
        conversation = conversation_of(messages)
        offered = None if not tools else [dict(tool) for tool in tools]
        try:
            return render(
                compile_template(self._plain if offered is None else self._with_tools),
                characters_in=_size([conversation, offered]),
                messages=conversation,
                tools=offered,
                documents=None,
                add_generation_prompt=opening,
                **self._special,
            )
        except (*_FAULTS, *_REFUSALS) as error:
            raise _as_told(error) from None


def _size(given: Any) -> int:
    """Bytes of what the caller gave, as JSON. Raises ValueError for half a character."""
    try:
        return len(orjson.dumps(given))
    except orjson.JSONEncodeError:  # it knows no integers over 64 bits
        return len(json.dumps(given, ensure_ascii=False).encode())


_FAULTS = (
    jinja2.TemplateSyntaxError,
    jinja2.exceptions.SecurityError,
    LimitExceeded,
    RecursionError,
    MemoryError,
)
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


def _as_told(error: Exception) -> ApiError:
    """Whose fault it is that a template could not be rendered, and which."""
    match error:
        case jinja2.TemplateSyntaxError() | jinja2.exceptions.SecurityError():
            return _fault(f"does what the sandbox refuses ({type(error).__name__})")
        case LimitExceeded() | RecursionError() | MemoryError():
            return _fault(f"goes on for ever or grows too large ({_told(error)})")
        case jinja2.UndefinedError():
            return _refusal(f"it finds something missing: {_told(error)}")
        case jinja2.TemplateError():
            return _refusal(_told(error))
        case _:
            return _refusal(f"it cannot work with them ({type(error).__name__})")


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as one string, arguments of calls as objects.

    What a message leaves out, or gives as null, is left out; only `content` is always there.
    """
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in message.items() if value is not None}
    content = found.get("content")
    if isinstance(content, list | tuple):
        content = "".join(part["text"] for part in content)
    found["content"] = content
    if "tool_calls" in found:
        found["tool_calls"] = [
            _call(f"messages.{index}.tool_calls.{number}", call)
            for number, call in enumerate(found["tool_calls"])
        ]
    return found


def _call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        function["arguments"] = _object(f"{where}.function.arguments", arguments)
    return {**call, "function": function}


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, f"{where}: expected a JSON object as text", param=where)
    return value


def no_constant(name: str) -> Any:
    """Refuse what Python reads as JSON and JSON has not; for `json`'s `parse_constant`."""
    raise ValueError(f"{name} is not JSON")


_NO_TOOL = {"type": "function", "function": {"name": "none", "parameters": {}}}


def _template(tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None) -> str:
    return tokenizer.get_chat_template(None, tools)


def _told(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:TOLD_CHARACTERS_MAX]


def _refusal(told: str) -> ApiError:
    return ApiError(400, f"the chat template refuses these messages: {told}", param="messages")


def _fault(told: str) -> ApiError:
    return ApiError(
        500,
        f"the model's chat template {told}: expected one that renders messages and nothing else",
        type="server_error",
        code="chat_template",
    )

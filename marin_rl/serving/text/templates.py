"""Rendering of messages to texts, by the chat template of the model folder and no other.

Owns the shape in which templates expect messages and tools, how their failures are answered, and
the markers, such as `<think>`, between which a template puts the field `reasoning_content`: by them
an answer's reasoning is read. Where a template has none, reasoning is a part of the text. Rendering
itself, in a process with limits, is `chat_templates`'; reading a completion back into tool calls is
`marin_rl.tool_calls`'.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.errors import TemplateFault, TemplateRefusal
from marin_rl.isolated.templates import CLOCK
from marin_rl.model_apis.call import Reasoning
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.text.detokenizer import overlap
from marin_rl.tool_calls import no_constant


class ChatPrompts:
    """Renderer of conversations by the tokenizer's own template.

    The tokenizer is read once: transformers takes longer for that than a rendering does. May be
    used by several threads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._plain = ChatTemplate.of(tokenizer)
        self._with_tools = ChatTemplate.of(tokenizer, tools=True)

    @property
    def waits(self) -> bool:
        """True where rendering waits for a process, so that it must not hold up others."""
        return not (self._plain.is_built_in and self._with_tools.is_built_in)

    @cached_property
    def _option_names(self) -> frozenset[str]:
        """Variables that a request may set: all that the template reads, except the day."""
        names = self._plain.variables() | self._with_tools.variables()
        return names - {"date", CLOCK}

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        opening: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, which is encoded without further special tokens.

        Messages and tools are as OpenAI's clients send them; `opening` ends the text with the
        assistant's opening, and `options` are variables that the template reads. Raises ApiError:
        400 where it reads others or refuses the messages, 500 where the template itself is at
        fault.
        """
        unknown = sorted(options.keys() - self._option_names) if options else []
        if unknown:
            raise ApiError(
                400,
                f"chat_template_kwargs: the chat template of the model folder does not read "
                f"{unknown[0]!r}: expected {', '.join(sorted(self._option_names)) or 'none'}",
                param="chat_template_kwargs",
            )
        conversation = Conversation(
            messages=conversation_of(messages),
            tools=[dict(tool) for tool in tools] if tools else None,
            opening=opening,
            options=options or {},
        )
        template = self._with_tools if tools else self._plain
        try:
            return template.render(conversation).text
        except TemplateRefusal as error:
            message = f"the chat template refuses these messages: {error}"
            raise ApiError(400, message, param="messages") from None
        except TemplateFault as error:
            raise ApiError(
                500,
                f"the model's chat template {error}: expected one that renders messages and "
                "nothing else",
                code="chat_template",
            ) from None


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as one string, arguments of calls as objects.

    What a message leaves out, or gives as null, is left out; only `content` is always there.
    """
    cleaned_messages = []
    for index, message in enumerate(messages):
        cleaned = {key: value for key, value in message.items() if value is not None}
        content = cleaned.get("content")
        if isinstance(content, list | tuple):
            content = "".join(part["text"] for part in content)
        cleaned["content"] = content
        if "tool_calls" in cleaned:
            where = f"messages.{index}.tool_calls"
            calls = enumerate(cleaned["tool_calls"])
            cleaned["tool_calls"] = [_call(call, f"{where}.{n}.function") for n, call in calls]
        cleaned_messages.append(cleaned)
    return cleaned_messages


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=no_constant)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            where = f"{where}.arguments"
            raise ApiError(400, f"{where}: expected a JSON object as text", param=where)
    return {**call, "function": {**call["function"], "arguments": arguments}}


_THOUGHT, _ANSWER = "Probe of a thought.", "Probe of an answer."
_PROBE = [
    {"role": "user", "content": "What does the probe say?"},
    {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT},
]
_MARKER = r"<[^<>|\s]+>|\[[^\[\]\s]+\]"
_MARKED = re.compile(rf"({_MARKER})\s*{_THOUGHT}\s*({_MARKER})\s*{_ANSWER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Markers before and after the reasoning of an answer."""

    opening: str
    closing: str


def reasoning_format(tokenizer: PreTrainedTokenizerBase) -> ReasoningFormat | None:
    """The format in which the tokenizer's chat template writes reasoning, or None."""
    try:
        text = ChatTemplate.of(tokenizer).render(Conversation(messages=_PROBE)).text
    except (TemplateRefusal, TemplateFault):
        return None
    marked = _MARKED.search(text)
    return None if marked is None else ReasoningFormat(opening=marked[1], closing=marked[2])


class ReasoningStream:
    """Incremental reader of an answer: the reasoning at its beginning, then the text.

    `inside` says that the prompt has the opening marker already. What may be the beginning of a
    marker, and blank space beside one, is held back.
    """

    def __init__(self, form: ReasoningFormat, *, inside: bool) -> None:
        self._form, self._inside = form, inside
        self._text = self._thought = self._said = ""

    def feed(self, text: str, *, last: bool) -> list[str]:
        """Take in more text; returns what is certain now, as Reasoning or plain text."""
        self._text += text
        thought, said = self._certain(last)
        pieces = Reasoning(thought[len(self._thought) :]), said[len(self._said) :]
        self._thought, self._said = thought, said
        return [piece for piece in pieces if piece]

    def _certain(self, last: bool) -> tuple[str, str]:  # noqa: FBT001 - of this class alone
        opening, closing, text = self._form.opening, self._form.closing, self._text.lstrip()
        if not self._inside:
            if not text.startswith(opening):
                return "", "" if opening.startswith(text) and not last else self._text
            text = text.removeprefix(opening)
        thought, ended, said = text.partition(closing)
        if not (ended or last):
            thought = thought[: len(thought) - overlap(thought, [closing])]
        return thought.strip(), said.lstrip()

"""Reasoning of a model: how its chat template marks it, and how an answer is read.

Owns templates that put the field `reasoning_content` between two markers, such as `<think>`. Where
a template does not, reasoning is a part of the text. Leaves out calls of tools (`tool_calls`).
"""

import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.errors import TemplateFault, TemplateRefusal
from marin_rl.model_apis.call import Reasoning

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
        self._form = form
        self._state = "inside" if inside else "before"
        self._begun = False
        self._buffer = ""

    def feed(self, text: str) -> list[str]:
        """Take in more text; returns what is certain now, as Reasoning or plain text."""
        self._buffer += text
        out = list[str]()
        if self._state == "before":
            self._open()
        if self._state == "inside":
            self._read_reasoning(out)
        if self._state == "between" and (said := self._buffer.lstrip()):
            self._state, self._buffer = "after", said
        if self._state == "after" and self._buffer:
            out.append(self._buffer)
            self._buffer = ""
        return out

    def finish(self) -> list[str]:
        """End the text: return what was held back."""
        buffer, self._buffer = self._buffer, ""
        if self._state == "inside":
            return [Reasoning(buffer.rstrip())] if buffer.strip() else []
        return [buffer] if self._state == "before" and buffer else []

    def _open(self) -> None:
        opening, text = self._form.opening, self._buffer.lstrip()
        if text.startswith(opening):
            self._state, self._buffer = "inside", text[len(opening) :]
        elif not opening.startswith(text):
            self._state = "after"

    def _read_reasoning(self, out: list[str]) -> None:
        closing = self._form.closing
        if not self._begun:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(closing)
        if at >= 0:
            self._state, certain, kept = "between", self._buffer[:at], at + len(closing)
        else:
            ends = range(len(closing) - 1, -1, -1)
            length = next(n for n in ends if self._buffer.endswith(closing[:n]))
            certain = self._buffer[: len(self._buffer) - length]
            kept = len(certain.rstrip())
        self._buffer = self._buffer[kept:]
        if certain := certain.rstrip():
            self._begun = True
            out.append(Reasoning(certain))

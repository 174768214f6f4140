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
from marin_rl.serving.text.detokenizer import overlap

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

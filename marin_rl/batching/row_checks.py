"""Comparison of rows with what is learned from them: the text of the tokens that are trained on.

A chat template may remove reasoning, trim blanks or leave messages out, a tokenizer may normalise
what it reads or have no token for it, and a text may spell a control token. Such rows are refused
before any work starts. Leaves out how rows become tokens (`sequences`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from unicodedata import normalize

import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.sequences import RenderedChat, named_chats, text_of
from marin_rl.chat_templates import PROBES, ChatTemplate, Conversation
from marin_rl.end_tokens import any_of, control_tokens
from marin_rl.errors import InputError, TemplateRefusal
from marin_rl.types import Message

SHOWN = 120
_KEPT_ROLES = ("system", "user")  # templates write these as they are, or refuse them


def check_lengths(rows: Sequence[tuple[str, int]], room: int, limit: str = "") -> None:
    """Raise InputError that names the first of rows of more than `room` tokens, and counts them.

    Rows are names and numbers of tokens: of prompt and answer, or with a `limit`, which says what
    leaves the room, of the prompt.
    """
    long = [(name, length) for name, length in rows if length > room]
    if not long:
        return
    (name, length), most = long[0], max(length for _, length in long)
    has, what = (" has", "prompts") if limit else (": prompt and answer have", "rows")
    limit = limit or f"policy.context_length is {room}: raise it"
    raise InputError(
        f"{name}{has} {length} tokens, but {limit}, or remove {len(long)} of {len(rows)} {what}, "
        f"the longest of {most} tokens"
    )


def rendered_lengths(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[tuple[Sequence[Message], str]],
    names: Sequence[str],
    ends: Collection[int],
    options: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the tokens of each chat, answer included.

    Raises InputError for the first one that would not be learned as it is written. `names` say
    where each chat is from, `ends` are the ids that end completions, `options` those of the
    template for each chat, if there are any.
    """
    control = control_tokens(tokenizer, ends)
    in_prompts, in_answers = (any_of(texts) for texts in (control, control - _of_calls(tokenizer)))
    for (messages, answer), name in zip(chats, names, strict=True):
        texts = [(message.content, in_prompts) for message in messages]
        for text, refused in (*texts, (answer, in_answers)):
            if spelt := refused.search(text):
                raise InputError(
                    f"{name}: the text has {spelt[0]!r}, which is a control token of the policy's "
                    "tokenizer and would be read as one: remove it from the row"
                )
    rendered = named_chats(tokenizer, chats, names, ends, options)
    for (messages, answer), name, chat in zip(chats, names, rendered, strict=True):
        if fault := _fault_of(tokenizer, messages, answer, chat, ends):
            raise InputError(f"{name}: {fault}")
    return [len(chat.ids) for chat in rendered]


def _of_calls(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Control tokens that the template writes for a call of a tool alone: answers may call tools.

    Empty where it refuses one. Raises TemplateFault.
    """
    call = PROBES["a call of a tool"]
    called = Conversation(messages=call.messages[:2], tools=call.tools)
    try:
        with_call = ChatTemplate.of(tokenizer, tools=True).render(called).text
        plain = ChatTemplate.of(tokenizer).render(PROBES["several turns"]).text
    except TemplateRefusal:
        return set()
    texts = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
    return {text for text in texts if text in with_call and text not in plain}


def _fault_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answer: str,
    chat: RenderedChat,
    ends: Collection[int],
) -> str | None:
    """Return why a chat is not learned as it is written; None if it is."""
    for message in messages:
        if message.role in _KEPT_ROLES and message.content.strip() not in chat.prompt:
            return (
                f"the chat template leaves out or changes a message of role {message.role}, "
                f"{message.content!r:.{SHOWN}}: change the row, or use a template that writes it"
            )
    first, last = (int(place) for place in np.flatnonzero(chat.mask)[[0, -1]])
    if int(chat.ids[last]) not in ends:
        named = " or ".join(repr(text_of(tokenizer, [end])) for end in ends)
        return (
            f"what is trained on is {text_of(tokenizer, chat.ids[first:])!r:.{SHOWN}}: expected a "
            f"token that ends completions, {named}; a model that is trained so never ends its "
            "answers. Use a template that closes an answer (and has it in its generation block)"
        )
    # From the prompt on, for some tokenizers drop the blank that a text begins with.
    before, whole = (text_of(tokenizer, chat.ids[:end]) for end in (first, last))
    learned = whole.removeprefix(before)
    if whole.startswith(before) and answer in learned:
        return None
    # Two texts that look alike are shown by the numbers of their characters.
    alike = normalize("NFC", answer) in normalize("NFC", learned)
    shown = [(ascii if alike else repr)(text)[:SHOWN] for text in (answer, learned)]
    return (
        f"the answer {shown[0]} would be learned as {shown[1]}: the chat "
        "template or the tokenizer changes it; write the row as it is learned, or use a template "
        "that keeps it"
    )

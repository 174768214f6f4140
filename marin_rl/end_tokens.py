"""Tokens that end a completion: those that files list, and the one that the chat template writes.

A base model's folder may list one end token while its chat template closes turns with another. A
model that learns from such a template writes the template's, so that one must end completions too.
Leaves out the reading of tokenizers (`tokenizers`).
"""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.errors import InputError, TemplateRefusal
from marin_rl.plain_files import read_object

_QUESTION = {"role": "user", "content": "question"}
_REPLY = "reply"


def control_tokens(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> set[str]:
    """Return the texts of special tokens, and of those that end completions."""
    tokens = tokenizer.added_tokens_decoder.items()
    return {str(token.content) for id, token in tokens if token.special or id in ends}


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    # The longest first, as the tokenizer reads them; never the empty text.
    ordered = sorted({*texts} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "$^")


def listed_end_ids(folder: str, end: int) -> tuple[int, ...]:
    """Return the tokenizer's end token, then others that generation_config.json lists.

    Raises InputError for a file that has no such list.
    """
    file = Path(folder, "generation_config.json")
    if not folder or not file.is_file():
        return (end,)
    listed = read_object(file).get("eos_token_id")
    ids = listed if isinstance(listed, list) else [end if listed is None else listed]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{file}: expected eos_token_id as one id or a list, found {listed!r:.80}")
    return tuple(dict.fromkeys([end, *ids]))


def named_end_ids(texts: Sequence[str], id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """Return the ids of `policy.end_tokens`. Raises InputError for a text that is no token."""
    ids = [id_of(text) for text in texts]
    if None in ids:
        raise InputError(
            f"policy.end_tokens: {texts[ids.index(None)]!r} is no token of the policy's tokenizer: "
            "expected the text of one token, as its tokenizer.json has it"
        )
    return tuple(token for token in ids if token is not None)


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the control tokens that the chat template writes after an answer, in their order.

    Empty where it writes none, or refuses a conversation that ends with an answer. Raises
    TemplateFault.
    """
    turns = [_QUESTION, {"role": "assistant", "content": _REPLY}]
    try:
        text = ChatTemplate.of(tokenizer).render(Conversation(messages=turns)).text
    except TemplateRefusal:
        return ()
    _, answered, after = text.rpartition(_REPLY)
    ids = tokenizer.encode(after, add_special_tokens=False) if answered else []
    added = tokenizer.added_tokens_decoder
    return tuple(str(added[token].content) for token in ids if token in added)


def template_end(tokenizer: PreTrainedTokenizerBase, listed: Sequence[str]) -> str | None:
    """Return the token that ends an answer in training; None where the template writes none.

    `listed` are the tokens that end completions by the files of the tokenizer. Raises InputError
    where the template writes several tokens, and none of them is listed; TemplateFault.
    """
    closing = closing_tokens(tokenizer)
    end = next((token for token in closing if token in listed), None)
    if end is None and len(set(closing)) > 1:
        raise InputError(
            f"the chat template closes an answer with {' and '.join(map(repr, closing))}, but "
            f"completions end with {' or '.join(map(repr, listed))} by the tokenizer's files: set "
            "policy.end_tokens to the list of those that end a completion"
        )
    return end or next(iter(closing), None)

"""Messages to tokens, by a tokenizer's own chat template, and which tokens are trained on.

Used for the supervised warm start and to render prompts; rollouts never pass here, their tokens are
those the engine returned. Tokenizers are objects with Hugging Face's `apply_chat_template`; no
tokenizer library is imported. Masks come from positions, never from token values.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32
from jinja2 import TemplateError

from marin_rl.errors import InputError
from marin_rl.types import Message

# How the template says which tokens are the assistant's; transformers parses the same tag.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@runtime_checkable
class ChatTokenizer(Protocol):
    """What is needed of a tokenizer."""

    chat_template: str | None

    def apply_chat_template(
        self, conversation: list[dict[str, str]], **options: Any
    ) -> Any:  # token ids, or a mapping with return_dict
        """Render messages with the chat template, and tokenize."""
        ...


def prompt_tokens(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> Int32[np.ndarray, " T"]:
    """The prompt that a model is to continue: all messages and the assistant's opening.

    Raises InputError when the tokenizer has no chat template, or the template fails.
    """
    found = _render(tokenizer, _conversation(messages), add_generation_prompt=True)
    return np.asarray(found["input_ids"], dtype=np.int32)


def chat_tokens(
    tokenizer: ChatTokenizer, messages: Sequence[Message], answer: str
) -> tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " T"]]:
    """(token_ids, loss_mask) of a conversation that ends in `answer` by the assistant.

    The mask is 1 on the answer as the template's `{% generation %}` block delimits it, end-of-turn
    token included if it is in the block; for templates without such a block, on everything after
    the prompt. Earlier assistant messages are never trained on. Raises InputError when the prompt
    is not a prefix of the conversation, or when no token is left to train on.
    """
    prompt = prompt_tokens(tokenizer, messages)
    whole = [*_conversation(messages), {"role": "assistant", "content": answer}]
    marked = _GENERATION.search(_template(tokenizer)) is not None
    found = _render(tokenizer, whole, return_assistant_tokens_mask=marked)
    ids = np.asarray(found["input_ids"], dtype=np.int32)
    if len(ids) < len(prompt) or not np.array_equal(ids[: len(prompt)], prompt):
        raise InputError(
            "the chat template renders a prompt that the finished conversation does not begin "
            f"with (they part at token {_common(prompt, ids)} of {len(prompt)}): a model trained "
            "on it would never see the prompts it is sampled with; use a template whose "
            "generation prompt is a prefix of the assistant's turn"
        )
    mask = np.zeros(len(ids), dtype=np.int32)
    mask[len(prompt) :] = 1
    if marked:
        mask *= np.asarray(found["assistant_masks"], dtype=np.int32)
    if not mask.any():
        raise InputError(
            f"nothing to train on in the answer {answer!r}: the chat template marks none of its "
            "tokens as the assistant's"
        )
    return ids, mask


def _conversation(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _template(tokenizer: ChatTokenizer) -> str:
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise InputError(
            "the tokenizer has no chat template: expected chat_template in tokenizer_config.json "
            "or a chat_template.jinja beside it"
        )
    return template


def _render(
    tokenizer: ChatTokenizer, conversation: list[dict[str, str]], **options: Any
) -> Mapping[str, Any]:
    _template(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            conversation, tokenize=True, return_dict=True, **options
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"the chat template does not render these messages: {error}") from error


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """How many leading tokens two sequences share."""
    shortest = min(len(first), len(second))
    differ = np.flatnonzero(first[:shortest] != second[:shortest])
    return int(differ[0]) if len(differ) else shortest

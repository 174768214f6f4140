"""Messages to tokens, by a tokenizer's own chat template, and which tokens are trained on.

Used for the supervised warm start and to render prompts; rollouts never pass here, their tokens are
those the engine returned. Templates are rendered by `chat_templates`, as for serving; tokenizers
are objects with Hugging Face's methods, and no tokenizer library is imported. Masks come from
positions, never from token values.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from marin_rl.chat_templates import ChatTemplate, Conversation, Rendering, TemplateOwner
from marin_rl.errors import InputError, TemplateFault, TemplateRefusal
from marin_rl.types import Message

# How the template says which tokens are the assistant's; transformers parses the same tag.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Tokens = Int32[np.ndarray, " T"]


@runtime_checkable
class ChatTokenizer(TemplateOwner, Protocol):
    """A tokenizer, as far as conversations need it."""

    @property
    def chat_template(self) -> Any:
        """The template, or several by name; None without one."""
        ...

    def __call__(self, text: str, **options: Any) -> Any:
        """Tokenize; returns a mapping with `input_ids`, and `char_to_token`."""
        ...


def rendered_prompts(
    tokenizer: ChatTokenizer, prompts: Sequence[Sequence[Message]]
) -> list[tuple[str, int]]:
    """Text and number of tokens of several prompts, each with the assistant's opening.

    Raises InputError when the tokenizer has no chat template, or the template fails.
    """
    conversations = [
        Conversation(messages=_conversation(messages), opening=True) for messages in prompts
    ]
    return [
        (rendering.text, len(_ids(_tokenized(tokenizer, rendering))))
        for rendering in _rendered(_template(tokenizer), conversations)
    ]


def chat_tokens(
    tokenizer: ChatTokenizer, messages: Sequence[Message], answer: str
) -> tuple[Tokens, Tokens]:
    """(token_ids, loss_mask) of a conversation that ends in `answer` by the assistant.

    The mask is 1 on the answer as the template's `{% generation %}` block delimits it, end-of-turn
    token included if it is in the block; for templates without such a block, on everything after
    the prompt. Earlier assistant messages are never trained on. Raises InputError when the prompt
    is not a prefix of the conversation, or when no token is left to train on.
    """
    return chats_tokens(tokenizer, [(messages, answer)])[0]


def chats_tokens(
    tokenizer: ChatTokenizer, chats: Sequence[tuple[Sequence[Message], str]]
) -> list[tuple[Tokens, Tokens]]:
    """Tokens and loss masks of several conversations, rendered together, as `chat_tokens` does."""
    template = _template(tokenizer)
    marked = _GENERATION.search(tokenizer.get_chat_template()) is not None
    conversations = list[Conversation]()
    for messages, answer in chats:
        prompt = _conversation(messages)
        conversation = [*prompt, {"role": "assistant", "content": answer}]
        # Both in one message to the worker: a round trip costs more than rendering.
        conversations.append(Conversation(messages=prompt, opening=True))
        conversations.append(Conversation(messages=conversation))
    renderings = _rendered(template, conversations, spans=marked)
    pairs = zip(renderings[::2], renderings[1::2], chats, strict=True)
    return [
        _trained_tokens(tokenizer, prompt, conversation, answer, marked=marked)
        for prompt, conversation, (_, answer) in pairs
    ]


def _trained_tokens(
    tokenizer: ChatTokenizer,
    prompt_rendering: Rendering,
    rendering: Rendering,
    answer: str,
    *,
    marked: bool,
) -> tuple[Tokens, Tokens]:
    prompt = _ids(_tokenized(tokenizer, prompt_rendering))
    encoding = _tokenized(tokenizer, rendering)
    ids = _ids(encoding)
    # A sampler sees the prompt alone; other tokens in training would be another distribution.
    if len(ids) < len(prompt) or not np.array_equal(ids[: len(prompt)], prompt):
        raise InputError(
            "the chat template renders a prompt that the finished conversation does not begin "
            f"with (they part at token {_common(prompt, ids)} of {len(prompt)}): a model trained "
            "on it would never see the prompts it is sampled with; use a template whose "
            "generation prompt is a prefix of the assistant's turn"
        )
    mask = np.zeros(len(ids), dtype=np.int32)
    # From the prompt on, so that earlier turns of the assistant are never trained on.
    mask[len(prompt) :] = 1
    if marked:
        mask *= _assistant_mask(encoding, rendering.spans, len(ids))
    if not mask.any():
        raise InputError(
            f"nothing to train on in the answer {answer!r}: the chat template marks none of its "
            "tokens as the assistant's"
        )
    return ids, mask


def _assistant_mask(encoding: Any, spans: Sequence[tuple[int, int]], length: int) -> Tokens:
    """Tokens of the generation blocks, by the positions of their first and last characters.

    The edges are transformers': a block whose last character has no token ends with the text.
    """
    mask = np.zeros(length, dtype=np.int32)
    for start, end in spans:
        first, last = encoding.char_to_token(0, start), encoding.char_to_token(0, end - 1)
        if first is None:
            break
        mask[first : last + 1 if last else length] = 1
    return mask


def _conversation(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _template(tokenizer: ChatTokenizer) -> ChatTemplate:
    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template: expected chat_template in tokenizer_config.json "
            "or a chat_template.jinja next to it"
        )
    return ChatTemplate.of(tokenizer)


def _rendered(
    template: ChatTemplate, conversations: Sequence[Conversation], *, spans: bool = False
) -> list[Rendering]:
    try:
        return template.render_all(conversations, spans=spans)
    except TemplateRefusal as error:
        raise InputError(f"the chat template does not render these messages: {error}") from error
    except TemplateFault as error:
        raise InputError(f"the chat template does not render these messages: it {error}") from error


def _tokenized(tokenizer: ChatTokenizer, rendering: Rendering) -> Any:
    # The template has written the special tokens that open and end a text.
    return tokenizer(rendering.text, add_special_tokens=False)


def _ids(encoding: Mapping[str, Any]) -> Tokens:
    return np.asarray(encoding["input_ids"], dtype=np.int32)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Number of leading tokens that two sequences share."""
    shortest = min(len(first), len(second))
    differ = np.flatnonzero(first[:shortest] != second[:shortest])
    return int(differ[0]) if len(differ) else shortest

"""Messages to tokens, by a tokenizer's own chat template, and which tokens are trained on.

Used for the supervised warm start and to render prompts; rollouts never pass here, their tokens are
those the engine returned. Templates are rendered by `chat_templates`, as for serving. Masks come
from positions, never from token values.

Also the comparison of rows with what is learned from them. A chat template may remove reasoning,
trim blanks or leave messages out, a tokenizer may normalise what it reads or have no token for it,
and a text may spell a control token: such rows are refused before any work starts.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from typing import Any, Literal
from unicodedata import normalize

import numpy as np
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerBase

from marin_rl.chat_templates import (
    PROBES,
    ChatTemplate,
    Conversation,
    Rendering,
    as_template_message,
)
from marin_rl.errors import InputError, TemplateFault, TemplateRefusal
from marin_rl.tokenizers import any_of, control_tokens
from marin_rl.tool_calls import called_tools, parameters_of, parse_tool_calls, tool_format
from marin_rl.types import Demonstration, Message, ToolCall, assistant

# How the template says which tokens are the assistant's; transformers parses the same tag.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

SHOWN = 120
_KEPT_ROLES = ("system", "user", "tool")  # templates write these as they are, or refuse them

Tokens = Int32[np.ndarray, " T"]
TrainOn = Literal["last", "all", "flagged"] | None  # answers of a conversation; None: the last


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation that ends in an answer: its texts, its ids, and which are trained on.

    The first `prompt_length` ids are those of `prompt`, with which `text` begins. `weights` are of
    the losses of tokens, 0 for those that are not trained on.
    """

    prompt: str
    text: str
    ids: Tokens
    weights: Float32[np.ndarray, " T"]
    prompt_length: int

    @property
    def mask(self) -> Tokens:
        return (self.weights > 0).astype(np.int32)


def rendered_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[Message]]
) -> list[tuple[str, int]]:
    """Text and number of tokens of several prompts, each with the assistant's opening.

    Raises InputError when the tokenizer has no chat template, or the template fails.
    """
    conversations = [
        Conversation(messages=_conversation(messages), opening=True) for messages in prompts
    ]
    return [
        (rendering.text, len(_ids(_tokenized(tokenizer, rendering.text))))
        for rendering in _rendered(_template(tokenizer), conversations)
    ]


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answer: str,
    ends: Collection[int] | None = None,
) -> tuple[Tokens, Tokens]:
    """(token_ids, loss_mask) of a conversation that ends in `answer` by the assistant.

    The mask is 1 on the answer as the template's `{% generation %}` block delimits it, for
    templates without such a block from the prompt on, up to the token that ends it: the first of
    `ends`, by default the last control token that the template writes. What follows it is not
    trained on; where there is none, all is. Earlier assistant messages are never trained on. Raises
    InputError when the prompt is not a prefix of the conversation, or when no token is left to
    train on.
    """
    shown = Demonstration(messages=messages, answer=assistant(answer), name="")
    (chat,) = _rendered_chats(tokenizer, [shown], ends)
    return chat.ids, chat.mask


def _rendered_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Demonstration],
    ends: Collection[int] | None = None,
) -> list[RenderedChat]:
    """Several conversations, rendered together, with tokens and masks as `chat_tokens` has them."""
    rendered = list[RenderedChat]()
    for with_tools, some in groupby(chats, lambda chat: bool(chat.tools)):
        together = list(some)
        template = _template(tokenizer, tools=with_tools)
        marked = _GENERATION.search(template.source) is not None
        conversations = list[Conversation]()
        for chat in together:
            messages = _conversation([*chat.messages, chat.answer])
            own: dict[str, Any] = {"options": chat.options, "tools": chat.tools or None}
            # Both in one message to the worker: a round trip costs more than rendering.
            conversations.append(Conversation(messages=messages[:-1], opening=True, **own))
            conversations.append(Conversation(messages=messages, **own))
        renderings = _rendered(template, conversations, spans=marked)
        pairs = zip(renderings[::2], renderings[1::2], together, strict=True)
        rendered += [
            _trained_tokens(tokenizer, prompt, whole, chat.answer, marked=marked, ends=ends)
            for prompt, whole, chat in pairs
        ]
    return rendered


def demonstrated(
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration],
    ends: Collection[int] | None = None,
    train_on: TrainOn = None,
) -> list[RenderedChat]:
    """Conversations with the tokens that are learned; an error begins with the name of its chat.

    By default those of the last answer, as `chat_tokens` has them. Where others are learned too,
    each is trained on as in a conversation that ends with it. Where the template renders such a
    conversation in another way once it goes on, it is a chat of its own next to the whole, if the
    demonstration is to be cut into `segments`. Raises InputError where it is not.
    """
    if train_on in ("all", "flagged"):
        parts = [each.answers for each in demonstrations]
        rendered = iter(demonstrated(tokenizer, [*chain.from_iterable(parts)], ends))
        joined = [_joined(tokenizer, of, [next(rendered) for _ in of], train_on) for of in parts]
        return [*chain.from_iterable(joined)]
    try:
        return _rendered_chats(tokenizer, demonstrations, ends)
    except InputError:
        for each in demonstrations:
            try:
                _rendered_chats(tokenizer, [each], ends)
            except InputError as error:
                raise InputError(f"{each.name}: {error}") from None
        raise


def _joined(
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[Demonstration],
    chats: Sequence[RenderedChat],
    train_on: TrainOn,
) -> list[RenderedChat]:
    """The whole conversation, trained on those of its answers, which `chats` end with, to learn.

    With `segments`, further chats have the answers that the whole does not render as they are.
    """
    trained = answers[-1].trained if train_on == "flagged" else None
    shares = [True] * len(answers) if trained is None else trained
    joined = [replace(chats[-1], weights=chats[-1].weights * np.float32(shares[-1]))]
    for answer, chat, share in zip(answers[:-1], chats[:-1], shares[:-1], strict=True):
        if not share:
            continue
        weights = chat.weights * np.float32(share)
        end = int(np.flatnonzero(chat.mask)[-1]) + 1
        whole = next((w for w in joined if np.array_equal(chat.ids[:end], w.ids[:end])), None)
        if whole is not None:
            whole.weights[:end] += weights[:end]
        elif answer.segments:
            joined.append(replace(chat, weights=weights))
        else:
            begun = text_of(tokenizer, chat.ids[chat.prompt_length : end])
            raise InputError(
                f"{answer.name}: the answer is rendered as {begun!r:.{SHOWN}}, but otherwise once "
                "the conversation goes on (templates drop earlier reasoning, for one), so no "
                "sampled conversation is like it: set the environment's on_broken_prefix: segments "
                "to learn it as a sequence of its own, or sft.train_on: last"
            )
    return [chat for chat in joined if chat.mask.any()]


def _check_flags(each: Demonstration, train_on: TrainOn) -> None:
    if each.trained is None:
        return
    if train_on != "flagged":
        raise InputError(
            f"{each.name}: its messages say whether they are learned (train, weight): set "
            "sft.train_on: flagged, or remove them"
        )
    if not any(each.trained):
        raise InputError(
            f"{each.name}: none of its answers is learned: expected one without train: false or "
            "weight: 0"
        )


def _trained_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Rendering,
    rendering: Rendering,
    answer: Message,
    *,
    marked: bool,
    ends: Collection[int] | None,
) -> RenderedChat:
    prompt_ids = _ids(_tokenized(tokenizer, prompt.text))
    encoding, ids, start = _continued(tokenizer, prompt, prompt_ids, rendering)
    mask = np.zeros(len(ids), dtype=np.int32)
    chosen = tokenizer.added_tokens_decoder.keys() if ends is None else ends
    places = len(prompt_ids) + np.flatnonzero(np.isin(ids[len(prompt_ids) :], list(chosen)))
    # From the prompt on, so that earlier turns of the assistant are never trained on, up to the
    # token that ends the answer, which is trained on too.
    end = int(places[-1 if ends is None else 0]) + 1 if len(places) else len(ids)
    mask[len(prompt_ids) : end] = 1
    if marked:
        spans = [(max(first - start, 0), end - start) for first, end in rendering.spans]
        own = _assistant_mask(encoding, [span for span in spans if span[1] > 0], len(ids))
        mask *= np.roll(own, len(prompt_ids)) if start else own
    if not mask.any():
        raise InputError(
            f"nothing to train on in the answer {answer.content!r}: the chat template marks none "
            "of its tokens as the assistant's"
        )
    return RenderedChat(
        prompt=prompt.text,
        text=rendering.text,
        ids=ids,
        weights=mask.astype(np.float32),
        prompt_length=len(prompt_ids),
    )


def _continued(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Rendering,
    prompt_ids: Int32[np.ndarray, " P"],
    rendering: Rendering,
) -> tuple[Any, Tokens, int]:
    """Ids of a conversation that begin with those of its prompt, and their encoding.

    Also the character of the text at which the encoding begins. A sampler sees the prompt's ids
    alone: where the tokenizer would join the prompt's last characters with the first of the answer,
    the rest is tokenized by itself, as it is sampled. Raises InputError where that is not possible.
    """
    encoding = _tokenized(tokenizer, rendering.text)
    ids, count = _ids(encoding), len(prompt_ids)
    if len(ids) >= count and np.array_equal(ids[:count], prompt_ids):
        return encoding, ids, 0
    if rendering.text.startswith(prompt.text):
        start = len(prompt.text)
        rest = _tokenized(tokenizer, rendering.text[start:])
        joined = np.concatenate([prompt_ids, _ids(rest)])
        # Some tokenizers write a space before each text.
        if text_of(tokenizer, joined) == text_of(tokenizer, ids):
            return rest, joined, start
    shortest = min(count, len(ids))
    same = int(np.append(prompt_ids[:shortest] == ids[:shortest], False).argmin())
    raise InputError(
        "the chat template renders a prompt that the finished conversation does not begin "
        f"with (they part at token {same} of {count}): a model trained "
        "on it would never see the prompts it is sampled with; use a template whose "
        "generation prompt is a prefix of the assistant's turn"
    )


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | Tokens) -> str:
    return str(tokenizer.decode(list(map(int, ids)), clean_up_tokenization_spaces=False))


def _assistant_mask(encoding: Any, spans: Sequence[tuple[int, int]], length: int) -> Tokens:
    """Tokens of the generation blocks, by the positions of their first and last characters.

    `length` is that of the whole mask, of which the encoding may be the beginning.
    The edges are transformers': a block whose last character has no token ends with the text.
    """
    mask = np.zeros(length, dtype=np.int32)
    for start, end in spans:
        first, last = encoding.char_to_token(0, start), encoding.char_to_token(0, end - 1)
        if first is None:
            break
        mask[first : last + 1 if last else length] = 1
    return mask


def _conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [as_template_message(message) for message in messages]


def _template(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> ChatTemplate:
    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template: expected chat_template in tokenizer_config.json "
            "or a chat_template.jinja next to it"
        )
    return ChatTemplate.of(tokenizer, tools=tools)


def _rendered(
    template: ChatTemplate, conversations: Sequence[Conversation], *, spans: bool = False
) -> list[Rendering]:
    try:
        return template.render_all(conversations, spans=spans)
    except TemplateRefusal as error:
        raise InputError(f"the chat template does not render these messages: {error}") from error
    except TemplateFault as error:
        raise InputError(f"the chat template does not render these messages: it {error}") from error


def _tokenized(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    # The template has written the special tokens that open and end a text.
    return tokenizer(text, add_special_tokens=False)


def _ids(encoding: Mapping[str, Any]) -> Tokens:
    return np.asarray(encoding["input_ids"], dtype=np.int32)


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
    demonstrations: Sequence[Demonstration],
    ends: Collection[int],
    train_on: TrainOn = None,
) -> list[int]:
    """Return the tokens of each conversation, answer included.

    Raises InputError for the first one that would not be learned as it is written. `ends` are the
    ids that end completions.
    """
    for each in demonstrations:
        _check_flags(each, train_on)
    if train_on in ("all", "flagged"):
        parts = [each.answers for each in demonstrations]
        answers = [replace(answer, trained=None) for of in parts for answer in of]
        lengths = rendered_lengths(tokenizer, answers, ends)
        demonstrated(tokenizer, demonstrations, ends, train_on)
        ends_of = list(accumulate(map(len, parts)))
        return [max(lengths[end - len(of) : end]) for end, of in zip(ends_of, parts, strict=True)]
    control = control_tokens(tokenizer, ends)
    in_prompts, in_answers = (any_of(texts) for texts in (control, control - _of_calls(tokenizer)))
    for each in demonstrations:
        texts = [(text, in_prompts) for message in each.messages for text in _texts_of(message)]
        for text, refused in (*texts, *((text, in_answers) for text in _texts_of(each.answer))):
            if spelt := refused.search(text):
                raise InputError(
                    f"{each.name}: the text has {spelt[0]!r}, which is a control token of the "
                    "policy's tokenizer and would be read as one: remove it from the row"
                )
    rendered = demonstrated(tokenizer, demonstrations, ends)
    for each, chat in zip(demonstrations, rendered, strict=True):
        if fault := _fault_of(tokenizer, each, chat, ends):
            raise InputError(f"{each.name}: {fault}")
    return [len(chat.ids) for chat in rendered]


def _texts_of(message: Message) -> list[str]:
    return [message.content, *(call.arguments for call in message.tool_calls)]


def _of_calls(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Control tokens that the template writes only for tool calls, which answers may make.

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
    row: Demonstration,
    chat: RenderedChat,
    ends: Collection[int],
) -> str | None:
    """Return why a chat is not learned as it is written; None if it is."""
    answer = row.answer.content
    for message in row.messages:
        text = message.content.strip()
        # Some templates write results of tools as JSON.
        kept = text in chat.prompt or (
            message.role == "tool" and json.dumps(text, ensure_ascii=False) in chat.prompt
        )
        if message.role in _KEPT_ROLES and not kept:
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
        return _fault_of_calls(tokenizer, row.answer.tool_calls, learned)
    # Two texts that look alike are shown by the numbers of their characters.
    alike = normalize("NFC", answer) in normalize("NFC", learned)
    shown = [(ascii if alike else repr)(text)[:SHOWN] for text in (answer, learned)]
    return (
        f"the answer {shown[0]} would be learned as {shown[1]}: the chat "
        "template or the tokenizer changes it; write the row as it is learned, or use a template "
        "that keeps it"
    )


def _fault_of_calls(
    tokenizer: PreTrainedTokenizerBase, calls: Sequence[ToolCall], learned: str
) -> str | None:
    """Return why the text that is learned does not make these calls; None if it does."""
    if not calls:
        return None
    form = tool_format(tokenizer)
    if form is None:
        return "the chat template writes tool calls in no known format, or none: use one that does"
    made = parse_tool_calls(form, learned, parameters_of(called_tools(calls))).calls
    wanted, found = (
        [(call.name, json.loads(call.arguments)) for call in each] for each in (calls, made)
    )
    if wanted == found:
        return None
    return (
        f"its tool calls {wanted!r:.{SHOWN}} would be learned as {learned!r:.{SHOWN}}, which makes "
        f"the calls {found!r:.{SHOWN}}: use a template that writes them as they are"
    )

"""Bridges between turns: the token ids that a chat template puts after a sampled turn.

A dialogue goes on from exact ids: those of the turns so far, then the bridge of the new messages,
which ends with the opening of the model's next turn. Sampled ids are never rendered and tokenized
again, so that what is trained on is what was sampled. A bridge is made from a dialogue that stands
for any (and kept), then compared with what the template makes of the dialogue at hand: a template
that counts, dates or moves messages is refused, not followed wrongly. Owns the rendering of bridges
and these checks. Leaves out the loop (`episode`).
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.chat_templates import ChatTemplate, Conversation, Rendering, as_template_message
from marin_rl.config import PolicyConfig
from marin_rl.environments.episode import Tool
from marin_rl.errors import BridgeFault, TemplateRefusal
from marin_rl.inference.client.protocol import NO_OPTIONS
from marin_rl.tokenizers import PolicyTokenizer
from marin_rl.types import Message, ToolCall

# Stand for the turns before: what a template writes after a turn must not depend on their words,
# but it may on a system message (some write it into the last question) and on reasoning (some drop
# it from all turns but the last).
_SYSTEM = {"role": "system", "content": "instruction"}
_USER = {"role": "user", "content": "question"}
_REPLY, _REASONED = "reply", "<think>\nthought\n</think>\n\nreply"
_REASONING_END = "</think>"
_KEPT_MAX = 4096  # bridges that are kept: environments say the same words again and again
_KEPT_CHARACTERS_MAX = 1024  # of their messages: long results of tools hardly ever come again
_DIALOGUES_MAX = 1024  # dialogues whose texts are kept
_CALL_ID = "bridge001"  # Mistral's templates ask for nine characters


@dataclass(frozen=True, slots=True)
class _Junction:
    """New messages of a dialogue, with all that the template may depend on."""

    messages: tuple[Message, ...]
    ended: int | None  # the end token of the turn before
    system: bool
    reasoned: bool
    tools: str = ""  # as JSON

    @property
    def results(self) -> list[Message]:
        return [message for message in self.messages if self.tools and message.role == "tool"]

    @property
    def first(self) -> list[dict[str, Any]]:
        return [_SYSTEM, _USER] if self.system else [_USER]

    @property
    def added(self) -> list[dict[str, Any]]:
        return [as_template_message(message) for message in self.messages]

    def conversation(self, messages: Sequence[dict[str, Any]], *, opening: bool) -> Conversation:
        tools = json.loads(self.tools) if self.tools else None
        return Conversation(messages=messages, tools=tools, opening=opening)


@dataclass(frozen=True, slots=True)
class _Text:
    """Text of a bridge from the end token of the turn before on, and its ids."""

    text: str
    ids: tuple[int, ...]


class TemplateBridge:
    """Bridges of a policy's chat template; its tokenizer is read on first use.

    `options` of the template win over the policy's own.
    """

    def __init__(self, policy: PolicyConfig, options: Mapping[str, Any] | None = None) -> None:
        self._policy, self._tokenizer = policy, PolicyTokenizer(policy)
        self._options = dict(options or {})
        self._text_at = lru_cache(maxsize=_KEPT_MAX)(self._text)
        # The dialogue before a turn is the one that the turn before was compared with.
        self._opened_at = lru_cache(maxsize=_DIALOGUES_MAX)(self._opened)

    def __call__(
        self,
        dialogue: Sequence[Message],
        last_id: int,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> Int32[np.ndarray, " n"]:
        """Return the ids that lead from the last turn of `dialogue` to the model's next turn.

        `last_id` is the last id of that turn: its end token is part of the bridge only where a stop
        string ended the turn. `tools` are those that the whole dialogue offers. The result has the
        ids that the new messages have where the template renders the whole dialogue. Raises
        BridgeFault where it does not continue what it wrote before, or refuses the messages;
        InputError for a tokenizer that cannot be read.
        """
        junction = _Junction(
            messages=tuple(messages),
            ended=last_id if last_id in self._tokenizer.end_ids else None,
            system=dialogue[0].role == "system",
            reasoned=_REASONING_END in dialogue[-1].content,
            tools=json.dumps(list(tools)) if tools else "",
        )
        is_long = sum(len(message.content) for message in messages) > _KEPT_CHARACTERS_MAX
        bridge = self._text(junction) if is_long else self._text_at(junction)
        # The built-in template renders each message independently.
        if not ChatTemplate.of(self._tokenizer.tokenizer).is_built_in:
            self._compare(bridge, junction, dialogue)
        return np.array(bridge.ids[1:] if junction.ended is not None else bridge.ids, np.int32)

    def check(self, tools: Sequence[Tool] = ()) -> None:
        """Raise BridgeFault where no dialogue of several turns can be carried.

        Where `tools` are offered, it is enough if dialogues continue after results of tools.
        """
        messages = [Message(role="user", content="go on")]
        question, reply = (Message(role="user", content="question"), _REPLY)
        dialogue = [question, Message(role="assistant", content=reply)]
        try:
            self._check_at_any_end(dialogue, messages, tools)
        except BridgeFault:
            if not tools:
                raise
            call = ToolCall(id=_CALL_ID, name=tools[0]["function"]["name"], arguments="{}")
            called = Message(role="assistant", content="", tool_calls=(call,))
            result = Message(role="tool", content="result", tool_call_id=call.id, name=call.name)
            self._check_at_any_end([question, called], [result], tools)

    def _check_at_any_end(
        self, dialogue: Sequence[Message], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> None:
        """Raise BridgeFault unless the dialogue can continue after one of the end tokens."""
        *others, last = self._tokenizer.end_ids
        for end in others:
            with suppress(BridgeFault):
                self(dialogue, end, messages, tools)
                return
        self(dialogue, last, messages, tools)

    def prompt(
        self,
        dialogue: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> Int32[np.ndarray, " n"]:
        """Return the ids of a whole dialogue as the template renders it for the model's next turn.

        What the model sampled is rendered from its text. `options` of the template win over the
        bridge's own. Raises as `__call__` does.
        """
        if options and (others := {**self._options, **options}) != self._options:
            bridge = TemplateBridge(self._policy, others)
            bridge._tokenizer = self._tokenizer  # which takes a second to read
            return bridge.prompt(dialogue, tools)
        offered = json.dumps(list(tools)) if tools else ""
        (text,) = self._dialogues(offered, (dialogue,))
        return np.array(self._tokenizer.encoded(text), np.int32)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids, without special tokens. Raises InputError."""
        return self._tokenizer.decoded(ids)

    def _text(self, junction: _Junction) -> _Text:
        ends = [self._text_of(end) for end in self._tokenizer.end_ids]
        if junction.ended is not None:
            ends = [self._text_of(junction.ended)]
        if junction.results:
            text = self._text_after_calls(junction, ends)
        else:
            text = self._text_after_turn(junction)
        # These are the ids that the text has in the dialogue too: a special token begins it, and no
        # token reaches over one.
        ids = self._tokenizer.encoded(text)
        if not (text.startswith(tuple(ends)) and ids[0] in self._tokenizer.end_ids):
            raise BridgeFault(
                f"the chat template goes on after a turn with {text[:40]!r}: expected it to close "
                f"the turn with {' or '.join(map(repr, ends))}"
            )
        return _Text(text, ids)

    def _compare(self, bridge: _Text, junction: _Junction, dialogue: Sequence[Message]) -> None:
        """Raise BridgeFault unless the template makes this bridge in the dialogue itself too."""
        before, after = self._dialogues(
            junction.tools, (dialogue[:-1], [*dialogue, *junction.messages])
        )
        grown = after.removeprefix(before)
        if not (after.startswith(before) and grown.endswith(bridge.text)):
            raise BridgeFault(
                "the chat template writes this dialogue in another way once it goes on: expected a "
                f"text that begins with {before!r:.300} and ends with {bridge.text!r:.300}, found "
                f"{after!r:.300}"
            )
        if self._tokenizer.encoded(grown)[-len(bridge.ids) :] != bridge.ids:
            raise BridgeFault(
                f"the tokenizer has other ids for {bridge.text!r:.300} at the end of the dialogue "
                "than by itself: expected the end token of a turn to part what it reads"
            )

    def _dialogues(self, tools: str, dialogues: Sequence[Sequence[Message]]) -> list[str]:
        """Texts of dialogues, each with the opening of the model's next turn.

        Where the template refuses several calls in a turn, the first of them stands for all.
        """
        try:
            return [self._opened_at(tuple(each), tools) for each in dialogues]
        except BridgeFault:
            if all(len(message.tool_calls) < 2 for message in dialogues[-1]):
                raise
            return [self._opened_at(tuple(each), tools, 1) for each in dialogues]

    def _opened(
        self, dialogue: tuple[Message, ...], tools: str, calls_max: int | None = None
    ) -> str:
        junction = _Junction(
            messages=dialogue, ended=None, system=False, reasoned=False, tools=tools
        )
        as_seen = [as_template_message(message, calls_max) for message in dialogue]
        (opened,) = self._rendered(junction, junction.conversation(as_seen, opening=True))
        return opened.text

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.tokenizer.decode([token]))

    def _text_after_turn(self, junction: _Junction) -> str:
        """Return what the template writes after a turn of the model, up to its next turn."""
        reply = _REASONED if junction.reasoned else _REPLY
        first = junction.first
        turn = {"role": "assistant", "content": reply}
        before, after = self._rendered(
            junction,
            junction.conversation(first, opening=True),
            junction.conversation([*first, turn, *junction.added], opening=True),
        )
        # Some templates write a space between the opening and a turn, which models sample first.
        begun = after.text.removeprefix(before.text).lstrip()
        if not (after.text.startswith(before.text) and begun.startswith(reply)):
            raise BridgeFault(
                "the chat template writes a turn of the model differently once the dialogue goes "
                f"on: expected a text that begins with {before.text + reply!r:.300}, found "
                f"{after.text!r:.300}"
            )
        after_reply = begun.removeprefix(reply)
        # Llama 2's template writes a space before its end token, which the model need not.
        return after_reply.lstrip() or after_reply

    def _text_after_calls(self, junction: _Junction, ends: Sequence[str]) -> str:
        """Return what the template writes after a turn that called tools, from its end token on.

        The turn that stands for the sampled one has a call for each result: templates may look for
        them. How a template writes calls is its own affair, so the turn is recognised by rendering
        the dialogue as it was before the results.
        """
        before, called, after = self._with_calls(junction)
        at = max(called.text.rfind(end) for end in ends)
        if at < len(before.text) or not called.text.startswith(before.text):
            raise BridgeFault(
                "the chat template writes a turn that calls tools in another way than it opens "
                f"one: expected a text that begins with {before.text!r:.300} and ends with "
                f"{' or '.join(map(repr, ends))}, found {called.text!r:.300}"
            )
        end = next(end for end in ends if called.text.startswith(end, at))
        if not after.text.startswith(called.text[: at + len(end)]):
            raise BridgeFault(
                "the chat template writes a turn that calls tools differently once the results are "
                f"there: expected a text that begins with {called.text!r:.300}, found "
                f"{after.text!r:.300}"
            )
        return after.text[at:]

    def _with_calls(self, junction: _Junction) -> list[Rendering]:
        """Render the opening of a turn, the turn with its calls, and the results after it.

        Some templates write one call in a turn (Llama 3.1), but results one after the other: there
        a turn with one call stands for one with several.
        """
        calls = [
            {
                "id": result.tool_call_id or _CALL_ID,
                "type": "function",
                "function": {"name": result.name or "tool", "arguments": {}},
            }
            for result in junction.results
        ]
        first, some = junction.first, calls
        while True:
            turn = {
                "role": "assistant",
                "content": _REASONED.removesuffix(_REPLY) if junction.reasoned else None,
                "tool_calls": some,
            }
            try:
                return self._rendered(
                    junction,
                    junction.conversation(first, opening=True),
                    junction.conversation([*first, turn], opening=False),
                    junction.conversation([*first, turn, *junction.added], opening=True),
                )
            except BridgeFault:
                if len(some) == 1:
                    raise
                some = calls[:1]

    def _rendered(self, junction: _Junction, *conversations: Conversation) -> list[Rendering]:
        """Renderings of conversations. Raises BridgeFault where the template refuses one."""
        template = ChatTemplate.of(self._tokenizer.tokenizer, tools=bool(junction.tools))
        try:
            return template.render_all(
                [replace(conversation, options=self._options) for conversation in conversations]
            )
        except TemplateRefusal as error:
            roles = ", ".join(message.role for message in junction.messages) or "nothing"
            raise BridgeFault(
                f"the chat template refuses to go on with messages of {roles}: {error}"
            ) from None

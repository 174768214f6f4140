"""The one renderer of chat templates, for training and for serving.

A template of a model folder is rendered in a worker process that is killed where it exceeds a limit
of time or memory; the template of this package's own tokenizer, which is known by its text, is
rendered right here. Both go through the same Jinja environment (`isolated.templates`), which
renders what transformers renders. Leaves out tokenizing (`batching.sequences`,
`serving.templates`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import orjson

from marin_rl.errors import InputError, TemplateFault, TemplateRefusal
from marin_rl.isolated.pool import Pool
from marin_rl.isolated.processes import WorkerFault, WorkerLimits, WorkerSpec
from marin_rl.isolated.templates import (
    CHARACTERS_MAX,
    CHARACTERS_PER_BYTE_MAX,
    CLOCK,
    DATE,
    failure_of,
    render,
)
from marin_rl.types import Message

# Each message opens with the token of its role; what the assistant says ends with EOS, and the
# `generation` block marks which tokens are its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Variables that every conversation has; those named `…_token` are special tokens.
_GIVEN = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_DATE_LINE = re.compile(rf"^{{%- set (?:date|{DATE}) = [^\n]* %}}\n", re.MULTILINE)
WORKERS_MAX = 2
LIMITS = WorkerLimits(cpu_s=2.0, wall_s=20.0, memory_bytes=512 * 2**20, answer_bytes=256 * 2**20)

_pool = Pool(WorkerSpec(module="marin_rl.isolated.templates", limits=LIMITS), WORKERS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and tools as templates expect them; `opening` ends with the assistant's opening.

    `options` are values of other variables that the template reads.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    opening: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def as_template_message(message: Message, calls_max: int | None = None) -> dict[str, Any]:
    """A message as templates see it: arguments of calls are objects there."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for call in message.tool_calls[:calls_max]
    ]
    fields = {"role": message.role, "tool_call_id": message.tool_call_id, "name": message.name}
    seen: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    seen["content"] = (message.content or None) if calls else message.content
    return seen | ({"tool_calls": calls} if calls else {})


PROBE_NAME, PROBE_QUESTION = "probe_of_format", "What does the probe say?"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Says what it says.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
_PROBE_CALL = {
    "id": "probe0001",  # Mistral's templates ask for nine characters
    "type": "function",
    "function": {"name": PROBE_NAME, "arguments": {"key": "value"}},
}
CALL_PROBE = Conversation(
    messages=[
        {"role": "user", "content": PROBE_QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [_PROBE_CALL]},
    ],
    tools=[_PROBE_TOOL],
)


class _CallForm(NamedTuple):
    """Form of a message that calls tools: its content without text, and arguments as JSON text."""

    empty: str | None
    as_text: bool

    def of(self, conversation: Conversation) -> Conversation:
        messages = [self._message(each) for each in conversation.messages]
        return replace(conversation, messages=messages)

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self.as_text:
            calls = [{**call, "function": self._function(call["function"])} for call in calls]
        return {**message, "content": message.get("content") or self.empty, "tool_calls": calls}

    def _function(self, function: Mapping[str, Any]) -> dict[str, Any]:
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**function, "arguments": text}


_NO_CONTENT = re.compile(r"\b(None|null)\b")

# The first is the common one. DeepSeek's templates add up texts; GPT-OSS's and some of Qwen's look
# for words in the content.
_CALL_FORMS = tuple(_CallForm(empty, as_text) for empty in (None, "") for as_text in (False, True))


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of a conversation; `spans` are the (start, end) of its generation blocks."""

    text: str
    spans: Sequence[tuple[int, int]] = field(default=())


@runtime_checkable
class TemplateOwner(Protocol):
    """A tokenizer, as far as templates need it."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str: ...


class ChatTemplate:
    """A chat template with its special tokens. May be used by several threads.

    `pool` renders all but the built-in template; all share one unless another is given.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, Any], pool: Pool | None = None
    ) -> None:
        self.source, self._pool = source, pool or _pool
        self._special_tokens = dict(special_tokens)

    @classmethod
    def of(cls, tokenizer: TemplateOwner, *, tools: bool = False) -> "ChatTemplate":
        """Return a tokenizer's template, the one for tools if it has several."""
        source = tokenizer.get_chat_template(None, [{}] if tools else None)
        return cls(source, tokenizer.special_tokens_map)

    @property
    def is_built_in(self) -> bool:
        return self.source == CHAT_TEMPLATE

    def render(self, conversation: Conversation) -> Rendering:
        return self.render_all([conversation])[0]

    def render_all(
        self, conversations: Sequence[Conversation], *, spans: bool = False
    ) -> list[Rendering]:
        """Render conversations, all of them by one worker.

        `spans` asks for the generation blocks. Raises TemplateRefusal where the template refuses a
        conversation, TemplateFault where it exceeds a limit or does what it must not.
        """
        calling = any("tool_calls" in m for each in conversations for m in each.messages)
        if calling and not self.is_built_in:
            key = self.source, _as_json(self._special_tokens)
            if key not in _call_forms:
                _call_forms[key] = next(filter(self._writes, _CALL_FORMS), _CALL_FORMS[0])
            form = _call_forms[key]
            conversations = [form.of(conversation) for conversation in conversations]
        return self._rendered(conversations, spans=spans)

    def _writes(self, form: _CallForm) -> bool:
        try:
            (rendering,) = self._rendered([form.of(CALL_PROBE)])
        except TemplateRefusal:
            return False
        before, name, _ = rendering.text.rpartition(PROBE_QUESTION)[2].partition(PROBE_NAME)
        return bool(name) and _NO_CONTENT.search(before) is None  # GLM 4's writes None as a text

    def _rendered(
        self, conversations: Sequence[Conversation], *, spans: bool = False
    ) -> list[Rendering]:
        all_variables = [self._variables(conversation) for conversation in conversations]
        if self.is_built_in:
            try:
                return [Rendering(*render(self.source, v, spans=spans)) for v in all_variables]
            except Exception as error:  # noqa: BLE001 - as a worker reports it
                raise _exception_of(failure_of(error)) from None
        source = _as_json(self.source)
        requests = [_request(source, _as_json(each), spans=spans) for each in all_variables]
        values = [_checked(answer, "text") for answer in self._pool.ask(requests)]
        return [Rendering(v["text"], [(start, end) for start, end in v["spans"]]) for v in values]

    def variables(self) -> frozenset[str]:
        """Return the variables that the template reads and a conversation does not have anyway.

        `strftime_now` is one of them where the template asks for the day. Raises TemplateFault.
        """
        if self.is_built_in:
            return frozenset()
        (answer,) = self._pool.ask([_as_json({"template": self.source})])
        own = set(_checked(answer, "names")["names"]) - _GIVEN - self._special_tokens.keys()
        return frozenset(name for name in own - {DATE} if not name.endswith("_token"))

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        return {
            **conversation.options,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": conversation.opening,
            **self._special_tokens,
        }


_call_forms: dict[tuple[str, bytes], _CallForm] = {}  # by template


def reads_clock(tokenizer: TemplateOwner) -> bool:
    return CLOCK in _variables_of(tokenizer)


def check_options(tokenizer: TemplateOwner, options: Mapping[str, Any], key: str) -> None:
    """Raise InputError for an option that the chat template does not read, naming those it does.

    `key` is that of the configuration. Raises TemplateFault.
    """
    names = _variables_of(tokenizer)
    known = names - {CLOCK} | ({"date"} if CLOCK in names else set())
    if unknown := sorted(options.keys() - known):
        raise InputError(
            f"{key}.{unknown[0]}: the policy's chat template reads no such variable; it reads "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _variables_of(tokenizer: TemplateOwner) -> frozenset[str]:
    both = (ChatTemplate.of(tokenizer, tools=tools) for tools in (False, True))
    return frozenset().union(*(template.variables() for template in both))


def with_options(source: str, options: Mapping[str, Any]) -> str:
    """Return a template in which variables have these values where a conversation has no others.

    `date` is the day that `strftime_now` gives. The values are part of the template, also where it
    is exported to.
    """
    values = dict(options)
    if "date" in values:
        values[DATE] = values["date"]
    # Jinja drops the line break after a block, and the template begins as it did.
    lines = [f"{{%- set {n} = {n}|default({_literal(v)}) %}}\n" for n, v in values.items()]
    return "".join(lines) + source


def without_date(source: str) -> str:
    return _DATE_LINE.sub("", source)


def _literal(value: Any) -> str:
    match value:
        case None:
            return "none"
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            pairs = (f"{_literal(key)}: {_literal(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case _:
            return json.dumps(value, ensure_ascii=False)


def start_worker() -> None:
    _pool.start()


def prove(tokenizer: TemplateOwner) -> None:
    """Render probe conversations by a folder's template. Raises InputError where one shows a fault.

    A single message of a user must be rendered. A template may refuse the others (system messages,
    several turns, tool calls), but it may not exceed a limit with them.
    """
    for name, conversation in PROBES.items():
        template = ChatTemplate.of(tokenizer, tools=conversation.tools is not None)
        try:
            template.render(conversation)
        except TemplateFault as error:
            raise InputError(
                f"the chat template of the model folder is wrong: with {name} it {error}; expected "
                "one that renders messages and nothing else, as transformers does"
            ) from None
        except TemplateRefusal as error:
            if conversation is PROBES[_FIRST_PROBE]:
                raise InputError(
                    f"the chat template of the model folder refuses {name}: {error}; expected one "
                    "that renders at least that"
                ) from None


def _request(source: bytes, variables: bytes, *, spans: bool) -> bytes:
    """Return what a worker renders: a template and its variables, which are JSON already."""
    most = CHARACTERS_MAX + CHARACTERS_PER_BYTE_MAX * len(variables)
    form = b'{"template":%b,"variables":%b,"spans":%b,"characters_max":%d}'
    return form % (source, variables, b"true" if spans else b"false", most)


def _checked(answer: Mapping[str, Any] | WorkerFault, key: str) -> Mapping[str, Any]:
    """Return a worker's answer that has `key`. Raises TemplateFault, TemplateRefusal."""
    if isinstance(answer, WorkerFault):
        raise TemplateFault(f"exceeds a limit ({answer})")
    if key not in answer:
        raise _exception_of(answer)
    return answer


def _exception_of(failure: Mapping[str, str]) -> InputError:
    kind = TemplateFault if failure["kind"] == "fault" else TemplateRefusal
    return kind(failure["message"])


def _as_json(value: Any) -> bytes:
    """Return JSON; raises TemplateRefusal for half a character."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # it writes no integers over 64 bits
        pass
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _exception_of(failure_of(error)) from None


_QUESTION = {"role": "user", "content": "What is the weather in Oslo?"}
_ANSWER = {"role": "assistant", "content": "Rain."}
_BRIEF = {"role": "system", "content": "Be brief."}
_LONG = {"role": "user", "content": "word " * 20_000}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": _CITY},
}
_CALL = {
    "id": "probe0001",  # Mistral's templates ask for nine characters
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo"}},
}
_FIRST_PROBE = "one message of a user"
PROBES = {
    _FIRST_PROBE: Conversation(messages=[_QUESTION], opening=True),
    "a system message": Conversation(messages=[_BRIEF, _QUESTION]),
    "several turns": Conversation(messages=[*[_QUESTION, _ANSWER] * 4, _QUESTION], opening=True),
    "a call of a tool": Conversation(
        messages=[
            _QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "probe0001", "content": "Rain."},
        ],
        tools=[_TOOL],
        opening=True,
    ),
    "a long message": Conversation(messages=[_LONG], opening=True),
}

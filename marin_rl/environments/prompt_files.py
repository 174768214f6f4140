"""Rows of prompts: messages, answer and demonstration of the rows of other libraries.

The rows of TRL, verl, verifiers, OpenRLHF, open-instruct and this project are read alike: columns
are known by their usual names, or named by options. Where the names leave a choice, the error asks
for an option. Leaves out files (`row_files`), and the split into training and evaluation (`chat`).
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson

from marin_rl.environments.base import plain_json
from marin_rl.types import Message, ToolCall, as_role, assistant
from schemas import Malformed
from schemas.strict_json import parse_json

ROLES = ("system", "user", "assistant", "tool")
# Those of ShareGPT's rows, whose messages have `from` and `value`.
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
# Where others keep what a model thought: it would not be learned.
REASONING = ("reasoning_content", "reasoning", "thinking")

# Columns of the prompt: our own names, and the fallbacks of other libraries.
PROMPT_COLUMNS = ("messages", "prompt")
SHAREGPT_COLUMNS = ("conversations",)
OTHER_PROMPT_COLUMNS = ("question", "problem", "instruction", "input")
OTHER_ANSWER_COLUMNS = ("ground_truth", "solution", "label", "target", "reward_model.ground_truth")

# Metadata of a row whose prompt is a list of messages, which is what TRL calls conversational.
CONVERSATIONAL = "conversational"
COMPLETION = "completion"
# Metadata of a row whose messages say which answers are learned: a boolean for each, in order, or
# its weight.
TRAINED = "answers_trained"
WEIGHT_MAX = 100
TOOLS = "tools"
OPTIONS = "chat_template_kwargs"  # TRL's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of columns as configured, dotted where they lie in another; None: the usual names."""

    prompt: str | None = None
    answer: str | None = None
    completion: str | None = None
    id: str | None = None

    @property
    def read(self) -> frozenset[str]:
        """Top-level columns that decide everything but the metadata."""
        configured = (self.prompt, self.answer, self.completion, self.id)
        usual = (*PROMPT_COLUMNS, *SHAREGPT_COLUMNS, *OTHER_PROMPT_COLUMNS, *OTHER_ANSWER_COLUMNS)
        names = {*usual, "answer", COMPLETION, "id", TOOLS, OPTIONS, *filter(None, configured)}
        return frozenset(names | {name.partition(".")[0] for name in names})


class PromptRow(NamedTuple):
    """Fields of a row. `demonstration` is the message that a supervised warm start learns.

    `trained` says of each answer, that one too, whether it is learned, where a message says so, or
    with which weight.
    """

    row_id: str
    id_given: bool
    prompt_column: str
    messages: tuple[Message, ...]
    conversational: bool
    answer: Any
    demonstration: Message | None
    ends_with_assistant: bool
    trained: list[bool | float] | None

    @property
    def form(self) -> str:
        """Column and type of prompt and demonstration, as a warm start learns them."""
        kind = "messages" if self.conversational else "a text"
        if self.ends_with_assistant:
            return f"{self.prompt_column} that end with the assistant's"
        other = "an answer" if self.demonstration is None else "a completion"
        return f"{self.prompt_column} ({kind}) and {other}"


def read_row(raw: Any, columns: Columns) -> PromptRow:
    """Return the fields of a row. Raises ValueError saying what is wrong and what to type."""
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object with the columns of a prompt, found {raw!r:.80}")
    column = _prompt_column(raw, columns)
    value = value_at(raw, column)
    conversational = not isinstance(value, str)
    if column == "messages" and not conversational:
        raise ValueError("messages: expected a list that is not empty, found a text")
    if conversational:
        messages = _messages(value, column)
    else:
        messages = [Message(role="user", content=value)]
    given = value_at(raw, columns.id or "id")
    row_id = _digest_of_messages(messages) if given is None else str(given)
    demonstration = demonstration_in(raw, columns)
    trained = _trained(value, column) if conversational else None
    ends_with_assistant = messages[-1].role == "assistant"
    if ends_with_assistant:
        demonstration = _last_turn(messages, column, demonstration, columns)
        messages = messages[:-1]
    elif trained is not None:
        raise ValueError(
            f"{column}: its messages say which answers are learned (train, weight), and do not end "
            "with the assistant's: expected the last answer among them"
        )
    own = column == "messages" or (column == "prompt" and not conversational)
    answer = _answer(raw, columns, own=own)
    if column == "messages" and answer is raw.get("ground_truth"):
        match answer:  # open-instruct publishes rows of one verifier as a list of one text
            case [str(only)]:
                answer = only
    return PromptRow(
        row_id,
        given is not None,
        column,
        tuple(messages),
        conversational,
        answer,
        demonstration,
        ends_with_assistant,
        trained,
    )


def _digest_of_messages(messages: Sequence[Message]) -> str:
    """The id of a row without one. Of rows without calls of tools it is what it always was."""
    parts = [
        [each.role, each.content, *((call.name, call.arguments) for call in each.tool_calls)]
        for each in messages
    ]
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()[:16]


def metadata_of(
    raw: dict[str, Any], row: PromptRow, columns: Columns, where: str
) -> dict[str, Any]:
    """Return every other column as JSON. Raises InputError where that is not possible.

    An answer that is not a text, or has another name than `answer`, keeps its column and type.
    """
    left_out = {row.prompt_column}
    if columns.id is None:
        left_out.add("id")
    answer = raw.get("answer")
    if answer is None or (isinstance(answer, str) and columns.answer in (None, "answer")):
        left_out.add("answer")
    metadata = {name: value for name, value in raw.items() if name not in left_out}
    if row.ends_with_assistant and (shown := row.demonstration) is not None:
        metadata[COMPLETION] = [as_message(shown)] if shown.tool_calls else shown.content
    if row.trained is not None:
        metadata[TRAINED] = row.trained
    if row.conversational:
        metadata.setdefault(CONVERSATIONAL, True)
    return plain_json(metadata, where)


def demonstration_in(raw: Mapping[str, Any], columns: Columns) -> Message | None:
    """Return the message of the column with the demonstration: a text, or a list of one message."""
    name = columns.completion or COMPLETION
    value = value_at(raw, name)
    if isinstance(value, str):
        return assistant(value)
    if isinstance(value, list):
        messages = _messages(value, name)
        if len(messages) > 1 or messages[0].role != "assistant":
            raise ValueError(
                f"{name}: expected one message of the assistant, found {len(messages)} messages of "
                f"{', '.join(each.role for each in messages)}"
            )
        return messages[0]
    if columns.completion is not None and value is not None:
        raise ValueError(f"{name}: expected a text or a message, found {value!r:.80}")
    return None


def value_at(raw: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a field in it by a dotted name; None where it is not."""
    if name in raw or "." not in name:
        return raw.get(name)
    value: Any = raw
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _prompt_column(raw: dict[str, Any], columns: Columns) -> str:
    if columns.prompt is not None:
        if value_at(raw, columns.prompt) is None:
            raise ValueError(
                f"no column {columns.prompt!r}, which environment.options.prompt_key names"
                f"{_listed(raw)}"
            )
        return columns.prompt
    for names in (PROMPT_COLUMNS, SHAREGPT_COLUMNS, OTHER_PROMPT_COLUMNS):
        present = [name for name in names if raw.get(name) is not None]
        if len(present) > 1:
            raise ValueError(
                f"both {' and '.join(present)} may be the prompt: set environment.options."
                f"prompt_key to one of them, such as {present[0]}"
            )
        if present:
            return present[0]
    expected = ", ".join((*PROMPT_COLUMNS, *SHAREGPT_COLUMNS, *OTHER_PROMPT_COLUMNS))
    raise ValueError(
        f"expected a prompt in one of the columns {expected}{_listed(raw)}; name it by "
        "environment.options.prompt_key"
    )


def _answer(raw: dict[str, Any], columns: Columns, *, own: bool) -> Any:
    """Return the value of the answer column, None if no column has it.

    `answer` wins in rows of this project's `own` format; elsewhere two columns are an error.
    """
    if columns.answer is not None:
        return value_at(raw, columns.answer)
    answer = raw.get("answer")
    if own and answer is not None:
        return answer
    others = [name for name in OTHER_ANSWER_COLUMNS if value_at(raw, name) is not None]
    present = others if answer is None else ["answer", *others]
    if len(present) > 1:
        raise ValueError(
            f"both {' and '.join(present)} may be the answer: set environment.options.answer_key "
            f"to one of them, such as {present[0]}"
        )
    return value_at(raw, present[0]) if present else None


def tools_in(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools that a row offers, as chat templates have them. Raises ValueError.

    Its column `tools` is a list of functions' schemas, also without `type`, or that list as JSON.
    """
    tools = _parsed(metadata.get(TOOLS), TOOLS)
    if not tools:
        return []
    if not isinstance(tools, list):
        raise ValueError(f"{TOOLS}: expected a list of schemas of functions, found {tools!r:.80}")
    offered = list[dict[str, Any]]()
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{TOOLS}, {number}: expected a function's schema with a name, found {tool!r:.80}"
            )
        offered.append({"type": "function", "function": _dense(function)})
    return offered


def options_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's options of the chat template: an object, or its JSON. Raises ValueError."""
    options = _parsed(metadata.get(OPTIONS), OPTIONS)
    if not isinstance(options, dict | None):
        raise ValueError(f"{OPTIONS}: expected an object of variables, found {options!r:.80}")
    return {name: value for name, value in (options or {}).items() if value is not None}


def as_message(message: Message) -> dict[str, Any]:
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {"role": message.role, "content": message.content, "tool_calls": calls}


def _messages(value: Any, column: str) -> list[Message]:
    """Return the messages of a column; each result of a tool follows its call."""
    if not isinstance(value, list):
        raise ValueError(f"{column}: expected a text or a list of messages, found {value!r:.80}")
    if not value:
        raise ValueError(f"{column}: expected a list of messages that is not empty")
    messages, waiting = list[Message](), dict[str, ToolCall]()
    calls_as_text = False  # as published rows of some templates have them
    for number, item in enumerate(value):
        where = f"{column}, message {number}"
        message = _message(item, where)
        if message.role == "tool":
            call_id = message.tool_call_id or next(iter(waiting), None)
            call = waiting.pop(call_id or "", None)
            if call is None and (message.tool_call_id is not None or not calls_as_text):
                raise ValueError(
                    f"{where} is the result of a tool without a call: expected the assistant's "
                    f"message with that call before it, found {item!r:.80}"
                )
            if call is not None:
                message = replace(message, tool_call_id=call_id, name=message.name or call.name)
        else:
            calls_as_text = message.role == "assistant" and not message.tool_calls
            waiting = {call.id: call for call in message.tool_calls}
        messages.append(message)
    return messages


def _message(item: Any, where: str) -> Message:
    fields = item if isinstance(item, dict) else {}
    role, content, calls = (fields.get(name) for name in ("role", "content", "tool_calls"))
    role = as_role(role)
    if role is None and "from" in fields:
        kind, content = fields["from"], fields.get("value")
        role = SHAREGPT_ROLES.get(kind) if isinstance(kind, str) else None
        if kind == "function_call":
            calls, content = [_parsed(content, where)], None
    if thought := next((name for name in REASONING if fields.get(name)), None):
        raise ValueError(
            f"{where} has {thought}, which the model would not learn: write it into content as the "
            "chat template does (<think>…</think>, mostly), or remove it"
        )
    if calls and content is None:
        content = ""
    fits = not calls or (isinstance(calls, list) and role == "assistant")
    if role not in ROLES or not isinstance(content, str) or not fits:
        raise ValueError(
            f"{where}: expected a message with a role ({', '.join(ROLES)}) and a text as content, "
            f"found {item!r:.80}"
        )
    made = tuple(_call(call, f"{where}, call {n}", n) for n, call in enumerate(calls or ()))
    if role != "tool":
        return Message(role=role, content=content, tool_calls=made)
    call_id, name = (fields.get(key) and str(fields[key]) for key in ("tool_call_id", "name"))
    return Message(role=role, content=content, tool_call_id=call_id, name=name)


def _call(call: Any, where: str, number: int) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else {}
    function = function if isinstance(function, dict) else {}
    name, arguments = function.get("name"), _parsed(function.get("arguments") or {}, where)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(
            f"{where}: expected a call with the name of a function, and arguments as an object or "
            f"its JSON, found {call!r:.80}"
        )
    # Mistral's templates refuse ids of another length.
    call_id = call.get("id") or f"call{number:05}"
    return ToolCall(id=str(call_id), name=name, arguments=orjson.dumps(_dense(arguments)).decode())


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except Malformed as error:
        raise ValueError(f"{where}: {value!r:.80} is not JSON: {error}") from None


def _dense(value: Any) -> Any:
    """A value without nulls: Arrow gives each row of a column the fields of all the others."""
    if isinstance(value, dict):
        return {name: _dense(each) for name, each in value.items() if each is not None}
    return [_dense(each) for each in value] if isinstance(value, list) else value


def _trained(value: Sequence[Any], column: str) -> list[bool | float] | None:
    """Return what an assistant's messages say of themselves, by `train` or `weight`; None: nothing.

    One that says nothing is learned where others say that they are, or are not. Weights are numbers
    where they are neither 0 nor 1.
    """
    trained, said = list[bool | float](), False
    for number, item in enumerate(value):
        if item.get("role", SHAREGPT_ROLES.get(item.get("from"))) != "assistant":
            continue
        flags = [item[name] for name in ("train", "weight") if item.get(name) is not None]
        numbers = all(isinstance(flag, int | float) for flag in flags)
        share = math.prod(flags) if numbers else math.nan
        if item.get("train") not in (None, 0, 1) or not 0 <= share <= WEIGHT_MAX:
            raise ValueError(
                f"{column}, message {number}: expected train true or false, or a weight from 0 to "
                f"{WEIGHT_MAX}, found {flags[0]!r:.80}"
            )
        said |= bool(flags)
        trained.append(bool(share) if share in (0, 1) else float(share))
    return trained if said else None


def _last_turn(
    messages: Sequence[Message], column: str, other: Message | None, columns: Columns
) -> Message:
    """Return the assistant's turn at the end of a prompt, which is its demonstration."""
    if len(messages) == 1:
        raise ValueError(f"{column}: its only message is the assistant's, which leaves no prompt")
    if other is not None:
        raise ValueError(
            f"{column} ends with an assistant's message and there is also a column "
            f"{columns.completion or COMPLETION!r}: expected one demonstration; remove either"
        )
    return messages[-1]


def _listed(raw: Mapping[str, Any]) -> str:
    return f"; its columns are {', '.join(map(str, raw)) or 'none'}"

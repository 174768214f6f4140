"""Meaning of a row: which column is the prompt, the answer, the demonstration and the id.

Reads the rows of TRL, verl, verifiers, OpenRLHF, open-instruct and this project alike: columns are
known by their usual names, or named by options. Where the names leave a choice, the error asks for
an option. Leaves out files (`prompt_files`) and the split into training and evaluation (`chat`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from marin_rl.environments.base import plain_json
from marin_rl.types import Message

ROLES = ("system", "user", "assistant", "tool")

# Columns of the prompt: our own names, and the fallbacks of other libraries.
PROMPT_COLUMNS = ("messages", "prompt")
OTHER_PROMPT_COLUMNS = ("question", "problem", "instruction", "input")
OTHER_ANSWER_COLUMNS = ("ground_truth", "solution", "label", "target", "reward_model.ground_truth")

# Metadata of a row whose prompt is a list of messages, which is what TRL calls conversational.
CONVERSATIONAL = "conversational"
COMPLETION = "completion"

Pair = tuple[Any, str]  # role and content


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
        usual = (*PROMPT_COLUMNS, *OTHER_PROMPT_COLUMNS, *OTHER_ANSWER_COLUMNS)
        names = {*usual, "answer", COMPLETION, "id", "tools", *filter(None, configured)}
        return frozenset(names | {name.partition(".")[0] for name in names})


class PromptRow(NamedTuple):
    """Fields of a row. `demonstration` is the text that a supervised warm start learns."""

    row_id: str
    id_given: bool
    prompt_column: str
    pairs: list[Pair]
    conversational: bool
    answer: Any
    demonstration: str | None
    ends_with_assistant: bool

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(Message(role=role, content=content) for role, content in self.pairs)


def read_row(raw: Any, columns: Columns) -> PromptRow:
    """Return the fields of a row. Raises ValueError saying what is wrong and what to type."""
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object with the columns of a prompt, found {raw!r:.80}")
    column = _prompt_column(raw, columns)
    value = value_at(raw, column)
    conversational = not isinstance(value, str)
    if column == "messages" and not conversational:
        raise ValueError("messages: expected a list that is not empty, found a text")
    pairs = _pairs(value, column) if conversational else [("user", value)]
    given = value_at(raw, columns.id or "id")
    row_id = hashlib.sha256(orjson.dumps(pairs)).hexdigest()[:16] if given is None else str(given)
    demonstration = demonstration_in(raw, columns)
    ends_with_assistant = pairs[-1][0] == "assistant"
    if ends_with_assistant:
        demonstration = _last_turn(pairs, column, demonstration, columns)
        pairs = pairs[:-1]
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
        pairs,
        conversational,
        answer,
        demonstration,
        ends_with_assistant,
    )


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
    if row.ends_with_assistant:
        metadata[COMPLETION] = row.demonstration
    if row.conversational:
        metadata.setdefault(CONVERSATIONAL, True)
    return plain_json(metadata, where)


def demonstration_in(raw: Mapping[str, Any], columns: Columns) -> str | None:
    """Return the text of the column with the demonstration: a text, or a list of one message."""
    name = columns.completion or COMPLETION
    value = value_at(raw, name)
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        pairs = _pairs(value, name)
        if len(pairs) > 1 or pairs[0][0] != "assistant":
            raise ValueError(
                f"{name}: expected one message of the assistant, found {len(pairs)} messages of "
                f"{', '.join(role for role, _ in pairs)}"
            )
        return pairs[0][1]
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
    for names in (PROMPT_COLUMNS, OTHER_PROMPT_COLUMNS):
        present = [name for name in names if raw.get(name) is not None]
        if len(present) > 1:
            raise ValueError(
                f"both {' and '.join(present)} may be the prompt: set environment.options."
                f"prompt_key to one of them, such as {present[0]}"
            )
        if present:
            return present[0]
    expected = ", ".join((*PROMPT_COLUMNS, *OTHER_PROMPT_COLUMNS))
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


def _pairs(value: Any, column: str) -> list[Pair]:
    """Return role and content of every message."""
    if not isinstance(value, list):
        raise ValueError(f"{column}: expected a text or a list of messages, found {value!r:.80}")
    if not value:
        raise ValueError(f"{column}: expected a list of messages that is not empty")
    return [_pair(item, f"{column}, message {number}") for number, item in enumerate(value)]


def _pair(item: Any, where: str) -> Pair:
    role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (0, 0)
    if isinstance(item, dict) and item.get("tool_calls"):
        raise ValueError(
            f"{where} calls tools: expected a prompt without tool calls; an environment with tools "
            "of its own makes them in its episodes (docs/your-environment.md)"
        )
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(
            f"{where}: expected a message with a role ({', '.join(ROLES)}) and a text as content, "
            f"found {item!r:.80}"
        )
    return role, content


def _last_turn(pairs: list[Pair], column: str, other: str | None, columns: Columns) -> str:
    """Return the assistant's turn at the end of a prompt, which is its demonstration."""
    if len(pairs) == 1:
        raise ValueError(f"{column}: its only message is the assistant's, which leaves no prompt")
    if other is not None:
        raise ValueError(
            f"{column} ends with an assistant's message and there is also a column "
            f"{columns.completion or COMPLETION!r}: expected one demonstration; remove either"
        )
    return pairs[-1][1]


def _listed(raw: Mapping[str, Any]) -> str:
    return f"; its columns are {', '.join(map(str, raw)) or 'none'}"

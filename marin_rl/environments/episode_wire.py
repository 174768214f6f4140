"""Requests to a process that plays episodes, and its answers, as JSON.

Nothing is unpickled: every record is validated by its types on the way in. Leaves out who sends
them (`episode_pool`) and who answers (`episode_worker`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

import numpy as np
import orjson
from pydantic import TypeAdapter

from marin_rl.environments.episode import StepResult, Tool
from marin_rl.types import Example, Message, Turn

Operation = Literal["start", "step", "close"]

# Of a turn, what an environment has no use for, and what JSON cannot hold as it is.
_PRIVATE = ("inference_metadata", "logprobs", "timing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Call of an episode by its number: `argument` is an example to start from, or a turn."""

    operation: Operation
    episode: int
    argument: Example | Turn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start of an episode: the messages of the first prompt, and the tools."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Exception of an environment, in words; `kind` tells a `ToolFault`, and what may go away."""

    message: str
    kind: Literal["fault", "tool", "unavailable"] = "fault"


def encode_request(request: Request) -> bytes:
    """Return a request as bytes. Raises TypeError for an example that is not JSON."""
    argument: Any = request.argument
    if isinstance(argument, Turn):
        argument = {
            field.name: getattr(argument, field.name)
            for field in fields(argument)
            if field.name not in _PRIVATE
        }
        if (logprobs := request.argument.logprobs) is not None:  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
            argument["logprobs"] = np.ascontiguousarray(logprobs)
    return orjson.dumps(
        {"operation": request.operation, "episode": request.episode, "argument": argument},
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def decode_request(record: Mapping[str, Any]) -> Request:
    """Return the request of `encode_request`, read as JSON. Raises pydantic's ValidationError."""
    argument = record["argument"]
    if record["operation"] == "start":
        argument = _validated(Example, argument)
    elif argument is not None:
        argument = _turn(argument)
    return Request(operation=record["operation"], episode=record["episode"], argument=argument)


def encode_answer(answer: Start | StepResult | Failure | None) -> bytes:
    """Return an answer as bytes. Raises TypeError where `info` or a tool is not JSON."""
    return orjson.dumps({"kind": type(answer).__name__, "answer": answer})


def decode_answer(record: Mapping[str, Any]) -> Start | StepResult | Failure | None:
    """Return the answer of `encode_answer`, read as JSON. Raises ValueError for what is none."""
    kinds = {kind.__name__: kind for kind in (Start, StepResult, Failure)}
    if record["kind"] not in kinds:
        return None
    return _validated(kinds[record["kind"]], record["answer"])


def _turn(record: dict[str, Any]) -> Turn:
    logprobs = record.pop("logprobs", None)
    values = {
        field.name: _validated(field.type, record[field.name])
        for field in fields(Turn)
        if field.name in record
    }
    array = None if logprobs is None else np.array(logprobs, np.float32)
    return Turn(**values, logprobs=array)


def _validated(kind: Any, value: Any) -> Any:
    """`value` as a record of a type. Raises ValueError that names what does not fit."""
    return _adapter(kind).validate_python(value)


@cache
def _adapter(kind: Any) -> Any:  # a TypeAdapter, which beartype knows no hint of
    return TypeAdapter(kind)  # takes milliseconds to make

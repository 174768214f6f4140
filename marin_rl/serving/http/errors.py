"""Parse request bodies: strict shapes, and errors that name the wrong field.

Owns the base of all bodies, the reading of JSON, and the refusal as OpenAI words it. An unknown
field is refused by name rather than ignored: an option that silently does nothing is worse than
none.

Values, names and containers are counted before a body is parsed (`schemas.strict_json`). Leaves out
the number of bytes (`guard`), what conversations hold (`messages`) and what may be asked for
(`requests`).
"""

import random
import secrets
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from marin_rl.config import closest
from marin_rl.model_apis.call import ModelApi
from marin_rl.model_apis.chat import ChatCompletions
from marin_rl.model_apis.messages import AnthropicMessages
from schemas.strict_json import JsonLimits, TooMuchJson, check_bounds

Version = Annotated[int, Field(ge=0, lt=2**31)]
VersionText = Annotated[str, Field(pattern=r"^\d{1,9}$")]  # SGLang's type for the same field

# A larger body is not parsed a second time only to name the number in it.
FOUND_BYTES_MAX = 2**20

# Token ids of one request: 512 prompts of 1,024 tokens, or one prompt of half a million.
VALUES_MAX = 2**19
# Each is a field of a message, a tool call or a schema: 4,096 messages that call and answer in turn
# have 23,000.
NAMES_MAX = 2**15
CONTAINERS_MAX = 2**16
# Schemas of forms have at most 32 levels, inside of six levels of a request.
DEPTH_MAX = 64
LIMITS = JsonLimits(
    values_max=VALUES_MAX, names_max=NAMES_MAX, containers_max=CONTAINERS_MAX, depth_max=DEPTH_MAX
)


class ApiError(Exception):
    """A refusal or fault, as the client will see it; `retry_s` goes into a Retry-After header.

    `too_long` are the tokens of a prompt, at least, and the most that the model reads.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_s: int | None = None,
        headers: dict[str, str] | None = None,
        too_long: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.too_long = status, too_long
        self.headers = (headers or {}) | ({"Retry-After": str(retry_s)} if retry_s else {})
        self.code = code or f"http_{status}"  # of the access log and the metrics
        self._told = {"code": code, "param": param}

    @property
    def body(self) -> dict[str, Any]:
        return self.body_of(ChatCompletions)

    def body_of(self, api: type[ModelApi]) -> dict[str, Any]:
        message = str(self)
        if api is AnthropicMessages and self.too_long is not None:
            # the words by which its clients know that they have to shorten a conversation
            count, most = self.too_long
            message = f"prompt is too long: {count} tokens > {most} maximum"
        return api.error(self.status, message, **self._told)


class Body(BaseModel):
    """Base of every body: no unknown fields, no NaN, no bool or string where a number is due."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: bytes) -> B:
    """Read a JSON body; ApiError 400 names the first wrong field and what was expected of it."""
    try:
        check_bounds(data, LIMITS)
        return kind.model_validate_json(data)
    except TooMuchJson as error:
        raise ApiError(400, str(error), code="limit_exceeded") from None
    except ValidationError as error:
        raise _refusal(kind, data, error) from None


def _refusal(kind: type[Body], data: bytes, error: ValidationError) -> ApiError:
    # with its input, each error would hold another copy of the object around it
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first, known, names = _most_specific(errors), _fields(kind), list[str]()
    # the path in the body: fields and list indices, without union branches
    for part in first["loc"]:
        if isinstance(part, int) or (part in known and part not in names[-1:]):
            names.append(str(part))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:200]
        names += [] if names[-1:] == [name] else [name]
        close = closest(name, kind.model_fields) if len(names) == 1 else None
        param, meant = ".".join(names), f"; did you mean {close!r}?" if close else ""
        message = f"unknown field {param!r}{meant}"
        return ApiError(400, message, code="unknown_field", param=param)
    if first["type"] == "value_error":
        field, separator, remainder = message.partition(": ")
        if separator and field.isidentifier():
            names, message = [*names, field], remainder
        param = ".".join(names)
        return ApiError(400, f"{param}: {message}" if param else message, param=param)
    if not names:
        not_json = first["type"] == "json_invalid"
        what = "the body is not JSON" if not_json else "expected a JSON object"
        return ApiError(400, f"{what}: {message}")
    param = ".".join(names)
    return ApiError(400, f"{param}: {message}{_found_value(data, first)}", param=param)


def _most_specific(errors: list[ErrorDetails]) -> ErrorDetails:
    """The error to report: an unknown field first; of a union's branches, one of the right type."""
    for error in errors:
        if error["type"] == "extra_forbidden":
            return error
    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    of_type = [error for error in same if not error["type"].endswith("_type")]
    return (of_type or same)[0]


@lru_cache
def _fields(kind: type[Body]) -> frozenset[str]:
    """Field names of a body, at any depth.

    Error locations hold the names of a union's branches too; only these name fields.
    """
    schema = kind.model_json_schema()
    models = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for model in models for name in model.get("properties", ()))


def _found_value(data: bytes, error: ErrorDetails) -> str:
    """End of an error message: the number or boolean that came instead."""
    if len(data) > FOUND_BYTES_MAX or error["type"] == "missing" or error["loc"][-1] == "[key]":
        return ""
    value: Any = from_json(data)
    for part in error["loc"]:  # some parts name a union's branch, not a place in the body
        if isinstance(value, dict):
            value = value.get(part, value)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
    return f", found {value!r}" if isinstance(value, bool | int | float) else ""


# Seeded by the system once: asking it for every id would release the interpreter lock each time.
_random = random.Random(secrets.randbits(256))


def new_id() -> str:
    return f"{_random.getrandbits(128):032x}"

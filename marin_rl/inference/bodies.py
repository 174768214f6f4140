"""What the server accepts: strict shapes with a limit on everything.

Owns the JSON bodies, their limits, and the errors that say which field is wrong, as OpenAI does.
An unknown field is refused by name rather than ignored: an option that silently does nothing
is worse than none. Leaves out what is done with a request (`app`).
"""

import difflib
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from marin_rl.inference.protocol import error_body
from marin_rl.types import Role, Sampling

BODY_BYTES_MAX = 16 * 2**20
MESSAGES_MAX = 4096
SAMPLES_MAX = 4096
PROMPTS_MAX = 1024
STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 256
SAMPLES_QUEUED_MAX = 65536

Version = Annotated[int, Field(ge=0, lt=2**31)]
VersionText = Annotated[str, Field(pattern=r"^\d{1,9}$")]  # SGLang's type for the same field
Token = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS_MAX)]


class ApiError(Exception):
    """A refusal or fault, as the client will see it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = error_body(message, type=type, code=code, param=param)


class Body(BaseModel):
    """Base of every body: no unknown fields, no NaN, no bool or string where a number is due."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. Content in parts is joined."""

    role: Role
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class SamplingBody(Body):
    """What chat and plain completions have in common."""

    model: str
    n: int = Field(default=1, ge=1, le=SAMPLES_MAX)
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=STOP_STRINGS_MAX)] | None = None
    stream: bool = False
    return_token_ids: bool = False
    user: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="after")
    def _supported(self) -> "SamplingBody":
        if self.stream:
            raise ValueError("stream: this server does not stream yet; expected false")
        return self

    def sampling(self, max_tokens: int, seed_offset: int = 0) -> Sampling:
        """The request's sampling, with its limit of new tokens resolved."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            max_tokens=max_tokens,
            stop=tuple(stop),
            seed=None if self.seed is None else (self.seed + seed_offset) % 2**64,
        )


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MESSAGES_MAX)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=0)
    compact_logprobs: bool = False

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatBody":
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens: give either max_tokens or max_completion_tokens")
        return self

    @property
    def new_tokens_max(self) -> int | None:
        """The limit of new tokens, if one is given."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


class CompletionBody(SamplingBody):
    """POST /v1/completions: one prompt or a list of them, as text or as token ids."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=PROMPTS_MAX)]
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[Token], Field(min_length=1)]],
            Field(min_length=1, max_length=PROMPTS_MAX),
        ]
    )
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, each as text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class TokenizeBody(Body):
    """POST /tokenize: messages through the chat template, or plain text."""

    model: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MESSAGES_MAX)
    prompt: str | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeBody":
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("messages: give either messages or prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Token]


class UpdateWeightsBody(Body):
    """POST /update_weights_from_disk, as SGLang has it. `weight_version` null: the next one."""

    model_path: str = Field(min_length=1, max_length=4096)
    weight_version: Version | VersionText | None = None


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: bytes) -> B:
    """Read a JSON body; ApiError 400 names the first wrong field and what was expected of it."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False)) from None


def _refusal(kind: type[Body], errors: list[ErrorDetails]) -> ApiError:
    first = _most_telling(errors)
    unknown = first["type"] == "extra_forbidden"
    names = [str(part) for part in first["loc"] if isinstance(part, int) or part in _FIELDS]
    if unknown:
        names.append(str(first["loc"][-1]))
    param = ".".join(names) or None
    message = first["msg"].removeprefix("Value error, ")
    if unknown:
        told = f"unknown field {param!r}{_nearest(kind, names)}"
        return ApiError(400, told, code="unknown_field", param=param)
    if first["type"] == "value_error":
        return ApiError(400, message, param=message.partition(":")[0])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message}")
    if param is None:
        return ApiError(400, f"expected a JSON object: {message}")
    return ApiError(400, f"{param}: {message}{_found(first['input'])}", param=param)


def _most_telling(errors: list[ErrorDetails]) -> ErrorDetails:
    """An unknown field before all; of a union's branches, one whose type was right."""
    for error in errors:
        if error["type"] == "extra_forbidden":
            return error
    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    of_type = [error for error in same if not error["type"].endswith("_type")]
    return (of_type or same)[0]


# Error locations hold the names of a union's branches too; only these name fields.
_FIELDS = frozenset(
    name
    for kind in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, UpdateWeightsBody)
    for model in (kind, ChatMessage, TextPart)
    for name in model.model_fields
)


def _found(value: object) -> str:
    return f", found {value!r}" if isinstance(value, bool | int | float) else ""


def _nearest(kind: type[Body], names: list[str]) -> str:
    if len(names) != 1:
        return ""
    close = difflib.get_close_matches(names[0], list(kind.model_fields), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""

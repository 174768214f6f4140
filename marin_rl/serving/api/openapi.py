"""The API description (OpenAPI 3.1): responses of every route, and the route that carries them.

Owns the models of responses, which exist for the description alone (responses are written by hand,
as bytes), and `ApiRoute`. FastAPI writes the document; it neither parses nor answers requests.
Bodies of requests are described by the very models that read them (`requests`, `admin`).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fastapi import Security
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, RootModel
from starlette.responses import JSONResponse
from starlette.routing import Route

import marin_rl
from marin_rl.inference.client.answers import ServerTimings
from marin_rl.serving.api.messages import ToolCallBody
from marin_rl.serving.http.auth import OPEN_PATHS

API_ROUTE = "/openapi.json"
# Before OpenAPI 3.2 the schema of a stream is read as that of each of its events.
EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "a chunk as JSON, or [DONE]"}},
    "required": ["data"],
}


class ErrorBody(BaseModel):
    """Error; `param` is the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is no 2xx."""

    error: ErrorBody


class Status(BaseModel):
    """Status of the server."""

    status: Literal["ok", "ready", "not ready"]


class Model(BaseModel):
    """An id that requests may name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(BaseModel):
    """List of models."""

    object: Literal["list"]
    data: list[Model]


class PromptTokens(BaseModel):
    """Tokens of the prompts that were not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Likely(BaseModel):
    """A token and its log-probability (nats)."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class Scored(Likely):
    """A sampled token, and the likeliest in its place."""

    top_logprobs: list[Likely]


class ChatLogprobs(BaseModel):
    """One entry per token."""

    content: list[Scored]
    refusal: None = None


class AnsweredMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallBody] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class Sampled(BaseModel):
    """Further fields of a choice."""

    index: int
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    policy_versions: list[int] | None = None


class ChatChoice(Sampled):
    """One sample of a conversation."""

    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    token_logprobs: list[float] | None = None


class SampledResponse(BaseModel):
    """Fields at the top of every answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    weight_version: int
    parameters_digest: str


class ChatCompletion(SampledResponse):
    """The answer of chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    timings: ServerTimings
    prompt_token_ids: list[int] | None = None


class PlainLogprobs(BaseModel):
    """Lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PlainChoice(Sampled):
    """One sample of a prompt."""

    text: str
    logprobs: PlainLogprobs | None
    prompt_token_ids: list[int] | None = None
    token_logprobs: list[float] | None = None
    timings: ServerTimings | None = None


class TextCompletion(SampledResponse):
    """The answer of plain completions."""

    object: Literal["text_completion"]
    choices: list[PlainChoice]


class Tokenized(BaseModel):
    """Ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """Text of ids."""

    prompt: str


class GeneratedLikely(Likely):
    """A token by its id, also as the text `token_id:<id>`."""

    token_id: int


class GeneratedScored(GeneratedLikely):
    """A sampled token, and the likeliest in its place."""

    top_logprobs: list[GeneratedLikely]


class WeightVersionSpan(BaseModel):
    """Tokens `[start, end)` of a sample were sampled by weights of this version."""

    version: str
    start: int
    end: int


class GeneratedLogprobs(BaseModel):
    """One entry per token, in both forms that vLLM has had."""

    content: list[GeneratedScored]


class GeneratedChoice(BaseModel):
    """One sample of ids."""

    index: int
    finish_reason: FinishReason
    token_ids: list[int]
    policy_versions: list[int] | None = None
    weight_versions: list[WeightVersionSpan]
    logprobs: GeneratedLogprobs | None


class Generated(BaseModel):
    """The answer of generation from ids to ids."""

    request_id: str
    model: str
    choices: list[GeneratedChoice]
    usage: Usage
    weight_version: int
    parameters_digest: str


class SGLangFinishReason(BaseModel):
    """Reason for which a sample ended: length, or the stop token that matched."""

    type: FinishReason
    length: int | None = None
    matched: int | None = None


class SGLangMeta(BaseModel):
    """Facts of one sample; logprobs are (logprob, token id, null)."""

    id: str
    finish_reason: SGLangFinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    output_token_logprobs: list[tuple[float, int, None]] | None = None
    input_token_logprobs: list[tuple[float, int, None]] | None = None
    policy_versions: list[int] | None = None


class SGLangSample(BaseModel):
    """One sample as SGLang gives it."""

    text: str
    output_ids: list[int]
    meta_info: SGLangMeta


class SGLangAdapters(BaseModel):
    """The adapters that are loaded, by name."""

    success: bool
    loaded_adapters: dict[str, str]


class SGLangGenerated(RootModel[SGLangSample | list[SGLangSample]]):
    """The answer of SGLang's generation."""


ERROR: dict[int | str, Any] = {"default": {"model": ErrorResponse, "description": "an error"}}
_SECURED: dict[str, Any] = {"dependencies": [Security(HTTPBearer(scheme_name="bearer"))]}
_STREAM: dict[int | str, Any] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}


class ApiRoute(Route):
    """A route with its part of the API description.

    `request` is the model of the body and `response` that of a 200; `streams` says that the
    response may be server-sent events. `summary` is the endpoint's docstring unless it is given;
    `details` are further arguments of FastAPI's `APIRoute`.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: Sequence[str] = ("GET",),
        request: type[BaseModel] | None = None,
        response: type[BaseModel] | None = None,
        streams: bool = False,
        summary: str = "",
        **details: Any,
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self._request = request
        self._described = {
            "methods": list(methods),
            "summary": summary or (inspect.getdoc(endpoint) or "").partition("\n")[0],
            "response_model": response,
            "response_class": JSONResponse,
            "response_description": "the answer",
            "responses": ERROR | (_STREAM if streams else {}),
            **({"openapi_extra": {"security": []}} if path in OPEN_PATHS else _SECURED),
            **details,
        }

    def as_fastapi(self) -> APIRoute:
        """Return the route as FastAPI describes it; it is never called."""
        kinds: dict[str, Any] = dict.fromkeys(self.param_convertors, str)
        parameters = [_parameter(name, kind) for name, kind in kinds.items()]
        if self._request is not None:
            parameters.append(_parameter("body", self._request))

        def endpoint() -> None: ...

        endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        route = APIRoute(self.path_format, endpoint, **self._described)
        name = self.path_format.strip("/").translate(_NO_NAME)
        route.operation_id = f"{self._described['methods'][0].lower()}_{name}"
        return route


_NO_NAME = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)


def describe(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    return get_openapi(
        title="marin-rl",
        version=marin_rl.__version__,
        description="A policy behind OpenAI's protocol, with token ids in and out.",
        routes=[route.as_fastapi() for route in routes],
        separate_input_output_schemas=False,
    )

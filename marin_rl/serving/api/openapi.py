"""The OpenAPI description of the server: what each route takes and what it gives.

Owns the shapes of answers, which exist for this description only (answers are written by hand), and
the table of which route has which. What requests hold is taken from the bodies that read them.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

import marin_rl
from marin_rl.inference.client.protocol import (
    CHAT_ROUTE,
    CHAT_TOKENS_ROUTE,
    COMPLETIONS_ROUTE,
    DETOKENIZE_ROUTE,
    GENERATE_ROUTE,
    MODELS_ROUTE,
    TOKENIZE_ROUTE,
    UPDATE_WEIGHTS_ROUTE,
    ServerTimings,
)
from marin_rl.serving.api.admin import ADMIN, DrainBody, UpdateWeightsBody
from marin_rl.serving.api.requests import (
    ChatBody,
    ChatTokensBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from marin_rl.serving.http.auth import OPEN_PATHS

SCHEMA_ROUTE = "/openapi.json"
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


class ErrorAnswer(BaseModel):
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


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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


class AnsweredFunction(BaseModel):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] | None = None


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


class Response(BaseModel):
    """Fields at the top of every answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    weight_version: int
    parameters_digest: str


class ChatCompletion(Response):
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


class TextCompletion(Response):
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


class GeneratedLogprobs(BaseModel):
    """One entry per token; each names its id as `token_id:<id>`."""

    content: list[Scored]


class GeneratedChoice(BaseModel):
    """One sample of ids."""

    index: int
    finish_reason: FinishReason
    token_ids: list[int]
    policy_versions: list[int] | None = None
    logprobs: GeneratedLogprobs | None


class Generated(BaseModel):
    """The answer of generation from ids to ids."""

    request_id: str
    model: str
    choices: list[GeneratedChoice]
    usage: Usage
    weight_version: int
    parameters_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Request and response of a route, and its summary (default: the endpoint's docstring)."""

    summary: str = ""
    takes: type[BaseModel] | None = None
    gives: type[BaseModel] | None = None
    streams: bool = False


SHAPES = {
    "/healthz": Shape(gives=Status),
    "/readyz": Shape(gives=Status),
    MODELS_ROUTE: Shape(gives=Models),
    MODELS_ROUTE + "/{model}": Shape(gives=Model),
    CHAT_ROUTE: Shape(
        summary="Samples of a conversation's next message.",
        takes=ChatBody,
        gives=ChatCompletion,
        streams=True,
    ),
    CHAT_TOKENS_ROUTE: Shape(
        summary="The same, where the caller knows the prompt's ids: the messages are not rendered.",
        takes=ChatTokensBody,
        gives=ChatCompletion,
        streams=True,
    ),
    COMPLETIONS_ROUTE: Shape(
        summary="Continuations of texts, or of token ids.",
        takes=CompletionBody,
        gives=TextCompletion,
        streams=True,
    ),
    TOKENIZE_ROUTE: Shape(takes=TokenizeBody, gives=Tokenized),
    DETOKENIZE_ROUTE: Shape(takes=DetokenizeBody, gives=Detokenized),
    GENERATE_ROUTE: Shape(
        summary="Samples of token ids, as token ids.", takes=GenerateBody, gives=Generated
    ),
    UPDATE_WEIGHTS_ROUTE: Shape(takes=UpdateWeightsBody),
    ADMIN + UPDATE_WEIGHTS_ROUTE: Shape(takes=UpdateWeightsBody),
    f"{ADMIN}/drain": Shape(takes=DrainBody),
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        assert route.methods, "every route says which methods it takes"
        operations = paths.setdefault(route.path_format, {})
        for method in sorted(route.methods - {"HEAD"}):
            operations[method.lower()] = _operation(route, method)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "marin-rl",
            "version": marin_rl.__version__,
            "description": "A policy behind OpenAI's protocol, with token ids in and out.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> dict[str, Any]:
    models = {shape.takes for shape in SHAPES.values()} | {ErrorAnswer, Status}
    models |= {shape.gives for shape in SHAPES.values()}
    kept = sorted((model for model in models if model is not None), key=lambda m: m.__name__)
    mode: Literal["validation"] = "validation"
    _, definitions = models_json_schema(
        [(model, mode) for model in kept], ref_template="#/components/schemas/{model}"
    )
    return definitions["$defs"]


def _operation(route: Route, method: str) -> dict[str, Any]:
    """OpenAPI operation of a route's method: request, responses, and who may call it."""
    path = route.path_format
    shape = SHAPES.get(path, Shape())
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{path.strip('/').translate(_NO_NAME)}",
        "summary": shape.summary or (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "responses": _responses(path, shape),
        "security": [] if path in OPEN_PATHS else [{"bearer": []}],
    }
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if shape.takes is not None:
        operation["requestBody"] = {
            "required": path != f"{ADMIN}/drain",
            "content": {"application/json": _reference(shape.takes)},
        }
    return operation


_NO_NAME = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _responses(path: str, shape: Shape) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if path == "/metrics":
        content["text/plain"] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": {}} if shape.gives is None else {}
    if shape.gives is not None:
        content["application/json"] = _reference(shape.gives)
    if shape.streams:
        content["text/event-stream"] = {"schema": EVENT}
    responses = {
        "200": {"description": "the answer", "content": content},
        "default": {
            "description": "an error",
            "content": {"application/json": _reference(ErrorAnswer)},
        },
    }
    if path == "/readyz":
        responses["503"] = {
            "description": "not ready",
            "content": {"application/json": _reference(Status)},
        }
    return responses


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}

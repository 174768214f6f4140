"""Routes with their part of the API description (OpenAPI 3.1): health, models, tokenizer.

Starlette routes requests and FastAPI describes them, from the very models that read bodies
(`requests`, `admin`) and those of the responses (`response_models`).
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import marin_rl
from marin_rl.inference.client.protocol import (
    DETOKENIZE_ROUTE,
    MESSAGES_ROUTE,
    MODELS_ROUTE,
    TOKENIZE_ROUTE,
    TOKENIZER_INFO_ROUTE,
)
from marin_rl.serving.api.dialect import json_response
from marin_rl.serving.api.requests import CountTokensBody, DetokenizeBody, TokenizeBody
from marin_rl.serving.api.response_models import (
    CountedTokens,
    Detokenized,
    ErrorResponse,
    MessagesErrorResponse,
    Model,
    Models,
    Status,
    Tokenized,
    TokenizerInfo,
)
from marin_rl.serving.api.service import Service
from marin_rl.serving.api.translated import count_tokens
from marin_rl.serving.http.auth import OPEN_PATHS
from marin_rl.serving.http.errors import parse
from marin_rl.serving.http.guard import read_body

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
COUNT_ROUTE = f"{MESSAGES_ROUTE}/count_tokens"
# Before OpenAPI 3.2 the schema of a stream describes each of its events.
EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "a chunk as JSON, or [DONE]"}},
    "required": ["data"],
}
Responses = dict[int | str, Any]
ERROR: Responses = {"default": {"model": ErrorResponse, "description": "an error"}}
MESSAGES_ERROR: Responses = {"default": {"model": MessagesErrorResponse, "description": "an error"}}
STREAM: Responses = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}


def errors_at(path: str) -> Responses:
    return MESSAGES_ERROR if path.startswith(MESSAGES_ROUTE) else ERROR


class ApiRoute(Route):
    """A route with its part of the API description.

    `request` is the model of the body and `response` that of a 200. `summary` is the endpoint's
    docstring unless it is given; `details` are further arguments of FastAPI's `APIRoute`.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: Sequence[str] = ("GET",),
        request: type[BaseModel] | None = None,
        response: type[BaseModel] | None = None,
        summary: str = "",
        **details: Any,
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self._parameters: dict[str, Any] = dict.fromkeys(self.param_convertors, str)
        if request is not None:
            self._parameters["body"] = request
        name = self.path_format.strip("/").translate(str.maketrans("/", "_", "{}."))
        self._described = {
            "methods": list(methods),
            "operation_id": f"{methods[0].lower()}_{name}",
            "summary": summary or (inspect.getdoc(endpoint) or "").partition("\n")[0],
            "response_model": response,
            "response_class": JSONResponse,
            "response_description": "the answer",
            "responses": errors_at(path),
            **details,
        }

    def as_fastapi(self) -> Any:
        """Return the route as FastAPI describes it; it is never called."""
        # here, because that takes half a second, and few ask for a description
        from fastapi import Security
        from fastapi.routing import APIRoute
        from fastapi.security import HTTPBearer

        access: dict[str, Any] = {"dependencies": [Security(HTTPBearer(scheme_name="bearer"))]}
        if self.path in OPEN_PATHS:
            access = {"openapi_extra": {"security": []}}

        def endpoint() -> None: ...

        endpoint.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
                for name, kind in self._parameters.items()
            ]
        )
        return APIRoute(self.path_format, endpoint, **{**access, **self._described})


def describe(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    from fastapi.openapi.utils import get_openapi

    return get_openapi(
        title="marin-rl",
        version=marin_rl.__version__,
        description="A policy behind OpenAI's protocol, with token ids in and out.",
        routes=[route.as_fastapi() for route in routes],
        separate_input_output_schemas=False,
    )


def server_routes(service: Service) -> list[ApiRoute]:
    """Routes of health and models."""

    def model_card(model: str) -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": service.created,
            "owned_by": "marin-rl",
            "root": service.name,
            "parent": service.parent_of(model),
            "max_model_len": service.engine.context_length,
        }

    async def healthz(request: Request) -> Response:
        """Return 200 while the process answers."""
        return json_response({"status": "ok"})

    async def readyz(request: Request) -> Response:
        """Return 200 while new work is taken, else 503."""
        ready = service.engine.alive and not (service.draining or service.stopping)
        return json_response({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def models(request: Request) -> Response:
        """List the loaded weights under their own id, and the name that always means them."""
        return json_response({"object": "list", "data": [model_card(m) for m in service.known]})

    async def model(request: Request) -> Response:
        """Return one served model."""
        name = request.path_params["model"]
        service.target(name)
        return json_response(model_card(name))

    not_ready = ERROR | {503: {"model": Status, "description": "not ready"}}
    return [
        ApiRoute("/healthz", healthz, response=Status),
        ApiRoute("/health", healthz, response=Status),  # vLLM's and SGLang's name
        ApiRoute("/", healthz, methods=["HEAD"], response=Status),  # what Claude Code begins with
        ApiRoute("/readyz", readyz, response=Status, responses=not_ready),
        ApiRoute(MODELS_ROUTE, models, response=Models),
        ApiRoute(MODELS_ROUTE + "/{model:path}", model, response=Model),
    ]


def tokenizer_routes(service: Service) -> list[ApiRoute]:
    def post(path: str, work: Callable[[Service, bytes], Any], **described: Any) -> ApiRoute:
        async def endpoint(request: Request) -> Response:
            data = await read_body(request.scope, request.receive)
            return json_response(await service.preparer.run(data, partial(work, service, data)))

        summary = inspect.getdoc(work) or ""
        return ApiRoute(path, endpoint, methods=["POST"], summary=summary, **described)

    async def tokenizer_info(request: Request) -> Response:
        """The special tokens, and the chat template as text (as vLLM)."""
        tokenizer = service.tokenizer
        template = tokenizer.chat_template
        if isinstance(template, dict):  # one for tools beside it
            template = template.get("default")
        info = {"tokenizer_class": type(tokenizer).__name__, "chat_template": template}
        return json_response(info | {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS})

    return [
        ApiRoute(TOKENIZER_INFO_ROUTE, tokenizer_info, response=TokenizerInfo),
        post(TOKENIZE_ROUTE, _tokenize, request=TokenizeBody, response=Tokenized),
        post(DETOKENIZE_ROUTE, _detokenize, request=DetokenizeBody, response=Detokenized),
        post(COUNT_ROUTE, count_tokens, request=CountTokensBody, response=CountedTokens),
    ]


def _tokenize(service: Service, data: bytes) -> dict[str, Any]:
    """Ids of a conversation, as the chat route would render it, or of plain text."""
    body = parse(TokenizeBody, data)
    if body.model is not None:
        service.target(body.model)
    if body.messages is None:
        tokens = service.encode(body.prompt or "", special=body.add_special_tokens is not False)
    else:
        tokens = service.chat_ids(
            body.messages,
            tools=body.offered,
            opening=body.add_generation_prompt is not False,
            options=body.chat_template_kwargs,
        )
    longest = service.engine.context_length
    answer = {"count": len(tokens), "max_model_len": longest, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [service.detokenizer.name(token) for token in tokens.tolist()]
    return answer


def _detokenize(service: Service, data: bytes) -> dict[str, Any]:
    """The text of ids, special tokens included."""
    body = parse(DetokenizeBody, data)
    if body.model is not None:
        service.target(body.model)
    service.check_length(len(body.tokens), "tokens")
    service.check_ids(body.tokens, "tokens")
    return {"prompt": service.detokenizer.of(body.tokens, special=True)}

"""The OpenAI-compatible routes over an engine.

Owns the routes and what they refuse; whatever takes time (templates, tokenising, JSON) runs on one
worker thread, never on the event loop. Leaves out who may call (`guard`), what is accepted
(`bodies`), how answers look (`answers`), and the server's life (`server`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response
from jaxtyping import Int32
from starlette.exceptions import HTTPException
from starlette.types import Message as AsgiMessage
from transformers import PreTrainedTokenizerBase

from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.answers import chat_answer, completions_answer, encode_text, render_chat
from marin_rl.inference.bodies import (
    SAMPLES_QUEUED_MAX,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
    UpdateWeightsBody,
    parse,
)
from marin_rl.inference.engine import Engine, Policy
from marin_rl.inference.guard import Guard, as_response, read_body
from marin_rl.inference.protocol import (
    CHAT_ROUTE,
    COMPLETIONS_ROUTE,
    MODELS_ROUTE,
    TOKENIZE_ROUTE,
    UPDATE_WEIGHTS_ROUTE,
    served_model_id,
)
from marin_rl.inference.slots import GenerationRequest, GenerationResult

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Service:
    """What the routes work with. `update_weights` loads a folder and returns the new model's id."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    name: str
    update_weights: Callable[[UpdateWeightsBody], str]
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    running: int = 0
    # one thread: fast tokenizers must not be used by two at a time
    worker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    )

    @property
    def model_id(self) -> str:
        """The id of what is loaded."""
        return self.id_of(self.engine.policy)

    def id_of(self, policy: Policy | GenerationResult) -> str:
        """The id under which a policy is, or was, served."""
        return served_model_id(self.name, policy.weight_version, policy.parameters_digest)

    async def off_loop(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run something that takes time without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, work, *arguments)


def create_app(service: Service, token: str | None) -> FastAPI:
    """All routes. With a token every one but the health routes asks for it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    _add_health(app, service)
    _add_models(app, service)
    _add_completions(app, service)
    _add_tokens(app, service)
    _add_admin(app, service)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        return _json({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        ready = service.engine.alive and not service.draining
        return _json({"status": "ready" if ready else "not ready"}, 200 if ready else 503)


def _add_models(app: FastAPI, service: Service) -> None:
    def described(model: str) -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": service.created,
            "owned_by": "marin-rl",
            "max_model_len": service.engine.context_length,
        }

    @app.get(MODELS_ROUTE)
    async def models() -> Response:
        return _json({"object": "list", "data": [described(m) for m in _known(service)]})

    @app.get(MODELS_ROUTE + "/{model:path}")
    async def model(model: str) -> Response:
        _check_model(service, model)
        return _json(described(model))


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post(CHAT_ROUTE)
    async def chat(request: Request) -> Response:
        body = parse(ChatBody, await read_body(request))
        _check_model(service, body.model)
        prompt = await service.off_loop(render_chat, service.tokenizer, body.messages)
        (result,) = await _generate(request, service, body, [prompt], body.new_tokens_max)
        compact = not body.logprobs or body.compact_logprobs
        model = service.id_of(result)
        data = await service.off_loop(
            lambda: chat_answer(service.tokenizer, model, prompt, result, compact=compact)
        )
        return Response(data, media_type="application/json")

    @app.post(COMPLETIONS_ROUTE)
    async def completions(request: Request) -> Response:
        body = parse(CompletionBody, await read_body(request))
        _check_model(service, body.model)
        prompts = await service.off_loop(_encode_prompts, service, body.prompts)
        results = await _generate(request, service, body, prompts, body.max_tokens)
        model = service.id_of(results[-1])
        data = await service.off_loop(
            completions_answer, service.tokenizer, model, body, prompts, results
        )
        return Response(data, media_type="application/json")


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post(TOKENIZE_ROUTE)
    async def tokenize(request: Request) -> Response:
        body = parse(TokenizeBody, await read_body(request))
        if body.model is not None:
            _check_model(service, body.model)
        tokens = await service.off_loop(_tokens_of, service.tokenizer, body)
        length = service.engine.context_length
        return _json({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeBody, await read_body(request))
        if body.model is not None:
            _check_model(service, body.model)
        _check_ids(service, body.tokens)
        text = await service.off_loop(
            lambda: service.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)
        )
        return _json({"prompt": text})


def _add_admin(app: FastAPI, service: Service) -> None:
    updating = asyncio.Lock()

    @app.post(UPDATE_WEIGHTS_ROUTE)
    async def update_weights(request: Request) -> Response:
        body = parse(UpdateWeightsBody, await read_body(request))
        if updating.locked():
            raise ApiError(409, "another update of the weights is under way", code="busy")
        async with updating:
            try:
                model = await asyncio.to_thread(service.update_weights, body)
            except InputError as error:
                raise ApiError(
                    400, f"the old weights go on: {error}", code="weights_refused"
                ) from None
        return _json({"success": True, "message": f"now serving {model}", "model": model})


def _json(body: Any, status: int = 200) -> Response:
    data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(data, status, media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return as_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail}"
    return as_response(ApiError(error.status_code, told, headers=dict(error.headers or {})))


async def _on_fault(request: Request, error: Exception) -> Response:
    """What we did wrong: the trace goes to the log, the client gets a number to ask about."""
    number = uuid.uuid4().hex
    _log.error("request %s failed", number, exc_info=error)
    return as_response(
        ApiError(500, f"internal error; the server's log has it as {number}", type="server_error")
    )


def _known(service: Service) -> list[str]:
    return [service.model_id, service.name]


def _check_model(service: Service, model: str) -> None:
    known = _known(service)
    if model not in known:
        raise ApiError(
            404,
            f"the model {model[:200]!r} is not served here; known: {', '.join(known)}",
            code="model_not_found",
            param="model",
        )


def _check_ids(service: Service, tokens: Sequence[int]) -> None:
    vocabulary = service.engine.spec.vocabulary
    largest = max(tokens, default=0)
    if largest >= vocabulary:
        raise ApiError(
            400, f"expected token ids below {vocabulary}, found {largest}", param="tokens"
        )


def _tokens_of(tokenizer: PreTrainedTokenizerBase, body: TokenizeBody) -> Int32[np.ndarray, " P"]:
    if body.messages is None:
        return encode_text(tokenizer, body.prompt or "")
    return render_chat(tokenizer, body.messages, opening=body.add_generation_prompt)


def _encode_prompts(
    service: Service, prompts: Sequence[str | list[int]]
) -> list[Int32[np.ndarray, " _"]]:
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoded.append(encode_text(service.tokenizer, prompt))
        else:
            _check_ids(service, prompt)
            encoded.append(np.asarray(prompt, np.int32))
    return encoded


async def _generate(
    request: Request,
    service: Service,
    body: SamplingBody,
    prompts: Sequence[Int32[np.ndarray, " _"]],
    max_tokens: int | None,
) -> list[GenerationResult]:
    """Sample for every prompt; seeds of prompt p start at `seed + p * n`."""
    if service.draining:
        raise ApiError(503, "the server is shutting down", type="server_error", code="draining")
    if service.engine.queued + body.n * len(prompts) > SAMPLES_QUEUED_MAX:
        raise ApiError(
            503,
            f"more than {SAMPLES_QUEUED_MAX} samples are waiting: try again later",
            type="server_error",
            code="overloaded",
            headers={"Retry-After": "1"},
        )
    requests = [
        _generation_request(service, body, prompt, max_tokens, index * body.n)
        for index, prompt in enumerate(prompts)
    ]
    service.running += 1
    try:
        futures = [service.engine.submit(generation) for generation in requests]
        return await _unless_client_leaves(request, futures)
    except InputError as error:
        raise ApiError(400, str(error)) from None
    except InferenceError as error:
        raise ApiError(500, str(error), type="server_error") from None
    finally:
        service.running -= 1


def _generation_request(
    service: Service,
    body: SamplingBody,
    prompt: Int32[np.ndarray, " P"],
    max_tokens: int | None,
    seed_offset: int,
) -> GenerationRequest:
    context = service.engine.context_length
    room = context - len(prompt)
    if room < (max_tokens or 1):
        raise ApiError(
            400,
            f"this model's context is {context} tokens, but the prompt has {len(prompt)} and "
            f"{max_tokens or 1} new ones were asked for: shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
            param="messages" if isinstance(body, ChatBody) else "prompt",
        )
    sampling = body.sampling(room if max_tokens is None else max_tokens, seed_offset)
    return GenerationRequest(prompt_ids=prompt, n=body.n, sampling=sampling)


async def _unless_client_leaves(
    request: Request, futures: Sequence["Future[GenerationResult]"]
) -> list[GenerationResult]:
    """Await all results; a client that goes away has its slots freed at the next chunk."""
    results = asyncio.gather(*map(asyncio.wrap_future, futures))
    results.add_done_callback(_looked_at)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({results, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if results.done():
            return await results
        raise ApiError(499, "the client went away")
    finally:
        leaving.cancel()
        results.cancel()


def _looked_at(results: "asyncio.Future[list[GenerationResult]]") -> None:
    """Asyncio logs how a future ended that nobody looks at, and a client that left does not."""
    if not results.cancelled():
        results.exception()


async def _disconnected(request: Request) -> None:
    message: AsgiMessage = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await request.receive()

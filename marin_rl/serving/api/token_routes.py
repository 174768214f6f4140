"""Routes for token ids: /tokenize, /detokenize, and generation from ids to ids.

Owns `POST /inference/v1/generate` as vLLM has it and the `verifiers` library reads it: a prompt's
ids in, each sample's ids and one log-probability per id out, and no text.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from marin_rl.inference.client.protocol import DETOKENIZE_ROUTE, GENERATE_ROUTE, TOKENIZE_ROUTE
from marin_rl.inference.generation import GenerationResult, Sample
from marin_rl.serving.api.openapi import ApiRoute, Detokenized, Generated, Tokenized
from marin_rl.serving.api.request_handler import EngineRequest, SamplingEndpoint
from marin_rl.serving.api.requests import (
    DetokenizeBody,
    GenerateBody,
    GenerateParameters,
    TokenizeBody,
)
from marin_rl.serving.api.responses import Scores, complete_response
from marin_rl.serving.api.service import Prompt, Service, json_response
from marin_rl.serving.http.errors import new_id, parse
from marin_rl.serving.http.guard import read_body


def tokens_routes(service: Service) -> list[ApiRoute]:
    """The routes of token ids."""

    async def tokenize(request: Request) -> Response:
        """Ids of a conversation, as the chat route would render it, or of plain text."""
        data = await read_body(request.scope, request.receive)
        return json_response(await service.preparer.run(data, partial(_tokenize, service, data)))

    async def detokenize(request: Request) -> Response:
        """The text of ids, special tokens included."""
        data = await read_body(request.scope, request.receive)
        return json_response(await service.preparer.run(data, partial(_detokenize, service, data)))

    return [
        ApiRoute(
            TOKENIZE_ROUTE, tokenize, methods=["POST"], request=TokenizeBody, response=Tokenized
        ),
        ApiRoute(
            DETOKENIZE_ROUTE,
            detokenize,
            methods=["POST"],
            request=DetokenizeBody,
            response=Detokenized,
        ),
        ApiRoute(
            GENERATE_ROUTE,
            SamplingEndpoint(service, _prepare),
            methods=["POST"],
            request=GenerateBody,
            response=Generated,
            summary="Samples of token ids, as token ids.",
        ),
    ]


def _tokenize(service: Service, data: bytes) -> dict[str, Any]:
    body = parse(TokenizeBody, data)
    if body.model is not None:
        service.check_model(body.model)
    if body.messages is None:
        tokens = service.encode(body.prompt or "", special=body.add_special_tokens is not False)
    else:
        tokens = service.chat_ids(
            [message.as_template_message() for message in body.messages],
            tools=body.offered,
            opening=body.add_generation_prompt is not False,
            options=body.chat_template_kwargs,
        )
    answer = {
        "count": len(tokens),
        "max_model_len": service.engine.context_length,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.detokenizer.name(token) for token in tokens.tolist()]
    return answer


def _detokenize(service: Service, data: bytes) -> dict[str, Any]:
    body = parse(DetokenizeBody, data)
    if body.model is not None:
        service.check_model(body.model)
    service.check_length(len(body.tokens), "tokens")
    service.check_ids(body.tokens)
    return {"prompt": service.detokenizer.of(body.tokens, special=True)}


def _prepare(service: Service, data: bytes) -> EngineRequest:
    """Read a body and prepare what it asks for. ApiError for what is refused."""
    body = parse(GenerateBody, data)
    parameters = service.with_stop_tokens(body.sampling_params or GenerateParameters())
    target = service.target(body.model)
    service.check_fields(parameters, prompts=1)
    service.check_ids(body.token_ids, "token_ids")
    prompt = np.asarray(body.token_ids, np.int32)
    limit = service.new_tokens(prompt, parameters.max_tokens, param="token_ids")
    # 0 and 1 ask for the sampled token's own logprob alone
    likeliest = (
        parameters.logprobs if parameters.logprobs is not None and parameters.logprobs > 1 else 0
    )
    request = parameters.request(prompt, limit, top_logprobs=likeliest, adapter=target.load)
    write = partial(_complete, service, prompt, scored=parameters.logprobs is not None)
    return EngineRequest(model=target.model, requests=[request], end=write)


def _complete(
    service: Service, prompt: Prompt, results: Sequence[GenerationResult], *, scored: bool
) -> bytes:
    """The JSON of the answer; `policy_versions` only where a swap came between the tokens."""
    (result,) = results
    choices = [
        _choice(index, sample, result.weight_version, scored=scored)
        for index, sample in enumerate(result.samples)
    ]
    top = {"request_id": f"generate-{new_id()}", "model": service.id_of(result)}
    return complete_response(top, choices, [prompt], results)


def _choice(index: int, sample: Sample, version: int, *, scored: bool) -> dict[str, Any]:
    """A sample, sampled by weights `version` where it does not have the version of each token."""
    versions = sample.policy_versions
    choice: dict[str, Any] = {
        "index": index,
        "token_ids": sample.token_ids,
        "logprobs": None,
        "finish_reason": sample.finish_reason,
        "weight_versions": version_spans(
            [version] * len(sample.token_ids) if versions is None else versions.tolist()
        ),
    }
    if scored:
        choice["logprobs"] = {"content": _content(Scores.of(sample, raw=False))}
    if versions is not None:
        choice["policy_versions"] = versions
    return choice


def version_spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Spans of tokens `[start, end)` that one version sampled, in order, as vLLM has them."""
    spans: list[dict[str, Any]] = []
    for version, group in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": str(version), "start": start, "end": start + len(list(group))})
    return spans


def _content(scores: Scores) -> list[dict[str, Any]]:
    return [
        {
            "token": f"token_id:{token}",  # vLLM up to 0.31, and `token_id` since 0.32
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": [
                {"token": f"token_id:{other}", "token_id": other, "logprob": value}
                for other, value in zip(ids, logprobs, strict=True)
            ],
        }
        for token, logprob, ids, logprobs in zip(
            scores.ids, scores.logprobs, scores.top_ids, scores.top_logprobs, strict=True
        )
    ]

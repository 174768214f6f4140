"""POST /generate as SGLang has it: for clients of atropos (`server_type: sglang`), slime, AReaL.

A prompt's ids or its text in; ids, text and one log-probability per id out. Log-probabilities are
those of the sampling distribution, as everywhere here.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from marin_rl.inference.client.protocol import SGLANG_GENERATE_ROUTE
from marin_rl.inference.generation import GenerationResult, Sample
from marin_rl.serving.api.openapi import ApiRoute, SGLangGenerated
from marin_rl.serving.api.request_handler import EngineRequest, SamplingEndpoint
from marin_rl.serving.api.requests import SGLangBody, SGLangParameters
from marin_rl.serving.api.responses import TextDecoding, dumps
from marin_rl.serving.api.service import Prompt, Service
from marin_rl.serving.http.errors import new_id, parse

NEW_TOKENS = 128  # SGLang's default


def sglang_routes(service: Service) -> list[ApiRoute]:
    """The route of SGLang's own generation."""
    route = ApiRoute(
        SGLANG_GENERATE_ROUTE,
        SamplingEndpoint(service, _prepare),
        methods=["POST"],
        request=SGLangBody,
        response=SGLangGenerated,
        summary="Samples of a prompt as SGLang gives them: one, or a list for n above 1.",
    )
    return [route]


def _prepare(service: Service, data: bytes) -> EngineRequest:
    """Read a body and prepare what it asks for. ApiError for what is refused."""
    body = parse(SGLangBody, data)
    parameters = service.with_stop_tokens(body.sampling_params or SGLangParameters())
    # without `lora_path` the base; the name of the server where that stands for an adapter
    target = service.target(body.lora_path or service.name, "lora_path")
    service.check_fields(parameters, prompts=1)
    if body.input_ids is None:
        prompt = service.encode(body.text or "")
    else:
        service.check_ids(body.input_ids, "input_ids")
        prompt = np.asarray(body.input_ids, np.int32)
    limit = service.new_tokens(prompt, parameters.max_new_tokens, param="input_ids")
    if parameters.max_new_tokens is None:
        limit = min(limit, NEW_TOKENS)
    write = partial(
        _complete,
        prompt,
        service.decoding(parameters, special=parameters.skip_special_tokens is False),
        scored=bool(body.return_logprob),
    )
    request = parameters.request(prompt, limit, adapter=target.load)
    return EngineRequest(model=target.model, requests=[request], end=write)


def _complete(
    prompt: Prompt, decoding: TextDecoding, results: Sequence[GenerationResult], *, scored: bool
) -> bytes:
    """The JSON of the answer: an object for one sample, else a list."""
    (result,) = results
    answers = [_sample(prompt, decoding, result, s, scored=scored) for s in result.samples]
    return dumps(answers[0] if len(answers) == 1 else answers)


def _sample(
    prompt: Prompt,
    decoding: TextDecoding,
    result: GenerationResult,
    sample: Sample,
    *,
    scored: bool,
) -> dict[str, Any]:
    ids = sample.token_ids.tolist()
    meta: dict[str, Any] = {
        "id": new_id(),
        "finish_reason": _finish_reason(sample, decoding),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "cached_tokens": result.cached_tokens,
        "weight_version": str(result.weight_version),
    }
    if scored:
        pairs = zip(sample.logprobs.tolist(), ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["input_token_logprobs"] = []
    if sample.policy_versions is not None:
        meta["policy_versions"] = sample.policy_versions
    return {
        "text": decoding.text(ids, sample.finish_reason),
        "output_ids": ids,
        "meta_info": meta,
    }


def _finish_reason(sample: Sample, decoding: TextDecoding) -> dict[str, Any]:
    """Finish reason as SGLang has it, with the stop token that ended a sample."""
    if sample.finish_reason == "length":
        return {"type": "length", "length": len(sample.token_ids)}
    last = int(sample.token_ids[-1]) if len(sample.token_ids) else None
    if sample.finish_reason == "stop" and last in decoding.stop_token_ids:
        return {"type": "stop", "matched": last}
    return {"type": sample.finish_reason}

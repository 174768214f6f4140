"""Generation from ids to ids, as vLLM and as SGLang have it.

`POST /inference/v1/generate` is vLLM's, which the `verifiers` library reads: a prompt's ids in,
each sample's ids and one log-probability per id out, and no text. `POST /generate` is SGLang's, for
clients of atropos (`server_type: sglang`), slime and AReaL: ids or text in; ids, text and one
log-probability per id out. Log-probabilities are of the sampling distribution, as everywhere here;
those of a prompt, which teachers are asked for, are of the model's own at temperature 1.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from marin_rl.inference.client.protocol import GENERATE_ROUTE, SGLANG_GENERATE_ROUTE
from marin_rl.inference.generation import GenerationResult, Sample
from marin_rl.serving.api.dialect import (
    NOTHING,
    Dialect,
    complete_response,
    dumps,
    prompt_logprobs,
    sampled_tokens,
)
from marin_rl.serving.api.requests import (
    GenerateBody,
    GenerateParameters,
    SGLangBody,
    SGLangParameters,
)
from marin_rl.serving.api.response_models import Generated, SGLangGenerated
from marin_rl.serving.api.service import Service
from marin_rl.serving.http.errors import new_id, parse

SGLANG_NEW_TOKENS = 128  # SGLang's default


class IdsToIds(Dialect):
    """POST /inference/v1/generate. `policy_versions` only where a swap came between the tokens."""

    path, request_model, response_model = GENERATE_ROUTE, GenerateBody, Generated
    summary = "Samples of token ids, as token ids."

    def __init__(self, service: Service, data: bytes) -> None:
        body = parse(GenerateBody, data)
        given = body.sampling_params or GenerateParameters()
        parameters, (self.model, adapter) = service.checked(given, body.model)
        self._service = service
        self._prompt = service.prompt(body.token_ids, "token_ids")
        limit = service.new_tokens(self._prompt, parameters.max_tokens, param="token_ids")
        self._scored, self._top = parameters.logprobs is not None, parameters.prompt_logprobs
        # 0 and 1 ask for the logprob of the sampled token only
        self._likeliest = (parameters.logprobs or 0) if parameters.logprobs != 1 else 0
        request = parameters.request(
            self._prompt,
            limit,
            top_logprobs=max(self._likeliest, self._top or 0),
            score_prompt=self._top is not None,
            adapter=adapter,
        )
        self.requests = [request]

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        (result,) = results
        choices: list[dict[str, Any]] = []
        for index, sample in enumerate(result.samples or [NOTHING] * self.requests[0].n):
            by_token = [result.weight_version] * len(sample.token_ids)
            choice: dict[str, Any] = {"index": index, "token_ids": sample.token_ids}
            if sample.policy_versions is not None:
                by_token = sample.policy_versions.tolist()
                choice["policy_versions"] = sample.policy_versions
            choices.append(
                choice
                | {
                    "logprobs": {"content": self._content(sample)} if self._scored else None,
                    "finish_reason": sample.finish_reason,
                    "weight_versions": version_spans(by_token),
                }
            )
        top = {"request_id": f"generate-{new_id()}", "model": self._service.id_of(result)}
        more: dict[str, Any] = {}
        if self._top is not None:
            described = self._service.detokenizer, self._prompt
            more["prompt_logprobs"] = prompt_logprobs(*described, result, self._top)
        return complete_response(top, choices, [self._prompt], results, **more)

    def _content(self, sample: Sample) -> list[dict[str, Any]]:
        def scored(token: int, logprob: float) -> dict[str, Any]:
            # vLLM up to 0.31 has `token`, and `token_id` since 0.32
            return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}

        content = []
        for token, logprob, ids, logprobs in sampled_tokens(sample):
            likely = zip(ids[: self._likeliest], logprobs, strict=False)
            content.append(
                scored(token, logprob) | {"top_logprobs": [scored(*each) for each in likely]}
            )
        return content


def version_spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Spans of tokens `[start, end)` that one version sampled, in order, as vLLM has them."""
    spans: list[dict[str, Any]] = []
    for version, group in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": str(version), "start": start, "end": start + len(list(group))})
    return spans


class SGLang(Dialect):
    """POST /generate: an object for one sample, else a list."""

    path, request_model, response_model = SGLANG_GENERATE_ROUTE, SGLangBody, SGLangGenerated
    summary = "Samples of a prompt as SGLang gives them: one, or a list for n above 1."

    def __init__(self, service: Service, data: bytes) -> None:
        body = parse(SGLangBody, data)
        # without `lora_path` the base; the name of the server where that stands for an adapter
        model = body.lora_path or service.name
        given = body.sampling_params or SGLangParameters()
        parameters, (self.model, adapter) = service.checked(given, model, param="lora_path")
        if body.input_ids is None:
            prompt = service.prompt(body.text or "", "prompt")
        else:
            prompt = service.prompt(body.input_ids, "input_ids")
        limit = service.new_tokens(
            prompt, parameters.max_new_tokens, param="input_ids", default=SGLANG_NEW_TOKENS
        )
        special = parameters.skip_special_tokens is False
        self._decoding = service.decoding(parameters, special=special)
        self._scored = bool(body.return_logprob)
        self._start = (body.logprob_start_len or 0) if body.scores_prompt else len(prompt)
        more = {"score_prompt": body.scores_prompt, "adapter": adapter}
        self.requests = [parameters.request(prompt, limit, **more)]

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        (result,) = results
        sampled = result.samples or [NOTHING] * self.requests[0].n
        samples = [self._sample(result, sample) for sample in sampled]
        return dumps(samples[0] if len(samples) == 1 else samples)

    def _sample(self, result: GenerationResult, sample: Sample) -> dict[str, Any]:
        ids, prompt = sample.token_ids.tolist(), self.requests[0].prompt_ids
        finish: dict[str, Any] = {"type": sample.finish_reason}
        if sample.finish_reason == "length":
            finish["length"] = len(ids)
        elif sample.finish_reason == "stop" and ids and ids[-1] in self._decoding.stop_token_ids:
            finish["matched"] = ids[-1]
        meta: dict[str, Any] = {
            "id": new_id(),
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": result.cached_tokens,
            "weight_version": str(result.weight_version),
        }
        if self._scored:
            pairs = zip(sample.logprobs.tolist(), ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["input_token_logprobs"] = []
            if (scores := result.prompt_scores) is not None:
                scored = zip(scores.logprobs.tolist(), prompt.tolist(), strict=True)
                # NaN, of the first of all tokens, is null in JSON
                triples = [[logprob, token, None] for logprob, token in scored]
                meta["input_token_logprobs"] = triples[self._start :]
        if sample.policy_versions is not None:
            meta["policy_versions"] = sample.policy_versions
        text = self._decoding.text(ids, sample.finish_reason)
        return {"text": text, "output_ids": ids, "meta_info": meta}

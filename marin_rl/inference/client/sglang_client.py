"""A client for SGLang's own route: ids in, ids and log-probabilities out.

SGLang's chat route gives no token ids, so prompts are sent as ids (`tokens_client`) to `/generate`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.errors import BadResponse, StalePolicy
from marin_rl.inference.client.answers import (
    ChatAnswer,
    decode_completion,
    expect_object,
    read_object,
)
from marin_rl.inference.client.policy_client import at_root
from marin_rl.inference.client.protocol import (
    SGLANG_GENERATE_ROUTE,
    ChatRequest,
    parse_served_model_id,
    sampling_fields,
)
from marin_rl.inference.client.tokens_client import Ids, TokensClient
from marin_rl.types import Sampling


class SGLangClient(TokensClient):
    """`TokensClient` over SGLang's `/generate`."""

    async def _sample(self, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        body = sglang_body(prompt_ids, request.sampling, request.stop_token_ids)
        first = next(self._turn)

        async def post(tried: int) -> bytes:
            url = self._willing(first + tried)
            return await self._attempt(url, "POST", at_root(url, SGLANG_GENERATE_ROUTE), body)

        answer = decode_sglang(await self._retried(post), self.model, prompt_ids)
        self._check_version(answer)
        return answer

    def _check_version(self, answer: ChatAnswer) -> None:
        """Raise StalePolicy where an endpoint names another version of its weights.

        It names none before weights were loaded by `inference.publish`.
        """
        served = parse_served_model_id(self.model)
        if served is None or answer.weight_version in (None, served.weight_version):
            return
        raise StalePolicy(
            f"asked for the model {self.model!r}, but the endpoint has weights of version "
            f"{answer.weight_version}"
        )


def sglang_body(
    prompt_ids: Int32[np.ndarray, " P"], sampling: Sampling, stop_token_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the body of SGLang's `/generate` for one sample of a prompt."""
    parameters = sampling_fields(sampling, stop_token_ids)
    parameters["max_new_tokens"] = parameters.pop("max_tokens")
    if "seed" in parameters:
        parameters["sampling_seed"] = parameters.pop("seed")
    return {
        "input_ids": prompt_ids.tolist(),
        "sampling_params": parameters,
        "return_logprob": True,
    }


def decode_sglang(data: bytes, model: str, prompt_ids: Int32[np.ndarray, " P"]) -> ChatAnswer:
    """Read one sample of SGLang's `/generate`, which does not name its model. BadResponse."""
    body = read_object(data)
    meta = expect_object(body.get("meta_info"), "meta_info")
    pairs: Any = meta.get("output_token_logprobs")
    try:
        # Triples of logprob, id and text, which is null unless it is asked for.
        logprobs, ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    except (TypeError, IndexError) as error:
        raise BadResponse(
            "expected meta_info.output_token_logprobs[] of logprob and token: the endpoint must "
            "honour `return_logprob: true`"
        ) from error
    reason = meta.get("finish_reason")
    choice = {
        "token_ids": ids,
        "token_logprobs": logprobs,
        "policy_versions": meta.get("policy_versions"),
        "finish_reason": reason.get("type") if isinstance(reason, dict) else reason,
    }
    # A text, and "default" before any weights were loaded.
    version = str(meta.get("weight_version") or "")
    return ChatAnswer(
        model=model,
        prompt_token_ids=prompt_ids,
        completions=(decode_completion(choice, body.get("text")),),
        request_id=str(meta.get("id") or ""),
        weight_version=int(version) if version.isdecimal() else None,
    )

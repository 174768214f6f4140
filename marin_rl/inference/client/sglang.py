"""SGLang's own route, `/generate`: ids in, ids and log-probabilities out.

SGLang's chat route gives no token ids.
"""

from typing import Any

from marin_rl.errors import BadResponse, StalePolicy
from marin_rl.inference.client.answers import (
    ChatAnswer,
    decode_completion,
    expect_object,
    read_object,
)
from marin_rl.inference.client.dialects import Ids, TokenIdsDialect
from marin_rl.inference.client.http_client import Root
from marin_rl.inference.client.protocol import (
    SGLANG_GENERATE_ROUTE,
    ChatRequest,
    parse_served_model_id,
    sampling_fields,
)


class SGLangDialect(TokenIdsDialect):
    """SGLang's `/generate`, one sample a request."""

    route = Root(SGLANG_GENERATE_ROUTE)

    def body(self, request: ChatRequest, prompt_ids: Ids) -> dict[str, Any]:
        parameters = sampling_fields(request.sampling, request.stop_token_ids)
        parameters["max_new_tokens"] = parameters.pop("max_tokens")
        if "seed" in parameters:
            parameters["sampling_seed"] = parameters.pop("seed")
        return {
            "input_ids": prompt_ids.tolist(),
            "sampling_params": parameters,
            "return_logprob": True,
        }

    def read(self, data: bytes, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        """As the base, and raises StalePolicy where another version of the weights is named."""
        body = read_object(data)
        meta = expect_object(body.get("meta_info"), "meta_info")
        pairs: Any = meta.get("output_token_logprobs")
        try:
            # Triples of logprob, id and text, which is null unless it is asked for.
            logprobs, ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        except (TypeError, IndexError) as error:
            raise BadResponse(
                "expected meta_info.output_token_logprobs[] of logprob and token: the endpoint "
                "must honour `return_logprob: true`"
            ) from error
        reason = meta.get("finish_reason")
        choice = {
            "token_ids": ids,
            "token_logprobs": logprobs,
            "policy_versions": meta.get("policy_versions"),
            "finish_reason": reason.get("type") if isinstance(reason, dict) else reason,
        }
        # A text, and "default" before any weights were loaded by `inference.publish`.
        label, served = str(meta.get("weight_version") or ""), parse_served_model_id(request.model)
        version = int(label) if label.isdecimal() else None
        if served is not None and version not in (None, served.weight_version):
            raise StalePolicy(
                f"asked for the model {request.model!r}, but the endpoint has weights of version "
                f"{version}"
            )
        return ChatAnswer(
            model=request.model,  # the route does not name it
            prompt_token_ids=prompt_ids,
            completions=(decode_completion(choice, body.get("text")),),
            request_id=str(meta.get("id") or ""),
            weight_version=version,
        )

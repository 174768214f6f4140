"""A client for SGLang's own route: ids in, ids and log-probabilities out.

SGLang's chat route gives no token ids, so prompts are sent as ids (`tokens_client`) to `/generate`.
"""

from marin_rl.errors import StalePolicy
from marin_rl.inference.client.protocol import (
    SGLANG_GENERATE_ROUTE,
    ChatAnswer,
    ChatRequest,
    decode_sglang,
    parse_served_model_id,
    sglang_body,
)
from marin_rl.inference.client.tokens_client import Ids, TokensClient


class SGLangClient(TokensClient):
    """`TokensClient` over SGLang's `/generate`."""

    async def _sample(self, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        body, first = sglang_body(prompt_ids, request.sampling), next(self._turn)

        async def post(tried: int) -> bytes:
            url = self._willing(first + tried)
            route = url.removesuffix("/v1") + SGLANG_GENERATE_ROUTE
            return await self._attempt(url, "POST", route, body)

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

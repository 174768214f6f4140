"""A client for SGLang's own route: ids in, ids and log-probabilities out.

SGLang's chat route gives no token ids, so every prompt is rendered here, by the policy's own chat
template, and sent as ids to `/generate`. Each sample is a request of its own, with its own seed: n
samples of one request would share it. Connections, retries and checks are `PolicyClient`'s.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.config import InferenceConfig
from marin_rl.errors import BridgeFault, RequestRejected, StalePolicy
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import (
    SGLANG_GENERATE_ROUTE,
    ChatAnswer,
    ChatRequest,
    decode_sglang,
    parse_served_model_id,
    sglang_body,
)
from marin_rl.types import Message, Sampling

# Ids of a whole dialogue and the opening of the model's next turn.
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], Int32[np.ndarray, " P"]]


def client_of(inference: InferenceConfig, render: Render) -> Callable[..., PolicyClient]:
    """The class of client that a run's endpoints are asked by; `render` is for routes of ids."""
    if inference.route == "sglang":
        return partial(SGLangClient, render=render)
    return PolicyClient


class SGLangClient(PolicyClient):
    """`PolicyClient` over SGLang's `/generate`."""

    def __init__(self, *, render: Render, **options: Any) -> None:
        super().__init__(**options)
        self._render = render

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer of as many requests as it has samples, to the ids of one prompt.

        Raises InputError for a tokenizer that cannot be read.
        """
        prompt_ids, sampling = request.prompt_ids, request.sampling
        if prompt_ids is None:
            try:
                prompt_ids = self._render(request.messages, request.tools)
            except BridgeFault as error:
                raise RequestRejected(str(error)) from None
        first = sampling.seed
        seeds = [None if first is None else first + index for index in range(request.n)]
        answers = await asyncio.gather(
            *(self._sample(prompt_ids, replace(sampling, seed=seed)) for seed in seeds)
        )
        completions = tuple(answer.completions[0] for answer in answers)
        answer = replace(answers[0], completions=completions)
        self._check(answer, request.n)
        return answer

    async def _sample(self, prompt_ids: Int32[np.ndarray, " P"], sampling: Sampling) -> ChatAnswer:
        body, first = sglang_body(prompt_ids, sampling), next(self._turn)

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

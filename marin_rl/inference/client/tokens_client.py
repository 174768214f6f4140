"""A client of routes that take a prompt's ids: every prompt is rendered here, and sent as ids.

Each sample is a request of its own, with its own seed: n samples of one request might share it.
Connections, retries and checks are `PolicyClient`'s. Leaves out the routes themselves
(`sglang_client`, `vllm_client`).
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.errors import BridgeFault, RequestRejected
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import ChatRequest

Ids = Int32[np.ndarray, " P"]
# Ids of a whole dialogue and the opening of the model's next turn: of messages, tools, and options
# of the template where there are any.
Render = Callable[..., Ids]


class TokensClient(PolicyClient):
    """`PolicyClient` that renders prompts by `render`, and asks for each sample by itself."""

    def __init__(self, *, render: Render, **options: Any) -> None:
        super().__init__(**options)
        self._render = render

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer of as many requests as it has samples, to the ids of one prompt.

        Raises InputError for a tokenizer that cannot be read.
        """
        prompt_ids = self._prompt_of(request)
        answer = await each_sample(request, lambda single: self._sample(single, prompt_ids))
        self._check(answer, request.n)
        return answer

    def _prompt_of(self, request: ChatRequest) -> Ids:
        """The ids of a request's prompt. Raises RequestRejected, InputError."""
        if request.prompt_ids is not None:
            return request.prompt_ids
        try:
            own = (request.template_options,) if request.template_options else ()
            return self._render(request.messages, request.tools, *own)
        except BridgeFault as error:
            raise RequestRejected(str(error)) from None

    @abstractmethod
    async def _sample(self, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        """Answer to a request for one sample."""


async def each_sample(
    request: ChatRequest, ask: Callable[[ChatRequest], Awaitable[ChatAnswer]]
) -> ChatAnswer:
    """Ask for each sample of a request with its own seed, and return them in one answer."""
    first = request.sampling.seed
    seeds = [None if first is None else first + index for index in range(request.n)]
    single = [
        replace(request, n=1, sampling=replace(request.sampling, seed=seed)) for seed in seeds
    ]
    answers = await asyncio.gather(*map(ask, single))
    completions = tuple(answer.completions[0] for answer in answers)
    return replace(answers[0], completions=completions)

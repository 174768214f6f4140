"""A client for endpoints that give text alone, as OpenAI's own: good to evaluate, not to train on.

Everything but the shape of request and answer is `PolicyClient`'s. Completions have no token ids
and no log-probabilities here, and it is not asked which weights they come from.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from marin_rl.errors import BadResponse
from marin_rl.inference.client.answers import ChatAnswer, Completion, read_choices, read_tool_calls
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import CHAT_PATH, ChatRequest

# What OpenAI's route does not define; some servers refuse a request that has it.
_EXTENSIONS = ("return_token_ids", "compact_logprobs", "logprobs", "top_logprobs", "top_k")
_CHOICES_MAX = 128  # OpenAI's bound on n


class TextClient(PolicyClient):
    """`PolicyClient` over plain OpenAI chat completions."""

    gives_ids = False

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer of texts and tool calls only; no such endpoint takes the request's `prompt_ids`.

        An endpoint that gives fewer choices than it is asked for is asked for the rest.
        """
        completions: list[Completion] = []
        answered, request_id, seed = "", "", request.sampling.seed
        while (missing := request.n - len(completions)) > 0:
            body = _body(replace(request, n=min(missing, _CHOICES_MAX), prompt_ids=None))
            if seed is not None:
                # The same seed again would give the same texts again.
                body["seed"] = seed + len(completions)
            data = await self._send(CHAT_PATH, body, request.session)
            answer, choices = read_choices(data)
            completions += [_completion(choice) for choice in choices][:missing]
            answered, request_id = str(answer.get("model", "")), str(answer.get("id") or "")
        return ChatAnswer(
            model=answered,
            prompt_token_ids=np.zeros(0, np.int32),
            completions=tuple(completions),
            request_id=request_id,
        )


def _body(request: ChatRequest) -> dict[str, Any]:
    return {name: value for name, value in request.body().items() if name not in _EXTENSIONS}


def _completion(choice: Mapping[str, Any]) -> Completion:
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadResponse(f"expected a choice's message, found {message!r:.80}")
    return Completion(
        text=str(message.get("content") or ""),
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason=str(choice.get("finish_reason") or ""),
        tool_calls=read_tool_calls(message),
    )

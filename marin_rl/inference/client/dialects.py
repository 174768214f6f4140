"""Dialects of endpoints: how a chat request is put to them, and how their answers are read.

Owns OpenAI's chat completions, with token ids or with texts only. Leaves out routes that take ids
(`token_dialects`), who is asked and how often (`policy_client`), and which answers may be trained
on (`proofs`).
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np

from marin_rl.errors import BadResponse, NoSuchRoute, StalePolicy
from marin_rl.inference.client.answers import (
    ChatAnswer,
    Completion,
    decode_answer,
    decode_turns,
    expect_object,
    model_ids,
    read_choices,
    read_tool_calls,
)
from marin_rl.inference.client.protocol import (
    CHAT_PATH,
    ChatRequest,
    ServedModel,
    TurnsRequest,
    parse_served_model_id,
)

Read = Callable[[bytes], list[ChatAnswer]]
Send = Callable[[str, dict[str, Any], Read], Awaitable[list[ChatAnswer]]]  # path and body of a POST
Probe = Callable[[str], Awaitable[bytes]]  # path of a GET

# What OpenAI's route does not define; some servers refuse a request that has it.
_EXTENSIONS = ("return_token_ids", "compact_logprobs", "logprobs", "top_logprobs", "top_k", "min_p")
_CHOICES_MAX = 128  # OpenAI's bound on n


class Dialect(ABC):
    """Requests and answers of one kind of endpoint."""

    gives_ids = True  # each answer has the ids of its prompt and its completions
    names_versions = False  # a request may name one version of the weights, by its id

    @abstractmethod
    async def answer(self, request: ChatRequest, send: Send) -> ChatAnswer:
        """Answer to a request, by one or several that `send` sends. Raises as `send` does."""

    async def serving(self, name: str, probe: Probe) -> ServedModel:
        """The version of a model that an endpoint says it serves. Raises StalePolicy for none."""
        ids = model_ids(await probe("/models"))
        parsed = [model for model in map(parse_served_model_id, ids) if model is not None]
        own = [model for model in parsed if model.name == name]
        if not own:
            shown = ", ".join(sorted(ids)) or "no model"
            raise StalePolicy(f"serves {shown:.200}, and no version of {name}")
        return max(own, key=lambda model: model.weight_version)


class ChatDialect(Dialect):
    """OpenAI's chat completions with token ids: of our own servers, and of vLLM."""

    names_versions = True

    def __init__(self) -> None:
        self._has_chat_tokens = True  # until an endpoint says that it has no such route

    async def answer(self, request: ChatRequest, send: Send) -> ChatAnswer:
        exact = request.prompt_ids is not None and request.n == 1
        if self._has_chat_tokens or not exact:
            try:
                (answer,) = await send(
                    request.path, request.body(), lambda data: [decode_answer(data)]
                )
                return answer
            except NoSuchRoute:
                if not exact:
                    raise
                # For good: later requests spare the 404.
                self._has_chat_tokens = False
        assert request.prompt_ids is not None, "see `exact`"
        plain = TurnsRequest(
            model=request.model,
            prompts=[request.prompt_ids],
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
        )
        (answer, *_) = await send(plain.path, plain.body(), decode_turns)
        return answer

    async def turns(self, request: TurnsRequest, send: Send) -> list[ChatAnswer]:
        try:
            return await send(request.path, request.body(), decode_turns)
        except BadResponse as error:
            raise BadResponse(
                f"{error}; inference.turns_per_request is for marin-rl's own server: set it to "
                "null for others"
            ) from error


class TextDialect(Dialect):
    """Texts and tool calls only, as of OpenAI's own endpoints: good to evaluate, not to train on.

    Completions have no token ids and no log-probabilities here, and it is not asked which weights
    they come from. An endpoint that gives fewer choices than it is asked for is asked for the rest.
    """

    gives_ids = False

    async def answer(self, request: ChatRequest, send: Send) -> ChatAnswer:
        answers, completions = list[ChatAnswer](), list[Completion]()
        while (missing := request.n - len(completions)) > 0:
            part = replace(request, n=min(missing, _CHOICES_MAX), prompt_ids=None)
            body = {name: value for name, value in part.body().items() if name not in _EXTENSIONS}
            if "seed" in body:
                # The same seed again would give the same texts again.
                body["seed"] += len(completions)
            answers += await send(CHAT_PATH, body, self._read)
            completions += answers[-1].completions[:missing]
        return replace(answers[-1], completions=tuple(completions))

    @staticmethod
    def _read(data: bytes) -> list[ChatAnswer]:
        body, choices = read_choices(data)
        completions: list[Completion] = []
        for choice in choices:
            message = expect_object(choice.get("message"), "a choice's message")
            completion = Completion(
                text=str(message.get("content") or ""),
                token_ids=np.zeros(0, np.int32),
                logprobs=np.zeros(0, np.float32),
                finish_reason=str(choice.get("finish_reason") or ""),
                tool_calls=read_tool_calls(message),
            )
            completions.append(completion)
        answer = ChatAnswer(
            model=str(body.get("model", "")),
            prompt_token_ids=np.zeros(0, np.int32),
            completions=tuple(completions),
            request_id=str(body.get("id") or ""),
        )
        return [answer]

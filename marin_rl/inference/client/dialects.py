"""Dialects of endpoints: how a chat request is put to them, and how their answers are read.

Owns OpenAI's chat completions, with token ids or texts alone, and the base of routes that take ids
(`sglang`, `vllm`). Leaves out who is asked and how often (`policy_client`), and which answers may
be trained on (`proofs`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from marin_rl.errors import BadResponse, BridgeFault, NoSuchRoute, RequestRejected, StalePolicy
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
from marin_rl.inference.client.chat_client import NO_OPTIONS
from marin_rl.inference.client.http_client import Root
from marin_rl.inference.client.protocol import (
    CHAT_PATH,
    ChatRequest,
    ServedModel,
    TurnsRequest,
    parse_served_model_id,
)
from marin_rl.types import Message

Ids = Int32[np.ndarray, " P"]
Read = Callable[[bytes], list[ChatAnswer]]
Send = Callable[[str, dict[str, Any], Read], Awaitable[list[ChatAnswer]]]  # path and body of a POST
Probe = Callable[[str], Awaitable[bytes]]  # path of a GET

# What OpenAI's route does not define; some servers refuse a request that has it.
_EXTENSIONS = ("return_token_ids", "compact_logprobs", "logprobs", "top_logprobs", "top_k")
_CHOICES_MAX = 128  # OpenAI's bound on n


@runtime_checkable
class Template(Protocol):
    """A policy's chat template and tokenizer."""

    def prompt(
        self,
        dialogue: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> Ids:
        """Return the ids of a dialogue and the opening of the model's next turn."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids."""
        ...


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
                (answer,) = await send(request.path, request.body(), _one_answer)
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
        """Answers to the prompts of one request, in order. Raises as `send` does."""
        return await send(request.path, request.body(), _turns)


class TextDialect(Dialect):
    """Texts and tool calls alone, as OpenAI's own endpoints: good to evaluate, not to train on.

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
            answers += await send(CHAT_PATH, body, _texts)
            completions += answers[-1].completions[:missing]
        return replace(answers[-1], completions=tuple(completions))


class TokenIdsDialect(Dialect):
    """Base of routes that take ids: prompts are rendered by `template`, here.

    Each sample is a request of its own, with its own seed: n samples of one request might share it.
    """

    route: Root

    def __init__(self, template: Template) -> None:
        self._template = template

    @abstractmethod
    def body(self, request: ChatRequest, prompt_ids: Ids) -> dict[str, Any]:
        """The JSON body for one sample of a prompt."""

    @abstractmethod
    def read(self, data: bytes, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        """Read one sample. Raises BadResponse."""

    async def answer(self, request: ChatRequest, send: Send) -> ChatAnswer:
        """As the base; raises InputError for a tokenizer that cannot be read."""
        prompt_ids, first = self._prompt_of(request), request.sampling.seed

        async def ask(index: int) -> ChatAnswer:
            seed = None if first is None else first + index
            single = replace(request, n=1, sampling=replace(request.sampling, seed=seed))
            body = self.body(single, prompt_ids)
            (answer,) = await send(
                self.route, body, lambda data: [self.read(data, single, prompt_ids)]
            )
            return answer

        answers = await asyncio.gather(*map(ask, range(request.n)))
        return replace(answers[0], completions=tuple(each.completions[0] for each in answers))

    def _prompt_of(self, request: ChatRequest) -> Ids:
        if request.prompt_ids is not None:
            return request.prompt_ids
        options = (request.template_options,) if request.template_options else ()
        try:
            return self._template.prompt(request.messages, request.tools, *options)
        except BridgeFault as error:
            raise RequestRejected(str(error)) from None


def _one_answer(data: bytes) -> list[ChatAnswer]:
    return [decode_answer(data)]


def _turns(data: bytes) -> list[ChatAnswer]:
    try:
        return decode_turns(data)
    except BadResponse as error:
        raise BadResponse(
            f"{error}; inference.turns_per_request is for marin-rl's own server: set it to "
            "null for others"
        ) from error


def _texts(data: bytes) -> list[ChatAnswer]:
    body, choices = read_choices(data)
    return [
        ChatAnswer(
            model=str(body.get("model", "")),
            prompt_token_ids=np.zeros(0, np.int32),
            completions=tuple(map(_text, choices)),
            request_id=str(body.get("id") or ""),
        )
    ]


def _text(choice: Mapping[str, Any]) -> Completion:
    message = expect_object(choice.get("message"), "a choice's message")
    return Completion(
        text=str(message.get("content") or ""),
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason=str(choice.get("finish_reason") or ""),
        tool_calls=read_tool_calls(message),
    )

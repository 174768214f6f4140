"""Wire protocol of client and server: OpenAI's chat route with token ids, as vLLM defines it.

A request carries `return_token_ids: true` and `logprobs: true`; the answer then has the prompt's
ids (`prompt_token_ids`) and, in each choice, `token_ids` (a final stop token included) with one
logprob per id. Our own additions are optional on both sides: `compact_logprobs` asks for the flat
list `token_logprobs`; an answer may carry `policy_versions` per choice, `weight_version`,
`parameters_digest` and `timings`, which the answer to several prompts has in each choice.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32

from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.types import BEYOND_OPENAI, Message, Sampling, ToolCall

MODELS_ROUTE = "/v1/models"
CHAT_ROUTE = "/v1/chat/completions"
CHAT_TOKENS_ROUTE = "/v1/chat/completions/tokens"
COMPLETIONS_ROUTE = "/v1/completions"
RESPONSES_ROUTE = "/v1/responses"
MESSAGES_ROUTE = "/v1/messages"
# Below the base URL of an endpoint.
CHAT_PATH = CHAT_ROUTE.removeprefix("/v1")
CHAT_TOKENS_PATH = CHAT_TOKENS_ROUTE.removeprefix("/v1")
COMPLETIONS_PATH = COMPLETIONS_ROUTE.removeprefix("/v1")
TOKENIZE_ROUTE = "/tokenize"
DETOKENIZE_ROUTE = "/detokenize"
TOKENIZER_INFO_ROUTE = "/tokenizer_info"
GENERATE_ROUTE = "/inference/v1/generate"
SGLANG_GENERATE_ROUTE = "/generate"
UPDATE_WEIGHTS_ROUTE = "/update_weights_from_disk"
LOAD_ADAPTER_ROUTE = "/v1/load_lora_adapter"
UNLOAD_ADAPTER_ROUTE = "/v1/unload_lora_adapter"
SGLANG_LOAD_ADAPTER_ROUTE = "/load_lora_adapter"
SGLANG_UNLOAD_ADAPTER_ROUTE = "/unload_lora_adapter"


LIKELIEST = 20  # tokens that choices are looked for among, as many as vLLM gives
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
DIGEST_DIGITS = 8  # of a digest, in a served model's id
_SERVED = re.compile(rf"(?P<name>.+)@(?P<version>\d{{5,}})-(?P<digest>[0-9a-f]{{{DIGEST_DIGITS}}})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A served model id, taken apart; `digest` is the first 8 digits of the parameters' SHA-256."""

    name: str
    weight_version: int
    digest: str


def served_model_id(name: str, weight_version: int, digest: str) -> str:
    """The id under which parameters are served: `policy@00012-1a2b3c4d`.

    Two sets of parameters never share an id, so asking for the wrong ones is a 404, not a mystery.
    """
    return f"{name}@{weight_version:05d}-{digest[:DIGEST_DIGITS]}"


def parse_served_model_id(model: str) -> ServedModel | None:
    """The parts of an id made by `served_model_id`; None for an id of another make."""
    match = _SERVED.fullmatch(model)
    if match is None:
        return None
    return ServedModel(
        name=match["name"], weight_version=int(match["version"]), digest=match["digest"]
    )


def is_version_of(model_id: str, name: str) -> bool:
    parsed = parse_served_model_id(model_id)
    return parsed is not None and parsed.name == name


def label_of(version: int, digest: str) -> str:
    """The label of weights at vLLM (`vllm_reload`): round and digest, as in a served model's id."""
    return served_model_id("", version, digest).removeprefix("@")


def parse_label(label: str) -> ServedModel | None:
    """Version and digest in a label; without a digest in one of our own servers' numbers.

    None for a label of another make, such as the one that vLLM begins with.
    """
    if label.isdecimal() and label.isascii():
        return ServedModel(name="_", weight_version=int(label), digest="")
    model = parse_served_model_id(f"_@{label}")
    # The name differs if the label itself contains an `@`.
    return model if model is not None and model.name == "_" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """`n` samples of one conversation from one served model.

    With `prompt_ids` the prompt is these very ids, and the server renders nothing; else
    `template_options` are for its chat template. A `plain` prompt is the text of the only message,
    without the template; where it has texts, the completion is the likeliest of them. `tools` have
    their JSON schema, as OpenAI's clients send it. A `probe`, of a few tokens, is served first by
    our servers. `session` is not sent: it is for the client. `stop_token_ids` end a completion in
    addition to the endpoint's own.
    """

    model: str
    messages: tuple[Message, ...]
    n: int
    sampling: Sampling
    prompt_ids: Int32[np.ndarray, " P"] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    probe: bool = False
    session: str = ""
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stop_token_ids: tuple[int, ...] = ()
    plain: tuple[str, ...] | None = None

    @property
    def path(self) -> str:
        if self.plain is not None:
            return COMPLETIONS_PATH
        return CHAT_PATH if self.prompt_ids is None else CHAT_TOKENS_PATH

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "n": self.n,
            **sampling_fields(self.sampling, self.stop_token_ids),
            "return_token_ids": True,
            "compact_logprobs": not self.plain,  # they are without the likeliest tokens
        }
        if self.plain is not None:
            (message,) = self.messages
            return body | {"prompt": message.content, "logprobs": LIKELIEST if self.plain else 0}
        body["messages"] = [message_body(message) for message in self.messages]
        body |= {"logprobs": True, "top_logprobs": 0}
        if self.prompt_ids is not None:
            body["tokens"] = self.prompt_ids.tolist()
        elif self.template_options:
            body["chat_template_kwargs"] = dict(self.template_options)
        if self.tools:
            body["tools"] = [dict(tool) for tool in self.tools]
        if self.probe:
            body["probe"] = True
        return body


def message_body(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's shape: role and content, and what else it has."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        # null beside calls without text, as in OpenAI's API
        body["content"] = message.content or None
        body["tool_calls"] = [call_body(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body


def call_body(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsRequest:
    """A sample of each of several prompts of ids from one served model, each with its own seed.

    `sampling` holds for all of them, and has no seed. The list `seeds` of the body is ours: other
    servers of plain completions have one seed for all prompts. Without `seeds` it is one prompt,
    for endpoints without the chat route for ids, as vLLM's own server.
    """

    path: ClassVar[str] = COMPLETIONS_PATH
    model: str
    prompts: Sequence[Int32[np.ndarray, " _P"]]
    seeds: Sequence[int] = ()
    sampling: Sampling
    session: str = ""
    stop_token_ids: tuple[int, ...] = ()

    def body(self) -> dict[str, Any]:
        prompts = [prompt.tolist() for prompt in self.prompts]
        body: dict[str, Any] = {
            "model": self.model,
            **sampling_fields(self.sampling, self.stop_token_ids),
            "return_token_ids": True,
            "compact_logprobs": True,
        }
        if self.seeds:
            return body | {"prompt": prompts, "seeds": list(self.seeds)}
        (prompt,) = prompts
        return body | {"prompt": prompt, "logprobs": 0}  # of the sampled tokens


def sampling_fields(sampling: Sampling, stop_token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Fields of a body; filters that are off, and an absent seed or stop, are left out."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    optional = {
        **{name: getattr(sampling, name) for name in BEYOND_OPENAI},
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_token_ids),
    }
    fields |= {name: value for name, value in optional.items() if value}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields


class ChatClient(ABC):
    """Client of one policy, asked for by the id `model`."""

    model: str
    gives_ids = True  # each answer has the ids of its prompt and its completions

    async def chat(  # noqa: PLR0913 - the fields of a request
        self,
        messages: Sequence[Message],
        n: int,
        sampling: Sampling,
        *,
        prompt_ids: Int32[np.ndarray, " P"] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        session: str = "",
        template_options: Mapping[str, Any] = NO_OPTIONS,
        stop_token_ids: Sequence[int] = (),
        plain: tuple[str, ...] | None = None,
    ) -> ChatAnswer:
        """`n` samples of one conversation, checked.

        Arguments are those of `ChatRequest`; requests of one `session` go to one endpoint of a
        fleet while it can be, where a dialogue's cache is. Raises EndpointUnavailable when every
        attempt failed, RequestRejected when the endpoint refuses the request, StalePolicy when it
        serves another model, BadResponse when its answer cannot be trained on.
        """
        request = ChatRequest(
            model=self.model,
            messages=tuple(messages),
            n=n,
            sampling=sampling,
            prompt_ids=prompt_ids,
            tools=tuple(tools),
            session=session,
            template_options=template_options,
            stop_token_ids=tuple(stop_token_ids),
            plain=plain if prompt_ids is None else None,
        )
        return await self.answer(request)

    @abstractmethod
    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer to a request of this client's model, with `request.n` completions."""

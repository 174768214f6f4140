"""Wire protocol of client and server: OpenAI's chat route with token ids, as vLLM defines it.

A request carries `return_token_ids: true` and `logprobs: true`; the answer then has the prompt's
ids at its top level (`prompt_token_ids`) and, in each choice, `token_ids` (a final stop token
included) with one logprob per id. Our own additions are optional on both sides, and servers that do
not know them ignore them: `compact_logprobs` in the request asks for the flat list `token_logprobs`
in place of `logprobs.content`; the answer may carry `policy_versions` per choice, `weight_version`,
`parameters_digest` and `timings`, which the answer to several prompts has in each choice. Knows
nothing of JAX, of sockets, or of any client library.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from jaxtyping import Float32, Int32

from marin_rl.errors import BadResponse
from marin_rl.types import Message, Sampling, ToolCall

MODELS_ROUTE = "/v1/models"
CHAT_ROUTE = "/v1/chat/completions"
CHAT_TOKENS_ROUTE = "/v1/chat/completions/tokens"
CHAT_TOKENS_PATH = CHAT_TOKENS_ROUTE.removeprefix("/v1")  # below the base URL of an endpoint
COMPLETIONS_ROUTE = "/v1/completions"
TOKENIZE_ROUTE = "/tokenize"
DETOKENIZE_ROUTE = "/detokenize"
GENERATE_ROUTE = "/inference/v1/generate"
SGLANG_GENERATE_ROUTE = "/generate"
UPDATE_WEIGHTS_ROUTE = "/update_weights_from_disk"
LOAD_ADAPTER_ROUTE = "/v1/load_lora_adapter"
UNLOAD_ADAPTER_ROUTE = "/v1/unload_lora_adapter"
SGLANG_LOAD_ADAPTER_ROUTE = "/load_lora_adapter"
SGLANG_UNLOAD_ADAPTER_ROUTE = "/unload_lora_adapter"

# float32 softmax may round a certainty to a hair above probability 1.
LOGPROB_SLACK = 1e-5

_SERVED = re.compile(r"(?P<name>.+)@(?P<version>\d{5,})-(?P<digest>[0-9a-f]{8})")


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
    return f"{name}@{weight_version:05d}-{digest[:8]}"


def parse_served_model_id(model: str) -> ServedModel | None:
    """The parts of an id made by `served_model_id`; None for an id of another make."""
    match = _SERVED.fullmatch(model)
    if match is None:
        return None
    return ServedModel(
        name=match["name"], weight_version=int(match["version"]), digest=match["digest"]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """`n` samples of one conversation from one served model.

    With `prompt_ids` the prompt is these very ids, and the server renders nothing. `tools` are
    functions as OpenAI's clients send them, each with its JSON schema. A `probe`, of a few tokens,
    goes before all that wait at a server of ours. `session` is for the client alone.
    """

    model: str
    messages: tuple[Message, ...]
    n: int
    sampling: Sampling
    prompt_ids: Int32[np.ndarray, " P"] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    probe: bool = False
    session: str = ""

    @property
    def path(self) -> str:
        """The route, below the base URL of an endpoint."""
        return CHAT_ROUTE.removeprefix("/v1") if self.prompt_ids is None else CHAT_TOKENS_PATH

    def body(self) -> dict[str, Any]:
        """The JSON body. Filters that are off, and an absent seed or stop, are left out."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [message_body(message) for message in self.messages],
            "n": self.n,
            **sampling_fields(self.sampling),
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "compact_logprobs": True,
        }
        if self.prompt_ids is not None:
            body["tokens"] = self.prompt_ids.tolist()
        if self.tools:
            body["tools"] = [dict(tool) for tool in self.tools]
        if self.probe:
            body["probe"] = True
        if self.sampling.seed is not None:
            body["seed"] = self.sampling.seed
        return body


def message_body(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's shape: role and content, and what else it has."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [call_body(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body


def call_body(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's shape."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsRequest:
    """A sample of each of several prompts of ids from one served model, each with its own seed.

    `sampling` holds for all of them, but for its seed. The list `seeds` of the body is ours: other
    servers of plain completions have one seed for all prompts.
    """

    model: str
    prompts: Sequence[Int32[np.ndarray, " _P"]]
    seeds: Sequence[int]
    sampling: Sampling
    session: str = ""

    @property
    def path(self) -> str:
        """The route, below the base URL of an endpoint."""
        return COMPLETIONS_ROUTE.removeprefix("/v1")

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "model": self.model,
            "prompt": [prompt.tolist() for prompt in self.prompts],
            "seeds": list(self.seeds),
            **sampling_fields(self.sampling),
            "return_token_ids": True,
            "compact_logprobs": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRequest:
    """A sample that goes on from exact ids, by the route of plain completions.

    For endpoints without the chat route for ids, as vLLM's own server.
    """

    model: str
    prompt: Int32[np.ndarray, " P"]
    sampling: Sampling

    @property
    def path(self) -> str:
        """The route, below the base URL of an endpoint."""
        return COMPLETIONS_ROUTE.removeprefix("/v1")

    def body(self) -> dict[str, Any]:
        """The JSON body; `logprobs: 0` asks for those of the sampled tokens."""
        seed = self.sampling.seed
        return {
            "model": self.model,
            "prompt": self.prompt.tolist(),
            **sampling_fields(self.sampling),
            **({} if seed is None else {"seed": seed}),
            "logprobs": 0,
            "return_token_ids": True,
            "compact_logprobs": True,
        }


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Fields of a body that are the same for all its samples; filters that are off are left out."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Completion: its text without the stop token, its ids with it, one logprob (nats) per id.

    `logprobs` are those of the sampling distribution. `policy_versions` is None unless the weights
    were swapped while this sample was drawn, or others began it; `parameters_digest` then names
    those of its last token. `tool_calls` are those that an endpoint of texts read; where there are
    ids, calls are read from them (`rollouts.tool_turns`), `malformed` is what was
    meant as a call and is none, and `sampled_text` has the calls in it.
    """

    text: str
    token_ids: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    finish_reason: str
    policy_versions: Int32[np.ndarray, " T"] | None = None
    parameters_digest: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str | None = None
    sampled_text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimings:
    """Time that a prompt's samples took on the server by phase, in seconds.

    None where the server does not report it. Samples of one prompt share them: decoding ends with
    the last of them.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Answer of an endpoint to a request; completions in the order of their `index`."""

    model: str
    prompt_token_ids: Int32[np.ndarray, " P"]
    completions: tuple[Completion, ...]
    request_id: str = ""
    weight_version: int | None = None
    parameters_digest: str | None = None
    timings: ServerTimings = field(default_factory=ServerTimings)


def decode_answer(data: bytes) -> ChatAnswer:
    """Read a chat completion, ours or vLLM's; BadResponse names what is missing or absurd."""
    body, choices = read_choices(data)
    return ChatAnswer(
        model=str(body.get("model", "")),
        prompt_token_ids=_token_ids(body.get("prompt_token_ids"), "prompt_token_ids"),
        completions=tuple(_decode_choice(choice) for choice in choices),
        request_id=str(body.get("id") or ""),
        weight_version=_weight_version(body.get("weight_version")),
        parameters_digest=_optional(body.get("parameters_digest"), str, "parameters_digest"),
        timings=_timings(_mapping(body.get("timings") or {}, "timings")),
    )


def decode_turns(data: bytes) -> list[ChatAnswer]:
    """Read the answer to a `TurnsRequest` or a `PlainRequest`: one completion per prompt, in order.

    Raises BadResponse.
    """
    body, choices = read_choices(data)
    return [
        ChatAnswer(
            model=str(body.get("model", "")),
            prompt_token_ids=_token_ids(choice.get("prompt_token_ids"), "prompt_token_ids"),
            completions=(decode_completion(choice, choice.get("text")),),
            request_id=str(body.get("id") or ""),
            weight_version=_weight_version(body.get("weight_version")),
            parameters_digest=_optional(body.get("parameters_digest"), str, "parameters_digest"),
            timings=_timings(_mapping(choice.get("timings") or {}, "a choice's timings")),
        )
        for choice in choices
    ]


def sglang_body(prompt_ids: Int32[np.ndarray, " P"], sampling: Sampling) -> dict[str, Any]:
    """Return the body of SGLang's `/generate` for one sample of a prompt."""
    parameters = sampling_fields(sampling)
    parameters["max_new_tokens"] = parameters.pop("max_tokens")
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    return {
        "input_ids": prompt_ids.tolist(),
        "sampling_params": parameters,
        "return_logprob": True,
    }


def decode_sglang(data: bytes, model: str, prompt_ids: Int32[np.ndarray, " P"]) -> ChatAnswer:
    """Read one sample of SGLang's `/generate`, which does not name its model. BadResponse."""
    body = _mapping(_json(data), "the answer")
    meta = _mapping(body.get("meta_info"), "meta_info")
    pairs: Any = meta.get("output_token_logprobs")
    try:
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
    version = str(meta.get("weight_version") or "")
    return ChatAnswer(
        model=model,
        prompt_token_ids=prompt_ids,
        completions=(decode_completion(choice, body.get("text")),),
        request_id=str(meta.get("id") or ""),
        weight_version=int(version) if version.isdecimal() else None,
    )


def read_choices(data: bytes) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """Read an answer's object, and its choices in the order of their index. Raises BadResponse."""
    body = _mapping(_json(data), "the answer")
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadResponse(f"expected a list of choices, found {choices!r:.80}")
    return body, sorted((_mapping(c, "a choice") for c in choices), key=_index)


def named_versions(data: bytes) -> tuple[int | None, str | None, frozenset[int]]:
    """The version and digest that an answer names, and the versions of its tokens.

    Raises BadResponse.
    """
    body, choices = read_choices(data)
    version = _weight_version(body.get("weight_version"))
    digest = _optional(body.get("parameters_digest"), str, "parameters_digest")
    versions = set[int]()
    for choice in choices:
        own = choice.get("policy_versions")
        if own is not None:
            versions.update(_token_ids(own, "policy_versions").tolist())
        elif version is not None:
            versions.add(version)
    return version, digest, frozenset(versions)


def read_tool_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Read the tool calls of an assistant's message. Raises BadResponse."""
    calls = message.get("tool_calls") or []
    try:
        values = [(call["id"], call["function"]) for call in calls]
        read = [(id, function["name"], function["arguments"]) for id, function in values]
    except (TypeError, KeyError) as error:
        raise BadResponse(
            f"expected tool_calls[] with id and function, found {calls!r:.80}"
        ) from error
    if not all(isinstance(part, str) for call in read for part in call):
        raise BadResponse(f"expected tool_calls[] of texts, found {calls!r:.80}")
    return tuple(ToolCall(id=id, name=name, arguments=text) for id, name, text in read)


def _weight_version(value: object) -> int | None:
    version = _optional(value, int, "weight_version")
    if version is not None and (isinstance(value, bool) or not 0 <= version < 2**31):
        raise BadResponse(f"expected weight_version from 0 to 2**31 - 1, found {value!r:.80}")
    return version


def _timings(timings: Mapping[str, Any]) -> ServerTimings:
    values = {
        name: _optional(timings.get(name), int | float, f"timings.{name}")
        for name in ("queue_s", "prefill_s", "decode_s")
    }
    return ServerTimings(
        **{name: None if value is None else float(value) for name, value in values.items()}
    )


def error_body(
    message: str, *, type: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _decode_choice(choice: Mapping[str, Any]) -> Completion:
    message = _mapping(choice.get("message"), "a choice's message")
    return decode_completion(choice, message.get("content"))


def decode_completion(choice: Mapping[str, Any], text: object) -> Completion:
    """Read a choice's ids, log-probabilities and versions. Raises BadResponse."""
    token_ids = _token_ids(choice.get("token_ids"), "token_ids")
    logprobs = _logprobs(choice)
    if len(logprobs) != len(token_ids):
        raise BadResponse(
            f"expected one logprob per token id, found {len(logprobs)} for {len(token_ids)} ids"
        )
    versions = choice.get("policy_versions")
    if versions is not None:
        versions = _token_ids(versions, "policy_versions")
        if len(versions) != len(token_ids):
            raise BadResponse(f"expected {len(token_ids)} policy_versions, found {len(versions)}")
    return Completion(
        text=str(text or ""),
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=str(choice.get("finish_reason") or ""),
        policy_versions=versions,
    )


def _logprobs(choice: Mapping[str, Any]) -> Float32[np.ndarray, " T"]:
    values = choice.get("token_logprobs")
    if values is None:
        values = _openai_logprobs(_mapping(choice.get("logprobs") or {}, "logprobs"))
    wide = _flat(values, "iuf", "logprobs")
    if not np.isfinite(wide).all() or (wide > LOGPROB_SLACK).any():
        raise BadResponse(
            f"expected finite logprobs of at most 0, found {wide.min()} to {wide.max()}"
        )
    return wide.astype(np.float32)


def _openai_logprobs(logprobs: Mapping[str, Any]) -> object:
    """Return one logprob per token: a chat's `content`, or a plain completion's list."""
    content, plain = logprobs.get("content"), logprobs.get("token_logprobs")
    if content is None and plain is None:
        raise BadResponse(
            "the endpoint gave no logprobs: it must honour `logprobs: true` (one per token)"
        )
    if content is None:
        return plain
    try:
        return [item["logprob"] for item in content]
    except (TypeError, KeyError) as error:
        raise BadResponse("expected logprobs.content[].logprob") from error


def _token_ids(values: object, name: str) -> Int32[np.ndarray, " T"]:
    if values is None:
        raise BadResponse(
            f"the endpoint gave no {name}: it must honour `return_token_ids: true` (vLLM 0.10.2 or "
            "newer, or marin-rl's own server)"
        )
    wide = _flat(values, "iu", name)
    if len(wide) and (wide.min() < 0 or wide.max() >= 2**31):
        raise BadResponse(
            f"expected {name} from 0 to 2**31 - 1, found {wide.min()} to {wide.max()}"
        )
    return wide.astype(np.int32)


def _flat(values: object, kinds: str, name: str) -> np.ndarray:
    """A list of numbers as a wide array of one of the NumPy `kinds`; anything else is refused."""
    if not isinstance(values, list):
        raise BadResponse(f"expected {name} as a flat list of numbers, found {str(values)[:80]}")
    if not values:
        return np.zeros(0, np.int64)
    try:
        wide = np.asarray(values)
    except ValueError:
        wide = np.zeros((0, 0))
    if wide.ndim != 1 or wide.dtype.kind not in kinds:
        raise BadResponse(f"expected {name} as a flat list of numbers, found {str(values)[:80]}")
    return wide


def _json(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadResponse(f"the answer is not JSON ({error}): {data[:80]!r}") from error


def _optional(value: object, kind: Any, what: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise BadResponse(f"expected {what} of type {kind}, found {value!r:.80}")
    return value


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadResponse(f"expected {what} to be an object, found {value!r:.80}")
    return value


def _index(choice: Mapping[str, Any]) -> int:
    index = choice.get("index", 0)
    return index if isinstance(index, int) else 0

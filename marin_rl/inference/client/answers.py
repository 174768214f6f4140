"""Answers of the chat route, and their parsing: tokens with their log-probabilities.

Required and optional fields are listed in `protocol`. Any other shape raises BadResponse, which
says what was expected and what the endpoint sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from jaxtyping import Float32, Int32

from marin_rl.errors import BadResponse
from marin_rl.finite import LOGPROB_MIN, fit_logprobs
from marin_rl.types import ToolCall


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `[start, end)` of a completion, and the label of the weights that sampled them."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Completion: its text without the stop token, its ids with it, one logprob (nats) per id.

    `logprobs` are those of the sampling distribution. `policy_versions` is None unless the weights
    were swapped while this sample was drawn, or others began it; `parameters_digest` then names
    the policy of its last token. `tool_calls` come from the endpoint if it gives texts, else they
    are parsed from the ids (`rollouts.tool_turns`); `malformed` is text that was meant as a call,
    and `sampled_text` includes the calls. `weights` are the labels of a vLLM, for all of
    its tokens, until they are resolved to versions.
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
    weights: tuple[WeightSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimings:
    """Seconds that a prompt's samples took on the server by phase, until the last of them ended.

    None where the server does not report them.
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
    messages = [expect_object(choice.get("message"), "a choice's message") for choice in choices]
    pairs = zip(choices, messages, strict=True)
    completions = [decode_completion(choice, message.get("content")) for choice, message in pairs]
    return _answer(body, body, tuple(completions))


def decode_turns(data: bytes) -> list[ChatAnswer]:
    """Read the answer to a `TurnsRequest`: one completion per prompt, in order.

    Raises BadResponse.
    """
    body, choices = read_choices(data)
    return [
        _answer(body, choice, (decode_completion(choice, choice.get("text")),))
        for choice in choices
    ]


def decode_plain(data: bytes, choices: Sequence[str]) -> ChatAnswer:
    """Read the answer to a plain prompt: its samples, or of each the likeliest of `choices`."""
    answers = decode_turns(data)
    completions = tuple(completion for answer in answers for completion in answer.completions)
    if choices:
        pairs = zip(read_choices(data)[1], completions, strict=True)
        completions = tuple(replace(each, text=likeliest(raw, choices)) for raw, each in pairs)
    return replace(answers[0], completions=completions)


def likeliest(choice: Mapping[str, Any], texts: Sequence[str]) -> str:
    """The likeliest text as the first token, after a space if any is there; else what was said.

    One that is not among the likeliest tokens is less likely than one that is. Raises BadResponse.
    """
    places = expect_object(choice.get("logprobs") or {}, "logprobs").get("top_logprobs")
    top = places[0] if isinstance(places, list) and places else None
    if not isinstance(top, dict) or not all(isinstance(each, int | float) for each in top.values()):
        raise BadResponse(
            f"expected logprobs.top_logprobs[] of the first token, found {places!r:.80}: the "
            "endpoint must honour `logprobs: 20`; choose a prompt whose answer is generated"
        )
    for before in (" ", ""):
        if found := [text for text in texts if before + text in top]:
            return max(found, key=lambda text: top[before + text])
    return str(choice.get("text") or "")


def _answer(
    body: Mapping[str, Any], prompt: Mapping[str, Any], completions: tuple[Completion, ...]
) -> ChatAnswer:
    """An answer whose prompt's ids and timings are in `prompt`, and all else in `body`."""
    version = _optional(body.get("weight_version"), int, "weight_version")
    # `True` is an int to Python.
    if version is not None and (isinstance(version, bool) or not 0 <= version < 2**31):
        raise BadResponse(f"expected weight_version from 0 to 2**31 - 1, found {version!r:.80}")
    timings, seconds = expect_object(prompt.get("timings") or {}, "timings"), {}
    for name in ("queue_s", "prefill_s", "decode_s"):
        value = _optional(timings.get(name), int | float, f"timings.{name}")
        seconds[name] = None if value is None else float(value)
    return ChatAnswer(
        model=str(body.get("model", "")),
        prompt_token_ids=read_token_ids(prompt.get("prompt_token_ids"), "prompt_token_ids"),
        completions=completions,
        request_id=str(body.get("id") or ""),
        weight_version=version,
        parameters_digest=_optional(body.get("parameters_digest"), str, "parameters_digest"),
        timings=ServerTimings(**seconds),
    )


def read_choices(data: bytes) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """Read an answer's object, and its choices in the order of their index. Raises BadResponse."""
    body = read_object(data)
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadResponse(f"expected a list of choices, found {choices!r:.80}")
    index_of = lambda choice: i if isinstance(i := choice.get("index", 0), int) else 0
    return body, sorted((expect_object(each, "a choice") for each in choices), key=index_of)


def model_ids(data: bytes) -> set[str]:
    """Ids in the answer of `/v1/models`. Raises BadResponse."""
    try:
        return {item["id"] for item in orjson.loads(data)["data"]}
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise BadResponse(f"expected a list of models, found {data[:80]!r}") from error


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


def decode_completion(choice: Mapping[str, Any], text: object) -> Completion:
    """Read a choice's ids, log-probabilities and versions. Raises BadResponse."""
    token_ids = read_token_ids(choice.get("token_ids"), "token_ids")
    logprobs = _logprobs(choice)
    if len(logprobs) != len(token_ids):
        raise BadResponse(
            f"expected one logprob per token id, found {len(logprobs)} for {len(token_ids)} ids"
        )
    versions = choice.get("policy_versions")
    if versions is not None:
        versions = read_token_ids(versions, "policy_versions")
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
    # Our servers' compact list; others ignore that they were asked for it.
    values = choice.get("token_logprobs")
    if values is None:
        logprobs = expect_object(choice.get("logprobs") or {}, "logprobs")
        # of each token a chat has an item in `content`, a plain completion a number in a list
        content, values = logprobs.get("content"), logprobs.get("token_logprobs")
        if content is None and values is None:
            raise BadResponse(
                "the endpoint gave no logprobs: it must honour `logprobs: true` (one per token)"
            )
        if content is not None:
            try:
                values = [item["logprob"] for item in content]
            except (TypeError, KeyError) as error:
                raise BadResponse("expected logprobs.content[].logprob") from error
    wide = _flat(values, "iuf", "logprobs")
    if not fit_logprobs(wide).all():
        raise BadResponse(
            f"expected finite logprobs of at most 0 and at least {LOGPROB_MIN:g}, found "
            f"{wide.min()} to {wide.max()}"
        )
    return wide.astype(np.float32)


def read_token_ids(values: object, name: str) -> Int32[np.ndarray, " T"]:
    """Read a list of ids, called `name` where it is none. Raises BadResponse."""
    if values is None:
        raise BadResponse(
            f"the endpoint gave no {name}: it must honour `return_token_ids: true` (vLLM 0.10.2 or "
            "newer, or marin-rl's own server)"
        )
    wide = _flat(values, "iu", name)
    # In 64 bits: a cast would wrap what does not fit in 32.
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
        # Nested lists have two axes or raise; texts, nulls and booleans have another kind.
        wide = np.asarray(values)
    except ValueError:
        wide = np.zeros((0, 0))
    if wide.ndim != 1 or wide.dtype.kind not in kinds:
        raise BadResponse(f"expected {name} as a flat list of numbers, found {str(values)[:80]}")
    return wide


def _optional(value: object, kind: Any, what: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise BadResponse(f"expected {what} of type {kind}, found {value!r:.80}")
    return value


def read_object(data: bytes) -> Mapping[str, Any]:
    """Read the JSON object that an answer is. Raises BadResponse."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadResponse(f"the answer is not JSON ({error}): {data[:80]!r}") from error
    return expect_object(body, "the answer")


def expect_object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadResponse(f"expected {what} to be an object, found {value!r:.80}")
    return value

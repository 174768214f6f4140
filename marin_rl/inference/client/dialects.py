"""Dialects of endpoints: how a chat request is put to them, and how their answers are read.

OpenAI's chat completions, with token ids or with texts only, and routes from ids to ids: vLLM's
`/inference/v1/generate` and SGLang's `/generate`. Leaves out who is asked and how often
(`policy_client`), and which answers may be trained on (`proofs`).

vLLM serves its route where it is started with `--enable-scale-out`, and `marin-rl serve` always.
Each choice names the weights of its tokens in `weight_versions`, spans `[start, end)` with the
label that the weights had: the one that `inference.publish: vllm_reload` gave them (round and
digest, as in `00012-1a2b3c4d`), a number at servers of our own, or any other text. SGLang's chat
route gives no token ids. Two dialects score the ids of a prompt in place of sampling, for teachers.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from marin_rl.errors import (
    BadResponse,
    BridgeFault,
    EndpointUnavailable,
    NoSuchRoute,
    RequestRejected,
    StalePolicy,
)
from marin_rl.inference.client.answers import (
    ChatAnswer,
    Completion,
    WeightSpan,
    decode_answer,
    decode_completion,
    decode_plain,
    decode_turns,
    expect_object,
    likeliest,
    model_ids,
    read_choices,
    read_object,
    read_tool_calls,
)
from marin_rl.inference.client.http_client import Root
from marin_rl.inference.client.protocol import (
    COMPLETIONS_PATH,
    GENERATE_ROUTE,
    LIKELIEST,
    NO_OPTIONS,
    SGLANG_GENERATE_ROUTE,
    ChatRequest,
    ServedModel,
    TurnsRequest,
    parse_label,
    parse_served_model_id,
    sampling_fields,
)
from marin_rl.inference.stops import first_stop
from marin_rl.types import BEYOND_OPENAI, Message

Read = Callable[[bytes], list[ChatAnswer]]
Send = Callable[[str, dict[str, Any], Read], Awaitable[list[ChatAnswer]]]  # path and body of a POST
Probe = Callable[[str], Awaitable[bytes]]  # path of a GET

# What OpenAI's route does not define; some servers refuse a request that has it.
_EXTENSIONS = (*BEYOND_OPENAI, "return_token_ids", "compact_logprobs", "logprobs", "top_logprobs")
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
        if (texts := request.plain) is not None:
            read = lambda data: [decode_plain(data, texts)]
            (answer,) = await send(request.path, request.body(), read)
            return answer
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
            if part.plain:
                body["logprobs"] = LIKELIEST
            if "seed" in body:
                # The same seed again would give the same texts again.
                body["seed"] += len(completions)
            read = partial(self._read, request=part)
            answers += await send(part.path, body, read)
            completions += answers[-1].completions[:missing]
        return replace(answers[-1], completions=tuple(completions))

    @staticmethod
    def _read(data: bytes, request: ChatRequest) -> list[ChatAnswer]:
        body, choices = read_choices(data)
        completions: list[Completion] = []
        for choice in choices:
            message: Mapping[str, Any] = {"content": choice.get("text")}
            if request.plain is None:
                message = expect_object(choice.get("message"), "a choice's message")
            elif request.plain:
                message = {"content": likeliest(choice, request.plain)}
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


Ids = Int32[np.ndarray, " P"]


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

    def text(self, ids: Sequence[int]) -> str: ...


class TokenIdsDialect(Dialect):
    """Base of routes that take ids: prompts are rendered by `template`, here.

    Each sample is a separate request with its own seed: n samples of one request might share it.
    """

    route: str

    def __init__(self, template: Template) -> None:
        self._template = template

    @abstractmethod
    def body(self, request: ChatRequest, prompt_ids: Ids) -> dict[str, Any]:
        """The JSON body for one sample of a prompt."""

    @abstractmethod
    def read(self, data: bytes, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        """Read one sample. Raises BadResponse."""

    async def answer(self, request: ChatRequest, send: Send) -> ChatAnswer:
        prompt_ids, first = request.prompt_ids, request.sampling.seed
        if request.plain is not None:
            raise RequestRejected(
                "a prompt without the chat template goes to /v1/completions: expected "
                "inference.route chat, or another prompt of the suite"
            )
        if prompt_ids is None:
            options = (request.template_options,) if request.template_options else ()
            try:
                prompt_ids = self._template.prompt(request.messages, request.tools, *options)
            except BridgeFault as error:
                raise RequestRejected(str(error)) from None

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


class VllmDialect(TokenIdsDialect):
    """`/inference/v1/generate`, one sample a request; the template decodes the ids of an answer."""

    route = Root(GENERATE_ROUTE)

    def body(self, request: ChatRequest, prompt_ids: Ids) -> dict[str, Any]:
        parameters = sampling_fields(request.sampling, request.stop_token_ids)
        return {
            "model": request.model,
            "token_ids": prompt_ids.tolist(),
            "sampling_params": parameters | {"logprobs": 0},  # of the sampled tokens
        }

    def read(self, data: bytes, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        body, choices = read_choices(data)
        if len(choices) != 1:
            raise BadResponse(f"expected one choice, found {len(choices)}")
        completion = decode_completion(choices[0], "")
        ids = completion.token_ids.tolist()
        logprobs = (choices[0].get("logprobs") or {}).get("content") or ()
        named = [item.get("token_id") for item in logprobs]
        if named and named != ids:
            raise BadResponse(
                f"expected logprobs of the tokens {', '.join(map(str, ids)):.80}, found those of "
                f"{', '.join(map(str, named)):.80}"
            )
        text = self._template.text(ids)
        completion = replace(
            completion,
            text=text[: first_stop(text, request.sampling.stop)],
            weights=spans_of(choices[0], len(ids)),
        )
        return ChatAnswer(
            model=str(body.get("model") or request.model),
            prompt_token_ids=prompt_ids,
            completions=(completion,),
            request_id=str(body.get("request_id") or ""),
        )

    async def serving(self, name: str, probe: Probe) -> ServedModel:
        # One whose reload failed stays paused, with the label of the weights before.
        if _field(await probe(Root("/is_paused")), "is_paused") is True:
            raise EndpointUnavailable("is paused: new weights are being loaded, or could not be")
        return labelled(str(_field(await probe(Root("/weight_info")), "weight_version")))


def labelled(label: str) -> ServedModel:
    """The checkpoint that a label names. Raises StalePolicy for a label of another make."""
    model = parse_label(label)
    if model is None or not model.digest:
        raise StalePolicy(
            f"names its weights {label!r}, which are none of this run's: it was restarted, and "
            "gets weights with the next checkpoint"
        )
    return model


def _field(data: bytes, name: str) -> object:
    body = read_object(data)
    if name not in body:
        raise BadResponse(f"expected an object with {name}, found {data[:80]!r}")
    return body[name]


def spans_of(choice: Mapping[str, Any], tokens: int) -> tuple[WeightSpan, ...]:
    """The spans of a choice, in order. Raises BadResponse unless they cover its tokens exactly."""
    values = choice.get("weight_versions")
    if not isinstance(values, list):
        raise BadResponse(
            "the endpoint gave no weight_versions, spans of tokens and their weights: expected "
            f"vLLM 0.32 or newer, or marin-rl's own server; found {values!r:.80}"
        )
    spans, end = list[WeightSpan](), 0
    for value in values:
        try:
            label, first, last = value["version"], value["start"], value["end"]
        except (TypeError, KeyError):
            raise BadResponse(
                f"expected weight_versions[] with version, start and end, found {value!r:.80}"
            ) from None
        # `type` and not `isinstance`: a boolean is an int to Python.
        whole = type(label) is str and type(first) is int and type(last) is int
        if not whole or first != end or last <= first:
            raise BadResponse(
                f"expected weight_versions[] of a text and a span of tokens that begins at {end}, "
                f"found {value!r:.80}"
            )
        spans.append(WeightSpan(label, first, last))
        end = last
    if end != tokens:
        raise BadResponse(f"expected weight_versions of all {tokens} tokens, found {end} in them")
    return tuple(spans)


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
        return ChatAnswer(
            model=request.model,  # the route does not name it
            prompt_token_ids=prompt_ids,
            completions=(decode_completion(choice, body.get("text")),),
            request_id=str(meta.get("id") or ""),
            weight_version=_version_in(meta, request.model),
        )


def _version_in(meta: Mapping[str, Any], model: str) -> int | None:
    """Version of SGLang's weights. Raises StalePolicy for another one than a model's id names."""
    # A text, and "default" before any weights were loaded by `inference.publish`.
    label, served = str(meta.get("weight_version") or ""), parse_served_model_id(model)
    version = int(label) if label.isdecimal() else None
    if served is not None and version not in (None, served.weight_version):
        raise StalePolicy(
            f"asked for the model {model!r}, but the endpoint has weights of version {version}"
        )
    return version


class CompletionsScores(TokenIdsDialect):
    """vLLM's `prompt_logprobs` on the route of plain completions, which is ours too.

    The completion of an answer is the prompt, with 0 for its first token, which nothing precedes.
    """

    route = COMPLETIONS_PATH

    def body(self, request: ChatRequest, prompt_ids: Ids) -> dict[str, Any]:
        parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return {"model": request.model, "prompt": prompt_ids.tolist(), **parameters}

    def read(self, data: bytes, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        body, choices = read_choices(data)
        places: Any = choices[0].get("prompt_logprobs")
        try:
            pairs = [*zip(places[1:], map(str, prompt_ids[1:].tolist()), strict=True)]
            logprobs = [place[token]["logprob"] for place, token in pairs]
        except (TypeError, KeyError, ValueError):
            raise _unscored("prompt_logprobs", prompt_ids, places) from None
        return _scores(str(body.get("model") or request.model), prompt_ids, logprobs)


class SGLangScores(SGLangDialect):
    """The same by SGLang's `/generate`, which samples nothing."""

    def body(self, request: ChatRequest, prompt_ids: Ids) -> dict[str, Any]:
        return {
            "input_ids": prompt_ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }

    def read(self, data: bytes, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        meta = expect_object(read_object(data).get("meta_info"), "meta_info")
        triples: Any = meta.get("input_token_logprobs")
        try:
            logprobs, ids = [each[0] for each in triples[1:]], [each[1] for each in triples]
        except (TypeError, IndexError):
            logprobs, ids = [], []
        if ids != prompt_ids.tolist():
            raise _unscored("meta_info.input_token_logprobs", prompt_ids, triples)
        _version_in(meta, request.model)
        return _scores(request.model, prompt_ids, logprobs)


def _unscored(name: str, prompt_ids: Ids, found: object) -> BadResponse:
    shown = f"{len(found)} of them: {found!r:.80}" if isinstance(found, list) else f"{found!r:.80}"
    return BadResponse(f"expected {name} of the {len(prompt_ids)} tokens sent, found {shown}")


def _scores(model: str, prompt_ids: Ids, logprobs: Sequence[object]) -> ChatAnswer:
    """Log-probabilities of all tokens but the first as an answer. Raises BadResponse."""
    choice = {"token_ids": prompt_ids.tolist(), "token_logprobs": [0.0, *logprobs]}
    completion = decode_completion(choice, "")
    return ChatAnswer(model=model, prompt_token_ids=prompt_ids, completions=(completion,))

"""Routes of other model APIs, translated into chat: OpenAI's Responses, Anthropic's Messages.

Owns what a body becomes for the engine, and how an answer's pieces reach the API's writer as they
are sampled: reasoning where the chat template marks it, text, and calls. Leaves out the shapes of
the APIs (`model_apis`).
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

from pydantic_core import from_json

from marin_rl.inference.client.protocol import MESSAGES_ROUTE, RESPONSES_ROUTE
from marin_rl.inference.generation import Delta, GenerationResult, Sample
from marin_rl.model_apis import messages, responses
from marin_rl.model_apis.call import ItemApi, ModelAnswer, ModelCall, Piece, Reasoning, server_sent
from marin_rl.serving.api.completions import Chat
from marin_rl.serving.api.dialect import dumps, tokens_of
from marin_rl.serving.api.requests import ChatBody, CountTokensBody, MessagesBody, ResponsesBody
from marin_rl.serving.api.response_models import MessageObject, ResponseObject
from marin_rl.serving.api.service import Prompt, Service
from marin_rl.serving.http.errors import ApiError, Body, parse
from marin_rl.serving.text.templates import ReasoningStream
from marin_rl.tool_calls import ToolCallStream
from marin_rl.types import ToolCall


def translated(
    api: type[ItemApi], request_model: type[Body], data: bytes
) -> tuple[ModelCall, ChatBody]:
    """The call of a body of `request_model`, and the same for chat. Raises ApiError."""
    parse(request_model, data)  # the fields at its top, with their limits
    asked: Any = from_json(data)
    try:
        call = api.read(asked)
    except ValueError as error:
        raise ApiError(400, f"the request cannot be read: {error}") from None
    return call, parse(ChatBody, dumps(call.chat_body(asked["model"])))


class Translated(Chat):
    """A route whose bodies and answers are those of another API than chat."""

    api: ClassVar[type[ItemApi]]

    def _read(self, data: bytes) -> ChatBody:
        self._call, body = translated(self.api, self.request_model, data)
        return body

    def __init__(self, service: Service, data: bytes) -> None:
        super().__init__(service, data)
        self._text = self._decoding.incremental()
        self._tool_calls = None
        if self._form is not None:
            self._tool_calls = ToolCallStream(self._form, self._parameters)
        self._called = 0
        self._writer: ItemApi | None = None

    def _new_tokens(self, prompt: Prompt) -> int:
        # Clients of these APIs ask for the most that their own models can.
        room = self._service.new_tokens(prompt, None, param=self.param)
        return min(room, self._body.new_tokens_max or room)

    def delta(self, prompt: int, delta: Delta) -> bytes:
        ids, reason = delta.token_ids.tolist(), delta.finish_reason
        text = self._decoding.new_text(self._text, ids, reason)
        writer = self._writer_for(delta)
        events = map(writer.add, self._pieces(text, last=bool(reason)))
        return server_sent(chain.from_iterable(events))

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        (result,) = results
        (sample,) = result.samples
        writer, answer = self._writer_for(result), self._answer(result, sample)
        if self.stream:
            return server_sent(writer.end(answer))
        text = self._decoding.text(sample.token_ids.tolist(), sample.finish_reason)
        for piece in self._pieces(text, last=True):
            writer.add(piece)
        return dumps(writer.body(answer))

    def failure(self, error: ApiError) -> bytes:
        assert self._writer is not None, "its response began"
        return server_sent(self._writer.failed(error.body_of(self.api)))

    def _writer_for(self, source: GenerationResult | Delta) -> ItemApi:
        """The writer of the answer; `source` has the weights that it names."""
        if self._writer is None:
            self._writer = self.api(
                self._call,
                model=self._service.id_of(source),
                prompt_tokens=len(self._prompts[0]),
                created=self._created,
            )
        return self._writer

    @cached_property
    def _reasoning(self) -> ReasoningStream | None:
        form = self._service.reasoning_format
        if form is None:
            return None
        # The end of the prompt, which may have the marker.
        ids = self._prompts[0][-len(form.opening) - 8 :].tolist()
        opening = self._service.detokenizer.of(ids, special=True).rstrip()
        return ReasoningStream(form, inside=opening.endswith(form.opening))

    def _pieces(self, text: str, *, last: bool) -> Iterator[Piece]:
        """Pieces that are certain with more text, the last of which ends the answer."""
        parts, calls = [text], self._tool_calls
        if self._reasoning is not None:
            parts = self._reasoning.feed(text, last=last)
        for part in filter(None, parts):
            if calls is None or isinstance(part, Reasoning):
                yield part
            else:
                yield from self._allowed(calls.feed(part))
        if calls is not None and last:
            yield from self._allowed(calls.finish())

    def _allowed(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._called += isinstance(piece, ToolCall)
            if isinstance(piece, str) or self._called <= (self._calls_max or self._called):
                yield piece

    def _answer(self, result: GenerationResult, sample: Sample) -> ModelAnswer:
        return ModelAnswer(
            prompt_tokens=len(self._prompts[0]),
            completion_tokens=tokens_of([result]),
            cached_tokens=result.cached_tokens,
            cut=sample.finish_reason == "length",
            stop=self._stop_of(sample),
        )

    def _stop_of(self, sample: Sample) -> str | None:
        """The stop string that ended a sample; None where its end token did, or its length."""
        decoding, ids = self._decoding, sample.token_ids.tolist()
        if sample.finish_reason != "stop" or ids[-1] in decoding.stop_token_ids:
            return None
        text = decoding.detokenizer.of(ids, special=decoding.special)
        places = {text.find(stop): stop for stop in decoding.stop if stop in text}
        return places[min(places)] if places else None


class Responses(Translated):
    """POST /v1/responses."""

    path, request_model, response_model = RESPONSES_ROUTE, ResponsesBody, ResponseObject
    summary = "The next items of a conversation, as OpenAI's Responses."
    api, param = responses.Responses, "input"


class Messages(Translated):
    """POST /v1/messages."""

    path, request_model, response_model = MESSAGES_ROUTE, MessagesBody, MessageObject
    summary = "A conversation's next message, as Anthropic's Messages."
    api = messages.AnthropicMessages


def count_tokens(service: Service, data: bytes) -> dict[str, int]:
    """Number of tokens of a conversation, as Anthropic counts them."""
    _, body = translated(messages.AnthropicMessages, CountTokensBody, data)
    service.target(body.model)
    return {"input_tokens": len(service.chat_ids(body.messages, tools=body.offered))}

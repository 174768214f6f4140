"""Dialects: what a route that samples asks of the engine, and how it words the response.

Owns the steps that chat and plain completions have in common. Each route is a class (`chat`,
`completions`, `generate`) and each request an instance of it. Leaves out threads and deadlines
(`request_handler`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from marin_rl.inference.generation import Delta, GenerationRequest, GenerationResult, Sample
from marin_rl.serving.api.requests import SamplingBody
from marin_rl.serving.api.responses import DONE, TextDecoding, complete_response, event, usage
from marin_rl.serving.api.service import Prompt, Service
from marin_rl.serving.http.errors import Body, new_id, parse

B = TypeVar("B", bound=SamplingBody)


class Dialect(ABC):
    """A parsed request for the engine, and the writer of its response.

    Made of a body, on the tokenizing thread; raises ApiError. `model` is the name, or the id of the
    weights, that was asked for. The writing thread calls the methods.
    """

    path: ClassVar[str]
    request_model: ClassVar[type[Body]]
    response_model: ClassVar[type[BaseModel]]
    summary: ClassVar[str]
    may_stream: ClassVar[bool] = False

    model: str
    requests: list[GenerationRequest]
    stream: bool = False

    @abstractmethod
    def __init__(self, service: Service, data: bytes) -> None: ...

    @abstractmethod
    def end(self, results: Sequence[GenerationResult]) -> bytes:
        """The bytes that are sent when every prompt has its samples."""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The bytes of a stream for what a chunk added to a sample; empty if nothing shows yet."""
        raise NotImplementedError


class TextDialect(Dialect, Generic[B]):
    """OpenAI's chat and plain completions, whole or as a stream of chunks."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    may_stream = True

    def __init__(self, service: Service, data: bytes) -> None:
        body: B = parse(self.request_model, data)  # type: ignore[assignment] - each has its own
        self._body, (self.model, self._adapter) = service.checked(body, body.model)
        self.stream, self._service = bool(body.stream), service
        self._id, self._created = f"{self.id_prefix}-{new_id()}", int(time.time())
        self._prompts = self._encoded()
        self._decoding: TextDecoding = service.decoding(self._body)

    @abstractmethod
    def _encoded(self) -> list[Prompt]:
        """Ids of the prompts."""

    @abstractmethod
    def _choice(self, prompt: int, result: GenerationResult, sample: Sample) -> dict[str, Any]:
        """A finished sample, except for its index."""

    def _samples(self, result: GenerationResult) -> Sequence[Sample]:
        return result.samples

    def _more(self, result: GenerationResult) -> dict[str, Any]:
        """Further fields at the top of a response."""
        return {}

    def _unsampled(self, results: Sequence[GenerationResult]) -> bytes:
        """Chunks of samples that had none."""
        return b""

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        if self.stream:
            data = self._unsampled(results)
            if self._body.include_usage:
                counts = usage(self._prompts, results)
                data += event(self._chunk(results[-1], []) | {"usage": counts})
            return data + DONE
        choices: list[dict[str, Any]] = []
        for prompt, result in enumerate(results):
            for sample in self._samples(result):
                choice = self._choice(prompt, result, sample)
                # of the weights that the response names, unless its tokens name others
                older = result.weight_version != results[-1].weight_version
                if older and choice["policy_versions"] is None:
                    choice["policy_versions"] = [result.weight_version] * len(sample.token_ids)
                choices.append({"index": len(choices), **choice})
        top, more = self._top(self.kind, results[-1]), self._more(results[-1])
        return complete_response(top, choices, self._prompts, results, **more)

    def _top(self, kind: str, source: GenerationResult | Delta) -> dict[str, Any]:
        """Fields at the top of a response or chunk; `source` has the weight version."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.id_of(source),
            "system_fingerprint": self._service.fingerprint(source.parameters_digest),
        }

    def _chunk(
        self, source: GenerationResult | Delta, choices: list[dict[str, Any]], **more: Any
    ) -> dict[str, Any]:
        """A chunk of a stream; where usage was asked for, the last one has it."""
        pending = {"usage": None} if self._body.include_usage else {}
        version = {"weight_version": source.weight_version}
        return self._top(self.chunk_kind, source) | pending | version | more | {"choices": choices}

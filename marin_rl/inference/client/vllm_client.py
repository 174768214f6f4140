"""A client for vLLM's own route: ids in, ids, log-probabilities and versions of weights out.

Prompts are sent as ids (`tokens_client`) to `/inference/v1/generate`, which vLLM serves where it is
started with `--enable-scale-out`, and `marin-rl serve` always. The answers of all of these clients
but the last have tokens of one version alone.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from marin_rl.errors import BadResponse, EndpointUnavailable, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer, read_choices
from marin_rl.inference.client.fleet import Member
from marin_rl.inference.client.fleet_client import FleetClient
from marin_rl.inference.client.in_flight_fleet import InFlightFleetClient
from marin_rl.inference.client.policy_client import at_root
from marin_rl.inference.client.protocol import GENERATE_ROUTE, ChatRequest, parse_served_model_id
from marin_rl.inference.client.tokens_client import Ids, TokensClient, each_sample
from marin_rl.inference.client.vllm_protocol import (
    Generated,
    Text,
    decode_generated,
    generate_body,
    parse_label,
    spans_of,
)
from marin_rl.inference.stops import first_stop
from marin_rl.types import Canary


class VllmClient(TokensClient):
    """`TokensClient` over `/inference/v1/generate`; `text_of` decodes the ids of an answer."""

    def __init__(self, *, text_of: Text, **options: Any) -> None:
        super().__init__(**options)
        self._text_of = text_of

    async def _ask_at(
        self, url: str, request: ChatRequest, gate: AbstractAsyncContextManager[Any]
    ) -> ChatAnswer:
        """Answer of one endpoint, asked once for each sample. Raises as `chat` does."""
        prompt_ids = self._prompt_of(request)

        async def ask(single: ChatRequest) -> ChatAnswer:
            body = generate_body(single.model, prompt_ids, single.sampling, single.stop_token_ids)
            data = await self._attempt(url, "POST", GENERATE_ROUTE, body, gate=gate)
            return await self._decoded(data, single, prompt_ids)

        return await each_sample(request, ask)

    async def _sample(self, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        body = generate_body(request.model, prompt_ids, request.sampling, request.stop_token_ids)
        data = await self._send(GENERATE_ROUTE, body, request.session)
        return await self._decoded(data, request, prompt_ids)

    async def _decoded(self, data: bytes, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        def text_of(ids: list[int]) -> str:
            text = self._text_of(ids)
            return text[: first_stop(text, request.sampling.stop)]

        generated = decode_generated(data, request.model, prompt_ids, text_of)
        return await self._identified(generated)

    async def _identified(self, generated: Generated) -> ChatAnswer:
        """The answer, once the weights that it names are those that may answer."""
        self._check_labels(generated.labels)
        return generated.answer

    def _check_labels(self, labels: Sequence[str]) -> None:
        """Raise StalePolicy for tokens of other weights than the model's, or of several."""
        served = parse_served_model_id(self.model)
        if served is None:
            # A name without a version takes any weights, but one set of them.
            wrong = labels[1:]
        else:
            named = {label: parse_label(label) for label in labels}
            wrong = [
                label
                for label, model in named.items()
                if model is None
                or model.weight_version != served.weight_version
                # In labels of our own servers it is empty, with which every digest begins.
                or not served.digest.startswith(model.digest)
            ]
        if wrong:
            raise StalePolicy(
                f"asked for the model {self.model!r}, but tokens were sampled by weights "
                f"{', '.join(map(repr, labels)):.200}: new weights came in between"
            )

    async def _attempt(
        self, url: str, method: str, path: str, body: dict[str, Any] | None, **options: Any
    ) -> bytes:
        if path == GENERATE_ROUTE:  # it is next to /v1, not below it
            path = at_root(url, path)
        return await super()._attempt(url, method, path, body, **options)

    def _advice(self, status: int, route: str) -> str:
        if status == 403 and route.endswith(GENERATE_ROUTE):
            return (
                f"inference.route vllm_generate needs {GENERATE_ROUTE}, which vLLM 0.32 serves "
                "where it is started with --enable-scale-out"
            )
        return super()._advice(status, route)


class VllmFleetClient(FleetClient, VllmClient):
    """`FleetClient` over `/inference/v1/generate`: all tokens are of the weights that were sent."""

    async def _check_sampled(self, member: Member, data: bytes) -> None:
        labels = _labels_in(data)
        if self._weights is not None and labels - {self._weights.label}:
            raise StalePolicy(
                f"expected tokens of weights {self._weights.label!r}, found some of "
                f"{', '.join(map(repr, sorted(labels))):.200}"
            )


class VllmInFlightClient(InFlightFleetClient, VllmClient):
    """`InFlightFleetClient` of vLLM: its labels say the version and digest of each token's weights.

    An endpoint that begins with weights of its own, after a restart, is lost until the trainer has
    sent it a checkpoint.
    """

    probes = False

    async def _identified(self, generated: Generated) -> ChatAnswer:
        """The answer with the version of each token, and the digest of the last one's weights."""
        answer, spans = generated.answer, generated.spans
        if not spans:
            raise EndpointUnavailable("the endpoint answered with no token")
        known = {label: await self._version_in(label) for label in generated.labels}
        versions = np.array(
            [known[s.label] for s in spans for _ in range(s.start, s.end)], np.int32
        )
        (completion,) = answer.completions
        last = int(versions[-1])
        return replace(
            answer,
            completions=(replace(completion, policy_versions=versions),),
            weight_version=last,
            parameters_digest=await self._digest_of(last),
        )

    async def _check_sampled(self, member: Member, data: bytes) -> None:
        labels = _labels_in(data)
        for version in sorted([await self._version_in(label) for label in labels]):
            self._check_version(version)
            await self._prove_version(member, version)

    async def _version_in(self, label: str) -> int:
        """The version that a label names. Raises StalePolicy unless it is a checkpoint's."""
        model = parse_label(label)
        if model is None or not model.digest:
            raise StalePolicy(
                f"names its weights {label!r}, which are none of this run's: it was restarted, and "
                "gets weights with the next checkpoint"
            )
        digest = await self._digest_of(model.weight_version)
        if not digest.startswith(model.digest):
            raise StalePolicy(
                f"expected samples of the parameters {digest[:16]} for version "
                f"{model.weight_version}, found {model.digest}: the endpoint serves other weights "
                "than this run's"
            )
        return model.weight_version

    async def _admit(self, member: Member) -> None:
        await self._check_running(member)  # or the canary would wait
        await super()._admit(member)

    async def _check_ready(self, member: Member) -> None:
        await self._check_running(member)
        await super()._check_ready(member)

    async def _check_running(self, member: Member) -> None:
        # One whose reload failed stays paused, with the label of the weights before.
        data = await self._probe(member, at_root(member.url, "/is_paused"))
        if _field(data, "is_paused") is True:
            raise EndpointUnavailable("is paused: new weights are being loaded, or could not be")

    async def _served(self, member: Member) -> int:
        data = await self._probe(member, at_root(member.url, "/weight_info"))
        version = await self._version_in(str(_field(data, "weight_version")))
        if version < self._version:
            raise StalePolicy(f"serves version {version}, before {self._version}")
        return version

    async def _ask_canary(self, member: Member, canary: Canary, model: str) -> ChatAnswer:
        return await super()._ask_canary(member, canary, self.model)  # all versions have one name


def _labels_in(data: bytes) -> set[str]:
    """The labels of all weights that an answer names. Raises BadResponse."""
    _, choices = read_choices(data)
    counts = [len(ids) if isinstance(ids := each.get("token_ids"), list) else 0 for each in choices]
    spans = map(spans_of, choices, counts)
    return {span.label for of_choice in spans for span in of_choice}


def _field(data: bytes, name: str) -> object:
    try:
        return orjson.loads(data)[name]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise BadResponse(f"expected an object with {name}, found {data[:80]!r}") from error

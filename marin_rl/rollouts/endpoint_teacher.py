"""A teacher behind an endpoint: vLLM, SGLang, or `marin-rl serve`, asked by the one client.

Its identity is the id of its model, which every answer must name where the route does. Leaves out
what is asked about, and the proofs of a teacher (`teaching`).
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.config import Config
from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.client.answers import read_object, read_token_ids
from marin_rl.inference.client.dialects import CompletionsScores, SGLangScores
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import TOKENIZE_ROUTE, is_version_of, parse_served_model_id
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.types import Sampling

Value = TypeVar("Value")


class EndpointTeacher:
    """A teacher that a server has: a `Teacher`. Thread safe; not for a thread with an event loop.

    Methods raise the errors of the client, which name the teacher.
    """

    def __init__(self, config: Config, *, attempts_max: int | None = None) -> None:
        settings, inference = config.distillation, config.inference
        assert settings is not None, "the configuration names a teacher"
        assert settings.endpoint is not None, "the configuration names an endpoint"
        self._endpoint = settings.endpoint.rstrip("/")
        scores = SGLangScores if settings.route == "sglang" else CompletionsScores
        self._dialect = scores(TemplateBridge(config.policy))
        self._options: dict[str, Any] = {
            "api_key": os.environ.get(settings.api_key_variable),
            "timeout_s": inference.request_timeout_s,
            "attempts_max": attempts_max or inference.request_attempts_max,
            "in_flight_max": inference.requests_in_flight_max,
        }
        self.identity = settings.model or ""
        served, wanted = self._ask(PolicyClient.models), settings.model
        fit = [id for id in served if wanted is None or id == wanted or is_version_of(id, wanted)]
        # A name of our own servers stands for whatever version they serve.
        fit = [id for id in fit if parse_served_model_id(id) is not None] or fit
        if len(fit) != 1:
            raise InputError(
                f"distillation: the teacher at {self._endpoint} serves "
                f"{', '.join(served) or 'no model'}: set distillation.model to one of them, found "
                f"{wanted or 'null'}"
            )
        (self.identity,) = fit  # with its version where ids have one

    def score(
        self, sequences: Sequence[Int32[np.ndarray, " _"]], first: Sequence[int]
    ) -> list[Float32[np.ndarray, " _"]]:
        """Log-probabilities of each sequence's tokens from `first` on."""

        async def scored(client: PolicyClient) -> list[Float32[np.ndarray, " _"]]:
            asked = (client.chat((), 1, Sampling(max_tokens=1), prompt_ids=i) for i in sequences)
            return [each.completions[0].logprobs for each in await asyncio.gather(*asked)]

        scores = zip(self._ask(scored), first, strict=True)
        return [logprobs[start:] for logprobs, start in scores]

    def tokenized(self, bodies: Sequence[Mapping[str, Any]]) -> tuple[list[list[int]], int | None]:
        """Ids of texts or messages by the endpoint's tokenizer, and the length of its context.

        Each body is one of /tokenize. Raises BadResponse for an answer without ids.
        """

        async def asked(client: PolicyClient) -> list[Mapping[str, Any]]:
            named = [{"model": self.identity, **body} for body in bodies]
            posts = (client.post_as_admin(self._endpoint, TOKENIZE_ROUTE, each) for each in named)
            return [read_object(data) for data in await asyncio.gather(*posts)]

        answers = self._ask(asked)
        ids = [read_token_ids(answer.get("tokens"), "tokens").tolist() for answer in answers]
        return ids, next((each.get("max_model_len") for each in answers), None)

    def _ask(self, work: Callable[[PolicyClient], Awaitable[Value]]) -> Value:
        """Result of `work` with a client of the endpoint, which belongs to one event loop."""

        async def apart() -> Value:
            async with PolicyClient(
                endpoints=(self._endpoint,),
                model=self.identity,
                dialect=self._dialect,
                **self._options,
            ) as client:
                return await work(client)

        try:
            return asyncio.run(apart())
        except InferenceError as error:
            raise type(error)(f"distillation: the teacher at {self._endpoint}: {error}") from error

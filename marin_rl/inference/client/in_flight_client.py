"""A client of endpoints whose weights change while they answer (`asynchrony.in_flight_updates`).

A request names the model and no version of it, so that it is answered by whichever weights are
loaded, and the answer says the version of every token. Leaves out when weights change.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np

from marin_rl.errors import InputError, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import ChatRequest, parse_served_model_id

Digests = Callable[[int], Awaitable[str]]


class InFlightClient(PolicyClient):
    """`PolicyClient` that takes tokens of `version` and of every later one.

    `digest_of` gives the digest of the parameters that a version must have; it raises StalePolicy
    for a version that there is none of.
    """

    def __init__(
        self, *, name: str, version: int, digest_of: Digests, model: str, **options: Any
    ) -> None:
        super().__init__(model=name, **options)
        self._version, self._digest_of = version, digest_of

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer whose completions have their own policies; the answer itself names none.

        Raises StalePolicy for tokens of another run's policy or of an earlier one, InputError for
        an endpoint that names no versions.
        """
        answer = await super().answer(request)
        version = answer.weight_version
        if version is None or answer.parameters_digest is None:
            raise InputError(
                "asynchrony.in_flight_updates: the endpoint does not answer with the version and "
                "digest of its weights; expected endpoints of `marin-rl serve`, or "
                "in_flight_updates false"
            )
        await self._check_digest(version, answer.parameters_digest)
        completions = [await self._dated(each, version) for each in answer.completions]
        return replace(
            answer, completions=tuple(completions), weight_version=None, parameters_digest=None
        )

    async def _dated(self, completion: Completion, version: int) -> Completion:
        """A completion with the version of each token, and the parameters of its last one."""
        versions = completion.policy_versions
        if versions is None:
            versions = np.full(len(completion.token_ids), version, np.int32)
        self._check_version(int(versions.min(initial=version)))
        last = int(versions[-1]) if len(versions) else version
        constant = bool((versions == self._version).all())
        return replace(
            completion,
            policy_versions=None if constant else versions,
            parameters_digest=await self._digest_of(last),
        )

    async def _check_digest(self, version: int, digest: str) -> None:
        """Raise StalePolicy unless a version of this run has these parameters."""
        expected = await self._digest_of(version)
        if digest != expected:
            raise StalePolicy(
                f"expected samples of the parameters {expected} for version {version}, found "
                f"{digest}: the endpoint serves other weights than this run's"
            )

    def _check_version(self, version: int) -> None:
        """Raise StalePolicy for a version before the one that this client began with."""
        if version < self._version:
            raise StalePolicy(
                f"expected tokens of version {self._version} or later, found some of "
                f"{version}: the endpoint went back to earlier weights"
            )

    def _check(self, answer: ChatAnswer, n: int) -> None:
        served = parse_served_model_id(answer.model)
        name = answer.model if served is None else served.name
        # which version answered is checked by its digest
        super()._check(replace(answer, model=name), n)

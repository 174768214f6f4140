"""A client of a fleet whose weights change while it answers (`asynchrony.in_flight_updates`).

A request names the model and no version of it. An answer is taken once every version that it has
tokens of is proven at the endpoint that gave it: it is a checkpoint of the run, by the digest that
the endpoint names, and the endpoint sampled the canary with it as the trainer scores it. Endpoints
are looked at all the time, so that a version is proven soon after it is loaded; an answer with
tokens of one that was gone before it could be proven is discarded, and asked for again.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from marin_rl.errors import EndpointUnavailable, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer, Completion, named_versions
from marin_rl.inference.client.fleet import Member
from marin_rl.inference.client.fleet_client import FleetClient, compare
from marin_rl.inference.client.in_flight_client import InFlightClient
from marin_rl.inference.client.policy_client import model_ids
from marin_rl.inference.client.protocol import parse_served_model_id, served_model_id
from marin_rl.types import Canary

CanaryOf = Callable[[int], Awaitable[Canary | None]]

_log = logging.getLogger(__name__)


class Unproven(EndpointUnavailable):
    """An endpoint went on to later weights before it was proven to have the right earlier ones."""


class InFlightFleetClient(InFlightClient, FleetClient):
    """`FleetClient` that takes tokens of `version` and of every later one that is proven.

    `canary_of` gives the canary of a version; None as long as the trainer has not proven it.
    Endpoints with an earlier version are lost until they have a later one.
    """

    # A canary behind a queue would often come to its turn after the version that it is to prove.
    probes = True

    def __init__(self, *, canary_of: CanaryOf, **options: Any) -> None:
        super().__init__(**options)
        self._canary_of = canary_of
        self._proven = defaultdict[str, set[int]](set)  # by URL
        self._proving = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def _admit(self, member: Member) -> None:
        """Raise StalePolicy or Unproven unless an endpoint serves a version that is proven."""
        first = member.url in self._proven_by_trainer
        self._proven_by_trainer.discard(member.url)
        self._proven[member.url] = set()  # it may have been restarted with anything
        version = await self._served(member)
        if first and version == self._version:
            self._proven[member.url].add(version)  # by the trainer, just now
        await self._prove_version(member, version)

    async def _check_ready(self, member: Member) -> None:
        """Prove the version that an endpoint has gone on to. Raises StalePolicy for a wrong one."""
        version = await self._served(member)
        # Locked, an answer has begun a proof there, and a look does not wait for it.
        if not self._proving[member.url].locked():
            # The next look proves what it has gone on to, and an answer tries again.
            with suppress(EndpointUnavailable):
                await self._prove_version(member, version)

    async def _check_sampled(self, member: Member, data: bytes) -> None:
        """Raise StalePolicy or Unproven for an answer with tokens of weights that are not proven.

        An answer that names no version is left to `answer`, which refuses it for good.
        """
        version, digest, versions = named_versions(data)
        if version is None or digest is None:
            return
        await self._check_digest(version, digest)
        for each in sorted(versions):
            self._check_version(each)
            await self._prove_version(member, each)

    async def _served(self, member: Member) -> int:
        """The version that an endpoint says it serves, by the digest of the run's checkpoint."""
        ids = model_ids(await self._probe(member, "/models"))
        parsed = [model for model in map(parse_served_model_id, ids) if model is not None]
        own = [model for model in parsed if model.name == self.model]
        if not own:
            shown = ", ".join(sorted(ids)) or "no model"
            raise StalePolicy(f"serves {shown:.200}, and no version of {self.model}")
        served = max(own, key=lambda model: model.weight_version)
        if served.weight_version < self._version:
            raise StalePolicy(f"serves version {served.weight_version}, before {self._version}")
        digest = await self._digest_of(served.weight_version)
        if not digest.startswith(served.digest):
            raise StalePolicy(
                f"serves parameters {served.digest} as version {served.weight_version}, whose "
                f"checkpoint has {digest[:16]}"
            )
        return served.weight_version

    async def _prove_version(self, member: Member, version: int) -> None:
        """Have an endpoint sample the canary by a version, once.

        Raises Unproven where it has gone on to another one, StalePolicy for other weights.
        """
        # One canary at a time: answers that wait here see that their version is proven.
        async with self._proving[member.url]:
            if version in self._proven[member.url]:
                return
            digest = await self._digest_of(version)
            canary = await self._canary_in_time(member, version)
            model = served_model_id(self.model, version, digest)
            try:
                answer = await self._ask_canary(member, canary, model)
            except StalePolicy:
                # The id names a version: a refusal says that another one is loaded by now.
                raise self._unproven(member, version) from None
            self._check(answer, 1)
            await self._check_canary(member, version, answer, canary)
            self._proven[member.url].add(version)

    async def _check_canary(
        self, member: Member, version: int, answer: ChatAnswer, canary: Canary
    ) -> None:
        """Compare the tokens that a version sampled, before later weights came, if any did."""
        if answer.weight_version is None or answer.parameters_digest is None:
            raise StalePolicy("does not name the version and digest of its weights")
        await self._check_digest(answer.weight_version, answer.parameters_digest)
        (completion,) = answer.completions
        count = _tokens_of(version, answer.weight_version, completion)
        if not count:
            raise self._unproven(member, version)
        # Whole, it must have all of the canary's tokens; cut by later weights, the first of them.
        part = slice(count if count < len(completion.token_ids) else None)
        expected = canary.token_ids[part], canary.logprobs[part]
        own = replace(
            completion, token_ids=completion.token_ids[part], logprobs=completion.logprobs[part]
        )
        compare([own], [expected], canary.tolerance)

    async def _canary_in_time(self, member: Member, version: int) -> Canary:
        """The canary of a version, once the trainer has proven that.

        Raises Unproven where the endpoint goes on meanwhile, StalePolicy where the trainer proves
        nothing for `inference.fleet_timeout_s`.
        """
        deadline = time.monotonic() + self._fleet_timeout_s
        while (canary := await self._canary_of(version)) is None:
            if member.state != "ready":
                member.reason = f"serves version {version}, which the trainer has not proven yet"
            if await self._served(member) != version:
                raise self._unproven(member, version)
            if time.monotonic() > deadline:
                raise StalePolicy(
                    f"serves version {version}, which the trainer has not proven for "
                    f"{self._fleet_timeout_s:g} s (inference.fleet_timeout_s)"
                )
            await asyncio.sleep(self._probe_s)
        return canary

    def _unproven(self, member: Member, version: int) -> Unproven:
        _log.info("endpoint %s went on before version %d was proven there", member.url, version)
        return Unproven(
            f"{member.url}: went on to other weights before version {version} was proven there"
        )


def _tokens_of(version: int, named: int, completion: Completion) -> int:
    """Number of a completion's first tokens that `version` sampled; `named` is the answer's."""
    versions = completion.policy_versions
    if versions is None:
        return len(completion.token_ids) if named == version else 0
    others = np.flatnonzero(versions != version)
    return int(others[0]) if len(others) else len(versions)

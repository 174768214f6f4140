"""Proofs that an endpoint samples from the policy that it is asked for.

`PolicyProof` is for rounds of one policy: a request names its weights. `VersionsProof` is for
`asynchrony.in_flight_updates`: a request names the model alone and is answered by whichever weights
are loaded. There an answer is taken once every version that it has tokens of is proven at the
endpoint that gave it: it is a checkpoint of the run, by the digest that the endpoint names, and the
endpoint sampled the canary with it as the trainer scores it. An answer with tokens of a version
that was gone before it could be proven is discarded, and asked for again. Leaves out when endpoints
are looked at (`fleet_watch`).
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from marin_rl.errors import EndpointUnavailable, InputError, StalePolicy
from marin_rl.inference.canary_prompt import CANARY_PROMPT, CANARY_SEED, mean_difference
from marin_rl.inference.client.answers import ChatAnswer, Completion, model_ids
from marin_rl.inference.client.dialects import Dialect
from marin_rl.inference.client.fleet import FleetOptions, Member
from marin_rl.inference.client.protocol import (
    DIGEST_DIGITS,
    ChatRequest,
    parse_served_model_id,
    served_model_id,
)
from marin_rl.inference.client.publishing import Publisher, Send
from marin_rl.inference.client.vllm import labelled
from marin_rl.types import Canary, CanarySample, Sampling

Digests = Callable[[int], Awaitable[str]]
CanaryOf = Callable[[int], Awaitable[Canary | None]]

_log = logging.getLogger(__name__)


@runtime_checkable
class EndpointAccess(Protocol):
    """One endpoint at a time, past the bound on requests in flight. Raises as the client does."""

    @property
    def model(self) -> str: ...
    @property
    def dialect(self) -> Dialect: ...
    @property
    def options(self) -> FleetOptions: ...

    async def probe(self, member: Member, path: str) -> bytes:
        """Answer to a GET."""
        ...

    async def sample(self, member: Member, request: ChatRequest) -> ChatAnswer:
        """Answer to a request, not checked."""
        ...

    def check(self, answer: ChatAnswer, n: int) -> None:
        """Raise StalePolicy or BadResponse for an answer that cannot be trained on."""
        ...

    def sender(self, member: Member) -> Send:
        """Send requests as an admin."""
        ...


class Proof(ABC):
    """Conditions on the endpoints of a client and on their answers.

    Methods raise StalePolicy for other weights, and what `client` raises.
    """

    @abstractmethod
    async def admit(self, client: EndpointAccess, member: Member, *, first: bool) -> None:
        """Prove an endpoint that joins; `first` where the trainer has proven it just now."""

    @abstractmethod
    async def check_ready(self, client: EndpointAccess, member: Member) -> None:
        """Check an endpoint that is ready for what it says that it serves."""

    @abstractmethod
    async def accept(
        self, client: EndpointAccess, member: Member, answer: ChatAnswer
    ) -> ChatAnswer:
        """Return an answer of the endpoint with the policies of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProof(Proof):
    """Proof of one policy: by its id, and by the `canary` where there is one.

    Endpoints that join are sent the `weights` first, where those are sent.
    """

    canary: Canary | None = None
    weights: Publisher | None = None

    async def admit(self, client: EndpointAccess, member: Member, *, first: bool) -> None:
        served = model_ids(await client.probe(member, "/models"))
        if self.weights is not None:
            await _send_weights(client.sender(member), self.weights, member.url, first=first)
            served = model_ids(await client.probe(member, "/models"))
        if client.model not in served:
            shown = ", ".join(sorted(served)) or "no model"
            raise StalePolicy(f"serves {shown:.200}, not {client.model}")
        if self.canary is not None and not first:
            answer = await _ask_canary(client, member, self.canary, client.model)
            client.check(answer, len(self.canary.samples))
            compare(answer.completions, self.canary.samples, self.canary.tolerance)

    async def check_ready(self, client: EndpointAccess, member: Member) -> None:
        if self.weights is not None:
            await self.weights.check(client.sender(member))

    async def accept(
        self, client: EndpointAccess, member: Member, answer: ChatAnswer
    ) -> ChatAnswer:
        labels = {span.label for each in answer.completions for span in each.weights}
        if self.weights is not None and labels - {self.weights.label}:
            raise StalePolicy(
                f"expected tokens of weights {self.weights.label!r}, found some of "
                f"{', '.join(map(repr, sorted(labels))):.200}"
            )
        return answer


async def _send_weights(send: Send, weights: Publisher, url: str, *, first: bool) -> None:
    """Have an endpoint load the weights, unless the trainer has just seen it do so."""
    if first:
        try:
            await weights.check(send)
            return
        except StalePolicy as error:
            _log.warning("endpoint %s %s", url, error)
    await weights.publish(send)


class VersionsProof(Proof):
    """Proof of `version` and of every later one, each by the digest of its checkpoint.

    `digest_of` gives the digest of the parameters that a version must have; it raises StalePolicy
    for a version that there is none of. `canary_of` gives the canary of a version, None as long as
    the trainer has not proven it; without `canary_of` the digest is enough.
    """

    def __init__(
        self, *, version: int, digest_of: Digests, canary_of: CanaryOf | None = None
    ) -> None:
        self._version, self._digest_of, self._canary_of = version, digest_of, canary_of
        self._proven = defaultdict[str, set[int]](set)  # by URL
        self._proving = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def admit(self, client: EndpointAccess, member: Member, *, first: bool) -> None:
        self._proven[member.url] = set()  # it may have been restarted with anything
        version = await self._served(client, member)
        if first and version == self._version:
            self._proven[member.url].add(version)  # by the trainer, just now
        await self._prove(client, member, version)

    async def check_ready(self, client: EndpointAccess, member: Member) -> None:
        version = await self._served(client, member)
        # Locked, an answer has begun a proof there, and a look does not wait for it.
        if not self._proving[member.url].locked():
            # The next look proves what it has gone on to, and an answer tries again.
            with suppress(EndpointUnavailable):
                await self._prove(client, member, version)

    async def accept(
        self, client: EndpointAccess, member: Member, answer: ChatAnswer
    ) -> ChatAnswer:
        """As the base, and raises InputError for an endpoint that names no versions."""
        answer = await self._dated(client, answer)
        version, digest = answer.weight_version, answer.parameters_digest
        if version is None or digest is None:
            raise InputError(
                "asynchrony.in_flight_updates: the endpoint does not answer with the version and "
                "digest of its weights; expected endpoints of `marin-rl serve`, or "
                "in_flight_updates false"
            )
        await self._check_digest(version, digest)
        versions = [_versions_of(each, version) for each in answer.completions]
        for each in sorted({int(token) for own in versions for token in own} or {version}):
            self._check_version(each)
            await self._prove(client, member, each)
        completions = [
            replace(
                completion,
                policy_versions=None if (own == self._version).all() else own,
                parameters_digest=await self._digest_of(int(own[-1]) if len(own) else version),
            )
            for completion, own in zip(answer.completions, versions, strict=True)
        ]
        return replace(
            answer, completions=tuple(completions), weight_version=None, parameters_digest=None
        )

    async def _dated(self, client: EndpointAccess, answer: ChatAnswer) -> ChatAnswer:
        """The answer under the model's plain name, with versions in place of vLLM's labels."""
        served = parse_served_model_id(answer.model)
        # which version answered is checked by its digest
        answer = replace(answer, model=answer.model if served is None else served.name)
        completions, last = list[Completion](), answer.weight_version
        for completion in answer.completions:
            if completion.weights:
                named = [(labelled(span.label), span) for span in completion.weights]
                for model, _ in named:
                    await self._check_digest(model.weight_version, model.digest, DIGEST_DIGITS)
                tokens = [m.weight_version for m, s in named for _ in range(s.start, s.end)]
                completion = replace(
                    completion, policy_versions=np.array(tokens, np.int32), weights=()
                )
                last = tokens[-1]
            completions.append(completion)
        if answer.weight_version is None and not client.dialect.names_versions:
            if last is None:
                raise EndpointUnavailable("the endpoint answered with no token")
            answer = replace(answer, parameters_digest=await self._digest_of(last))
        return replace(answer, completions=tuple(completions), weight_version=last)

    async def _served(self, client: EndpointAccess, member: Member) -> int:
        """The version that an endpoint says it serves, by the digest of the run's checkpoint."""
        served = await client.dialect.serving(client.model, partial(client.probe, member))
        if served.weight_version < self._version:
            raise StalePolicy(f"serves version {served.weight_version}, before {self._version}")
        await self._check_digest(served.weight_version, served.digest, DIGEST_DIGITS)
        return served.weight_version

    async def _check_digest(self, version: int, digest: str, digits: int | None = None) -> None:
        """Raise StalePolicy unless a version of this run has these parameters."""
        expected = (await self._digest_of(version))[:digits]
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

    async def _prove(self, client: EndpointAccess, member: Member, version: int) -> None:
        """Have an endpoint sample the canary by a version, once.

        Raises EndpointUnavailable where it has gone on to another one, StalePolicy for other
        weights.
        """
        if self._canary_of is None:
            return
        # One canary at a time: answers that wait here see that their version is proven.
        async with self._proving[member.url]:
            if version in self._proven[member.url]:
                return
            canary = await self._canary_in_time(client, member, self._canary_of, version)
            model = client.model  # of vLLM, where all versions have one name
            if client.dialect.names_versions:
                model = served_model_id(model, version, await self._digest_of(version))
            try:
                answer = await _ask_canary(client, member, canary, model, probe=True)
            except StalePolicy:
                # The id names a version: a refusal says that another one is loaded by now.
                raise _unproven(member, version) from None
            answer = await self._dated(client, answer)
            client.check(answer, 1)
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
        others = np.flatnonzero(_versions_of(completion, answer.weight_version) != version)
        count = int(others[0]) if len(others) else len(completion.token_ids)
        if not count:
            raise _unproven(member, version)
        # Whole, it must have all of the canary's tokens; cut by later weights, the first of them.
        part = slice(count if count < len(completion.token_ids) else None)
        expected = canary.token_ids[part], canary.logprobs[part]
        own = replace(
            completion, token_ids=completion.token_ids[part], logprobs=completion.logprobs[part]
        )
        compare([own], [expected], canary.tolerance)

    async def _canary_in_time(
        self, client: EndpointAccess, member: Member, canary_of: CanaryOf, version: int
    ) -> Canary:
        """The canary of a version, once the trainer has proven that.

        Raises EndpointUnavailable where the endpoint goes on meanwhile, StalePolicy where the
        trainer proves nothing for `inference.fleet_timeout_s`.
        """
        options = client.options
        deadline = time.monotonic() + options.timeout_s
        while (canary := await canary_of(version)) is None:
            if member.state != "ready":
                member.reason = f"serves version {version}, which the trainer has not proven yet"
            if await self._served(client, member) != version:
                raise _unproven(member, version)
            if time.monotonic() > deadline:
                raise StalePolicy(
                    f"serves version {version}, which the trainer has not proven for "
                    f"{options.timeout_s:g} s (inference.fleet_timeout_s)"
                )
            await asyncio.sleep(options.probe_s)
        return canary


def _versions_of(completion: Completion, version: int) -> Int32[np.ndarray, " T"]:
    """The version of each token; `version` is the answer's."""
    if completion.policy_versions is not None:
        return completion.policy_versions
    return np.full(len(completion.token_ids), version, np.int32)


def _unproven(member: Member, version: int) -> EndpointUnavailable:
    _log.info("endpoint %s went on before version %d was proven there", member.url, version)
    return EndpointUnavailable(
        f"{member.url}: went on to other weights before version {version} was proven there"
    )


async def _ask_canary(
    client: EndpointAccess, member: Member, canary: Canary, model: str, *, probe: bool = False
) -> ChatAnswer:
    """An endpoint's answer to the canary by the weights with this id.

    With `probe` it goes before others: behind a queue it would often come to its turn after the
    version that it is to prove. An endpoint of another kind may know no such requests.
    """
    longest = max(len(ids) for ids, _ in canary.samples)
    request = ChatRequest(
        model=model,
        messages=CANARY_PROMPT,
        n=len(canary.samples),
        sampling=Sampling(temperature=canary.temperature, max_tokens=longest, seed=CANARY_SEED),
        probe=probe,
    )
    # In the time of a request: an endpoint may have a queue, where it waits as any other.
    return await client.sample(member, request)


def compare(
    completions: Sequence[Completion], samples: Sequence[CanarySample], tolerance: float
) -> None:
    """Raise StalePolicy unless completions have the canary's tokens with the trainer's numbers.

    Where rounding alone makes an endpoint draw another token than the trainer's did, what comes
    after that is not compared: half of all tokens must be the same.
    """
    expected, measured = list[float](), list[float]()
    for completion, (ids, logprobs) in zip(completions, samples, strict=True):
        same = _common_prefix(completion.token_ids.tolist(), ids)
        expected += logprobs[:same]
        measured += completion.logprobs[:same].tolist()
    if 2 * len(expected) < sum(len(ids) for ids, _ in samples):
        raise StalePolicy(
            f"samples other tokens for the canary: expected {[list(ids) for ids, _ in samples]}, "
            f"found {[completion.token_ids.tolist() for completion in completions]}: other "
            "weights, or numbers of another machine; the next round proves it by itself"
        )
    gap = mean_difference(np.asarray(expected), np.asarray(measured))
    if not gap <= tolerance:
        raise StalePolicy(
            f"expected the trainer's log-probabilities of the canary, found them {gap:.6f} nats "
            f"apart on average, above inference.canary_tolerance ({tolerance:g})"
        )


def _common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """Number of first tokens that are the same."""
    pairs = zip(ids, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

"""Proofs that an endpoint samples from the policy that it is asked for.

`PolicyProof` is for rounds of one policy: a request names its weights. `VersionsProof` is for
`asynchrony.in_flight_updates`: a request names only the model and is answered by whichever weights
are loaded. There an answer is taken once every version that it has tokens of is proven at the
endpoint that gave it: it is a checkpoint of the run, by the digest that the endpoint names, and the
endpoint sampled the canary with it as the trainer scores it. An answer with tokens of a version
that was gone before it could be proven is discarded, and asked for again.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from jaxtyping import Float, Int32

from marin_rl.errors import BadResponse, EndpointUnavailable, InputError, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer, Completion, model_ids
from marin_rl.inference.client.dialects import labelled
from marin_rl.inference.client.fleet_watch import EndpointAccess, Proof
from marin_rl.inference.client.protocol import (
    DIGEST_DIGITS,
    ChatRequest,
    parse_label,
    parse_served_model_id,
    served_model_id,
)
from marin_rl.inference.client.publishing import Publisher
from marin_rl.types import Canary, CanarySample, Message, Sampling

Digests = Callable[[int], Awaitable[str]]
CanaryOf = Callable[[int], Awaitable[Canary | None]]

_log = logging.getLogger(__name__)

CANARY_PROMPT = (Message(role="user", content="Which policy are you?"),)
CANARY_SEED = 20_240_229
# A mean over few tokens is less steady: it counts this number of further ones without a difference.
EXACT_TOKENS = 4
PROBE_TOKENS = 16  # that servers accept of a probe


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySize:
    """Samples of the canary, and tokens of each at most; a `probe` goes before waiting requests.

    Several samples cost an engine no more steps than one, and give tokens enough also where a
    policy ends after one or two.
    """

    samples: int = 8
    tokens: int = 4
    probe: bool = False


CANARY = CanarySize()


def mean_difference(expected: Float[np.ndarray, " N"], measured: Float[np.ndarray, " N"]) -> float:
    """Sum of |difference| of log-probabilities over N + EXACT_TOKENS, in nats; NaN if one is."""
    return float(np.abs(measured - expected).sum() / (len(expected) + EXACT_TOKENS))


def check_answer(answer: ChatAnswer, model: str, n: int) -> None:
    """Raise StalePolicy or BadResponse for an answer that cannot be trained on."""
    # The id has the digest of the weights: tokens of others are never trained on as this policy's.
    if answer.model != model:
        raise StalePolicy(
            f"asked for the model {model!r}, but the answer is from {answer.model!r}: "
            "the endpoint serves other weights than this round's"
        )
    # A short group would shift the baseline of its other members.
    if len(answer.completions) != n:
        raise BadResponse(f"expected {n} completions, found {len(answer.completions)}")
    if not len(answer.prompt_token_ids):
        raise BadResponse("expected the ids of the prompt, found none")
    for completion in answer.completions:
        _check_labels(model, [span.label for span in completion.weights])


def _check_labels(model: str, labels: Sequence[str]) -> None:
    """Raise StalePolicy for tokens of other weights than a model's, or of several."""
    labels, served = list(dict.fromkeys(labels)), parse_served_model_id(model)
    if served is None:
        # A name without a version takes any weights, but one set of them.
        wrong = labels[1:]
    else:
        named = {label: parse_label(label) for label in labels}
        wrong = [
            label
            for label, weights in named.items()
            if weights is None
            or weights.weight_version != served.weight_version
            # In labels of our own servers it is empty, with which every digest begins.
            or not served.digest.startswith(weights.digest)
        ]
    if wrong:
        raise StalePolicy(
            f"asked for the model {model!r}, but tokens were sampled by weights "
            f"{', '.join(map(repr, labels)):.200}: new weights came in between"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProof(Proof):
    """Proof of one policy: by its id, and by the `canary` where there is one.

    Endpoints that join are sent the `weights` first, where those are sent.
    """

    canary: Canary | None = None
    weights: Publisher | None = None

    async def admit(self, endpoint: EndpointAccess, *, first: bool) -> None:
        if self.weights is not None:
            send, loaded = endpoint.send_as_admin, first
            if first:  # the trainer has seen it load them, but it may have been restarted since
                try:
                    await self.weights.check(send)
                except StalePolicy as error:
                    _log.warning("endpoint %s %s", endpoint.url, error)
                    loaded = False
            if not loaded:
                await self.weights.publish(send)
        served = model_ids(await endpoint.probe("/models"))
        if endpoint.model not in served:
            shown = ", ".join(sorted(served)) or "no model"
            raise StalePolicy(f"serves {shown:.200}, not {endpoint.model}")
        if self.canary is not None and not first:
            answer = await _ask_canary(endpoint, self.canary, endpoint.model)
            check_answer(answer, endpoint.model, len(self.canary.samples))
            compare(answer.completions, self.canary.samples, self.canary.tolerance)

    async def check_ready(self, endpoint: EndpointAccess) -> None:
        if self.weights is not None:
            await self.weights.check(endpoint.send_as_admin)

    async def accept(self, endpoint: EndpointAccess, answer: ChatAnswer) -> ChatAnswer:
        labels = {span.label for each in answer.completions for span in each.weights}
        if self.weights is not None and labels - {self.weights.label}:
            raise StalePolicy(
                f"expected tokens of weights {self.weights.label!r}, found some of "
                f"{', '.join(map(repr, sorted(labels))):.200}"
            )
        return answer


class VersionsProof(Proof):
    """Proof of `version` and of every later one, each by the digest of its checkpoint.

    `digest_of` gives the digest of the parameters that a version must have; it raises StalePolicy
    for an unknown version. `canary_of` gives the canary of a version, None as long as
    the trainer has not proven it; without `canary_of` the digest is enough.
    """

    def __init__(
        self, *, version: int, digest_of: Digests, canary_of: CanaryOf | None = None
    ) -> None:
        self._version, self._digest_of, self._canary_of = version, digest_of, canary_of
        self._proven = defaultdict[str, set[int]](set)  # by URL
        self._proving = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def admit(self, endpoint: EndpointAccess, *, first: bool) -> None:
        self._proven[endpoint.url] = set()  # it may have been restarted with anything
        version = await self._served(endpoint)
        if first and version == self._version:
            self._proven[endpoint.url].add(version)  # by the trainer, just now
        await self._prove(endpoint, version)

    async def check_ready(self, endpoint: EndpointAccess) -> None:
        version = await self._served(endpoint)
        # Locked, an answer has begun a proof there, and a look does not wait for it.
        if not self._proving[endpoint.url].locked():
            # The next look proves its newer version, and an answer tries again.
            with suppress(EndpointUnavailable):
                await self._prove(endpoint, version)

    async def accept(self, endpoint: EndpointAccess, answer: ChatAnswer) -> ChatAnswer:
        answer = await self._dated(endpoint, answer)
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
            if each < self._version:
                raise StalePolicy(
                    f"expected tokens of version {self._version} or later, found some of {each}: "
                    "the endpoint went back to earlier weights"
                )
            await self._prove(endpoint, each)
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

    async def _dated(self, endpoint: EndpointAccess, answer: ChatAnswer) -> ChatAnswer:
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
        if answer.weight_version is None and not endpoint.dialect.names_versions:
            if last is None:
                raise EndpointUnavailable("the endpoint answered with no token")
            answer = replace(answer, parameters_digest=await self._digest_of(last))
        return replace(answer, completions=tuple(completions), weight_version=last)

    async def _served(self, endpoint: EndpointAccess) -> int:
        """The version that an endpoint says it serves, by the digest of the run's checkpoint."""
        served = await endpoint.dialect.serving(endpoint.model, endpoint.probe)
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

    async def _prove(self, endpoint: EndpointAccess, version: int) -> None:
        """Have an endpoint sample the canary by a version, once.

        Raises EndpointUnavailable where it has gone on to another, StalePolicy for other weights.
        """
        if self._canary_of is None:
            return
        # One canary at a time: answers that wait here see that their version is proven.
        async with self._proving[endpoint.url]:
            if version in self._proven[endpoint.url]:
                return
            canary = await self._canary_in_time(endpoint, self._canary_of, version)
            model = endpoint.model  # of vLLM, where all versions have one name
            if endpoint.dialect.names_versions:
                model = served_model_id(model, version, await self._digest_of(version))
            try:
                answer = await _ask_canary(endpoint, canary, model, probe=True)
            except StalePolicy:
                # The id names a version: a refusal says that another one is loaded by now.
                raise _unproven(endpoint.url, version) from None
            answer = await self._dated(endpoint, answer)
            check_answer(answer, endpoint.model, 1)
            await self._check_canary(endpoint.url, version, answer, canary)
            self._proven[endpoint.url].add(version)

    async def _check_canary(
        self, url: str, version: int, answer: ChatAnswer, canary: Canary
    ) -> None:
        """Compare the tokens that a version sampled, before later weights came, if any did."""
        if answer.weight_version is None or answer.parameters_digest is None:
            raise StalePolicy("does not name the version and digest of its weights")
        await self._check_digest(answer.weight_version, answer.parameters_digest)
        (completion,) = answer.completions
        others = np.flatnonzero(_versions_of(completion, answer.weight_version) != version)
        count = int(others[0]) if len(others) else len(completion.token_ids)
        if not count:
            raise _unproven(url, version)
        # Whole, it must have all of the canary's tokens; cut by later weights, the first of them.
        part = slice(count if count < len(completion.token_ids) else None)
        expected = canary.token_ids[part], canary.logprobs[part]
        own = replace(
            completion, token_ids=completion.token_ids[part], logprobs=completion.logprobs[part]
        )
        compare([own], [expected], canary.tolerance)

    async def _canary_in_time(
        self, endpoint: EndpointAccess, canary_of: CanaryOf, version: int
    ) -> Canary:
        """The canary of a version, once the trainer has proven that.

        Raises EndpointUnavailable where the endpoint goes on meanwhile, StalePolicy where the
        trainer proves nothing for `inference.fleet_timeout_s`.
        """
        options = endpoint.options
        deadline = time.monotonic() + options.timeout_s
        while (canary := await canary_of(version)) is None:
            if endpoint.member.state != "ready":
                endpoint.member.reason = (
                    f"serves version {version}, which the trainer has not proven yet"
                )
            if await self._served(endpoint) != version:
                raise _unproven(endpoint.url, version)
            if time.monotonic() > deadline:
                raise StalePolicy(
                    f"serves version {version}, which the trainer has not proven for "
                    f"{options.timeout_s:g} s (inference.fleet_timeout_s)"
                )
            await asyncio.sleep(options.probe_s)
        return canary


def _versions_of(completion: Completion, version: int) -> Int32[np.ndarray, " T"]:
    if completion.policy_versions is not None:
        return completion.policy_versions
    return np.full(len(completion.token_ids), version, np.int32)


def _unproven(url: str, version: int) -> EndpointUnavailable:
    _log.info("endpoint %s went on before version %d was proven there", url, version)
    return EndpointUnavailable(
        f"{url}: went on to other weights before version {version} was proven there"
    )


async def _ask_canary(
    endpoint: EndpointAccess, canary: Canary, model: str, *, probe: bool = False
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
    return await endpoint.dialect.answer(request, endpoint.post)


def compare(
    completions: Sequence[Completion], samples: Sequence[CanarySample], tolerance: float
) -> None:
    """Raise StalePolicy unless completions have the canary's tokens with the trainer's numbers.

    Where rounding alone makes an endpoint draw another token than the trainer's did, what comes
    after that is not compared: half of all tokens must be the same.
    """
    expected, measured = list[float](), list[float]()
    for completion, (ids, logprobs) in zip(completions, samples, strict=True):
        pairs = zip(completion.token_ids.tolist(), ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
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

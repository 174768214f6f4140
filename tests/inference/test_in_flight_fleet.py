"""A fleet whose weights change within answers: which tokens are taken, and of whom."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from support.fakes import FakePolicyServer, logprob_of
from support.servers import wait_until

from marin_rl.errors import FleetEmpty, InputError, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.fleet import FleetOptions
from marin_rl.inference.client.fleet_sources import Endpoint, EndpointSource
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.proofs import CanaryOf, VersionsProof
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.types import Canary, Message, Sampling

FIRST = 2
DIGESTS = {version: f"{version}" * 64 for version in range(1, 6)}
CANARY = Canary(temperature=1.0, token_ids=(97,), logprobs=(logprob_of(97, 0),), tolerance=1e-3)
WRONG = Canary(temperature=1.0, token_ids=(97,), logprobs=(-9.0,), tolerance=1e-3)
MESSAGES = (Message(role="user", content="ab"),)
SAMPLING = Sampling(max_tokens=8, seed=1)

Use = Callable[[PolicyClient], Awaitable[Any]]


async def digest_of(version: int) -> str:
    if version not in DIGESTS:
        raise StalePolicy(f"version {version} is no checkpoint of this run")
    return DIGESTS[version]


class Changing(FakePolicyServer):
    """A server of versions: answers "abc" and an end, and names the origin that a test sets.

    `mixes` are the versions of the tokens of its next answers; `after` is called with each request
    for a completion, when that is answered.
    """

    def __init__(self, version: int = FIRST) -> None:
        super().__init__("", lambda _text, _seed: "abc")
        self.aliases = ("policy",)
        self.mixes = deque[Sequence[int]]()
        self.after: Callable[[], None] = lambda: None
        self.serve(version)

    def serve(self, version: int) -> None:
        """Go on to other weights."""
        digest = DIGESTS.get(version, "f" * 64)
        self.model = served_model_id("policy", version, digest)
        self.extra = {"weight_version": version, "parameters_digest": digest}

    def answer(self, body: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
        answer = super().answer(body, fault)
        if not is_canary(body):
            if self.mixes:
                versions = self.mixes.popleft()
                for choice in answer["choices"]:
                    choice["policy_versions"] = list(versions)
            self.after()
        return answer

    @property
    def canaries(self) -> list[str]:
        """The weights that it was asked for the canary by, in order."""
        return [body["model"].partition("-")[0] for body in self.requests if is_canary(body)]

    @property
    def completions(self) -> int:
        """Requests for other completions."""
        return sum(not is_canary(body) for body in self.requests)


def is_canary(body: Mapping[str, Any]) -> bool:
    """True for the request of a proof, which names a version."""
    return body["model"] != "policy"


async def proven(_version: int) -> Canary | None:
    return CANARY


def ask(
    servers: Sequence[Changing],
    use: Use,
    *,
    canary_of: CanaryOf = proven,
    fleet_timeout_s: float = 30.0,
    probe_s: float = 0.02,
    **options: Any,
) -> Any:
    """Result of `use` for a client of some servers, which the trainer proved with version 2."""

    async def run() -> Any:
        source: dict[str, Any] = {"source": EndpointSource([server.url for server in servers])}
        client = PolicyClient(
            model="policy",
            fleet=FleetOptions(probe_s=probe_s, timeout_s=fleet_timeout_s),
            proof=VersionsProof(version=FIRST, digest_of=digest_of, canary_of=canary_of),
            **(source | options),
        )
        async with client:
            return await use(client)

    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        return asyncio.run(run())


async def one(client: PolicyClient) -> Completion:
    answer: ChatAnswer = await client.chat(MESSAGES, 1, SAMPLING)
    assert (answer.weight_version, answer.parameters_digest) == (None, None)
    return answer.completions[0]


def canary_for(wrong: int) -> Callable[[int], Awaitable[Canary | None]]:
    """Canaries of which that of version `wrong` contradicts what servers sample."""

    async def canary_of(version: int) -> Canary | None:
        return WRONG if version == wrong else CANARY

    return canary_of


def test_tokens_of_versions_that_are_proven_are_taken_with_their_versions() -> None:
    server = Changing()

    async def use(client: PolicyClient) -> list[Completion]:
        first = await one(client)
        server.after = lambda: server.serve(3)  # in the middle of the next answer
        server.mixes.append([2, 2, 2, 2])
        second = await one(client)
        server.after = lambda: None
        server.mixes.append([2, 3, 3, 3])
        return [first, second, await one(client)]

    first, second, mixed = ask([server], use)
    assert (first.policy_versions, second.policy_versions) == (None, None)
    assert (first.parameters_digest, second.parameters_digest) == (DIGESTS[2], DIGESTS[2])
    assert mixed.policy_versions.tolist() == [2, 3, 3, 3]
    assert mixed.parameters_digest == DIGESTS[3]
    assert server.canaries == ["policy@00002", "policy@00003"], "once for each version"
    assert server.completions == 3


def test_a_version_that_the_trainer_has_just_proven_is_not_proven_again() -> None:
    server = Changing()

    async def use(client: PolicyClient) -> None:
        await one(client)
        server.serve(3)
        await one(client)

    ask([server], use, endpoints=[server.url])
    assert server.canaries == ["policy@00003"]


def test_wrong_weights_under_the_right_name_lose_the_endpoint_and_nothing_else() -> None:
    wrong, right = Changing(), Changing(3)

    async def use(client: PolicyClient) -> list[Completion]:
        await client.wait_until_ready()
        wrong.serve(3)
        wrong.mixes.extend([[2, 3, 3, 3]] * 8)
        wrong.script = lambda _text, _seed: "xyz"  # no longer the canary's token
        return await asyncio.gather(*[one(client) for _ in range(8)])

    completions = ask([wrong, right], use, endpoints=[wrong.url])
    assert len(completions) == 8
    assert {bytes(c.token_ids[:-1].astype("uint8")) for c in completions} == {b"abc"}
    assert {c.parameters_digest for c in completions} == {DIGESTS[3]}
    assert "policy@00003" in wrong.canaries


def test_a_fleet_of_wrong_weights_is_one_error_that_says_so() -> None:
    with pytest.raises(FleetEmpty, match="trainer's log-probabilities of the canary") as caught:
        ask([Changing()], one, canary_of=canary_for(FIRST), fleet_timeout_s=0.5)
    assert not caught.value.transient


@pytest.mark.parametrize(
    ("version", "digest", "message"),
    [
        (9, None, "version 9 is no checkpoint of this run"),
        (3, "4" * 64, "for version 3, found 444"),
        (1, None, "expected tokens of version 2 or later, found some of 1"),
    ],
)
def test_an_answer_of_weights_that_are_none_of_the_run_loses_its_endpoint(
    version: int, digest: str | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is answered by another endpoint."""
    other, honest = Changing(), Changing()

    async def use(client: PolicyClient) -> list[Completion]:
        await client.wait_until_ready()
        named = {"weight_version": version, "parameters_digest": digest or DIGESTS.get(version, "")}
        other.extra = named
        return await asyncio.gather(*[one(client) for _ in range(4)])

    completions = ask([other, honest], use, probe_s=5.0, endpoints=[other.url, honest.url])
    assert {c.parameters_digest for c in completions} == {DIGESTS[FIRST]}
    assert honest.completions == 4
    assert message in caplog.text


def test_an_endpoint_that_lags_behind_is_left_out_until_it_has_the_version() -> None:
    slow, quick = Changing(1), Changing()

    async def use(client: PolicyClient) -> None:
        for _ in range(4):
            await one(client)
        assert slow.requests == []
        slow.serve(FIRST)
        await asyncio.to_thread(wait_until, lambda: len(client._watch.fleet.ready) == 2)

    ask([slow, quick], use)
    assert slow.canaries == ["policy@00002"]


def test_an_answer_waits_until_the_trainer_has_proven_its_version() -> None:
    server, proven, asked_for = Changing(), {FIRST: CANARY}, list[int]()

    async def canary_of(version: int) -> Canary | None:
        asked_for.append(version)
        return proven.get(version)

    async def use(client: PolicyClient) -> Completion:
        await one(client)
        server.serve(3)
        server.mixes.append([2, 3, 3, 3])
        call = asyncio.create_task(one(client))
        await asyncio.to_thread(wait_until, lambda: asked_for.count(3) > 3)
        assert not call.done()
        assert server.canaries == ["policy@00002"]
        proven[3] = CANARY
        return await call

    versions = ask([server], use, canary_of=canary_of).policy_versions
    assert versions.tolist() == [2, 3, 3, 3]
    assert server.canaries == ["policy@00002", "policy@00003"]
    assert server.completions == 2, "nothing was asked twice"


def test_a_version_that_the_trainer_does_not_prove_is_waited_for_within_bounds(caplog):
    server = Changing()

    async def canary_of(version: int) -> Canary | None:
        return CANARY if version == FIRST else None

    async def use(client: PolicyClient) -> Completion:
        await one(client)
        server.serve(3)
        return await one(client)

    # The same bound for both: on a busy machine the endpoint is lost before the wait ends.
    unproven = "serves version 3, which the trainer has not proven (yet|for 0.3 s)"
    with pytest.raises(FleetEmpty, match=unproven):
        ask([server], use, canary_of=canary_of, fleet_timeout_s=0.3)
    assert "has not proven for 0.3 s" in caplog.text


def test_tokens_of_a_version_that_was_gone_before_its_proof_are_sampled_again() -> None:
    server = Changing()

    async def use(client: PolicyClient) -> Completion:
        await one(client)
        server.serve(4)  # and version 3 came and went between two looks
        server.mixes.append([2, 3, 4, 4])
        return await one(client)

    completion = ask([server], use)
    assert completion.policy_versions.tolist() == [4, 4, 4, 4]
    assert server.completions == 3
    assert "policy@00003" in server.canaries, "it was asked for, and is gone"


def test_an_endpoint_that_names_no_version_is_left_out() -> None:
    """A server of another kind may have the name, and cannot say whose tokens it sampled."""
    server = Changing()
    server.model = "policy"
    with pytest.raises(FleetEmpty, match="serves policy, and no version of policy"):
        ask([server], one, fleet_timeout_s=0.5)
    named = Changing()
    named.extra = {}
    with pytest.raises(InputError, match="does not answer with the version and digest"):
        ask([named], one, endpoints=[named.url])


def test_a_restarted_endpoint_is_proven_again() -> None:
    server, state = Changing(), {"there": True}

    class Source(EndpointSource):
        def resolve(self) -> list[Endpoint]:
            return [Endpoint(url=server.url)] if state["there"] else []

    async def use(client: PolicyClient) -> None:
        await one(client)
        state["there"] = False
        await asyncio.to_thread(wait_until, lambda: not client._watch.fleet.members)
        state["there"] = True
        await one(client)

    ask([server], use, source=Source([server.url]))
    assert server.canaries == ["policy@00002", "policy@00002"]

"""Answers of endpoints whose weights change while they answer, and what is not taken for one."""

import asyncio
from typing import Any

import pytest
from support.fakes import FakePolicyServer

from marin_rl.errors import InputError, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.proofs import VersionsProof
from marin_rl.types import Message, Sampling

DIGESTS = {version: f"{version}" * 64 for version in range(1, 4)}


async def digest_of(version: int) -> str:
    if version not in DIGESTS:
        raise StalePolicy(f"no checkpoint {version}")
    return DIGESTS[version]


def asked(version: int | None, *, digest: str | None = None, first: int = 2) -> ChatAnswer:
    """The answer of a server of weights `version` to a client of policy `first` and later ones."""
    named: dict[str, Any] = {"weight_version": version, "parameters_digest": digest}
    with FakePolicyServer("policy") as server:
        server.extra = {} if version is None else named

        async def ask() -> ChatAnswer:
            client = PolicyClient(
                model="policy",
                endpoints=[server.url],
                proof=VersionsProof(version=first, digest_of=digest_of),
            )
            async with client:
                messages = [Message(role="user", content="ab")]
                return await client.chat(messages, 2, Sampling(max_tokens=8, seed=1))

        answer = asyncio.run(ask())
        assert {body["model"] for body in server.requests} == {"policy"}
    return answer


def test_a_later_policy_is_named_by_token_and_the_first_one_by_none() -> None:
    later = asked(3, digest=DIGESTS[3])
    assert (later.weight_version, later.parameters_digest) == (None, None)
    for completion in later.completions:
        assert completion.policy_versions is not None
        assert completion.policy_versions.tolist() == [3] * len(completion.token_ids)
        assert completion.parameters_digest == DIGESTS[3]
    first = asked(2, digest=DIGESTS[2])
    assert [completion.policy_versions for completion in first.completions] == [None, None]
    assert {completion.parameters_digest for completion in first.completions} == {DIGESTS[2]}


def test_an_endpoint_that_names_no_version_is_refused() -> None:
    with pytest.raises(InputError, match="does not answer with the version and digest"):
        asked(None)


@pytest.mark.parametrize(
    ("version", "digest", "message"),
    [
        (3, DIGESTS[2], "for version 3, found 222"),
        (9, DIGESTS[3], "no checkpoint 9"),
        (1, DIGESTS[1], "expected tokens of version 2 or later, found some of 1"),
    ],
)
def test_weights_that_are_none_of_the_run_or_earlier_ones_are_refused(
    version: int, digest: str, message: str
) -> None:
    with pytest.raises(StalePolicy, match=message):
        asked(version, digest=digest)

"""A player of a game whose moves are sampled from the policy that is trained, by texts alone.

Its tokens are not trained on. Every turn has a seed of its own, which is a function of the example,
so that a group that is played again by the same weights meets the same player.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import httpx

from marin_rl.environments.episode import POLICY
from marin_rl.environments.http_answers import HttpAnswer, UnfitAnswer, ask
from marin_rl.errors import EndpointUnavailable, RewardFault
from marin_rl.types import Example

TIMEOUT_S = 600.0
SEED_BITS = 31


class PolicyPlayer:
    """A dialogue with the policy, turn by turn."""

    def __init__(self, example: Example, key_variable: str | None) -> None:
        """Take the policy's address from the example. Raises RewardFault without one."""
        policy = example.metadata.get(POLICY)
        if policy is None:
            raise RewardFault(
                "the other player is the policy: such a game is played by a run, which has one"
            )
        endpoints = policy["endpoints"]
        self._url = f"{endpoints[example.seed % len(endpoints)]}/chat/completions"
        self._policy, self._example = policy, example
        key = os.environ.get(key_variable or "", "")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._messages: list[dict[str, str]] = []

    async def move(self, text: str) -> str:
        """The policy's answer to what it reads. Raises EndpointUnavailable, RewardFault."""
        self._messages.append({"role": "user", "content": text})
        answer = _text_of(await self._asked())
        self._messages.append({"role": "assistant", "content": answer})
        return answer

    async def _asked(self) -> HttpAnswer:
        client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, headers=self._headers)
        try:
            async with client:
                answer = await ask(
                    client, "POST", self._url, timeout_s=TIMEOUT_S, json=self._body()
                )
        except httpx.HTTPError as error:
            raise EndpointUnavailable(
                f"the policy at {self._url}, the other player: {type(error).__name__}: {error}"
            ) from None
        except UnfitAnswer as error:
            raise RewardFault(f"the policy at {self._url}, the other player, {error}") from None
        if answer.status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise EndpointUnavailable(f"{self._url} answers {answer.status}")
        if not answer.ok:
            raise RewardFault(
                f"the policy at {self._url}, the other player, answers {answer.words}"
            )
        return answer

    def _body(self) -> dict[str, Any]:
        sampling = self._policy["sampling"]
        return {
            "model": self._policy["model"],
            "messages": self._messages,
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
            "max_tokens": sampling["max_tokens"],
            "seed": self._seed(),
        }

    def _seed(self) -> int:
        name = f"{self._example.example_id} {len(self._messages)}"
        digest = hashlib.sha256(name.encode()).digest()
        return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def _text_of(answer: HttpAnswer) -> str:
    try:
        value: Mapping[str, Any] = answer.object()
        return str(value["choices"][0]["message"]["content"] or "")
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RewardFault(
            f"the policy, the other player: expected a chat completion, found "
            f"{answer.text[:200]!r} ({type(error).__name__}: {error})"
        ) from None

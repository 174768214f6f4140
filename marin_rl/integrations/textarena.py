"""Games of TextArena: `environment.name: textarena`, `options: {id: FrozenLake-v0}`.

In a game of two players the model is one of them, and the other is a function of the user, or the
policy itself: then its moves are sampled from the served policy, and are not trained on.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.episode import POLICY, StepResult, Tool, settled, user_message
from marin_rl.environments.registry import register
from marin_rl.errors import BadResponse, EndpointUnavailable, RequestRejected, RewardFault
from marin_rl.inference.client.dialects import TextDialect
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.integrations.hosted import HostedEnvironment, HostedEpisode, HostedOptions, Library
from marin_rl.types import Example, Message, Sampling, Split, Turn
from marin_rl.user_code import SPEC_PATTERN, load

SEED_BITS = 31


class TextArenaOptions(HostedOptions):
    """Options of `textarena`."""

    kwargs: dict[str, Any] = Field(default={}, description="arguments of textarena.make")
    players: Literal[1, 2] = Field(default=1, description="number of players")
    player: Literal[0, 1] | None = Field(
        default=0,
        description="which of two players the model is, 0 moves first; null: either, by the seed "
        "of the example",
    )
    opponent: str | None = Field(
        default=None,
        pattern=rf"^policy$|{SPEC_PATTERN}",
        description="the other player: FILE.py:function or module:function of (text) that returns "
        "its move, which may draw from `random`, whose numbers are the episode's own; policy: the "
        "weights that are trained",
    )
    api_key_variable: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$",
        description="environment variable with the key of the policy's endpoint for `opponent: "
        "policy`, also in environment.pass_environment; null: no key",
    )

    @model_validator(mode="after")
    def _opponent_of_two(self) -> "TextArenaOptions":
        if (self.players == 2) != (self.opponent is not None):
            raise ValueError("expected an opponent in games of two players, and in no others")
        if self.players == 1 and self.player != 0:
            raise ValueError(f"player: expected 0 in a game of one, found {self.player}")
        return self


@register("textarena", TextArenaOptions, package="textarena")
class TextArena(HostedEnvironment):
    """Rewards the end of a game as the game does."""

    name = "textarena"
    library = Library("textarena", ">=0.7,<0.8", "textarena_host.py")
    options_kind = TextArenaOptions
    options: TextArenaOptions

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self.asks_policy = self.options.opponent == POLICY
        self.replayable = not self.asks_policy  # its weights are those of one round

    def example(self, seed: int, index: int, split: Split) -> Example:
        return self.make_example(self.options.id, seed=seed, index=index, split=split)

    def episode(self, example: Example) -> "TextArenaEpisode":
        return TextArenaEpisode(self, example)


class TextArenaEpisode(HostedEpisode):
    """A game, and the moves of the other player."""

    def __init__(self, environment: TextArena, example: Example) -> None:
        super().__init__(environment, example)
        options = environment.options
        self._player = example.seed % 2 if options.player is None else options.player
        self._opponent: Callable[[str], Any] | None = None
        if options.opponent == POLICY:
            self._opponent = PolicyPlayer(example, options.api_key_variable).move
        elif options.opponent is not None:
            self._opponent = load(options.opponent, "opponent")

    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        answer = await self._until_own_turn(await self.begin({}))
        if answer["done"]:
            raise RewardFault("the other player's opening ended the game before the model's turn")
        return user_message(answer["observation"]), ()

    async def step(self, turn: Turn) -> StepResult:
        answer = await self._until_own_turn(await self.take({"action": turn.content}))
        if not answer["done"]:
            return StepResult(messages=user_message(answer["observation"]))
        reward = answer["rewards"][str(self._player)]
        return StepResult(reward=reward, done=True, info=answer["info"])

    async def _until_own_turn(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        while not answer["done"] and answer["player"] != self._player:
            assert self._opponent is not None, "a game of one has no other player"
            move = await settled(self._opponent(answer["observation"]))
            answer = await self.take({"action": str(move)})
        return answer


class PolicyPlayer:
    """A player whose moves are sampled from the policy that is trained, by texts alone.

    Its tokens are not trained on. Every turn has a seed that is a function of the example, so that
    a group that is played again by the same weights meets the same player.
    """

    def __init__(self, example: Example, key_variable: str | None) -> None:
        """Take the policy's address from the example. Raises RewardFault without one."""
        policy = example.metadata.get(POLICY)
        if policy is None:
            raise RewardFault(
                "the other player is the policy: such a game is played by a run, which has one"
            )
        endpoints = policy["endpoints"]
        self._url = endpoints[example.seed % len(endpoints)]
        self._policy, self._example = policy, example
        self._key = os.environ.get(key_variable or "") or None
        self._dialogue: list[Message] = []

    async def move(self, text: str) -> str:
        """The policy's answer to what it reads. Raises EndpointUnavailable, RewardFault."""
        self._dialogue.append(Message(role="user", content=text))
        turn = f"{self._example.example_id} {len(self._dialogue)}"
        digest = hashlib.sha256(turn.encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
        sampling = Sampling(**{**self._policy["sampling"], "seed": seed, "stop": ()})
        who = f"the policy at {self._url}, the other player"
        client = PolicyClient(
            endpoints=(self._url,),
            model=self._policy["model"],
            dialect=TextDialect(),
            api_key=self._key,
        )
        try:
            async with client:
                (answer,) = (await client.chat(self._dialogue, 1, sampling)).completions
        except EndpointUnavailable as error:
            raise EndpointUnavailable(f"{who}: {error}") from None
        except (RequestRejected, BadResponse) as error:
            raise RewardFault(f"{who}: {error}") from None
        self._dialogue.append(Message(role="assistant", content=answer.text))
        return answer.text

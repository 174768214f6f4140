"""Games of TextArena: `environment.name: textarena`, `options: {id: FrozenLake-v0}`.

In a game of two players the model is one of them, and the other is a function of the user, or the
policy itself: then its moves are sampled from the served policy, and are not trained on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.episode import POLICY, StepResult, Tool, settled, user_message
from marin_rl.environments.external.environment import (
    ExternalEnvironment,
    ExternalEpisode,
    ExternalOptions,
    Library,
)
from marin_rl.environments.external.policy_player import PolicyPlayer
from marin_rl.environments.registry import register
from marin_rl.errors import RewardFault
from marin_rl.types import Example, Message, Split, Turn
from marin_rl.user_code import SPEC_PATTERN, load


class TextArenaOptions(ExternalOptions):
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


@register("textarena")
class TextArena(ExternalEnvironment):
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
        """A seed of the game."""
        return self.described(self.options.id, seed, index, split)

    def episode(self, example: Example) -> "TextArenaEpisode":
        """A game with the example's seed."""
        return TextArenaEpisode(self, example)


class TextArenaEpisode(ExternalEpisode):
    """A game, and the moves of the other player."""

    def __init__(self, environment: TextArena, example: Example) -> None:
        super().__init__(environment, example)
        options = environment.options
        self._player = example.seed % 2 if options.player is None else options.player
        self._opponent = self._other_player(options, example)

    @staticmethod
    def _other_player(options: TextArenaOptions, example: Example) -> Callable[[str], Any] | None:
        if options.opponent is None:
            return None
        if options.opponent == POLICY:
            return PolicyPlayer(example, options.api_key_variable).move
        return load(options.opponent, "opponent")

    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """The rules of the game and what was moved so far, without tools."""
        answer = await self._until_own_turn(await self.begin({}))
        if answer["done"]:
            raise RewardFault("the other player's opening ended the game before the model's turn")
        return user_message(answer["observation"]), ()

    async def step(self, turn: Turn) -> StepResult:
        """Make the model's move, and those of the other player that follow."""
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

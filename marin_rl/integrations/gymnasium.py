"""Text environments of gymnasium: `environment.name: gymnasium`, `options: {id: CliffWalking-v1}`.

The model reads observations and writes actions; both are turned into text here, by default as JSON,
or by functions of the user.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from marin_rl.environments.episode import StepResult, Tool, user_message
from marin_rl.environments.registry import register
from marin_rl.errors import ConfigError
from marin_rl.integrations.hosted import HostedEnvironment, HostedEpisode, HostedOptions, Library
from marin_rl.types import Example, Message, Split, Turn
from marin_rl.user_code import SPEC_PATTERN, load


class GymnasiumOptions(HostedOptions):
    """Options of `gymnasium`."""

    kwargs: dict[str, Any] = Field(default={}, description="arguments of gymnasium.make")
    instructions: str = Field(
        default="",
        description="text before the first observation: the rules, the form of an action",
    )
    actions: tuple[str, ...] = Field(
        default=(), description="names of the actions of a discrete space, in order; none: numbers"
    )
    to_text: str | None = Field(
        default=None,
        pattern=SPEC_PATTERN,
        description="FILE.py:function or module:function of (observation, info) that returns what "
        "the model reads; null: text as it is, anything else as JSON",
    )
    to_action: str | None = Field(
        default=None,
        pattern=SPEC_PATTERN,
        description="FILE.py:function or module:function of (text) that returns an action as JSON "
        "has it, and raises ValueError for none; null: a name or number of a discrete space, the "
        "text itself of a text space, JSON for others",
    )


@register("gymnasium", GymnasiumOptions, package="gymnasium")
class Gymnasium(HostedEnvironment):
    """Rewards each step as the environment does."""

    name = "gymnasium"
    library = Library("gymnasium", ">=1.0,<2", "gymnasium_host.py")
    options_kind = GymnasiumOptions
    options: GymnasiumOptions

    def load_examples(self) -> None:
        super().load_examples()
        space = self.interpreter.ready["actions"]
        if self.options.actions and space.get("n") != len(self.options.actions):
            raise ConfigError(
                f"environment.options.actions: expected a name for each action of "
                f"{space['space']}, found {len(self.options.actions)}"
            )

    def example(self, seed: int, index: int, split: Split) -> Example:
        shown = self.options.instructions or self.options.id
        return self.make_example(shown, seed=seed, index=index, split=split)

    def episode(self, example: Example) -> "GymnasiumEpisode":
        return GymnasiumEpisode(self, example)

    def text_of(self, answer: Mapping[str, Any]) -> str:
        if self.options.to_text is not None:
            return str(load(self.options.to_text, "to_text")(answer["observation"], answer["info"]))
        observation = answer["observation"]
        return observation if isinstance(observation, str) else json.dumps(observation)

    def action_of(self, text: str) -> Any:
        """The action that a turn of the model names. Raises ValueError, for the model to read."""
        space = self.interpreter.ready["actions"]
        if self.options.to_action is not None:
            return load(self.options.to_action, "to_action")(text)
        text = text.strip()
        if space["kind"] == "Text":
            return text
        if space["kind"] == "Discrete":
            numbers = [str(space["start"] + index) for index in range(space["n"])]
            names = list(self.options.actions) or numbers
            if text not in names:
                raise ValueError(f"expected one of {', '.join(names)}")
            return space["start"] + names.index(text)
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(f"expected JSON of {space['space']}") from None


class GymnasiumEpisode(HostedEpisode):
    """An environment between its reset and its end."""

    def __init__(self, environment: Gymnasium, example: Example) -> None:
        super().__init__(environment, example)
        self._environment = environment

    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        first = self._environment.text_of(await self.begin({}))
        instructions = self._environment.options.instructions
        return user_message(f"{instructions}\n\n{first}" if instructions else first), ()

    async def step(self, turn: Turn) -> StepResult:
        try:
            action = self._environment.action_of(turn.content)
        except ValueError as error:
            return StepResult(messages=user_message(str(error)), reward=0.0)
        answer = await self.take({"action": action})
        if "refused" in answer:
            return StepResult(messages=user_message(answer["refused"]), reward=0.0)
        return StepResult(
            messages=() if answer["done"] else user_message(self._environment.text_of(answer)),
            reward=answer["reward"],
            done=answer["done"],
            info=answer["info"],
        )

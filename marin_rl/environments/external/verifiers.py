"""Classic environments of verifiers: `environment.name: verifiers`, `options: {id: my-env}`.

The package of an environment is installed in the interpreter that plays it. Its own loop runs there
unchanged, with its tools, stop conditions and rubric; the completions come from this side, so a
turn goes on from the very ids that were sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import Field

from marin_rl.environments.base import Dialogues, GroupScore
from marin_rl.environments.episode import StepResult, Tool
from marin_rl.environments.external.environment import (
    ExternalEpisode,
    Library,
    RowsEnvironment,
    RowsOptions,
)
from marin_rl.environments.external.replayed_groups import scored_together
from marin_rl.environments.registry import register
from marin_rl.types import Example, Message, Split, ToolCall, Turn


class VerifiersOptions(RowsOptions):
    """Options of `verifiers`."""

    args: dict[str, Any] = Field(default={}, description="arguments of the environment")
    group_rewards: bool = Field(
        default=False,
        description="true where the rubric has functions that score a whole group together; its "
        "dialogues are then played again, in one process, to be scored",
    )


@register("verifiers")
class Verifiers(RowsEnvironment):
    """Rewards the end of a rollout by the environment's rubric."""

    name = "verifiers"
    library = Library("verifiers", ">=0.3,<0.4", "verifiers_host.py")
    options_kind = VerifiersOptions
    options: VerifiersOptions

    def load_scorer(self) -> None:
        """Start the interpreter where groups are scored in it. Raises InputError."""
        if self.options.group_rewards:
            _ = self.interpreter

    def example(self, seed: int, index: int, split: Split) -> Example:
        """A row: number `seed + index` of its split, starting over at the end."""
        row = self.row(seed, index, split)
        prompt = row["prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return self.make_example(
            [_message(message, {}) for message in prompt],
            row.get("answer") or None,
            seed=seed,
            index=index,
            split=split,
            metadata={"row": row},
        )

    def episode(self, example: Example) -> "VerifiersEpisode":
        """A rollout of the example's row."""
        return VerifiersEpisode(self, example)

    @property
    def scores_groups(self) -> bool:
        """True where the rubric compares the members of a group."""
        return self.options.group_rewards

    def score_group(
        self,
        example: Example,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        dialogues: Dialogues,
    ) -> Sequence[GroupScore]:
        """Rewards by the rubric, which gets the states of all members that it ended."""
        members = [(VerifiersEpisode(self, example), dialogue) for dialogue in dialogues]
        early = self.score(example, "")
        return scored_together(self.interpreter, members, example.seed, early)


class VerifiersEpisode(ExternalEpisode):
    """A rollout whose completions come from this side."""

    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """The environment's first prompt, and its tools."""
        self._names: dict[str, str] = {}
        answer = await self.begin(self._example.metadata["row"])
        if answer["done"]:
            raise ValueError("the environment ended the rollout before its first turn")
        return self._messages(answer), answer["tools"]

    async def step(self, turn: Turn) -> StepResult:
        """The environment's answer to a turn, or the rubric's reward."""
        calls = [asdict(call) for call in turn.tool_calls]
        self._names |= {call.id: call.name for call in turn.tool_calls}
        answer = await self.take({"content": turn.content, "tool_calls": calls})
        if not answer["done"]:
            return StepResult(messages=self._messages(answer))
        return StepResult(reward=answer["reward"], done=True, info=answer["info"])

    def _messages(self, answer: Mapping[str, Any]) -> tuple[Message, ...]:
        return tuple(_message(message, self._names) for message in answer["messages"])


def _message(values: Mapping[str, Any], names: Mapping[str, str]) -> Message:
    """A message of verifiers; `names` are those of the tools that were called, by their ids."""
    call_id = values.get("tool_call_id")
    return Message(
        role=values["role"],
        content=values.get("content") or "",
        tool_calls=tuple(ToolCall(**call) for call in values.get("tool_calls") or ()),
        tool_call_id=call_id,
        name=None if call_id is None else names.get(call_id),
    )

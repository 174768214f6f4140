"""Classic environments of verifiers: `environment.name: verifiers`, `options: {id: my-env}`.

The package of an environment is installed in the interpreter that plays it. Its own loop runs there
unchanged, with its tools, stop conditions and rubric; the completions come from this side, so a
turn goes on from the very ids that were sampled.

A rubric that compares the members of a group compares objects of its own, which no process can
send. The members are played in several processes, so their dialogues are played again in one
interpreter, and scored there. An environment that answers otherwise than it did costs the member.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby, zip_longest
from typing import Any

from pydantic import Field

from marin_rl.environments.base import Dialogues, GroupScore
from marin_rl.environments.episode import StepResult, Tool
from marin_rl.environments.registry import register
from marin_rl.errors import RewardFault
from marin_rl.integrations.hosted import (
    HostedEpisode,
    Interpreter,
    Library,
    RowsEnvironment,
    RowsOptions,
)
from marin_rl.types import Example, Message, RewardComponent, Split, ToolCall, Turn

Score = tuple[RewardComponent, ...]


class VerifiersOptions(RowsOptions):
    """Options of `verifiers`."""

    args: dict[str, Any] = Field(default={}, description="arguments of the environment")
    group_rewards: bool = Field(
        default=False,
        description="true where the rubric has functions that score a whole group together; its "
        "dialogues are then played again, in one process, to be scored",
    )


@register("verifiers", VerifiersOptions, tools=True, package="verifiers")
class Verifiers(RowsEnvironment):
    """Rewards the end of a rollout by the environment's rubric."""

    name = "verifiers"
    library = Library("verifiers", ">=0.3,<0.4", "verifiers_host.py")
    options_kind = VerifiersOptions
    options: VerifiersOptions

    def load_scorer(self) -> None:
        if self.options.group_rewards:
            _ = self.interpreter

    def example(self, seed: int, index: int, split: Split) -> Example:
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
        return VerifiersEpisode(self, example)

    @property
    def scores_groups(self) -> bool:
        return self.options.group_rewards

    def score_group(
        self,
        example: Example,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        dialogues: Dialogues,
    ) -> Sequence[GroupScore]:
        members = [(VerifiersEpisode(self, example), dialogue) for dialogue in dialogues]
        early = self.score(example, "")
        return asyncio.run(scored_together(self.interpreter, members, example.seed, early))


class VerifiersEpisode(HostedEpisode):
    """A rollout whose completions come from this side."""

    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        self._names: dict[str, str] = {}
        answer = await self.begin(self._example.metadata["row"])
        if answer["done"]:
            raise ValueError("the environment ended the rollout before its first turn")
        return self._messages(answer), answer["tools"]

    async def step(self, turn: Turn) -> StepResult:
        calls = [asdict(call) for call in turn.tool_calls]
        self._names |= {call.id: call.name for call in turn.tool_calls}
        answer = await self.take({"content": turn.content, "tool_calls": calls})
        if not answer["done"]:
            return StepResult(messages=self._messages(answer))
        return StepResult(reward=answer["reward"], done=True, info=answer["info"])

    def _messages(self, answer: Mapping[str, Any]) -> tuple[Message, ...]:
        return tuple(_message(message, self._names) for message in answer["messages"])


def _message(values: Mapping[str, Any], names: Mapping[str, str]) -> Message:
    """A message of verifiers; `names` are those of the tools that were called, by call id."""
    call_id = values.get("tool_call_id")
    return Message(
        role=values["role"],
        content=values.get("content") or "",
        tool_calls=tuple(ToolCall(**call) for call in values.get("tool_calls") or ()),
        tool_call_id=call_id,
        name=None if call_id is None else names.get(call_id),
    )


async def scored_together(
    interpreter: Interpreter,
    members: Sequence[tuple[HostedEpisode, Sequence[Message]]],
    seed: int,
    early: Score,
) -> list[GroupScore]:
    """Scores of new episodes, in order, once each has been given the turns of its dialogue.

    `early` is the score of a member that the environment had not ended. Raises RewardFault with the
    library's error.
    """
    try:
        ends = await asyncio.gather(*(_played_again(*member) for member in members))
        ended = [e.number for (e, _), end in zip(members, ends, strict=True) if end is True]
        answers = await interpreter.answer("score", episodes=ended, seed=seed) if ended else []
    finally:
        for episode, _ in members:
            with suppress(RewardFault):  # the scores are there, or the interpreter has ended
                await episode.close()
    scores = iter(answers)
    return [
        end if isinstance(end, RewardFault) else _components(next(scores)) if end else early
        for end in ends
    ]


async def _played_again(episode: HostedEpisode, dialogue: Sequence[Message]) -> bool | RewardFault:
    """Play a dialogue again; True if the environment ended it, a fault if it answers otherwise."""
    done = False
    # the model's messages, each followed by what the environment answered
    pieces = [list(piece) for _, piece in groupby(dialogue, lambda m: m.role == "assistant")]
    try:
        await episode.start()
        turns = zip_longest(pieces[::2], pieces[1::2], fillvalue=list[Message]())
        for number, ((said, *_), answered) in enumerate(turns, start=1):
            turn = Turn(role="assistant", content=said.content, tool_calls=said.tool_calls)
            result = await episode.step(turn)
            done = result.done
            # nothing of a dialogue follows the last turn
            if answered and not _alike(result.messages, answered):
                return RewardFault(
                    f"played again for the score of its group, it answers turn {number} otherwise: "
                    "it depends on more than the example and the actions"
                )
    except RewardFault as fault:
        return fault
    return done


def _alike(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    """True for equal messages; of a result that was cut, what was left of it is compared."""
    return len(messages) == len(recorded) and all(
        (new.role, new.tool_call_id) == (old.role, old.tool_call_id)
        and (new.content.startswith(old.content) if old.cut else new.content == old.content)
        for new, old in zip(messages, recorded, strict=True)
    )


def _components(answer: Mapping[str, Any]) -> Score:
    """The rubric's reward, and its metrics, which add nothing to it."""
    metrics: Mapping[str, float] = answer["metrics"]
    return (
        RewardComponent(name="rubric", value=answer["reward"]),
        *(RewardComponent(name=n, value=v, weight=0.0) for n, v in metrics.items()),
    )

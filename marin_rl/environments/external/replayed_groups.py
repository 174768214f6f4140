"""Scores of groups whose members a library compares with one another.

The members are played in several processes, and a library compares its own objects of them, which
no process can send. So their dialogues are played again, in one interpreter, and scored there. An
environment that answers otherwise than it did costs the member. Leaves out what is compared
(`hosts`).
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from marin_rl.environments.base import GroupScore
from marin_rl.environments.external.environment import ExternalEpisode
from marin_rl.environments.external.interpreter import Interpreter
from marin_rl.errors import RewardFault
from marin_rl.types import Message, RewardComponent, Turn

Members = Sequence[tuple[ExternalEpisode, Sequence[Message]]]
Score = tuple[RewardComponent, ...]


def scored_together(
    interpreter: Interpreter, members: Members, seed: int, early: Score
) -> list[GroupScore]:
    """Scores of new episodes, in order, once each has been given the turns of its dialogue.

    `early` is the score of those that the environment had not ended. Raises RewardFault with the
    library's error.
    """
    return asyncio.run(_scored(interpreter, members, seed, early))


async def _scored(
    interpreter: Interpreter, members: Members, seed: int, early: Score
) -> list[GroupScore]:
    try:
        ends = await asyncio.gather(*(_end(*member) for member in members))
        ended = [e.number for (e, _), end in zip(members, ends, strict=True) if end is True]
        answers = await interpreter.answer("score", episodes=ended, seed=seed) if ended else []
    finally:
        await asyncio.gather(*(_close(episode) for episode, _ in members))
    scores = iter(answers)
    return [
        end if isinstance(end, RewardFault) else _components(next(scores)) if end else early
        for end in ends
    ]


async def _end(episode: ExternalEpisode, dialogue: Sequence[Message]) -> bool | RewardFault:
    """Play a dialogue again; True if the environment ended it, a fault if it answers otherwise."""
    done = False
    try:
        await episode.start()
        for number, (said, answered) in enumerate(_turns(dialogue), start=1):
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


def _turns(dialogue: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
    """The model's messages, each with what the environment answered."""
    pieces = [list(piece) for _, piece in groupby(dialogue, lambda m: m.role == "assistant")]
    answers = [*pieces[1::2], []] if len(pieces) % 2 else pieces[1::2]
    return [(said[0], answer) for said, answer in zip(pieces[::2], answers, strict=True)]


def _alike(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    """True for equal messages; of a result that was cut, what was left of it is compared."""
    return len(messages) == len(recorded) and all(
        (new.role, new.tool_call_id) == (old.role, old.tool_call_id)
        and (new.content.startswith(old.content) if old.cut else new.content == old.content)
        for new, old in zip(messages, recorded, strict=True)
    )


def _components(answer: dict[str, float | dict[str, float]]) -> Score:
    """The rubric's reward, and its metrics, which add nothing to it."""
    reward, metrics = answer["reward"], answer["metrics"]
    assert isinstance(reward, float)
    assert isinstance(metrics, dict)
    return (
        RewardComponent(name="rubric", value=reward),
        *(RewardComponent(name=n, value=v, weight=0.0) for n, v in metrics.items()),
    )


async def _close(episode: ExternalEpisode) -> None:
    with suppress(RewardFault):  # the scores are there, or the interpreter has ended
        await episode.close()

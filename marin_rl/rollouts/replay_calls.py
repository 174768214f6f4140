"""Programs run again against recorded answers: the first request that differs, or none.

A program may ask in another order, and several requests at once, so that each is looked for by its
conversation: the turn that it goes on from, and the messages that it adds.
"""

import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import count

from marin_rl.environments.episode import Conversation
from marin_rl.environments.episode_pool import PlayedEpisode
from marin_rl.rollouts.forest import segments_of_rollout
from marin_rl.rollouts.tool_turns import ToolTurns
from marin_rl.types import Message, Rollout, ToolCall, Turn

Asked = tuple[int | None, tuple[Message, ...]]  # a turn by its place in the row, and new messages
Key = tuple[int | None, tuple[tuple[str, ...], ...]]
_SHOWN = 120


async def replayed_calls(
    episode: PlayedEpisode,
    rollout: Rollout,
    tool_turns: ToolTurns,
    refusal: Callable[[Conversation], str | None],
) -> AsyncIterator[tuple[int, str | None]]:
    """Yield each answered request by its number, and the last with the difference, if any.

    0 is the first request. `refusal` is what one is told that leaves no room for an answer. Raises
    what the episode raises.
    """
    recorded = _recorded(rollout)
    start = await episode.start()
    conversation: Conversation = list(start.messages), start.tools
    asked: Asked = None, start.messages
    played, places = list[Conversation](), list[int]()
    for number in count():
        key = _known_by(asked)
        calls = recorded[key] or recorded[None, key[1]]  # of a prompt that was rendered again
        if not calls and (words := refusal(conversation)) is not None:
            result = await episode.step(Turn(role="system", content=words))
        elif not calls:
            over = rollout.status != "complete" and not any(recorded.values())
            shown = repr(asked[1][-1].content[:_SHOWN])
            yield number, None if over else f"no recorded call goes on with {shown}"
            return
        else:
            yield number, None
            place, turn = calls.popleft()
            action = tool_turns.recorded(rollout, turn, conversation[1], len(played))
            played.append(([*conversation[0], action.message], conversation[1]))
            places.append(place)
            result = await episode.step(action)
        if result.done:
            yield number + 1, _difference(rollout, result.received, recorded.values())
            return
        conversation = result.after(played)
        if result.opening is not None:
            asked = None, result.opening.messages
        else:
            parent = places[-1 if result.parent is None else result.parent]
            asked = parent, tuple(map(tool_turns.limited, result.messages))


def _difference(
    rollout: Rollout, reward: float | None, left: Iterable[deque[tuple[int, Turn]]]
) -> str | None:
    if missing := sum(map(len, left)):
        return f"it ended without {missing} of the recorded calls"
    last = [turn for turn in rollout.turns if turn.inference_metadata is not None][-1]
    return None if last.reward == reward else f"reward {last.reward!r} then, {reward!r} now"


def _recorded(rollout: Rollout) -> dict[Key, deque[tuple[int, Turn]]]:
    """Recorded turns, by what was asked; a turn is known by its place among all."""
    first = {segment["turn"]: segment["parent"] for segment in segments_of_rollout(rollout)}
    recorded, read, parent = defaultdict[Key, deque[tuple[int, Turn]]](deque), [], None
    for place, turn in enumerate(rollout.turns, 1):
        if not read and place in first:
            parent = first[place]
        if turn.inference_metadata is None:
            read.append(turn.message)
            continue
        # a rewritten history may begin as another does
        rewritten = any(message.role == "assistant" for message in read)
        asked = None if rewritten else parent, tuple(read)
        recorded[_known_by(asked)].append((place, turn))
        read, parent = [], place
    return recorded


def _known_by(asked: Asked) -> Key:
    """Compared parts of a question: without ids of calls, outer spaces, order of arguments."""
    return asked[0], tuple(
        (message.role, message.content.strip(), *map(_called, message.tool_calls))
        for message in asked[1]
    )


def _called(call: ToolCall) -> str:
    return json.dumps([call.name, json.loads(call.arguments)], sort_keys=True)

"""Episodes of an environment outside of a run: tried by a policy, and checked against its laws.

Leaves out training, token ids and files; recorded episodes are played again by `replay`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment, reward_of
from marin_rl.environments.episode import Conversation, StepResult, Tool
from marin_rl.environments.episode_pool import open_episodes
from marin_rl.environments.registry import part_for
from marin_rl.environments.scoring import scorer_for
from marin_rl.errors import Abstained, InputError, MarinRLError, RewardFault
from marin_rl.inference.client.dialects import TextDialect
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.types import Example, Message, Sampling, ToolCall, Turn

# The model's turn, after the messages so far and with the tools on offer.
Policy = Callable[[Sequence[Message], Sequence[Tool]], Awaitable[Turn]]

TEXTS = ("", "1", "no such action")  # of turns that check an environment, in order and again


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedEpisode:
    """An episode that was tried: its first messages, turns and answers, and its reward.

    `seconds` are those of the start and of each step.
    """

    example_id: str
    start: tuple[Message, ...]
    tools: tuple[Tool, ...]
    steps: tuple[tuple[Turn, StepResult], ...]
    reward: float
    ended: bool
    seconds: tuple[float, ...] = field(compare=False)

    @property
    def dialogue(self) -> list[dict[str, Any]]:
        """Messages of both sides in order, as plain values; the model's have a `reward`."""
        rows = [_plain(message) for message in self.start]
        for turn, result in self.steps:
            rows.append(_plain(turn) | {"reward": result.received})
            rows += map(_plain, result.new_messages)
        return rows


def _plain(said: Message | Turn) -> dict[str, Any]:
    calls = [asdict(call) for call in said.tool_calls]
    return {"role": said.role, "content": said.content, "tool_calls": calls}


def turn_of_text(text: str, tools: Sequence[Tool]) -> Turn:
    """Turn of a person: text, or the JSON of a call where tools are offered."""
    try:
        call = orjson.loads(text) if tools else None
    except orjson.JSONDecodeError:
        call = None
    if not isinstance(call, dict) or "name" not in call:
        return Turn(role="assistant", content=text)
    arguments = orjson.dumps(call.get("arguments", {})).decode()
    called = ToolCall(id="c00000001", name=str(call["name"]), arguments=arguments)
    return Turn(role="assistant", content="", tool_calls=(called,))


@asynccontextmanager
async def endpoint_policy(
    url: str, model: str, api_key: str | None, tokens_max: int
) -> AsyncIterator[Policy]:
    """Policy of an OpenAI endpoint, by texts and tool calls, without token ids."""
    async with PolicyClient(
        endpoints=(url,), model=model, dialect=TextDialect(), api_key=api_key
    ) as client:

        async def policy(dialogue: Sequence[Message], tools: Sequence[Tool]) -> Turn:
            sampling = Sampling(max_tokens=tokens_max)
            answer = await client.chat(dialogue, 1, sampling, tools=tools)
            (completion,) = answer.completions
            return Turn(role="assistant", content=completion.text, tool_calls=completion.tool_calls)

        yield policy


@dataclass(frozen=True, slots=True)
class LawFinding:
    """Verdict on one law of environments, None where it is a measurement; and its detail."""

    law: str
    passed: bool | None
    detail: str


async def try_episode(
    environment: Environment,
    config: EnvironmentConfig,
    example: Example,
    policy: Policy,
    turns: int,
) -> TriedEpisode:
    """Play an episode, `turns` turns at most. Raises RewardFault, InputError."""
    part = part_for(environment, config, example)
    if part.environment.returns_rollouts:
        raise InputError(
            f"environment {part.environment.name!r} samples from a policy by itself: it is tried "
            "by a run, such as one of a round"
        )
    (episode,) = open_episodes(part.environment, part.config, example, 1)
    clock = [time.monotonic()]
    steps: list[tuple[Turn, StepResult]] = []
    try:
        start = await episode.start()
        clock.append(time.monotonic())
        seconds, dialogue, tools = [clock[1] - clock[0]], list(start.messages), start.tools
        played = list[Message]()  # from the model's first turn on
        conversations = list[Conversation]()
        while len(steps) < turns and not (steps and steps[-1][1].done):
            turn = await policy(dialogue, tools)
            began = time.monotonic()
            result = await episode.step(turn)
            seconds.append(time.monotonic() - began)
            steps.append((turn, result))
            said = Message(role="assistant", content=turn.content, tool_calls=turn.tool_calls)
            conversations.append(([*dialogue, said], tools))
            dialogue, tools = result.after(conversations)
            played += [said, *result.messages]
    finally:
        await episode.close()
    received = [result.received for _, result in steps if result.received is not None]
    reward = sum(received)
    if not received or any(result.scored for _, result in steps):
        # Messages from the model's first turn to its last.
        after = played[: len(played) - len(steps[-1][1].messages)]
        scorer = scorer_for(part.environment, part.config)
        (score,) = await scorer.score(example, [steps[-1][0].content], (), [after])
        if isinstance(score, MarinRLError) and not isinstance(score, Abstained):
            raise score
        reward += 0 if isinstance(score, MarinRLError) else reward_of(score)
    return TriedEpisode(
        example_id=example.example_id,
        start=start.messages,
        tools=start.tools,
        steps=tuple(steps),
        reward=reward,
        ended=steps[-1][1].done,
        seconds=tuple(seconds),
    )


def checking_policy(environment: Environment, example: Example) -> Policy:
    """A policy that calls each tool once, gives the example's demonstration, and then nonsense."""
    said = 0

    async def policy(dialogue: Sequence[Message], tools: Sequence[Tool]) -> Turn:
        nonlocal said
        said += 1
        if said <= len(tools):
            name = tools[said - 1]["function"]["name"]
            call = ToolCall(id=f"c{said:08d}", name=name, arguments="{}")
            return Turn(role="assistant", content="", tool_calls=(call,))
        right = environment.demonstration(example) if said == len(tools) + 1 else None
        text = TEXTS[said % len(TEXTS)] if right is None else right
        return Turn(role="assistant", content=text)

    return policy


def check_laws(
    environment: Environment, config: EnvironmentConfig, *, episodes: int, turns: int
) -> Iterator[LawFinding]:
    """Play episodes twice, and yield a verdict on each law; a fault ends the checks."""
    examples = [environment.example(config.train_seed, n, "train") for n in range(episodes)]
    again = [environment.example(config.train_seed, n, "train") for n in range(episodes)]
    yield LawFinding("examples", examples == again, "one seed makes one example")

    async def played() -> list[TriedEpisode]:
        own = (part_for(environment, config, example).environment for example in examples)
        return [
            await try_episode(environment, config, example, checking_policy(part, example), turns)
            for example, part in zip(examples, own, strict=True)
        ]

    try:
        first = asyncio.run(played())
    except RewardFault as error:
        yield LawFinding("plays", False, str(error))
        return
    ended = sum(episode.ended for episode in first)
    # A reward that is not finite is a fault, and ends the checks above.
    yield LawFinding(
        "plays", True, f"{ended} of {episodes} ended themselves, others after {turns} turns"
    )
    try:
        orjson.dumps([[e.start, e.tools, [result for _, result in e.steps]] for e in first])
    except TypeError as error:
        yield LawFinding("json", False, f"messages, tools and info: {error}")
    else:
        yield LawFinding("json", True, "messages, tools and info are JSON")
    yield LawFinding("rewards", None, ", ".join(f"{episode.reward:g}" for episode in first))
    if not environment.replayable:
        yield LawFinding(
            "replay", None, "not played again: the environment says `replayable = False`"
        )
    else:
        yield from _replayed(first, played)
    seconds = [step for episode in first for step in episode.seconds[1:]]
    mean, most = sum(seconds) / len(seconds), max(seconds)
    yield LawFinding("time", None, f"{mean:.3f} s a step, {most:.3f} s at most")


def _replayed(
    first: Sequence[TriedEpisode], played: Callable[[], Coroutine[Any, Any, list[TriedEpisode]]]
) -> Iterator[LawFinding]:
    try:
        second = asyncio.run(played())
    except RewardFault as error:
        yield LawFinding("replay", False, str(error))
        return
    pairs = list(zip(first, second, strict=True))
    alike = sum(one.start == other.start for one, other in pairs)
    yield LawFinding("start", alike == len(pairs), f"{alike} of {len(pairs)} start as before")
    equal = sum(one == other for one, other in pairs)
    yield LawFinding(
        "replay", equal == len(pairs), f"{equal} of {len(pairs)} equal by the same actions"
    )

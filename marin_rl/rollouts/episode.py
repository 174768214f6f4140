"""Episodes driven against a policy: the one place that asks the inference client for samples.

Token in, token out. The first turns of a group are one request; from then on members go on by
themselves, and the prompt of a turn is

    ids of the last prompt + ids that were sampled from it + bridge(new messages)

so that sampled ids are never rendered to text and tokenized again. An environment may go on from
any turn before. Where the chat template has no
such bridge, the episode ends, or goes on in a new segment whose prompt is the whole dialogue as the
template renders it now; what was sampled before is only read there. Owns the order of turns, and
the checks of what an endpoint answers. Leaves out what an episode does (`environments.episode`),
seeds, ends and scores (`trajectories`).
"""

import asyncio
import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.environments.episode import POLICY, Conversation, Start, StepResult, Tool
from marin_rl.environments.episode_pool import PlayedEpisode, open_episodes
from marin_rl.environments.scoring import fault_of
from marin_rl.errors import (
    BadResponse,
    BridgeFault,
    EndpointUnavailable,
    InputError,
    MarinRLError,
    RequestRejected,
    RewardFault,
)
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.protocol import ChatClient
from marin_rl.rollouts.partial import PiecewiseClient
from marin_rl.rollouts.tool_turns import ToolTurns
from marin_rl.rollouts.trajectories import (
    BRIDGE,
    CONTEXT,
    LENGTH,
    MAX_TURNS,
    REQUEST_FAULTS,
    Diverged,
    GroupRequest,
    SampledTurn,
    Trajectory,
    all_of,
    as_message,
    check_identity,
    check_prompt,
    end_of,
    results_unless_interrupted,
    too_long,
    unused,
)
from marin_rl.types import Example, Message, Sampling, ServedPolicy, Turn

_log = logging.getLogger(__name__)

# Ids between the last turn of a dialogue, whose last id is given, and the next, where tools are
# offered: see `bridge.TemplateBridge`.
Bridge = Callable[
    [Sequence[Message], int, Sequence[Message], Sequence[Tool]], Int32[np.ndarray, " n"]
]
# Called with a member's index, once it has ended.
Ended = Callable[[int, Trajectory], Awaitable[None]]
# Ids of a whole dialogue and the opening of the model's next turn: see `TemplateBridge.prompt`.
Render = Callable[[Sequence[Message], Sequence[Tool]], Int32[np.ndarray, " n"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeDriver:
    """Plays the episodes of groups against one served policy.

    An episode has `turns_max` turns at most, `context_length` tokens in a segment, and `tokens_max`
    in all where that is set. `settings` are those of its environment; `tool_turns` reads the calls
    of episodes that offer tools; `render` begins a segment where `bridge` raises BridgeFault, None
    ends the episode there. Endpoints are asked to render by `template_options`, and to end
    completions at `stop_token_ids` too.
    """

    client: ChatClient
    policy: ServedPolicy
    environment: Environment
    settings: EnvironmentConfig
    bridge: Bridge
    turns_max: int
    context_length: int
    tool_turns: ToolTurns | None = None
    render: Render | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stop_token_ids: Sequence[int] = ()

    async def play_group(
        self, request: GroupRequest, ended: Ended | None = None
    ) -> list[Trajectory]:
        """Play the members that are asked for, concurrently; in their order.

        `ended` is called with each member as soon as it ends, while others are still played. Raises
        what costs the whole group (`REQUEST_FAULTS` in the first turn), StalePolicy where
        the endpoint serves other weights, and InputError for episodes that cannot be played.
        """
        members = [
            _Member(self, request, index, episode)
            for index, episode in zip(
                request.indices, self.episodes(request, len(request.indices)), strict=True
            )
        ]
        try:
            if self.environment.own_prompts:
                return await results_unless_interrupted(m.played_alone(ended) for m in members)
            await all_of(member.begin() for member in members)
            prompt = _first_prompt([member.start for member in members], request.example)
            if any(message.tool_calls for message in request.example.messages):
                raise InputError(
                    f"example {request.example.example_id} has messages that call tools: expected "
                    "them in the messages that its episode starts with"
                )
            # Tools that the chat template cannot carry are refused before anything is sampled.
            if prompt.tools and self.client.gives_ids:
                self.reader.check(prompt.tools)
            able = [member for member in members if isinstance(member.start, Start)]
            firsts = await self.first_turns(request, prompt, [member.index for member in able])
            for member, first in zip(able, firsts, strict=True):
                member.first = first
            return await results_unless_interrupted(member.played(ended) for member in members)
        finally:
            await asyncio.gather(*(_close(member.episode) for member in members))

    def episodes(self, request: GroupRequest, count: int) -> Sequence[PlayedEpisode]:
        """New episodes of a group's example, with the policy's address where they ask it."""
        example = request.example
        if self.environment.asks_policy:
            policy = {
                "endpoints": list(self.policy.endpoints),
                "model": self.policy.model,
                "sampling": asdict(request.sampling),
            }
            example = replace(example, metadata={**example.metadata, POLICY: policy})
        return open_episodes(self.environment, self.settings, example, count)

    async def first_turns(
        self,
        request: GroupRequest,
        prompt: Start,
        indices: Sequence[int],
        sampling: Sampling | None = None,
    ) -> list[tuple[ChatAnswer, Completion]]:
        """Completions in the order of the members; the greedy one is a separate request.

        `sampling` is that of one member whose turns have seeds by what they ask.
        """
        messages, tools = prompt.messages, prompt.tools
        chat = partial(self.chat, tools=tools, session=request.group_id)
        last = request.size - 1
        if len(indices) < request.size:
            calls = [chat(messages, 1, sampling or request.sampling_of(i)) for i in indices]
        elif request.greedy:
            calls = [
                chat(messages, last, request.sampling),
                chat(messages, 1, request.sampling_of(last)),
            ]
        else:
            calls = [chat(messages, request.size, request.sampling)]
        answers = await all_of(calls)
        for answer in answers:
            check_identity(answer, self.policy)
            if tools and len(answer.prompt_token_ids):
                self.reader.check_prompt(answer.prompt_token_ids, tools)
        return [(answer, completion) for answer in answers for completion in answer.completions]

    @property
    def chat(self) -> Callable[..., Coroutine[Any, Any, ChatAnswer]]:
        return partial(
            self.client.chat,
            template_options=self.template_options,
            stop_token_ids=self.stop_token_ids,
            plain=self.environment.choices if self.environment.plain_prompts else None,
        )

    @property
    def reader(self) -> ToolTurns:
        if self.tool_turns is None:
            raise InputError("an episode offers tools: expected a driver with `tool_turns`")
        return self.tool_turns


class _Ended(NamedTuple):
    """End of an episode before a further turn; without a reason, that of its last turn."""

    reason: str | None
    fault: MarinRLError | None = None


@dataclass(slots=True)
class _Member:
    """A member of a group while it is played, with the turns so far.

    `first` is the first turn, which members have in common unless they have a `first_sampling`;
    `asked` counts what they asked, by its digest. `start_s` are the seconds of the
    episode's start. `conversations` has that up to each turn, `ends` the last turn of each
    segment; the next turn is of `segment`.
    """

    driver: EpisodeDriver
    request: GroupRequest
    index: int
    episode: PlayedEpisode
    start: Start | MarinRLError = field(init=False)
    start_s: float = field(init=False)
    first: tuple[ChatAnswer, Completion] = field(init=False)
    turns: list[SampledTurn] = field(default_factory=list[SampledTurn])
    conversations: list[Conversation] = field(default_factory=list[Conversation])
    segment: int = 0
    ends: dict[int, int] = field(default_factory=dict[int, int])
    first_sampling: Sampling | None = None
    asked: Counter[str] = field(default_factory=Counter[str])

    async def begin(self) -> None:
        """Start the episode; `start` is its fault if the environment raises.

        Raises InputError where none can be started, EndpointUnavailable where none can at the
        moment.
        """
        began = time.monotonic()
        try:
            self.start = await self.episode.start()
        except (InputError, EndpointUnavailable):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
            self.start = fault_of(error)
        self.start_s = time.monotonic() - began

    async def played_alone(self, ended: Ended | None) -> Trajectory:
        """Play the member from its own prompt on."""
        await self.begin()
        if isinstance(self.start, Start):
            driver, start = self.driver, self.start
            if start.tools and driver.client.gives_ids:
                driver.reader.check(start.tools)
            self.first_sampling = self._sampling(start.messages, start.tools)
            try:
                (self.first,) = await driver.first_turns(
                    self.request, start, [self.index], self.first_sampling
                )
            except (RequestRejected, BadResponse) as error:  # the prompt is this member's alone
                self.start = error
        return await self.played(ended)

    async def played(self, ended: Ended | None) -> Trajectory:
        """Play the member from its first turn on, and report its end."""
        if isinstance(self.start, Start):
            trajectory = await self._played_or_again(self.start)
        else:
            trajectory = self._not_begun(self.start)
        trajectory = replace(trajectory, start_s=self.start_s)
        if ended is not None:
            await ended(self.index, trajectory)
        return trajectory

    def _not_begun(self, fault: MarinRLError) -> Trajectory:
        return Trajectory(
            messages=self.request.example.messages,
            turns=(),
            finish_reason=end_of(fault),
            fault=fault,
        )

    async def _played_or_again(self, start: Start) -> Trajectory:
        """Play through recorded turns and on from there.

        Where the environment does not answer as it did when they were sampled, the member begins
        again, in a new episode.
        """
        client, name = self.driver.client, self.request.group_id
        try:
            trajectory = await self._play(start)
            if isinstance(client, PiecewiseClient):
                client.records[name].check_end(self.index, trajectory)
            return trajectory
        except Diverged as diverged:
            await _close(self.episode)
            assert isinstance(client, PiecewiseClient), "raised by such clients alone"
            client.records[name].begin_again(self.index, str(diverged))
        (episode,) = self.driver.episodes(self.request, 1)
        again = _Member(self.driver, self.request, self.index, episode)
        try:
            await again.begin()
            if not isinstance(again.start, Start):
                return again._not_begun(again.start)
            _first_prompt([start, again.start], self.request.example)
            (again.first,) = await self.driver.first_turns(self.request, start, [self.index])
            return await again._play(start)
        finally:
            await _close(episode)

    async def _play(self, start: Start) -> Trajectory:
        driver, request, turns = self.driver, self.request, self.turns
        answer, completion = self.first
        dialogue, tools = list(start.messages), start.tools
        sampling = self.first_sampling or request.sampling_of(self.index)
        fault, unanswered = None, None
        while True:
            turn, fault = await self._stepped(answer, completion, sampling, dialogue, tools)
            completion, reason = turn.completion, turn.completion.finish_reason
            if fault is not None:
                unanswered, reason = turn, end_of(fault)
                break
            self.ends[turn.segment] = len(turns)
            turns.append(turn)
            # a turn that was cut has no stop token, which new messages must follow
            if turn.result.done or reason != "stop":
                reason = turn.result.end or reason if reason == "stop" else reason
                break
            if len(turns) == driver.turns_max:
                reason = MAX_TURNS
                break
            following = await self._following()
            if isinstance(following, _Ended):
                reason, fault = following.reason or reason, following.fault
                break
            answer, sampling, (dialogue, tools) = following
            (completion,) = answer.completions
        await _close(self.episode)  # others may wait for what it holds, long before the group ends
        if driver.environment.own_prompts:
            for number in unused(turns):
                result = replace(turns[number].result, trained=False)
                turns[number] = replace(turns[number], result=result)
        return Trajectory(
            messages=tuple(start.messages),
            turns=tuple(turns),
            finish_reason=reason,
            fault=fault,
            unanswered=unanswered,
        )

    async def _following(self) -> "tuple[ChatAnswer, Sampling, Conversation] | _Ended":
        """Sample the turn after the last one, or return why there is none."""
        driver, turns = self.driver, self.turns
        try:
            ids, room = await self._asked_next()
            if (result := turns[-1].result).done:
                return _Ended(result.end)
            if room <= 0:
                return _Ended(CONTEXT if len(ids) >= driver.context_length else LENGTH)
            dialogue, tools = result.after(self.conversations)
            sampling = self._sampling(dialogue, tools)
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            answer = await self._next_turn(dialogue, tools, sampling, ids)
        except BridgeFault as error:
            _log.warning("an episode of %r ended early: %s", driver.environment.name, error)
            return _Ended(BRIDGE)
        except (*REQUEST_FAULTS, RewardFault) as error:
            return _Ended(end_of(error), error)
        return answer, sampling, (dialogue, tools)

    async def _stepped(
        self,
        answer: ChatAnswer,
        completion: Completion,
        sampling: Sampling,
        dialogue: Sequence[Message],
        tools: Sequence[Tool],
    ) -> tuple[SampledTurn, RewardFault | EndpointUnavailable | None]:
        """Give a completion to the environment: the turn, and the fault in place of an answer."""
        if tools:
            completion = self.driver.reader.read(completion, sampling.stop, tools, len(self.turns))
        began, result, fault = time.monotonic(), StepResult(), None
        self.conversations.append(([*dialogue, as_message(completion)], tools))
        # Programs are told the length of each prompt by itself.
        before = 0 if self.driver.environment.own_prompts else self.before
        start = before + len(answer.prompt_token_ids)
        action = Turn(
            role="assistant",
            content=completion.text,
            start=start,
            end=start + len(completion.token_ids),
            logprobs=completion.logprobs,
            tool_calls=completion.tool_calls,
            malformed=completion.malformed,
        )
        try:
            result = await self._answered(action)
        except (RewardFault, EndpointUnavailable) as error:
            fault = error
        turn = SampledTurn(
            answer=answer,
            completion=completion,
            sampling=sampling,
            result=result,
            segment=self.segment,
            environment_s=time.monotonic() - began,
        )
        return turn, fault

    async def _answered(self, action: Turn) -> StepResult:
        """The environment's answer to a turn. Raises RewardFault, EndpointUnavailable."""
        try:
            result = await self.episode.step(action)
            result.after(self.conversations)
            if (reader := self.driver.tool_turns) is not None:
                result = replace(result, messages=tuple(map(reader.limited, result.messages)))
            return result
        except EndpointUnavailable:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
            raise fault_of(error) from None

    async def _asked_next(self) -> tuple[Int32[np.ndarray, " P"], int]:
        """Prompt of the next turn, and the tokens that there is room for after it.

        A program is told of a prompt that is too long, and may ask for less, or end: then the last
        turn's result is done. Raises BridgeFault, RewardFault, EndpointUnavailable.
        """
        driver, settings = self.driver, self.driver.settings
        attempts = driver.turns_max if driver.environment.own_prompts else 1
        while True:
            turn, attempts = self.turns[-1], attempts - 1
            ids = self._next_prompt(turn.result)
            # Without `tokens_max`, only the number of turns is limited.
            left = (settings.tokens_max or sys.maxsize) - self.before
            limit = min(driver.context_length, left)
            if len(ids) < limit or not attempts:
                return ids, limit - len(ids)
            refusal = Turn(role="system", content=too_long(len(ids), limit))
            result = replace(await self._answered(refusal), trained=turn.result.trained)
            self.turns[-1] = replace(turn, result=result)
            if result.done:
                return ids, 0

    def _sampling(self, dialogue: Sequence[Message], tools: Sequence[Tool]) -> Sampling:
        """Return the sampling of the next turn, which asks this.

        A program may ask in another order when it runs again, and then gets the same answers: where
        members have prompts of their own, seeds follow from what is asked, and how often it was.
        Recorded pieces of turns are known by seeds of their numbers.
        """
        turn: int | str = len(self.turns)
        in_pieces = isinstance(self.driver.client, PiecewiseClient)
        if self.driver.environment.own_prompts and not in_pieces:
            calls = [[(call.name, call.arguments) for call in m.tool_calls] for m in dialogue]
            said = [(m.role, m.content, *made) for m, made in zip(dialogue, calls, strict=True)]
            text = json.dumps([said, [*map(dict, tools)]], sort_keys=True)
            asked = hashlib.sha256(text.encode()).hexdigest()
            turn = f"{self.asked[asked]} {asked}"
            self.asked[asked] += 1
        return self.request.sampling_of(self.index, turn)

    @property
    def before(self) -> int:
        """Tokens of all segments but the next turn's."""
        ends = (self.turns[end] for name, end in self.ends.items() if name != self.segment)
        return sum(len(t.answer.prompt_token_ids) + len(t.completion.token_ids) for t in ends)

    def _next_prompt(self, result: StepResult) -> Int32[np.ndarray, " P"]:
        """Exact ids after `result`, in a new segment unless it extends one; none for texts."""
        number = len(self.turns) - 1 if result.parent is None else result.parent
        parent, (dialogue, tools) = self.turns[number], self.conversations[number]
        prompt, sampled = parent.answer.prompt_token_ids, parent.completion.token_ids
        if not len(prompt):  # an endpoint of texts, never trained on
            return prompt
        if (opening := result.opening) is not None:
            return self._new_segment(opening.messages, opening.tools)
        try:
            bridge = self.driver.bridge(dialogue, int(sampled[-1]), result.messages, tools)
        except BridgeFault:
            if self.driver.render is None:
                raise
            return self._new_segment([*dialogue, *result.messages], tools)
        extends = self.ends[parent.segment] == number
        self.segment = parent.segment if extends else len(self.ends)
        return np.concatenate([prompt, sampled, bridge])

    def _new_segment(
        self, dialogue: Sequence[Message], tools: Sequence[Tool]
    ) -> Int32[np.ndarray, " P"]:
        """Begin a segment whose prompt is a whole conversation; return its ids.

        Raises BridgeFault where none may begin, or the template cannot carry it.
        """
        render = self.driver.render
        if render is None:
            raise BridgeFault("the environment began another conversation")
        try:
            if tools:
                self.driver.reader.check(tools)
            ids = render(dialogue, tools)
        except InputError as error:
            raise BridgeFault(str(error)) from None
        self.segment = len(self.ends)
        return ids

    async def _next_turn(
        self,
        dialogue: Sequence[Message],
        tools: Sequence[Tool],
        sampling: Sampling,
        ids: Int32[np.ndarray, " P"],
    ) -> ChatAnswer:
        """Sample the next turn from exact ids, or from messages where there are none."""
        session = self.request.group_id
        chat = partial(self.driver.chat, dialogue, 1, sampling, tools=tools, session=session)
        if not len(ids):
            return await chat()
        answer = await chat(prompt_ids=ids)
        check_identity(answer, self.driver.policy)
        check_prompt(answer, ids)
        return answer


async def _close(episode: PlayedEpisode) -> None:
    try:
        await episode.close()
    except Exception:  # noqa: BLE001 - other people's code; what was played stays valid
        _log.exception("an episode could not be closed")


def _first_prompt(starts: Sequence[Start | MarinRLError], example: Example) -> Start:
    """The messages and tools that all members of a group start with; the example's if none began.

    Raises InputError.
    """
    begun = [start for start in starts if isinstance(start, Start)]
    if any(start != begun[0] for start in begun[1:]):
        raise InputError("expected the episodes of one example to start alike, found two starts")
    return begun[0] if begun else Start(messages=example.messages, tools=())

"""Episodes driven against a policy: the one place that asks the inference client for samples.

Token in, token out. The first turns of a group are one request; from then on members go on by
themselves, and the prompt of a turn is

    ids of the last prompt + ids that were sampled from it + bridge(new messages)

so that sampled ids are never rendered to text and tokenized again. Where the chat template has no
such bridge, the episode ends, or goes on in a new segment whose prompt is the whole dialogue as the
template renders it now; what was sampled before is only read there. Owns the order of turns, and
the checks of what an endpoint answers. Leaves out what an episode does (`environments.episode`),
seeds, ends and scores (`trajectories`).
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.environments.episode import POLICY, Start, StepResult, Tool
from marin_rl.environments.episode_pool import PlayedEpisode, open_episodes
from marin_rl.environments.scoring import fault_of
from marin_rl.errors import BridgeFault, EndpointUnavailable, InputError, RewardFault
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.protocol import ChatClient
from marin_rl.rollouts.interruption import (
    Diverged,
    KeepsTurns,
    all_of,
    results_unless_interrupted,
)
from marin_rl.rollouts.tool_turns import ToolTurns
from marin_rl.rollouts.trajectories import (
    ABORTED,
    BRIDGE,
    CONTEXT,
    LENGTH,
    MAX_TURNS,
    REQUEST_FAULTS,
    GroupRequest,
    SampledTurn,
    Trajectory,
    UnansweredTurn,
    as_message,
    check_identity,
    check_prompt,
    end_of,
)
from marin_rl.types import (
    Example,
    Message,
    Sampling,
    ServedPolicy,
    Turn,
)

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
class _Place:
    """Segment that is being played, and the tokens of those before it."""

    segment: int = 0
    before: int = 0


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
        indices = request.indices
        example = self._with_policy(request)
        episodes = open_episodes(self.environment, self.settings, example, len(indices))
        try:
            timed = await all_of([_start(episode) for episode in episodes])
            starts = [start for start, _ in timed]
            prompt = _first_prompt(starts, request.example)
            self._check_tools(request.example, prompt.tools)
            able = [i for i, start in zip(indices, starts, strict=True) if isinstance(start, Start)]
            sampled = await self._first_turns(request, prompt, able)
            firsts = dict(zip(able, sampled, strict=True))
            members = [
                self._play_member(request, index, episode, begun, firsts.get(index), ended)
                for index, episode, begun in zip(indices, episodes, timed, strict=True)
            ]
            return await results_unless_interrupted(members)
        finally:
            await asyncio.gather(*map(_close, episodes))  # those that were not played

    def _with_policy(self, request: GroupRequest) -> Example:
        """Return the example of the episodes, with the policy's address where they ask it."""
        example = request.example
        if not self.environment.asks_policy:
            return example
        policy = {
            "endpoints": list(self.policy.endpoints),
            "model": self.policy.model,
            "sampling": asdict(request.sampling),
        }
        return replace(example, metadata={**example.metadata, POLICY: policy})

    async def _first_turns(
        self, request: GroupRequest, prompt: Start, indices: Sequence[int]
    ) -> list[tuple[ChatAnswer, Completion]]:
        """Completions in the order of the members; the greedy one is a request of its own."""
        messages, tools = prompt.messages, prompt.tools
        chat = partial(self._chat, tools=tools, session=request.group_id)
        last = request.size - 1
        if len(indices) < request.size:
            calls = [chat(messages, 1, request.sampling_of(index)) for index in indices]
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
                self._reader.check_prompt(answer.prompt_token_ids, tools)
        return [(answer, completion) for answer in answers for completion in answer.completions]

    @property
    def _chat(self) -> Callable[..., Coroutine[Any, Any, ChatAnswer]]:
        return partial(
            self.client.chat,
            template_options=self.template_options,
            stop_token_ids=self.stop_token_ids,
        )

    async def _play_member(
        self,
        request: GroupRequest,
        index: int,
        episode: PlayedEpisode,
        begun: tuple[Start | RewardFault, float],
        first: tuple[ChatAnswer, Completion] | None,
        ended: Ended | None,
    ) -> Trajectory:
        """Play a member whose start took its seconds, and report its end."""
        start, start_s = begun
        if isinstance(start, RewardFault):
            trajectory = _not_begun(request, start)
        else:
            assert first is not None, "members that begin have a first turn"
            trajectory = await self._play_recorded(request, index, episode, start, first)
        trajectory = replace(trajectory, start_s=start_s)
        if ended is not None:
            await ended(index, trajectory)
        return trajectory

    async def _play_recorded(
        self,
        request: GroupRequest,
        index: int,
        episode: PlayedEpisode,
        prompt: Start,
        first: tuple[ChatAnswer, Completion],
    ) -> Trajectory:
        """Play a member through its recorded turns and on from there.

        Where the environment does not answer as it did when they were sampled, the member begins
        again, in an episode of its own.
        """
        try:
            trajectory = await self._play(request, index, episode, prompt, *first)
            if isinstance(self.client, KeepsTurns):
                self.client.check_end(request.group_id, index, trajectory)
            return trajectory
        except Diverged as diverged:
            await _close(episode)
            assert isinstance(self.client, KeepsTurns), "raised by such clients alone"
            self.client.begin_again(request.group_id, index, str(diverged))
        (fresh,) = open_episodes(self.environment, self.settings, self._with_policy(request), 1)
        try:
            start, _ = await _start(fresh)
            if isinstance(start, RewardFault):
                return _not_begun(request, start)
            _first_prompt([prompt, start], request.example)
            (first,) = await self._first_turns(request, prompt, [index])
            return await self._play(request, index, fresh, prompt, *first)
        finally:
            await _close(fresh)

    async def _play(
        self,
        request: GroupRequest,
        index: int,
        episode: PlayedEpisode,
        prompt: Start,
        answer: ChatAnswer,
        completion: Completion,
    ) -> Trajectory:
        turns: list[SampledTurn] = []
        messages, tools = prompt.messages, prompt.tools
        dialogue = list(messages)
        sampling, fault, unanswered = request.sampling_of(index), None, None
        place = _Place()
        while True:
            completion = (
                self._reader.read(completion, sampling.stop, tools, len(turns))
                if tools
                else completion
            )
            reason = completion.finish_reason
            turn = await self._stepped(episode, answer, completion, sampling, place)
            if isinstance(turn, UnansweredTurn):
                unanswered, fault, reason = turn, turn.fault, end_of(turn.fault)
                break
            turns.append(turn)
            result = turn.result
            # a turn that was cut has no stop token, which new messages must follow
            if result.done or reason != "stop":
                break
            if len(turns) == self.turns_max:
                reason = MAX_TURNS
                break
            dialogue.append(as_message(completion))
            sampling = request.sampling_of(index, len(turns))
            try:
                ids, place = self._next_prompt(dialogue, turns[-1], tools, place)
                dialogue += result.messages
                # Without a limit of their own, the turns are what is limited, not their tokens.
                left = (self.settings.tokens_max or sys.maxsize) - place.before
                room = min(self.context_length, left) - len(ids)
                if room <= 0:
                    reason = CONTEXT if len(ids) >= self.context_length else LENGTH
                    break
                sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
                answer = await self._go_on(dialogue, tools, sampling, ids, request.group_id)
            except BridgeFault as error:
                _log.warning("an episode of %r ended early: %s", self.environment.name, error)
                reason = BRIDGE
                break
            except REQUEST_FAULTS as error:
                fault, reason = error, ABORTED
                break
            (completion,) = answer.completions
        await _close(episode)  # others may wait for what it holds, long before the group is over
        return Trajectory(
            messages=tuple(messages),
            turns=tuple(turns),
            text=completion.text,
            finish_reason=reason,
            fault=fault,
            unanswered=unanswered,
        )

    async def _stepped(
        self,
        episode: PlayedEpisode,
        answer: ChatAnswer,
        completion: Completion,
        sampling: Sampling,
        place: _Place,
    ) -> SampledTurn | UnansweredTurn:
        """Give a completion to the environment, and take its answer within the limits."""
        began = time.monotonic()
        try:
            result = self._limited(await episode.step(_as_turn(answer, completion, place)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
            return UnansweredTurn(
                answer=answer,
                completion=completion,
                fault=error if isinstance(error, EndpointUnavailable) else fault_of(error),
                environment_s=time.monotonic() - began,
            )
        return SampledTurn(
            answer=answer,
            completion=completion,
            sampling=sampling,
            result=result,
            segment=place.segment,
            environment_s=time.monotonic() - began,
        )

    @property
    def _reader(self) -> ToolTurns:
        if self.tool_turns is None:
            raise InputError("an episode offers tools: expected a driver with `tool_turns`")
        return self.tool_turns

    def _check_tools(self, example: Example, tools: Sequence[Tool]) -> None:
        """Refuse tools that the policy's chat template cannot carry, before anything is sampled.

        Raises InputError.
        """
        if any(message.tool_calls for message in example.messages):
            raise InputError(
                f"example {example.example_id} has messages that call tools: expected them in the "
                "messages that its episode starts with"
            )
        if tools and self.client.gives_ids:
            self._reader.check(tools)

    def _limited(self, result: StepResult) -> StepResult:
        if self.tool_turns is None or not any(m.role == "tool" for m in result.messages):
            return result
        return replace(result, messages=tuple(map(self.tool_turns.limited, result.messages)))

    def _next_prompt(
        self, dialogue: Sequence[Message], last: SampledTurn, tools: Sequence[Tool], place: _Place
    ) -> tuple[Int32[np.ndarray, " P"], _Place]:
        """Return the exact ids that the turn after `last` goes on from, and their place.

        No ids for texts alone. `dialogue` ends with that turn. Raises BridgeFault where there is no
        bridge, and no segment may begin.
        """
        prompt, sampled = last.answer.prompt_token_ids, last.completion.token_ids
        if not len(prompt):  # an endpoint of texts, never trained on
            return prompt, place
        messages = last.result.messages
        try:
            bridge = self.bridge(dialogue, int(sampled[-1]), messages, tools)
        except BridgeFault:
            if self.render is None:
                raise
            before = place.before + len(prompt) + len(sampled)
            ids = self.render([*dialogue, *messages], tools)
            return ids, _Place(segment=place.segment + 1, before=before)
        return np.concatenate([prompt, sampled, bridge]), place

    async def _go_on(
        self,
        dialogue: Sequence[Message],
        tools: Sequence[Tool],
        sampling: Sampling,
        ids: Int32[np.ndarray, " P"],
        session: str,
    ) -> ChatAnswer:
        """Sample a member's next turn from exact ids, or from messages where there are none."""
        chat = partial(self._chat, dialogue, 1, sampling, tools=tools, session=session)
        if not len(ids):
            return await chat()
        answer = await chat(prompt_ids=ids)
        check_identity(answer, self.policy)
        check_prompt(answer, ids)
        return answer


async def _start(episode: PlayedEpisode) -> tuple[Start | RewardFault, float]:
    """The start of an episode or its fault, and its seconds.

    Raises InputError where none can be started, EndpointUnavailable where none can at the moment.
    """
    began = time.monotonic()
    try:
        start = await episode.start()
    except (InputError, EndpointUnavailable):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
        start = fault_of(error)
    return start, time.monotonic() - began


async def _close(episode: PlayedEpisode) -> None:
    try:
        await episode.close()
    except Exception:  # noqa: BLE001 - other people's code; what was played stays valid
        _log.exception("an episode could not be closed")


def _not_begun(request: GroupRequest, fault: RewardFault) -> Trajectory:
    return Trajectory(
        messages=request.example.messages,
        turns=(),
        text="",
        finish_reason=end_of(fault),
        fault=fault,
    )


def _first_prompt(starts: Sequence[Start | RewardFault], example: Example) -> Start:
    """The messages and tools that all members of a group start with; the example's if none began.

    Raises InputError.
    """
    begun = [start for start in starts if isinstance(start, Start)]
    if any(start != begun[0] for start in begun[1:]):
        raise InputError("expected the episodes of one example to start alike, found two starts")
    return begun[0] if begun else Start(messages=example.messages, tools=())


def _as_turn(answer: ChatAnswer, completion: Completion, place: _Place) -> Turn:
    start = place.before + len(answer.prompt_token_ids)
    return Turn(
        role="assistant",
        content=completion.text,
        start=start,
        end=start + len(completion.token_ids),
        logprobs=completion.logprobs,
        tool_calls=completion.tool_calls,
        malformed=completion.malformed,
    )

"""Rollouts out of trajectories and their scores, and samples of one sequence out of rollouts.

Pure but for the clock: nothing is asked for here, and nothing is written.

Axes: T tokens of a rollout, n of a part of it.
"""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.environments.base import reward_of
from marin_rl.errors import BadResponse, MarinRLError
from marin_rl.inference.client.answers import Completion
from marin_rl.rollouts.forest import REWRITTEN, segments_of_rollout
from marin_rl.rollouts.trajectories import (
    ABORTED,
    BRIDGE,
    CONTEXT,
    LENGTH,
    MAX_TURNS,
    REQUEST_FAULTS,
    GroupRequest,
    SampledTurn,
    Score,
    Trajectory,
)
from marin_rl.types import InferenceMetadata, Message, Rollout, ServedPolicy, Status, Timing, Turn
from schemas.tables import UNFINISHED

_STATUS_OF: dict[str, Status] = {
    LENGTH: "truncated",
    MAX_TURNS: "truncated",
    CONTEXT: "truncated",
    BRIDGE: "truncated",
    "abort": "aborted",
    "error": "aborted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPart:
    """Tokens that a piece added to a turn of a member; the prompt's ids where it is the first.

    `known` is the number of those ids that the turn before has: its prompt and its completion.
    `messages` are what the environment said before the turn. `begun_again` says why a member left
    its earlier turns out.
    """

    index: int
    turn: int = 0
    known: int = 0
    messages: tuple[Message, ...] = ()
    begun_again: str | None = None
    prompt: Int32[np.ndarray, " P"]
    tokens: Int32[np.ndarray, " n"]
    logprobs: Float32[np.ndarray, " n"]
    versions: Int32[np.ndarray, " n"]
    digest: str  # of the parameters that sampled the last one
    finish_reason: str


class RolloutMaker:
    """Makes the rollouts of one group, which share example, policy and the clock."""

    def __init__(self, policy: ServedPolicy, request: GroupRequest, started_at: datetime) -> None:
        self._policy = policy
        self._request = request
        self._timing = Timing(
            started_at=started_at,
            finished_at=datetime.now(UTC),
            worker=f"{platform.node()}:{os.getpid()}",
        )

    def sampled(self, index: int, trajectory: Trajectory, score: Score) -> Rollout:
        """The rollout of a trajectory; an error where its score is a fault.

        Answers without the prompt's ids are text: their rollouts have no tokens.
        """
        if isinstance(score, MarinRLError):
            return self.failed(index, score, trajectory)
        for turn in trajectory.turns:
            if not len(turn.completion.token_ids) and len(turn.answer.prompt_token_ids):
                return self.failed(index, BadResponse("the completion has no tokens"), trajectory)
        status = _STATUS_OF.get(trajectory.finish_reason, "complete")
        reward = None if status == "aborted" else reward_of(score)
        in_order = sorted(trajectory.turns, key=lambda turn: turn.segment)
        tokens = _tokens_of(self._policy.weight_version, in_order)
        n_sampled = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
        return Rollout(
            rollout_id=self._name(index),
            index_in_group=index,
            status=status,
            reward=reward,
            reward_components=score,
            finish_reason=trajectory.finish_reason,
            policy_digest=trajectory.turns[-1].completion.parameters_digest,
            n_prompt_tokens=len(tokens["token_ids"]) - n_sampled,
            n_completion_tokens=n_sampled,
            sampling=self._request.sampling_of(index),
            turns=tuple(self._turns(trajectory, reward)),
            timing=self._timed(trajectory),
            **tokens,
        )

    def failed(
        self, index: int, error: MarinRLError, trajectory: Trajectory | None = None
    ) -> Rollout:
        """A failed rollout with its reason; the turns that there were are kept for inspection."""
        turns, reason = _turns_of(self._request.example.messages), ABORTED
        timing = self._timing
        if trajectory is not None:
            timing = self._timed(trajectory)
            turns = tuple(_texts_of(trajectory))
            reason = ABORTED if isinstance(error, REQUEST_FAULTS) else trajectory.finish_reason
        return self._without_tokens(
            index,
            status="error",
            finish_reason=reason,
            error=f"{type(error).__name__}: {error}",
            turns=turns,
            timing=timing,
        )

    def _without_tokens(self, index: int, **known: Any) -> Rollout:
        version = self._policy.weight_version
        return Rollout(
            rollout_id=self._name(index),
            index_in_group=index,
            reward=None,
            token_ids=np.zeros(0, np.int32),
            loss_mask=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            policy_version_min=version,
            policy_version_max=version,
            n_prompt_tokens=0,
            n_completion_tokens=0,
            sampling=self._request.sampling_of(index),
            **known,
        )

    def unfinished(self, index: int) -> Rollout:
        """A rollout that was cancelled because enough others were finished."""
        return self._without_tokens(
            index,
            status="aborted",
            finish_reason=UNFINISHED,
            error="cancelled: enough groups of its shard were finished",
            turns=_turns_of(self._request.example.messages),
            timing=self._timing,
        )

    def part(self, part: SampledPart) -> Rollout:
        """A row of an unfinished group: what a piece added to a member, which may have ended.

        It has the sampling of its turn. Of a further turn's prompt it has the ids that are new, and
        its last turn, the sampled one, starts after all of them.
        """
        prompt = part.prompt[part.known :]
        n_prompt, n_sampled = len(prompt), len(part.tokens)
        start, turns = len(part.prompt), _turns_of(part.messages)
        if part.turn and n_prompt:
            turns += (Turn(role="assistant", content="", start=start, end=start + n_sampled),)
        first = part.versions[0] if n_sampled else self._policy.weight_version
        return Rollout(
            rollout_id=self._name(part.index),
            index_in_group=part.index,
            status="aborted",
            reward=None,
            finish_reason=UNFINISHED if part.finish_reason == LENGTH else part.finish_reason,
            error=part.begun_again,
            token_ids=np.concatenate([prompt, part.tokens]),
            loss_mask=np.repeat(np.array([0, 1], np.int32), [n_prompt, n_sampled]),
            logprobs=np.concatenate([np.zeros(n_prompt, np.float32), part.logprobs]),
            policy_digest=part.digest,
            policy_versions=np.concatenate([np.full(n_prompt, first, np.int32), part.versions]),
            policy_version_min=int(part.versions.min(initial=first)),
            policy_version_max=int(part.versions.max(initial=first)),
            n_prompt_tokens=n_prompt,
            n_completion_tokens=n_sampled,
            sampling=self._request.sampling_of(part.index, part.turn),
            turns=turns,
            timing=self._timing,
        )

    def _timed(self, trajectory: Trajectory) -> Timing:
        """Clock of the group, with the seconds of a member's own requests."""
        turns = [*trajectory.turns, *filter(None, [trajectory.unanswered])]
        timings = [turn.timing for turn in turns]
        return replace(
            self._timing,
            start_s=trajectory.start_s,
            queue_s=total_seconds([timing.queue_s for timing in timings]),
            prefill_s=total_seconds([timing.prefill_s for timing in timings]),
            decode_s=total_seconds([timing.decode_s for timing in timings]),
        )

    def _name(self, index: int) -> str:
        return f"{self._request.group_id}/{index:03d}"

    def _turns(self, trajectory: Trajectory, reward: float | None) -> Iterator[Turn]:
        """Turns in the order the model saw them, by segment; a turn's reward is its step's.

        Where only the finished episode is scored, its last turn has the rollout's reward. What the
        last step received is the last turn's here, so that all tokens have it to come.
        """
        steps = trajectory.turns
        read = [trajectory.messages, *(turn.result.new_messages for turn in steps)]
        in_order = sorted(zip(read, steps, strict=False), key=lambda pair: pair[1].segment)
        last_turn, end, segment, before = in_order[-1][1], 0, 0, 0
        exchanged = {id(steps[-1]): last_turn.result, id(last_turn): steps[-1].result}
        for messages, turn in in_order:
            result = exchanged.get(id(turn), turn.result)
            begins = turn.segment != segment
            if begins:
                segment, before = turn.segment, end
            start = before + len(turn.answer.prompt_token_ids)
            # A prompt that was rendered again contains earlier turns too, so messages have no span.
            yield from _turns_of(messages) if begins else _turns_of(messages, end, start)
            end = start + len(turn.completion.token_ids)
            versions, own = turn.completion.policy_versions, result.received
            last = int(versions[-1]) if versions is not None and len(versions) else None
            if trajectory.scored and turn is last_turn and reward is not None:
                own = (own or 0.0) + reward - (trajectory.reward or 0.0)
            yield Turn(
                role="assistant",
                content=_as_sampled(turn.completion),
                tool_calls=turn.completion.tool_calls,
                tool_name=", ".join(call.name for call in turn.completion.tool_calls) or None,
                tool_call_id=", ".join(call.id for call in turn.completion.tool_calls) or None,
                start=start,
                end=end,
                reward=own,
                rewards=result.rewards,
                malformed=turn.completion.malformed,
                logprobs=turn.completion.logprobs,
                inference_metadata=InferenceMetadata(
                    model=turn.answer.model,
                    weight_version=self._policy.weight_version if last is None else last,
                    sampling=turn.sampling,
                    request_id=turn.answer.request_id,
                    finish_reason=turn.completion.finish_reason,
                ),
                timing=turn.timing,
            )
        yield from _turns_of(steps[-1].result.shown)


def total_seconds(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if known and len(known) == len(seconds) else None


def _as_sampled(completion: Completion) -> str:
    """Return a turn's text with its calls in it: as it was sampled, or a line of JSON for each."""
    if completion.sampled_text is not None or not completion.tool_calls:
        return completion.text if completion.sampled_text is None else completion.sampled_text
    calls = [
        json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        for call in completion.tool_calls
    ]
    return "\n".join([completion.text, *calls] if completion.text else calls)


def _turns_of(
    messages: Sequence[Message], start: int | None = None, end: int | None = None
) -> tuple[Turn, ...]:
    """Turns of messages that were rendered together.

    A single message spans all the tokens; of several, the spans are unknown.
    """
    if len(messages) > 1:
        start = end = None
    return tuple(
        Turn(
            role=message.role,
            content=message.content,
            start=start,
            end=end,
            tool_name=message.name if message.role == "tool" else None,
            tool_call_id=message.tool_call_id,
            tool_calls=message.tool_calls,
            cut=message.cut,
        )
        for message in messages
    )


def _texts_of(trajectory: Trajectory) -> Iterator[Turn]:
    """Turns of a failed trajectory, without tokens."""
    yield from _turns_of(trajectory.messages)
    for turn in trajectory.turns:
        yield Turn(
            role="assistant",
            content=turn.completion.text,
            tool_calls=turn.completion.tool_calls,
            reward=turn.result.received,
            rewards=turn.result.rewards,
            malformed=turn.completion.malformed,
            timing=turn.timing,
        )
        yield from _turns_of(turn.result.new_messages)
    if (last := trajectory.unanswered) is not None:
        calls = last.completion.tool_calls
        yield Turn(
            role="assistant", content=last.completion.text, tool_calls=calls, timing=last.timing
        )


def _tokens_of(version: int, turns: Sequence[SampledTurn]) -> dict[str, Any]:
    """Token fields of the rollout of these turns: all that the model saw, in order.

    A turn's prompt extends the turn before it or begins a segment. Versions are by token as soon as
    weights were swapped within any turn; other tokens have the version of the next sampled one.
    `version` is the version of turns without a swap.
    """
    ids: list[np.ndarray] = []  # of each segment
    mask: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    versions: list[np.ndarray] = []
    sampled: list[np.ndarray] = []  # versions of sampled tokens
    for _, segment in groupby(turns, key=lambda turn: turn.segment):
        last = np.zeros(0, np.int32)  # prompt and completion of the turn before in its segment
        for turn in segment:
            prompt, completion = turn.answer.prompt_token_ids, turn.completion
            n_context, n_sampled = len(prompt) - len(last), len(completion.token_ids)
            trained = np.full(n_sampled, turn.result.trained, np.int32)
            mask += [np.zeros(n_context, np.int32), trained]
            logprobs += [np.zeros(n_context, np.float32), completion.logprobs]
            own = completion.policy_versions
            if own is None:
                own = np.full(n_sampled, version, np.int32)
            next_version = own[0] if n_sampled else version
            versions += [np.full(n_context, next_version, np.int32), own]
            sampled.append(own)
            last = np.concatenate([prompt, completion.token_ids])
        ids.append(last)  # the last turn's ids are the whole segment
    mixed = any(turn.completion.policy_versions is not None for turn in turns)
    sampled_by = np.concatenate(sampled) if mixed else np.array([version])
    return {
        "token_ids": np.concatenate(ids),
        "loss_mask": np.concatenate(mask),
        "logprobs": np.concatenate(logprobs),
        "policy_versions": np.concatenate(versions) if mixed else None,
        "policy_version_min": int(sampled_by.min()),
        "policy_version_max": int(sampled_by.max()),
        "segment_lengths": tuple(map(len, ids)) if len(ids) > 1 else None,
    }


UNTRAINED_LABEL = -100.0  # of atropos's masks, as PyTorch's cross entropy ignores it
UNTRAINED_LOGPROB = 1.0  # of atropos: no logprob is above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A segment of a rollout: the messages and tokens of its prompt and of its response.

    The response begins with the first sampled token. `mask` is 1 on those of its tokens that are
    trained; `logprobs` are of all that were sampled, 0 elsewhere.
    """

    segment: int
    prompt: Sequence[Turn]
    response: Sequence[Turn]
    prompt_ids: Int32[np.ndarray, " P"]
    response_ids: Int32[np.ndarray, " R"]
    mask: Int32[np.ndarray, " R"]
    logprobs: Float32[np.ndarray, " R"]


def samples_of(rollout: Rollout, *, begins_anew: bool = False) -> list[Sample]:
    """The segments of a rollout, each with the messages of its prompt.

    With `begins_anew` a segment that goes back to no earlier turn is another conversation, whose
    messages are its own; else it is the dialogue so far, rendered again.
    """
    lengths = rollout.segment_lengths or (len(rollout.token_ids),)
    ends = list(accumulate(lengths))
    samples = [
        _sample(rollout, number, end - length, end)
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    said = dict[int, Sequence[Turn]]()  # the conversation up to each turn, by its number
    for segment in segments_of_rollout(rollout):
        sample, first, parent = samples[segment["segment"]], segment["turn"], segment["parent"]
        own = sample.prompt[first - 1 :]
        if parent is not None and segment["reason"] != REWRITTEN:
            sample = replace(sample, prompt=(*said[parent], *own))
        elif begins_anew:
            sample = replace(sample, prompt=own)
        samples[segment["segment"]] = sample
        for place in range(len(sample.response)):
            after = sample.response[: place + 1]
            said[first + len(own) + place] = (*sample.prompt, *after)
    return samples


def _sample(rollout: Rollout, number: int, start: int, end: int) -> Sample:
    mask = rollout.loss_mask[start:end]
    first, last = _span(rollout.turns, start, end)
    lead = rollout.turns[first].start if first < len(rollout.turns) else None
    if lead is None:
        lead = start + (int(mask.argmax()) if mask.any() else end - start)
    return Sample(
        segment=number,
        prompt=rollout.turns[:first],
        response=rollout.turns[first:last],
        prompt_ids=rollout.token_ids[start:lead],
        response_ids=rollout.token_ids[lead:end],
        mask=rollout.loss_mask[lead:end],
        logprobs=rollout.logprobs[lead:end],
    )


def _span(turns: Sequence[Turn], start: int, end: int) -> tuple[int, int]:
    """The first sampled turn of a segment, and the turn after its last one."""
    first, last = len(turns), 0
    for place, turn in enumerate(turns):
        if turn.inference_metadata is None:
            continue
        begins = start if turn.start is None else turn.start  # unknown only where all is one prompt
        if begins >= end:
            # What stands between was first read in the next segment's prompt.
            return first, last + 1
        if begins >= start:
            first, last = min(first, place), place
    return first, max(first, last + 1)

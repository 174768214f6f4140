"""Completions so far of group members that are sampled in pieces, read from chains of parts.

A member has a completion for each of its turns, known by the seed of the turn. Leaves out how
pieces are asked for and committed (`partial`).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.rollouts.assemble import SampledPart
from marin_rl.rollouts.trajectories import (
    LENGTH,
    REQUEST_FAULTS,
    Diverged,
    GroupRequest,
    Trajectory,
)
from marin_rl.types import Message, Rollout, RolloutGroup
from schemas.tables import UNFINISHED

GOES_ON = (LENGTH, "abort")  # finish reasons of a piece; an endpoint that aborts gives what it has

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Member:
    """A completion so far, of a turn of a member: its prompt's ids, and what each piece added.

    `messages` are what the environment said before the turn.
    """

    index: int
    seed: int
    turn: int = 0
    messages: tuple[Message, ...] = ()
    prompt: Int32[np.ndarray, " P"] = field(default_factory=lambda: np.zeros(0, np.int32))
    tokens: Int32[np.ndarray, " T"] = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Float32[np.ndarray, " T"] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Int32[np.ndarray, " T"] = field(default_factory=lambda: np.zeros(0, np.int32))
    digest: str = ""  # of the policy that sampled the last token
    finish_reason: str = LENGTH
    text: str | None = None  # where one piece was all

    @property
    def ids(self) -> Int32[np.ndarray, " n"]:
        """Prompt and what was sampled: the prompt of the next piece."""
        return np.concatenate([self.prompt, self.tokens])

    def is_unfinished(self, tokens_max: int) -> bool:
        return self.finish_reason in GOES_ON and len(self.tokens) < tokens_max

    def add(self, part: SampledPart) -> None:
        """Append what a piece sampled; a part with a prompt begins the turn again."""
        if len(part.prompt):
            self.prompt, self.messages, self.text = part.prompt, part.messages, None
            self.tokens, self.logprobs, self.versions = part.tokens, part.logprobs, part.versions
        else:
            self.tokens = np.concatenate([self.tokens, part.tokens])
            self.logprobs = np.concatenate([self.logprobs, part.logprobs])
            self.versions = np.concatenate([self.versions, part.versions])
        self.digest, self.finish_reason = part.digest, part.finish_reason


@dataclass(slots=True)
class GroupRecord:
    """Turns of the members of a group, from its chain of parts and from sampling here.

    `pending` are parts that are not committed yet, which `lock` commits one after the other.
    `messages` counts those of a member's dialogue before its latest turn.
    """

    request: GroupRequest
    turns: dict[int, list[Member]] = field(default_factory=dict[int, list[Member]])
    messages: dict[int, int] = field(default_factory=dict[int, int])
    begun_again: dict[int, str] = field(default_factory=dict[int, str])
    pending: list[SampledPart] = field(default_factory=list[SampledPart])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    places: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def __post_init__(self) -> None:
        for index in range(self.request.size):
            self._expect(index, 0)

    def at(self, seed: int) -> Member:
        """The completion that is drawn with a seed, from what is recorded of it on."""
        index, turn = self.places[seed]
        turns = self.turns.setdefault(index, [])
        if turn == len(turns):
            turns.append(Member(index=index, seed=seed, turn=turn))
            self._expect(index, turn + 1)
        return turns[turn]

    def _expect(self, index: int, turn: int) -> None:
        seed = self.request.sampling_of(index, turn).seed
        assert seed is not None, "turns are known by their seeds"
        self.places[seed] = index, turn

    def add(self, rollout: Rollout) -> None:
        """Add a row of a chain; one of a member's first prompt leaves its turns before it out."""
        index, seed = rollout.index_in_group, rollout.sampling.seed
        assert seed is not None, "see above"
        _, turn = self.places[seed]
        prompted = bool((rollout.loss_mask == 0).any())
        if prompted:
            del self.turns.get(index, [])[turn:]
        before = self.turns[index][turn - 1] if turn else None
        self.at(seed).add(_part_of(rollout, turn, before))

    def new_messages(self, member: Member, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Messages of a dialogue that the environment added before a turn.

        There are none where a first prompt is the example's.
        """
        before, self.messages[member.index] = self.messages.get(member.index, 0), len(messages)
        if member.turn:
            return tuple(messages[before + 1 :])  # the model's own turn is known by its ids
        return () if tuple(messages) == self.request.example.messages else tuple(messages)

    def known_before(self, member: Member, prompt: Int32[np.ndarray, " P"]) -> int:
        """Number of prompt ids that a turn shares with the prompt and completion before it."""
        if not member.turn:
            return 0
        ids = self.turns[member.index][member.turn - 1].ids
        return len(ids) if np.array_equal(prompt[: len(ids)], ids) else 0

    def check_end(self, index: int, trajectory: Trajectory) -> None:
        """Raise Diverged for a member that ended before its recorded turns do."""
        if isinstance(trajectory.fault, REQUEST_FAULTS):
            return
        played = len(trajectory.turns) + (trajectory.unanswered is not None)
        recorded = self.turns.get(index, [])
        # A turn that is expected next, and was never sampled, has no prompt yet.
        if played < len(recorded) and len(recorded[played].prompt):
            raise Diverged(
                f"the episode ended ({trajectory.finish_reason}) after turn {played}, and went on "
                "when that was sampled"
            )

    def begin_again(self, index: int, reason: str) -> None:
        """Leave out the recorded turns of a member, and say so with its next part."""
        _log.warning("%s/%03d begins again: %s", self.request.group_id, index, reason)
        self.begun_again[index] = reason
        self.turns.pop(index, None)
        self.messages.pop(index, None)
        self.pending = [part for part in self.pending if part.index != index]


def records_of(
    chains: Mapping[str, Sequence[RolloutGroup]], requests: Sequence[GroupRequest], oldest: int
) -> dict[str, GroupRecord]:
    """Records of groups by their ids, as chains have them but for members with older tokens."""
    records = {request.group_id: GroupRecord(request) for request in requests}
    for name, record in records.items():
        for rollout in (rollout for group in chains.get(name, ()) for rollout in group.rollouts):
            record.add(rollout)
        # One may have ended without a token, where an endpoint leaves the end token out.
        for index, turns in list(record.turns.items()):
            if any(turn.versions.min(initial=oldest) < oldest for turn in turns):
                del record.turns[index]
    return records


def _part_of(rollout: Rollout, turn: int, before: Member | None) -> SampledPart:
    """Decode a row of a chain; a prompt may continue the ids of the turn before."""
    sampled, ids = rollout.loss_mask == 1, rollout.token_ids
    versions = rollout.policy_versions
    if versions is None:
        versions = np.full(len(ids), rollout.policy_version_min, np.int32)
    prompt, messages = ids[~sampled], rollout.turns
    if before is not None and len(prompt):
        *messages, place = rollout.turns
        assert place.start is not None, "the turn's own place"
        prompt = np.concatenate([before.ids[: place.start - len(prompt)], prompt])
    reason = rollout.finish_reason
    return SampledPart(
        index=rollout.index_in_group,
        turn=turn,
        messages=tuple(each.message for each in messages),
        prompt=prompt,
        tokens=ids[sampled],
        logprobs=rollout.logprobs[sampled],
        versions=versions[sampled],
        digest=rollout.policy_digest or "",
        finish_reason=LENGTH if reason == UNFINISHED else reason,
    )

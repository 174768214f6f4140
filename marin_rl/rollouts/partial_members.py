"""Members of a group that are sampled in pieces: what each has so far, as chains of parts say it.

Leaves out how pieces are asked for and committed (`partial`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.rollouts.assemble import SampledPart
from marin_rl.rollouts.trajectories import LENGTH, GroupRequest
from marin_rl.types import Rollout, RolloutGroup
from schemas.rollouts import UNFINISHED

GOES_ON = (LENGTH, "abort")  # finish reasons of a piece; an endpoint that aborts gives what it has


@dataclass(slots=True, kw_only=True)
class Member:
    """A completion so far: its prompt's ids, and what each piece added."""

    index: int
    seed: int
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
        """True if a further piece is to be asked for."""
        return self.finish_reason in GOES_ON and len(self.tokens) < tokens_max

    def add(self, part: SampledPart) -> None:
        """Append what a piece sampled; a part with a prompt begins the member again."""
        if len(part.prompt):
            self.prompt, self.text = part.prompt, None
            self.tokens, self.logprobs, self.versions = part.tokens, part.logprobs, part.versions
        else:
            self.tokens = np.concatenate([self.tokens, part.tokens])
            self.logprobs = np.concatenate([self.logprobs, part.logprobs])
            self.versions = np.concatenate([self.versions, part.versions])
        self.digest, self.finish_reason = part.digest, part.finish_reason


def members_of(
    chain: Sequence[RolloutGroup], request: GroupRequest, oldest: int
) -> dict[int, Member]:
    """Members of a group by their seeds, as a chain has them."""
    base, members = request.sampling.seed or 0, dict[int, Member]()
    for rollout in (rollout for group in chain for rollout in group.rollouts):
        index = rollout.index_in_group
        member = members.setdefault(index, Member(index=index, seed=base + index))
        member.add(_part_of(rollout))
    # One may have ended without a token, where an endpoint leaves the end token out.
    kept = (m for m in members.values() if m.versions.min(initial=oldest) >= oldest)
    return {member.seed: member for member in kept}


def _part_of(rollout: Rollout) -> SampledPart:
    """The part that a row of a chain is."""
    sampled, ids = rollout.loss_mask == 1, rollout.token_ids
    versions = rollout.policy_versions
    if versions is None:
        versions = np.full(len(ids), rollout.policy_version_min, np.int32)
    reason = rollout.finish_reason
    return SampledPart(
        index=rollout.index_in_group,
        prompt=ids[~sampled],
        tokens=ids[sampled],
        logprobs=rollout.logprobs[sampled],
        versions=versions[sampled],
        digest=rollout.policy_digest or "",
        finish_reason=LENGTH if reason == UNFINISHED else reason,
    )

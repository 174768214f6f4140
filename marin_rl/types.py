"""The nouns: everything that is handed from one room to another.

Legend of axes in names and shapes: B sequences, T positions, G members of a group, P prompts,
V vocabulary. All records are frozen; arrays inside them are never written to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int32, Int64

Role = Literal["system", "user", "assistant", "tool"]
Status = Literal["complete", "truncated", "aborted", "error"]
Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Chat message as it is sent to a model."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Problem of an environment. `answer` is the reference answer where there is one."""

    environment: str
    environment_version: str
    example_id: str
    split: Split
    seed: int
    messages: tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComponent:
    """Named part of a reward; the reward is the sum of `weight * value`."""

    name: str
    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of completions. `top_k` 0 and `top_p` 1 switch the filters off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceMetadata:
    """Origin of a turn's tokens: the model as served, its weight version, the sampling."""

    model: str
    weight_version: int
    sampling: Sampling
    request_id: str = ""
    finish_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Message of a rollout; `start` and `end` delimit its tokens in the rollout's token_ids.

    Both are None where the server renders the turn into a prompt and does not say which tokens are
    whose. `logprobs` (nats, float32, one per token) is filled for sampled turns when the server
    gives it.
    """

    role: Role
    content: str
    start: int | None = None
    end: int | None = None
    reward: float | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    logprobs: Float32[np.ndarray, " n"] | None = None
    inference_metadata: InferenceMetadata | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When and where a rollout was made; durations in seconds."""

    started_at: datetime
    finished_at: datetime
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Sampled answer to an example, with its tokens, its reward and its provenance.

    `token_ids` is prompt and completion in the order the model saw them; `loss_mask` is 1 on tokens
    that the policy sampled; `logprobs` is the log-probability (nats) of each sampled token under
    the sampling distribution and 0 elsewhere. A rollout with status "error" has empty arrays,
    reward None, and says why in `error`.
    """

    rollout_id: str
    index_in_group: int
    status: Status
    reward: float | None
    reward_components: tuple[RewardComponent, ...] = ()
    finish_reason: str = ""
    error: str | None = None
    token_ids: Int32[np.ndarray, " T"]
    loss_mask: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    policy_versions: Int32[np.ndarray, " T"] | None = None
    policy_version_min: int
    policy_version_max: int
    n_prompt_tokens: int
    n_completion_tokens: int
    sampling: Sampling
    turns: tuple[Turn, ...] = ()
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """Rollouts of one example in one round: the unit that advantages are computed over."""

    group_id: str
    example: Example
    rollouts: tuple[Rollout, ...]
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two answers to one prompt, of which `chosen` is the better; what reward models learn from.

    `margin` is the least difference of the rewards, `split` tells held-out pairs from training
    ones; None leaves either to the configuration. `source`, the ids and the rewards say where the
    answers came from. Token ids are prompt and answer together, as the model that answered saw
    them, under the tokenizer and template of the two digests; without them the texts are tokenized.
    """

    id: str
    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    margin: float | None = None
    split: Split | None = None
    source: str | None = None
    chosen_id: str | None = None
    rejected_id: str | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    chosen_token_ids: Int32[np.ndarray, " T"] | None = None
    rejected_token_ids: Int32[np.ndarray, " U"] | None = None
    tokenizer_digest: str | None = None
    chat_template_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The rows of one optimizer step, padded to one length T.

    `segment_ids` is 0 on padding and 1, 2, … on the sequences packed into a row; `positions` count
    from 0 in each segment; `loss_mask` is 1 on the tokens that are trained on; `policy_logprobs`
    are the sampler's (0 off the mask); `advantages` are already spread over tokens.
    `rollout_ids[b]` names the rollouts of row b in segment order.
    """

    token_ids: Int32[np.ndarray, "B T"]
    loss_mask: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    policy_logprobs: Float32[np.ndarray, "B T"]
    advantages: Float32[np.ndarray, "B T"]
    returns: Float32[np.ndarray, "B T"]
    rollout_ids: tuple[tuple[str, ...], ...] = ()


def segment_lengths(batch: TrainingBatch) -> Int64[np.ndarray, " S"]:
    """Tokens of every segment of a batch, row by row; padding is none."""
    width = int(batch.segment_ids.max(initial=0)) + 1
    place_BT = batch.segment_ids + width * np.arange(len(batch.segment_ids))[:, None]
    counts = np.bincount(place_BT.ravel(), minlength=width * len(batch.segment_ids))
    lengths_BS = counts.reshape(-1, width)[:, 1:]
    return lengths_BS[lengths_BS > 0].astype(np.int64)


def segment_starts(batch: TrainingBatch) -> Int64[np.ndarray, " S"]:
    """The first position of every segment, in the order of `segment_lengths`."""
    width = int(batch.segment_ids.max(initial=0)) + 1
    place_BT = batch.segment_ids + width * np.arange(len(batch.segment_ids))[:, None]
    unseen = np.iinfo(np.int64).max
    first = np.full(width * len(batch.segment_ids), unseen)
    np.minimum.at(first, place_BT.ravel(), batch.positions.ravel().astype(np.int64))
    first_BS = first.reshape(-1, width)[:, 1:]
    return first_BS[first_BS < unseen]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRef:
    """A committed slot: its key in the run, and the SHA-256 of its commit object.

    This is all that travels between tasks. `reused` is True when the slot was there already;
    `summary` holds a few numbers for people (rows, tokens, mean reward), never data.
    """

    slot: str
    sha256: str
    reused: bool = field(default=False, compare=False)
    summary: Mapping[str, float] = field(default_factory=dict[str, float], compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """Policy that a round samples from: endpoints (base URLs ending in /v1), model id, proven
    identity.

    `transfer` has the cost of the weight sync: bytes, seconds, transfers, failures.
    """

    endpoints: tuple[str, ...]
    model: str
    weight_version: int
    parameters_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    checkpoint: SlotRef
    transfer: Mapping[str, float] = field(default_factory=dict[str, float], compare=False)

"""Records that parts of marin-rl pass to one another: messages, examples, rollouts, batches.

Legend of axes in names and shapes: B sequences, T positions, G members of a group, P prompts,
V vocabulary. All records are frozen; arrays inside them are never written to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int8, Int32, Int64

from marin_rl.slot_ref import SlotRef as SlotRef  # without arrays

Role = Literal["system", "user", "assistant", "tool"]


def as_role(role: Any) -> Any:
    """Return a role by our name: `developer` is OpenAI's of `system` since its reasoning models."""
    return "system" if role == "developer" else role


Status = Literal["complete", "truncated", "aborted", "error"]
Split = Literal["train", "eval"]
PairSection = Literal["reward_model", "preference"]  # of a configuration, and of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """Tool call of a model; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Chat message as it is sent to a model.

    A model's message has the `tool_calls` that are no part of its content; the result of a tool has
    the role "tool", the id of its call and the tool's `name`. `cut` says that a result was longer.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    cut: bool = False


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation to learn: its messages before the last answer, and that answer.

    `tools` are those that it offers, as chat templates have them; `trained` says for each answer of
    the assistant whether it is learned, or by which weight, where the conversation says it. With
    `segments` it may be learned as several sequences, where the template rewrites what came before.
    `name` says in errors where it is from, `options` are those of the template.
    """

    messages: Sequence[Message]
    answer: Message
    name: str
    tools: Sequence[Mapping[str, Any]] = ()
    trained: Sequence[bool | float] | None = None
    segments: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def answers(self) -> "list[Demonstration]":
        """A demonstration of each answer of the assistant, in order, the last one as it is."""
        places = [n for n, message in enumerate(self.messages) if message.role == "assistant"]
        earlier = [
            replace(
                self,
                messages=self.messages[:place],
                answer=self.messages[place],
                name=f"{self.name}, answer {number} of {len(places) + 1}",
            )
            for number, place in enumerate(places, 1)
        ]
        return [*earlier, self]


def message_of(values: Mapping[str, Any]) -> Message:
    """Return the message of its fields as JSON has them: what `orjson.dumps(message)` wrote."""
    fields = dict(values)
    fields["tool_calls"] = tuple(ToolCall(**call) for call in values.get("tool_calls", ()))
    return Message(**fields)


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
    """Named part of a reward; the reward is the sum of `weight * value`.

    `detail` is a text behind the value, such as a judge's reply; it is stored with the metadata of
    the rollout.
    """

    name: str
    value: float
    weight: float = 1.0
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """Named part of a step's reward; the reward is the sum of the values."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of completions. `top_k` 0, `top_p` 1 and None are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


# Fields of `Sampling` that OpenAI's routes do not define.
BEYOND_OPENAI = ("top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceMetadata:
    """Origin of a turn's tokens: the model as served, its weight version, the sampling."""

    model: str
    weight_version: int
    sampling: Sampling
    request_id: str = ""
    finish_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTiming:
    """Seconds of a sampled turn by phase; None where they are not known.

    `queue_s`, `prefill_s` and `decode_s` are those of the engine's request, which the first turns
    of a group share. `environment_s` is the environment's time for its answer to the turn.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    environment_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Message of a rollout; `start` and `end` delimit its tokens in the rollout's token_ids.

    Both are None where the server renders the turn into a prompt and does not say which tokens are
    whose. `logprobs` (nats, float32, one per token) is filled for sampled turns when the server
    gives it. `tool_calls` are those of a sampled turn, which are no part of its content;
    `malformed` is the part of the content that was meant as a call and could not be read as one.
    `rewards` are the parts of `reward` by name, where its step named them. `tool_name`,
    `tool_call_id` and `cut` are of the result of a tool.
    """

    role: Role
    content: str
    start: int | None = None
    end: int | None = None
    reward: float | None = None
    rewards: tuple[NamedReward, ...] = ()
    tool_name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str | None = None
    cut: bool = False
    logprobs: Float32[np.ndarray, " n"] | None = None
    inference_metadata: InferenceMetadata | None = None
    timing: TurnTiming = field(default_factory=TurnTiming)

    @property
    def message(self) -> Message:
        return Message(
            role=self.role,
            content=self.content,
            tool_calls=self.tool_calls,
            tool_call_id=self.tool_call_id,
            name=self.tool_name if self.role == "tool" else None,
            cut=self.cut,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When and where a rollout was made; durations in seconds.

    Those of queue, prefill and decode are sums over the turns, and None where the server did not
    report them for all of them. `start_s` is the environment's time to start the episode.
    """

    started_at: datetime
    finished_at: datetime
    start_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Sampled answer to an example, with its tokens, its reward and its provenance.

    `token_ids` is prompt and completion in the order the model saw them; `loss_mask` is 1 on tokens
    that the policy sampled, but for turns that are not trained; `logprobs` is the log-probability
    (nats) of each sampled token under the sampling distribution and 0 elsewhere. `segment_lengths`
    cuts these arrays into segments, each with a prompt of its own, where the dialogue was rendered
    again; None where it is one.
    `policy_digest` names the parameters that sampled its last token, where they are others than its
    group's. `teacher_logprobs` are a teacher's for the sampled tokens, 0 elsewhere; None where none
    was asked. A rollout with status "error" has empty arrays, reward None, and says why in `error`.
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
    teacher_logprobs: Float32[np.ndarray, " T"] | None = None
    segment_lengths: tuple[int, ...] | None = None
    policy_digest: str | None = None
    policy_version_min: int
    policy_version_max: int
    n_prompt_tokens: int
    n_completion_tokens: int
    sampling: Sampling
    turns: tuple[Turn, ...] = ()
    timing: Timing

    @property
    def last_segment(self) -> Int32[np.ndarray, " t"]:
        """Token ids of the last segment: the whole dialogue as the last turn read it, and that."""
        lengths = self.segment_lengths
        return self.token_ids[-lengths[-1] :] if lengths else self.token_ids

    @property
    def last_mask(self) -> Int32[np.ndarray, " t"]:
        return self.loss_mask[-len(self.last_segment) :]


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
    Loss masks are 1 on the tokens of an answer that a policy learns; reference log-probabilities
    are of these, by the policy before its first update. With a `label`, `chosen` is one answer that
    is desirable or not, and `rejected` an answer to another prompt, for the KL of KTO.
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
    chosen_loss_mask: Int8[np.ndarray, " T"] | None = None
    rejected_loss_mask: Int8[np.ndarray, " U"] | None = None
    chosen_reference_logprobs: Float32[np.ndarray, " T"] | None = None
    rejected_reference_logprobs: Float32[np.ndarray, " U"] | None = None
    label: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The rows of one optimizer step, padded to one length T.

    `segment_ids` is 0 on padding and 1, 2, … on the sequences packed into a row; `positions` count
    from 0 in each segment; `loss_mask` is 1 on the tokens that are trained on; `policy_logprobs`
    are the sampler's (0 off the mask); `advantages` are already spread over tokens.
    `rollout_ids[b]` names the rollouts of row b in segment order. `teacher_logprobs` are NaN on
    trained tokens that no teacher scored; None for a run without a teacher. `microbatch_rows` are
    those of a forward and backward pass where the round chose them; None: as configured.
    `loss_weights` are those of the tokens' losses when supervised; None: 1 on all that are trained.
    """

    token_ids: Int32[np.ndarray, "B T"]
    loss_mask: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    policy_logprobs: Float32[np.ndarray, "B T"]
    advantages: Float32[np.ndarray, "B T"]
    returns: Float32[np.ndarray, "B T"]
    rollout_ids: tuple[tuple[str, ...], ...] = ()
    teacher_logprobs: Float32[np.ndarray, "B T"] | None = None
    microbatch_rows: int | None = None
    loss_weights: Float32[np.ndarray, "B T"] | None = None


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


CanarySample = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Tokens that a policy samples for the canary's prompt, with the trainer's logprobs in nats.

    An endpoint that joins later is proven by them, without the trainer. `lengths` are the numbers
    of tokens of each sample, which lie one after the other; none: it is one sample.
    """

    temperature: float
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    lengths: tuple[int, ...] = ()

    @property
    def samples(self) -> list[CanarySample]:
        ends = list(accumulate(self.lengths or (len(self.token_ids),)))
        return [
            (self.token_ids[start:end], self.logprobs[start:end])
            for start, end in zip([0, *ends], ends, strict=False)
        ]


# Prefect links a task's result to later tasks by weak reference, so that an address that is used
# again draws no false edge in its graph.
@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class ServedPolicy:
    """Policy that a round samples from: endpoints (base URLs ending in /v1), model id, proven
    identity.

    `transfer` has the cost of the weight sync: bytes, seconds, transfers, failures. `canary` is set
    for remote endpoints alone, which may come and go; `weights` is the folder that those load which
    are sent weights.
    """

    endpoints: tuple[str, ...]
    model: str
    weight_version: int
    parameters_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    checkpoint: SlotRef
    transfer: Mapping[str, float] = field(default_factory=dict[str, float], compare=False)
    canary: Canary | None = field(default=None, compare=False)
    weights: str | None = field(default=None, compare=False)

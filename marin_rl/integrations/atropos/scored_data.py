"""Groups as environments of atropos push them (`ScoredData`): checks, and the rollouts they become.

Scores become rewards, `inference_logprobs` those of the sampler. What a run would leave out
(advantages of the environment's own, images, distillation) is refused.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from marin_rl.config import Config
from marin_rl.errors import InputError
from marin_rl.finite import LOGPROB_MIN, fit_logprobs, reward_number
from marin_rl.rollouts.assemble import UNTRAINED_LABEL, UNTRAINED_LOGPROB
from marin_rl.storage.tables.group_queue import DIGEST, ENVIRONMENT, ORIGIN
from marin_rl.types import (
    Example,
    InferenceMetadata,
    Message,
    RewardComponent,
    Role,
    Rollout,
    RolloutGroup,
    Sampling,
    ServedPolicy,
    Timing,
    Turn,
)

POLICY_VERSION = "policy_version"  # in `group_overrides`: the checkpoint that sampled the group

# Fields of the protocol that a run does not follow, and why.
REFUSED = {
    "advantages": "the run computes advantages from the scores (objective.advantage)",
    "ref_logprobs": "the run computes those of its own reference policy",
    "images": "policies read text alone",
    "distill_token_ids": "runs train on rewards",
    "distill_logprobs": "runs train on rewards",
}
OVERRIDES_KNOWN = {"set_advantage_to_zero", "temperature"}


class PushedMessage(BaseModel):
    """Chat message of a pushed sequence; other fields than these are not kept."""

    model_config = ConfigDict(frozen=True)

    role: Role
    content: str | None = None


class ScoredData(BaseModel):
    """A group of atropos 0.4: `masks` has a token's id where it was sampled, elsewhere -100."""

    model_config = ConfigDict(frozen=True)

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    messages: list[list[PushedMessage]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any] | None] | None = None
    group_overrides: dict[str, Any] | None = None
    env_id: int | None = Field(default=None, ge=0)
    advantages: Any = None
    ref_logprobs: Any = None
    images: Any = None
    distill_token_ids: Any = None
    distill_logprobs: Any = None

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PushingEnvironment:
    """An environment that is registered: its number, its name, and its name with a count."""

    number: int
    name: str
    real_name: str
    group_size: int
    max_token_length: int
    weight: float
    min_batch_allocation: float | None = None


def check_scored_data(data: ScoredData, config: Config, vocabulary: int) -> None:
    """Raise InputError with what was expected and found, unless a run can train on a group."""
    _check_fields(data, config.rollouts.group_size)
    for index, score in enumerate(data.scores):
        try:
            reward_number(score)
        except ValueError as error:
            raise InputError(f"scores.{index}: {error}") from None
    _check_settings(data, config.sampling.temperature)
    for index in range(len(data.scores)):
        _check_sequence(data, index, config.policy.context_length, vocabulary)


def _check_fields(data: ScoredData, size: int) -> None:
    for name, reason in REFUSED.items():
        if getattr(data, name):
            raise InputError(f"{name}: expected null or an empty list: {reason}")
    for name in ("tokens", "masks", "scores", "inference_logprobs", "messages"):
        values = getattr(data, name)
        if name == "messages" and not values:
            continue
        if values is None or len(values) != size:
            found = "null" if values is None else len(values)
            raise InputError(f"{name}: expected {size}, rollouts.group_size, found {found}")


def check_texts(data: ScoredData, decode: Callable[[list[int]], str]) -> None:
    """Raise InputError where no message of a model is in the text of its tokens.

    Such tokens are of another tokenizer. Messages are compared without white space; a group that
    has none tells nothing.
    """
    shown = None
    for tokens, messages in zip(data.tokens, data.messages or (), strict=False):
        text = decode(tokens)
        said = [m.content for m in messages if m.role == "assistant" and (m.content or "").strip()]
        if any("".join(content.split()) in "".join(text.split()) for content in said if content):
            return
        if said:
            shown = shown or (said[0], text)
    if shown is not None:
        raise InputError(
            f"messages: expected what the tokens say with the run's tokenizer, found "
            f"{shown[0]!r:.80} for tokens that say {shown[1]!r:.80}: sample with "
            "policy.tokenizer of the run"
        )


def _check_settings(data: ScoredData, temperature: float) -> None:
    requested = (data.generation_params or {}).get("temperature", temperature)
    if requested != temperature:
        raise InputError(
            f"generation_params.temperature: expected {temperature:g}, sampling.temperature, at "
            f"which the trainer computes logprobs, found {requested!r}"
        )
    for index, overrides in enumerate(data.overrides or ()):
        if wrong := sorted(OVERRIDES_KNOWN & {k for k, v in (overrides or {}).items() if v}):
            raise InputError(
                f"overrides.{index}.{wrong[0]}: expected none: every sequence of a group is "
                "trained on at the run's temperature"
            )


def _check_sequence(data: ScoredData, index: int, context_length: int, vocabulary: int) -> None:
    """Raise InputError unless the arrays of a sequence agree."""
    tokens, logprobs = data.tokens[index], (data.inference_logprobs or [])[index]
    lengths = {"masks": len(data.masks[index]), "inference_logprobs": len(logprobs)}
    if not 2 <= len(tokens) <= context_length:
        raise InputError(
            f"tokens.{index}: expected 2 to {context_length} ids, policy.context_length, found "
            f"{len(tokens)}"
        )
    for name, length in lengths.items():
        if length != len(tokens):
            raise InputError(
                f"{name}.{index}: expected {len(tokens)}, one for each token, found {length}"
            )
    ids_T, mask_T = np.array(tokens, np.int64), np.array(data.masks[index], np.int64)
    logprobs_T, trained_T = np.array(logprobs, np.float64), mask_T != UNTRAINED_LABEL
    _refuse(
        (ids_T < 0) | (ids_T >= vocabulary), f"tokens.{index}", ids_T, f"ids below {vocabulary}"
    )
    _refuse(trained_T & (mask_T != ids_T), f"masks.{index}", mask_T, "-100 or the token's own id")
    if trained_T[0] or not trained_T.any():
        raise InputError(
            f"masks.{index}: expected -100 on the first token and a sampled token after it, found "
            + ("a sampled first token" if trained_T[0] else "-100 everywhere")
        )
    name = f"inference_logprobs.{index}"
    untrained = UNTRAINED_LOGPROB
    _refuse(~trained_T & (logprobs_T != untrained), name, logprobs_T, "1.0 where masks has -100")
    expected = f"a finite logprob, at most 0, where sampled, and at least {LOGPROB_MIN:g}"
    _refuse(trained_T & ~fit_logprobs(logprobs_T), name, logprobs_T, expected)


def _refuse(wrong_T: np.ndarray, name: str, values_T: np.ndarray, expected: str) -> None:
    if wrong_T.any():
        place = int(wrong_T.argmax())
        raise InputError(f"{name}.{place}: expected {expected}, found {values_T[place]}")


def policy_version_of(data: ScoredData) -> int | None:
    """The policy version that an environment says a group was sampled with. Raises InputError."""
    version = (data.group_overrides or {}).get(POLICY_VERSION)
    if version is not None and (not isinstance(version, int) or version < 0):
        raise InputError(
            f"group_overrides.{POLICY_VERSION}: expected the number of a checkpoint, found "
            f"{version!r:.100}"
        )
    return version


def rollout_group(
    data: ScoredData,
    group_id: str,
    environment: PushingEnvironment,
    policy: ServedPolicy,
    sampling: Sampling,
    decode: Callable[[list[int]], str],
) -> RolloutGroup:
    """The rollouts of a group that `check_scored_data` accepts, sampled by `policy`.

    `sampling` has the run's settings; `decode` gives the text of tokens.
    """
    now = datetime.now(UTC)
    timing = Timing(started_at=now, finished_at=now, worker=environment.real_name)
    metadata = InferenceMetadata(
        model=policy.model, weight_version=policy.weight_version, sampling=sampling
    )
    rollouts = list[Rollout]()
    for index, score in enumerate(data.scores):
        trained = np.array(data.masks[index]) != UNTRAINED_LABEL
        logprobs = np.array((data.inference_logprobs or [])[index], np.float32)
        n_sampled = int(trained.sum())
        rollout = Rollout(
            rollout_id=f"{group_id}/{index:03d}",
            index_in_group=index,
            status="complete",
            reward=score,
            reward_components=(RewardComponent(name="score", value=score),),
            token_ids=np.array(data.tokens[index], np.int32),
            loss_mask=trained.astype(np.int32),
            logprobs=np.where(trained, np.minimum(logprobs, 0), 0).astype(np.float32),
            policy_version_min=policy.weight_version,
            policy_version_max=policy.weight_version,
            n_prompt_tokens=len(trained) - n_sampled,
            n_completion_tokens=n_sampled,
            sampling=sampling,
            turns=(),
            timing=timing,
        )
        messages = data.messages[index] if data.messages else []
        turns = _turns(messages, rollout, decode, metadata)
        rollouts.append(replace(rollout, turns=turns))
    return RolloutGroup(
        group_id=group_id,
        example=_example(data, environment, rollouts[0]),
        rollouts=tuple(rollouts),
        group_size=len(rollouts),
    )


def _example(data: ScoredData, environment: PushingEnvironment, first: Rollout) -> Example:
    """The problem of a group, by the tokens of its prompt: the protocol has no other name."""
    prompt = first.token_ids[: int(first.loss_mask.argmax())]
    before = [turn.role for turn in first.turns].index("assistant")
    origin = {DIGEST: data.digest, ENVIRONMENT: environment.number, "name": environment.real_name}
    extra = {"generation_params": data.generation_params, "group_overrides": data.group_overrides}
    return Example(
        environment=environment.name,
        environment_version="atropos",
        example_id=hashlib.sha256(prompt.tobytes()).hexdigest()[:16],
        split="train",
        seed=0,
        messages=tuple(Message(role=t.role, content=t.content) for t in first.turns[:before]),
        metadata={ORIGIN: origin, **{name: value for name, value in extra.items() if value}},
    )


def _turns(
    messages: Sequence[PushedMessage],
    rollout: Rollout,
    decode: Callable[[list[int]], str],
    metadata: InferenceMetadata,
) -> tuple[Turn, ...]:
    """Turns of a sequence: its messages, where each sampled span has one, else the spans' texts."""

    def sampled(content: str, start: int, end: int) -> Turn:
        return Turn(
            role="assistant",
            content=content,
            start=start,
            end=end,
            logprobs=rollout.logprobs[start:end],
            inference_metadata=metadata,
        )

    spans: list[tuple[int, int, int]] = []  # of equal values in the mask
    for value, run in groupby(rollout.loss_mask.tolist()):
        start = spans[-1][2] if spans else 0
        spans.append((value, start, start + len(list(run))))
    places = [(start, end) for trained, start, end in spans if trained]
    turns = list[Turn]()
    if sum(message.role == "assistant" for message in messages) == len(places):
        remaining = iter(places)
        for message in messages:
            content = message.content or ""
            if message.role == "assistant":
                turns.append(sampled(content, *next(remaining)))
            else:
                turns.append(Turn(role=message.role, content=content))
    else:
        for trained, start, end in spans:
            text = decode(rollout.token_ids[start:end].tolist())
            if trained:
                turns.append(sampled(text, start, end))
            else:
                turns.append(Turn(role="user", content=text, start=start, end=end))
    last = max(n for n, turn in enumerate(turns) if turn.role == "assistant")
    turns[last] = replace(turns[last], reward=rollout.reward)
    return tuple(turns)

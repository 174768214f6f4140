"""Reward models as reward components: their slot, and the scores that they add to rollouts.

Scoring is done by the owner of the model (a `RewardScorer`); nothing here knows of devices. It
happens for a shard at once, when all of its completions are there and before it is committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int32

from marin_rl.config import Config, LearnedRewardConfig
from marin_rl.environments.base import reward_of
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.finite import BOUNDS, fit_rewards
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, checkpoint_named
from marin_rl.types import RewardComponent, Rollout, RolloutGroup, SlotRef

KEY = "environment.reward_model.checkpoint"
STAMP = "reward_model"  # in the footer of a shard: the digest of the model that scored it


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardIdentity:
    """Identity of a reward model: equal ones give the same rewards under the same settings.

    `mean` and `std` are of the raw rewards over the pairs it was trained on.
    """

    parameters_digest: str
    mean: float
    std: float


@runtime_checkable
class RewardScorer(Protocol):
    """A reward model that is ready to score."""

    @property
    def identity(self) -> RewardIdentity: ...

    def score(self, sequences: Sequence[Int32[np.ndarray, " _"]]) -> Float64[np.ndarray, " N"]:
        """The raw reward of each sequence of token ids, read at its last token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSlot:
    """Slot of the configured reward model, and its manifest."""

    run: Run
    ref: SlotRef
    identity: RewardIdentity


def reward_model_slot_of(
    config: Config, tokenizer_digest: str, chat_template_digest: str
) -> RewardModelSlot:
    """The reward model of `environment.reward_model`, checked for policies with this tokenizer.

    Raises ConfigError where it is not committed or was made for fewer tokens than the policy may
    use, InputError where its tokenizer or chat template is another.
    """
    settings = config.environment.reward_model
    assert settings is not None, "the configuration names no reward model"
    kinds = {"reward_model": "step-00200"}
    run, ref = checkpoint_named(settings.checkpoint, kinds, KEY, config.storage_options)
    source = run.store.url_of(ref.slot)
    longest, needed = run.config.policy.context_length, config.policy.context_length
    if longest < needed:
        raise ConfigError(
            f"{KEY}: {source} was trained with policy.context_length {longest}, but rollouts may "
            f"have {needed} tokens: expected at least that; lower policy.context_length to it"
        )
    extra = manifest_of(run.store, ref).extra
    for field, expected in (
        ("tokenizer_digest", tokenizer_digest),
        ("chat_template_digest", chat_template_digest),
    ):
        if (actual := str(extra[field])) != expected:
            raise InputError(
                f"{KEY}: {source} was trained with another {field.removesuffix('_digest')}: "
                f"expected digest {expected[:12]} of the policy's, found {actual[:12]}; train a "
                "reward model with the policy's tokenizer and chat template"
            )
    identity = RewardIdentity(
        parameters_digest=str(extra["parameters_digest"]),
        mean=float(extra["reward_mean"]),
        std=float(extra["reward_std"]),
    )
    return RewardModelSlot(run=run, ref=ref, identity=identity)


def add_model_reward(
    groups: Sequence[RolloutGroup], settings: LearnedRewardConfig, scorer: RewardScorer
) -> list[RolloutGroup]:
    """The groups with the model's component in every rollout that has a reward and tokens.

    Raises RewardFault where the model gives no finite number, or a component of its name is there.
    """
    judged = [r for group in groups for r in group.rollouts if _is_judged(r)]
    if not judged:
        return list(groups)
    raw = scorer.score([rollout.last_segment for rollout in judged])
    value_N = component_values(raw, settings, scorer.identity)
    unfit_N = ~fit_rewards(settings.weight * value_N)
    if unfit_N.any():
        place = int(unfit_N.argmax())
        raise RewardFault(
            f"the reward model gave {np.count_nonzero(unfit_N)} of {len(raw)} rollouts no finite "
            f"reward {BOUNDS}; found {value_N[place]} for {judged[place].rollout_id}"
        )
    values = iter(value_N.tolist())
    return [
        replace(
            group,
            rollouts=tuple(
                _with_component(rollout, settings, next(values)) if _is_judged(rollout) else rollout
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


def component_values(
    raw: Float64[np.ndarray, " N"], settings: LearnedRewardConfig, identity: RewardIdentity
) -> Float64[np.ndarray, " N"]:
    values = (raw - identity.mean) / identity.std if settings.normalise else raw
    values = values + settings.offset
    return values if settings.clip is None else np.clip(values, -settings.clip, settings.clip)


def _is_judged(rollout: Rollout) -> bool:
    return rollout.reward is not None and len(rollout.token_ids) > 0


def _with_component(rollout: Rollout, settings: LearnedRewardConfig, value: float) -> Rollout:
    if any(part.name == settings.name for part in rollout.reward_components):
        raise RewardFault(
            f"the environment has a reward component named {settings.name!r} already: set "
            "environment.reward_model.name to another"
        )
    own = (
        replace(part, weight=part.weight * settings.environment_weight)
        for part in rollout.reward_components
    )
    learned = RewardComponent(name=settings.name, value=value, weight=settings.weight)
    components = (*own, learned)
    reward = reward_of(components)
    *before, answer = rollout.turns
    turns = (*before, replace(answer, reward=reward))
    return replace(rollout, reward=reward, reward_components=components, turns=turns)

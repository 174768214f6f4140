"""Reward models: the scores that they add to rollouts, and the preference pairs they learn from.

Scoring is done by the owner of the model (a `RewardScorer`); nothing here knows of devices. It
happens for a shard at once, when all of its completions are there and before it is committed. A
preference pair is the best against the worst member of a committed group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int32

from marin_rl.config import Config, LearnedRewardConfig, PairTrainingConfig
from marin_rl.environments.base import reward_of
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.finite import BOUNDS, fit_rewards
from marin_rl.rollouts.trajectories import last_completion
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.run_progress import progress
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.runs import Run, checkpoint_named
from marin_rl.storage.tables.pairs import PairFile, encode_pairs, read_pairs
from marin_rl.storage.tables.rollouts import groups_of, iter_shards
from marin_rl.types import (
    PairSection,
    PreferencePair,
    RewardComponent,
    Rollout,
    RolloutGroup,
    SlotRef,
)
from schemas.manifests import sha256_of

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
    @property
    def identity(self) -> RewardIdentity: ...

    def score(self, sequences: Sequence[Int32[np.ndarray, " _"]]) -> Float64[np.ndarray, " N"]:
        """The raw reward of each sequence of token ids, read at its last token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSlot:
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


def given_pairs(settings: PairTrainingConfig, section: PairSection) -> PairFile:
    """The pairs that a section names: of a file, or of the groups of a run whose folder it names.

    Raises InputError naming the row and the field.
    """
    folder = Path(settings.pairs)
    if (folder / RUN_KEY).is_file():
        pairs = pairs_of_run(Run.open(str(folder.parent), folder.name))
        file = PairFile(
            pairs=tuple(pairs),
            places=tuple(f"{folder}, pair {pair.id}" for pair in pairs),
            sha256=sha256_of(encode_pairs(pairs)),
        )
    else:
        file = read_pairs(folder, f"{section}.pairs")
    return file.learned_as(labelled=settings.labelled)


def pairs_of_run(
    run: Run,
    *,
    component: str | None = None,
    margin_min: float = 0.0,
    rounds: Sequence[int] | None = None,
) -> list[PreferencePair]:
    """A pair of every group of the sealed rounds (all, or `rounds`) that gives one, in order.

    See `pair_of_group`; tokens are the rollouts' own. Raises InputError where no group gives a
    pair, naming the components there are; ObjectMissing for a round that is not sealed.
    """
    chosen = [p.round for p in progress(run).values() if p.rollouts] if rounds is None else rounds
    pairs: list[PreferencePair] = []
    names: set[str] = set()
    for round in chosen:
        for table in iter_shards(run, round):
            digests = table["tokenizer_digest"][0].as_py(), table["chat_template_digest"][0].as_py()
            for group in groups_of(table):
                names |= {part.name for r in group.rollouts for part in r.reward_components}
                pair = pair_of_group(group, component, margin_min, digests, run.run_id)
                pairs += [] if pair is None else [pair]
    if not pairs:
        criterion = "the reward" if component is None else f"the component {component!r}"
        raise InputError(
            f"run {run.run_id!r}: in no group of {len(chosen)} sealed rounds do two members differ "
            f"by {criterion}, and by at least {margin_min:g}; components there: "
            f"{', '.join(sorted(names)) or 'none'}"
        )
    return pairs


def pair_of_group(
    group: RolloutGroup,
    component: str | None,
    margin_min: float,
    digests: tuple[str, str],
    source: str,
) -> PreferencePair | None:
    """The best and the worst member of a group by a reward component (None: by the reward).

    None where fewer than two members have it, where they differ by nothing or by less than
    `margin_min`, or where both gave the same answer. The first of equals counts. `digests` are
    those of tokenizer and chat template.
    """
    valued = list[tuple[float, Rollout]]()
    for rollout in group.rollouts:
        values = [part.value for part in rollout.reward_components if part.name == component]
        value = rollout.reward if component is None else next(iter(values), None)
        if len(rollout.token_ids) and value is not None and fit_rewards(value):
            valued.append((value, rollout))
    if len(valued) < 2:
        return None
    best, chosen = max(valued, key=lambda item: item[0])
    worst, rejected = min(valued, key=lambda item: item[0])
    if best - worst < margin_min or best == worst:
        return None
    if chosen.last_segment.tolist() == rejected.last_segment.tolist():
        return None
    return PreferencePair(
        id=f"{source}/{group.group_id}",
        messages=group.example.messages,
        chosen=last_completion(chosen) or "",
        rejected=last_completion(rejected) or "",
        source=source,
        chosen_id=chosen.rollout_id,
        rejected_id=rejected.rollout_id,
        chosen_reward=best,
        rejected_reward=worst,
        chosen_token_ids=chosen.last_segment,
        rejected_token_ids=rejected.last_segment,
        chosen_loss_mask=chosen.last_mask.astype(np.int8),
        rejected_loss_mask=rejected.last_mask.astype(np.int8),
        tokenizer_digest=digests[0],
        chat_template_digest=digests[1],
    )

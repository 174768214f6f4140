"""Passes over a round's rows before its first update: logprobs, values, norms of scores.

That is the trainer's own log-probabilities, where the objective corrects by them and takes more
than one update, those of the reference, where KL is a part of the reward, and what advantages are
made of token by token: the values of a critic, or the squared norms of scores. Leaves out what the
penalty is (reference_policy.py), what an advantage is (critic.py, token_baseline.py) and what the
step does with all of it (step.py).

Axes: M microbatches, R rows of one, T positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32

from marin_rl.batching.advantages import rewards_of
from marin_rl.config import CriticConfig, ObjectiveConfig
from marin_rl.training.critic import token_gae, whitened
from marin_rl.training.reference_policy import reward_penalty, token_penalty
from marin_rl.training.step import Parameters, Reference, StepArrays
from marin_rl.training.token_baseline import return_weights, round_token_advantages
from marin_rl.types import TrainingBatch

Cut = Sequence[tuple[StepArrays, int]]
RowScore = Callable[[Parameters, StepArrays, int], Float32[np.ndarray, "M R T"]]
RowValues = Callable[[StepArrays, int], Float32[np.ndarray, "M R T"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExtras:
    """Extra arrays of a step's rows; None changes nothing.

    `old` are the trainer's log-probabilities, `advantages` what is added to the batch's, and
    `referred` the log-probabilities by a reference that the step itself is not given. `values` are
    a critic's, `returns` what it is to learn, `rewards` what KL adds to those of the batch, and
    `norms` the squared norms of scores that an optimal token baseline is made of.
    """

    old: Float32[np.ndarray, "M R T"] | None = None
    advantages: Float32[np.ndarray, "M R T"] | None = None
    referred: Float32[np.ndarray, "M R T"] | None = None
    rewards: Float32[np.ndarray, "M R T"] | None = None
    values: Float32[np.ndarray, "M R T"] | None = None
    returns: Float32[np.ndarray, "M R T"] | None = None
    norms: Float32[np.ndarray, "M R T"] | None = None

    def __call__(self, arrays: StepArrays) -> StepArrays:
        """The rows with it."""
        if self.advantages is not None:
            arrays = arrays._replace(advantages=arrays.advantages + self.advantages)
        return arrays._replace(old_logprobs=self.old, old_values=self.values, returns=self.returns)


class RowPrecompute:
    """Collects the change of each step of a round, and the round's metrics that follow from it."""

    def __init__(self, objective: ObjectiveConfig, score: RowScore) -> None:
        self._objective, self._score = objective, score
        self.changes: list[RowExtras] = []
        self.metrics: Mapping[str, float] = {}

    def correct(self, parameters: Parameters, cut: Cut) -> None:
        """Note the log-probabilities of all rows by the parameters before the first update."""
        self.changes = [
            replace(change, old=self._score(parameters, *rows))
            for change, rows in zip(self._begun(cut), cut, strict=True)
        ]

    def penalise(
        self,
        reference: Reference,
        groups: Mapping[str, str],
        batches: Sequence[TrainingBatch],
        cut: Cut,
    ) -> None:
        """Take the KL to the reference off the advantages, or off the rewards for a critic.

        `groups` tells the group of every rollout; what goes token by token needs none.
        """
        referred = [self._score(reference.parameters, *rows) for rows in cut]
        coefficient = float(reference.coefficient)
        arrays = [rows for rows, _ in cut]
        if self._objective.advantage == "gae" or self._objective.kl_by_token:
            of_tokens = token_penalty(self._objective, batches, arrays, referred, coefficient)
            noted = [{"rewards": rewards} for rewards in of_tokens.rewards]
            if self._objective.kl_by_token:
                noted = [{"advantages": a} for a in _penalised(arrays, of_tokens.rewards)]
            told = of_tokens.metrics
        else:
            penalty = reward_penalty(
                self._objective, groups, batches, arrays, referred, coefficient
            )
            noted = [{"advantages": advantages} for advantages in penalty.advantages]
            told = penalty.metrics
        self.changes = [
            replace(change, referred=logprobs, **note)
            for change, note, logprobs in zip(self._begun(cut), noted, referred, strict=True)
        ]
        self.metrics = {**told, "objective/kl_coefficient": coefficient}

    def estimate(
        self, critic: CriticConfig, values: RowValues, batches: Sequence[TrainingBatch], cut: Cut
    ) -> None:
        """Note the values of all rows, and what follows: advantages, and what values are to be."""
        changes = [
            _estimated(critic, change, batch, rows, values(rows, used))
            for change, batch, (rows, used) in zip(self._begun(cut), batches, cut, strict=True)
        ]
        advantages = [change.advantages for change in changes if change.advantages is not None]
        if self._objective.whitens_tokens:
            advantages = whitened(advantages, [rows.mask for rows, _ in cut])
        self.changes = [
            replace(change, advantages=found)
            for change, found in zip(changes, advantages, strict=True)
        ]

    def weigh(
        self,
        parameters: Parameters,
        score_norms: RowScore,
        groups: Mapping[str, str],
        batches: Sequence[TrainingBatch],
        cut: Cut,
    ) -> None:
        """Note the squared norms of all rows' scores, and advantages by the optimal token baseline.

        After `correct`, where the objective corrects by the trainer's own log-probabilities.
        """
        changes, arrays = self._begun(cut), [rows for rows, _ in cut]
        norms = [score_norms(parameters, *rows) for rows in cut]
        weights = [
            return_weights(self._objective, rows, change.old, norm)
            for rows, change, norm in zip(arrays, changes, norms, strict=True)
        ]
        advantages = round_token_advantages(groups, batches, arrays, weights)
        self.changes = [
            replace(change, norms=norm, advantages=advantage)
            for change, norm, advantage in zip(changes, norms, advantages, strict=True)
        ]

    def _begun(self, cut: Cut) -> list[RowExtras]:
        return self.changes or [RowExtras() for _ in cut]


def _penalised(
    arrays: Sequence[StepArrays], rewards: Sequence[Float32[np.ndarray, "M R T"]]
) -> list[Float32[np.ndarray, "M R T"]]:
    """Additions to the batches' advantages for KL: each token's own penalty and all after it.

    The sum is whitened over the round's trained tokens (REINFORCE++, arXiv:2501.03262, section 3).
    """
    sums = []
    for rows, reward in zip(arrays, rewards, strict=True):
        length = rows.mask.shape[-1]
        flat = (a.reshape(-1, length) for a in (reward, rows.mask, rows.segment_ids))
        reward_BT, mask_BT, segment_ids_BT = flat
        nothing_BT = np.zeros_like(reward_BT)
        to_come = token_gae(reward_BT, nothing_BT, mask_BT, segment_ids_BT, gamma=1.0, lambda_=1.0)
        sums.append(rows.advantages + np.asarray(to_come).reshape(rows.mask.shape))
    whole = whitened(sums, [rows.mask for rows in arrays])
    return [found - rows.advantages for found, rows in zip(whole, arrays, strict=True)]


def _estimated(
    critic: CriticConfig,
    change: RowExtras,
    batch: TrainingBatch,
    rows: StepArrays,
    values: Float32[np.ndarray, "M R T"],
) -> RowExtras:
    """The change of a step's rows with values, advantages that are not whitened, and returns."""
    rewards = token_rewards(batch, rows)
    if change.rewards is not None:
        rewards = rewards + change.rewards
    length = rows.mask.shape[-1]
    flat = (array.reshape(-1, length) for array in (rewards, values, rows.mask, rows.segment_ids))
    gae = token_gae(*flat, gamma=critic.gamma, lambda_=critic.gae_lambda)
    advantages = np.asarray(gae).reshape(rows.mask.shape)
    returns = np.where(rows.mask, advantages + values, np.float32(0))
    return replace(change, values=values, advantages=advantages, returns=returns)


def token_rewards(batch: TrainingBatch, rows: StepArrays) -> Float32[np.ndarray, "M R T"]:
    """The reward that is received at each trained token, in the places of the rows."""
    length = rows.mask.shape[-1]
    mask_BT, segments_BT = (array.reshape(-1, length) for array in (rows.mask, rows.segment_ids))
    row_N, position_N = np.nonzero(mask_BT)
    returns_N = batch.returns[row_N, position_N].astype(np.float64)
    sequence_N = row_N * (length + 1) + segments_BT[row_N, position_N]
    rewards_BT = np.zeros(mask_BT.shape, np.float32)
    rewards_BT[row_N, position_N] = rewards_of(returns_N, sequence_N)
    return rewards_BT.reshape(rows.mask.shape)

"""Passes over a round's rows before its first update: logprobs, values, norms of scores.

That is the trainer's own log-probabilities, where the objective corrects by them and takes more
than one update, those of the reference, where KL is a part of the reward, and what advantages are
made of token by token: the values of a critic, the squared norms of scores, or a teacher's
log-probabilities, which the batches have. Leaves out what the penalty is (reference_policy.py),
what an advantage is (token_advantages.py) and what the step does with all of it (step.py).

Of a teacher, the difference to the sampler's log-probability is a number that multiplies the
gradient of log-probabilities: it is never differentiated itself, for the gradient of
log(policy / teacher) does not know the teacher.

Axes: M microbatches, R rows of one, T positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32

from marin_rl.batching.advantages import rewards_of
from marin_rl.config import CriticConfig, ObjectiveConfig
from marin_rl.errors import InputError
from marin_rl.training.logprobs import TeacherRows, rounded_up
from marin_rl.training.reference_policy import KlPenalty
from marin_rl.training.segments import rollouts_of_tokens
from marin_rl.training.step_types import StepArrays, StepRows, in_microbatches
from marin_rl.training.token_advantages import (
    return_weights,
    rollout_gae,
    round_token_advantages,
    whitened,
)
from marin_rl.types import TrainingBatch


def teacher_terms(batch: TrainingBatch, rows: StepArrays) -> Float32[np.ndarray, "M R T"]:
    """log(teacher / sampler) of every trained token, in nats; NaN where no teacher scored it.

    0 off the mask. The sampler's distribution is the one at temperature 1, of all tokens.
    """
    assert batch.teacher_logprobs is not None, "batches of a run with a teacher have its numbers"
    terms = np.zeros(rows.mask.shape, np.float32)
    trained = np.nonzero(rows.mask.reshape(-1, rows.mask.shape[-1]))
    terms[rows.mask] = batch.teacher_logprobs[trained] - batch.policy_logprobs[trained]
    return terms


def distillation_metrics(
    terms: Sequence[Float32[np.ndarray, "M R T"]], masks: Sequence[Bool[np.ndarray, "M R T"]]
) -> dict[str, float]:
    """Estimates of KL(policy || teacher) over a round's scored tokens, and tokens without a score.

    k1 is the mean of -d, k3 that of exp(d) - 1 - d, with d = log(teacher / policy). Without any
    scored token both are absent.
    """
    parts = [step[mask].astype(np.float64) for step, mask in zip(terms, masks, strict=True)]
    every: Float64[np.ndarray, " N"] = np.concatenate([*parts, np.zeros(0)])
    d = every[~np.isnan(every)]
    metrics = {"distillation/unscored_tokens": float(len(every) - len(d))}
    if not len(d):
        return metrics
    # Clamped as log-ratios are: one token that the teacher rules out must not overflow.
    k3 = np.expm1(np.minimum(d, 20.0)) - d
    return {"distillation/kl": float(-d.mean()), "distillation/kl_k3": float(k3.mean()), **metrics}


def as_taught(
    batch: TrainingBatch, row: int, taught: Mapping[bytes, Int32[np.ndarray, " _"]]
) -> tuple[Int32[np.ndarray, "3 S"], Int32[np.ndarray, " T"]]:
    """Ids, segments and positions of a row with the teacher's prompts, and `TeacherRows.places`.

    `taught` has these by the policy's, as bytes. Raises InputError for a prompt that it lacks.
    """
    segments_T, starts_T = batch.segment_ids[row], batch.positions[row]
    edges = [*np.flatnonzero(np.diff(segments_T, prepend=-1)).tolist(), len(segments_T)]
    parts, end, longer = list[np.ndarray]([np.zeros((3, 0))]), 0, 0
    places_T = np.zeros(len(segments_T), np.int32)
    for start, stop in pairwise(edges):
        if not segments_T[start]:
            continue
        ids, positions = batch.token_ids[row, start:stop], starts_T[start:stop] + longer
        if starts_T[start] == 0:
            trained = np.flatnonzero(batch.loss_mask[row, start:stop])
            lead = int(trained[0]) if len(trained) else len(ids)
            prompt = taught.get(ids[:lead].tobytes())
            continued = stop < len(segments_T) and starts_T[stop] > 0
            if prompt is None and (len(trained) or continued):
                raise InputError(
                    f"distillation.context: a prompt of {lead} tokens is not what the chat "
                    "template makes of the messages of its rollout, so nothing can be put before "
                    "them; leave the context out"
                )
            ids = ids if prompt is None else np.concatenate([prompt, ids[lead:]])
            longer, positions = len(ids) - (stop - start), np.arange(len(ids))
        # Aligned at the end, where a prompt is followed by what it is continued with.
        own = np.arange(len(ids) - (stop - start), len(ids))
        places_T[start:stop] = end + np.maximum(own, 0)
        parts.append(np.stack([ids, np.full(len(ids), segments_T[start]), positions]))
        end += len(ids)
    return np.concatenate(parts, axis=1).astype(np.int32), places_T


RowsPass = Callable[[StepRows], Float32[np.ndarray, "M R T"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExtras:
    """Extra arrays of a step's rows; None changes nothing.

    `advantages` are added to the batch's, `ref_logprobs` are by a reference that the step itself is
    not given. `values` are a critic's, `returns` what it is to learn, `rewards` what KL adds to
    those of the batch, and `norms` the squared norms of scores that an optimal token baseline is
    made of.
    """

    old_logprobs: Float32[np.ndarray, "M R T"] | None = None
    advantages: Float32[np.ndarray, "M R T"] | None = None
    ref_logprobs: Float32[np.ndarray, "M R T"] | None = None
    rewards: Float32[np.ndarray, "M R T"] | None = None
    values: Float32[np.ndarray, "M R T"] | None = None
    returns: Float32[np.ndarray, "M R T"] | None = None
    norms: Float32[np.ndarray, "M R T"] | None = None
    taught: TeacherRows | None = None

    def __call__(self, rows: StepRows) -> StepRows:
        arrays = rows.arrays._replace(
            old_logprobs=self.old_logprobs,
            old_values=self.values,
            returns=self.returns,
            taught=self.taught,
        )
        if self.advantages is not None:
            arrays = arrays._replace(advantages=arrays.advantages + self.advantages)
        return rows._replace(arrays=arrays)


class RowPrecompute:
    """Collects the extra arrays of each step of a round, and metrics that follow from them.

    `extras` has an entry for each of `batches`, which `rows` are made of.
    """

    def __init__(
        self, objective: ObjectiveConfig, batches: Sequence[TrainingBatch], rows: Sequence[StepRows]
    ) -> None:
        self._objective, self._batches, self._rows = objective, batches, rows
        self._arrays = [each.arrays for each in rows]
        self.extras = [RowExtras() for _ in rows]
        self.metrics: Mapping[str, float] = {}

    def _add(self, **arrays: Sequence[Any]) -> None:
        """Give the extras of each step its own of every array named."""
        self.extras = [
            replace(extra, **{name: steps[number] for name, steps in arrays.items()})
            for number, extra in enumerate(self.extras)
        ]

    def place_context(self, taught: Mapping[bytes, Int32[np.ndarray, " _"]]) -> None:
        """Add the rows that a teacher reads, of one length, for these prompts (`as_taught`)."""
        read = [
            [as_taught(batch, row, taught) for row in range(len(batch.token_ids))]
            for batch in self._batches
        ]
        length = rounded_up(max((r.shape[1] for rows in read for r, _ in rows), default=1))
        steps = list[TeacherRows]()
        for rows, step in zip(read, self._arrays, strict=True):
            microbatches, count, _ = step.mask.shape
            cut = partial(in_microbatches, dtype=np.int32, rows=count, microbatches=microbatches)
            filled = np.stack([np.pad(r, ((0, 0), (0, length - r.shape[1]))) for r, _ in rows], 1)
            token_ids, segment_ids, positions = map(cut, filled)
            places = cut(np.stack([places_T for _, places_T in rows]))
            steps.append(TeacherRows(token_ids, segment_ids, positions, places))
        self._add(taught=steps)

    def correct(self, score: RowsPass) -> None:
        """Add the logprobs of all rows by the parameters before the first update."""
        # All rows before any update: ratios of later steps are taken against these parameters.
        self._add(old_logprobs=[score(rows) for rows in self._rows])

    def penalise(self, score: RowsPass, coefficient: float, groups: Mapping[str, str]) -> None:
        """Take the KL to the reference off the advantages, or off the rewards for a critic.

        `score` gives the reference's logprobs, `groups` the group of every rollout; a penalty token
        by token needs no groups.
        """
        objective, batches, arrays = self._objective, self._batches, self._arrays
        ref_logprobs = [score(rows) for rows in self._rows]
        penalty = KlPenalty(objective, batches, arrays, ref_logprobs, coefficient)
        # A critic learns penalised rewards, so they are needed token by token; without one, the
        # advantage is linear in the rewards and the penalty's own is added to it.
        if objective.kl_by_token:
            self._add(advantages=_penalised(batches, arrays, penalty.of_tokens()))
        elif objective.estimator.needs_critic:
            self._add(rewards=penalty.of_tokens())
        else:
            self._add(advantages=penalty.of_completions(groups))
        # Kept for the scores: the step itself is given no reference in this case.
        self._add(ref_logprobs=ref_logprobs)
        self.metrics = {**penalty.metrics, "objective/kl_coefficient": coefficient}

    def estimate(self, critic: CriticConfig, values: RowsPass) -> None:
        """Add the values of all rows, and what follows: advantages, and what values are to be."""
        self.extras = [
            _estimated(critic, extra, batch, rows.arrays, values(rows))
            for extra, batch, rows in zip(self.extras, self._batches, self._rows, strict=True)
        ]
        # After all steps are estimated: the mean and the spread are those of the round.
        if self._objective.whitens_tokens:
            advantages = [extra.advantages for extra in self.extras if extra.advantages is not None]
            self._add(advantages=whitened(advantages, [arrays.mask for arrays in self._arrays]))

    def weigh(self, score_norms: RowsPass, groups: Mapping[str, str]) -> None:
        """Add the squared norms of all rows' scores, and advantages by the optimal token baseline.

        After `correct`, where the objective corrects by the trainer's own log-probabilities.
        """
        norms = [score_norms(rows) for rows in self._rows]
        weights = [
            return_weights(self._objective, arrays, extra.old_logprobs, norm)
            for arrays, extra, norm in zip(self._arrays, self.extras, norms, strict=True)
        ]
        advantages = round_token_advantages(groups, self._batches, self._arrays, weights)
        self._add(norms=norms, advantages=advantages)

    def distil(self, coefficient: float) -> None:
        """Add `coefficient log(teacher / sampler)` to the advantage of every scored token.

        After all that makes advantages of rewards: it has no baseline, and is not whitened.
        """
        terms = list(map(teacher_terms, self._batches, self._arrays))
        masks = [arrays.mask for arrays in self._arrays]
        self.metrics = {**self.metrics, **distillation_metrics(terms, masks)}
        added = [np.float32(coefficient) * np.nan_to_num(term) for term in terms]
        self._add(
            advantages=[
                term if extra.advantages is None else extra.advantages + term
                for extra, term in zip(self.extras, added, strict=True)
            ]
        )


def _penalised(
    batches: Sequence[TrainingBatch],
    arrays: Sequence[StepArrays],
    rewards: Sequence[Float32[np.ndarray, "M R T"]],
) -> list[Float32[np.ndarray, "M R T"]]:
    """Additions to the batches' advantages for KL: each token's own penalty and all after it.

    The sum is whitened over the round's trained tokens (REINFORCE++, arXiv:2501.03262, section 3).
    """
    sums = []
    for batch, rows, reward in zip(batches, arrays, rewards, strict=True):
        # Without values and discounts GAE is the plain sum of what is to come.
        to_come = _gae(batch, rows, reward, np.zeros_like(reward), gamma=1.0, lambda_=1.0)
        sums.append(rows.advantages + to_come)
    # Over the round and not by step: the same token must weigh the same in whatever step its row
    # is.
    white = whitened(sums, [rows.mask for rows in arrays])
    # Less the batch's own: `RowExtras` adds what is returned here to them.
    return [step - rows.advantages for step, rows in zip(white, arrays, strict=True)]


def _estimated(
    critic: CriticConfig,
    extra: RowExtras,
    batch: TrainingBatch,
    rows: StepArrays,
    values: Float32[np.ndarray, "M R T"],
) -> RowExtras:
    """The extras of a step's rows with values, advantages that are not whitened, and returns."""
    rewards = token_rewards(batch, rows)
    if extra.rewards is not None:
        # The KL penalty comes first, so that returns and values include it.
        rewards = rewards + extra.rewards
    advantages = _gae(batch, rows, rewards, values, gamma=critic.gamma, lambda_=critic.gae_lambda)
    returns = np.where(rows.mask, advantages + values, np.float32(0))
    return replace(extra, values=values, advantages=advantages, returns=returns)


def _gae(
    batch: TrainingBatch,
    rows: StepArrays,
    rewards: Float32[np.ndarray, "M R T"],
    values: Float32[np.ndarray, "M R T"],
    *,
    gamma: float,
    lambda_: float,
) -> Float32[np.ndarray, "M R T"]:
    length = rows.mask.shape[-1]
    flat = (array.reshape(-1, length) for array in (rewards, values, rows.mask, rows.segment_ids))
    return rollout_gae(batch, *flat, gamma=gamma, lambda_=lambda_).reshape(rows.mask.shape)


def token_rewards(batch: TrainingBatch, rows: StepArrays) -> Float32[np.ndarray, "M R T"]:
    """The reward that is received at each trained token, in the places of the rows."""
    mask_BT = rows.mask.reshape(-1, rows.mask.shape[-1])
    returns_N = batch.returns[np.nonzero(mask_BT)].astype(np.float64)
    rewards_BT = np.zeros(mask_BT.shape, np.float32)
    rewards_BT[mask_BT] = rewards_of(returns_N, rollouts_of_tokens(batch, mask_BT))
    return rewards_BT.reshape(rows.mask.shape)

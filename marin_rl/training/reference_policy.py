"""Reference policy of a round: its parameters, the KL coefficient, and KL as part of the reward.

Everything here follows from committed checkpoints, so a round that is done again has the
same reference. Leaves out the estimators (losses.py) and the moving average itself (step.py).

Axes: N completions of a round, M microbatches, R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

from marin_rl.batching.packing import counted
from marin_rl.batching.round_advantages import AdvantageChoice, round_advantages
from marin_rl.compilation import device_array
from marin_rl.config import ObjectiveConfig
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.batches import read_dispositions
from marin_rl.training.losses import kl_estimate
from marin_rl.training.step_types import StepArrays
from marin_rl.training.trajectories import numbered, rollout_numbers
from marin_rl.types import SlotRef, TrainingBatch
from schemas.manifests import Manifest

# One round moves the coefficient by at most this share of kl_rate, however far off the target.
ERROR_MAX = 0.2


def reference_round(objective: ObjectiveConfig, round: int) -> int:
    """Number of the checkpoint that is the reference policy of round `round`."""
    if objective.reference != "refreshed":
        return 0
    every = objective.reference_every_rounds
    # Whole periods: all rounds of one have the same reference, which is read once.
    return round // every * every


def kl_coefficient(run: Run, checkpoint: SlotRef) -> float:
    """The weight of the KL in the round that starts from a checkpoint.

    Fixed, or steered by `b <- b (1 + kl_rate clip(kl / target - 1, -0.2, 0.2))` from what the
    checkpoint's manifest says of the round that made it (Ziegler et al. 2019, section 2.2). A round
    that trained on nothing says nothing: then the last one before it that did.
    """
    objective = run.config.objective
    if objective.kl_target is None:
        return objective.kl_coefficient
    at: SlotRef | None = checkpoint
    while at is not None:
        manifest = manifest_of(run.store, at)
        last = manifest.totals.get("objective/kl_coefficient")
        kl = manifest.totals.get("objective/kl")
        if last is not None and kl is not None:
            return adapt_kl_coefficient(last, kl, objective.kl_target, objective.kl_rate)
        at = _before(manifest)
    return objective.kl_coefficient


def _before(manifest: Manifest) -> SlotRef | None:
    """The checkpoint that a round started from, by the manifest of the one it ended in."""
    if manifest.slot == checkpoint_slot(0):
        return None
    folder = checkpoint_slot(0).partition("/")[0]
    # A checkpoint's parents are also the batches it was trained on, in another folder.
    (parent,) = (each for each in manifest.parents if each.slot.startswith(folder))
    return SlotRef(slot=parent.slot, sha256=parent.sha256)


def adapt_kl_coefficient(coefficient: float, kl: float, target: float, rate: float) -> float:
    """The next coefficient, after a round whose KL was `kl` nats per completion."""
    # Bounded: one round of an unusual KL must not throw the coefficient far off.
    error = float(np.clip(kl / target - 1.0, -ERROR_MAX, ERROR_MAX))
    return coefficient * (1.0 + rate * error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """Additions for KL to a round's advantages, or to the rewards of its tokens, step by step."""

    additions: tuple[Float[np.ndarray, "M R T"], ...]
    metrics: Mapping[str, float]


def reward_penalty(
    objective: ObjectiveConfig,
    groups: Mapping[str, str],
    batches: Sequence[TrainingBatch],
    arrays: Sequence[StepArrays],
    ref_logprobs: Sequence[Float[np.ndarray, "M R T"]],
    coefficient: float,
) -> Penalty:
    """Penalise each completion's reward by its KL: `r_i - coefficient KL_i`.

    KL_i is the estimator summed over the completion, between the sampler and the reference. Since
    the advantage is linear in the rewards, what the penalty adds to it is the advantage of the
    penalty, over the trained members of each group (Ahmadian et al. 2024, equation 2). `groups`
    tells the group of every rollout. The additions are to advantages.
    """
    kl = _kl_of(objective, batches, arrays, ref_logprobs)
    group_N, count = group_numbers(groups, batches)
    # Not scaled: divided by its own spread, the penalty would be the same for any coefficient.
    choice = AdvantageChoice(estimator=objective.advantage, scale="none")
    advantage_N = round_advantages(-coefficient * kl.completions_N, group_N, count, choice)
    changes, start = [], 0
    number_S, _ = rollout_numbers(batches)
    for sums, (rows, segments), step in zip(kl.sums, kl.places, arrays, strict=True):
        by_segment = np.zeros_like(sums)
        by_segment[rows, segments] = advantage_N[number_S[start : start + len(rows)]]
        start += len(rows)
        changes.append(_spread(by_segment, step))
    return Penalty(additions=tuple(changes), metrics=kl.metrics(arrays))


def token_penalty(
    objective: ObjectiveConfig,
    batches: Sequence[TrainingBatch],
    arrays: Sequence[StepArrays],
    ref_logprobs: Sequence[Float[np.ndarray, "M R T"]],
    coefficient: float,
) -> Penalty:
    """KL of each token as a reward of its own, `-coefficient k_t`, for a critic to value.

    k_t is the estimator between the sampler and the reference (Ouyang et al. 2022,
    arXiv:2203.02155, equation 2, token by token). The additions are to rewards.
    """
    kl = _kl_of(objective, batches, arrays, ref_logprobs)
    return Penalty(
        additions=tuple(
            (-coefficient * tokens).reshape(step.mask.shape).astype(np.float32)
            for tokens, step in zip(kl.tokens, arrays, strict=True)
        ),
        metrics=kl.metrics(arrays),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kl:
    """KL of a round to the reference: step by step of tokens and of segments, and of rollouts.

    `places` are the rows and segments in `sums`.
    """

    tokens: Sequence[Float64[np.ndarray, "_ _"]]
    sums: Sequence[Float64[np.ndarray, "_ _"]]
    places: Sequence[tuple[Int64[np.ndarray, " _"], Int64[np.ndarray, " _"]]]
    completions_N: Float64[np.ndarray, " N"]

    def metrics(self, arrays: Sequence[StepArrays]) -> dict[str, float]:
        """Means over completions and over trained tokens; 0 where there are none."""
        trained = max(sum(int(step.mask.sum()) for step in arrays), 1)
        kl_N = self.completions_N
        return {
            "objective/kl": float(kl_N.mean()) if len(kl_N) else 0.0,
            "kl": float(sum(step.sum() for step in self.tokens)) / trained,
        }


def _kl_of(
    objective: ObjectiveConfig,
    batches: Sequence[TrainingBatch],
    arrays: Sequence[StepArrays],
    ref_logprobs: Sequence[Float[np.ndarray, "M R T"]],
) -> _Kl:
    tokens = [_estimates(objective, *pair) for pair in zip(arrays, ref_logprobs, strict=True)]
    sums = [_sums(*pair) for pair in zip(arrays, tokens, strict=True)]
    places = [_places(batch) for batch in batches]
    # In the order of the batches' ids, which is the order of `rollout_numbers` too.
    kl_S = np.concatenate([step[place] for step, place in zip(sums, places, strict=True)])
    number_S, names = rollout_numbers(batches)
    kl_N = np.bincount(number_S, weights=kl_S, minlength=len(names)).astype(np.float64)
    return _Kl(tokens=tokens, sums=sums, places=places, completions_N=kl_N)


def _estimates(
    objective: ObjectiveConfig, arrays: StepArrays, ref_logprobs: Float[np.ndarray, "M R T"]
) -> Float64[np.ndarray, "B T"]:
    length = ref_logprobs.shape[-1]
    # The sampler's logprobs stand for the policy's: a penalty on rewards is of the policy that
    # acted.
    sampled_BT, ref_BT = (a.reshape(-1, length) for a in (arrays.policy_logprobs, ref_logprobs))
    values_BT = kl_estimate(device_array(sampled_BT), device_array(ref_BT), objective.kl_estimator)
    # In float64, since thousands of small estimates are summed over a completion.
    return np.asarray(values_BT, np.float64) * arrays.mask.reshape(-1, length)


def _sums(arrays: StepArrays, values_BT: Float64[np.ndarray, "B T"]) -> Float64[np.ndarray, "B S"]:
    """Sum values by row and segment; segment 0 is padding."""
    segments_BT = arrays.segment_ids.reshape(values_BT.shape)
    sums = np.zeros((len(values_BT), int(segments_BT.max(initial=0)) + 1))
    # `sums[...] += values` would add one token of each segment only: indexes repeat.
    np.add.at(sums, (np.arange(len(values_BT))[:, None], segments_BT), values_BT)
    return sums


def _places(batch: TrainingBatch) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
    """Row and segment of each named segment, in the order of their ids."""
    counts = np.array([len(ids) for ids in batch.rollout_ids], np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, counted(counts) + 1  # segments of a row count from 1: 0 is padding


def _spread(
    by_segment: Float64[np.ndarray, "B S"], arrays: StepArrays
) -> Float[np.ndarray, "M R T"]:
    segments_BT = arrays.segment_ids.reshape(len(by_segment), -1)
    values_BT = np.take_along_axis(by_segment, segments_BT, axis=1)
    return (values_BT.reshape(arrays.mask.shape) * arrays.mask).astype(np.float32)


def group_numbers(
    groups: Mapping[str, str], batches: Sequence[TrainingBatch]
) -> tuple[Int64[np.ndarray, " N"], int]:
    """The group of each rollout as a number, and how many there are."""
    _, names = rollout_numbers(batches)
    group_N, distinct = numbered([groups[name] for name in names])
    return group_N, len(distinct)


def groups_of(run: Run, round: int) -> dict[str, str]:
    """The group of every rollout of a round. Raises as `read_dispositions` does."""
    table = read_dispositions(run, round).select(["rollout_id", "group_id"])
    names, groups = (column.to_pylist() for column in table.columns)
    return dict(zip(names, groups, strict=True))

"""Reference policy of a round: its parameters, the KL coefficient, and KL as part of the reward.

Everything here follows from committed checkpoints, so a round that is done again has the
same reference. Leaves out the estimators (losses.py) and the moving average itself (step.py).

Axes: N completions of a round, M microbatches, R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Mapping, Sequence

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
from marin_rl.training.segments import numbered, rollout_numbers
from marin_rl.training.step_types import StepArrays
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


class KlPenalty:
    """KL of a round's sampler to the reference, as additions to rewards or advantages, by step.

    The KL is between the programs that sampled and refer: a penalty on rewards is of the policy
    that acted. `metrics` are its means over completions and over trained tokens, 0 without any.
    """

    def __init__(
        self,
        objective: ObjectiveConfig,
        batches: Sequence[TrainingBatch],
        arrays: Sequence[StepArrays],
        ref_logprobs: Sequence[Float[np.ndarray, "M R T"]],
        coefficient: float,
    ) -> None:
        self._objective, self._batches, self._arrays = objective, batches, arrays
        self._coefficient = coefficient
        self._tokens = [
            _estimates(objective, *pair) for pair in zip(arrays, ref_logprobs, strict=True)
        ]
        trained = max(sum(int(step.mask.sum()) for step in arrays), 1)
        kl_N = self._completions()
        self.metrics = {
            "objective/kl": float(kl_N.mean()) if len(kl_N) else 0.0,
            "kl": float(sum(step.sum() for step in self._tokens)) / trained,
        }

    def of_tokens(self) -> list[Float[np.ndarray, "M R T"]]:
        """Rewards of the tokens, `-coefficient k_t`, for a critic to value.

        k_t is the estimator (Ouyang et al. 2022, arXiv:2203.02155, equation 2, token by token).
        """
        return [
            (-self._coefficient * tokens).reshape(step.mask.shape).astype(np.float32)
            for tokens, step in zip(self._tokens, self._arrays, strict=True)
        ]

    def of_completions(self, groups: Mapping[str, str]) -> list[Float[np.ndarray, "M R T"]]:
        """Advantages of the penalty on each completion's reward, `r_i - coefficient KL_i`.

        KL_i is the estimator summed over the completion. Since the advantage is linear in the
        rewards, what the penalty adds to it is the advantage of the penalty, over the trained
        members of each group (Ahmadian et al. 2024, equation 2). `groups` tells the group of every
        rollout.
        """
        group_N, count = group_numbers(groups, self._batches)
        # Not scaled: divided by its own spread, the penalty would be the same for any coefficient.
        choice = AdvantageChoice(estimator=self._objective.advantage, scale="none")
        penalty_N = -self._coefficient * self._completions()
        advantage_N = round_advantages(penalty_N, group_N, count, choice)
        number_S, _ = rollout_numbers(self._batches)
        additions, start = [], 0
        for batch, step in zip(self._batches, self._arrays, strict=True):
            rows, segments = _places(batch)
            segments_BT = step.segment_ids.reshape(-1, step.segment_ids.shape[-1])
            by_segment = np.zeros((len(segments_BT), int(segments_BT.max(initial=0)) + 1))
            by_segment[rows, segments] = advantage_N[number_S[start : start + len(rows)]]
            start += len(rows)
            values = np.take_along_axis(by_segment, segments_BT, axis=1).reshape(step.mask.shape)
            additions.append((values * step.mask).astype(np.float32))
        return additions

    def _completions(self) -> Float64[np.ndarray, " N"]:
        """KL of each completion, in the order of `rollout_numbers`."""
        sums = []
        for batch, step, values_BT in zip(self._batches, self._arrays, self._tokens, strict=True):
            segments_BT = step.segment_ids.reshape(values_BT.shape)
            by_segment = np.zeros((len(values_BT), int(segments_BT.max(initial=0)) + 1))
            # `by_segment[...] += values` would add one token of each segment: indexes repeat.
            np.add.at(by_segment, (np.arange(len(values_BT))[:, None], segments_BT), values_BT)
            sums.append(by_segment[_places(batch)])
        number_S, names = rollout_numbers(self._batches)
        kl_N = np.bincount(number_S, weights=np.concatenate(sums), minlength=len(names))
        return kl_N.astype(np.float64)


def _estimates(
    objective: ObjectiveConfig, arrays: StepArrays, ref_logprobs: Float[np.ndarray, "M R T"]
) -> Float64[np.ndarray, "B T"]:
    length = ref_logprobs.shape[-1]
    sampled_BT, ref_BT = (a.reshape(-1, length) for a in (arrays.policy_logprobs, ref_logprobs))
    values_BT = kl_estimate(device_array(sampled_BT), device_array(ref_BT), objective.kl_estimator)
    # In float64, since thousands of small estimates are summed over a completion.
    return np.asarray(values_BT, np.float64) * arrays.mask.reshape(-1, length)


def _places(batch: TrainingBatch) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
    """Row and segment of each named segment, in the order of their ids."""
    counts = np.array([len(ids) for ids in batch.rollout_ids], np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, counted(counts) + 1  # segments of a row count from 1: 0 is padding


def group_numbers(
    groups: Mapping[str, str], batches: Sequence[TrainingBatch]
) -> tuple[Int64[np.ndarray, " N"], int]:
    _, names = rollout_numbers(batches)
    group_N, distinct = numbered([groups[name] for name in names])
    return group_N, len(distinct)


def groups_of(run: Run, round: int) -> dict[str, str]:
    table = read_dispositions(run, round).select(["rollout_id", "group_id"])
    names, groups = (column.to_pylist() for column in table.columns)
    return dict(zip(names, groups, strict=True))

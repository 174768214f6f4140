"""Recompute the optimal token baseline from the scores of a round, its returns and its groups.

Computed over one group and one place after the other in float64, apart from the training stage,
which has all tokens of a round in one array. Axes: N trained tokens of a step, G members of a group
that have a t-th trained token.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from marin_rl.analysis.penalty import group_numbers
from marin_rl.analysis.tokens import column_of, corrections, trained
from marin_rl.config import ObjectiveConfig
from marin_rl.errors import CorruptObject
from marin_rl.storage.commits import ref_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.scores import StepScores, iter_scores
from marin_rl.types import TrainingBatch
from schemas.manifests import Manifest

COLUMN = "squared_score_norms"
TOLERANCE = 0.02  # a norm and its bounds come from two programs, of bfloat16 perhaps


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBaseline:
    """Of each step's tokens the advantages it used; `out_of_bounds` counts norms that cannot be."""

    advantages: tuple[Float64[np.ndarray, " _"], ...]
    out_of_bounds: tuple[int, ...]
    metrics: Mapping[str, float]


def baseline_of(run: Run, batches: Manifest, checkpoint: Manifest) -> ExpectedBaseline:
    """The advantages of a round from its scores. Raises CorruptObject where these lack the norms,
    ObjectMissing, NewerSchema.
    """
    names: list[str] = []
    returns, weights, counts, impossible = [], [], [], []
    pairs = zip(read_batches(run, ref_of(batches)), iter_scores(run, checkpoint), strict=False)
    for batch, scores in pairs:
        if scores.floats[COLUMN] is None:
            raise CorruptObject(
                f"{run.store.url_of(checkpoint.slot)}: the scores of step {scores.step} have no "
                f"{COLUMN}, which the advantages of optimal_token_baseline are made of"
            )
        names += scores.rollout_ids
        ends = np.cumsum(scores.counts)[:-1]
        returns += np.split(_returns(batch, scores), ends)
        weights += np.split(_weights(scores, run.config.objective), ends)
        counts.append(len(scores.counts))
        impossible.append(_out_of_bounds(scores))
    if not counts:
        return ExpectedBaseline(advantages=(), out_of_bounds=(), metrics={})
    advantages: list[np.ndarray] = [np.zeros(0)] * len(names)
    members = defaultdict(list)
    for member, group in enumerate(group_numbers(run, batches, names)[0]):
        members[group].append(member)
    for group in members.values():
        computed = group_advantages([returns[m] for m in group], [weights[m] for m in group])
        for member, advantage in zip(group, computed, strict=True):
            advantages[member] = advantage
    first = np.cumsum(counts) - counts
    return ExpectedBaseline(
        advantages=tuple(
            np.concatenate([*advantages[start : start + count], np.zeros(0)])
            for start, count in zip(first, counts, strict=True)
        ),
        out_of_bounds=tuple(impossible),
        metrics={},
    )


def group_advantages(returns: list[np.ndarray], weights: list[np.ndarray]) -> list[np.ndarray]:
    """Returns of the members of a group less the mean by summed weights at each trained token.

    A member has an entry per trained token of its own; see `training.token_baseline`.
    """
    result = [np.zeros(len(member)) for member in returns]
    sums = [np.cumsum(member) for member in weights]
    for t in range(max(map(len, returns))):
        present = [m for m, member in enumerate(returns) if t < len(member)]
        return_G = np.array([returns[m][t] for m in present])
        weight_G = np.array([sums[m][t] for m in present])
        if weight_G.sum() == 0:
            weight_G = np.ones(len(present))
        for m, advantage in zip(
            present, return_G - np.average(return_G, weights=weight_G), strict=True
        ):
            result[m][t] = advantage
    return result


def _returns(batch: TrainingBatch, scores: StepScores) -> Float64[np.ndarray, " N"]:
    return_N = batch.returns[trained(batch)].astype(np.float64)
    if len(return_N) != len(scores.positions):
        return np.zeros(len(scores.positions))  # a contradiction that is counted elsewhere
    return return_N


def _weights(scores: StepScores, objective: ObjectiveConfig) -> Float64[np.ndarray, " N"]:
    norm_N = column_of(scores, COLUMN)
    if objective.importance_correction == "none":
        return norm_N
    return norm_N * np.square(corrections(scores, objective))


def _out_of_bounds(scores: StepScores) -> int:
    """Count norms outside of (1 - p)^2 and twice that: the others' p sum to 1 - p.

    Checked where p(y) before the first update is known: of the first step, and with old_logprobs.
    """
    if scores.floats["old_logprobs"] is None and scores.step > 0:
        return 0
    known = "trainer_logprobs" if scores.floats["old_logprobs"] is None else "old_logprobs"
    least_N = np.square(np.expm1(column_of(scores, known)))
    norm_N = column_of(scores, COLUMN)
    return int(((norm_N < least_N - TOLERANCE) | (norm_N > 2 * least_N + TOLERANCE)).sum())

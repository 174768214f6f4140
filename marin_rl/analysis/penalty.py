"""KL coefficient and KL penalty of a round, recomputed.

Computed from the checkpoints' manifests, the scores and the dispositions, apart from the training
stage, which works on whole rows. Axes: S completions of a step, N of a round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from marin_rl.analysis.critic import token_whitened
from marin_rl.analysis.tokens import token_kl, trained
from marin_rl.batching.advantages import AdvantageChoice, round_advantages
from marin_rl.errors import CorruptObject
from marin_rl.storage.commits import read_manifest, ref_of
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.batches import dispositions_of, read_batches
from marin_rl.storage.tables.scores import iter_scores
from schemas.manifests import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPenalty:
    """Additions of KL in the reward to the advantages of each step's tokens, and their metrics."""

    advantages: tuple[Float64[np.ndarray, " _"], ...]
    metrics: Mapping[str, float]


def coefficient_of(run: Run, round: int) -> float | None:
    """The weight of the KL in a round; None where there is none. See `kl_coefficient`."""
    objective = run.config.objective
    if objective.kl_coefficient == 0:
        return None
    found = read_manifest(run.store, checkpoint_slot(round))
    if objective.kl_target is None or found is None:
        return objective.kl_coefficient
    from marin_rl.training.reference_policy import kl_coefficient

    return kl_coefficient(run, ref_of(found[0]))


def penalty_of(
    run: Run, batches: Manifest, checkpoint: Manifest, coefficient: float
) -> ExpectedPenalty:
    """The penalty of a round from its scores. Raises ObjectMissing, CorruptObject, NewerSchema."""
    objective = run.config.objective
    names: list[str] = []
    kls: list[Float64[np.ndarray, " _"]] = []
    counts: list[Int64[np.ndarray, " S"]] = []
    for scores in iter_scores(run, checkpoint):
        if scores.floats["reference_logprobs"] is None:
            raise CorruptObject(
                f"{run.store.url_of(checkpoint.slot)}: the scores of step {scores.step} have no "
                "reference_logprobs, which objective.kl_placement 'reward' is made of"
            )
        names += scores.rollout_ids
        kls.append(token_kl(scores, objective))
        counts.append(scores.counts.astype(np.int64))
    if not kls:
        return ExpectedPenalty(advantages=(), metrics={})
    sums = [_sums(kl_N, count_S) for kl_N, count_S in zip(kls, counts, strict=True)]
    if objective.kl_by_token:
        added = _of_tokens(run, batches, kls, counts, coefficient)
    else:
        added = _of_completions(run, batches, names, sums, counts, coefficient)
    total = float(np.concatenate(kls).sum())
    tokens = max(sum(map(len, kls)), 1)
    return ExpectedPenalty(
        advantages=tuple(added),
        metrics={"objective/kl": float(np.concatenate(sums).mean()), "kl": total / tokens},
    )


def _sums(
    value_N: Float64[np.ndarray, " N"], count_S: Int64[np.ndarray, " S"]
) -> Float64[np.ndarray, " S"]:
    """Over the tokens of each completion."""
    segment_N = np.repeat(np.arange(len(count_S)), count_S)
    return np.bincount(segment_N, weights=value_N, minlength=len(count_S))


def _of_completions(
    run: Run,
    batches: Manifest,
    names: list[str],
    sums: Sequence[Float64[np.ndarray, " _"]],
    counts: Sequence[Int64[np.ndarray, " _"]],
    coefficient: float,
) -> list[Float64[np.ndarray, " _"]]:
    """The advantage of the KL of whole completions, which is linear in it."""
    group_N, groups = group_numbers(run, batches, names)
    choice = AdvantageChoice(estimator=run.config.objective.advantage, scale="none")
    advantage_N = round_advantages(-coefficient * np.concatenate(sums), group_N, groups, choice)
    ends = np.cumsum([len(sum_S) for sum_S in sums])
    return [
        np.repeat(advantage_S, count_S)
        for advantage_S, count_S in zip(np.split(advantage_N, ends[:-1]), counts, strict=True)
    ]


def _of_tokens(
    run: Run,
    batches: Manifest,
    kls: Sequence[Float64[np.ndarray, " _"]],
    counts: Sequence[Int64[np.ndarray, " _"]],
    coefficient: float,
) -> list[Float64[np.ndarray, " _"]]:
    """The KL of each token and all after it, and whitening, as what they add to the batches."""
    raw, penalised = [], []
    for batch, kl_N, count_S in zip(read_batches(run, ref_of(batches)), kls, counts, strict=False):
        raw.append(batch.advantages[trained(batch)].astype(np.float64))
        if len(raw[-1]) != len(kl_N):
            raw[-1] = np.zeros(len(kl_N))  # a contradiction that is counted elsewhere
        ends = np.cumsum(count_S)
        to_come = [
            np.cumsum(kl_N[start:end][::-1])[::-1]
            for start, end in zip(ends - count_S, ends, strict=True)
        ]
        penalised.append(raw[-1] - coefficient * np.concatenate([*to_come, np.zeros(0)]))
    whole = token_whitened(penalised)
    return [found - before for found, before in zip(whole, raw, strict=True)]


def group_numbers(run: Run, batches: Manifest, names: list[str]) -> tuple[np.ndarray, int]:
    """The group of each rollout as a number, and how many groups there are."""
    table = dispositions_of(run, batches)
    group_of = dict(
        zip(table["rollout_id"].to_pylist(), table["group_id"].to_pylist(), strict=True)
    )
    unknown = [name for name in names if name not in group_of]
    if unknown:
        raise CorruptObject(
            f"{run.store.url_of(batches.slot)}: {unknown[0]} has scores but no disposition"
        )
    found, group_N = np.unique([group_of[name] for name in names], return_inverse=True)
    return group_N.astype(np.int64), len(found)

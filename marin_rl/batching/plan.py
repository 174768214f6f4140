"""Plan a round: each rollout's disposition, advantage, and its row in the batch.

Owns the places of kept rollouts: steps, rows, and the length that rows are padded to. What is kept
is decided in dispositions.py; both need the scalar columns alone, and no token.

Axes: N rollouts of a round in shard order, S segments of them, K those of kept rollouts, P groups.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from marin_rl.batching.dispositions import RoundDecision, decide_round, numbers
from marin_rl.batching.packing import Packing, one_per_row, pack
from marin_rl.batching.segments import Segments
from marin_rl.config import BatchingConfig, Config
from marin_rl.errors import ConfigError
from schemas.tables import DISPOSITIONS

SHORTEST_BUCKET = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Decision on the N rollouts of a round, and the places of those that are kept.

    `place_N` counts the segments of kept rollouts before a kept one's first, and is -1 for others;
    `length` is the padded length in tokens. Where the round is `by_token`, advantages are 0 until
    the training stage makes them.
    """

    decision: RoundDecision
    tokens_N: Int64[np.ndarray, " N"]
    place_N: Int64[np.ndarray, " N"]
    segments: Segments
    length: int
    packing: Packing
    by_token: bool

    @property
    def kept_N(self) -> Bool[np.ndarray, " N"]:
        return self.place_N >= 0

    @property
    def kept_S(self) -> Bool[np.ndarray, " S"]:
        return self.kept_N[self.segments.rollout_S]

    @property
    def is_cut(self) -> bool:
        return len(self.segments.rollout_S) > len(self.place_N)

    def places_N(self) -> Int64[np.ndarray, "3 N"]:
        """Step, row and segment (from 1) of the first segment of each kept rollout."""
        places = np.zeros((3, len(self.place_N)), np.int64)
        packing, first_K = self.packing, self.place_N[self.kept_N]
        places_K = np.stack([packing.step_K, packing.row_K, packing.segment_K])
        places[:, self.kept_N] = places_K[:, first_K]
        return places

    def reasons_counted(self) -> dict[str, int]:
        dropped = ~self.kept_N
        kinds, reasons = self.decision.disposition_N[dropped], self.decision.reason_N[dropped]
        pairs = zip(kinds, reasons, strict=True)
        counts = Counter(f"{kind}/{reason}" for kind, reason in pairs)
        return dict(sorted(counts.items()))


def plan_round(scalars: pa.Table, config: Config, round: int) -> RoundPlan:
    """Decide what becomes of all rollouts of a round, and give the kept ones their places.

    Raises ConfigError as `bucket` and `decide_round` do.
    """
    decision = decide_round(scalars, config, round)
    kept_N = decision.kept_N
    tokens_N = numbers(scalars, "n_prompt_tokens") + numbers(scalars, "n_completion_tokens")
    segments = Segments.of(scalars, tokens_N)
    kept_S = kept_N[segments.rollout_S]
    # At least 1: a round of which nothing is kept would divide by 0.
    per_step = config.batching.sequences_per_step or max(int(kept_N.sum()), 1)
    length = int(segments.tokens_S[kept_S].max(initial=1))
    if config.batching.packing == "none":
        length = bucket(length, config.batching)
    elif config.batching.row_tokens:
        length = config.batching.row_tokens
    return RoundPlan(
        decision=decision,
        tokens_N=tokens_N,
        place_N=np.where(kept_N, (np.cumsum(kept_S) - 1)[segments.first_N], -1),
        segments=segments,
        length=length,
        packing=_packing(segments, kept_N, decision.group_N, config.batching, per_step),
        by_token=config.objective.estimator.by_token,
    )


def bucket(longest: int, config: BatchingConfig) -> int:
    """The padded length: the smallest bucket of at least `longest` tokens.

    Where none are configured: 32, 48, 64, 96, 128 and so on, so that less than a third is padding.
    Raises ConfigError where the configured buckets end below it.
    """
    if not config.length_buckets:
        # Smallest power of two that fits.
        power = max(SHORTEST_BUCKET, 1 << max(longest - 1, 0).bit_length())
        # Each length is a program to compile: two for a doubling are a compromise with padding.
        between = power * 3 // 4
        return between if between >= max(longest, SHORTEST_BUCKET) else power
    for length in config.length_buckets:
        if length >= longest:
            return length
    raise ConfigError(
        f"batching.length_buckets end at {config.length_buckets[-1]}, but a sequence of "
        f"{longest} tokens is to be trained on: add a bucket of at least that, or lower "
        "sampling.max_tokens"
    )


def _packing(
    segments: Segments,
    kept_N: np.ndarray,
    group_N: np.ndarray,
    config: BatchingConfig,
    per_step: int,
) -> Packing:
    kept_S = kept_N[segments.rollout_S]
    # Steps count rollouts: all segments of one are trained on in the same update.
    rollout_K = (np.cumsum(kept_N) - 1)[segments.rollout_S[kept_S]]
    if config.packing == "none" or config.row_tokens is None:
        return one_per_row(rollout_K // per_step)
    lead_S, rollout_S = segments.lead_S, segments.rollout_S
    # What a later segment begins with follows from its own first one: no other rollout has it.
    alone_S = -1 - np.arange(len(rollout_S))
    group_S = np.where(segments.begins_S, group_N[rollout_S], alone_S)
    return pack(
        lead_S[kept_S],
        (segments.tokens_S - lead_S)[kept_S],
        group_S[kept_S],
        row_tokens=config.row_tokens,
        sequences_per_step=per_step,
        share=config.packing == "shared_prompt",
        rollout_K=rollout_K,
    )


def dispositions_table(plan: RoundPlan, scalars: pa.Table) -> pa.Table:
    """Dispositions of the round, a row per rollout, in shard order."""
    decision, dropped = plan.decision, ~plan.kept_N
    step_N, row_N, segment_N = plan.places_N()
    columns = {
        "rollout_id": scalars["rollout_id"],
        "group_id": scalars["group_id"],
        "round_generated": scalars["round"],
        "environment": scalars["environment"],
        "policy_version_min": scalars["policy_version_min"],
        "policy_version_max": scalars["policy_version_max"],
        "n_tokens": pa.array(plan.tokens_N.astype(np.int32)),
        "disposition": pa.array(decision.disposition_N, pa.string()),
        "reason": pa.array(decision.reason_N, pa.string(), mask=~dropped),
        "step": _places(step_N, dropped),
        "row": _places(row_N, dropped),
        "segment": _places(segment_N, dropped),
        # Null where the training stage makes them: 0 would say that they have no signal.
        "advantage": pa.array(decision.advantage_N, mask=dropped | plan.by_token),
        "reward": scalars["reward"],
    }
    return pa.table([columns[name] for name in DISPOSITIONS.names], schema=DISPOSITIONS)


def _places(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    return pa.array(values.astype(np.int32), mask=missing)

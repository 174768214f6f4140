"""Plan a round: each rollout's disposition, advantage, and its row in the batch.

Owns the places of kept rollouts: steps, rows, and the length that rows are padded to. What is kept
is decided in dispositions.py; both need the scalar columns alone, and no token.

A rollout is one segment, unless its chat template broke the prefix and `environment.
on_broken_prefix` let it go on in another. Each segment is a sequence of its own in the batches: its
tokens are read from its own first one on. What a rollout is worth is decided as a whole; how much
its segments weigh together is the trainer's.

Axes: N rollouts of a round in shard order, S segments of them, K those of kept rollouts, P groups.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from marin_rl.batching.dispositions import RoundDecision, decide_round, numbers
from marin_rl.batching.packing import Packing, one_per_row, pack
from marin_rl.config import BatchingConfig, Config
from marin_rl.errors import ConfigError, CorruptObject
from schemas.tables import DISPOSITIONS, TEACHER

SHORTEST_BUCKET = 32
# Of the longest ones, at least: what is left at the end of a row is then little of it.
SEQUENCES_PER_ROW = 4
LENGTHS, LEADS = "segment_lengths", "segment_leads"
_LISTS = ("token_ids", "loss_mask", "logprobs", TEACHER, "returns", "advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Each segment's rollout, its tokens, and its tokens before the first trained one."""

    rollout_S: Int64[np.ndarray, " S"]
    tokens_S: Int64[np.ndarray, " S"]
    lead_S: Int64[np.ndarray, " S"]

    @classmethod
    def of(cls, table: pa.Table, tokens_N: Int64[np.ndarray, " N"]) -> "Segments":
        """Segments of rollouts of `tokens_N` tokens, by the columns of lengths and leads.

        Without leads, which sharing prompts alone needs, they are 0.
        """
        count_N, tokens_S = _lengths(table, tokens_N)
        lead_S = np.zeros_like(tokens_S)
        if LEADS in table.column_names:
            lead_S = table[LEADS].combine_chunks().flatten().to_numpy().astype(np.int64)
        rollout_S = np.repeat(np.arange(len(count_N)), count_N)
        return cls(rollout_S=rollout_S, tokens_S=tokens_S, lead_S=lead_S)

    @property
    def begins_S(self) -> Bool[np.ndarray, " S"]:
        return np.diff(self.rollout_S, prepend=-1) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Decision on the N rollouts of a round, and the places of the kept ones.

    `place_N` counts the segments of kept rollouts before a kept one's first, and is -1 for others;
    `length` is the padded length in tokens. `microbatch_rows` are those of a forward and backward
    pass where the round chose them, else None: as configured. Where the round is `by_token`,
    advantages are 0 until the training stage makes them.
    """

    decision: RoundDecision
    tokens_N: Int64[np.ndarray, " N"]
    place_N: Int64[np.ndarray, " N"]
    segments: Segments
    length: int
    packing: Packing
    microbatch_rows: int | None
    by_token: bool

    @property
    def kept_N(self) -> Bool[np.ndarray, " N"]:
        return self.place_N >= 0

    def reasons_counted(self) -> dict[str, int]:
        dropped = ~self.kept_N
        kinds, reasons = self.decision.disposition_N[dropped], self.decision.reason_N[dropped]
        pairs = zip(kinds, reasons, strict=True)
        counts = Counter(f"{kind}/{reason}" for kind, reason in pairs)
        return dict(sorted(counts.items()))


def plan_round(scalars: pa.Table, config: Config, round: int, *, alike: bool = True) -> RoundPlan:
    """Decide what becomes of all rollouts of a round, and give the kept ones their places.

    Prompts of a group are `alike`, or are not shared where the round chooses. Raises ConfigError as
    `bucket` and `decide_round` do.
    """
    decision = decide_round(scalars, config, round)
    kept_N = decision.kept_N
    tokens_N = numbers(scalars, "n_prompt_tokens") + numbers(scalars, "n_completion_tokens")
    segments = Segments.of(scalars, tokens_N)
    rollout_S, kept_S = segments.rollout_S, kept_N[segments.rollout_S]
    # At least 1: a round of which nothing is kept would divide by 0.
    per_step = config.batching.sequences_per_step or max(int(kept_N.sum()), 1)
    # Steps count rollouts: all segments of one are trained on in the same update.
    step_K = (np.cumsum(kept_N) - 1)[rollout_S[kept_S]] // per_step
    # What a later segment begins with follows from its own first one: no other rollout has it.
    alone_S = -1 - np.arange(len(rollout_S))
    group_S = np.where(segments.begins_S, decision.group_N[rollout_S], alone_S)
    lead_K, tokens_K = segments.lead_S[kept_S], segments.tokens_S[kept_S]
    packed = partial(pack, lead_K, tokens_K - lead_K, group_S[kept_S], step_K)
    length, microbatch_rows = int(tokens_K.max(initial=1)), None
    if config.batching.layout == "none":
        length = bucket(length, config.batching)
        packing = one_per_row(step_K)
    elif config.batching.layout == "auto":
        padded = bucket(length, config.batching)
        # By the limits of the run, and not by what groups turned out to need: each pair of row
        # length and microbatch is a program to compile.
        group = padded + (config.rollouts.group_size - 1) * min(config.sampling.max_tokens, padded)
        length, microbatch_rows = rows_for(padded, config.training.microbatch_sequences, group)
        packing = packed(row_tokens=length, share=alike)
    else:
        length = config.batching.row_tokens or length
        packing = packed(row_tokens=length, share=config.batching.shares_prompts)
    return RoundPlan(
        decision=decision,
        tokens_N=tokens_N,
        place_N=np.where(kept_N, (np.cumsum(kept_S) - 1)[segments.begins_S], -1),
        segments=segments,
        length=length,
        packing=packing,
        microbatch_rows=microbatch_rows,
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


def rows_for(padded: int, sequences: int, tokens: int = 0) -> tuple[int, int]:
    """Length of rows of several sequences of up to `padded` tokens, and rows of a microbatch.

    A row also holds `tokens`, and a microbatch as many positions as `sequences` padded ones.
    """
    length, rows = padded, sequences
    while length < max(tokens, SEQUENCES_PER_ROW * padded) and rows > 1:
        length, rows = 2 * length, rows // 2
    return length, rows


def dispositions_table(plan: RoundPlan, scalars: pa.Table) -> pa.Table:
    """Dispositions of the round, a row per rollout, in shard order."""
    decision, packing, dropped = plan.decision, plan.packing, ~plan.kept_N
    # Step, row and segment (from 1) of the first segment of each kept rollout.
    places_K = np.stack([packing.step_K, packing.row_K, packing.segment_K])
    places_N = np.zeros((3, len(dropped)), np.int32)
    places_N[:, plan.kept_N] = places_K[:, plan.place_N[plan.kept_N]]
    step_N, row_N, segment_N = (pa.array(own_N, mask=dropped) for own_N in places_N)
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
        "step": step_N,
        "row": row_N,
        "segment": segment_N,
        # Null where the training stage makes them: 0 would say that they have no signal.
        "advantage": pa.array(decision.advantage_N, mask=dropped | plan.by_token),
        "reward": scalars["reward"],
    }
    return pa.table([columns[name] for name in DISPOSITIONS.names], schema=DISPOSITIONS)


def with_leads(table: pa.Table) -> pa.Table:
    """A table with the column `segment_leads`: tokens before the first trained one, by segment.

    The table has `loss_mask` and `segment_lengths`.
    """
    mask = table["loss_mask"].combine_chunks()
    tokens_N = mask.value_lengths().to_numpy().astype(np.int64)
    count_N, tokens_S = _lengths(table, tokens_N)
    trained = mask.flatten().to_numpy(zero_copy_only=False) != 0
    ends_S = np.cumsum(tokens_S)  # place after each segment's last token
    # The next trained token from each segment's first on; one without any is all lead.
    places = np.append(np.flatnonzero(trained), len(trained))
    first_S = places[np.searchsorted(places, ends_S - tokens_S)]
    lead_S = np.minimum(first_S, ends_S) - (ends_S - tokens_S)
    offsets = pa.array(np.append(0, np.cumsum(count_N)).astype(np.int32))
    return table.append_column(LEADS, pa.ListArray.from_arrays(offsets, pa.array(lead_S)))


def cut(table: pa.Table) -> pa.Table:
    """A table of tokens with a row per segment in place of one per rollout.

    Raises CorruptObject where the lengths of segments do not add up.
    """
    column = table["token_ids"].combine_chunks()
    tokens_N = column.value_lengths().to_numpy().astype(np.int64)
    count_N, tokens_S = _lengths(table, tokens_N)
    rollout_S = np.repeat(np.arange(len(count_N)), count_N)
    wrong_N = np.bincount(rollout_S, tokens_S, len(tokens_N)) != tokens_N
    if wrong_N.any():
        place = int(np.argmax(wrong_N))
        raise CorruptObject(
            f"rollout {table['rollout_id'][place].as_py()}: expected segments of {tokens_N[place]} "
            f"tokens in all, found {table[LENGTHS][place].as_py()}"
        )
    offsets = pa.array(np.append(0, np.cumsum(tokens_S)).astype(np.int32))
    columns: dict[str, pa.Array] = {
        "rollout_id": table["rollout_id"].combine_chunks().take(pa.array(rollout_S))
    }
    for name in _LISTS:
        if name in table.column_names:
            values = table[name].combine_chunks().flatten()
            columns[name] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)


def _lengths(
    table: pa.Table, tokens_N: Int64[np.ndarray, " N"]
) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " S"]]:
    column = table[LENGTHS].combine_chunks()
    count_N = column.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    whole_N = count_N == 0  # no lengths are recorded: the rollout is one segment
    count_N = np.maximum(count_N, 1)
    tokens_S = np.zeros(int(count_N.sum()), np.int64)
    first_N = np.cumsum(count_N) - count_N
    tokens_S[first_N[whole_N]] = tokens_N[whole_N]
    in_parts = np.ones(len(tokens_S), bool)
    in_parts[first_N[whole_N]] = False
    tokens_S[in_parts] = column.flatten().to_numpy()
    return count_N, tokens_S

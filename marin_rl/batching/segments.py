"""Segments of rollouts: which there are, where each begins, and tables cut into them.

A rollout is one segment, unless its chat template broke the prefix and `environment.
on_broken_prefix` let it go on in another. Each segment is a sequence of its own in the batches: its
tokens are read from its own first one on. What a rollout is worth is decided as a whole (`plan`);
how much its segments weigh together is the trainer's.

Axes: N rollouts of a round or table, S segments of all of them, in order.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from marin_rl.errors import CorruptObject

LENGTHS, LEADS = "segment_lengths", "segment_leads"
_LISTS = ("token_ids", "loss_mask", "logprobs", "returns", "advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The rollout of each segment, its tokens, and those before its first trained one."""

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
    def first_N(self) -> Int64[np.ndarray, " N"]:
        return np.flatnonzero(self.begins_S)

    @property
    def begins_S(self) -> Bool[np.ndarray, " S"]:
        return np.diff(self.rollout_S, prepend=-1) > 0


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

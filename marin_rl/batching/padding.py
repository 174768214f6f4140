"""Rows of one sequence each, padded to one length: the tokens of the kept rollouts of a round.

Row groups of the shards come in one after the other, and the rows of a step go out when they are
full. Leaves out what is kept (plan.py) and rows of several sequences (packing.py).
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from marin_rl.batching import turns
from marin_rl.batching.plan import RoundPlan
from marin_rl.errors import CorruptObject
from marin_rl.storage.tables.batches import StepRows
from schemas.batches import ARRAYS, INTEGER_ARRAYS


def fill_steps(
    plan: RoundPlan, light: pa.Table, row_groups: Iterator[pa.Table]
) -> Iterator[StepRows]:
    """The rows of each step in turn, out of row groups with tokens, masks and log-probabilities.

    With a column `returns` too where rewards are received turn by turn, and `advantages` where they
    differ from turn to turn.

    Raises CorruptObject when the row groups are not those the plan was made from.
    """
    names = light["rollout_id"].combine_chunks(), light["environment"].combine_chunks()
    kept = np.flatnonzero(plan.kept_N)
    step = _Step(plan, min(plan.rows_per_step, len(kept)))
    start = 0
    for table in row_groups:
        chunk = _Chunk(plan, start, table)
        start += table.num_rows
        taken = 0
        while taken < chunk.rows:
            taken += step.take(chunk, taken)
            if step.full:
                yield step.rows(kept, names)
                step = _Step(plan, min(plan.rows_per_step, len(kept) - step.end), step.end)
    if start != len(plan.place_N):
        raise CorruptObject(f"expected {len(plan.place_N)} rollouts, found {start} in the shards")


class _Chunk:
    """The kept sequences of one row group, padded: arrays (rows, T)."""

    def __init__(self, plan: RoundPlan, start: int, table: pa.Table) -> None:
        here = slice(start, start + table.num_rows)
        kept_N, tokens_N = plan.kept_N[here], plan.tokens_N[here]
        if len(kept_N) != table.num_rows:
            raise CorruptObject(f"expected {len(plan.place_N)} rollouts, found more in the shards")
        self.rows = int(kept_N.sum())
        lengths = tokens_N[kept_N].astype(np.int32)
        positions = np.arange(plan.length, dtype=np.int32)
        valid = positions < lengths[:, None]
        keep = None if kept_N.all() else np.flatnonzero(kept_N)
        mask = _padded(table, "loss_mask", keep, valid, np.int32)
        on = mask.astype(np.float32)
        returns = plan.reward_N[here][kept_N, None].astype(np.float32)
        if turns.RETURNS in table.column_names:
            returns = _padded(table, turns.RETURNS, keep, valid, np.float32)
        advantages = plan.advantage_N[here][kept_N, None].astype(np.float32)
        if turns.ADVANTAGES in table.column_names:
            advantages = _padded(table, turns.ADVANTAGES, keep, valid, np.float32)
        self.arrays = {
            "token_ids": _padded(table, "token_ids", keep, valid, np.int32),
            "loss_mask": mask,
            "segment_ids": valid.astype(np.int32),
            "positions": positions * valid,
            "policy_logprobs": _padded(table, "logprobs", keep, valid, np.float32) * on,
            "advantages": on * advantages,
            "returns": on * returns,
        }


class _Step:
    """The rows of one optimizer step while they are being filled."""

    def __init__(self, plan: RoundPlan, rows: int, start: int = 0) -> None:
        self.start, self.end, self._filled = start, start + rows, 0
        shape = rows, plan.length
        self._arrays = {
            name: np.empty(shape, np.int32 if name in INTEGER_ARRAYS else np.float32)
            for name in ARRAYS
        }

    @property
    def full(self) -> bool:
        return self._filled == self.end - self.start

    def take(self, chunk: _Chunk, taken: int) -> int:
        """Copy what fits of `chunk` after its first `taken` rows; how many rows that was."""
        count = min(chunk.rows - taken, self.end - self.start - self._filled)
        for name, array in self._arrays.items():
            source = chunk.arrays[name][taken : taken + count]
            array[self._filled : self._filled + count] = source
        self._filled += count
        return count

    def rows(self, kept: np.ndarray, names: tuple[pa.Array, pa.Array]) -> StepRows:
        """Rows to be written; `kept` are the indices of the kept rollouts of the round."""
        rollout_ids, environments = (_singletons(n, kept[self.start : self.end]) for n in names)
        return StepRows(arrays=self._arrays, rollout_ids=rollout_ids, environments=environments)


def _padded(
    table: pa.Table, name: str, keep: np.ndarray | None, valid: np.ndarray, dtype: type
) -> np.ndarray:
    """The lists of the kept rows as one zero-padded array; `valid` marks their tokens."""
    column = table[name].combine_chunks()
    column = column if keep is None else column.take(pa.array(keep))
    values = column.flatten().to_numpy(zero_copy_only=True)
    if len(values) != np.count_nonzero(valid):
        raise CorruptObject(
            f"rollouts {table['rollout_id'][0].as_py()} and following: {len(values)} {name}, but "
            f"{np.count_nonzero(valid)} tokens are counted in n_prompt_tokens and "
            "n_completion_tokens"
        )
    padded = np.zeros(valid.shape, dtype)
    padded[valid] = values
    return padded


def _singletons(names: pa.Array, indices: np.ndarray) -> pa.ListArray:
    """One list of one name per index: a padded row holds one sequence."""
    offsets = pa.array(np.arange(len(indices) + 1, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, names.take(pa.array(indices)))

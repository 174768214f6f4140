"""Padded rows: each kept segment of a rollout in a row of its own, a step at a time.

Owns how lists of tokens become arrays of one length. Leaves out which segments are kept and how
long a row is (plan.py), and rows that several segments share (packing.py).
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
    plan: RoundPlan, scalars: pa.Table, row_groups: Iterator[pa.Table]
) -> Iterator[StepRows]:
    """The rows of each step in turn, out of row groups with tokens, masks and log-probabilities.

    A row is a segment, and so is a row of `scalars` and of the row groups: a rollout of several is
    cut. With a column `returns` too where rewards are received turn by turn, and `advantages` where
    they differ from turn to turn.

    Raises CorruptObject when the row groups are not those the plan was made from.
    """
    names = scalars["rollout_id"].combine_chunks(), scalars["environment"].combine_chunks()
    kept = np.flatnonzero(plan.kept_S)
    # The 0 is for the step that is begun after the last one and never filled.
    counts = iter((*plan.rows_of_step, 0))
    step = _Step(plan, next(counts))
    start = 0
    for table in row_groups:
        chunk = _Chunk(plan, start, table)
        start += table.num_rows
        taken = 0
        while taken < chunk.rows:
            taken += step.take(chunk, taken)
            if step.full:
                yield step.rows(kept, names)
                step = _Step(plan, next(counts), step.end)
    expected = len(plan.segments.rollout_S)
    if start != expected:
        raise CorruptObject(f"expected {expected} rollouts, found {start} in the shards")


class _Chunk:
    """The kept segments of one row group, padded: arrays (rows, T)."""

    def __init__(self, plan: RoundPlan, start: int, table: pa.Table) -> None:
        here = slice(start, start + table.num_rows)
        rollout_s, tokens_s = plan.segments.rollout_S[here], plan.segments.tokens_S[here]
        kept_s = plan.kept_N[rollout_s]
        if len(kept_s) != table.num_rows:
            expected = len(plan.segments.rollout_S)
            raise CorruptObject(f"expected {expected} rollouts, found more in the shards")
        rollout_k = rollout_s[kept_s]
        self.rows = len(rollout_k)
        lengths = tokens_s[kept_s].astype(np.int32)
        # Comparison of two axes in place of a loop over rollouts; padding has segment 0.
        positions = np.arange(plan.length, dtype=np.int32)
        valid = positions < lengths[:, None]
        keep = None if kept_s.all() else np.flatnonzero(kept_s)
        mask = _padded(table, "loss_mask", keep, valid, np.int32)
        on = mask.astype(np.float32)
        # [rows, 1]: one number for all tokens.
        returns = plan.decision.reward_N[rollout_k, None].astype(np.float32)
        if turns.RETURNS in table.column_names:
            returns = _padded(table, turns.RETURNS, keep, valid, np.float32)
        advantages = plan.decision.advantage_N[rollout_k, None].astype(np.float32)  # [rows, 1]
        if turns.ADVANTAGES in table.column_names:
            advantages = _padded(table, turns.ADVANTAGES, keep, valid, np.float32)
        self.arrays = {
            "token_ids": _padded(table, "token_ids", keep, valid, np.int32),
            "loss_mask": mask,
            "segment_ids": valid.astype(np.int32),
            "positions": positions * valid,
            # 0 off the mask: tokens that the policy did not sample have no logprob of its own.
            "policy_logprobs": _padded(table, "logprobs", keep, valid, np.float32) * on,
            "advantages": on * advantages,
            "returns": on * returns,
        }


class _Step:
    """The rows of one optimizer step while they are being filled."""

    def __init__(self, plan: RoundPlan, rows: int, start: int = 0) -> None:
        self.start, self.end, self._step_rows = start, start + rows, 0
        shape = rows, plan.length
        self._arrays = {
            # Not zeroed: `take` writes every row before the step is yielded.
            name: np.empty(shape, np.int32 if name in INTEGER_ARRAYS else np.float32)
            for name in ARRAYS
        }

    @property
    def full(self) -> bool:
        return self._step_rows == self.end - self.start

    def take(self, chunk: _Chunk, taken: int) -> int:
        """Copy what fits of `chunk` after its first `taken` rows; how many rows that was."""
        # A row group may end within a step, and a step within a row group.
        count = min(chunk.rows - taken, self.end - self.start - self._step_rows)
        for name, array in self._arrays.items():
            source = chunk.arrays[name][taken : taken + count]
            array[self._step_rows : self._step_rows + count] = source
        self._step_rows += count
        return count

    def rows(self, kept: np.ndarray, names: tuple[pa.Array, pa.Array]) -> StepRows:
        """Rows to be written; `kept` are the indices of the kept segments of the round."""
        rollout_ids, environments = (_singletons(n, kept[self.start : self.end]) for n in names)
        return StepRows(arrays=self._arrays, rollout_ids=rollout_ids, environments=environments)


def _padded(
    table: pa.Table, name: str, keep: np.ndarray | None, valid: np.ndarray, dtype: type
) -> np.ndarray:
    """The lists of the kept rows as one zero-padded array; `valid` marks their tokens."""
    column = table[name].combine_chunks()
    column = column if keep is None else column.take(pa.array(keep))
    values = column.flatten().to_numpy(zero_copy_only=True)
    # Checked here, since the assignment below would fail without the rollout's name.
    if len(values) != np.count_nonzero(valid):
        raise CorruptObject(
            f"rollouts {table['rollout_id'][0].as_py()} and following: {len(values)} {name}, but "
            f"{np.count_nonzero(valid)} tokens are counted in n_prompt_tokens and "
            "n_completion_tokens"
        )
    padded = np.zeros(valid.shape, dtype)
    # Boolean indexing goes row by row, the order of the flat values.
    padded[valid] = values
    return padded


def _singletons(names: pa.Array, indices: np.ndarray) -> pa.ListArray:
    """Lists of one name each, as a padded row holds one sequence."""
    offsets = pa.array(np.arange(len(indices) + 1, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, names.take(pa.array(indices)))

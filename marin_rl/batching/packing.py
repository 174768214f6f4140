"""Places of sequences in rows: one to a row, several, or with one prompt for a whole group.

Owns where each kept rollout of a round goes (`one_per_row`, `pack`) and the filling of rows from
the shards (`fill_packed`). Leaves out what is kept and what it is worth (plan.py).

In a row, completions have the segments 1, 2, … in the order of their rollouts. Where prompts are
shared, they are segments of their own, numbered after the completions; a completion's positions
then go on where its prompt's end, and that is how a reader tells: a segment that begins at a
position above 0 continues the last segment before it that begins at 0.

Axes: K kept rollouts of a round in shard order, or segments of them, T tokens of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float64, Int64

from marin_rl.batching.turns import ADVANTAGES, RETURNS, offsets_of
from marin_rl.errors import ConfigError, CorruptObject
from marin_rl.storage.tables.batches import StepRows
from schemas.tables import ARRAYS, INTEGER_ARRAYS, TEACHER

Integers = Int64[np.ndarray, " K"]
Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # flat values and offsets, by name


class PromptsDiffer(ConfigError):
    """Members of a group were given different prompts, where they were to share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Places of the K kept rollouts of a round.

    `row_K` counts within the step, `segment_K` from 1 within the row; `start_K` is the column of
    the rollout's first own token, `prompt_start_K` that of its prompt, which is another rollout's
    where `shared_K` holds. `apart` is True where prompts are separate segments.
    """

    step_K: Integers
    row_K: Integers
    segment_K: Integers
    start_K: Integers
    prompt_start_K: Integers
    prompt_segment_K: Integers
    shared_K: Bool[np.ndarray, " K"]
    apart: bool

    @property
    def steps(self) -> int:
        return int(self.step_K.max(initial=-1)) + 1

    @property
    def rows(self) -> int:
        return int(sum(self.rows_of(step) for step in np.unique(self.step_K).tolist()))

    def rows_of(self, step: int) -> int:
        return int(self.row_K[self.step_K == step].max(initial=-1)) + 1


def one_per_row(step_K: Integers) -> Packing:
    """One sequence per row, from the first column on."""
    row_K, zero_K = counted(np.bincount(step_K)), np.zeros_like(step_K)
    return Packing(
        step_K=step_K,
        row_K=row_K,
        segment_K=zero_K + 1,
        start_K=zero_K,
        prompt_start_K=zero_K,
        prompt_segment_K=zero_K + 1,
        shared_K=np.zeros(len(step_K), bool),
        apart=False,
    )


def pack(
    prompt_K: Integers,
    sampled_K: Integers,
    group_K: Integers,
    step_K: Integers,
    *,
    row_tokens: int,
    share: bool,
) -> Packing:
    """Sequences into rows of `row_tokens`, in order; a row is left when the next does not fit.

    A sequence is a rollout, or a segment of one. With `share`, a sequence whose group's prompt lies
    in the current row adds its completion alone, and a group that would not fit into what is left
    of a row begins a new one. Raises ConfigError for a sequence longer than a row.
    """
    longest = int((prompt_K + sampled_K).max(initial=0))
    if longest > row_tokens:
        raise ConfigError(
            f"a sequence of {longest} tokens does not fit into batching.row_tokens ({row_tokens}): "
            "raise it, or lower sampling.max_tokens"
        )
    packer = _Packer(row_tokens, share)
    if len(group_K) == 0:
        return packer.packing()
    # Tokens of each sequence's group within its step, the prompt counted once.
    _, index_K = np.unique(np.stack([step_K, group_K]), axis=1, return_inverse=True)
    index_K = index_K.reshape(-1)
    # Float64, exact for counts below 2^53.
    sum_K = np.bincount(index_K, weights=sampled_K)[index_K].astype(np.int64)
    group_tokens = (sum_K + prompt_K).tolist()
    for k, (prompt, sampled, group) in enumerate(
        zip(prompt_K.tolist(), sampled_K.tolist(), group_K.tolist(), strict=True)
    ):
        if k and step_K[k] != step_K[k - 1]:
            packer.next_step()
        packer.put(prompt, sampled, group, group_tokens[k])
    return packer.packing()


class _Packer:
    """The row that is being filled, and what has been placed so far."""

    def __init__(self, row_tokens: int, share: bool) -> None:  # noqa: FBT001
        self._row_tokens, self._share = row_tokens, share
        self._step = self._row = self._filled = self._segments = self._prompts = 0
        self._prompt: tuple[int, int, int, int] | None = None  # group, tokens, column, number
        self._placed: list[tuple[int, int, int, int, int, int, bool]] = []

    def next_step(self) -> None:
        self._step, self._row = self._step + 1, -1  # `_next_row` makes it 0
        self._next_row()

    def _next_row(self) -> None:
        self._row, self._filled, self._segments, self._prompts = self._row + 1, 0, 0, 0
        self._prompt = None

    def put(self, prompt: int, sampled: int, group: int, group_tokens: int) -> None:
        """Place a rollout whose group needs `group_tokens` in all, the prompt counted once."""
        # By length only: tokens are not read yet. `_compare` refuses a prompt of the same length
        # and other tokens.
        here = self._prompt is not None and self._prompt[:2] == (group, prompt)
        if here and self._filled + sampled <= self._row_tokens:
            self._add(sampled, shared=True)
            return
        # A group longer than a row cannot lie in one: its members are placed one at a time.
        together = self._share and group_tokens <= self._row_tokens
        needed = group_tokens if together else prompt + sampled
        if self._filled + needed > self._row_tokens:
            self._next_row()
        if self._share:
            self._prompt = group, prompt, self._filled, self._prompts
            self._prompts += 1
            # The prompt lies before its first completion, whose start is counted after it.
            self._filled += prompt
            self._add(sampled, shared=False)
        else:
            self._add(prompt + sampled, shared=False)

    def _add(self, tokens: int, *, shared: bool) -> None:
        self._segments += 1  # from 1: 0 is padding
        _, _, column, number = self._prompt or (0, 0, self._filled, 0)
        self._placed.append(
            (self._step, self._row, self._segments, self._filled, column, number, shared)
        )
        self._filled += tokens

    def packing(self) -> Packing:
        # reshape: without any rollout the list is empty and has no second axis.
        table = np.array(self._placed, np.int64).reshape(-1, 7).T
        step_K, row_K, segment_K, start_K, column_K, number_K, shared_K = table
        # Prompts are numbered after a row's completions, whose number is known only now.
        begins = np.flatnonzero(segment_K == 1)
        counts = np.diff(np.append(begins, len(segment_K)))
        completions_K = np.repeat(counts, counts)
        return Packing(
            step_K=step_K,
            row_K=row_K,
            segment_K=segment_K,
            start_K=start_K,
            prompt_start_K=column_K,
            prompt_segment_K=completions_K + number_K + 1,
            shared_K=shared_K.astype(bool),
            apart=self._share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Facts of the kept sequences before their tokens are read.

    `prompt_K` are the tokens before the first trained one where prompts are shared, and 0 else;
    `sampled_K` all others, among them what an environment wrote between two turns. Tables of tokens
    that are `distilled` have a teacher's log-probabilities.
    """

    index_K: Integers
    prompt_K: Integers
    sampled_K: Integers
    advantage_K: Float64[np.ndarray, " K"]
    reward_K: Float64[np.ndarray, " K"]
    distilled: bool = False


def fill_packed(
    packing: Packing, kept: Kept, row_tokens: int, scalars: pa.Table, row_groups: Iterator[pa.Table]
) -> Iterator[StepRows]:
    """The rows of each step in turn, out of row groups with the token columns.

    Raises CorruptObject when the row groups are not those the plan was made from, PromptsDiffer
    when the members of a group were given different prompts.
    """
    done = start = step = 0
    rows = _Rows(packing, kept, row_tokens, 0)
    for table in row_groups:
        stop = int(np.searchsorted(kept.index_K, start + table.num_rows))
        while done < stop:
            # A row group may end in the middle of a step, and a step in the middle of a row group.
            of_step = int(np.searchsorted(packing.step_K, step + 1))
            upto = min(stop, of_step)
            rows.put(slice(done, upto), table, start)
            done = upto
            if done == of_step:
                yield rows.finished(scalars)
                step += 1
                rows = _Rows(packing, kept, row_tokens, step)
        start += table.num_rows
    if start != scalars.num_rows:
        raise CorruptObject(f"expected {scalars.num_rows} rollouts, found {start} in the shards")


class _Rows:
    """The arrays of one step while they are being filled."""

    def __init__(self, packing: Packing, kept: Kept, row_tokens: int, step: int) -> None:
        self._packing, self._kept, self._length, self._step = packing, kept, row_tokens, step
        self._optional = (TEACHER,) if kept.distilled else ()
        shape = packing.rows_of(step), row_tokens
        self._arrays = {
            # Zeroed, for the end of a row stays padding.
            name: np.zeros(shape, np.int32 if name in INTEGER_ARRAYS else np.float32)
            for name in (*ARRAYS, *self._optional)
        }
        self._flat = {name: array.reshape(-1) for name, array in self._arrays.items()}

    def put(self, these: slice, table: pa.Table, start: int) -> None:
        """Write the rollouts `these` of the kept, whose tokens are in `table` from row `start`."""
        packing, kept, at_k = self._packing, self._kept, self._kept.index_K[these] - start
        prompt_k, sampled_k = kept.prompt_K[these], kept.sampled_K[these]
        names = ("token_ids", "loss_mask", "logprobs", *self._optional)
        columns = {name: _flat(table, name) for name in names}
        _check_lengths(columns, at_k, prompt_k + sampled_k, table)
        # Where each rollout's tokens begin among the flat values, and its row in the flat arrays.
        source_k, row_k = columns["token_ids"][1][at_k], packing.row_K[these] * self._length
        # A shared prompt is written once, by the first rollout of its group.
        shared_k = packing.shared_K[these]
        own_k = np.where(shared_k, 0, prompt_k)
        completion_k = row_k + packing.start_K[these] + (0 if packing.apart else own_k)
        # Index arrays rather than a loop over the thousands of rollouts of a row group.
        to, source = _ranges(completion_k, source_k + prompt_k, sampled_k)
        on = self._write(columns, to, source, source_k, sampled_k, packing.segment_K[these])
        for name, value_K in ((ADVANTAGES, kept.advantage_K), (RETURNS, kept.reward_K)):
            if name in table.column_names:  # of each token, where those of a rollout differ
                values = _flat(table, name)[0][source]
            else:
                values = np.repeat(value_K[these].astype(np.float32), sampled_k)
            self._flat[name][to] = values * on
        prompt_at = row_k + packing.prompt_start_K[these]
        segment_k = packing.prompt_segment_K[these] if packing.apart else packing.segment_K[these]
        to, source = _ranges(prompt_at, source_k, own_k)
        self._write(columns, to, source, source_k, own_k, segment_k)
        # After the prompts are written: what lies at the place of a shared one is its first
        # owner's.
        to, source = _ranges(prompt_at, source_k, np.where(shared_k, prompt_k, 0))
        if not np.array_equal(self._flat["token_ids"][to], columns["token_ids"][0][source]):
            raise PromptsDiffer(
                f"rollouts from {table['rollout_id'][0].as_py()} on: members of a group were given "
                "different prompts, which cannot be shared; set batching.packing to 'sequences'"
            )

    def _write(
        self,
        columns: Columns,
        to: np.ndarray,
        source: np.ndarray,
        source_k: np.ndarray,
        counts_k: np.ndarray,
        segment_k: np.ndarray,
    ) -> np.ndarray:
        """Copy tokens from the flat columns, a rollout's from `source_k` on; return their mask."""
        flat = self._flat
        flat["token_ids"][to] = columns["token_ids"][0][source]
        mask = columns["loss_mask"][0][source]
        flat["loss_mask"][to] = mask
        on = mask.astype(np.float32)
        # 0 off the mask: such tokens were not sampled by the policy.
        flat["policy_logprobs"][to] = columns["logprobs"][0][source] * on
        for name in self._optional:  # NaN times 0 is NaN
            flat[name][to] = np.where(mask != 0, columns[name][0][source], np.float32(0))
        flat["segment_ids"][to] = np.repeat(segment_k, counts_k)
        # A completion goes on at its prompt's length, whichever column it lies in.
        flat["positions"][to] = source - np.repeat(source_k, counts_k)
        return on

    def finished(self, scalars: pa.Table) -> StepRows:
        of_step = np.flatnonzero(self._packing.step_K == self._step)
        rows = self._packing.row_K[of_step]
        counts = np.bincount(rows, minlength=len(self._arrays["token_ids"]))
        offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        taken = pa.array(self._kept.index_K[of_step])
        rollout_ids, environments = (
            pa.ListArray.from_arrays(offsets, scalars[name].combine_chunks().take(taken))
            for name in ("rollout_id", "environment")
        )
        return StepRows(arrays=self._arrays, rollout_ids=rollout_ids, environments=environments)


def _check_lengths(
    columns: Columns, at_k: np.ndarray, expected_k: np.ndarray, table: pa.Table
) -> None:
    for name, (_, offsets) in columns.items():
        length_k = offsets[at_k + 1] - offsets[at_k]
        wrong = np.flatnonzero(length_k != expected_k)
        if len(wrong):
            raise CorruptObject(
                f"rollout {table['rollout_id'][int(at_k[wrong[0]])].as_py()}: expected "
                f"{expected_k[wrong[0]]} {name}, as its counts say, found {length_k[wrong[0]]}"
            )


def _flat(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A list column as flat values, and where each list begins and the last one ends."""
    column = table[name].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False), offsets_of(column)


def counted(counts: np.ndarray) -> np.ndarray:
    """Ranges 0 … n-1 for every n of `counts`, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)


def _ranges(
    to: np.ndarray, source: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Index pairs that copy `counts[i]` entries from `source[i]` to `to[i]` on."""
    step = counted(counts)
    return np.repeat(to, counts) + step, np.repeat(source, counts) + step

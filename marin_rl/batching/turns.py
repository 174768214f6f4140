"""Rewards by turn: what each token of a rollout still has to come, and what each turn is worth.

A rollout's turns may have rewards of their own; each is received at the turn's last token, and what
the rollout's reward is more than their sum at the rollout's last. A critic learns what each token
has to come (`with_returns`). Without one, baselines compare whole rollouts, or with
`objective.turn_discount` the turns of one place: for that, a turn is a run of trained tokens, which
ends where other tokens follow or where a reward is received (`with_turns`, `turn_advantages`).

Axes: n rollouts of a table, N tokens of all of them, R rewarded turns, U turns with trained tokens,
P groups.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int64

from marin_rl.batching.advantages import discounted_returns
from marin_rl.batching.round_advantages import AdvantageChoice, group_statistics, round_advantages
from marin_rl.finite import fit_rewards

RETURNS, ADVANTAGES = "returns", "advantages"  # columns that come before a rollout's one number
READ = ("loss_mask", "turns")  # what `with_turns` needs


def with_returns(table: pa.Table, reward_n: Float64[np.ndarray, " n"]) -> pa.Table:
    """A table of rollouts with the column `returns`: at each token the sum of rewards from it on.

    `reward_n` is the reward of a rollout, NaN where it is not needed. The table has `token_ids`
    and `turns`, which it loses.
    """
    offsets = offsets_of(table["token_ids"].combine_chunks())
    early = _Early.of(table["turns"].combine_chunks(), offsets)
    received_N, some_n = early.received_N, np.diff(offsets) > 0
    left_n = np.nan_to_num(reward_n) - early.sum_n
    # At the last token; an empty rollout has none.
    received_N[offsets[1:][some_n] - 1] += left_n[some_n]
    to_come_N = np.empty_like(received_N)
    for start, end in pairwise(offsets.tolist()):
        to_come_N[start:end] = np.cumsum(received_N[start:end][::-1])[::-1]
    return _with_lists(table.drop_columns("turns"), RETURNS, to_come_N, offsets)


def with_turns(table: pa.Table) -> pa.Table:
    """A table of rollouts with what `Turns` are made of, in place of its `loss_mask` and `turns`.

    The columns `turn_rewards` and `turn_tokens` have an entry per turn: what is received from its
    first token on until the next one's, but for the rollout's last token, and its trained tokens.
    `turns_reward` is what is received in all before the rollout's last token.
    """
    mask = table["loss_mask"].combine_chunks()
    offsets = offsets_of(mask)
    early = _Early.of(table["turns"].combine_chunks(), offsets)
    trained_N = mask.flatten().to_numpy(zero_copy_only=False) != 0
    rollout_N = np.repeat(np.arange(len(mask)), np.diff(offsets))
    goes_on_N = np.zeros(len(trained_N), bool)
    goes_on_N[1:] = trained_N[:-1] & ~early.ends_N[:-1] & (rollout_N[1:] == rollout_N[:-1])
    begins_N = trained_N & ~goes_on_N  # first token of each turn
    # -1 before the first turn of all.
    rollout_U, turn_N = rollout_N[begins_N], np.cumsum(begins_N) - 1
    within_N = turn_N >= 0
    # Tokens before a rollout's first trained one would else count to the last turn of the rollout
    # before.
    within_N[within_N] = rollout_U[turn_N[within_N]] == rollout_N[within_N]
    turns = len(rollout_U)
    reward_U = _sums(turn_N[within_N], early.received_N[within_N], turns)
    tokens_U = np.bincount(turn_N[trained_N], minlength=turns).astype(np.int64)
    offset_U = np.append(0, np.cumsum(np.bincount(rollout_U, minlength=len(mask))))
    table = table.drop_columns(list(READ))
    table = _with_lists(table, "turn_rewards", reward_U, offset_U)
    table = _with_lists(table, "turn_tokens", tokens_U, offset_U)
    return table.append_column("turns_reward", pa.array(early.sum_n))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The U turns of n rollouts: `offset_n` has where each rollout's begin, and where all end.

    `reward_U` is what is received in a turn, less what the rollout's last token does; that is the
    rollout's reward less `early_n`.
    """

    offset_n: Int64[np.ndarray, " n1"]
    tokens_U: Int64[np.ndarray, " U"]
    reward_U: Float64[np.ndarray, " U"]
    early_n: Float64[np.ndarray, " n"]

    @classmethod
    def of(cls, table: pa.Table) -> "Turns":
        rewards, tokens = (table[n].combine_chunks() for n in ("turn_rewards", "turn_tokens"))
        return cls(
            offset_n=offsets_of(rewards),
            tokens_U=tokens.flatten().to_numpy(zero_copy_only=False),
            reward_U=rewards.flatten().to_numpy(zero_copy_only=False),
            early_n=table["turns_reward"].to_numpy(),
        )

    @property
    def trained_n(self) -> Int64[np.ndarray, " n"]:
        return np.diff(np.append(0, np.cumsum(self.tokens_U))[self.offset_n])

    @property
    def rollout_U(self) -> Int64[np.ndarray, " U"]:
        counts_n = np.diff(self.offset_n)
        return np.repeat(np.arange(len(counts_n)), counts_n)

    def returns(
        self, reward_n: Float64[np.ndarray, " n"], discount: float
    ) -> Float64[np.ndarray, " U"]:
        """`G_u = r_u + discount G_{u+1}` of each turn; NaN where the reward is no number."""
        received_U = self.reward_U.copy()
        some_n = np.diff(self.offset_n) > 0
        # The rest of the rollout's reward is received in its last turn.
        received_U[self.offset_n[1:][some_n] - 1] += (reward_n - self.early_n)[some_n]
        result_U = np.empty_like(received_U)
        for start, end in pairwise(self.offset_n.tolist()):
            discount_u = np.full(end - start, discount)
            result_U[start:end] = discounted_returns(received_U[start:end], discount_u)
        rollout_U = self.rollout_U
        return np.where(np.isfinite(reward_n[rollout_U]), result_U, np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAdvantages:
    """Advantages of each turn of n rollouts, and the spread of the turns of a group."""

    turns: Turns
    advantage_U: Float64[np.ndarray, " U"]
    spread_P: Float64[np.ndarray, " P"]

    @property
    def mean_n(self) -> Float64[np.ndarray, " n"]:
        """Mean over the trained tokens of each rollout; 0 where it has none."""
        turns, trained_n = self.turns, self.turns.trained_n
        weighed_U = self.advantage_U * turns.tokens_U
        sum_n = _sums(turns.rollout_U, weighed_U, len(trained_n))
        return sum_n / np.maximum(trained_n, 1)

    def spread_over(self, table: pa.Table, start: int) -> pa.Table:
        """Rollouts from `start` on, with the column `advantages`: of each token, that of its turn.

        The table has `loss_mask`, of which the turns were made.
        """
        mask = table["loss_mask"].combine_chunks()
        trained_N = mask.flatten().to_numpy(zero_copy_only=False) != 0
        first, last = self.turns.offset_n[[start, start + len(mask)]]
        advantage_N = np.zeros(len(trained_N))
        # Turns are runs of trained tokens, so that their counts add up to the mask's.
        advantage_N[trained_N] = np.repeat(
            self.advantage_U[first:last], self.turns.tokens_U[first:last]
        )
        return _with_lists(table, ADVANTAGES, advantage_N, offsets_of(mask))


def turn_advantages(
    turns: Turns,
    reward_n: Float64[np.ndarray, " n"],
    group_n: Int64[np.ndarray, " n"],
    groups: int,
    discount: float,
    choice: AdvantageChoice,
) -> TurnAdvantages:
    """Advantages of discounted returns, the first turns of a group against one another, and so on.

    `reward_n` is NaN for a rollout that is left out. Raises as `round_advantages` does.
    """
    return_U, rollout_U = turns.returns(reward_n, discount), turns.rollout_U
    # First turns are compared with first turns: a later turn has seen what earlier ones made.
    index_U = np.arange(len(rollout_U)) - turns.offset_n[rollout_U]
    group_U = group_n[rollout_U]
    places, place_U = np.unique(np.stack([group_U, index_U]), axis=1, return_inverse=True)
    place_U, count = place_U.reshape(-1).astype(np.int64), places.shape[1]
    statistics = group_statistics(return_U, place_U, count)
    spread_P = np.zeros(groups)
    # A group has several turns, and indexing alone would keep the last one written.
    np.maximum.at(spread_P, group_U, statistics.spread[place_U])
    advantage_U = round_advantages(return_U, place_U, count, choice, turns.tokens_U)
    return TurnAdvantages(turns=turns, advantage_U=advantage_U, spread_P=spread_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Early:
    """Rewards that are received before a rollout's last token: where, and how much in all."""

    received_N: Float64[np.ndarray, " N"]
    ends_N: np.ndarray
    sum_n: Float64[np.ndarray, " n"]

    @classmethod
    def of(cls, turns: pa.ListArray, offsets: np.ndarray) -> "_Early":
        rollout_R = np.repeat(np.arange(len(turns)), np.diff(turns.offsets.to_numpy()))
        each = turns.flatten()
        end_R, turn_R = (
            each.field(name).to_numpy(zero_copy_only=False).astype(np.float64)
            for name in ("end", "reward")
        )
        # A turn without tokens has no last token to receive a reward at.
        rewarded_R = np.isfinite(end_R) & fit_rewards(turn_R) & (np.nan_to_num(end_R) > 0)
        rollout_R, turn_R = rollout_R[rewarded_R], turn_R[rewarded_R]
        end_R = end_R[rewarded_R].astype(np.int64)
        early_R = end_R < np.diff(offsets)[rollout_R]  # the others are received at the end anyhow
        rollout_R, end_R, turn_R = rollout_R[early_R], end_R[early_R], turn_R[early_R]
        received_N, ends_N = np.zeros(offsets[-1]), np.zeros(offsets[-1], bool)
        # Two rewarded turns may end at the same token: `+=` by index would keep one of them.
        np.add.at(received_N, offsets[rollout_R] + end_R - 1, turn_R)
        ends_N[offsets[rollout_R] + end_R - 1] = True
        sum_n = _sums(rollout_R, turn_R, len(turns))
        return cls(received_N=received_N, ends_N=ends_N, sum_n=sum_n)


def _sums(place: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Sums of the values of each of `count` places, always float64."""
    return np.bincount(place, weights=values, minlength=count).astype(np.float64)


def offsets_of(column: pa.ListArray) -> Int64[np.ndarray, " n1"]:
    """Offset of each list among the flat values, and the end of the last one."""
    offsets = column.offsets.to_numpy().astype(np.int64)
    # A slice keeps the offsets of the whole column, while `flatten` returns its own values alone.
    return offsets - offsets[0]


def _with_lists(table: pa.Table, name: str, values: np.ndarray, offsets: np.ndarray) -> pa.Table:
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))
    return table.append_column(name, lists)

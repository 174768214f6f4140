"""Rollouts behind the sequences of batches: a rollout that was cut is several of them.

A batch names the rollout of every segment, and a rollout of several segments is named by each. What
is counted, summed or discounted over a rollout goes over all of its segments here; an importance
ratio at the level of sequences is that of each segment by itself. All segments of a rollout lie in
one step, side by side and in order.

Axes: S named segments of some batches, N trained tokens of a batch, row by row, M microbatches,
R rows of one, B rows (M times R), T positions.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float32, Int64

from marin_rl.batching.packing import counted
from marin_rl.training.critic import token_gae
from marin_rl.types import TrainingBatch


def rollout_numbers(batches: Sequence[TrainingBatch]) -> tuple[Int64[np.ndarray, " S"], list[str]]:
    """The rollout of each named segment as a number, and the names by these numbers."""
    return numbered([name for batch in batches for row in batch.rollout_ids for name in row])


def numbered(names: Sequence[str]) -> tuple[Int64[np.ndarray, " _"], list[str]]:
    """Each of the names as a number, and the names by these numbers."""
    # Numbered by first appearance, not by a set's order, which differs between processes.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64), list(numbers)


def is_cut(batch: TrainingBatch) -> bool:
    """Return True where a rollout of the batch has several segments."""
    names = [name for row in batch.rollout_ids for name in row]
    return len(set(names)) < len(names)


def rollouts_of_tokens(
    batch: TrainingBatch, mask_BT: Bool[np.ndarray, "B T"]
) -> Int64[np.ndarray, " N"]:
    """The rollout of each token of the mask, as a number that ascends; that of its segment unnamed.

    Rows of the mask beyond the batch's have no tokens.
    """
    row_N, position_N = np.nonzero(mask_BT)
    segment_N = batch.segment_ids[row_N, position_N]
    if not batch.rollout_ids:
        return np.unique(np.stack([row_N, segment_N]), axis=1, return_inverse=True)[1].reshape(-1)
    number_S, _ = rollout_numbers([batch])
    counts = np.array([len(row) for row in batch.rollout_ids], np.int64)
    first = np.cumsum(counts) - counts
    # Segments of a row count from 1: 0 is padding.
    return number_S[first[row_N] + segment_N - 1]


def rollout_shares(
    batch: TrainingBatch, mask_BT: Bool[np.ndarray, "B T"]
) -> Float32[np.ndarray, "B T"] | None:
    """At each trained token 1 / the trained tokens of its rollout, 0 elsewhere.

    None where every segment is a rollout: then that of `losses.sequence_shares` is the same.
    """
    if not is_cut(batch):
        return None
    rollout_N = rollouts_of_tokens(batch, mask_BT)
    shares_BT = np.zeros(mask_BT.shape, np.float32)
    shares_BT[mask_BT] = 1.0 / np.bincount(rollout_N)[rollout_N]
    return shares_BT


def rollout_gae(
    batch: TrainingBatch,
    rewards_BT: Float32[np.ndarray, "B T"],
    values_BT: Float32[np.ndarray, "B T"],
    mask_BT: Bool[np.ndarray, "B T"],
    segment_ids_BT: np.ndarray,
    *,
    gamma: float,
    lambda_: float,
) -> Float32[np.ndarray, "B T"]:
    """`critic.token_gae` over whole rollouts: the next segment's first token follows a last one.

    What was sampled in one segment changed what the next one begins with, so that the value there
    is what the action led to.
    """
    if not is_cut(batch):
        rows = rewards_BT, values_BT, mask_BT, segment_ids_BT
        return np.asarray(token_gae(*rows, gamma=gamma, lambda_=lambda_))
    rollout_N = rollouts_of_tokens(batch, mask_BT)
    count = np.bincount(rollout_N)
    index_N = counted(count)  # within its rollout, for tokens ascend by rollout
    # Powers of two, so that rounds of other lengths need few compiled programs.
    shape = _power_of_two(len(count)), _power_of_two(int(count.max(initial=1)))

    def gathered(array_BT: np.ndarray) -> np.ndarray:
        result = np.zeros(shape, array_BT.dtype)
        result[rollout_N, index_N] = array_BT[mask_BT]  # a row per rollout, trained tokens only
        return result

    rewards, values, mask = (gathered(array) for array in (rewards_BT, values_BT, mask_BT))
    gae = token_gae(rewards, values, mask, mask.astype(np.int32), gamma=gamma, lambda_=lambda_)
    advantages_BT = np.zeros(mask_BT.shape, np.float32)
    advantages_BT[mask_BT] = np.asarray(gae)[rollout_N, index_N]
    return advantages_BT


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()

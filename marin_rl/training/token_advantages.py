"""Advantages of each token: by a critic's values, and by the optimal token baseline.

Generalised advantage estimation goes over whole rollouts, also where one was cut into segments. The
optimal token baseline is, at each token, the mean of the group's returns by gradient norms: the
baseline of least variance weighs a return by the squared norm of the gradient it multiplies. For
the tokens of a completion so far that is taken to be the sum of the squared norms of their scores,
the gradients of log-probabilities by the logits, which a forward pass gives. Passes over the rows
are in precompute.py; `marin-rl metrics verify` computes the baseline again, apart from here.

Axes: N trained tokens of a round, S completions, M microbatches, R rows of one, B rows, T
positions, E embedding, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int, Int64

from marin_rl.batching.packing import counted
from marin_rl.batching.round_advantages import whitened as whitened_tokens
from marin_rl.config import ObjectiveConfig
from marin_rl.models.block import logits_of
from marin_rl.models.module import LanguageModel
from marin_rl.models.spec import Spec
from marin_rl.training.logprobs import token_logprobs_and_values
from marin_rl.training.reference_policy import group_numbers
from marin_rl.training.segments import FloatBT, is_cut, rollouts_of_tokens
from marin_rl.training.step_loss import correction_weights
from marin_rl.training.step_types import StepArrays, StepSettings
from marin_rl.types import TrainingBatch


@partial(jax.jit, static_argnames=("gamma", "lambda_"))
def token_gae(
    rewards_BT: FloatBT,
    values_BT: FloatBT,
    mask_BT: Bool[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    *,
    gamma: float,
    lambda_: float,
) -> FloatBT:
    """Generalised advantage estimation over the trained tokens of every segment; 0 elsewhere.

    A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, where t + 1 is the
    next trained token of the segment, and V and A are 0 after the last (Schulman et al. 2016,
    arXiv:1506.02438, equation 16). `batching.advantages.gae` is the same of one trajectory.
    """

    def body(after: tuple[Array, ...], at: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        reward_B, value_B, trained_B, segment_B = at
        advantage_after_B, value_after_B, segment_after_B = after
        # Another segment is another trajectory: no value crosses from a neighbour in the row.
        goes_on_B = jnp.where(segment_after_B == segment_B, gamma, 0.0)
        delta_B = reward_B + goes_on_B * value_after_B - value_B
        advantage_B = delta_B + goes_on_B * lambda_ * advantage_after_B
        now = advantage_B, value_B, segment_B
        # Tokens that were not sampled, such as a tool's, are skipped: the token before them is
        # followed by the next trained one.
        before = tuple(jnp.where(trained_B, n, a) for n, a in zip(now, after, strict=True))
        return before, jnp.where(trained_B, advantage_B, 0.0)

    # The scan starts behind the row's end, in segment 0, which no trained token has.
    nothing_B = jnp.zeros(mask_BT.shape[0], jnp.float32)
    start = nothing_B, nothing_B, jnp.zeros(mask_BT.shape[0], segment_ids_BT.dtype)
    # [T, B]: scan goes over the first axis.
    columns = tuple(array.T for array in (rewards_BT, values_BT, mask_BT, segment_ids_BT))
    _, advantages_TB = jax.lax.scan(body, start, columns, reverse=True)
    return advantages_TB.T


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
    """`token_gae` over whole rollouts: the next segment's first token follows a last one.

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


def whitened(
    advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> list[Float32[np.ndarray, "M R T"]]:
    """`(A - mean) / sqrt(var + 1e-8)`, ddof 1, over all trained tokens given; 0 elsewhere."""
    # All steps together: a token's scale must not depend on the step that its row came into.
    advantage_N = np.concatenate([a[m] for a, m in zip(advantages, masks, strict=True)])
    white_N = whitened_tokens(advantage_N.astype(np.float64), np.ones(len(advantage_N), np.int64))
    result, start = [np.zeros(a.shape, np.float32) for a in advantages], 0
    for array, mask in zip(result, masks, strict=True):
        count = int(mask.sum())
        array[mask] = white_N[start : start + count]
        start += count
    return result


class SquaredProbabilities(eqx.Module):
    """The sum over the vocabulary of squared probabilities, of the token after every state.

    `words` are the output head's weights, [V, E]; probabilities are softmax(logits / temperature).
    """

    words: Float[Array, "V E"]
    spec: Spec = eqx.field(static=True)
    temperature: float = eqx.field(static=True)

    @staticmethod
    def of(model: LanguageModel, temperature: float) -> "SquaredProbabilities":
        return SquaredProbabilities(model.head, model.spec, temperature)

    def __call__(self, states: Float[Array, "*N E"]) -> Float[Array, "*N"]:
        logits = logits_of(self.spec, self.words, states)
        return jnp.sum(jnp.square(jax.nn.softmax(logits / self.temperature, axis=-1)), axis=-1)


def squared_score_norms(
    policy: LanguageModel, rows: StepArrays, settings: StepSettings
) -> Float[Array, "R T"]:
    """`|e_y - p|^2 = 1 - 2 p(y) + sum_v p(v)^2` of every trained token y of rows; 0 elsewhere.

    p is softmax(logits / temperature), and e_y - p the gradient of log p(y) by that softmax's
    argument. Summed as (1 - p(y))^2 and the squares of the others, neither of which is negative.
    """
    scores, squares = token_logprobs_and_values(
        policy,
        SquaredProbabilities.of(policy, settings.temperature),
        *rows.inputs,
        temperature=settings.temperature,
        packing=settings.packing,
    )
    # Where p(y) is nearly 1 the difference may round to less than 0; for the same reason 1 - p(y)
    # is computed by expm1, which keeps its digits.
    others = jnp.maximum(squares - jnp.exp(2 * scores.logprobs), 0.0)
    return jnp.where(rows.mask, jnp.square(jnp.expm1(scores.logprobs)) + others, 0.0)


def return_weights(
    objective: ObjectiveConfig,
    rows: StepArrays,
    old: Float[np.ndarray, "M R T"] | None,
    norms: Float[np.ndarray, "M R T"],
) -> Float[np.ndarray, "M R T"]:
    """The summand that each token adds to the weights of the returns from it on.

    That is the squared norm of its score, times the square of its correction weight where the loss
    has one, which follows from `old`, the trainer's log-probabilities before the first update.
    """
    if objective.importance_correction == "none":
        return norms
    assert old is not None, "a correction compares with the trainer before the first update"
    length = norms.shape[-1]
    arrays = (old, rows.policy_logprobs, rows.mask, rows.segment_ids)
    # The loss of a token is multiplied by it, so its score's squared norm is by its square.
    weights = correction_weights(objective, *(array.reshape(-1, length) for array in arrays))
    return norms * np.square(np.asarray(weights)).reshape(norms.shape)


def round_token_advantages(
    groups: Mapping[str, str],
    batches: Sequence[TrainingBatch],
    arrays: Sequence[StepArrays],
    weights: Sequence[Float[np.ndarray, "M R T"]],
) -> list[Float32[np.ndarray, "M R T"]]:
    """The advantages of all trained tokens of a round, step by step; 0 elsewhere.

    Returns are those of the batches, `groups` has the group of every rollout, and `weights` are
    those of `return_weights`.
    """
    # Over all steps: members of one group may be in several batches.
    group_S, _ = group_numbers(groups, batches)
    sequences, returns, flat_weights, start = [], [], [], 0
    for batch, rows, weight in zip(batches, arrays, weights, strict=True):
        mask_BT = rows.mask.reshape(-1, rows.mask.shape[-1])
        sequences.append(start + rollouts_of_tokens(batch, mask_BT))
        returns.append(batch.returns[np.nonzero(mask_BT)].astype(np.float64))
        flat_weights.append(weight.reshape(mask_BT.shape)[mask_BT].astype(np.float64))
        # Rollouts are numbered across batches, as in `group_numbers`.
        start += len({name for row in batch.rollout_ids for name in row})
    advantage_N = token_advantages(
        np.concatenate(returns), np.concatenate(flat_weights), np.concatenate(sequences), group_S
    )
    ends = np.cumsum([len(step) for step in sequences])
    result = [np.zeros(rows.mask.shape, np.float32) for rows in arrays]
    for array, rows, step_N in zip(result, arrays, np.split(advantage_N, ends[:-1]), strict=True):
        array[rows.mask] = step_N
    return result


def token_advantages(
    return_N: Float64[np.ndarray, " N"],
    weight_N: Float64[np.ndarray, " N"],
    sequence_N: Int64[np.ndarray, " N"],
    group_S: Int64[np.ndarray, " S"],
) -> Float64[np.ndarray, " N"]:
    """`A_it = G_it - sum_j W_jt G_jt / sum_j W_jt`, `W_jt = sum_{s <= t} w_js`.

    The sums are over the completions j of the group that have a t-th trained token; where all their
    W are 0, the baseline is the plain mean. A token that no other completion reaches gets exactly
    0, and so do returns that are all equal. Tokens are in order, a completion's side by side
    (arXiv:2602.07078; verl's `optimal_token_baseline`).
    """
    count_S = np.bincount(sequence_N, minlength=len(group_S))
    first_N = (np.cumsum(count_S) - count_S)[sequence_N]
    index_N = np.arange(len(sequence_N)) - first_N  # t, from 0, of each completion's tokens
    # Running sums of each completion, as differences of one over all; in float64, for they cancel.
    before_N = np.append(0.0, np.cumsum(weight_N))
    total_N = before_N[1:] - before_N[first_N]
    # A number for each group and index: no index reaches the factor.
    places = group_S[sequence_N] * (int(count_S.max(initial=0)) + 1) + index_N
    _, place_N = np.unique(places, return_inverse=True)
    count_P = np.bincount(place_N)  # completions that reach each index of a group
    # Returns less the lowest of their place: what all have in common must cancel exactly.
    lowest_P = np.full(len(count_P), np.inf)
    np.minimum.at(lowest_P, place_N, return_N)
    above_N = return_N - lowest_P[place_N]
    total_P = np.bincount(place_N, weights=total_N)  # sums of W
    weighed_P = np.bincount(place_N, weights=total_N * above_N)
    plain_P = np.bincount(place_N, weights=above_N) / count_P
    # `np.where` computes both branches: the inner one keeps 0 / 0 out of the first.
    mean_P = np.where(total_P > 0, weighed_P / np.where(total_P > 0, total_P, 1.0), plain_P)
    return above_N - mean_P[place_N]

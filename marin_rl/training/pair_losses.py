"""Losses of preference pairs over a policy's log-probabilities, and their metrics: pure functions.

A row holds one pair: its `advantages` are 1 on the tokens of the chosen answer and -1 on those of
the rejected one, its `policy_logprobs` the reference's log-probabilities, 0 without a reference.
For `kto` a row has one answer, chosen or rejected by its label, and a mismatched one, of a row with
another prompt, whose `advantages` are 0.

With p and r the log-probabilities of an answer by policy and reference, summed over its tokens or
their mean, D = (p - r of chosen) - (p - r of rejected), s the logistic function, e the smoothing:

    sigmoid   -(1-e) log s(beta D) - e log s(-beta D)     DPO, arXiv:2305.18290, eq. 7; with e, cDPO
    robust    [-(1-e) log s(beta D) + e log s(-beta D)] / (1-2e)             arXiv:2403.00409, eq. 9
    hinge     max(0, 1 - beta D)                                           SLiC, arXiv:2305.10425
    ipo       (D - 1 / (2 beta))^2, of means                            arXiv:2310.12036, eq. 17
    apo_zero  1 - s(beta (p - r of chosen)) + s(beta (p - r of rejected))          arXiv:2408.06266
    apo_down  s(beta (p - r of chosen)) + 1 - s(beta D)                            arXiv:2408.06266
    simpo     as sigmoid of beta (p of chosen - p of rejected) - gamma       arXiv:2405.14734, eq. 6
    orpo      -beta log s(log odds of chosen - those of rejected), and the mean negative
              log-likelihood of the chosen answers' tokens                arXiv:2403.07691, eq. 6, 7
    kto       w (1 - s(beta (p - r - z))) of a desirable answer, w (1 - s(beta (z - p + r))) of an
              undesirable one, z the mean p - r of a microbatch's mismatched answers, at least 0
                                                                       arXiv:2402.01306, eq. 8

Axes: M microbatches, where there are several, R rows of one, P pairs, T positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marin_rl.config import PreferenceLossConfig
from marin_rl.training.losses import CERTAIN
from marin_rl.training.step_types import StepArrays

Metrics = dict[str, jax.Array]


class Answers(NamedTuple):
    """Sums over the tokens of one answer of each pair; 0 where a row holds no pair.

    `ratios` are of policy to reference, in nats.
    """

    logprobs: Float[Array, "*M P"]
    ratios: Float[Array, "*M P"]
    tokens: Float[Array, "*M P"]

    def means(self) -> "Answers":
        tokens = jnp.maximum(self.tokens, 1.0)
        return Answers(self.logprobs / tokens, self.ratios / tokens, self.tokens)


class PairCounts(NamedTuple):
    """Pairs of a step, and tokens of their chosen answers; at least 1."""

    pairs: Float[Array, ""]
    chosen_tokens: Float[Array, ""]


class Pairs(NamedTuple):
    """The chosen and rejected answers of rows; `there` is False for rows that fill up."""

    chosen: Answers
    rejected: Answers
    mismatched: Answers
    there: Bool[Array, "*M P"]

    @classmethod
    def of(cls, logprobs_RT: Float[Array, "*M R T"], rows: StepArrays) -> "Pairs":
        def answers(sign: float) -> Answers:
            own_RT = rows.mask & (jnp.sign(rows.advantages) == sign)
            # Token by token, so that a policy that is its reference has a ratio of exactly 0.
            ratios_RT = logprobs_RT - rows.policy_logprobs
            sums = (
                jnp.sum(jnp.where(own_RT, values_RT, 0.0), axis=-1)
                for values_RT in (logprobs_RT, ratios_RT, jnp.ones_like(logprobs_RT))
            )
            return Answers(*sums)

        return cls(answers(1.0), answers(-1.0), answers(0.0), jnp.any(rows.mask, axis=-1))

    def answers(self, loss: PreferenceLossConfig) -> tuple[Answers, Answers]:
        """The two answers as the loss normalises them."""
        both = self.chosen, self.rejected
        return (both[0].means(), both[1].means()) if loss.of_means else both

    def kl(self, loss: PreferenceLossConfig) -> Float[Array, "*M P"]:
        """KTO's estimate of the KL to the reference for each row, one for all of a microbatch."""
        answers = self.mismatched.means() if loss.of_means else self.mismatched
        total = jnp.sum(jnp.where(self.there, answers.ratios, 0.0), axis=-1, keepdims=True)
        mean = total / jnp.maximum(jnp.sum(self.there, axis=-1, keepdims=True), 1.0)
        # A baseline, so without a gradient.
        kl = jax.lax.stop_gradient(jnp.maximum(mean, 0.0))
        return jnp.broadcast_to(kl, self.there.shape)


def pair_losses(loss: PreferenceLossConfig, pairs: Pairs) -> Float[Array, "*M P"]:
    """The loss of each pair or labelled answer; of `orpo` without its likelihood."""
    (chosen, rejected), beta = pairs.answers(loss), loss.beta
    difference_P = chosen.ratios - rejected.ratios
    match loss.type:
        case "hinge":
            return jax.nn.relu(1.0 - beta * difference_P)
        case "ipo":
            return jnp.square(difference_P - 1.0 / (2.0 * beta))
        case "apo_zero":
            return (
                1.0 - jax.nn.sigmoid(beta * chosen.ratios) + jax.nn.sigmoid(beta * rejected.ratios)
            )
        case "apo_down":
            return jax.nn.sigmoid(beta * chosen.ratios) + 1.0 - jax.nn.sigmoid(beta * difference_P)
        case "orpo":
            odds_P = _log_odds(chosen.logprobs) - _log_odds(rejected.logprobs)
            return -beta * jax.nn.log_sigmoid(odds_P)
        case "simpo":
            logits_P = beta * (chosen.logprobs - rejected.logprobs) - loss.target_margin
            return _logistic(loss, logits_P)
        case "kto":  # of the answer that the label is of
            desirable_P, kl_P = chosen.tokens > 0, pairs.kl(loss)
            surplus_P = jnp.where(desirable_P, chosen.ratios - kl_P, kl_P - rejected.ratios)
            weights = loss.desirable_weight or 1.0, loss.undesirable_weight or 1.0
            return jnp.where(desirable_P, *weights) * (1.0 - jax.nn.sigmoid(beta * surplus_P))
        case _:  # sigmoid, robust
            return _logistic(loss, beta * difference_P)


def _logistic(loss: PreferenceLossConfig, logits_P: Array) -> Float[Array, "*M P"]:
    smoothing = loss.label_smoothing
    right_P, wrong_P = -jax.nn.log_sigmoid(logits_P), -jax.nn.log_sigmoid(-logits_P)
    if loss.type == "robust":
        return ((1 - smoothing) * right_P - smoothing * wrong_P) / (1 - 2 * smoothing)
    return (1 - smoothing) * right_P + smoothing * wrong_P


def preference_loss(
    loss: PreferenceLossConfig, pairs: Pairs, counts: PairCounts
) -> Float[Array, ""]:
    """The part of a step's loss that these pairs are; `counts` are those of the whole step."""
    losses_P = jnp.where(pairs.there, pair_losses(loss, pairs), 0.0)
    total = jnp.sum(losses_P) / counts.pairs
    # Of the mean negative log-likelihood of the chosen answers' tokens.
    if weight := loss.sft_coefficient + (1.0 if loss.type == "orpo" else 0.0):
        total -= weight * jnp.sum(pairs.chosen.logprobs) / counts.chosen_tokens
    return total


def counts_of(arrays: StepArrays) -> PairCounts:
    pairs = jnp.sum(jnp.any(arrays.mask, axis=-1))
    chosen_tokens = jnp.sum(arrays.mask & (arrays.advantages > 0))
    return PairCounts(jnp.maximum(pairs, 1.0), jnp.maximum(chosen_tokens, 1.0))


def preference_metrics(loss: PreferenceLossConfig, pairs: Pairs) -> Metrics:
    """Metrics of pairs as TRL has them; a tie is wrong.

    The reward of an answer is beta times its log-ratio to the reference, summed over its tokens;
    without a reference, beta times its mean log-probability. NaN where there is no such answer.
    """
    chosen, rejected = pairs.chosen, pairs.rejected
    count = jnp.maximum(jnp.sum(pairs.there), 1.0)

    def mean(values_P: Array, of: Answers | None = None) -> Array:
        own_P = pairs.there if of is None else of.tokens > 0
        return jnp.sum(jnp.where(own_P, values_P, 0.0)) / jnp.sum(own_P)

    def rewards(answers: Answers) -> Array:
        return loss.beta * (answers.ratios if loss.has_reference else answers.means().logprobs)

    margins_P = rewards(chosen) - rewards(rejected)
    tokens = jnp.maximum(jnp.sum(chosen.tokens), 1.0)
    metrics = {
        "loss": preference_loss(loss, pairs, PairCounts(count, tokens)),
        "chosen_reward": mean(rewards(chosen), chosen),
        "rejected_reward": mean(rewards(rejected), rejected),
        "chosen_logprob": mean(chosen.logprobs, chosen),
        "rejected_logprob": mean(rejected.logprobs, rejected),
        "chosen_nll": -jnp.sum(chosen.logprobs) / tokens,
    }
    if loss.type == "kto":  # no two answers belong together
        margin = metrics["chosen_reward"] - metrics["rejected_reward"]
        return metrics | {"margin": margin, "kl": mean(pairs.kl(loss))}
    accuracy = mean((margins_P > 0).astype(jnp.float32))
    return metrics | {"accuracy": accuracy, "margin": mean(margins_P)}


def _log_odds(logprobs_P: Array) -> Array:
    logprobs_P = jnp.minimum(logprobs_P, CERTAIN)
    return logprobs_P - jnp.log(-jnp.expm1(logprobs_P))

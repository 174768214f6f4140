"""The loss of a step and its gradient against a second implementation: float64, loops, NumPy.

`loss_of` is written from the papers' formulas, sequence by sequence, and shares nothing with the
library. What an objective takes no gradient through (a capped ratio, the weight of a correction)
it computes from `held`, so that central differences in the other argument are the gradient.
"""

import itertools
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.config import ObjectiveConfig
from marin_rl.training.logprobs import TokenScores
from marin_rl.training.step_loss import correction_weights, step_loss
from marin_rl.training.step_types import ForwardOutputs, StepArrays, StepSettings

LENGTH_NORM = 7
SURROGATES = [
    ("reinforce", "token"),
    ("gspo", "sequence_mean"),
    ("gmpo", "sequence_mean"),
    ("dppo", "token"),
    ("dppo_kl", "token"),
    *itertools.product(["dro"], ["token", "sequence", "sequence_mean"]),
    *itertools.product(["ppo_clip", "cispo", "sapo"], ["token", "sequence", "sequence_mean"]),
]
AGGREGATIONS = [
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "token_sum",
]
ESTIMATORS = ["k1", "k2", "k3", "k3_k2_gradient"]
CORRECTIONS = [
    {"importance_correction": kind, "correction_level": level, "correction_low": 0.8}
    for kind, level in itertools.product(["truncated", "masked"], ["token", "sequence"])
]
REJECTIONS = [
    {
        "importance_correction": kind,
        "rejection": estimator,
        "rejection_level": level,
        "rejection_high": 0.1 if level == "sequence_max" else 0.06,
    }
    for kind, estimator, level in [
        ("rejected", "k1", "token"),
        ("rejected", "k2", "token"),
        ("truncated", "k3", "token"),
        ("rejected", "k3", "sequence_mean"),
        ("truncated", "k2", "sequence_max"),
        ("masked", "k3", "sequence_sum"),
        ("rejected", "k1", "sequence_mean"),
    ]
]


@dataclass(frozen=True)
class Rows:
    """Two rows of three sequences, of unequal lengths, the second row packed; all [B, T]."""

    mask: np.ndarray
    segments: np.ndarray
    advantages: np.ndarray
    sampler: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray

    @property
    def sequences(self):
        """Index pairs of the trained tokens of each sequence."""
        pairs = [(row, number) for row, ids in enumerate(self.segments) for number in {*ids} - {0}]
        chosen = [
            np.nonzero((self.segments[row] == number) & (self.mask[row] > 0))[0]
            for row, number in pairs
        ]
        return [
            (np.full(len(at), row), at)
            for (row, _), at in zip(pairs, chosen, strict=True)
            if len(at)
        ]


def rows_of(seed):
    rng = np.random.default_rng(seed)
    mask = np.array([[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 1, 1, 0]], float)
    segments = np.array([[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 2, 2, 2, 0]])
    sampler = rng.normal(-1.5, 0.5, mask.shape)
    return Rows(
        mask=mask,
        segments=segments,
        advantages=np.array([[0.8] * 8, [-1.1] * 4 + [0.6] * 4]),
        sampler=sampler,
        old=sampler + rng.normal(0, 0.25, mask.shape),
        reference=sampler + rng.normal(0, 0.5, mask.shape),
        logprobs=sampler + rng.normal(0, 0.25, mask.shape),
        entropies=rng.uniform(0.5, 2.0, mask.shape),
    )


# ---------------------------------------------------------------- the reference


def loss_of(choice, rows, logprobs, entropies, held):
    """The loss in float64; `held` are the log-probabilities wherever no gradient is taken."""
    corrected = choice.importance_correction != "none"
    old = rows.old if corrected else rows.sampler
    sequences = rows.sequences
    tokens = sum(len(at) for _, at in sequences)
    total = 0.0
    for at in sequences:
        weight = {
            "token_mean": 1 / tokens,
            "sequence_mean_token_mean": 1 / (len(sequences) * len(at[0])),
            "sequence_mean_token_sum": 1 / len(sequences),
            "sequence_mean_token_sum_norm": 1 / (len(sequences) * LENGTH_NORM),
            "token_sum": 1.0,
        }[choice.aggregation]
        now, then, frozen = logprobs[at], old[at], held[at]
        losses = surrogate(choice, now, then, frozen, rows.advantages[at])
        if corrected:
            losses = losses * correction(choice, old[at] - rows.sampler[at])
        kl = divergence(choice.kl_estimator, now, frozen, rows.reference[at])
        losses = losses + choice.kl_coefficient * kl - choice.entropy_coefficient * entropies[at]
        total += weight * losses.sum()
    return total


def dppo_kl(choice, ratio, new, old, advantage):
    losses = []
    for r, p, q, a in zip(ratio, new, old, advantage, strict=True):
        kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
        bound = choice.clip_high if a > 0 else choice.clip_low
        driven = p > q if a > 0 else p < q
        losses.append(0.0 if driven and kl > bound else -r * a)
    return np.array(losses)


def gmpo(choice, differences, advantage):
    low, high = -choice.clip_low, choice.clip_high
    held = [
        min(log, high) if a > 0 else max(log, low)
        for log, a in zip(differences, advantage, strict=True)
    ]
    return -np.exp(sum(held) / len(held)) * advantage


def surrogate(choice, now, old, frozen, advantage):  # noqa: C901, one formula a case
    ratio, capped = leveled(choice, now - old), leveled(choice, frozen - old)
    low, high = 1 - choice.clip_low, 1 + choice.clip_high
    match choice.surrogate:
        case "reinforce":
            return -advantage * now
        case "cispo":
            lowest = 0.0 if choice.cispo_clip_low is None else 1 - choice.cispo_clip_low
            return -np.clip(capped, lowest, high) * advantage * now
        case "dppo":
            moved = np.exp(frozen) - np.exp(old)
            far = np.where(advantage > 0, moved > choice.clip_high, moved < -choice.clip_low)
            return np.where(far, 0.0, -ratio * advantage)
        case "dppo_kl":
            return dppo_kl(choice, ratio, np.exp(frozen), np.exp(old), advantage)
        case "gmpo":
            return gmpo(choice, now - old, advantage)
        case "dro":
            far = choice.dro_beta / 2 * np.log(ratio) ** 2
            spread = len(now) if choice.ratio_level == "sequence" else 1
            return -advantage * now + far / spread
        case "sapo":
            up, down = choice.sapo_temperature_positive, choice.sapo_temperature_negative
            tau = np.where(advantage > 0, up, down)
            losses = -advantage * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
        case _:
            gain = np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
            if choice.clip_dual is not None:
                floor = choice.clip_dual * advantage
                gain = np.where(advantage < 0, np.maximum(gain, floor), gain)
            losses = -gain
    # one ratio for the whole completion: the tokens share its loss
    return losses / len(now) if choice.ratio_level == "sequence" else losses


def leveled(choice, differences):
    match choice.ratio_level:
        case "token":
            return np.exp(differences)
        case "sequence":
            return np.full(len(differences), np.exp(differences.sum()))
        case _:
            return np.full(len(differences), np.exp(differences.mean()))


def divergence(estimator, now, frozen, reference):
    apart, held = now - reference, frozen - reference
    k2, k3 = apart**2 / 2, np.exp(-apart) - 1 + apart
    match estimator:
        case "k1":
            return apart
        case "k2":
            return k2
        case "k3":
            return k3
        case _:
            return k2 + (np.exp(-held) - 1 + held - held**2 / 2)


def correction(choice, differences):
    weight = np.exp(differences)
    if choice.correction_level == "sequence":
        weight = np.full(len(differences), np.exp(differences.sum()))
    match choice.importance_correction:
        case "truncated":
            weight = np.clip(weight, choice.correction_low, choice.correction_high)
        case "masked":
            outside = (weight < choice.correction_low) | (weight > choice.correction_high)
            weight = np.where(outside, 0.0, weight)
        case "rejected":
            weight = np.ones(len(differences))
    return np.where(rejected(choice, differences), 0.0, weight)


def rejected(choice, differences):
    """Tokens of one completion that are too far from the sampler; trainer less sampler, in nats."""
    if choice.rejection is None:
        return np.zeros(len(differences), bool)
    values = [
        {"k1": -log, "k2": log * log / 2, "k3": np.exp(log) - log - 1}[choice.rejection]
        for log in differences
    ]
    match choice.rejection_level:
        case "token":
            return np.array([abs(value) > choice.rejection_high for value in values])
        case "sequence_sum":
            value = abs(sum(values))
        case "sequence_mean":
            value = abs(sum(values) / len(values))
        case _:
            value = max(abs(value) for value in values)
    return np.full(len(values), value > choice.rejection_high)


def central_differences(function, at, step=1e-6):
    found = np.zeros(at.shape)
    for index in np.ndindex(at.shape):
        moved = [at.copy(), at.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        found[index] = (function(moved[0]) - function(moved[1])) / (2 * step)
    return found


# ---------------------------------------------------------------- the library


@partial(jax.jit, static_argnums=0)  # all choices are one program: it compiles much sooner
def _found(choices, logprobs, entropies, reference, arrays):
    def loss(logprobs, entropies, settings):
        outputs = ForwardOutputs(TokenScores(logprobs, entropies), reference)
        coefficient = jnp.float32(settings.objective.kl_coefficient)
        return step_loss(settings, outputs, coefficient, arrays)[0]

    of = jax.value_and_grad(loss, argnums=(0, 1))
    return [of(logprobs, entropies, settings) for settings in choices]


def found_by_us(choices, rows):
    """Loss and gradients as the step computes them, in float32, one microbatch; by choice."""

    def microbatch(array, dtype=np.float32):
        return jnp.asarray(array[None], dtype)

    arrays = StepArrays(
        token_ids=microbatch(rows.mask, np.int32),
        mask=microbatch(rows.mask, np.bool_),
        segment_ids=microbatch(rows.segments, np.int32),
        positions=microbatch(np.broadcast_to(np.arange(8), (2, 8)), np.int32),
        policy_logprobs=microbatch(rows.sampler),
        advantages=microbatch(rows.advantages * rows.mask),
        old_logprobs=microbatch(rows.old),
    )
    settings = tuple(StepSettings(objective=one, length_norm=LENGTH_NORM) for one in choices)
    on_mask = [microbatch(a * rows.mask) for a in (rows.logprobs, rows.entropies, rows.reference)]
    found = _found(settings, *on_mask, arrays)
    return [
        (value, by_logprobs[0], by_entropies[0]) for value, (by_logprobs, by_entropies) in found
    ]


def less_likely(rows, nats=0.7):
    """The same rows with probabilities well below 1, which a binary KL needs."""
    names = ("sampler", "old", "reference", "logprobs")
    return replace(rows, **{name: getattr(rows, name) - nats for name in names})


def check(choices, rows):
    """Choices of one surrogate."""
    if choices[0].surrogate == "dppo_kl":
        rows = less_likely(rows)
    for choice, found in zip(choices, found_by_us(choices, rows), strict=True):
        check_found(choice, rows, *found)


def check_found(choice, rows, value, by_logprobs, by_entropies):
    held, entropies = rows.logprobs, rows.entropies
    expected = loss_of(choice, rows, held, entropies, held)
    np.testing.assert_allclose(value, expected, rtol=2e-6, atol=2e-7)
    gradient = central_differences(
        lambda logprobs: loss_of(choice, rows, logprobs, entropies, held), held
    )
    np.testing.assert_allclose(by_logprobs, gradient, rtol=2e-5, atol=2e-7)
    gradient = central_differences(lambda e: loss_of(choice, rows, held, e, held), entropies)
    np.testing.assert_allclose(by_entropies, gradient, rtol=2e-5, atol=2e-7)


def choice_of(surrogate, level, **others):
    bounds = {"clip_low": 0.15, "clip_high": 0.25, "sapo_temperature_negative": 2.0}
    if surrogate == "dppo_kl":
        bounds = {"clip_low": 0.004, "clip_high": 0.006}
    if surrogate == "dro":
        bounds = {"dro_beta": 0.4}
    kl = {"kl_coefficient": 0.3, "entropy_coefficient": 0.05}
    return ObjectiveConfig(surrogate=surrogate, ratio_level=level, **(bounds | kl | others))


@pytest.mark.parametrize(
    ("number", "surrogate", "level"),
    [
        (0, "reinforce", "token"),
        (1, "gspo", "sequence_mean"),
        (2, "dppo", "token"),
        (3, "ppo_clip", "sequence"),
        (4, "cispo", "sequence_mean"),
        (5, "sapo", "token"),
        (6, "gmpo", "sequence_mean"),
        (7, "dppo_kl", "token"),
        (8, "dro", "token"),
        (9, "dro", "sequence"),
    ],
)
def test_gradients_are_those_of_float64(number, surrogate, level):
    """Each surrogate once; between them every level, aggregation, estimator and correction."""
    aggregation, estimator = AGGREGATIONS[number % 5], ESTIMATORS[(number + 1) % 4]
    extra = [{}, *CORRECTIONS, *REJECTIONS][number % 12]
    if surrogate in ("ppo_clip", "gspo"):
        extra = extra | {"clip_dual": 1.05}
    if surrogate == "cispo":
        extra = extra | {"cispo_clip_low": 0.05}
    choice = choice_of(surrogate, level, aggregation=aggregation, kl_estimator=estimator, **extra)
    check([choice], rows_of(number % 4))


@pytest.mark.slow
@pytest.mark.parametrize(("surrogate", "level"), SURROGATES)
def test_gradients_of_every_combination_are_those_of_float64(surrogate, level):
    choices = []
    for number, (aggregation, estimator) in enumerate(itertools.product(AGGREGATIONS, ESTIMATORS)):
        extra = [{}, *CORRECTIONS, *REJECTIONS][number % 12]
        together = {"aggregation": aggregation, "kl_estimator": estimator, **extra}
        choices.append(choice_of(surrogate, level, **together))
    check(choices, rows_of(99))


def test_the_rows_reach_every_branch():
    """Otherwise a wrong bound would pass: ratios beyond both bounds, weights beyond theirs."""
    differences = np.concatenate(
        [(rows.logprobs - rows.sampler)[rows.mask > 0] for rows in map(rows_of, (0, 1, 2, 3, 99))]
    )
    assert (np.exp(differences) > 1.25).any()
    assert (np.exp(differences) < 0.85).any()
    weights = np.concatenate(
        [(rows.old - rows.sampler)[rows.mask > 0] for rows in map(rows_of, (1, 3, 99))]
    )
    assert (np.exp(weights) < 0.8).any()
    # dppo_kl: tokens that it stops and tokens that it does not, of those that move as asked
    rows = less_likely(rows_of(3))
    then, new = np.exp(rows.sampler), np.exp(rows.logprobs)
    kl = then * np.log(then / new) + (1 - then) * np.log((1 - then) / (1 - new))
    driven = (rows.mask > 0) & ((new > then) == (rows.advantages > 0))
    assert (kl[driven] > 0.006).any()
    assert (kl[driven] < 0.004).any()


@pytest.mark.parametrize("number", range(len(REJECTIONS)))
def test_every_rejection_has_the_weights_of_float64(number):
    choice = ObjectiveConfig(**REJECTIONS[number])
    reached = set()
    for seed in range(6):
        rows = rows_of(seed)
        arrays = (rows.old, rows.sampler, rows.mask, rows.segments)
        found = correction_weights(choice, *map(jnp.asarray, arrays))
        for at in rows.sequences:
            expected = correction(choice, rows.old[at] - rows.sampler[at])
            np.testing.assert_allclose(np.asarray(found)[at], expected, rtol=1e-5)
            reached |= {bool(weight) for weight in expected}
    assert reached == {True, False}  # what is accepted, and what is not

"""Optional parameters of a request, against the full forward and NumPy."""

import random
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from inference.engines import (
    bits,
    engine_of,
    random_requests,
    request_of,
    result_of,
    results_under_load,
)
from support.cases import others_slow, printed_seed
from support.models import FAMILIES, VOCABULARY, full_logits, tiny_model

from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.generation import GenerationRequest, Sample
from marin_rl.inference.logprobs import tile_length

pytestmark = pytest.mark.usefixtures("compiled_quickly")

WORDS = -(-VOCABULARY // 32)


def logits_before(model, request: GenerationRequest, sample: Sample) -> np.ndarray:
    """The model's own logits for each sampled token, float64 [T, V]."""
    whole = np.concatenate([request.prompt_ids, sample.token_ids])
    return full_logits(model, whole)[len(request.prompt_ids) - 1 : -1].astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def wished(request: GenerationRequest, sample: Sample, logits: np.ndarray) -> np.ndarray:
    """The plain reading of a request's bias, penalties, temperature and min_p, row by row."""
    rows = []
    for index, row in enumerate(logits.copy()):
        for token, bias in request.logit_bias:
            row[token] += bias
        output = sample.token_ids[:index].tolist()
        for token in {*request.prompt_ids.tolist(), *output}:
            penalty = request.sampling.repetition_penalty or 1
            row[token] *= penalty ** (-1 if row[token] > 0 else 1)
        for token in set(output):
            row[token] -= request.frequency_penalty * output.count(token)
            row[token] -= request.presence_penalty
        row /= request.sampling.temperature or 1
        if request.sampling.min_p and request.sampling.temperature:
            row[row < row.max() + np.log(request.sampling.min_p)] = -np.inf
        rows.append(row)
    return np.array(rows)


WISHES: list[dict[str, Any]] = [
    {"logit_bias": ((5, 4.0), (9, -100.0), (102, 2.5))},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.5, "temperature": 1.3},
    {"min_p": 0.2},
    {"min_p": 0.05, "temperature": 2.0},
    {
        "logit_bias": ((7, 3.0),),
        "repetition_penalty": 1.3,
        "presence_penalty": -0.7,
        "frequency_penalty": 0.4,
        "min_p": 0.1,
        "temperature": 0.9,
    },
]


@pytest.mark.parametrize("wishes", WISHES)
@pytest.mark.parametrize("greedy", [False, True])
def test_logprobs_are_those_of_the_changed_distribution(engine, model, wishes, greedy):
    # few prompt tokens and many of the output's own, over several chunks
    options = {**wishes, "temperature": 0.0} if greedy else wishes
    request = request_of(12, n=2, max_tokens=40, **options)
    for sample in result_of(engine, request).samples:
        scores = wished(request, sample, logits_before(model, request, sample))
        every = log_softmax(scores)
        truth = every[np.arange(40), sample.token_ids]
        assert np.abs(sample.logprobs - truth).max() < 1e-4
        if greedy:
            np.testing.assert_array_equal(sample.token_ids, scores.argmax(-1))


def test_a_strong_bias_decides_and_a_ban_holds(engine):
    (forced,) = result_of(engine, request_of(logit_bias=((42, 1000.0),))).samples
    assert set(forced.token_ids.tolist()) == {42}
    np.testing.assert_array_equal(forced.logprobs, np.zeros(12, np.float32))
    everything_but_two = tuple(
        (token, -1000.0) for token in range(VOCABULARY) if token not in (3, 4)
    )
    (left,) = result_of(engine, request_of(logit_bias=everything_but_two, max_tokens=40)).samples
    assert set(left.token_ids.tolist()) == {3, 4}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_top_logprobs_are_sorted_and_those_of_the_full_forward(engine, model, raw, count):
    request = request_of(n=2, max_tokens=21, temperature=0.7, top_logprobs=count, raw_logprobs=raw)
    for sample in result_of(engine, request).samples:
        logits = logits_before(model, request, sample)
        every = log_softmax(logits if raw else logits / 0.7)
        assert sample.top_ids is not None
        assert sample.top_logprobs is not None
        assert sample.top_ids.shape == sample.top_logprobs.shape == (21, count)
        assert (np.diff(sample.top_logprobs, axis=1) <= 0).all()
        expected = -np.sort(-every, axis=-1)[:, :count]
        assert np.abs(sample.top_logprobs - expected).max() < 1e-4
        told = np.take_along_axis(every, sample.top_ids.astype(np.int64), axis=1)
        assert np.abs(sample.top_logprobs - told).max() < 1e-4
        assert (sample.raw_logprobs is not None) == raw


def test_the_sampled_token_has_the_same_logprob_among_the_top_ones(engine):
    (sample,) = result_of(engine, request_of(top_logprobs=20, top_k=20, max_tokens=40)).samples
    assert sample.top_ids is not None
    assert sample.top_logprobs is not None
    at = sample.top_ids == sample.token_ids[:, None]
    assert (at.sum(axis=1) == 1).all()
    np.testing.assert_array_equal(sample.top_logprobs[at], sample.logprobs)


def test_top_logprobs_of_a_filtered_distribution_end_with_what_it_left_out(engine):
    (sample,) = result_of(engine, request_of(top_logprobs=5, top_k=3)).samples
    assert sample.top_logprobs is not None
    assert np.isfinite(sample.top_logprobs[:, :3]).all()
    assert (sample.top_logprobs[:, 3:] == -np.inf).all()
    np.testing.assert_allclose(np.exp(sample.top_logprobs[:, :3]).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 4, "min_p": 0.1},
        {"repetition_penalty": 2.0, "logit_bias": ((3, 5.0),)},
    ],
)
def test_raw_logprobs_are_the_models_own_under_any_sampling(engine, model, wishes):
    request = request_of(raw_logprobs=True, max_tokens=30, **wishes)
    (sample,) = result_of(engine, request).samples
    truth = log_softmax(logits_before(model, request, sample))[np.arange(30), sample.token_ids]
    assert sample.raw_logprobs is not None
    assert np.abs(sample.raw_logprobs - truth).max() < 1e-4
    if wishes in ({}, {"temperature": 0.0}):
        assert np.abs(sample.raw_logprobs - sample.logprobs).max() < 1e-6
    else:
        assert np.abs(sample.raw_logprobs - sample.logprobs).max() > 0.1


class Residues:
    """Allows tokens that leave `seen` modulo `divisor`, and an end token after `length` tokens."""

    def __init__(self, divisor: int, length: int, end: int = 1) -> None:
        self.divisor, self.length, self.end = divisor, length, end
        self.seen: list[int] = []
        self.threads: set[str] = set()

    def allowed(self, seen: int) -> list[int]:
        if seen == self.length:
            return [self.end]
        return [t for t in range(VOCABULARY) if t % self.divisor == seen % self.divisor and t > 1]

    def mask(self) -> np.ndarray:
        self.threads.add(threading.current_thread().name)
        words = np.zeros(WORDS, np.uint32)
        for token in self.allowed(len(self.seen)):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def accept(self, token: int) -> None:
        assert token in self.allowed(len(self.seen))
        self.seen.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.4])
def test_a_constraint_is_never_violated_and_logprobs_are_under_it(engine, model, temperature):
    made: list[Residues] = []

    def constraint() -> Residues:
        made.append(Residues(divisor=7, length=15))
        return made[-1]

    request = request_of(
        n=3,
        max_tokens=30,
        temperature=temperature,
        constraint=constraint,
        stop_token_ids=(1,),
        top_logprobs=3,
    )
    others = [engine.submit(request_of(n=2, prompt_seed=i, max_tokens=30)) for i in range(4)]
    result = result_of(engine, request)
    assert len(made) == 3
    for sample in result.samples:
        assert sample.finish_reason == "stop"
        assert sample.token_ids[-1] == 1
        logits = logits_before(model, request, sample) / (temperature or 1)
        for index, row in enumerate(logits):
            allowed = made[0].allowed(index)
            assert sample.token_ids[index] in allowed
            forbidden = np.setdiff1d(np.arange(VOCABULARY), allowed)
            row[forbidden] = -np.inf
        every = log_softmax(logits)
        truth = every[np.arange(16), sample.token_ids]
        assert np.abs(sample.logprobs - truth).max() < 1e-4
        if temperature == 0:
            np.testing.assert_array_equal(sample.token_ids, logits.argmax(-1))
    assert {name for each in made for name in each.threads} == {"engine"}
    for other in others:
        assert len(other.result(timeout=120).samples) == 2


class Failing:
    """Goes wrong in one way or another."""

    def __init__(self, words: np.ndarray | None, after: int) -> None:
        self.words, self.after = words, after

    def mask(self) -> np.ndarray:
        self.after -= 1
        if self.after < 0 and self.words is not None:
            return self.words
        return np.full(WORDS, 2**32 - 1, np.uint32)

    def accept(self, token: int) -> None:
        if self.words is None and self.after <= 0:
            raise RuntimeError("lost the thread")


@pytest.mark.bits
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (np.zeros(WORDS, np.uint32), "allows no token"),
        (np.ones(WORDS + 1, np.uint32), "at most 4 words"),
        (np.ones(WORDS, np.int64), "of uint32"),
        # bits beyond the vocabulary stand for nothing
        (np.array([0, 0, 0, 1 << 31], np.uint32), "allows no token"),
        (None, "lost the thread"),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_constraint_that_fails_takes_its_own_request_down_and_no_other(
    engine, words, message, after
):
    alone = bits(result_of(engine, request_of(n=3, max_tokens=20)))
    broken = engine.submit(request_of(constraint=lambda: Failing(words, after)))
    healthy = engine.submit(request_of(n=3, max_tokens=20))
    with pytest.raises(InferenceError, match=r"^its constraint failed$") as caught:
        broken.result(timeout=120)
    assert message in str(caught.value.__cause__)
    assert bits(healthy.result(timeout=120)) == alone


def test_a_constraint_that_cannot_be_made_fails_its_request(engine):
    def constraint() -> Residues:
        raise ValueError("no such grammar")

    with pytest.raises(InferenceError, match=r"^its constraint failed$") as caught:
        result_of(engine, request_of(constraint=constraint))
    assert str(caught.value.__cause__) == "no such grammar"
    assert engine.active == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", others_slow(FAMILIES, "llama3-rope"))
def test_a_prompt_is_scored_as_by_the_full_forward(family):
    model = tiny_model(family)
    with closing(engine_of(model)) as engine:
        for length in (1, 2, 16, 17, 95):
            request = request_of(length, score_prompt=True, max_tokens=1, top_logprobs=4)
            scores = result_of(engine, request).prompt_scores
            assert scores is not None
            assert scores.top_ids is not None
            assert scores.top_logprobs is not None
            assert np.isnan(scores.logprobs[0])
            assert np.isnan(scores.top_logprobs[0]).all()
            every = log_softmax(full_logits(model, request.prompt_ids).astype(np.float64))[:-1]
            truth = every[np.arange(length - 1), request.prompt_ids[1:]]
            np.testing.assert_allclose(scores.logprobs[1:], truth, atol=1e-4)
            expected = -np.sort(-every, axis=-1)[:, :4]
            np.testing.assert_allclose(scores.top_logprobs[1:], expected, atol=1e-4)
            told = np.take_along_axis(every, scores.top_ids[1:].astype(np.int64), axis=1)
            np.testing.assert_allclose(told, expected, atol=1e-4)


def test_a_prompt_can_be_scored_without_a_completion(engine):
    blockers = [engine.submit(request_of(n=8, max_tokens=60)) for _ in range(2)]
    scored = result_of(engine, request_of(30, n=2, score_prompt=True, max_tokens=0))
    assert [len(sample.token_ids) for sample in scored.samples] == [0, 0]
    assert [sample.finish_reason for sample in scored.samples] == ["length", "length"]
    assert scored.prompt_scores is not None
    assert scored.prompt_scores.top_ids is None
    assert len(scored.prompt_scores.logprobs) == 30
    # the same numbers under any load, and next to a completion
    beside = result_of(engine, request_of(30, score_prompt=True)).prompt_scores
    assert beside is not None
    assert beside.logprobs.tobytes() == scored.prompt_scores.logprobs.tobytes()
    for blocker in blockers:
        blocker.result(timeout=120)
    assert (engine.queued, engine.active) == (0, 0)


def test_logits_of_a_prompt_come_in_tiles_of_a_bounded_size():
    assert [tile_length(vocabulary) for vocabulary in (512, 2**15, 150_000, 2**23)] == [
        8192, 128, 16, 1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"min_p": 1.5}, "min_p from 0 to 1"),
        ({"min_p": float("nan")}, "min_p from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty above 0"),
        ({"presence_penalty": float("inf")}, "finite presence"),
        ({"top_logprobs": 21}, "top_logprobs from 0 to 20"),
        ({"logit_bias": ((103, 1.0),)}, "tokens from 0 to 102"),
        ({"logit_bias": ((1, float("nan")),)}, "finite values"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "distinct"),
        ({"logit_bias": tuple((i, 0.0) for i in range(301))}, "at most 300"),
        ({"stop": ("",)}, "at least one character"),
        ({"max_tokens": 0}, "only to score a prompt"),
        ({"adapter": 1}, "the number of an adapter that is loaded"),
    ],
)
def test_wishes_that_can_never_be_served_are_refused_at_once(engine, wishes, message):
    with pytest.raises(InputError, match=message):
        engine.submit(request_of(**wishes))


def random_wishes(rng: random.Random) -> dict[str, Any]:
    """Any mix of everything; mostly not much of it."""
    choices: dict[str, list[Callable[[], Any]]] = {
        "temperature": [lambda: 0.0, lambda: 0.7],
        "top_p": [lambda: 0.8],
        "top_k": [lambda: 5],
        "min_p": [lambda: 0.1],
        "logit_bias": [lambda: ((rng.randrange(VOCABULARY), rng.uniform(-5, 5)),)],
        "repetition_penalty": [lambda: rng.uniform(0.7, 2)],
        "presence_penalty": [lambda: rng.uniform(-1, 1)],
        "frequency_penalty": [lambda: rng.uniform(-1, 1)],
        "top_logprobs": [lambda: rng.randint(1, 20)],
        "raw_logprobs": [lambda: True],
        "score_prompt": [lambda: True],
        "constraint": [lambda: lambda: Residues(5, 60)],
    }
    share = rng.choice((0, 0.1, 0.4))
    chosen = {name: rng.choice(some)() for name, some in choices.items() if rng.random() < share}
    return {"stop_token_ids": (1,), **chosen}


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_bitwise_the_same_alone_and_next_to_any_sampling_options(engine):
    rng = random.Random(printed_seed())
    requests = random_requests(rng, 24, random_wishes)
    alone = [bits(result_of(engine, request)) for request in requests]
    for _ in range(3):
        for index, result in results_under_load(engine, requests, rng):
            assert bits(result) == alone[index], index

"""Effect of a swap on running requests, token by token, against a NumPy forward.

The truth is a transformer of the test's own, in float64, whose weights change at a position: below
it keys and values are the old model's, from it on the new one's. Where they never change it is the
full forward of one model, which is compared with Levanter's own first.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from support.cases import printed_seed
from support.models import VOCABULARY, full_logprobs, tiny_model

from marin_rl.config import EngineConfig, InferenceConfig
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import Delta, GenerationRequest, GenerationResult
from marin_rl.models.module import LanguageModel
from marin_rl.serving.api.completions import Completions
from marin_rl.serving.server import PolicyServer
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.model import named_parameters
from marin_rl.types import Sampling

CONTEXT = 96
REQUESTS = 64
ENGINE = EngineConfig(slots=48, chunk_steps=2, prefill_rows=8)
OLD, NEW = (1, "1" * 64), (2, "2" * 64)
THETA, EPSILON = 10_000.0, 1e-5


@dataclass(frozen=True)
class Plain:
    """A model's weights in float64, by layer: what its names say, outputs before inputs."""

    layers: list[dict[str, np.ndarray]]
    embedding: np.ndarray
    norm: np.ndarray
    head: np.ndarray

    @classmethod
    def of(cls, model: LanguageModel) -> "Plain":
        arrays = {k: np.asarray(v, np.float64) for k, v in named_parameters(model).items()}
        stacked = "transformer/layers/stacked/"
        names = {k.removeprefix(stacked): v for k, v in arrays.items() if k.startswith(stacked)}
        return cls(
            layers=[{k: v[i] for k, v in names.items()} for i in range(2)],
            embedding=arrays["embeddings/token_embeddings/weight"],
            norm=arrays["transformer/norm/weight"],
            head=arrays["lm_head/weight"],
        )


Pair = tuple[Plain, Plain]


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2) + EPSILON) * weight


def rotated(x: np.ndarray, position: int) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = position / THETA ** (np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attended(layer: dict, x: np.ndarray, cache: list, position: int) -> np.ndarray:
    """Attention of one position over the cache, which it joins."""
    query = rotated(np.einsum("kghd,d->kgh", layer["self_attn/q_proj/weight"], x), position)
    key = rotated(np.einsum("khd,d->kh", layer["self_attn/k_proj/weight"], x), position)
    cache.append((key, np.einsum("khd,d->kh", layer["self_attn/v_proj/weight"], x)))
    keys, values = (np.stack(part) for part in zip(*cache, strict=True))
    scores = np.einsum("kgh,tkh->kgt", query, keys) / np.sqrt(query.shape[-1])
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    seen = np.einsum("kgt,tkh->kgh", shares, values)
    return np.einsum("dnh,nh->d", layer["self_attn/o_proj/weight"], seen.reshape(4, -1))


def logits(old: Plain, new: Plain, token_ids: np.ndarray, change: int) -> np.ndarray:
    """Logits [T, V]: `old` computes the positions below `change`, `new` those from it on."""
    caches: list[list] = [[], []]
    rows = []
    for position, token in enumerate(token_ids):
        model = old if position < change else new
        x = model.embedding[token]
        for layer, cache in zip(model.layers, caches, strict=True):
            x = x + attended(layer, normed(x, layer["input_layernorm/weight"]), cache, position)
            h = normed(x, layer["post_attention_layernorm/weight"])
            gate = layer["mlp/gate_proj/weight"] @ h
            up = layer["mlp/up_proj/weight"] @ h
            x = x + layer["mlp/down_proj/weight"] @ (gate / (1 + np.exp(-gate)) * up)
        rows.append(model.head @ normed(x, model.norm))
    return np.stack(rows)


def truth(
    old: Plain, new: Plain, prompt: np.ndarray, completion: np.ndarray, by_old: int
) -> np.ndarray:
    """Logprob of each token of a completion whose first `by_old` tokens the old weights drew."""
    change = len(prompt) + by_old - 1 if by_old else 0
    rows = logits(old, new, np.concatenate([prompt, completion])[:-1], change)[len(prompt) - 1 :]
    rows = rows - rows.max(axis=-1, keepdims=True)
    every = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return every[np.arange(len(completion)), completion]


@pytest.fixture(scope="module")
def models() -> tuple[LanguageModel, LanguageModel]:
    return tiny_model(seed=0), tiny_model(seed=4)


@pytest.fixture(scope="module")
def plain(models: tuple[LanguageModel, LanguageModel]) -> tuple[Plain, Plain]:
    return Plain.of(models[0]), Plain.of(models[1])


def test_the_truth_is_levanters_forward_where_nothing_changes(models: Any, plain: Pair) -> None:
    rng = np.random.default_rng(0)
    prompt, completion = rng.integers(0, VOCABULARY, (2, 30)).astype(np.int32)
    old, new = (full_logprobs(model, prompt, completion) for model in models)
    assert np.abs(truth(*plain, prompt, completion, 30) - old).max() < 1e-4
    assert np.abs(truth(*plain, prompt, completion, 0) - new).max() < 1e-4
    mixed = truth(*plain, prompt, completion, 10)
    assert np.abs(mixed[:10] - old[:10]).max() < 1e-4
    # from there on it is neither model's: that is what the exact statement is about
    assert np.abs(mixed[10:] - new[10:]).max() > 0.01
    assert np.abs(mixed[10:] - old[10:]).max() > 0.01


def drawn_by_old(versions: np.ndarray | None, length: int, final: int) -> int:
    """Number of tokens that the old weights drew; checks that they were the first ones."""
    if versions is None:
        return length if final == OLD[0] else 0
    assert len(versions) == length
    assert set(versions.tolist()) <= {OLD[0], NEW[0]}
    assert (np.diff(versions) >= 0).all()
    return int((versions == OLD[0]).sum())


def check(
    plain: Pair, prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, m: int
) -> None:
    assert np.abs(logprobs - truth(*plain, prompt, tokens, m)).max() < 1e-4


def requests_of(rng: random.Random) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_ids=np.array(
                [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))], np.int32
            ),
            n=rng.choice((1, 1, 3)),
            sampling=Sampling(max_tokens=rng.randint(20, 50), seed=rng.getrandbits(40)),
        )
        for _ in range(REQUESTS)
    ]


@pytest.fixture
def engine(models: Any) -> Iterator[Engine]:
    engine = Engine(
        models[0], ENGINE, context_length=CONTEXT, weight_version=OLD[0], parameters_digest=OLD[1]
    )
    yield engine
    engine.close()


def once_after_chunks(
    engine: Engine, count: int, swap: Callable[[], object]
) -> Callable[[Delta], None]:
    """Listener that swaps in the first delta after `count` chunks."""
    swapped: list[object] = []

    def listen(_: Delta) -> None:
        if engine.stats.chunks >= count and not swapped:
            swapped.append(swap())

    return listen


@pytest.mark.slow
def test_every_token_of_64_running_requests_tells_who_drew_it(engine, models, plain):
    requests = requests_of(random.Random(printed_seed()))
    deltas: list[list[Delta]] = [[] for _ in requests]
    swap_once = once_after_chunks(engine, 6, lambda: engine.swap(models[1], *NEW))

    def first(delta: Delta) -> None:
        deltas[0].append(delta)
        swap_once(delta)

    listeners = [first, *(heard.append for heard in deltas[1:])]
    engine.pause()  # they start in one chunk, however slowly they come
    futures = [
        engine.submit(request, listener)
        for request, listener in zip(requests, listeners, strict=True)
    ]
    engine.resume()
    results = [future.result(timeout=120) for future in futures]
    kinds = {"old": 0, "both": 0, "new": 0}
    for request, result, heard in zip(requests, results, deltas, strict=True):
        for index, sample in enumerate(result.samples):
            length = len(sample.token_ids)
            m = drawn_by_old(sample.policy_versions, length, result.weight_version)
            check(plain, request.prompt_ids, sample.token_ids, sample.logprobs, m)
            kinds["old" if m == length else "new" if m == 0 else "both"] += 1
            check_deltas([delta for delta in heard if delta.index == index], m, length)
    assert kinds["both"] > 10, kinds
    assert kinds["new"] > 10, kinds


def check_deltas(deltas: list[Delta], by_old: int, length: int) -> None:
    """No chunk sees both weights, and each delta names whose it is, by version and digest."""
    told = [(d.weight_version, d.parameters_digest) for d in deltas for _ in d.token_ids]
    assert told == [OLD] * by_old + [NEW] * (length - by_old)


def pointers(arrays: object) -> set[int]:
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arrays)}


def test_a_swap_takes_no_copy(models: Any) -> None:
    config = InferenceConfig(engine=ENGINE)
    server = PolicyServer(models[0], character_tokenizer(), config, context_length=CONTEXT)
    try:
        for index in range(4):
            model = models[index % 2]
            server.updater.swap(model, index, f"{index:064d}")
            assert pointers(server.engine.policy.weights) <= pointers(
                eqx.filter(model, eqx.is_array)
            )
        assert server.updater.transfers == 4
    finally:
        server.stop()


@pytest.mark.parametrize("swaps_after", [0, 1, 2])
def test_each_prompt_of_a_list_tells_who_drew_its_tokens(models, plain, swaps_after):
    config = InferenceConfig(engine=ENGINE)
    server = PolicyServer(models[0], character_tokenizer(), config, context_length=CONTEXT)
    body = {"model": "policy", "prompt": [[40, 41, 42], [50, 51]], "n": 2, "max_tokens": 6}
    asked = body | {"seed": 1, "logprobs": 0, "return_token_ids": True}
    try:
        server.updater.swap(models[0], *OLD)
        order = Completions(server._service, json.dumps(asked).encode())
        results = []
        for number, request in enumerate(order.requests):
            if number == swaps_after:
                server.updater.swap(models[1], *NEW)
            results.append(result_of(server.engine, request))
        answer = json.loads(order.end(results))
    finally:
        server.stop()
    final = answer["weight_version"]
    assert final == (OLD if swaps_after == 2 else NEW)[0]
    for index, choice in enumerate(answer["choices"]):
        tokens = np.array(choice["token_ids"], np.int32)
        by_old = drawn_by_old(as_array(choice["policy_versions"]), len(tokens), final)
        assert by_old == (len(tokens) if index // 2 < swaps_after else 0)
        prompt = np.array(choice["prompt_token_ids"], np.int32)
        check(plain, prompt, tokens, np.array(choice["logprobs"]["token_logprobs"]), by_old)


def as_array(versions: list[int] | None) -> np.ndarray | None:
    return None if versions is None else np.array(versions)


def result_of(engine: Engine, request: GenerationRequest) -> GenerationResult:
    return engine.submit(request).result(timeout=120)


def test_requests_after_a_swap_use_the_new_weights_alone(engine, models, plain):
    request = requests_of(random.Random(3))[0]
    result_of(engine, request)  # whatever of the prompt could be kept, is
    engine.swap(models[1], *NEW)
    found = result_of(engine, request)
    for sample in found.samples:
        check(plain, request.prompt_ids, sample.token_ids, sample.logprobs, 0)
    engine.swap(models[0], *OLD)
    engine.swap(models[1], *NEW)
    again = result_of(engine, request)
    assert [s.logprobs.tobytes() for s in again.samples] == [
        s.logprobs.tobytes() for s in found.samples
    ]

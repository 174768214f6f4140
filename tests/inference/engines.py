"""Engines over tiny models, and requests to them, as several test modules need them."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from support.models import VOCABULARY

from marin_rl.config import EngineConfig
from marin_rl.cpu_streams import Lanes
from marin_rl.inference.engine import Engine
from marin_rl.inference.execution_plan import ExecutionPlan
from marin_rl.inference.generation import Delta, GenerationRequest, GenerationResult
from marin_rl.inference.programs import copy_slots, decode_chunk, prefill_slots
from marin_rl.inference.runner import Runner
from marin_rl.models.module import LanguageModel
from marin_rl.types import Sampling

PROGRAMS = (decode_chunk, prefill_slots, copy_slots)

CONTEXT = 96


def text_of(ids: Sequence[int]) -> str:
    """One character per token."""
    return "".join(chr(32 + i) for i in ids)


class AheadRunner(Runner):
    """Programs of one lane, whose chunks are dispatched before the last is read."""

    def _shaped(self, plan: ExecutionPlan) -> ExecutionPlan:
        lanes = Lanes(1, plan.lanes.slots)
        return replace(plan, lanes=lanes, ahead=True)


class AcceleratorRunner(AheadRunner):
    """Programs as an accelerator has them: whole blocks, and no conditional."""

    def _shaped(self, plan: ExecutionPlan) -> ExecutionPlan:
        return replace(super()._shaped(plan), whole=True, can_share=False)


def engine_of(
    model: LanguageModel,
    stop_token_ids: Sequence[int] = (),
    programs: type[Runner] = Runner,
    **config: Any,
) -> Engine:
    """Engine with eight slots and chunks of four steps, by default."""
    return Engine(
        model,
        EngineConfig(**{"slots": 8, "chunk_steps": 4, "prefill_rows": 4, **config}),
        context_length=CONTEXT,
        weight_version=1,
        parameters_digest="one",
        stop_token_ids=stop_token_ids,
        decode=text_of,
        programs=programs,
    )


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    """Random tokens, none of them an end token."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.int32)


SAMPLING_FIELDS = frozenset(Sampling.__dataclass_fields__)


def request_of(length: int = 10, *, prompt_seed: int = 0, **options: Any) -> GenerationRequest:
    """A request of 12 tokens; options are fields of Sampling or of GenerationRequest."""
    sampling = {name: value for name, value in options.items() if name in SAMPLING_FIELDS}
    others = {name: value for name, value in options.items() if name not in SAMPLING_FIELDS}
    return GenerationRequest(
        prompt_ids=prompt_of(length, prompt_seed),
        sampling=Sampling(**{"max_tokens": 12, "seed": 7, **sampling}),
        **others,
    )


def random_sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_p": rng.choice((1.0, 1.0, 0.8)),
        "top_k": rng.choice((0, 0, 5)),
    }


def random_requests(
    rng: random.Random,
    count: int,
    options_of: Callable[[random.Random], dict[str, Any]] = random_sampling,
) -> list[GenerationRequest]:
    """Prompts and completions of many lengths, up to 11 samples each; by default all samplings."""
    return [
        request_of(
            rng.randint(1, 60),
            prompt_seed=index,
            n=rng.choice((1, 1, 3, 11)),
            max_tokens=rng.randint(1, 30),
            seed=rng.getrandbits(48),
            **options_of(rng),
        )
        for index in range(count)
    ]


def result_of(engine: Engine, request: GenerationRequest) -> GenerationResult:
    """The result, within two minutes."""
    return engine.submit(request).result(timeout=120)


def results_under_load(
    engine: Engine, requests: Sequence[GenerationRequest], rng: random.Random
) -> Iterator[tuple[int, GenerationResult]]:
    """Every request's number and result, all submitted in a random order, some a little later."""
    order = rng.sample(range(len(requests)), len(requests))
    futures = {}
    for index in order:
        futures[index] = engine.submit(requests[index])
        time.sleep(rng.choice((0, 0, 0.02)))
    for index in order:
        yield index, futures[index].result(timeout=120)


@contextmanager
def together(engine: Engine) -> Iterator[None]:
    """Requests that are submitted inside start in one chunk, however slowly they come."""
    engine.pause()
    try:
        yield
    finally:
        engine.resume()


@contextmanager
def amid(
    engine: Engine, request: GenerationRequest, delta: int = 2
) -> Iterator[tuple["Future[GenerationResult]", list[Delta]]]:
    """A request and what came of it, while the engine waits inside its `delta`-th delta."""
    deltas: list[Delta] = []
    reached, let_go = threading.Event(), threading.Event()

    def hold(one: Delta) -> None:
        deltas.append(one)
        if len(deltas) == delta:
            reached.set()
            assert let_go.wait(120)

    future = engine.submit(request, hold)
    try:
        assert reached.wait(120)
        yield future, deltas
    finally:
        let_go.set()


def bits(result: GenerationResult) -> list[tuple[bytes, ...]]:
    """Every array of every sample, byte for byte."""
    return [
        tuple(
            b"" if array is None else array.tobytes()
            for array in (s.token_ids, s.logprobs, s.raw_logprobs, s.top_ids, s.top_logprobs)
        )
        for s in result.samples
    ]

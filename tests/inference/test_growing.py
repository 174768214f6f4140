"""A cache that follows use: what is compiled for whom, and sequences that move as it grows."""

from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from inference.engines import CONTEXT, amid, prompt_of, request_of, together
from support.cases import others_slow
from support.family_folders import golden, write_folder
from support.models import tiny_model
from support.run_factories import character_tokenizer
from support.servers import wait_until

from marin_rl.config import EngineConfig
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import GenerationRequest, GenerationResult
from marin_rl.inference.growing_runner import CHUNKS_BEFORE_SHRINKING, POSITIONS_MIN, GrowingRunner
from marin_rl.inference.programs import runs_of
from marin_rl.models.module import LanguageModel
from marin_rl.models.spec import LayerKind, Rope
from marin_rl.training.hf_folders import load_hf

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SLOW = pytest.mark.slow
SLOTS = 6
LONG, LONGER = 600, 1500


def growing_engine(
    context: int = CONTEXT, model: LanguageModel | None = None
) -> tuple[Engine, GrowingRunner]:
    """An engine that grows to six slots, with chunks of four steps, and its runner."""
    config = EngineConfig(slots=SLOTS, chunk_steps=4, prefill_rows=4)
    model = model or tiny_model(layers=1)
    engine = Engine(model, config, context_length=context, programs=GrowingRunner)
    assert engine.growing is not None
    return engine, engine.growing


def of_fixed(
    requests: list[GenerationRequest], context: int = CONTEXT, model: LanguageModel | None = None
) -> list[GenerationResult]:
    """Results of an engine of six slots whose cache is fixed."""
    config = EngineConfig(slots=SLOTS, chunk_steps=4, prefill_rows=4, lanes=1)
    with closing(Engine(model or tiny_model(layers=1), config, context_length=context)) as engine:
        return [engine.submit(request).result(timeout=120) for request in requests]


def assert_alike(ours: GenerationResult, theirs: GenerationResult) -> None:
    """The same tokens, with log-probabilities that differ by rounding at most."""
    for mine, other in zip(ours.samples, theirs.samples, strict=True):
        np.testing.assert_array_equal(mine.token_ids, other.token_ids)
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)


def test_requests_compile_what_they_need_and_the_cache_grows_with_them() -> None:
    engine, runner = growing_engine()
    lines: list[str] = []
    runner.announce = lines.append
    alone = request_of(10)
    with closing(engine):
        assert runner.cache_bytes_max == SLOTS * runner.cache_bytes
        assert not runner.programs
        first = engine.submit(alone).result(timeout=120)
        assert [line.split(" in a cache")[0] for line in lines if "compiling" in line] == [
            "compiling program 1: prefill of 64 tokens",
            "compiling program 2: decoding of 1 at a time",
        ]
        assert (runner.rows, runner.positions) == (1, 128)
        again = engine.submit(alone).result(timeout=120)
        assert len(runner.programs) == 2
        np.testing.assert_array_equal(first.samples[0].logprobs, again.samples[0].logprobs)
        with together(engine):
            futures = [engine.submit(request_of(9 + i, prompt_seed=i)) for i in range(5)]
        assert all(future.result(timeout=120).samples for future in futures)
        # of four times as many rows each: 1, 4, and all six
        assert runner.rows == SLOTS
        assert [name for name in runner.programs if f"of {SLOTS} at" in name]


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "positions"), [(230, 512), (100, POSITIONS_MIN)])
def test_a_running_sequence_moves_to_a_larger_cache_and_back(prompt: int, positions: int) -> None:
    engine, runner = growing_engine(LONG)
    steps = 4 * (CHUNKS_BEFORE_SHRINKING + 5)
    long = request_of(prompt, max_tokens=steps, raw_logprobs=True)
    short = [request_of(5, prompt_seed=i, seed=i, n=2, max_tokens=6) for i in range(2)]
    sizes: set[tuple[int, int]] = set()
    with closing(engine):
        with amid(engine, long) as (running, deltas):
            assert (runner.rows, runner.positions) == (1, POSITIONS_MIN)
            futures: list[Future[GenerationResult]] = [engine.submit(each) for each in short]
        results = [future.result(timeout=120) for future in futures]
        sizes.add((runner.rows, runner.positions))
        moved = running.result(timeout=120)
        wait_until(lambda: engine.active == 0)
        sizes.add((runner.rows, runner.positions))
    assert len(deltas) > CHUNKS_BEFORE_SHRINKING
    # five sequences at once, then the long one alone
    assert sizes == {(SLOTS, POSITIONS_MIN), (1, positions)}
    for ours, theirs in zip([moved, *results], of_fixed([long, *short], LONG), strict=True):
        assert_alike(ours, theirs)


@SLOW
def test_a_running_sequence_moves_to_a_cache_of_larger_blocks() -> None:
    engine, runner = growing_engine(LONGER)
    short, long = request_of(10, max_tokens=60), request_of(1100, prompt_seed=1)
    with closing(engine):
        with amid(engine, short) as (running, _):
            small = runner.plan
            joining = engine.submit(long)
        results = [running.result(timeout=120), joining.result(timeout=120)]
        assert (small.block, small.length) == (64, POSITIONS_MIN)
        assert (runner.plan.block, runner.plan.length) == (128, 1536)
    for ours, theirs in zip(results, of_fixed([short, long], LONGER), strict=True):
        assert_alike(ours, theirs)


@pytest.mark.parametrize(
    ("streams", "count", "expected"),
    others_slow(
        [(True, 4, {1}), (True, 5, {4}), (True, 1, {1}), (False, 1, {4})], first=1, several=True
    ),
)
def test_few_streams_are_decoded_token_by_token(*, streams, count, expected):
    engine, _ = growing_engine()
    sizes: list[int] = []
    with closing(engine):
        with together(engine):
            futures = [
                engine.submit(
                    GenerationRequest(
                        prompt_ids=prompt_of(8, index), sampling=request_of(max_tokens=8).sampling
                    ),
                    lambda delta: sizes.append(len(delta.token_ids)),
                    streams=streams,
                )
                for index in range(count)
            ]
        for future in futures:
            future.result(timeout=120)
    assert set(sizes) == expected
    assert sum(sizes) == 8 * count


def test_caches_that_were_given_back_come_again() -> None:
    engine, runner = growing_engine()
    with closing(engine):
        first = engine.submit(request_of(10)).result(timeout=120)
        engine.sleep()
        wait_until(lambda: not runner.memory.caches)
        again = engine.submit(request_of(10)).result(timeout=120)
    assert_alike(first, again)


def two_kinds(folder: Path) -> LanguageModel:
    """A layer with a window before one that sees everything."""
    rope = Rope(theta=10_000.0, size=8)
    return tiny_model(kinds=(LayerKind(rope=rope, window=8), LayerKind(rope=rope)))


def gpt_oss(folder: Path) -> LanguageModel:
    case = golden()["gpt-oss-20b"]
    write_folder(folder, case["config"], case["shapes"])
    character_tokenizer().save_pretrained(str(folder))
    return load_hf(folder)


@pytest.mark.parametrize("made", others_slow([two_kinds, gpt_oss], first=1))
def test_layers_of_several_kinds_and_stop_tokens_decode_alike(made, tmp_path):
    model = made(tmp_path)
    request = request_of(10, max_tokens=20, seed=3)
    first = of_fixed([request], model=model)[0].samples[0].token_ids
    # One that ends in the middle of a chunk, of which the host hears a step late.
    ending = replace(request, stop_token_ids=(int(first[5]),))
    engine, _ = growing_engine(model=model)
    with closing(engine):
        results = [engine.submit(each).result(timeout=120) for each in (ending, request)]
    for ours, theirs in zip(results, of_fixed([ending, request], model=model), strict=True):
        assert_alike(ours, theirs)
    assert results[0].samples[0].finish_reason == "stop"


def test_runs_of_layers_leave_few_to_compile() -> None:
    alike, window = LayerKind(rope=None), LayerKind(rope=None, window=8)
    assert [len(range(30)[run]) for run in runs_of((alike,) * 30)] == [5] * 6
    assert [len(range(32)[run]) for run in runs_of((alike,) * 32)] == [4] * 8
    by_period = runs_of((*[window] * 5, alike) * 4 + (window,) * 2)
    assert [len(range(26)[run]) for run in by_period] == [6, 6, 6, 6, 2]
    assert [len(range(2)[run]) for run in runs_of((alike, window))] == [2]

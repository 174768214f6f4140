"""A prompt's cache that slots side by side read together: the same bits as each on its own.

Where this machine's library adds up the two in different orders, nothing is shared: the promise is
kept either way.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from inference.engines import bits, engine_of, request_of, result_of, together
from support.cases import printed_seed
from support.models import tiny_model

from marin_rl.cpu_streams import LANE_WEIGHTS_BYTES_MAX, Lanes, shares_prompts
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import Delta, GenerationRequest
from marin_rl.inference.kv_cache import BLOCK_MIN, SHARE

pytestmark = pytest.mark.bits


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """One that shares where that is proven; one of the same programs that never does."""
    model = tiny_model("llama-gqa")
    sharing, apart = engine_of(model, lanes=1), engine_of(model, lanes=1)
    assert sharing.plan.sharing == sharing.plan.invariance.shared
    unproven = replace(apart.plan.invariance, shared=False)
    apart._runner.plan = replace(apart._runner.plan, invariance=unproven)
    assert not apart.plan.sharing
    yield sharing, apart
    sharing.close()
    apart.close()


def shared_while(engine: Engine, *requests: GenerationRequest) -> set[int]:
    """Positions shared after each chunk of the requests, all of them seated at once."""
    found: set[int] = set()

    def look(_: Delta) -> None:
        found.add(engine._batch.shared_positions(SHARE))

    with together(engine):
        futures = [engine.submit(request, look) for request in requests]
    for future in futures:
        future.result(timeout=120)
    return found


def test_whole_lanes_of_small_models_share_on_a_cpu():
    shares = lambda lanes, weights_bytes=1, queries_per_kv=2, on_mesh=False: shares_prompts(
        lanes,
        weights_bytes=weights_bytes,
        queries_per_kv=queries_per_kv,
        on_mesh=on_mesh,
        together=SHARE,
    )
    assert shares(Lanes(2, 2 * SHARE))
    assert not shares(Lanes(2, SHARE))
    assert not shares(Lanes(1, SHARE), weights_bytes=LANE_WEIGHTS_BYTES_MAX + 1)
    assert not shares(Lanes(1, SHARE), on_mesh=True)
    assert not shares(Lanes(1, SHARE), queries_per_kv=1)


@pytest.mark.parametrize("length", [BLOCK_MIN - 1, BLOCK_MIN, BLOCK_MIN + 6])
def test_a_group_reads_its_prompt_once_and_gets_the_same_bits(engines, length):
    sharing, apart = engines
    request = request_of(length, n=SHARE, raw_logprobs=True)
    expected = bits(result_of(apart, request))
    assert bits(result_of(sharing, request)) == expected
    assert length in shared_while(sharing, request)
    # alone in a slot, too
    for index in (0, SHARE - 1):
        one = request_of(length, seed=7 + index, raw_logprobs=True)
        assert bits(result_of(sharing, one)) == expected[index : index + 1]


def test_different_prompts_side_by_side_are_not_shared(engines):
    requests = [request_of(70, prompt_seed=seed, n=SHARE // 2) for seed in (0, 1)]
    assert shared_while(engines[0], *requests) <= {0}


def test_the_same_bits_under_any_load(engines):
    sharing, apart = engines
    rng = random.Random(printed_seed())
    requests = [
        request_of(
            rng.randint(BLOCK_MIN - 2, 75),
            prompt_seed=index,
            n=rng.choice((1, 3, 8, 8, 11)),
            max_tokens=rng.randint(1, 20),
            seed=index,
        )
        for index in range(10)
    ]
    expected = [bits(result_of(apart, request)) for request in requests]
    futures = [sharing.submit(request) for request in requests]
    assert [bits(future.result(timeout=120)) for future in futures] == expected

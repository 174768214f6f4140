"""Proofs of engines: outcome, record, and the fallbacks without them."""

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.engines import (
    AcceleratorRunner,
    bits,
    engine_of,
    random_requests,
    request_of,
    result_of,
    results_under_load,
)
from support.cases import others_slow, printed_seed
from support.models import tiny_model, tiny_spec

from marin_rl.compilation import CACHE_VARIABLE
from marin_rl.config import EngineConfig
from marin_rl.inference import batch_invariance
from marin_rl.inference.batch_invariance import (
    Invariance,
    Prover,
    Shapes,
    invariance_of,
    random_weights,
    recorded_proofs,
)
from marin_rl.inference.execution_plan import ExecutionPlan, fall_back, first_plan
from marin_rl.inference.kv_cache import BLOCK_MIN, SHARE, times_cached
from marin_rl.inference.programs import decode_chunk
from marin_rl.inference.runner import Runner
from marin_rl.inference.weights import read_model
from marin_rl.models.spec import Spec

pytestmark = pytest.mark.bits

ALL = Invariance(slots=True, prompts=True, shared=True)
SHAPES = Shapes(
    spec=tiny_spec(layers=1, heads=2, kv_heads=1, width=16, vocabulary=7),
    slots=8,
    context_length=64,
    chunk_steps=4,
    prefill_rows=4,
    sharing=True,
    dtype="float32",
)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for records, and a process that knows none."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(batch_invariance, "_known", {})
    return tmp_path


def forget() -> None:
    """As in the next process."""
    batch_invariance._known.clear()


def record_in(folder: Path) -> Path:
    (file,) = folder.glob("*/batch-invariance/*.json")
    return file


def products_alike(spec: Spec, slots: int) -> bool:
    """The two products of attention, with a common cache read once and for each slot."""
    rng = np.random.default_rng(0)
    K, G, H = spec.kv_heads, spec.queries_per_kv, spec.head_size
    times = jax.jit(times_cached, static_argnums=2)
    for inner, outer in ((H, BLOCK_MIN), (BLOCK_MIN, H)):
        rows = rng.standard_normal((slots, K, G, inner), np.float32)
        cached = rng.standard_normal((1, K, inner, outer), np.float32).repeat(slots, 0)
        together, apart = (np.asarray(times(rows, cached, share)) for share in (SHARE, 1))
        if together.tobytes() != apart.tobytes():
            return False
    return True


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(["llama", "llama-gqa"], "llama-gqa"))
def test_sharing_is_proven_exactly_where_the_products_have_the_same_bits(name):
    """With a single query per key a library has a kernel of its own: most machines refuse it."""
    with closing(engine_of(tiny_model(name), lanes=1)) as engine:
        runner: Runner = engine._runner
        shapes = replace(runner.plan, can_share=True).shapes
        fused = random_weights(runner._decoder(engine.policy), runner.put)
        prover = Prover(shapes, fused, runner.buckets, runner.put)
        assert prover.prove().shared is products_alike(engine.spec, shapes.slots)


def test_a_proof_is_made_once_and_read_by_the_next_process(records):
    proofs: list[int] = []

    def prove() -> Invariance:
        proofs.append(1)
        return ALL

    for _ in range(2):
        assert invariance_of(SHAPES, prove) == ALL
        forget()
    assert len(proofs) == 1
    ((facts, outcome),) = recorded_proofs()
    assert outcome == ALL
    assert facts["shapes"]["slots"] == 8
    assert set(facts["machine"]) >= {"processor", "instruction_set", "threads"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"[" * 100_000,
        lambda data: data.replace(b"true", b"1"),
        lambda data: data.replace(b'"slots": true', b'"other": true'),
        lambda data: data.replace(b'"slots": 8', b'"slots": 9'),
    ],
)
def test_a_record_that_is_broken_or_of_other_programs_is_proven_again(records, damage):
    invariance_of(SHAPES, lambda: ALL)
    file = record_in(records)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    forget()
    apart = Invariance(slots=True, prompts=True, shared=False)
    assert invariance_of(SHAPES, lambda: apart) == apart
    assert json.loads(file.read_bytes())["equal"]["shared"] is False
    assert [path for path in file.parent.iterdir() if path != file] == []


@pytest.mark.parametrize("where", ["", "file"])
def test_without_a_folder_the_process_remembers(records, monkeypatch, where):
    if where:
        (records / "file").write_text("no folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(records / "file") if where else "")
    proofs: list[int] = []

    def prove() -> Invariance:
        proofs.append(1)
        return ALL

    assert [invariance_of(SHAPES, prove) for _ in range(2)] == [ALL, ALL]
    assert len(proofs) == 1
    assert recorded_proofs() == []


@pytest.fixture(scope="module")
def unproven() -> ExecutionPlan:
    """A plan that would keep the caches of dialogues, and of which nothing is proven."""
    config, dtype = EngineConfig(prefix_cache=True), jnp.dtype(jnp.float32)
    spec, weights = read_model(tiny_model())
    return first_plan(spec, weights, config, context_length=64, dtype=dtype, on_mesh=False)


def test_without_the_proof_turns_are_prefilled_from_their_start(unproven, caplog):
    assert not fall_back(replace(unproven, invariance=ALL)).keeps_prefixes
    assert "every turn of a dialogue is prefilled from its start" in caplog.text


def test_an_accelerator_names_what_it_does_not_prove_and_promises_no_more(unproven, caplog):
    plan = replace(unproven, whole=True)
    assert fall_back(plan) == plan  # as fast as where it is proven
    assert (plan.keeps_prefixes, plan.whole_pieces) == (True, True)
    (said,) = [record.getMessage() for record in caplog.records]
    for name in ("a sequence alone", "a prompt alone", "a dialogue continued"):
        assert name in said
    caplog.clear()
    whole = replace(plan, invariance=replace(ALL, continued=True))
    assert fall_back(whole).not_promised == []
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.usefixtures("records")
def test_an_accelerators_program_is_compiled_once_for_its_proof_and_its_use(model):
    """One that draws, one that filters, one for all else; a second engine compiles nothing."""
    wishes = (
        {},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"raw_logprobs": True},
        {"logit_bias": ((5, 1.0),)},
    )
    known, counts = decode_chunk._cache_size(), []
    for _ in range(2):
        with closing(engine_of(model, programs=AcceleratorRunner, slots=4)) as engine:
            for wish in wishes:
                result_of(engine, request_of(**wish))
                counts.append(decode_chunk._cache_size() - known)
    assert counts == [1, 2, 2, *[3] * 7]


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.parametrize(
    "lacking", others_slow(["shared", "slots", "prompts"], "shared", "prompts")
)
def test_without_a_proof_an_engine_keeps_the_promise_in_another_way(records, lacking):
    model = tiny_model("llama-gqa")
    first = engine_of(model, lanes=1)
    first.close()
    file = record_in(records)
    record = json.loads(file.read_bytes())
    record["equal"][lacking] = False
    file.write_text(json.dumps(record))
    forget()
    with closing(engine_of(model, lanes=1)) as engine:
        runner = engine._runner
        assert getattr(engine.plan.invariance, lacking) is False
        assert not (engine.plan.sharing and lacking in ("shared", "slots"))
        assert runner.lanes.count == (8 if lacking == "slots" else 1)
        assert runner.plan.prefill_rows == (1 if lacking == "prompts" else 4)
        rng = random.Random(printed_seed())
        requests = [request_of(70, n=SHARE), *random_requests(rng, 4)]
        expected = [bits(result_of(engine, request)) for request in requests]
        for index, result in results_under_load(engine, requests, rng):
            assert bits(result) == expected[index], index

"""Runs whose base lies quantised: identity, bits, what is served and exported, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training.batches import VOCAB, random_batch, tiny_policy
from training.trained_runs import play

from marin_rl.analysis.lineage import Lineage, add_policy
from marin_rl.analysis.status import run_status
from marin_rl.config import LoraConfig, load_config
from marin_rl.errors import ConfigError
from marin_rl.inference.decoder import decode_step, hidden_states
from marin_rl.inference.kv_cache import empty_cache
from marin_rl.inference.weights import fused_weights, read_model, rotary_table
from marin_rl.lora.adapter import policy_digest
from marin_rl.lora.peft import configured_modules
from marin_rl.lora.quantization import is_quantized, quantize_base, quantized_digest
from marin_rl.planning import plan
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint, read_folder
from marin_rl.serving.weights.export import export_hf
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, base_slot, committed
from marin_rl.training.adapters import with_adapter, with_quantized
from marin_rl.training.loop import Trainer
from marin_rl.training.model import (
    model_template,
    named_parameters,
    parameter_shapes,
    parameter_structs,
    with_parameters,
)
from marin_rl.training.policy_source import read_base, read_policy
from marin_rl.training.replay import replay_round
from marin_rl.training.state import identity_of
from marin_rl.training.step import MicrobatchRange, Scorer, accumulate
from marin_rl.training.step_types import StepSettings, TrainableParams, step_arrays

SETTINGS = (
    "policy.model.layers=1",
    "training.microbatch_sequences=4",
    "policy.lora.rank=4",
    "policy.quantize_base=nf4",
)


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_a_run_on_a_quantised_base(debug, tokenizer, tmp_path):
    """One run of two rounds: identity, replay and resumption to the bit, service, export."""
    run = Run.create_or_open(debug(*SETTINGS))
    trainer = Trainer(run, tokenizer)
    last = play(run, trainer, trainer.init_policy(), range(2))
    # The base is written once, as it was before: its digest and the scheme are its identity.
    base = manifest_of(run.store, committed(run, base_slot()))
    digest, identity = base.extra["parameters_digest"], identity_of(run, last)
    assert identity.base_digest == digest
    assert identity.quantize_base == "nf4"
    assert identity.adapter is not None
    assert identity.adapter_digest is not None
    assert identity.parameters_digest == policy_digest(
        quantized_digest(digest, "nf4"), identity.adapter.modules, identity.adapter_digest
    )
    status = run_status(run.config.root, run.run_id)
    assert status.policy.endswith("adapter of rank 4, base quantised to nf4")
    graph = Lineage()
    add_policy(graph, run, last.slot)
    assert graph.nodes[last.slot].facts["quantize_base"] == "nf4"
    assert not any("codes" in str(part) for part in manifest_of(run.store, last).parts)
    # Trainer, engine and a reader of files have one quantised base.
    template = trainer._program.base_template
    original = read_base(run, digest, template)
    frozen = quantize_base(original, "nf4")
    loaded = read_checkpoint(run, 2)
    for model in (trainer.models()[0], trainer.models()[1], loaded.model):
        arrays = named_parameters(model)
        for name in filter(is_quantized, frozen):
            np.testing.assert_array_equal(arrays[name], frozen[name])
    assert loaded.parameters_digest == identity.parameters_digest
    # What is exported is merged into the base as it was trained with.
    export_hf(run, None, tmp_path / "hf")
    whole = named_parameters(read_folder(str(tmp_path / "hf")).model)
    expected = read_policy(run, last, template).parameters()
    for name, array in expected.items():
        np.testing.assert_allclose(whole[name], array, atol=1e-6)
    # The same bits when every round is another trainer's, and when one is done again.
    other = Run.create_or_open(debug(*SETTINGS, f"root={tmp_path / 'other'}"))
    checkpoint = Trainer(other, tokenizer).init_policy()
    for round in range(2):
        checkpoint = play(other, Trainer(other, tokenizer), checkpoint, [round])
    assert identity_of(other, checkpoint).parameters_digest == identity.parameters_digest
    assert replay_round(run, 1).equal
    # Another scheme is another run.
    for scheme in ("int8", "null"):
        with pytest.raises(ConfigError, match="quantize_base"):
            Run.create_or_open(debug(*SETTINGS, f"policy.quantize_base={scheme}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.lora=null"], "without policy.lora"),
        (["policy.quantize_base=int4"], "int8"),
        (["objective.advantage=gae", "objective.ratio_level=token",
          "training.critic.trunk=own"], "critic.trunk own"),
        (["inference.endpoints=[http://h/v1]", "inference.publish=lora_adapter",
          "inference.publish_root=/x"], "base as it was"),
        (["mesh.fsdp=2"], "mesh.fsdp 1"),
        (["inference.engine.adapters_max=2"], "no adapters are loaded next to a quantised base"),
        (["inference.serve_merged=false"], "serve_merged with policy.quantize_base nf4"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_quantised_are_refused_before_work(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/debug.yaml", [*SETTINGS, *overrides])


# ---------------------------------------------------------------- memory


def deep(layers, scheme):
    """A template of this depth with an adapter on one projection, and without; shapes alone.

    Wide, so that what a few tokens need is small next to the weights.
    """
    sizes = {"hidden_size": 4096, "intermediate_size": 8192, "heads": 32, "kv_heads": 1}
    base = model_template(tiny_policy(layers=layers, **sizes), VOCAB)
    modules = configured_modules(LoraConfig(rank=1, modules=("q_proj",)), parameter_shapes(base))
    return with_quantized(with_adapter(base, modules), scheme), base


def peak(compiled):
    """Bytes of a program's arguments, results and temporary arrays."""
    analysis = compiled.memory_analysis()
    alias = analysis.alias_size_in_bytes
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - alias
    )


def step_peak(layers, scheme):
    """Peak of the gradients of one short row, and the weights in the linear layers."""
    template, base = deep(layers, scheme)
    structs = parameter_structs(template)
    trained = {name: leaf for name, leaf in structs.items() if name.endswith((":A", ":B"))}
    frozen = {name: leaf for name, leaf in structs.items() if name not in trained}
    settings = StepSettings(objective=None)
    score, (arrays, used) = Scorer(template, settings), step_arrays(random_batch(2, 8), 1, 2)

    def gradients(trained, frozen, arrays, lane):
        params = TrainableParams(trained)
        return accumulate(score, settings, params, frozen, None, arrays, lane)

    lane = MicrobatchRange.of(0, 1, used)
    compiled = jax.jit(gradients).lower(trained, frozen, arrays, lane).compile()
    return peak(compiled), linear_size(base)


def linear_size(base):
    """Number of weights in linear layers."""
    shapes = parameter_shapes(base)
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if "_proj/" in name)


def engine_peak(layers, scheme):
    """Peak of decode steps of two slots and of scoring a prompt, and the linear layers' weights."""
    template, base = deep(layers, scheme)
    structs = parameter_structs(template)

    def step(parameters, tokens, positions):
        model = with_parameters(template, parameters)
        spec, weights = read_model(model)
        cache = empty_cache(spec, 2, 16, jnp.dtype("float32"))
        fused = fused_weights(spec, weights, jnp.dtype("float32"), rotary_table(spec, 64))

        def body(_, carry):
            logits, cache = decode_step(spec, fused, carry[1], carry[0], positions)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

        last = jax.lax.fori_loop(0, tokens[0], body, (tokens, cache))[0]
        return last, hidden_states(spec, fused, jnp.tile(last, 8)[None])

    ints = jax.ShapeDtypeStruct((2,), jnp.int32)
    return peak(jax.jit(step).lower(structs, ints, ints).compile()), linear_size(base)


@pytest.mark.slow
@pytest.mark.parametrize("of", [step_peak, engine_peak])
@pytest.mark.parametrize(("scheme", "limit"), [("int8", 1.05), ("nf4", 0.56)])
def test_bytes_of_a_weight_at_the_peak_of_a_whole_program(of, scheme, limit):
    """By programs of two depths, so that what one layer needs for a moment counts for none."""
    few, many = of(3, scheme), of(7, scheme)
    slope = (many[0] - few[0]) / (many[1] - few[1])
    assert slope <= limit


def test_a_plan_of_14b_fits_into_24_gb(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # attention without a table, values in bfloat16
    architecture = (
        "family=qwen3", "hidden_size=5120", "layers=40", "heads=40", "kv_heads=8",
        "head_size=128", "intermediate_size=17408", "vocab_size=151936", "tie_embeddings=false",
    )  # fmt: skip
    config = load_config(
        "configs/debug.yaml",
        [
            *(f"policy.model.{each}" for each in architecture),
            "recipe=qlora", "policy.compute_dtype=bfloat16", "policy.context_length=2048",
            "batching.length_buckets=[2048]", "training.microbatch_sequences=2",
            "inference.engine.slots=16", "inference.engine.prefill_rows=4",
        ],
    )  # fmt: skip
    planned = plan(config)
    assert planned.parameters == 14_768_296_960
    assert planned.peak_bytes is not None
    assert 15e9 < planned.peak_bytes < 24e9
    whole = config.policy.model_copy(update={"quantize_base": None})
    unquantised = plan(config.model_copy(update={"policy": whole})).peak_bytes
    assert unquantised is not None
    assert unquantised > 60e9

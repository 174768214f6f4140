"""Settings, first values, digests and merging of adapters."""

import math

import numpy as np
import pytest
from support.adapters import DOWN, OUTPUT, QUERY, SHAPES

from marin_rl.config import LoraConfig
from marin_rl.errors import InputError
from marin_rl.lora.adapter import (
    LoraModule,
    adapter_of,
    check_adapter_name,
    check_rank,
    initial_arrays,
    linear_shapes,
    merged,
    module_name,
    policy_digest,
)
from marin_rl.lora.peft import configured_modules


def test_every_linear_layer_is_adapted_by_default_and_nothing_else() -> None:
    modules = configured_modules(LoraConfig(rank=4), SHAPES)
    assert [module_name(path) for path in modules] == [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ]  # fmt: skip
    assert set(modules.values()) == {LoraModule(rank=4, alpha=32.0)}


def test_shapes_are_those_of_the_base_with_the_rank_in_place_of_the_other_side() -> None:
    arrays = initial_arrays(configured_modules(LoraConfig(rank=4), SHAPES), SHAPES, seed=3)
    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes[f"{QUERY}:A"] == (2, 4, 24)
    assert shapes[f"{QUERY}:B"] == (2, 2, 3, 4, 4)
    assert shapes[f"{OUTPUT}:A"] == (2, 4, 6, 4)
    assert shapes[f"{OUTPUT}:B"] == (2, 24, 4)
    assert shapes[f"{DOWN}:A"] == (2, 4, 10)
    assert shapes[f"{DOWN}:B"] == (2, 24, 4)


def test_first_values_depend_on_seed_and_name_alone() -> None:
    few = initial_arrays(
        configured_modules(LoraConfig(rank=4, modules=("q_proj",)), SHAPES), SHAPES, seed=3
    )
    many = initial_arrays(configured_modules(LoraConfig(rank=4), SHAPES), SHAPES, seed=3)
    other = initial_arrays(configured_modules(LoraConfig(rank=4), SHAPES), SHAPES, seed=4)
    name = f"{QUERY}:A"
    assert np.array_equal(few[name], many[name])
    assert not np.array_equal(many[name], other[name])
    # Uniform within 1 / sqrt(in): its standard deviation is bound / sqrt(3).
    bound = 1 / math.sqrt(24)
    assert np.abs(many[name]).max() <= bound
    assert many[name].std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert all(not array.any() for name, array in many.items() if name.endswith(":B"))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("q_proj", "v_proj"), ["self_attn.q_proj", "self_attn.v_proj"]),
        (("mlp.*",), ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        (("self_attn.?_proj",), [f"self_attn.{c}_proj" for c in "qkvo"]),
        (("mlp.down_proj",), ["mlp.down_proj"]),
    ],
)
def test_modules_by_name_and_by_pattern(patterns: tuple[str, ...], names: list[str]) -> None:
    assert (
        list(map(module_name, configured_modules(LoraConfig(rank=2, modules=patterns), SHAPES)))
        == names
    )


def test_single_modules_may_have_a_rank_and_an_alpha_of_their_own() -> None:
    spec = LoraConfig(rank=4, alpha=8.0, ranks={"mlp.*": 2}, alphas={"down_proj": 1.0})
    modules = configured_modules(spec, SHAPES)
    assert modules[QUERY] == LoraModule(rank=4, alpha=8.0)
    assert modules[DOWN] == LoraModule(rank=2, alpha=1.0)
    assert modules[DOWN].scale == 0.5
    assert LoraModule(rank=16, alpha=8.0, rslora=True).scale == 2.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LoraConfig(rank=11, modules=("gate_proj",)), "is 11: expected 1 to 10"),
        (LoraConfig(rank=4, modules=("qkv_proj",)), "no linear layer matches 'qkv_proj'"),
        (LoraConfig(rank=4, modules=("lm_head",)), "embeddings and the head stay frozen"),
        (LoraConfig(rank=4, ranks={"qkv": 3}), "no linear layer matches 'qkv'"),
    ],
)
def test_settings_that_fit_no_base_are_refused(spec: LoraConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        configured_modules(spec, SHAPES)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (LoraModule(rank=0, alpha=8.0), "rank of self_attn.q_proj is 0: expected 1 to 24"),
        (LoraModule(rank=4, alpha=math.nan), "alpha of self_attn.q_proj is nan"),
        (LoraModule(rank=4, alpha=0.0), "expected a number above 0"),
    ],
)
def test_a_rank_and_an_alpha_without_effect_are_refused(module: LoraModule, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_rank("self_attn.q_proj", module, linear_shapes(SHAPES)[QUERY])


def test_merging_adds_the_product_to_each_layer() -> None:
    rng = np.random.default_rng(0)
    modules = configured_modules(LoraConfig(rank=3, alpha=6.0), SHAPES)
    arrays = {
        name: rng.standard_normal(array.shape, np.float32)
        for name, array in initial_arrays(modules, SHAPES, 0).items()
    }
    base = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    result = merged(base, adapter_of(modules, arrays, SHAPES))
    expected = base[OUTPUT] + 2.0 * np.einsum(
        "lrnh,ldr->ldnh", arrays[f"{OUTPUT}:A"], arrays[f"{OUTPUT}:B"]
    )
    np.testing.assert_allclose(result[OUTPUT], expected, rtol=1e-5, atol=1e-5)
    expected = base[QUERY] + 2.0 * np.einsum(
        "lrd,lkghr->lkghd", arrays[f"{QUERY}:A"], arrays[f"{QUERY}:B"]
    )
    np.testing.assert_allclose(result[QUERY], expected, rtol=1e-5, atol=1e-5)
    assert result["lm_head/weight"] is base["lm_head/weight"]
    assert all(array.dtype == np.float32 for array in result.values())


def test_the_identity_of_a_policy_is_over_base_adapter_rank_and_alpha() -> None:
    modules = configured_modules(LoraConfig(rank=4, alpha=8.0), SHAPES)
    adapter = adapter_of(modules, initial_arrays(modules, SHAPES, 1), SHAPES)
    other = configured_modules(LoraConfig(rank=4, alpha=16.0), SHAPES)
    digests = {
        policy_digest("base", modules, adapter.digest),
        policy_digest("another base", modules, adapter.digest),
        policy_digest("base", modules, "another adapter"),
        policy_digest("base", other, adapter.digest),
    }
    assert len(digests) == 4
    assert policy_digest("base", dict(reversed(modules.items())), adapter.digest) in digests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{QUERY}:A": np.zeros((2, 4, 20), np.float32)}, r"expected \(2, 4, 24\), found"),
        ({f"{QUERY}:C": np.zeros(3, np.float32)}, "q_proj/weight:C expected absent"),
        ({f"{DOWN}:B": np.full((2, 24, 4), np.nan, np.float32)}, "not finite"),
        ({f"{DOWN}:A": np.full((2, 4, 10), np.inf, np.float32)}, "not finite"),
    ],
)
def test_arrays_that_fit_no_base_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    modules = configured_modules(LoraConfig(rank=4), SHAPES)
    arrays = initial_arrays(modules, SHAPES, 1) | change
    with pytest.raises(InputError, match=message):
        adapter_of(modules, arrays, SHAPES)


def test_an_adapter_of_a_layer_that_the_base_has_not_is_refused() -> None:
    modules = configured_modules(LoraConfig(rank=4), SHAPES)
    arrays = initial_arrays(modules, SHAPES, 1)
    smaller = {name: shape for name, shape in SHAPES.items() if name != DOWN}
    with pytest.raises(InputError, match=r"the base has no linear layer mlp\.down_proj"):
        adapter_of(modules, arrays, smaller)


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "a\\b", ".hidden", "a b", "a\n", "ü", "a" * 129]
)
def test_names_with_paths_or_spaces_are_refused(name: str) -> None:
    assert check_adapter_name("policy@00012-1a2b3c4d") == "policy@00012-1a2b3c4d"
    with pytest.raises(InputError, match="cannot name an adapter"):
        check_adapter_name(name)

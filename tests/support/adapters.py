"""Adapters for tests: the shapes of a small base, and an adapter with values everywhere."""

import numpy as np

from marin_rl.config import LoraConfig
from marin_rl.lora.adapter import Adapter, Shapes, adapter_of, initial_arrays
from marin_rl.lora.peft import configured_modules

STACK = "transformer/layers/stacked"
# 2 layers, 2 key/value heads of 3 query heads each, head size 4, width 24, MLP 10
SHAPES: Shapes = {
    f"{STACK}/self_attn/q_proj/weight": (2, 2, 3, 4, 24),
    f"{STACK}/self_attn/q_proj/bias": (2, 2, 3, 4),
    f"{STACK}/self_attn/k_proj/weight": (2, 2, 4, 24),
    f"{STACK}/self_attn/v_proj/weight": (2, 2, 4, 24),
    f"{STACK}/self_attn/o_proj/weight": (2, 24, 6, 4),
    f"{STACK}/mlp/gate_proj/weight": (2, 10, 24),
    f"{STACK}/mlp/up_proj/weight": (2, 10, 24),
    f"{STACK}/mlp/down_proj/weight": (2, 24, 10),
    f"{STACK}/input_layernorm/weight": (2, 24),
    "embeddings/token_embeddings/weight": (300, 24),
    "lm_head/weight": (300, 24),
}
QUERY, OUTPUT, DOWN = (
    f"{STACK}/{n}/weight" for n in ("self_attn/q_proj", "self_attn/o_proj", "mlp/down_proj")
)


def random_adapter(spec: LoraConfig, seed: int = 0, shapes: Shapes = SHAPES) -> Adapter:
    """An adapter with values everywhere."""
    rng, modules = np.random.default_rng(seed), configured_modules(spec, shapes)
    arrays = initial_arrays(modules, shapes, seed)
    filled = {name: rng.standard_normal(a.shape, np.float32) for name, a in arrays.items()}
    return adapter_of(modules, filled, shapes)

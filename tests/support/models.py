"""Two-layer models with sharp, uneven weights, and a full forward by definition as the truth."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.compilation import device_array
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.models.spec import LayerKind, Rope, Spec
from marin_rl.training.model import is_matrix, named_parameters

VOCABULARY = 103
LENGTH = 128

_LLAMA3 = (
    ("rope_type", "llama3"),
    ("factor", 8.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 32),
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 4},
    "llama-tied": {"kv_heads": 4, "tied": True},
    "llama-gqa": {"kv_heads": 2},
    "llama3-rope": {"kv_heads": 1, "rope": Rope(theta=5e5, size=8, scaling=_LLAMA3)},
    "qwen2": {"kv_heads": 2, "qkv_bias": True},
    "qwen3": {"kv_heads": 2, "head_size": 24, "qk_norm": "head"},
    "mistral": {"kv_heads": 2},
    "gemma": {
        "kv_heads": 1,
        "norm": "gemma",
        "tied": True,
        "activation": "gelu_pytorch_tanh",
        "embedding_scale": math.sqrt(32),
    },
}


def tiny_spec(family: str = "llama-gqa", **options: Any) -> Spec:
    """Two layers of width 32."""
    chosen: dict[str, Any] = {"head_size": 8, "layers": 2, **FAMILIES[family], **options}
    layers, rope = chosen.pop("layers"), chosen.pop("rope", None)
    rope = rope or Rope(theta=10_000.0, size=chosen["head_size"])
    sizes: dict[str, Any] = {
        "family": family.partition("-")[0],
        "hf": "{}",
        "vocabulary": VOCABULARY,
        "context_length": 256,
        "width": 32,
        "mlp_width": 48,
        "kinds": (LayerKind(rope=rope),) * layers,
        "heads": 4,
        "norm_epsilon": 1e-5,
    }
    return Spec(**{**sizes, **chosen})


def tiny_model(family: str = "llama-gqa", seed: int = 0, **options: Any) -> LanguageModel:
    """A model of two layers and width 32 whose distributions are far from uniform."""
    return uneven_model(tiny_spec(family, **options), seed)


def uneven_model(spec: Spec, seed: int) -> LanguageModel:
    """Weights half as large again as those that keep a variance, and norms that are not all ones.

    NumPy's, because JAX compiles a program for each shape of each operation.
    """
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, hax.NamedArray):
            return leaf
        name = "/".join(str(getattr(part, "name", part)) for part in path)
        values = rng.standard_normal([axis.size for axis in leaf.axes], np.float32)
        if is_matrix(name, leaf):
            weights = values * np.float32(1.5 * _deviation(name, leaf.axes))
        else:
            ones = not name.endswith("/bias") and spec.norm != "gemma"
            weights = np.float32(ones) + np.float32(0.2) * values
        return hax.named(device_array(weights), leaf.axes)

    is_named = lambda node: isinstance(node, hax.NamedArray)
    return jax.tree_util.tree_map_with_path(fill, model_of(spec), is_leaf=is_named)


def _deviation(path: str, axes: Sequence[hax.Axis]) -> float:
    """The deviation of a matrix by the number of its inputs."""
    names = [axis.name for axis in axes]
    inputs = axes[names.index("embed") + 1 :] or axes[-1:]
    size = math.prod(axis.size for axis in inputs)
    return 1 / size if path.startswith("embeddings/") else size**-0.5


def full_logits(model: LanguageModel, token_ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence by definition: every pair of positions, layer by layer.

    Padded to one length, so that it compiles once; what follows changes nothing before it.
    """
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(token_ids)] = token_ids
    run = _forward(replace(model.spec, hf=""))
    return np.asarray(run(named_parameters(model), jnp.asarray(padded)))[: len(token_ids)]


def full_logprobs(
    model: LanguageModel, prompt: np.ndarray, completion: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Logprob of each completion token by the model's own forward pass."""
    logits = full_logits(model, np.concatenate([prompt, completion]))
    scaled = logits[len(prompt) - 1 : -1].astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    every = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return every[np.arange(len(completion)), completion]


_PROGRAMS: dict[Spec, Any] = {}


def _forward(spec: Spec) -> Any:
    return _PROGRAMS.setdefault(spec, jax.jit(partial(reference_logits, spec)))


def reference_logits(spec: Spec, weights: dict[str, Any], ids_T: Any, *rows_T: Any) -> jax.Array:
    """Logits [T, V] of the five families that have rms norms before each half of a layer.

    `rows_T` are segments and positions; without them all is one sequence.
    """
    states_TE = reference_states(spec, weights, ids_T, *rows_T)
    return states_TE @ weights.get("lm_head/weight", weights[_EMBEDDING]).T


_EMBEDDING = "embeddings/token_embeddings/weight"


def reference_states(
    spec: Spec, weights: dict[str, Any], ids_T: Any, segments_T: Any = None, positions_T: Any = None
) -> jax.Array:
    """States [T, E] after the final norm."""
    assert spec.pre
    assert not spec.post
    assert spec.gated
    index = jnp.arange(len(ids_T))
    segments_T = jnp.ones_like(index) if segments_T is None else segments_T
    positions_T = index if positions_T is None else positions_T
    seen = (index[None] <= index[:, None]) & (segments_T[None] == segments_T[:, None])
    x_TE = weights[_EMBEDDING][ids_T] * spec.embedding_scale
    for layer, kind in enumerate(spec.kinds):
        start = "transformer/layers/stacked/"
        own = {k.removeprefix(start): v[layer] for k, v in weights.items() if k.startswith(start)}
        normed_TE = _reference_norm(spec, x_TE, own["input_layernorm/weight"])
        x_TE = x_TE + _reference_attention(spec, kind, own, normed_TE, positions_T, seen)
        normed_TE = _reference_norm(spec, x_TE, own["post_attention_layernorm/weight"])
        gate, up = (normed_TE @ own[f"mlp/{n}_proj/weight"].T for n in ("gate", "up"))
        act = jax.nn.silu if spec.activation == "silu" else jax.nn.gelu
        x_TE = x_TE + (act(gate) * up) @ own["mlp/down_proj/weight"].T
    return _reference_norm(spec, x_TE, weights["transformer/norm/weight"])


def _reference_norm(spec: Spec, x: Any, weight: Any) -> Any:
    size = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + spec.norm_epsilon)
    return x / size * (weight + (spec.norm == "gemma"))


def _reference_attention(
    spec: Spec, kind: LayerKind, own: dict[str, Any], x_TE: Any, positions_T: Any, seen: Any
) -> Any:
    heads = {}
    for name in "qkv":
        weight = own[f"self_attn/{name}_proj/weight"]
        out = jnp.einsum("te,...e->t...", x_TE, weight)
        out = out + own.get(f"self_attn/{name}_proj/bias", 0.0)
        heads[name] = out.reshape(len(x_TE), -1, spec.head_size)
    for name in "qk":
        if spec.qk_norm:
            weight = own[f"self_attn/{name}_norm/weight"]
            heads[name] = _reference_norm(spec, heads[name], weight)
        heads[name] = _reference_rotation(kind.rope, heads[name], positions_T)
    keys, values = (jnp.repeat(heads[n], spec.queries_per_kv, axis=1) for n in "kv")
    scores = jnp.einsum("tnh,snh->nts", heads["q"], keys) / math.sqrt(spec.head_size)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("nts,snh->tnh", shares, values)
    return jnp.einsum("tnh,enh->te", attended, own["self_attn/o_proj/weight"])


def _reference_rotation(rope: Any, x_TNH: Any, positions_T: Any) -> Any:
    """Pairs of dimensions as complex numbers, turned by their angle."""
    half = rope.size // 2
    turn = jnp.exp(1j * positions_T[:, None, None] * rope.frequencies)
    turned = (x_TNH[..., :half] + 1j * x_TNH[..., half:]) * turn
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def rows_of(ids: np.ndarray) -> tuple[jax.Array, ...]:
    """Ids, segments, positions and mask of whole rows, as the trainer scores them."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return jnp.asarray(ids), jnp.ones(ids.shape, jnp.int32), positions, positions > 0

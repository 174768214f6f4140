"""Two-layer Levanter models with sharp, uneven weights, and their full forward as the truth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig
from levanter.models.gemma import GemmaConfig, GemmaLMHeadModel
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmHeadModel
from levanter.models.mistral import MistralConfig, MistralLMHeadModel
from levanter.models.qwen import Qwen3Config, Qwen3LMHeadModel, QwenConfig, QwenLMHeadModel

from marin_rl.compilation import device_array
from marin_rl.training.model import is_matrix

VOCABULARY = 103
LENGTH = 128


@dataclass(frozen=True)
class Family:
    """A model class and what is particular about its configuration."""

    model: type
    config: type
    options: dict[str, Any]


FAMILIES = {
    "llama": Family(LlamaLMHeadModel, LlamaConfig, {"num_kv_heads": 4}),
    "llama-tied": Family(
        LlamaLMHeadModel, LlamaConfig, {"num_kv_heads": 4, "tie_word_embeddings": True}
    ),
    "llama-gqa": Family(LlamaLMHeadModel, LlamaConfig, {"num_kv_heads": 2}),
    "llama3-rope": Family(
        LlamaLMHeadModel,
        LlamaConfig,
        {
            "num_kv_heads": 1,
            "rope": Llama3RotaryEmbeddingsConfig(original_max_position_embeddings=32),
        },
    ),
    "qwen2": Family(QwenLMHeadModel, QwenConfig, {"num_kv_heads": 2}),
    "qwen3": Family(Qwen3LMHeadModel, Qwen3Config, {"num_kv_heads": 2, "head_dim": 24}),
    "mistral": Family(
        MistralLMHeadModel, MistralConfig, {"num_kv_heads": 2, "sliding_window": None}
    ),
    "gemma": Family(GemmaLMHeadModel, GemmaConfig, {"num_kv_heads": 1, "head_dim": 8}),
}


def tiny_model(family: str = "llama-gqa", seed: int = 0, **options: Any) -> LmHeadModel:
    """A model of two layers and width 32 whose distributions are far from uniform."""
    kind = FAMILIES[family]
    config = kind.config(
        **{
            "max_seq_len": 256,
            "hidden_dim": 32,
            "intermediate_dim": 48,
            "num_layers": 2,
            "num_heads": 4,
            "gradient_checkpointing": False,
            "attn_backend": AttentionBackend.VANILLA,
            **kind.options,
            **options,
        }
    )
    return uneven_model(kind.model, config, VOCABULARY, seed)


def uneven_model(kind: Any, config: Any, vocabulary: int, seed: int) -> LmHeadModel:
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
            ones = not name.endswith("/bias") and not isinstance(config, GemmaConfig)
            weights = np.float32(ones) + np.float32(0.2) * values
        return hax.named(device_array(weights), leaf.axes)

    template = _template(kind, config, vocabulary)
    is_named = lambda node: isinstance(node, hax.NamedArray)
    return jax.tree_util.tree_map_with_path(fill, template, is_leaf=is_named)


@cache
def _template(kind: Any, config: Any, vocabulary: int) -> LmHeadModel:
    """The module with shapes in place of arrays."""
    vocab = hax.Axis("vocab", vocabulary)
    return eqx.filter_eval_shape(kind.init, vocab, config, key=jax.random.key(0))


def _deviation(path: str, axes: Sequence[hax.Axis]) -> float:
    """The deviation of a matrix by the number of its inputs, as Levanter begins."""
    names = [axis.name for axis in axes]
    inputs = axes[names.index("embed") + 1 :] or axes[-1:]
    size = math.prod(axis.size for axis in inputs)
    return 1 / size if path.startswith("embeddings/") else size**-0.5


def full_logits(model: LmHeadModel, token_ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence by the model's own forward pass.

    Padded to one length, so that it compiles once; what follows changes nothing before it.
    """
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(_forward(model, jnp.asarray(padded)))[: len(token_ids)]


@eqx.filter_jit
def _forward(model: LmHeadModel, token_ids: jax.Array) -> jax.Array:
    named = hax.named(token_ids, ("batch", "position"))
    logits = model(named, attn_mask=AttentionMask.causal())
    return logits.rearrange(("batch", "position", "vocab")).array[0]


def full_logprobs(
    model: LmHeadModel, prompt: np.ndarray, completion: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Logprob of each completion token by the model's own forward pass."""
    logits = full_logits(model, np.concatenate([prompt, completion]))
    scaled = logits[len(prompt) - 1 : -1].astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    every = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return every[np.arange(len(completion)), completion]

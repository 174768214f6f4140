"""Description of a decoder-only transformer: what its layers compute, and the sizes of its arrays.

Trainer and engine compute by it (`block`), sharding, adapters and plans read its sizes. It is made
from a config.json in families.py. Numbers only: no arrays, and nothing that takes long to import.

Axes: K key/value heads, G query heads of each, H head size, D width, F width of the MLP.
"""

import json
import math
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from marin_rl.errors import InputError

STACKED = "transformer/layers/stacked/"  # before the names of arrays of layers

# Names of activations, as in a config.json; `block` has their functions.
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "xielu")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864) of the first `size` dimensions of a head.

    `scaling` are the entries of `rope_scaling` in a config.json, `rope_type` among them.
    """

    theta: float
    size: int
    scaling: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def _scaled(self) -> tuple[np.ndarray, float]:
        options = dict(self.scaling)
        # In float32, step by step as transformers does it: the angle at position 100,000 shows the
        # last bit.
        powers = np.arange(0, self.size, 2, dtype=np.float32) / np.float32(self.size)
        waves = np.float32(self.theta) ** powers
        plain = (np.float32(1) / waves).astype(np.float32)
        match options.get("rope_type", "default"):
            case "default" | "dynamic":  # which changes nothing up to a model's context length
                return plain, 1.0
            case "linear":
                return plain / np.float32(options["factor"]), 1.0
            case "llama3":
                return _llama3(plain, options), 1.0
            case "yarn":
                return _yarn(plain, options, self)
            case "longrope":
                return _longrope(waves, options)
            case kind:
                raise InputError(f"rope_type {kind!r} is not known")

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a position turns each pair of dimensions by, float32 [size / 2]."""
        return self._scaled[0]

    @property
    def factor(self) -> float:
        return self._scaled[1]


def _llama3(plain: np.ndarray, options: dict) -> np.ndarray:
    """Long waves slowed by the factor, short ones kept, and a ramp between (Llama 3.1)."""
    factor, length = options["factor"], options["original_max_position_embeddings"]
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    waves = np.float32(2 * math.pi) / plain
    slowed = np.where(waves > length / low, plain / np.float32(factor), plain)
    share = (length / waves - low) / np.float32(high - low)
    between = (1 - share) * slowed / np.float32(factor) + share * slowed
    medium = (waves >= length / high) & (waves <= length / low)
    return np.where(medium, between, slowed).astype(np.float32)


def _yarn(plain: np.ndarray, options: dict, rope: Rope) -> tuple[np.ndarray, float]:
    """YaRN (arXiv:2309.00071): a ramp over dimensions by how often they turn in the old length."""
    factor, length = options["factor"], options["original_max_position_embeddings"]

    def dimension(turns: float | int) -> float:
        return rope.size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(options.get("beta_fast", 32)), dimension(options.get("beta_slow", 1))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    steps = np.arange(rope.size // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1)
    slowed = plain / np.float32(factor) * ramp + plain * (1 - ramp)

    def scale(of: float | int) -> float:
        return 0.1 * of * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = options.get("attention_factor")
    if attention is None and options.get("mscale") and options.get("mscale_all_dim"):
        attention = scale(options["mscale"]) / scale(options["mscale_all_dim"])
    elif attention is None:
        attention = scale(1.0)
    return slowed.astype(np.float32), float(attention)


def _longrope(waves: np.ndarray, options: dict) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv:2402.13753) up to the length that it extends: a factor for each wave."""
    factors = np.array(options["short_factor"], np.float32).reshape(waves.shape)
    frequencies = np.float32(1) / (factors * waves)
    factor, length = options["factor"], options["original_max_position_embeddings"]
    attention = options.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return frequencies.astype(np.float32), float(attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Settings that may differ from layer to layer.

    `window`: a position sees itself and this many minus one before it; None: all before it.
    `rope` is None in a layer without positions.
    """

    window: int | None = None
    rope: Rope | None = None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A family's particulars and a model's sizes; hashable, so that programs are compiled by it.

    `norm`: rms; gemma, which scales by 1 + weight; or layer, with a mean and a bias. Of norms
    around each half of a layer `pre` is on its input and `post` on its output. `qk_norm` is over
    each head or over all together. `final_cap` and `cap` bound logits and attention scores by
    cap x tanh(score / cap). `sinks`: each head has a score that takes part in its softmax and has
    no value. Of `experts` MLPs of `mlp_width` a token takes `experts_chosen`, by
    the softmax of all scores, whose shares may be renormalised, or of the chosen ones
    (`choose_first`); `clip` bounds what they multiply. `hf` is the config.json as text, which
    exports begin from. Specs are equal where they compute the same.
    """

    family: str = field(default="", compare=False)
    hf: str = field(default="", compare=False, repr=False)
    vocabulary: int
    context_length: int = field(compare=False)
    width: int
    mlp_width: int
    kinds: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_size: int
    norm_epsilon: float
    initializer_range: float = field(default=0.02, compare=False)
    tied: bool = False
    activation: str = "silu"
    gated: bool = True
    norm: Literal["rms", "gemma", "layer"] = "rms"
    pre: bool = True
    post: bool = False
    qk_norm: Literal["head", "all"] | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    scale: float | None = None
    cap: float | None = None
    final_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    learned_positions: bool = False
    sinks: bool = False
    experts: int = 0
    experts_chosen: int = 0
    choose_first: bool = False
    renormalise: bool = True
    clip: float | None = None

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of all layers, each once."""
        return tuple(dict.fromkeys(kind.rope for kind in self.kinds if kind.rope is not None))

    @property
    def period(self) -> int:
        """The fewest layers that, again and again, give all kinds (the last time in part)."""
        return next(
            size
            for size in range(1, self.layers + 1)
            if all(kind == self.kinds[i % size] for i, kind in enumerate(self.kinds))
        )

    def facts(self) -> dict[str, Any]:
        """Everything that decides what is computed, as JSON types, for records."""
        whole = asdict(self)
        return json.loads(json.dumps({each.name: whole[each.name] for each in _compared()}))

    def difference(self, other: "Spec") -> str:
        """The first thing that another model computes otherwise, for an error's text."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in _compared()]
        name, expected, found = next(pair for pair in pairs if pair[1] != pair[2])
        if name == "kinds" and len(expected) == len(found):
            layers = enumerate(zip(expected, found, strict=True))
            layer, (expected, found) = next(each for each in layers if each[1][0] != each[1][1])
            name = f"layer {layer}"
        return f"{name} expected {expected}, found {found}"


def _compared() -> list[Field[Any]]:
    """Fields that decide what is computed."""
    return [each for each in fields(Spec) if each.compare]

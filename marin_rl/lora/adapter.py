"""Adapters as arrays: layers that can be adapted, first values, checks, digests, and merging.

An adapted layer computes W x + scale B A x. All arithmetic is float32.

A linear layer is named by the path of its weight in the base, whose layers are stacked (axis L):
K key/value heads, G query heads for each, H head size, D width, F width of the MLP, N = K G heads.

| layer | base weight | A | B |
|---|---|---|---|
| self_attn/q_proj | [L, K, G, H, D] | [L, r, D] | [L, K, G, H, r] |
| self_attn/k_proj, v_proj | [L, K, H, D] | [L, r, D] | [L, K, H, r] |
| self_attn/o_proj | [L, D, N, H] | [L, r, N, H] | [L, D, r] |
| mlp/gate_proj, up_proj | [L, F, D] | [L, r, D] | [L, F, r] |
| mlp/down_proj | [L, D, F] | [L, r, F] | [L, D, r] |

Flattened, A is [L, r, in] and B [L, out, r], as PEFT has them one layer at a time.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from marin_rl.errors import InputError

# A name is part of URLs, metrics and file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")

ALL_LINEAR = "all-linear"
Shapes = Mapping[str, tuple[int, ...]]  # of a base's parameters, by path
Blocks = Callable[[Any], Iterable[Any]]

# Where a linear layer's weight stands in every supported family, and its number of input axes.
_STACKED, _WEIGHT = "transformer/layers/stacked/", "/weight"
_INPUT_AXES = {
    "self_attn/q_proj": 1,
    "self_attn/k_proj": 1,
    "self_attn/v_proj": 1,
    "self_attn/o_proj": 2,  # heads and head size
    "mlp/gate_proj": 1,
    "mlp/up_proj": 1,
    "mlp/down_proj": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Sizes of a stacked linear layer: number of layers, output axes, input axes."""

    layers: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]

    @property
    def rank_max(self) -> int:
        return min(math.prod(self.outputs), math.prod(self.inputs))

    def a_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of A, `[L, r, in...]`."""
        return (self.layers, rank, *self.inputs)

    def b_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of B, `[L, out..., r]`."""
        return (self.layers, *self.outputs, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """Rank and alpha of one adapted layer. With `rslora` the scale is alpha / sqrt(rank).

    The square root (arXiv:2312.03732) keeps the size of activations equal from rank to rank.
    """

    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def check_rank(name: str, module: LoraModule, layer: LinearShape) -> None:
    """Raise InputError for a rank below 1 or above the layer's dimensions, or a useless alpha."""
    if not 1 <= module.rank <= layer.rank_max:
        raise InputError(
            f"LoRA rank of {name} is {module.rank}: expected 1 to {layer.rank_max}, the smaller of "
            f"its dimensions {math.prod(layer.outputs)} and {math.prod(layer.inputs)}"
        )
    # An alpha of 0 gives A and B no gradient.
    if not (math.isfinite(module.alpha) and module.alpha > 0):
        raise InputError(f"LoRA alpha of {name} is {module.alpha}: expected a number above 0")


def linear_shapes(shapes: Shapes) -> dict[str, LinearShape]:
    """Sizes of a base's linear layers, by path, in the base's order."""
    result = {}
    for path, shape in shapes.items():
        inputs = _INPUT_AXES.get(path.removeprefix(_STACKED).removesuffix(_WEIGHT))
        if inputs is not None and path.startswith(_STACKED) and path.endswith(_WEIGHT):
            layers, *axes = shape
            # Input axes are the last in each weight of the table above.
            outputs = tuple(axes[:-inputs])
            result[path] = LinearShape(layers=layers, outputs=outputs, inputs=tuple(axes[-inputs:]))
    return result


def module_name(path: str) -> str:
    """Dotted name of a layer by its weight's path: `self_attn.q_proj`."""
    return path.removeprefix(_STACKED).removesuffix(_WEIGHT).replace("/", ".")


def a_name(path: str) -> str:
    return f"{path}:A"


def b_name(path: str) -> str:
    return f"{path}:B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter of a base: `modules` by path of the weight, `arrays` by name, PATH:A and PATH:B.

    Arrays have the shapes listed above; NumPy's or JAX's, float32.
    """

    modules: Mapping[str, LoraModule]
    arrays: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return digest_of(self.arrays)

    @property
    def rank_max(self) -> int:
        return max(module.rank for module in self.modules.values())


def adapter_of(
    modules: Mapping[str, LoraModule], arrays: Mapping[str, Any], shapes: Shapes
) -> Adapter:
    """Return an adapter that fits a base. Raises InputError, naming the array that does not."""
    # Collected for all modules first, so that arrays too many are refused as well as missing ones.
    layers, expected = linear_shapes(shapes), dict[str, tuple[int, ...]]()
    for path, module in modules.items():
        if path not in layers:
            raise InputError(
                f"the base has no linear layer {module_name(path)}: expected one of "
                f"{', '.join(map(module_name, layers))}"
            )
        check_rank(module_name(path), module, layers[path])
        expected[a_name(path)] = layers[path].a_shape(module.rank)
        expected[b_name(path)] = layers[path].b_shape(module.rank)
    for name in sorted({*expected, *arrays}):
        shape = tuple(arrays[name].shape) if name in arrays else "absent"
        if shape != expected.get(name, "absent"):
            raise InputError(
                f"the adapter does not fit its base: array {name} expected "
                f"{expected.get(name, 'absent')}, found {shape}; use the base that it was made for"
            )
        if not np.isfinite(np.asarray(arrays[name], np.float32)).all():
            raise InputError(f"array {name} of the adapter has values that are not finite")
    return Adapter(modules=dict(modules), arrays={name: arrays[name] for name in expected})


def initial_arrays(
    modules: Mapping[str, LoraModule], shapes: Shapes, seed: int
) -> dict[str, np.ndarray]:
    """First values, a function of (seed, name): A uniform within 1 / sqrt(in), B zero.

    PEFT's `kaiming_uniform_(a=sqrt(5))`: advice on learning rates takes it for granted.
    """
    layers, arrays = linear_shapes(shapes), dict[str, np.ndarray]()
    for path, module in modules.items():
        bound = 1.0 / math.sqrt(math.prod(layers[path].inputs))
        name = a_name(path)
        # By sha256: Python's own hash of a text differs between processes.
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        # A generator for each name: adapting one more module changes no other module's values.
        unit = np.random.default_rng([seed, key]).random(
            layers[path].a_shape(module.rank), np.float32
        )
        arrays[name] = (2.0 * unit - 1.0) * np.float32(bound)
        # With B zero the adapted policy begins as the base itself.
        arrays[b_name(path)] = np.zeros(layers[path].b_shape(module.rank), np.float32)
    return arrays


def policy_digest(base_digest: str, modules: Mapping[str, LoraModule], adapter_digest: str) -> str:
    """Identity of a policy: SHA-256 over the digests of base and adapter, and rank and scale."""
    tree = {
        "base": base_digest,
        "adapter": adapter_digest,
        # Not in the arrays' digest: the same A and B at another scale are another policy.
        "modules": {
            path: [module.rank, module.alpha, module.rslora] for path, module in modules.items()
        },
    }
    # Keys sorted: the order in which modules were listed is no part of the identity.
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def merged(base: Mapping[str, Any], adapter: Adapter) -> dict[str, Any]:
    """Return the base's parameters with the adapter added to its weights; others are not copied."""
    result = dict(base)
    for path, module in adapter.modules.items():
        a, b = adapter.arrays[a_name(path)], adapter.arrays[b_name(path)]
        result[path] = merged_weight(base[path], a, b, module.scale)
    return result


def merged_weight(weight: Any, a: Any, b: Any, scale: float) -> Any:
    """W + scale B A of stacked layers, `[L, out..., in...]`; of NumPy's or JAX's arrays."""
    layers, rank = a.shape[:2]
    change = b.reshape(layers, -1, rank) @ a.reshape(layers, rank, -1)  # [L, out, in]
    return weight + np.float32(scale) * change.reshape(weight.shape)


def check_adapter_name(name: str) -> str:
    """Return a name that an adapter may be served by. Raises InputError, for paths among others."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r:.80} cannot name an adapter: expected 1 to 128 of letters, digits, `.`, `_`, "
            "`@` and `-`, the first a letter or digit"
        )
    return name


def digest_of(parameters: Mapping[str, Any], blocks: Blocks = lambda array: [array]) -> str:
    """SHA-256 over path, dtype, shape and bytes of every array, as hex.

    `blocks` gives the values of an array in their order.
    """
    digest = hashlib.sha256()
    for path in sorted(parameters):
        array = parameters[path]
        digest.update(f"{path} {array.dtype.name} {tuple(array.shape) or (1,)}\n".encode())
        for block in blocks(array):
            digest.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()

"""The linear layers of a base, and the rank and scale of an adapter of one.

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

import math
from collections.abc import Mapping
from dataclasses import dataclass

from marin_rl.errors import InputError

ALL_LINEAR = "all-linear"
Shapes = Mapping[str, tuple[int, ...]]  # of a base's parameters, by path

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
        """Largest rank that a change of this layer can have."""
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
        """Factor of B A."""
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
    """Name of the array A of a base's weight."""
    return f"{path}:A"


def b_name(path: str) -> str:
    """Name of the array B of a base's weight."""
    return f"{path}:B"

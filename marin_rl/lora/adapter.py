"""An adapter as arrays: first values, checks, digests, and merging into a base.

An adapted layer computes W x + scale B A x. All arithmetic is float32.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from marin_rl.digests import digest_of
from marin_rl.errors import InputError
from marin_rl.lora.spec import (
    LoraModule,
    Shapes,
    a_name,
    b_name,
    check_rank,
    linear_shapes,
    module_name,
)

# A name is part of URLs, metrics and file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter of a base: `modules` by path of the weight, and `arrays` by name.

    Arrays are named PATH:A and PATH:B and have the shapes that `lora.spec` lists; NumPy's or JAX's,
    float32.
    """

    modules: Mapping[str, LoraModule]
    arrays: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 over name, dtype, shape and bytes of the arrays."""
        return digest_of(self.arrays)

    @property
    def rank_max(self) -> int:
        """Largest rank of its modules."""
        return max(module.rank for module in self.modules.values())


def adapter_of(
    modules: Mapping[str, LoraModule], arrays: Mapping[str, Any], shapes: Shapes
) -> Adapter:
    """Return an adapter that fits a base. Raises InputError, naming the array that does not.

    Refused are layers that the base has not, other dimensions, ranks out of range, arrays that are
    missing or too many, and values that are not finite.
    """
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
    """First values, by (seed, name) alone: A uniform within 1 / sqrt(in), B zero.

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

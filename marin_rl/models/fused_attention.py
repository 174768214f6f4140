"""Kernels of NVIDIA GPUs for attention: which are there, and cuDNN's, for training and prompts.

Leaves out the engine's own kernel for a decode step (`inference.decode_kernel`).

Axes: B rows, T positions, K key heads, G query heads of each, H head size.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from marin_rl.machine import xla_flags
from marin_rl.models.axes import ROWS, TENSOR, dividing, on_each_device
from marin_rl.models.spec import Spec

# Of cuDNN: head sizes are multiples of 8, and up to 128 on every GPU that has the kernel.
HEAD_SIZE_MULTIPLE, HEAD_SIZE_MAX = 8, 128

# Compute capability of the first GPUs with bfloat16, and with the kernels (Ampere).
CAPABILITY_MIN = 8.0

# Flags of XLA with which cuDNN's kernel fails to compile: it adds up in any order.
DETERMINISTIC = ("--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_deterministic_ops")


def kernels_for(dtype: Any) -> bool:
    """True where this process's devices have kernels for this dtype."""
    if jax.default_backend() != "gpu" or jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return False
    return float(getattr(jax.local_devices()[0], "compute_capability", 0)) >= CAPABILITY_MIN


def takes_fused(spec: Spec, dtype: Any) -> bool:
    """True where cuDNN's kernel is there, and takes the heads."""
    fits = spec.head_size % HEAD_SIZE_MULTIPLE == 0 and spec.head_size <= HEAD_SIZE_MAX
    plain = spec.cap is None and not spec.sinks
    return fits and plain and kernels_for(dtype) and not asks_for_determinism()


def asks_for_determinism() -> bool:
    """True where XLA_FLAGS leaves only operations that give the same bits every time."""
    flags = xla_flags()
    return any(flags.get(name, "false").lower() not in ("false", "0") for name in DETERMINISTIC)


def attend_fused(
    query_BTKGH: Float[Array, "B T K G H"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    seen_BTT: Bool[Array, "B T T"] | None,
    window: int | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T K G H"]:
    """Causal softmax attention of scaled queries over the pairs seen, all where that is None.

    A query that sees nothing, such as padding, gets some finite mean. "xla" gives the same on any
    device, with an array of positions by positions. On a mesh each device attends for its own rows
    and heads: XLA by itself would gather all of them, for it cannot cut a kernel.
    """

    def own(query: Array, keys: Array, values: Array, *seen: Array) -> Array:
        B, T, K, G, H = query.shape
        attended: Any = jax.nn.dot_product_attention(
            query.reshape(B, T, K * G, H),
            keys,
            values,
            mask=seen[0][:, None] if seen else None,
            scale=1.0,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation,
        )
        return attended.reshape(B, T, K, G, H)

    arrays = [query_BTKGH, keys_BTKH, values_BTKH, *([] if seen_BTT is None else [seen_BTT])]
    of_rows = dividing(ROWS, len(query_BTKGH))
    of_heads = PartitionSpec(of_rows, None, dividing((TENSOR,), keys_BTKH.shape[2]))
    in_specs = (of_heads, of_heads, of_heads, PartitionSpec(of_rows))[: len(arrays)]
    return on_each_device(own, in_specs, of_heads)(*arrays)

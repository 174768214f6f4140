"""Attention by cuDNN's kernel on an NVIDIA GPU, for models that compute in 16 bits.

The kernel keeps no array of positions by positions, forward or backward. Rows of one sequence each
need no mask but the causal one, which spares half of the work; rows of several get one that all
layers share. What a token sees is that of `attention.sight_of`. Leaves out float32, which the
kernel does not take, meshes, and XLA's deterministic operations, with which it does not compile.

Axes: B rows, T positions, K key heads, G query heads of each, H head size.
"""

from typing import Any, Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Bool, Float, Int

from marin_rl.machine import xla_flags
from marin_rl.training.attention import ProjectedAttention

# Of cuDNN: head sizes are multiples of 8, and up to 128 on every GPU that has the kernel.
HEAD_SIZE_MULTIPLE, HEAD_SIZE_MAX = 8, 128

# Compute capability of the first GPUs with bfloat16, and with the kernel (Ampere).
CAPABILITY_MIN = 8.0

# Flags of XLA with which the kernel fails to compile: it adds up in any order.
DETERMINISTIC = ("--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_deterministic_ops")


class Pairs(NamedTuple):
    """Pairs of positions that see each other, causality apart; None where all of a row do."""

    seen: NamedArray | None


def takes(head_size: int, dtype: jnp.dtype) -> bool:
    """True where the kernel is there for this process's device, on its own, and takes the heads."""
    if jax.default_backend() != "gpu" or jax.sharding.get_abstract_mesh().shape:
        return False
    if asks_for_determinism():
        return False
    fits = head_size % HEAD_SIZE_MULTIPLE == 0 and head_size <= HEAD_SIZE_MAX
    sixteen_bits = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    capability = getattr(jax.local_devices()[0], "compute_capability", "0")
    return fits and sixteen_bits and float(capability) >= CAPABILITY_MIN


def asks_for_determinism() -> bool:
    """True where XLA_FLAGS leaves only operations that give the same bits every time."""
    flags = xla_flags()
    return any(flags.get(name, "false").lower() not in ("false", "0") for name in DETERMINISTIC)


def pairs_of(segments_BT: Int[Array, "B T"], prompts_BT: Int[Array, "B T"] | None) -> Pairs:
    """The pairs of rows with several sequences: of one segment, or of a prompt and its own."""
    keys_B1T = segments_BT[:, None, :]
    seen_BTT = segments_BT[:, :, None] == keys_B1T
    if prompts_BT is not None:
        seen_BTT |= prompts_BT[:, :, None] == keys_B1T
    batch, position = (
        Axis(name, size)
        for name, size in zip(("batch", "position"), segments_BT.shape, strict=True)
    )
    return Pairs(hax.named(seen_BTT, (batch, position, position.alias("key_position"))))


class FusedAttention(ProjectedAttention):
    """Attention by the kernel over `Pairs`."""

    def attended(
        self,
        query_BTKGH: Float[Array, "B T K G H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        mask: Pairs,
        scale: float,
    ) -> Float[Array, "B T K G H"]:
        """See ProjectedAttention."""
        seen = None if mask.seen is None else mask.seen.array
        return attend_fused(query_BTKGH, keys_BTKH, values_BTKH, seen, scale)


def attend_fused(
    query_BTKGH: Float[Array, "B T K G H"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    seen_BTT: Bool[Array, "B T T"] | None,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T K G H"]:
    """Causal softmax attention over the pairs that are seen, all pairs where that is None.

    A query that sees nothing, such as padding, gets some finite mean. "xla" gives the same on any
    device, with an array of positions by positions.
    """
    B, T, K, G, H = query_BTKGH.shape
    attended: Any = jax.nn.dot_product_attention(
        query_BTKGH.reshape(B, T, K * G, H),
        keys_BTKH,
        values_BTKH,
        mask=None if seen_BTT is None else seen_BTT[:, None],
        scale=scale,
        is_causal=True,
        implementation=implementation,
    )
    return attended.reshape(B, T, K, G, H)

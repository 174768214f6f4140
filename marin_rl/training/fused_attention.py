"""Attention by cuDNN's kernel on an NVIDIA GPU, for models that compute in 16 bits.

The kernel keeps no array of positions by positions, forward or backward. Rows of one sequence each
need no mask but the causal one, which spares half of the work; rows of several get one that all
layers share. What a token sees is that of `attention.sight_of`. Leaves out float32, which the
kernel does not take, meshes, and XLA's deterministic operations, with which it does not compile.

Axes: B rows, T positions, K key heads, G query heads of each, H head size.
"""

import os
from typing import Any, Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Bool, Float, Int
from levanter.layers.attention import Attention

from marin_rl.training.attention import with_attention_fields

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
    if asks_for_determinism(os.environ.get("XLA_FLAGS", "")):
        return False
    fits = head_size % HEAD_SIZE_MULTIPLE == 0 and head_size <= HEAD_SIZE_MAX
    sixteen_bits = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    capability = getattr(jax.local_devices()[0], "compute_capability", "0")
    return fits and sixteen_bits and float(capability) >= CAPABILITY_MIN


def asks_for_determinism(flags: str) -> bool:
    """True where XLA_FLAGS leaves only operations that give the same bits every time."""
    parts = (flag.partition("=") for flag in flags.split())
    pairs = {name: value for name, _, value in parts}
    off = ("false", "0")
    return any(name in pairs and pairs[name].lower() not in off for name in DETERMINISTIC)


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


class FusedAttention(Attention):
    """Levanter's attention with `Pairs` in the place of its mask."""

    @classmethod
    def of(cls, attention: Attention) -> "FusedAttention":
        """The same attention; its arrays are not copied."""
        return with_attention_fields(cls, attention)

    def __call__(  # type: ignore[override]  # `Pairs` in place of Levanter's masks
        self, x: NamedArray, mask: Pairs, *, key: Any = None, pos_ids: Any = None
    ) -> NamedArray:
        """Attend over x [batch, position, embed]; `key` is for dropout, which there is none of."""
        del key
        query, keys, values = self._compute_qkv(x, key=None, pos_ids=pos_ids)
        batch, position = x.resolve_axis("batch"), x.resolve_axis("position")
        heads = ("kv_head", "q_heads_per_group", "head_size")
        query = query.rearrange((batch, position, *heads))
        order = (batch, position, "kv_head", "head_size")
        scale = self.config.scaling_factor or query.axis_size("head_size") ** -0.5
        attended = attend_fused(
            query.array,
            keys.rearrange(order).array,
            values.rearrange(order).array,
            None if mask.seen is None else mask.seen.array,
            scale,
        )
        named = hax.named(attended, query.axes).flatten_axes(heads[:2], "heads")
        return self.o_proj(named.astype(x.dtype), key=None)


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

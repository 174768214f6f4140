"""Attention of our own in Levanter's layers: over the blocks in sight, and by cuDNN's kernel.

Rows of several sequences are cut into blocks of positions (`RowAttention`). The blocks of keys that
a block of queries sees are determined once for all layers; attention then takes one of them after
the other, for all blocks of queries together, with a running maximum and sum (FlashAttention,
arXiv:2205.14135, algorithm 1). Time and memory so go with what is seen, not with the square of the
row. The backward pass computes the weights again (ibid., algorithm 4). On an NVIDIA GPU a kernel
does the same for models that compute in 16 bits (`FusedAttention`). Visibility between tokens is
defined in logprobs.py.

Also rotary embedding by a table of cosines and sines that all layers of a pass share: Levanter
computes both from the positions in every layer, for queries and keys each, and XLA again in the
backward pass; a CPU spends 6 % of a small model's step on that. XLA rounds the rotation itself
differently in the last bit when the table is an operand, so rows of one sequence, whose steps must
replay to the bits of earlier runs, keep Levanter's way.

Axes: B rows, T positions, N blocks of a row, C positions of one (D: those of the keys), K key
heads, G query heads of each, Q = G times C, H head size.
"""

import dataclasses
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Bool, Float, Int
from levanter.layers.attention import Attention
from levanter.layers.rotary import RotaryEmbeddings

from marin_rl.machine import xla_flags

# Larger blocks take fewer iterations, smaller ones see less that is out of sight. With prompts of
# 32 and completions of 64 in rows of 544 a step took 11 % less CPU time by the small ones, with
# prompts of 512 in rows of 1,024 it took 7 % more.
POSITIONS_PER_BLOCK = 64
SHORT_ROW_POSITIONS_MAX, POSITIONS_PER_SHORT_BLOCK = 576, 32
# Not -inf: before a query sees its first key, the maximum and its scores would be -inf, and their
# difference NaN.
LOWEST = -1e30


class Sight(NamedTuple):
    """Visible keys of the tokens of some rows, as named arrays so that a scan over layers leaves
    them.

    `keys` are the blocks of keys of each block of queries, those it sees first; `counts` how many
    it sees. `segments` and `prompts` are those of each position, in blocks.
    """

    keys: NamedArray
    counts: NamedArray
    segments: NamedArray
    prompts: NamedArray


def sight_of(segments_BT: Int[Array, "B T"], prompts_BT: Int[Array, "B T"]) -> Sight:
    """A token sees what precedes it in its own segment and in its prompt's; segment 0 sees nothing.

    `prompts` is a token's own segment where it has no prompt apart.
    """
    segments_BNC, prompts_BNC = _blocks(segments_BT), _blocks(prompts_BT)
    B, N, C = segments_BNC.shape
    index_NC = jnp.arange(N * C, dtype=jnp.int32).reshape(N, C)

    def row_of_blocks(queries: tuple[Array, Array, Array]) -> Bool[Array, "B N"]:
        segment_BC, prompt_BC, index_C = queries
        seen = _seen(
            segment_BC[:, None], prompt_BC[:, None], index_C, segments_BNC, index_NC
        )  # [B, N, C, D]
        return jnp.any(seen, axis=(2, 3))

    by_block = (segments_BNC.swapaxes(0, 1), prompts_BNC.swapaxes(0, 1), index_NC)
    # One block of queries after the other: the mask of all of them at once would be [B, T, T].
    seen_BNN = jax.lax.map(row_of_blocks, by_block).swapaxes(0, 1)
    # Blocks in sight come first, and in their order: a loop of `counts` reads no others, and sums
    # in one order whatever the rest of the row holds.
    keys_BNN = jnp.argsort(~seen_BNN, axis=-1, stable=True).astype(jnp.int32)
    batch, block = Axis("batch", B), Axis("block", N)
    position = Axis("in_block", C)
    return Sight(
        keys=hax.named(keys_BNN, (batch, block, block.alias("key_block"))),
        counts=hax.named(jnp.sum(seen_BNN, axis=-1), (batch, block)),
        segments=hax.named(segments_BNC, (batch, block, position)),
        prompts=hax.named(prompts_BNC, (batch, block, position)),
    )


def _blocks(array_BT: Array) -> Array:
    """A row in blocks, filled up with zeros behind: [B, T, …] to [B, N, C, …]."""
    B, T, *feature_shape = array_BT.shape
    short = T <= SHORT_ROW_POSITIONS_MAX
    size = min(POSITIONS_PER_BLOCK, POSITIONS_PER_SHORT_BLOCK if short else T, T)
    padding = [(0, 0), (0, -T % size), *((0, 0) for _ in feature_shape)]
    return jnp.pad(array_BT, padding).reshape(B, -1, size, *feature_shape)


def _seen(
    segments: Int[Array, "..."],
    prompts: Int[Array, "..."],
    index: Int[Array, "..."],
    key_segments: Int[Array, "B N D"],
    key_index: Int[Array, "..."],
) -> Bool[Array, "B N C D"]:
    """Mask of the keys of a block that each query sees; the queries' arrays end in C, the keys' in
    D.
    """
    keys = key_segments[:, :, None, :]
    same = (segments[..., None] == keys) | (prompts[..., None] == keys)
    # Padding is of one segment, too: without the middle condition it would attend to itself.
    return same & (keys > 0) & (key_index[..., None, :] <= index[..., None])


A = TypeVar("A", bound="ProjectedAttention")


class ProjectedAttention(Attention, ABC):
    """Levanter's projections around an attention of our own, whose mask is another than its."""

    # Linear layers of Haliax, or `LoraLinear` in models with adapters.
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    @classmethod
    def of(cls: type[A], attention: Attention) -> A:
        """The same projections; their arrays are not copied."""
        assert attention.config.logits_soft_cap is None, "no supported family caps its logits"
        fields = dataclasses.fields(attention)
        return cls(**{field.name: getattr(attention, field.name) for field in fields})

    @abstractmethod
    def attended(
        self,
        query_BTKGH: Float[Array, "B T K G H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        mask: Any,
        scale: float,
    ) -> Float[Array, "B T K G H"]:
        """Softmax attention of queries that are to be scaled, over what the mask lets them see."""

    def __call__(  # type: ignore[override]  # a mask says more than Levanter's can
        self, x: NamedArray, mask: Any, *, key: Any = None, pos_ids: Any = None
    ) -> NamedArray:
        """Attend over x [batch, position, embed]; `key` is unused: there is no dropout."""
        del key
        query, keys, values = self._compute_qkv(x, key=None, pos_ids=pos_ids)
        batch, position = x.resolve_axis("batch"), x.resolve_axis("position")
        heads = ("kv_head", "q_heads_per_group", "head_size")
        query = query.rearrange((batch, position, *heads))
        order = (batch, position, "kv_head", "head_size")
        scale = self.config.scaling_factor or query.axis_size("head_size") ** -0.5
        pair = keys.rearrange(order).array, values.rearrange(order).array
        attended = self.attended(query.array, *pair, mask, scale)
        named = hax.named(attended, query.axes).flatten_axes(heads[:2], "heads")
        return self.o_proj(named.astype(x.dtype), key=None)


class RowAttention(ProjectedAttention):
    """Attention in blocks over what a `Sight` lets each query see."""

    def attended(
        self,
        query_BTKGH: Float[Array, "B T K G H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        mask: Sight,
        scale: float,
    ) -> Float[Array, "B T K G H"]:
        # The query is scaled once, and not the scores of each block.
        return attend(query_BTKGH * scale, keys_BTKH, values_BTKH, mask)


def attend(
    query_BTKGH: Float[Array, "B T K G H"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    sight: Sight,
) -> Float[Array, "B T K G H"]:
    """Softmax attention of scaled queries over what they see; 0 where that is nothing."""
    B, T, K, G, H = query_BTKGH.shape
    query = _blocks(query_BTKGH).transpose(0, 1, 3, 4, 2, 5)  # [B, N, K, G, C, H]
    keys, values = (_blocks(each).swapaxes(2, 3) for each in (keys_BTKH, values_BTKH))
    arrays = tuple(each.array for each in sight)
    N, C = query.shape[1], query.shape[4]
    out: Any = _attended(query.reshape(B, N, K, G * C, H), keys, values, arrays)
    out = out.reshape(B, N, K, G, C, H).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(B, N * C, K, G, H)[:, :T]


class _KeyBlock(NamedTuple):
    """Block of keys for every block of queries: its index, and the mask of each query."""

    at_BN: Int[Array, "B N"]
    seen_BNQD: Bool[Array, "B N 1 G C D"]


def _key_block(sight: Any, number: Array) -> _KeyBlock:
    keys_BNN, counts_BN, segments_BNC, prompts_BNC = sight
    _, N, C = segments_BNC.shape
    at_BN = jax.lax.dynamic_index_in_dim(keys_BNN, number, axis=2, keepdims=False)
    index_NC = jnp.arange(N * C, dtype=jnp.int32).reshape(N, C)
    theirs = jnp.take_along_axis(segments_BNC, at_BN[..., None], axis=1)
    their_index = at_BN[..., None] * C + jnp.arange(C, dtype=jnp.int32)
    seen = _seen(segments_BNC, prompts_BNC, index_NC, theirs, their_index)
    seen &= (number < counts_BN)[..., None, None]
    return _KeyBlock(at_BN, seen[:, :, None, None])


def _picked(blocks: Float[Array, "B N K D H"], at_BN: Array) -> Float[Array, "B N K D H"]:
    return jnp.take_along_axis(blocks, at_BN[:, :, None, None, None], axis=1)


def _scores(query: Array, keys: Array, block: _KeyBlock) -> Float[Array, "B N K Q D"]:
    scores = jnp.einsum("bnkqh,bnkdh->bnkqd", query, keys, preferred_element_type=jnp.float32)
    return _where(block, scores, LOWEST)


def _where(block: _KeyBlock, values: Float[Array, "B N K Q D"], other: float) -> Array:
    B, N, K, Q, D = values.shape
    C = block.seen_BNQD.shape[-2]
    apart = values.reshape(B, N, K, Q // C, C, D)
    return jnp.where(block.seen_BNQD, apart, other).reshape(values.shape)


@jax.custom_vjp
def _attended(query: Array, keys: Array, values: Array, sight: Any) -> Array:
    return _forward(query, keys, values, sight)[0]


def _forward(query: Array, keys: Array, values: Array, sight: Any) -> tuple[Array, Any]:
    # As many as the block of queries that sees most needs; `_key_block` masks them for the others.
    iterations = jnp.max(sight[1])

    def body(number: Array, carry: Any) -> Any:
        highest, total, sums = carry
        block = _key_block(sight, number)
        scores = _scores(query, _picked(keys, block.at_BN), block)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1))
        # A query that sees nothing yet has its scores at its maximum, where exp would give 1.
        weights = _where(block, jnp.exp(scores - higher[..., None]), 0.0)
        # What is summed so far was scaled by the old maximum.
        kept = jnp.exp(highest - higher)
        weighted = jnp.einsum(
            "bnkqd,bnkdh->bnkqh",
            weights.astype(values.dtype),
            _picked(values, block.at_BN),
            preferred_element_type=jnp.float32,
        )
        total = total * kept + jnp.sum(weights, axis=-1)
        return higher, total, sums * kept[..., None] + weighted

    shape = query.shape[:-1]
    start = (
        jnp.full(shape, LOWEST, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    highest, total, sums = jax.lax.fori_loop(0, iterations, body, start)
    # A query that sees nothing, such as padding, gets 0 and not 0 / 0.
    total = jnp.where(total > 0, total, 1.0)
    # The backward pass gets each weight back from the logarithm of the sum, and keeps no [T, T]
    # array.
    attended = (sums / total[..., None]).astype(query.dtype)
    return attended, (query, keys, values, sight, attended, highest + jnp.log(total))


def _backward(saved: Any, gradient: Array) -> tuple[Any, ...]:
    query, keys, values, sight, attended, normaliser = saved
    # The sum over all keys in the softmax's derivative: known before the loop, for it equals the
    # output times its gradient (D in the paper).
    inner = jnp.sum(gradient.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def body(number: Array, carry: Any) -> Any:
        by_query, by_keys, by_values = carry
        block = _key_block(sight, number)
        block_keys, block_values = (_picked(each, block.at_BN) for each in (keys, values))
        scores = _scores(query, block_keys, block)
        weights = _where(block, jnp.exp(scores - normaliser[..., None]), 0.0)
        by_weights = product("bnkqh,bnkdh->bnkqd", gradient, block_values)
        # The derivative of a softmax: a weight times how far its own gradient is above the weighted
        # mean.
        by_scores = (weights * (by_weights - inner[..., None])).astype(query.dtype)
        by_query += product("bnkqd,bnkdh->bnkqh", by_scores, block_keys)
        to_keys = product("bnkqd,bnkqh->bnkdh", by_scores, query)
        to_values = product("bnkqd,bnkqh->bnkdh", weights.astype(gradient.dtype), gradient)
        return by_query, _added(by_keys, block, to_keys), _added(by_values, block, to_values)

    # Summed over blocks in float32 and rounded once, below.
    start = tuple(jnp.zeros(each.shape, jnp.float32) for each in (query, keys, values))
    gradients = jax.lax.fori_loop(0, jnp.max(sight[1]), body, start)
    dtypes = (query.dtype, keys.dtype, values.dtype)
    return (*(f.astype(dtype) for f, dtype in zip(gradients, dtypes, strict=True)), None)


def _added(blocks: Array, block: _KeyBlock, gradient: Array) -> Array:
    """Add gradients to the blocks of keys; several blocks of queries may share one."""
    rows = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    return blocks.at[rows, block.at_BN].add(gradient)


_attended.defvjp(_forward, _backward)


class Rotation(NamedTuple):
    """Cosine and sine of every position and coordinate: [batch, position, head_size]."""

    cos: NamedArray
    sin: NamedArray


class TableRotary(RotaryEmbeddings):
    """A rotary module that is given a `Rotation` in the place of positions."""

    def __call__(self, q: NamedArray, position_ids: Rotation) -> NamedArray:  # type: ignore[override]
        """Rotate the halves of each head of `q`, as Levanter's modules do."""
        axis = q.resolve_axis("head_size")
        half = axis.size // 2
        turned = hax.concatenate(axis, (-q[axis, half:], q[axis, :half]))
        return q * position_ids.cos + turned * position_ids.sin


def with_rotation(
    layers: Any, positions: NamedArray, dtype: jnp.dtype
) -> tuple[Any, NamedArray | Rotation]:
    """Stacked layers that take a `Rotation` as their `pos_ids`, and that of `positions`.

    Both are returned as they are where the layers have no rotary module.
    """
    attention = layers.stacked.self_attn
    if attention.rot_embs is None:
        return layers, positions
    rotation = _rotation(attention.rot_embs, positions, attention.config.HeadSize, dtype)
    changed = dataclasses.replace(attention, rot_embs=TableRotary())
    stacked = dataclasses.replace(layers.stacked, self_attn=changed)
    return dataclasses.replace(layers, stacked=stacked), rotation


def _rotation(
    embeddings: RotaryEmbeddings, positions: NamedArray, head_size: hax.Axis, dtype: jnp.dtype
) -> Rotation:
    """The table: rotating the vector (1…1, 0…0) gives (cos, sin), whatever the variant is."""
    half = head_size.size // 2
    probe = hax.named((jnp.arange(head_size.size) < half).astype(dtype), (head_size,))
    table = embeddings(probe.broadcast_axis(positions.axes), positions)
    cos, sin = table[head_size, :half], table[head_size, half:]
    # Without the barrier XLA computes both again in every layer, next to what they are used for.
    arrays = jax.lax.optimization_barrier(
        tuple(hax.concatenate(head_size, (each, each)).array for each in (cos, sin))
    )
    axes = (*(axis for axis in cos.axes if axis.name != head_size.name), head_size)
    return Rotation(*(hax.named(each, axes) for each in arrays))


# ---------------------------------------------------------------- cuDNN's kernel

# Of cuDNN: head sizes are multiples of 8, and up to 128 on every GPU that has the kernel.
HEAD_SIZE_MULTIPLE, HEAD_SIZE_MAX = 8, 128

# Compute capability of the first GPUs with bfloat16, and with the kernel (Ampere).
CAPABILITY_MIN = 8.0

# Flags of XLA with which the kernel fails to compile: it adds up in any order.
DETERMINISTIC = ("--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_deterministic_ops")


class Pairs(NamedTuple):
    """Pairs of positions that see each other, causality apart; None where all of a row do."""

    seen: NamedArray | None


def takes_fused(head_size: int, dtype: jnp.dtype) -> bool:
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

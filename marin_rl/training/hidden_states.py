"""Hidden states of rows by Levanter's own layers, as far as positions exchange anything.

Rows that are packed, or share prompts, run with an attention that computes only the pairs in sight
(`attention`). Leaves out what each token does by itself at the end (`logprobs`).

Axes: B sequences, T positions, E embedding.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Float, Int
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.gemma import GemmaLMHeadModel

from marin_rl.training.adapters import Blocks, folded, lies_quantized
from marin_rl.training.attention import (
    FusedAttention,
    Pairs,
    Rotation,
    RowAttention,
    Sight,
    pairs_of,
    sight_of,
    takes_fused,
    with_rotation,
)

# More layers than this are scanned: see `_blocks` for what either way costs.
UNROLLED_LAYERS_MAX = 8

# Longest rows that plain attention computes on a GPU: of each head it keeps an array of positions
# by positions.
PLAIN_POSITIONS_MAX_GPU = 1024

Mask = AttentionMask | Sight | Pairs


def states_before_last_mlp(
    model: Any,
    token_ids_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    prompts_BT: Int[Array, "B T"] | None,
    *,
    alone: bool = False,
) -> Float[Array, "B T E"]:
    """Levanter's activations, up to where positions stop exchanging anything.

    `alone`: every row is one sequence, followed by padding.
    """
    batch = Axis("batch", token_ids_BT.shape[0])
    position = Axis("position", token_ids_BT.shape[1])
    named = partial(hax.named, axis=(batch, position))
    layers: Any = model.transformer.layers  # pyright: ignore[reportAttributeAccessIssue]
    # By segment as well as causal: neighbours in a packed row must not see one another.
    mask: Mask = AttentionMask.causal().with_segment_ids(named(segment_ids_BT))
    states = _embedded(model, named(token_ids_BT))
    # Positions within a sequence and not within the row: a packed completion is rotated as it was
    # when it was sampled.
    positions: NamedArray | Rotation = named(positions_BT)
    if (
        prompts_BT is None
        and jax.default_backend() == "gpu"
        and position.size > PLAIN_POSITIONS_MAX_GPU
    ):
        prompts_BT = segment_ids_BT
    if takes_fused(layers.stacked.self_attn.config.HeadSize.size, states.dtype):
        layers = _with_attention(layers, FusedAttention.of)
        mask = Pairs(None) if alone else pairs_of(segment_ids_BT, prompts_BT)
    elif prompts_BT is not None:
        layers = _with_attention(layers, RowAttention.of)
        mask = sight_of(segment_ids_BT, prompts_BT)
        layers, positions = with_rotation(layers, positions, states.dtype)
    *body, last = _blocks(layers, model.config.num_layers)
    for block in body:
        states = block(states, mask, pos_ids=positions)
    # Without the last MLP, which works on each token by itself: `_Tail` runs it on the mask only.
    seen = last.self_attn(last.input_layernorm(states), mask, pos_ids=positions)
    return (states + seen).rearrange((batch, position, model.Embed)).array


def is_plain(model: Any) -> bool:
    """True if Levanter's own attention would look at every pair of a row's positions."""
    attention = model.transformer.layers.stacked.self_attn
    return attention.config.attn_backend is AttentionBackend.VANILLA


def _with_attention(layers: Any, of: Callable[[Any], Any]) -> Any:
    stacked = dataclasses.replace(layers.stacked, self_attn=of(layers.stacked.self_attn))
    return dataclasses.replace(layers, stacked=stacked)


def _embedded(model: Any, token_ids: NamedArray) -> NamedArray:
    """Input of the first layer. Gemma scales by the root of the width, rounded as the states."""
    states = model.embeddings.embed(token_ids)
    if isinstance(model, GemmaLMHeadModel):
        states = states * jnp.sqrt(model.config.hidden_dim).astype(states.dtype)
    return states


def last_layer(layers: Any, count: int) -> Any:
    return Blocks(layers)[count - 1] if lies_quantized(layers) else layers.get_layer(count - 1)


def _blocks(layers: Any, count: int) -> list[Any]:
    """Blocks of layers to run one after the other; all but the last may be many layers in one scan.

    Against a scan, running few layers one after the other spares a CPU 8 %; a scan of many
    spares the compiler minutes.
    """
    if lies_quantized(layers):
        few = count <= UNROLLED_LAYERS_MAX and layers.gradient_checkpointing.disable
        blocks = Blocks(layers)
        first = [blocks[i] for i in range(count - 1)] if few else [folded(layers, count - 1)]
        return [*first, blocks[count - 1]]
    if count <= UNROLLED_LAYERS_MAX and layers.gradient_checkpointing.disable:
        return list(layers.unstacked())
    # To wait for the last layer is what makes it possible to skip most of it.
    last = layers.get_layer(count - 1)
    if count == 1:
        return [last]
    block = layers.Block
    stacked = hax.tree_util.tree_map(lambda leaf: leaf[block, : count - 1], layers.stacked)
    shorter = dataclasses.replace(layers, stacked=stacked, Block=block.resize(count - 1))
    return [partial(_fold, shorter), last]


def _fold(layers: Any, states: Any, mask: Mask, *, pos_ids: NamedArray | Rotation) -> Any:
    return layers.fold(states, mask=mask, key=None, pos_ids=pos_ids)

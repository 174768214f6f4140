"""A transformer with a cache, as pure functions.

Owns what the model computes: `prefill` of prompts into sequence slots, `extend` of slots by pieces
of prompts, and `decode_step` of one token in every slot. Leaves out where the arrays come from
(`weights`), the layout of the cache (`kv_cache`), what is done with logits (`sampling`) and which
sequence is in which slot (`scheduler`, `batch`).

Axes: S sequence slots, R prompts of one prefill, P positions of a prompt bucket, K key/value heads,
G query heads per key/value head, H head size, D width, V vocabulary.

Every slot is computed by the same instructions on the same shapes whatever the other slots do, and
a masked position adds an exact zero. So the numbers of a sequence depend on nothing but its own
tokens and the weights, as far as the library that multiplies matrices adds up every row in the same
order, whichever it is, and blocks of a prompt that slots share as those of one slot: that is proven
on the machine at hand (`batch_invariance`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32
from levanter.utils.activation import ActivationFunctionEnum

from marin_rl.inference.kv_cache import (
    MASKED,
    Cache,
    attend,
    attend_pieces,
    copy_in,
    write,
    write_at,
)
from marin_rl.inference.layer_matrices import LayerMatrix, additions
from marin_rl.inference.placement import SLOTS, TENSOR, constrain
from marin_rl.inference.weight_fusion import split_gate_up
from marin_rl.inference.weights import Decoder, DecoderSpec, Layer, Norm, Rotary

# Approximate tokens in one tile of prefill, and queries in one tile of its attention.
PREFILL_TILE_TOKENS = 256
PREFILL_TILE_ROWS = 4
QUERY_TILE = 256


def decode_step(
    spec: DecoderSpec,
    decoder: Decoder,
    rotary: Rotary,
    cache: Cache,
    tokens_S: Int32[Array, " S"],
    positions_S: Int32[Array, " S"],
    shared: Int32[Array, ""] | None = None,
    adapter_S: Int32[Array, " S"] | None = None,
) -> tuple[Float32[Array, "S V"], Cache]:
    """Logits after `tokens_S`, which stand at `positions_S` (< the cache's length), and the cache.

    A slot whose position is negative writes nothing; its logits mean nothing. Below position
    `shared` the caches of every SHARE slots side by side are alike; None, where that is never so,
    compiles to a smaller program. `adapter_S` is the row of each slot's adapter, None in an engine
    that has none.
    """
    x_SD = constrain(_embed(spec, decoder, tokens_S), SLOTS)
    cos_SH, sin_SH = rotary.cos[positions_S], rotary.sin[positions_S]
    # one bound for all slots: a block past it is skipped, and not masked
    longest = jnp.max(positions_S)
    written = []
    for layer, blocks in zip(decoder.all_layers(spec), cache, strict=True):
        normed = _rms_norm(spec, layer.norms.attention, x_SD)
        query, key, value = _project(spec, layer, normed, cos_SH, sin_SH, adapter_S)
        query = constrain(query, SLOTS, TENSOR)
        # written before it is read: a token attends to itself, too
        blocks = write(blocks, key, value, positions_S)
        written.append(blocks)
        attended = attend(query, blocks, positions_S, longest, shared)
        x_SD = constrain(_after_attention(spec, layer, x_SD, attended, adapter_S), SLOTS)
    return constrain(logits(spec, decoder, x_SD), SLOTS), tuple(written)


def _embed(spec: DecoderSpec, decoder: Decoder, tokens: Int32[Array, "..."]) -> Array:
    x = decoder.embedding[tokens]
    if decoder.embedding_norm is not None:
        x = _rms_norm(spec, decoder.embedding_norm, x)
    # in x's own dtype, as Gemma does: a float32 scale would widen everything after it
    return x if spec.embedding_scale == 1.0 else x * x.dtype.type(spec.embedding_scale)


def logits(spec: DecoderSpec, decoder: Decoder, x_SD: Float[Array, "S D"]) -> Float32[Array, "S V"]:
    """Logits of the token after each position, of whose last layer the hidden state is given."""
    x_SD = _rms_norm(spec, decoder.final_norm, x_SD)
    # float32 whatever the weights' dtype: logprobs are differences of sums over the vocabulary
    return jnp.einsum("...d,vd->...v", x_SD, decoder.head, preferred_element_type=jnp.float32)


def _rms_norm(spec: DecoderSpec, norm: Norm, x: Array) -> Array:
    # in float32, as the models were trained: a sum of bfloat16 squares keeps 8 bits
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + spec.norm_epsilon)
    out = wide * inverse
    # Gemma stores weight - 1 and multiplies before it rounds to x's dtype; Llama rounds first
    if spec.norm_offset:
        assert norm.weight is not None
        assert norm.bias is None
        return (out * (spec.norm_offset + norm.weight).astype(jnp.float32)).astype(x.dtype)
    out = out.astype(x.dtype)
    if norm.weight is not None:
        out = norm.weight * out
    return out if norm.bias is None else out + norm.bias


def _times(x: Array, matrix: Array | LayerMatrix, bias: Array | None = None) -> Array:
    """x [..., in] times matrix [out, in]; one kernel for every leading shape."""
    if isinstance(matrix, LayerMatrix):
        out = matrix.times(x)
    else:
        out = jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())))
    return out if bias is None else out + bias


def _adapted(
    layer: Layer, name: str, x: Array, outs: Sequence[Array], adapter_N: Array | None
) -> list[Array]:
    """Each part of a matrix's product with x, and what adapters add: the model's, an engine's."""
    adapted = list(outs)
    if layer.own is not None:
        for part, own in enumerate(getattr(layer.own, name)):
            if own is not None:
                adapted[part] += own.change(x).reshape(adapted[part].shape)
    if layer.adapters is not None and adapter_N is not None:
        more = additions(getattr(layer.adapters, name), x, adapter_N)
        adapted = [out + one.reshape(out.shape) for out, one in zip(adapted, more, strict=True)]
    return adapted


def _project(
    spec: DecoderSpec, layer: Layer, x: Array, cos: Array, sin: Array, adapter_N: Array | None
) -> tuple[Array, Array, Array]:
    """Query [..., K, G, H], scaled, and key and value [..., K, H], rotated to their positions."""
    query, key, value = _joined(spec, layer, x, adapter_N)
    if layer.norms.query is not None:
        query = _rms_norm(spec, layer.norms.query, query)
    if layer.norms.key is not None:
        key = _rms_norm(spec, layer.norms.key, key)
    query = _rotate(query, cos[..., None, None, :], sin[..., None, None, :])
    key = _rotate(key, cos[..., None, :], sin[..., None, :])
    # the query is scaled and not the scores: H numbers of each head instead of one per position
    return query * np.float32(spec.head_size**-0.5).astype(query.dtype), key, value


def _joined(
    spec: DecoderSpec, layer: Layer, x: Array, adapter_N: Array | None
) -> tuple[Array, Array, Array]:
    """Query [..., K, G, H], key and value [..., K, H] as projected."""
    K, G, H = spec.kv_heads, spec.queries_per_kv, spec.head_size
    # rows of `qkv` lie by key/value head: its G queries, its key, its value
    joined = _times(x, layer.qkv, layer.qkv_bias).reshape(*x.shape[:-1], K, G + 2, H)
    parts = joined[..., :G, :], joined[..., G, :], joined[..., G + 1, :]
    query, key, value = _adapted(layer, "qkv", x, parts, adapter_N)
    return query, key, value


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) on the two halves of the head."""
    # the table is float32 for exact angles; the rotation itself is in the model's dtype, as in
    # training
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def _after_attention(
    spec: DecoderSpec, layer: Layer, x: Array, attended: Array, adapter_N: Array | None
) -> Array:
    """Output projection, MLP, and their residuals."""
    out = _output(layer, attended, adapter_N)
    if layer.norms.after_attention is not None:
        out = _rms_norm(spec, layer.norms.after_attention, out)
    x = x + out
    normed = _rms_norm(spec, layer.norms.mlp, x)
    gate, up = _gate_and_up(layer, normed, adapter_N)
    activate = ActivationFunctionEnum(spec.activation).to_jax_fn()
    out = _down(layer, activate(gate) * up, adapter_N)
    if layer.norms.after_mlp is not None:
        out = _rms_norm(spec, layer.norms.after_mlp, out)
    return x + out


def _output(layer: Layer, attended: Array, adapter_N: Array | None) -> Array:
    out = _times(attended, layer.output, layer.output_bias)
    return _adapted(layer, "output", attended, [out], adapter_N)[0]


def _gate_and_up(layer: Layer, x: Array, adapter_N: Array | None) -> tuple[Array, Array]:
    parts = split_gate_up(_times(x, layer.gate_up, layer.gate_up_bias))
    gate, up = _adapted(layer, "gate_up", x, parts, adapter_N)
    return gate, up


def _down(layer: Layer, inner: Array, adapter_N: Array | None) -> Array:
    out = _times(inner, layer.down, layer.down_bias)
    return _adapted(layer, "down", inner, [out], adapter_N)[0]


def prefill(
    spec: DecoderSpec,
    decoder: Decoder,
    rotary: Rotary,
    cache: Cache,
    tokens_RP: Int32[Array, "R P"],
    rows: Int32[Array, ""],
    source_S: Int32[Array, " S"],
    adapter_R: Int32[Array, " R"] | None = None,
) -> Cache:
    """Run the first `rows` prompts and copy the cache of prompt `source_S[s]` into each slot s.

    `source_S` is R for slots that are left as they are. Prompts are padded at the end to the
    bucket P; what padding leaves in the cache is masked until a token overwrites it. Prompts go
    through in tiles of a fixed shape that depends on P alone, so the cost follows the number of
    prompts and the numbers do not.
    """
    R, P = tokens_RP.shape
    # of the bucket alone, and not of the prompts: another tile is another program with other last
    # bits
    tile = prefill_tile(R, P)
    K, H = spec.kv_heads, spec.head_size
    dtype = decoder.embedding.dtype
    buffer = tuple(
        (jnp.zeros((R, K, H, P), dtype), jnp.zeros((R, K, P, H), dtype)) for _ in range(spec.layers)
    )

    def body(index, buffer):
        start = index * tile
        tokens = jax.lax.dynamic_slice_in_dim(tokens_RP, start, tile)
        adapter = None
        if adapter_R is not None:
            adapter = jax.lax.dynamic_slice_in_dim(adapter_R, start, tile)
        _, pairs = _prefill_tile(spec, decoder, rotary, tokens, adapter)
        return jax.tree.map(
            lambda rows_R, tile_R: jax.lax.dynamic_update_slice_in_dim(rows_R, tile_R, start, 0),
            buffer,
            pairs,
        )

    # `rows` is traced: any number of prompts is one program, and empty tiles are not run
    buffer = jax.lax.fori_loop(0, -(-rows // tile), body, buffer)
    return copy_in(cache, buffer, source_S, R)


class Pieces(NamedTuple):
    """Pieces of prompts: T consecutive positions of one slot each, N of them in one step.

    Of a slot, earlier positions come in earlier pieces or steps. A negative position is padding.
    """

    tokens_ENT: Int32[Array | np.ndarray, "E N T"]
    positions_ENT: Int32[Array | np.ndarray, "E N T"]
    slot_EN: Int32[Array | np.ndarray, "E N"]
    steps: Int32[Array | np.ndarray | np.int32, ""]


def extend(
    spec: DecoderSpec,
    decoder: Decoder,
    rotary: Rotary,
    cache: Cache,
    pieces: Pieces,
    adapter_S: Int32[Array, " S"] | None = None,
) -> Cache:
    """Write the first `steps` steps of pieces into the cache, each slot after what it has there.

    The products have the shapes of `decode_step` where N x T is the number of slots, whose bits
    these positions then have: as if their tokens had been sampled. `adapter_S` is as there.
    """

    def body(index, cache):
        at = [jax.lax.dynamic_index_in_dim(jnp.asarray(a), index, 0, False) for a in pieces[:3]]
        return _extend_step(spec, decoder, rotary, cache, adapter_S, *at)

    return jax.lax.fori_loop(0, pieces.steps, body, cache)


def _extend_step(
    spec: DecoderSpec,
    decoder: Decoder,
    rotary: Rotary,
    cache: Cache,
    adapter_S: Array | None,
    tokens_NT: Array,
    positions_NT: Array,
    slot_N: Array,
) -> Cache:
    positions_M = positions_NT.reshape(-1)
    slot_M = jnp.repeat(slot_N, tokens_NT.shape[1])
    adapter_M = None if adapter_S is None else adapter_S[slot_M]
    x_MD = _embed(spec, decoder, tokens_NT.reshape(-1))
    cos_MH, sin_MH = rotary.cos[positions_M], rotary.sin[positions_M]
    written = []
    layers = decoder.all_layers(spec)
    for index, (layer, blocks) in enumerate(zip(layers, cache, strict=True)):
        normed = _rms_norm(spec, layer.norms.attention, x_MD)
        query, key, value = _project(spec, layer, normed, cos_MH, sin_MH, adapter_M)
        # all pieces before any attention: a later piece of a slot reads an earlier one of this step
        blocks = write_at(blocks, key, value, slot_M, positions_M)
        written.append(blocks)
        # the cache needs the last layer's keys and values, but not its output
        if index < spec.layers - 1:
            attended = attend_pieces(query, blocks, slot_N, positions_M)
            x_MD = _after_attention(spec, layer, x_MD, attended, adapter_M)
    return tuple(written)


def prefill_tile(rows: int, bucket: int) -> int:
    """Prompts that go through together: a divisor of `rows`, about PREFILL_TILE_TOKENS in all."""
    wanted = max(1, min(PREFILL_TILE_ROWS, PREFILL_TILE_TOKENS // bucket))
    return max(size for size in range(1, wanted + 1) if rows % size == 0)


def _prefill_tile(
    spec: DecoderSpec,
    decoder: Decoder,
    rotary: Rotary,
    tokens_RP: Array,
    adapter_R: Array | None,
    *,
    last_layer: bool = False,
) -> tuple[Array, tuple[tuple[Array, Array], ...]]:
    """Hidden states, and of each layer the keys [R, K, H, P] and values [R, K, P, H].

    The states are after the last layer if `last_layer`, else after the one before it.
    """
    P = tokens_RP.shape[1]
    cos, sin = rotary.cos[:P], rotary.sin[:P]
    x = _embed(spec, decoder, tokens_RP)
    pairs = []
    for index, layer in enumerate(decoder.all_layers(spec)):
        normed = _rms_norm(spec, layer.norms.attention, x)
        query, key, value = _project(spec, layer, normed, cos, sin, adapter_R)
        # as the cache has them, so that copying into slots moves no axis
        keys, values = jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2)
        pairs.append((keys, values))
        # a prefill needs the last layer's keys and values, but not its output
        if last_layer or index < spec.layers - 1:
            attended = _attend_causally(query, keys, values)
            x = _after_attention(spec, layer, x, attended, adapter_R)
    return x, tuple(pairs)


def prompt_products(
    spec: DecoderSpec,
    layer: Layer,
    x_RPD: Float[Array, "R P D"],
    adapter_R: Int32[Array, " R"] | None = None,
) -> tuple[Array, ...]:
    """Every product of `layer` on a tile of prompts, each of what the one before gave.

    For trials of whether a row's bits depend on the others: products are all that the shapes of a
    tile can change, and norms, rotations and activations between them are left out.
    """
    # biases are added after the sums whose order is tried
    layer = layer._replace(qkv_bias=None, output_bias=None, gate_up_bias=None, down_bias=None)
    query, key, value = _joined(spec, layer, x_RPD, adapter_R)
    attended = _attend_causally(query, jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2))
    out = _output(layer, attended, adapter_R)
    gate, up = _gate_and_up(layer, out, adapter_R)
    return query, key, value, attended, out, gate, up, _down(layer, gate * up, adapter_R)


def hidden_states(
    spec: DecoderSpec,
    decoder: Decoder,
    rotary: Rotary,
    tokens_RP: Int32[Array, "R P"],
    adapter_R: Int32[Array, " R"] | None = None,
) -> Float[Array, "R P D"]:
    """Hidden states at every position of whole prompts, the input of `logits`; no cache is kept."""
    return _prefill_tile(spec, decoder, rotary, tokens_RP, adapter_R, last_layer=True)[0]


def _attend_causally(query_RPKGH: Array, keys_RKHP: Array, values_RKPH: Array) -> Array:
    """Causal attention, [R, P, K*G*H], computed by tiles of queries."""
    R, P, K, G, H = query_RPKGH.shape
    # a divisor, so that all tiles have one shape
    size = P if P <= QUERY_TILE else math.gcd(P, QUERY_TILE)

    def attend(start):
        query = jax.lax.dynamic_slice_in_dim(query_RPKGH, start, size, 1)
        scores = jnp.einsum("rpkgh,rkht->rkgpt", query, keys_RKHP).astype(jnp.float32)
        visible = jnp.arange(P)[None, :] <= (start + jnp.arange(size))[:, None]
        # in float32, whatever is computed in: differences of scores decide, and bfloat16 has 8 bits
        # of them
        shares = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1)
        return jnp.einsum("rkgpt,rkth->rpkgh", shares.astype(query.dtype), values_RKPH)

    # tiles bound the scores, which would otherwise be P x P for each head
    if size == P:
        return attend(0).reshape(R, P, K * G * H)
    tiles = jax.lax.map(attend, jnp.arange(0, P, size))
    return jnp.moveaxis(tiles, 0, 1).reshape(R, P, K * G * H)

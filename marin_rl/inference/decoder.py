"""A transformer with a cache, as pure functions.

Owns `prefill` of prompts into sequence slots, `extend` of slots by pieces of prompts, and
`decode_step` of one token in every slot. Leaves out where the arrays come from (`weights`) and the
layout of the cache (`kv_cache`). Every slot is computed by the same instructions on the same shapes
whatever the other slots do, and a masked position adds an exact zero: the numbers of a sequence
depend on its own tokens and the weights alone, as far as `batch_invariance` proves it.

Axes: S sequence slots, R prompts of one prefill, P positions of a prompt bucket, K key/value heads,
G query heads per key/value head, H head size, D width, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from marin_rl.inference.kv_cache import (
    Block,
    Blocks,
    Cache,
    Limits,
    attend,
    attend_pieces,
    copy_in,
    write,
    write_at,
)
from marin_rl.inference.linear_layers import LayerMatrix, additions
from marin_rl.inference.placement import SLOTS, TENSOR, constrain
from marin_rl.inference.weights import Decoder, Ends, Layer, split_gate_up
from marin_rl.models.block import (
    Activation,
    Linears,
    Norms,
    Rotation,
    after_attention,
    after_mlp,
    capped,
    embedded,
    logits_of,
    normed,
    queries_keys_values,
    scaled,
    softmax,
    times,
)
from marin_rl.models.experts import ExpertWeights, pieces
from marin_rl.models.fused_attention import attend_fused, takes_fused
from marin_rl.models.spec import LayerKind, Spec

# Approximate tokens in one tile of prefill, and queries in one tile of its attention.
PREFILL_TILE_TOKENS = 256
PREFILL_TILE_ROWS = 4
QUERY_TILE = 256

# Tokens of a tile on an accelerator, whose products are then bound by arithmetic.
WHOLE_TILE_TOKENS = 2048


def decode_step(
    spec: Spec,
    decoder: Decoder,
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
    step = Step(positions_S, jnp.max(positions_S), shared, adapter_S)
    x_SD, turns = step_inputs(spec, decoder.ends, tokens_S, positions_S)
    written = []
    for index, (kind, blocks) in enumerate(zip(spec.kinds, cache, strict=True)):
        layer = decoder.layer(spec, index)
        x_SD, after = step_layer(spec, kind, layer, blocks, x_SD, turns, step)
        written.append(after)
    return constrain(logits(spec, decoder.ends, x_SD), SLOTS), tuple(written)


class Step(NamedTuple):
    """Inputs of a decode step that are the same for all layers; see `decode_step`.

    `longest` is the largest position, a bound for all slots: a block past it is skipped, and not
    masked.
    """

    positions_S: Int32[Array, " S"]
    longest: Int32[Array, ""]
    shared: Int32[Array, ""] | None = None
    adapter_S: Int32[Array, " S"] | None = None


# Cosines and sines at some positions, of each of `Spec.ropes`.
Turns = tuple[tuple[Array, Array], ...]


def step_inputs(spec: Spec, ends: Ends, tokens_S: Array, positions_S: Array) -> tuple[Array, Turns]:
    """Input of a step's first layer, and the rotations of all."""
    x_SD = embedded(spec, tokens_S, ends.embedding, positions_S, ends.positions)
    return constrain(x_SD, SLOTS), _turns(ends, positions_S)


def step_layer(
    spec: Spec,
    kind: LayerKind,
    layer: Layer,
    blocks: Blocks,
    x_SD: Array,
    turns: Turns,
    step: Step,
) -> tuple[Array, Blocks]:
    """A layer of a decode step: its output, and its cache with the step's keys and values."""
    linears = FusedLinears(spec, layer, step.adapter_S)
    query, key, value = _queries_keys_values(spec, kind, linears, x_SD, turns)
    query = constrain(query, SLOTS, TENSOR)
    # written before it is read: a token attends to itself, too
    blocks = write(blocks, key, value, step.positions_S)
    limits = Limits(kind.window, spec.cap, layer.sinks)
    attended = attend(query, blocks, step.positions_S, step.longest, step.shared, limits)
    x_SD = after_mlp(spec, linears, after_attention(spec, linears, x_SD, attended))
    return constrain(x_SD, SLOTS), blocks


def _turns(ends: Ends, at: Any) -> Turns:
    return tuple((cos[at], sin[at]) for cos, sin in ends.rotary)


def _queries_keys_values(
    spec: Spec, kind: LayerKind, linears: "FusedLinears", x: Array, turns: Turns
) -> tuple[Array, Array, Array]:
    turn = None if kind.rope is None else Rotation(*turns[spec.ropes.index(kind.rope)])
    query, key, value = queries_keys_values(spec, kind, linears, x, turn)
    return scaled(spec, query), key, value


def logits(spec: Spec, ends: Ends, x_SD: Float[Array, "S D"]) -> Float32[Array, "S V"]:
    """Logits of the token after each position, of whose last layer the hidden state is given."""
    return logits_of(spec, ends.head, normed(spec, ends.final_norm, x_SD))


def _times(x: Array, matrix: Array | LayerMatrix, bias: Array | None = None) -> Array:
    """x [..., in] times matrix [out, in]; one kernel for every leading shape."""
    if isinstance(matrix, LayerMatrix):
        out = matrix.times(x)
    else:
        out = times(x, matrix)
    return out if bias is None else out + bias


@dataclass(frozen=True, slots=True)
class FusedLinears(Linears):
    """A layer's products by its joined matrices, with what adapters add: its own, an engine's.

    `adapter` is the row of each sequence's adapter.
    """

    spec: Spec
    layer: Layer
    adapter: Array | None = None

    @property
    def norms(self) -> Norms:
        return self.layer.norms

    @property
    def activation(self) -> Activation | None:
        return self.layer.activation

    def qkv(self, x: Array) -> tuple[Array, Array, Array]:
        K, G, H = self.spec.kv_heads, self.spec.queries_per_kv, self.spec.head_size
        # rows of `qkv` lie by key/value head: its G queries, its key, its value
        joined = _times(x, self.layer.qkv, self.layer.qkv_bias)
        joined = joined.reshape(*x.shape[:-1], K, G + 2, H)
        parts = joined[..., :G, :], joined[..., G, :], joined[..., G + 1, :]
        query, key, value = self._adapted("qkv", x, parts)
        return query, key, value

    def output(self, attended: Array) -> Array:
        out = _times(attended, self.layer.output, self.layer.output_bias)
        return self._adapted("output", attended, [out])[0]

    def gate_and_up(self, x: Array) -> tuple[Array | None, Array]:
        joined = _times(x, self.layer.gate_up, self.layer.gate_up_bias)
        if not self.spec.gated:
            return None, self._adapted("gate_up", x, [joined])[0]
        gate, up = self._adapted("gate_up", x, split_gate_up(joined))
        return gate, up

    def down(self, x: Array) -> Array:
        bias = None if self.spec.experts else self.layer.down_bias
        return self._adapted("down", x, [_times(x, self.layer.down, bias)])[0]

    def router(self, x: Array) -> Array:
        router = self.layer.router
        assert router is not None
        weight, bias = router.float_weight.astype(jnp.float32), router.bias
        scores = _times(x.astype(jnp.float32), weight)
        return scores if bias is None else scores + bias.astype(jnp.float32)

    @property
    def pieces(self) -> int:
        return pieces(self.spec.mlp_width)

    @property
    def experts(self) -> ExpertWeights:
        shape = self.pieces, 2, self.spec.experts, self.spec.mlp_width // self.pieces
        joined, bias = self.layer.gate_up, self.layer.gate_up_bias
        gate, up = jnp.moveaxis(joined.reshape(*shape, -1), 1, 0)
        biases = (None, None) if bias is None else jnp.moveaxis(bias.reshape(shape), 1, 0)
        down = jnp.moveaxis(self.layer.down.reshape(-1, shape[0], *shape[2:]), 0, -1)
        return ExpertWeights(gate, up, down, *biases)

    @property
    def expert_bias(self) -> Array | None:
        return self.layer.down_bias if self.spec.experts else None

    @property
    def sinks(self) -> Array | None:
        return self.layer.sinks

    def _adapted(self, name: str, x: Array, outs: Sequence[Array]) -> list[Array]:
        adapted, layer = list(outs), self.layer
        if layer.own is not None:
            for part, own in enumerate(getattr(layer.own, name)):
                if own is not None:
                    adapted[part] += own.change(x).reshape(adapted[part].shape)
        bank = None if layer.adapters is None else getattr(layer.adapters, name)
        if bank is not None and self.adapter is not None:
            more = additions(bank, x, self.adapter)
            adapted = [out + one.reshape(out.shape) for out, one in zip(adapted, more, strict=True)]
        return adapted


def prefill(
    spec: Spec,
    decoder: Decoder,
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
    tile = prefill_tile(R, P, whole=not isinstance(cache[0][0], Block))
    K, H = spec.kv_heads, spec.head_size
    dtype = decoder.ends.embedding.dtype
    buffer = tuple(
        (jnp.zeros((R, K, H, P), dtype), jnp.zeros((R, K, P, H), dtype)) for _ in spec.kinds
    )

    def body(index, buffer):
        start = index * tile
        tokens = jax.lax.dynamic_slice_in_dim(tokens_RP, start, tile)
        adapter = None
        if adapter_R is not None:
            adapter = jax.lax.dynamic_slice_in_dim(adapter_R, start, tile)
        _, pairs = _prefill_tile(spec, decoder, tokens, adapter)
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
    spec: Spec,
    decoder: Decoder,
    cache: Cache,
    pieces: Pieces,
    adapter_S: Int32[Array, " S"] | None = None,
) -> Cache:
    """Write the first `steps` steps of pieces into the cache, each slot after what it has there.

    The products have the shapes of `decode_step` where N x T is the number of slots, whose bits
    these positions then have: as if their tokens had been sampled. `adapter_S` is as there.
    """

    def body(step, cache):
        tokens_NT, positions_NT, slot_N = (
            jax.lax.dynamic_index_in_dim(jnp.asarray(array), step, 0, False) for array in pieces[:3]
        )
        positions_M, ends = positions_NT.reshape(-1), decoder.ends
        slot_M = jnp.repeat(slot_N, tokens_NT.shape[1])
        adapter_M = None if adapter_S is None else adapter_S[slot_M]
        x_MD = embedded(spec, tokens_NT.reshape(-1), ends.embedding, positions_M, ends.positions)
        turns = _turns(ends, positions_M)
        written = []
        for index, (kind, blocks) in enumerate(zip(spec.kinds, cache, strict=True)):
            layer = decoder.layer(spec, index)
            linears = FusedLinears(spec, layer, adapter_M)
            query, key, value = _queries_keys_values(spec, kind, linears, x_MD, turns)
            # all before any attention: a piece reads earlier ones of its slot in the same step
            blocks = write_at(blocks, key, value, slot_M, positions_M)
            written.append(blocks)
            # of the last layer a cache needs keys and values, but not the output
            if index < spec.layers - 1:
                limits = Limits(kind.window, spec.cap, layer.sinks)
                attended = attend_pieces(query, blocks, slot_N, positions_M, limits)
                x_MD = after_mlp(spec, linears, after_attention(spec, linears, x_MD, attended))
        return tuple(written)

    return jax.lax.fori_loop(0, pieces.steps, body, cache)


def prefill_tile(rows: int, bucket: int, *, whole: bool = False) -> int:
    """Prompts that go through together: a divisor of `rows`, about PREFILL_TILE_TOKENS in all.

    On an accelerator, whose caches are `whole`, as many as keep it busy.
    """
    wanted = max(1, min(PREFILL_TILE_ROWS, PREFILL_TILE_TOKENS // bucket))
    if whole:
        wanted = min(rows, max(1, WHOLE_TILE_TOKENS // bucket))
    return max(size for size in range(1, wanted + 1) if rows % size == 0)


def _prefill_tile(
    spec: Spec,
    decoder: Decoder,
    tokens_RP: Array,
    adapter_R: Array | None,
    *,
    last_layer: bool = False,
) -> tuple[Array, tuple[tuple[Array, Array], ...]]:
    """Hidden states, and of each layer the keys [R, K, H, P] and values [R, K, P, H].

    The states are after the last layer if `last_layer`, which then leaves nothing for a cache, else
    after the one before it.
    """
    x, turns = prompt_inputs(spec, decoder.ends, tokens_RP)
    pairs = []
    for index, kind in enumerate(spec.kinds):
        output = last_layer or index < spec.layers - 1
        layer = decoder.layer(spec, index)
        x, pair = prompt_layer(spec, kind, layer, x, turns, adapter_R, with_output=output)
        pairs.append(pair)
    return x, () if last_layer else tuple(pairs)


def prompt_inputs(spec: Spec, ends: Ends, tokens_RP: Array) -> tuple[Array, Turns]:
    """Input of the first layer for whole prompts, and the rotations of all layers."""
    length = tokens_RP.shape[1]
    x_RPD = embedded(spec, tokens_RP, ends.embedding, jnp.arange(length), ends.positions)
    return x_RPD, _turns(ends, slice(length))


def prompt_layer(
    spec: Spec,
    kind: LayerKind,
    layer: Layer,
    x: Array,
    turns: Turns,
    adapter_R: Array | None = None,
    *,
    with_output: bool = True,
) -> tuple[Array, tuple[Array, Array]]:
    """A layer over whole prompts: its output, or its input, and keys and values for the cache."""
    linears = FusedLinears(spec, layer, adapter_R)
    query, key, value = _queries_keys_values(spec, kind, linears, x, turns)
    # as the cache has them, so that copying into slots moves no axis
    keys, values = jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2)
    if with_output:
        if takes_fused(spec, query.dtype):
            attended = attend_fused(query, key, value, None, kind.window)
            attended = attended.reshape(*x.shape[:2], -1)
        else:
            limits = Limits(kind.window, spec.cap, layer.sinks)
            attended = _attend_causally(query, keys, values, limits)
        x = after_mlp(spec, linears, after_attention(spec, linears, x, attended))
    return x, (keys, values)


def prompt_products(
    spec: Spec,
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
    linears = FusedLinears(spec, layer, adapter_R)
    query, key, value = linears.qkv(x_RPD)
    attended = _attend_causally(
        query, jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2), Limits(None, None, layer.sinks)
    )
    out = linears.output(attended)
    if spec.experts:
        return query, key, value, attended, out, after_mlp(spec, linears, out)
    gate, up = linears.gate_and_up(out)
    inner = up if gate is None else gate * up
    return query, key, value, attended, out, inner, linears.down(inner)


def hidden_states(
    spec: Spec,
    decoder: Decoder,
    tokens_RP: Int32[Array, "R P"],
    adapter_R: Int32[Array, " R"] | None = None,
) -> Float[Array, "R P D"]:
    """Hidden states at every position of whole prompts, the input of `logits`; no cache is kept."""
    return _prefill_tile(spec, decoder, tokens_RP, adapter_R, last_layer=True)[0]


def _attend_causally(
    query_RPKGH: Array, keys_RKHP: Array, values_RKPH: Array, limits: Limits
) -> Array:
    """Causal attention, [R, P, K*G*H], computed by tiles of queries."""
    R, P, K, G, H = query_RPKGH.shape
    # a divisor, so that all tiles have one shape
    size = P if P <= QUERY_TILE else math.gcd(P, QUERY_TILE)

    def attend(start):
        query = jax.lax.dynamic_slice_in_dim(query_RPKGH, start, size, 1)
        scores = jnp.einsum("rpkgh,rkht->rkgpt", query, keys_RKHP).astype(jnp.float32)
        visible = limits.visible(jnp.arange(P)[None, :], (start + jnp.arange(size))[:, None])
        # in float32, whatever is computed in: differences of scores decide, and bfloat16 has 8 bits
        # of them
        sinks = None if limits.sinks is None else limits.sinks[..., None, None]
        shares = softmax(capped(scores, limits.cap), visible, sinks)
        return jnp.einsum("rkgpt,rkth->rpkgh", shares.astype(query.dtype), values_RKPH)

    # tiles bound the scores, which would otherwise be P x P for each head
    if size == P:
        return attend(0).reshape(R, P, K * G * H)
    tiles = jax.lax.map(attend, jnp.arange(0, P, size))
    return jnp.moveaxis(tiles, 0, 1).reshape(R, P, K * G * H)

"""Rows cut over the mesh axis `context`: the order of their positions, and attention between them.

A row is cut into 2n pieces for n devices, of which device i has piece i and piece 2n - 1 - i: one
near the row's beginning, one near its end, so that causal attention is the same work for all. What
enters a step is in the order of the row; states of all tokens are in pieces, and scores come back
in the order of the row (`logprobs`). For attention a device gathers the keys and values of whole
rows; the functions of attention.py then go over what its own queries see.

Axes: B rows, T positions, n devices of the axis; others as in attention.py.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.lax import dynamic_slice_in_dim
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from marin_rl.errors import ConfigError
from marin_rl.models.axes import CONTEXT, ROWS, TENSOR, dividing, free_axes, on_each_device
from marin_rl.training.attention import (
    Limits,
    Sight,
    Tokens,
    as_positions,
    as_rows,
    backward_sums,
    block_size,
    blocks,
    by_head,
    forward,
    of_queries,
    places,
    sight_of_queries,
)

Place = TypeVar("Place", int, Array)


def context_size() -> int:
    """Number of devices that share each row, here in the program; 1 where none do."""
    return free_axes().get(CONTEXT, 1)


def piece_length(length: int, n: int) -> int:
    """Positions of a piece of rows of `length`. Raises ConfigError where it does not divide."""
    if length % (2 * n):
        raise ConfigError(
            f"mesh.context is {n}: expected rows of a multiple of {2 * n} tokens, for each is cut "
            f"into {2 * n} pieces, found {length}; set batching.row_tokens or "
            "batching.length_buckets to multiples, or a smaller mesh.context"
        )
    return length // (2 * n)


def pieces_of(device: Place, n: int) -> tuple[Place, Place]:
    return device, 2 * n - 1 - device


def in_pieces(array_BT: Shaped[Array, "B T *D"], n: int) -> Shaped[Array, "B T *D"]:
    """Positions in the order of the devices, each with its two pieces one behind the other."""
    if n == 1:
        return array_BT
    return _ordered(array_BT, [piece for device in range(n) for piece in pieces_of(device, n)])


def in_order(array_BT: Shaped[Array, "B T *D"], n: int) -> Shaped[Array, "B T *D"]:
    """Undo `in_pieces`."""
    if n == 1:
        return array_BT
    near = [2 * device for device in range(n)]
    return _ordered(array_BT, [*near, *(place + 1 for place in reversed(near))])


def _ordered(array_BT: Array, places: list[int]) -> Array:
    B, T, *others = array_BT.shape
    length = piece_length(T, len(places) // 2)
    pieces = array_BT.reshape(B, len(places), length, *others)
    return jnp.concatenate([pieces[:, place] for place in places], axis=1)


def places_of(index: Int[Array, "*N"], length: int, n: int) -> tuple[Array, Array]:
    """The device that has each position of rows of `length`, by their flat index, and its index
    among the device's own positions.
    """
    size = piece_length(length, n)
    row, position = index // length, index % length
    piece = position // size
    device = jnp.minimum(piece, 2 * n - 1 - piece)
    own = position % size + jnp.where(piece >= n, size, 0)
    return device, row * (length // n) + own


def on_device() -> Array:
    """The number of this device on the axis, within `axes.on_each_device`."""
    return jax.lax.axis_index(CONTEXT)


# ---------------------------------------------------------------- attention in blocks


def sights_of_pieces(whole: Tokens) -> Sight:
    """Visible keys of each device's two pieces of rows [B, T], on a leading axis of pieces.

    Of the mesh axis `context`: see context.py. Keys are those of whole rows on all of its devices.
    """
    T, n = whole.segments.shape[1], context_size()
    length, rows = piece_length(T, n), PartitionSpec(dividing(ROWS, len(whole.segments)))

    def own(whole: Tokens) -> Sight:
        keys = Tokens(*(blocks(array) for array in whole))
        size = min(block_size(T), length)

        def sight(piece: Array) -> Sight:
            start = piece * length
            tokens = Tokens(*(dynamic_slice_in_dim(array, start, length, 1) for array in whole))
            queries = Tokens(*(blocks(array, size) for array in tokens))
            return sight_of_queries(queries, keys, start + places(*queries.segments.shape[1:]))

        return jax.tree.map(lambda *two: jnp.stack(two), *map(sight, pieces_of(on_device(), n)))

    return on_each_device(own, rows, _sight_specs(rows))(whole)


def _sight_specs(rows: PartitionSpec) -> Sight:
    """Partition specs of `sights_of_pieces`."""
    of_rows: Any = PartitionSpec(CONTEXT, *rows)
    tokens, index = Tokens(*[of_rows] * 3), cast(Any, PartitionSpec(CONTEXT))
    return Sight(of_rows, of_rows, tokens, tokens, index)


def attend_pieces(
    query_BTKGH: Float[Array, "B T K G H"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    sights: Sight,
    window: int | None = None,
    cap: float | None = None,
    sinks_KG: Float[Array, "K G"] | None = None,
) -> Float[Array, "B T K G H"]:
    """`attend` of rows in pieces: each device gathers keys and values, for its own queries.

    Its two pieces are computed one after the other, each as far as it sees: equal work for all.
    """
    arrays = query_BTKGH, keys_BTKH, values_BTKH, sinks_KG
    attended: Any = _attended_pieces(Limits(window, cap), *arrays, sights)
    return attended


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended_pieces(limits: Limits, *arrays: Any) -> Array:
    return _forward_pieces(limits, *arrays)[0]


class _PieceSpecs(NamedTuple):
    """Partition specs of arrays [B, T, K, …], of sinks, and of arrays of each piece."""

    tokens: PartitionSpec
    sinks: PartitionSpec
    normaliser: PartitionSpec
    sights: Sight

    @classmethod
    def of(cls, rows: int, heads: int) -> "_PieceSpecs":
        over, by_head = dividing(ROWS, rows), dividing((TENSOR,), heads)
        return cls(
            PartitionSpec(over, CONTEXT, by_head),
            PartitionSpec(by_head),
            PartitionSpec(CONTEXT, over, None, by_head),
            _sight_specs(PartitionSpec(over)),
        )


class _Pieces:
    """A device's part of rows: its two pieces of queries, and keys and values of all."""

    def __init__(self, query: Array, keys: Array, values: Array, sinks: Array | None) -> None:
        self.n = jax.lax.axis_size(CONTEXT)
        T = keys.shape[1] * self.n
        self.size, length = block_size(T), piece_length(T, self.n)
        self.queries = self.halves(query)
        self.sinks = of_queries(sinks, self.queries[0])
        gather = partial(jax.lax.all_gather, axis_name=CONTEXT, axis=1, tiled=True)
        self.keys, self.values = (
            by_head(in_order(gather(each), self.n), self.size) for each in (keys, values)
        )
        self.shape = (len(query), length, *query.shape[2:])

    def halves(self, array_BTKGH: Array) -> list[Array]:
        halves = jnp.split(array_BTKGH, 2, axis=1)
        return [as_rows(half, min(self.size, half.shape[1])) for half in halves]

    def joined(self, halves: list[Array]) -> Array:
        return jnp.concatenate([as_positions(half, self.shape) for half in halves], axis=1)

    def scattered(self, gradient: Float[Array, "B M K D H"], dtype: Any) -> Array:
        """Sum of all devices' gradients of keys or values, at each its own pieces."""
        by_position = gradient.swapaxes(2, 3)
        B, _, _, *others = by_position.shape
        whole = by_position.reshape(B, -1, *others)[:, : 2 * self.n * self.shape[1]]
        spread = partial(jax.lax.psum_scatter, axis_name=CONTEXT, scatter_dimension=1, tiled=True)
        return spread(in_pieces(whole, self.n)).astype(dtype)


def _of_piece(arrays: Any, number: int) -> Any:
    return jax.tree.map(lambda array: array[number], arrays)


def _forward_pieces(
    limits: Limits, query: Array, keys: Array, values: Array, sinks: Array | None, sights: Sight
) -> tuple[Array, Any]:
    specs = _PieceSpecs.of(len(query), keys.shape[2])

    def own(sights: Sight, *arrays: Any) -> tuple[Array, Array]:
        device = _Pieces(*arrays)
        of_all = device.keys, device.values, device.sinks
        results = [
            forward(limits, piece, *of_all, _of_piece(sights, number))
            for number, piece in enumerate(device.queries)
        ]
        attended = device.joined([attended for attended, _ in results])
        return attended, jnp.stack([saved[-1] for _, saved in results])

    in_specs = specs.sights, *[specs.tokens] * 3, specs.sinks
    run = on_each_device(own, in_specs, (specs.tokens, specs.normaliser))
    # Keys and values are gathered again in the backward pass: kept are a device's own.
    attended, normaliser = run(sights, query, keys, values, sinks)
    return attended, (query, keys, values, sinks, sights, attended, normaliser)


def _backward_pieces(limits: Limits, saved: Any, gradient: Array) -> tuple[Any, ...]:
    query, keys, values, sinks, sights, attended, normaliser = saved
    specs = _PieceSpecs.of(len(query), keys.shape[2])

    def own(
        sights: Sight, normaliser: Array, attended: Array, gradient: Array, *arrays: Any
    ) -> tuple[Any, ...]:
        device = _Pieces(*arrays)
        of_all = device.keys, device.values, device.sinks
        pieces = zip(device.queries, device.halves(attended), device.halves(gradient), strict=True)
        sums = [
            backward_sums(
                limits,
                (piece, *of_all, _of_piece(sights, number), out, normaliser[number]),
                by_out,
            )
            for number, (piece, out, by_out) in enumerate(pieces)
        ]
        by_query = device.joined([by_query for by_query, *_ in sums]).astype(query.dtype)
        by_keys, by_values, by_sinks = (
            jax.tree.map(jnp.add, *two) for two in list(zip(*sums, strict=True))[1:]
        )
        if by_sinks is not None:
            by_sinks = jnp.sum(by_sinks.reshape(*arrays[3].shape, -1), axis=-1)
            over = (*dividing_rows, CONTEXT)
            by_sinks = jax.lax.psum(by_sinks, over).astype(arrays[3].dtype)
        by_both = device.scattered(by_keys, keys.dtype), device.scattered(by_values, values.dtype)
        return by_query, *by_both, by_sinks

    dividing_rows = dividing(ROWS, len(query))
    in_specs = specs.sights, specs.normaliser, *[specs.tokens] * 5, specs.sinks
    run = on_each_device(own, in_specs, (*[specs.tokens] * 3, specs.sinks))
    arrays = query, keys, values, sinks
    return (*run(sights, normaliser, attended, gradient, *arrays), None)


_attended_pieces.defvjp(_forward_pieces, _backward_pieces)


# ---------------------------------------------------------------- by a kernel


def attend_pieces_fused(
    query_BTKGH: Float[Array, "B T K G H"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    whole: Tokens,
    window: int | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T K G H"]:
    """`attend_fused` of rows in pieces: a device attends, of each of its two, to what precedes it.

    The kernel's own causal mask begins where keys do, so that a piece brings a mask of its own.
    """
    n = context_size()
    length = piece_length(keys_BTKH.shape[1], n)

    def attended(piece: int, query: Array, keys: Array, values: Array, whole: Tokens) -> Array:
        B, _, K, G, H = query.shape
        end = (piece + 1) * length
        own = Tokens(*(array[:, piece * length : end, None] for array in whole))
        theirs = Tokens(*(array[:, None, :end] for array in whole))
        seen = (own.segments == theirs.segments) | (own.prompts == theirs.segments)
        index = jnp.arange(end)
        seen &= index <= index[piece * length :, None]
        if window is not None:
            seen &= theirs.positions > own.positions - window
        out: Any = jax.nn.dot_product_attention(
            query.reshape(B, length, K * G, H),
            keys[:, :end],
            values[:, :end],
            mask=seen[:, None],
            scale=1.0,
            implementation=implementation,
        )
        return out.reshape(B, length, K, G, H)

    def of_device(number: int, query: Array, *arrays: Any) -> Array:
        halves = zip(pieces_of(number, n), jnp.split(query, 2, axis=1), strict=True)
        return jnp.concatenate([attended(piece, half, *arrays) for piece, half in halves], axis=1)

    def own(query: Array, keys: Array, values: Array, whole: Tokens) -> Array:
        gather = partial(jax.lax.all_gather, axis_name=CONTEXT, axis=1, tiled=True)
        keys, values = (in_order(gather(each), n) for each in (keys, values))
        # A program for each device, for the lengths of what pieces see differ.
        devices = [partial(of_device, number) for number in range(n)]
        return jax.lax.switch(on_device(), devices, query, keys, values, whole)

    specs = _PieceSpecs.of(len(query_BTKGH), keys_BTKH.shape[2])
    rows = PartitionSpec(dividing(ROWS, len(query_BTKGH)))
    run = on_each_device(own, (*[specs.tokens] * 3, rows), specs.tokens)
    return run(query_BTKGH, keys_BTKH, values_BTKH, whole)

"""Adapters of an engine: the bank of their arrays, which are loaded, and loading them.

The bank has room for a fixed number of adapters of a fixed rank. `AdapterLoads.load` prepares the
arrays on the caller's thread, and the engine's thread writes them between two chunks. An adapter
that is unloaded keeps its row until the last request that was submitted for it has ended. Leaves
out what a layer does with them (`linear_layers`) and files (`marin_rl.lora`).

Axes: L layers, r rank of an adapter, n adapters; `in` and `out` are those of a module's matrix.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.linear_layers import GatheredLowRank, LayerAdapters, LowRank
from marin_rl.inference.weights import Decoder
from marin_rl.lora.adapter import Adapter, a_name, b_name, module_name
from marin_rl.models.spec import Spec

# Adapters times rank up to which a decode step applies all of them to every sequence. Measured on
# one core (width 256, 64 slots): 6 to 13 % of a step for 32, 14 to 17 % for 64, where reading each
# sequence's own costs 27 to 49 %. Those that no sequence of a lane is on can be left out (`used`).
MASKED_RANKS_MAX = 64

Bank = tuple[LayerAdapters, ...]
Rows = Int32[np.ndarray, " _"]
Tree = TypeVar("Tree")

# Modules by the matrix that a layer joins them in, in the order of its parts.
MODULES: Mapping[str, Sequence[str]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BankSizes:
    """Capacity of the adapter bank: count and maximum rank; a count of 0 means no bank."""

    adapters: int = 0
    rank: int = 0

    @property
    def masked(self) -> bool:
        """True if a decode step applies all adapters to every sequence."""
        return self.adapters * self.rank <= MASKED_RANKS_MAX

    @property
    def few(self) -> int:
        return (self.adapters + 1) // 2


def bank_shapes(spec: Spec, sizes: BankSizes, dtype: jnp.dtype, *, masked: bool) -> Bank:
    kind = LowRank if masked else GatheredLowRank
    shape: Any = partial(jax.ShapeDtypeStruct, dtype=dtype)

    def low_rank(size: int, outs: Sequence[int]) -> LowRank:
        room = sizes.adapters, sizes.rank
        return kind(shape((len(outs), *room, size)), tuple(shape((*room, out)) for out in outs))

    keys = spec.kv_heads * spec.head_size
    queries = keys * spec.queries_per_kv
    halves = (spec.mlp_width,) * (2 if spec.gated else 1)
    layer = LayerAdapters(
        qkv=low_rank(spec.width, (queries, keys, keys)),
        output=low_rank(queries, (spec.width,)),
        # experts have no adapters
        gate_up=None if spec.experts else low_rank(spec.width, halves),
        down=None if spec.experts else low_rank(spec.mlp_width, (spec.width,)),
    )
    return (layer,) * spec.layers


def with_bank(decoder: Decoder, bank: Bank | None) -> Decoder:
    if bank is None:
        return decoder
    layers = zip(decoder.layers, bank, strict=True)
    return decoder._replace(layers=tuple(layer._replace(adapters=own) for layer, own in layers))


@jax.jit
def some_rows(bank: Tree, rows: Int32[Array, " m"]) -> Tree:
    """Return a bank of these rows only, counted from 1."""
    # the axis is that of `write_row`
    return jax.tree.map(lambda all: jnp.take(all, rows - 1, axis=all.ndim - 3, mode="clip"), bank)


@partial(jax.jit, donate_argnames="bank")
def write_row(bank: Bank, rows: Bank, row: Int32[Array, ""]) -> Bank:
    """The bank with the adapter of `rows` in row `row`, counted from 1; written in place."""

    def put(all: Array, one: Array) -> Array:
        # adapters are on axis 1 of `a`, behind the parts, and on axis 0 of each `b`
        return jax.lax.dynamic_update_slice_in_dim(all, one, row - 1, all.ndim - 3)

    return jax.tree.map(put, bank, rows)


class _Half(NamedTuple):
    """Copies of `rows` of the bank, as it was when its arrays were `of`."""

    of: Bank
    rows: Rows
    bank: Bank


class AdapterBank:
    """The arrays of an engine's bank, at first all zeros: adapters that add nothing.

    `put` commits arrays to the engine's devices.
    """

    def __init__(self, shapes: Bank, put: Callable[[Any], Any]) -> None:
        self._shapes, self._put = shapes, put
        self._halves: dict[int, _Half] = {}
        # NumPy's: JAX would compile a program for each shape
        self.arrays: Bank = put(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))

    def rows(self, adapter: Adapter) -> Bank:
        """An adapter's arrays on the device, in the layout of a row. From any thread."""
        return self._put(rows_of(self._shapes, adapter))

    def write(self, row: int, rows: Bank) -> None:
        # waited for, so that the time that decoding loses to a load is measured where it is lost
        self.arrays = jax.block_until_ready(write_row(self.arrays, rows, np.int32(row)))
        # copies of the old arrays: the rows that were written may be in them
        self._halves.clear()

    def used(self, lane: int, sizes: BankSizes, row_S: Rows) -> tuple[Bank, Rows]:
        """A bank with the rows that a lane's slots use, and where each slot's own is in it.

        Half of the bank, kept for the lane's next chunk, where that is room enough, else all of it.
        """
        wanted = np.unique(row_S[row_S > 0])
        # half of a bank of one is all of it
        if len(wanted) > sizes.few or sizes.few == sizes.adapters:
            return self.arrays, row_S
        half = self._halves.get(lane)
        if half is None or half.of is not self.arrays or not np.isin(wanted, half.rows).all():
            # filled up with other adapters, so that a lane whose requests change needs a new copy
            # less often
            others = np.setdiff1d(np.arange(1, sizes.adapters + 1), wanted)
            rows = np.concatenate([wanted, others]).astype(np.int32)[: sizes.few]
            half = _Half(self.arrays, rows, some_rows(self.arrays, rows))
            self._halves[lane] = half
        # by row of the whole bank; 0 stays 0, which is no adapter
        places = np.zeros(sizes.adapters + 1, np.int32)
        places[half.rows] = np.arange(1, sizes.few + 1)
        return half.bank, places[row_S]


def rows_of(shapes: Bank, adapter: Adapter) -> Bank:
    """An adapter's arrays as a bank of one, padded with zeros to the rank of the bank."""
    paths = {module_name(path): path for path in adapter.modules}
    arrays = {name: np.asarray(array) for name, array in adapter.arrays.items()}
    on_host = replace(adapter, arrays=arrays)

    def of_layer(layer: int, matrices: LayerAdapters) -> LayerAdapters:
        rows: dict[str, Any] = {
            name: None if shape is None else _rows(name, shape, paths, on_host, layer)
            for name, shape in matrices._asdict().items()
        }
        return LayerAdapters(**rows)

    return tuple(of_layer(layer, matrices) for layer, matrices in enumerate(shapes))


def _rows(
    name: str, shape: LowRank, paths: Mapping[str, str], adapter: Adapter, layer: int
) -> LowRank:
    """Rows of one matrix as its `shape`; `paths` are those of the modules that are adapted."""
    parts, _, rank, size = shape.a.shape
    a = np.zeros((parts, 1, rank, size), np.float32)
    b = [np.zeros((1, *part.shape[1:]), np.float32) for part in shape.b]
    # of gate and up a plain MLP has the latter alone
    for part, module in enumerate(MODULES[name][-parts:]):
        if (path := paths.get(module)) is None:
            continue
        # what lies beyond its own rank stays zero, and adds nothing
        own, scale = adapter.modules[path].rank, np.float32(adapter.modules[path].scale)
        a[part, 0, :own] = adapter.arrays[a_name(path)][layer].reshape(own, size)
        # the scale goes in here, in float32, once for all steps
        b[part][0, :own] = (scale * adapter.arrays[b_name(path)][layer].reshape(-1, own)).T
    cast: Any = lambda array: array.astype(shape.a.dtype)
    return type(shape)(cast(a), tuple(map(cast, b)))


class AdapterGone(InputError):
    """The adapter that a request names is not loaded, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedAdapter:
    """One load of an adapter: `number` is never used for another, `row` is its row of the bank.

    `name` is what answers are said to be from, with `weight_version` and `parameters_digest`, which
    stands for base and adapter together.
    """

    number: int
    row: int
    rank: int
    name: str
    weight_version: int
    parameters_digest: str


@dataclass(slots=True)
class AdapterStats:
    """Counts since the start; `write_s` are the seconds that decoding waited for all loads."""

    loads: int = 0
    unloads: int = 0
    write_s: float = 0.0


class AdapterLoads:
    """Adapters of one engine, whose lock `changed` guards them.

    `in_use` gives the adapters that requests run on or wait for, unloaded ones too.
    """

    def __init__(
        self,
        bank: AdapterBank | None,
        sizes: BankSizes,
        changed: threading.Condition,
        in_use: Callable[[], set[LoadedAdapter]],
    ) -> None:
        self.stats, self.sizes = AdapterStats(), sizes
        self._bank = bank
        self._changed, self.in_use = changed, in_use
        self._rows: list[LoadedAdapter | None] = [None] * sizes.adapters
        self._unloaded: set[int] = set()
        self._successors: dict[int, LoadedAdapter] = {}
        self._numbers = 0  # number of the last load; 0 is the base model
        self._writes: list[tuple[LoadedAdapter, Bank, Future[LoadedAdapter]]] = []
        self._closed = False

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """Adapters that requests may name, in the order of their rows."""
        with self._changed:
            return [one for one in self._rows if one and one.number not in self._unloaded]

    def get(self, number: int) -> LoadedAdapter | None:
        """The adapter of a load; None for 0, the base model. Under the lock. Raises AdapterGone."""
        return None if number == 0 else self._loaded_as(number)

    def _loaded_as(self, number: int) -> LoadedAdapter:
        """The adapter of a load, or what was loaded in its place. Raises AdapterGone."""
        for one in self.loaded:
            if one.number == number:
                return one
        if number in self._successors:
            return self._loaded_as(self._successors[number].number)
        numbers = ", ".join(str(one.number) for one in self.loaded) or "none"
        raise AdapterGone(
            f"expected 0, the base model, or the number of an adapter that is loaded ({numbers}), "
            f"found {number}"
        )

    def load(
        self,
        adapter: Adapter,
        *,
        name: str,
        weight_version: int,
        parameters_digest: str,
        in_place_of: int = 0,
        row: int = 0,
    ) -> LoadedAdapter:
        """Load an adapter between two chunks; returns when requests can be sampled with it.

        The load `in_place_of` is unloaded at the same time; `row` is the row that it gets if that
        is free. Raises InputError beyond the engine's room, or for numbers that are not finite in
        its dtype, and InferenceError once the engine is closed. Not for the engine's own thread,
        which could never return.
        """
        if self._bank is None:
            raise InputError(
                "the engine has no room for adapters: expected inference.engine.adapters_max of at "
                f"least 1, found {self.sizes.adapters}; start it with room for them"
            )
        new = LoadedAdapter(
            number=0,
            row=row,
            rank=adapter.rank_max,
            name=name,
            weight_version=weight_version,
            parameters_digest=parameters_digest,
        )
        # before `rows`, which could not place a rank beyond the bank's
        if new.rank > self.sizes.rank:
            raise InputError(
                f"expected an adapter of rank {self.sizes.rank} at most "
                f"(inference.engine.adapter_rank_max), found rank {new.rank} in {name}"
            )
        # outside of the lock: moving arrays to the device must not hold up decoding
        rows = self._bank.rows(adapter)
        leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(rows)]
        # rounding to the engine's dtype may give infinities
        if not all(np.isfinite(leaf).all() for leaf in leaves):
            raise InputError(
                f"expected finite numbers in the adapter {name}, found infinities or NaN in the "
                f"dtype of the engine ({jax.tree.leaves(rows)[0].dtype}): it was damaged, or "
                "trained to such numbers"
            )
        done: Future[LoadedAdapter] = Future()
        with self._changed:
            if self._closed:
                raise InferenceError("the engine is closed: it takes no adapters any more")
            # its row is taken at once: two loads at a time never get the same one
            added = self._add(new, in_place_of)
            # written by the engine's thread: the programs that it runs have the bank's arrays as
            # arguments
            self._writes.append((added, rows, done))
            self._changed.notify_all()
        # after the lock is released, which the write takes
        return done.result()

    def _add(self, adapter: LoadedAdapter, in_place_of: int) -> LoadedAdapter:
        """Give an adapter a number and a row: its own, if that is free, else the first free one.

        Raises InputError where every row is taken: nothing is ever evicted.
        """
        busy, free = self.in_use(), list[int]()
        for row, one in enumerate(self._rows, start=1):
            replaced = one is not None and one.number in (*self._unloaded, in_place_of)
            # requests that began before the unload still read its row
            if one is None or (replaced and one not in busy):
                free.append(row)
        if not free:
            waiting = len(self._rows) - len(self.loaded)
            raise InputError(
                f"expected at most {self.sizes.adapters} adapters (inference.engine.adapters_max), "
                f"found {len(self.loaded)} loaded and {waiting} unloaded, on which requests still "
                f"run: unload one before {adapter.name}, or wait for their end"
            )
        row = adapter.row if adapter.row in free else free[0]
        self._numbers += 1
        added = replace(adapter, number=self._numbers, row=row)
        before = self._rows[row - 1]
        if before is not None:
            # its row is another's now: the set would grow with every load
            self._unloaded.discard(before.number)
        if in_place_of:
            # one step back is enough: a request names the load that it saw last, a moment ago
            self._successors = {in_place_of: added}
            if before is None or before.number != in_place_of:
                self._unloaded.add(in_place_of)
        self._rows[row - 1] = added
        return added

    def unload(self, number: int) -> None:
        """Refuse further requests on an adapter; submitted ones end on it. Raises AdapterGone."""
        with self._changed:
            self._unloaded.add(self._loaded_as(number).number)
            self.stats.unloads += 1

    def write(self) -> None:
        """Write what waits to be loaded. On the engine's thread, between chunks, under the lock."""
        while self._writes:
            adapter, rows, done = self._writes.pop(0)
            assert self._bank is not None
            started = time.monotonic()
            try:
                self._bank.write(adapter.row, rows)
            except Exception as error:  # noqa: BLE001 - the caller of `load` gets it
                # its row still holds the adapter before it, so no request may name it
                with suppress(AdapterGone):  # it may have been unloaded before it was written
                    self._unloaded.add(self._loaded_as(adapter.number).number)
                done.set_exception(error)
                continue
            self.stats.write_s += time.monotonic() - started
            self.stats.loads += 1
            done.set_result(adapter)

    def close(self) -> None:
        """Fail what waits to be loaded. Under the lock."""
        self._closed = True
        # their callers wait for these futures without a time limit
        for _, _, done in self._writes:
            done.set_exception(InferenceError("the engine was closed"))
        self._writes.clear()

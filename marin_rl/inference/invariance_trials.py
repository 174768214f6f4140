"""Trials of batch invariance: the engine's own programs, run twice where bits must be equal.

Owns what is tried, on random numbers. Leaves out what follows from the outcome and where it is
recorded (`batch_invariance`).

Axes: S slots of a lane, R prompts of a prefill tile, P positions of a prompt bucket.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from marin_rl.cpu_streams import Lanes
from marin_rl.inference import decoder
from marin_rl.inference.adapters import BankSizes, some_rows
from marin_rl.inference.batch import RunningBatch
from marin_rl.inference.batch_invariance import Invariance, Shapes
from marin_rl.inference.generation import TOP_LOGPROBS_MAX
from marin_rl.inference.kv_cache import Cache, cache_length
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.logprobs import ReportRequest
from marin_rl.inference.low_rank import LowRank
from marin_rl.inference.pieces import Extension, packed, piece_size
from marin_rl.inference.programs import ChunkInputs, Limits, Sampled, decode_chunk, extend_slots
from marin_rl.inference.weights import Decoder, Rotary

# Steps of a trial: the second one reads what the first one wrote.
STEPS = 3

# Steps whose tokens are computed once more as pieces: more than one piece of each slot.
CONTINUED_STEPS = 12


class Prover:
    """Trials of the engine's own programs, on a cache of random numbers that lives as long as one.

    `put` commits arrays to the engine's device. Weights may be random: which order sums are taken
    in depends on shapes alone, and weights of zero would show nothing.
    """

    def __init__(
        self,
        shapes: Shapes,
        fused: Decoder,
        rotary: Rotary,
        buckets: Sequence[int],
        put: Callable[[Any], Any],
    ) -> None:
        self._shapes = shapes
        self._fused, self._rotary, self._put = fused, rotary, put
        self._buckets = buckets
        self._length = cache_length(shapes.cache)
        self._rng = np.random.default_rng(0)
        S, V = shapes.slots, shapes.spec.vocabulary
        rows = ExtraRows(Lanes(1, S), self._length, V, put)
        request = ReportRequest(np.ones(S, np.bool_), np.full(S, TOP_LOGPROBS_MAX, np.int32))
        self._extras = rows.on_device(0)._replace(request=put(request))
        adapters = bool(shapes.adapters)
        self._inputs = RunningBatch(S, V, None, rows, has_adapters=adapters).inputs
        self._steps = min(STEPS, shapes.chunk_steps)
        shape = lambda leaf: (1, *leaf.shape[1:])
        self._columns = jax.tree.map(lambda leaf: self._rng.normal(size=shape(leaf)), shapes.cache)

    def prove(self) -> Invariance:
        """Run every trial."""
        wanted, size = self._shapes.prefix_cache, piece_size(self._shapes.slots)
        continued = wanted and self._continued_alike(size)
        adapters = self._shapes.adapters > 0 and self._adapters_alike()
        return Invariance(
            slots=self._slots_alike(),
            prompts=self._prompts_alike(),
            shared=self._shapes.sharing and self._shared_alike(),
            continued=continued,
            continued_singly=wanted and not continued and self._continued_alike(1),
            adapters=adapters,
            few_adapters=adapters and self._few_alike(),
        )

    def _slots_alike(self) -> bool:
        """One sequence in all slots; then several, of which each is also computed alone.

        The one is on adapter 1, the several on one each; those that are not computed are on none.
        """
        # near the end of the cache, so that every block of it is read
        S, last = self._shapes.slots, self._length - self._steps - 1
        same = self._run(np.full(S, 1), np.full(S, last), adapter_S=np.full(S, 1))
        # one sequence everywhere first: where already equal rows differ, nothing else needs trying
        if not all(_equal(slot, same[0]) for slot in same):
            return False
        positions_S = last - np.arange(S) % 3
        positions_S[S // 2] = min(5, last)  # blocks past its end are read for the others alone
        tokens_S = self._tokens(S)
        rows_S = self._rows(S)
        together = self._run(tokens_S, positions_S, adapter_S=rows_S)
        alone = sorted({0, S // 2, S - 1})
        return all(
            _equal(
                self._run(
                    tokens_S,
                    positions_S,
                    only=slot,
                    adapter_S=np.where(np.arange(S) == slot, rows_S, 0),
                )[slot],
                together[slot],
            )
            for slot in alone
        )

    def _adapters_alike(self) -> bool:
        """One sequence on the first row of the bank and on the last, others in the other rows."""
        S, last = self._shapes.slots, self._length - self._steps - 1
        for row in {1, self._shapes.adapters}:
            same = partial(self._run, np.full(S, 1), np.full(S, last), adapter_S=np.full(S, row))
            if not _equal(same(), same(fused=self._with_others_than(row))):
                return False
        return True

    def _few_alike(self) -> bool:
        """Sequences on the last rows of the bank, with those rows alone and with all.

        Not tried where each sequence reads its own adapter: that costs the same in any bank.
        """
        bank = self._fused.layers[0].adapters
        if bank is None or not isinstance(bank.down, LowRank):
            return False
        S, last, total = self._shapes.slots, self._length - self._steps - 1, self._shapes.adapters
        few = BankSizes(adapters=total).few
        tokens_S, positions_S, places_S = self._tokens(S), np.full(S, last), np.arange(S) % few
        rows = np.arange(total - few + 1, total + 1, dtype=np.int32)
        whole = self._run(tokens_S, positions_S, adapter_S=rows[places_S])
        fused = self._with_adapters(lambda adapters: some_rows(adapters, rows))
        half = self._run(tokens_S, positions_S, adapter_S=1 + places_S, fused=fused)
        return _equal(half, whole)

    def _with_others_than(self, row: int) -> Decoder:
        """The weights with twice the numbers in all rows of the bank but this one."""

        def changed(leaf: Any) -> Any:
            array = np.array(leaf)
            # adapters are on axis 1 behind the parts, else on axis 0
            by_adapter = np.moveaxis(array, array.ndim - 3, 0)
            # doubled, which is exact: a row that depended on the others would show in its bits
            by_adapter[np.arange(len(by_adapter)) != row - 1] *= array.dtype.type(2)
            return self._put(array)

        return self._with_adapters(lambda adapters: jax.tree.map(changed, adapters))

    def _with_adapters(self, change: Callable[[Any], Any]) -> Decoder:
        """The weights with every layer's part of the bank changed."""
        layers = (each._replace(adapters=change(each.adapters)) for each in self._fused.layers)
        return self._fused._replace(layers=tuple(layers))

    def _rows(self, count: int, first: int = 0) -> np.ndarray:
        """Rows of the bank for `count` sequences, in turn, from `first` on, counted from 0."""
        return 1 + (first + np.arange(count)) % max(1, self._shapes.adapters)

    def _shared_alike(self) -> bool:
        """The same steps with every whole block shared, and with none."""
        S, last = self._shapes.slots, self._length - self._steps - 1
        tokens_S, positions_S = self._tokens(S), last - np.arange(S) % 3
        apart = self._run(tokens_S, positions_S)
        shared = self._run(tokens_S, positions_S, shared=int(positions_S.min()))
        return _equal(apart, shared)

    def _prompts_alike(self) -> bool:
        """For each tile of several prompts: one in all rows, then among others.

        Only products are tried, as all else works on one position at a time.
        """
        products = jax.jit(decoder.prompt_products, static_argnums=0)
        first = self._fused.all_layers(self._shapes.spec)[0]
        for bucket in self._buckets:
            tile = decoder.prefill_tile(self._shapes.prefill_rows, bucket)
            if tile == 1:
                continue
            shape = tile, bucket, self._shapes.spec.width
            others_RPD = self._rng.normal(size=shape).astype(self._shapes.dtype)
            same_RPD = np.repeat(others_RPD[-1:], tile, axis=0)
            # the last one is on adapter 1 both times
            rows_R = self._rows(tile)[::-1]
            same, others = (
                products(self._shapes.spec, first, self._put(x_RPD), row_R)
                for x_RPD, row_R in (
                    (same_RPD, self._adapter(np.full(tile, 1))),
                    (others_RPD, self._adapter(rows_R)),
                )
            )
            for alike, mixed in zip(map(np.asarray, same), map(np.asarray, others), strict=True):
                if not (_equal(alike, alike[:1].repeat(tile, 0)) and _equal(mixed[-1], alike[0])):
                    return False
        return True

    def _continued_alike(self, size: int) -> bool:
        """Tokens that were decoded, then as pieces of prompts; a long prompt, cut in two ways."""
        S, steps = self._shapes.slots, min(CONTINUED_STEPS, self._shapes.chunk_steps)
        last = self._length - steps - 1
        positions_S = np.linspace(0, last, S).astype(np.int32)
        tokens_S = self._tokens(S)
        decoded, sampled = self._decode(
            tokens_S, positions_S, np.full(S, True), steps=steps, adapter_S=self._rows(S)
        )
        tokens_CS = np.concatenate([tokens_S[None], np.asarray(sampled.tokens_CS)[: steps - 1]])
        again = [Extension(slot, int(positions_S[slot]), tokens_CS[:, slot]) for slot in range(S)]
        # more than two steps take, so that another cut moves pieces from step to step
        prompt = [Extension(S // 2, 0, self._tokens(min(self._length, 2 * S + 3)))]
        return _equal(self._extend(again, size, size), decoded) and _equal(
            self._extend(prompt, size, size), self._extend(prompt, size, max(1, size // 2 - 1))
        )

    def _extend(self, extensions: Sequence[Extension], size: int, first: int) -> Cache:
        """The cache after these extensions, whose first pieces have `first` positions."""
        shapes, cache = self._shapes, self._cache()
        rows_S = self._adapter(self._rows(shapes.slots))
        for pieces in packed(extensions, shapes.slots, size, first):
            cache = extend_slots(shapes.spec, self._fused, self._rotary, cache, pieces, rows_S)
        return cache

    def _adapter(self, rows: np.ndarray | None) -> np.ndarray | None:
        """Rows of the bank as programs take them: None in an engine without adapters."""
        if not self._shapes.adapters:
            return None
        return (np.zeros(self._shapes.slots) if rows is None else rows).astype(np.int32)

    def _tokens(self, count: int) -> np.ndarray:
        return self._rng.integers(0, self._shapes.spec.vocabulary, count).astype(np.int32)

    def _run(
        self,
        tokens_S: np.ndarray,
        positions_S: np.ndarray,
        *,
        shared: int = 0,
        only: int | None = None,
        adapter_S: np.ndarray | None = None,
        fused: Decoder | None = None,
    ) -> Sequence[list[np.ndarray]]:
        """Results of a chunk by slot: tokens, logprobs, reports, and the cache that it left.

        All slots take part, or `only` one, with the weights `fused` if they are given.
        """
        shapes = self._shapes
        active_S = np.ones(shapes.slots, np.bool_)
        if only is not None:
            active_S = np.arange(shapes.slots) == only
        cache, sampled = self._decode(
            tokens_S,
            positions_S,
            active_S,
            steps=self._steps,
            shared=shared,
            adapter_S=adapter_S,
            fused=fused,
        )
        by_step = [sampled.tokens_CS, sampled.logprobs_CS, *sampled.reports]
        by_row = [np.moveaxis(np.asarray(array)[: self._steps], 1, 0) for array in by_step]
        # the last layer depends on all others: its first block and its last
        blocks = [np.asarray(array) for block in (cache[-1][0], cache[-1][-1]) for array in block]
        return [[array[row] for array in (*by_row, *blocks)] for row in range(shapes.slots)]

    def _decode(
        self,
        tokens_S: np.ndarray,
        positions_S: np.ndarray,
        active_S: np.ndarray,
        *,
        steps: int,
        shared: int = 0,
        adapter_S: np.ndarray | None = None,
        fused: Decoder | None = None,
    ) -> tuple[Cache, Sampled]:
        """The cache after a chunk of `steps` steps, and what it sampled."""
        shapes = self._shapes
        inputs = self._inputs._replace(
            token_S=tokens_S.astype(np.int32),
            position_S=positions_S.astype(np.int32),
            remaining_S=np.where(active_S, steps, 0).astype(np.int32),
            adapter_S=self._adapter(adapter_S),
        )
        limits = Limits(np.int32(steps), np.int32(0), np.int32(shared))
        return decode_chunk(
            self._fused if fused is None else fused,
            self._rotary,
            self._cache(),
            ChunkInputs(inputs, self._extras, limits),
            spec=shapes.spec,
            steps=shapes.chunk_steps,
            sharing=shapes.sharing,
        )

    def _cache(self) -> Cache:
        """The same random numbers in every slot: as if all had begun with one prompt."""
        dtype = np.dtype(self._shapes.dtype)
        fill = lambda leaf, column: self._put(
            np.ascontiguousarray(np.broadcast_to(column.astype(dtype), leaf.shape))
        )
        return jax.tree.map(fill, self._shapes.cache, self._columns)


def random_weights(fused: Any, put: Callable[[Any], Any]) -> Any:
    """Arrays of these shapes that keep activations at about one."""
    rng = np.random.default_rng(1)

    def fill(leaf: Any) -> Any:
        if np.issubdtype(leaf.dtype, np.integer):  # codes of weights that lie quantised
            limits = np.iinfo(leaf.dtype)
            return put(rng.integers(limits.min, limits.max, leaf.shape, leaf.dtype, endpoint=True))
        # a sum over the last axis then stays at about one
        deviation = leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 1.0
        normal = np.asarray(rng.standard_normal(leaf.shape, np.float32) * deviation)
        return put(normal.astype(leaf.dtype))

    return jax.tree.map(fill, fused)


def _equal(one: Any, other: Any) -> bool:
    """Bit by bit, so that NaN and signs of zeros count."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)

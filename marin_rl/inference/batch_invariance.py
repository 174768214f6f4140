"""Batch invariance: a sequence has the same bits whatever is computed next to it.

Which row of a product is added up in which order is the matrix library's choice, by instruction set
and shape. So the engine proves it on the machine at hand, by trials of its own programs run twice
on random numbers, and uses only what is proven; the record lies next to the compiled programs.
Leaves out what an engine does without a proof (`execution_plan`).

Axes: S slots of a lane, R prompts of a prefill tile, P positions of a prompt bucket.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from marin_rl.compilation import programs_folder
from marin_rl.cpu_streams import Lanes
from marin_rl.inference import decoder
from marin_rl.inference.adapters import BankSizes, some_rows
from marin_rl.inference.batch import RunningBatch
from marin_rl.inference.generation import TOP_LOGPROBS_MAX
from marin_rl.inference.kv_cache import Cache, cache_length, empty_cache
from marin_rl.inference.linear_layers import GatheredLowRank
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.logprobs import ReportRequest
from marin_rl.inference.pieces import Extension, packed, piece_size
from marin_rl.inference.programs import (
    ChunkInputs,
    Limits,
    SampledChunk,
    SlotState,
    decode_chunk,
    extend_slots,
)
from marin_rl.inference.sampling import UNKNOWN, Asked
from marin_rl.inference.weights import Decoder
from marin_rl.machine import machine_facts
from marin_rl.models.spec import Spec
from marin_rl.plain_files import whole_or_absent

# What is proven, and how: a record of another version is proven again.
VERSION = 3

# The same of products with adapters, for engines that have room for some.
ADAPTERS_VERSION = 2

# The same of an accelerator's programs.
WHOLE_VERSION = 3

_log = logging.getLogger(__name__)
_known: dict[Path | str, "Invariance"] = {}  # by file; by name where programs have no folder


# Steps of a trial: the second one reads what the first one wrote.
STEPS = 3
# Steps whose tokens are computed once more as pieces: more than one piece of each slot.
CONTINUED_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariance:
    """Equalities that hold bit by bit on this machine for one engine's shapes.

    `slots`: a sequence in any slot of a lane, alone or among others. `prompts`: a prompt in any row
    of a prefill, alone or among others. `shared`: a prompt's cache read once for several slots, or
    by each on its own. `continued`: a position that is decoded, or computed in a piece of a prompt
    however that is cut; only engines with a prefix cache try it, and where it fails try pieces
    of one position each: `continued_singly`. `adapters`: a sequence on an adapter, whatever is in
    the other rows of the bank; only engines with room for adapters try it. `few_adapters`: the
    same, computed with half of the bank or with all of it.
    """

    slots: bool
    prompts: bool
    shared: bool
    continued: bool = False
    continued_singly: bool = False
    adapters: bool = False
    few_adapters: bool = False


# On a mesh nothing is proven, so nothing is promised.
UNPROVEN = Invariance(slots=False, prompts=False, shared=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes and types that decide the compiled programs of an engine on one device."""

    spec: Spec
    slots: int  # of a lane
    context_length: int
    chunk_steps: int
    prefill_rows: int
    sharing: bool
    dtype: str
    prefix_cache: bool = False
    adapters: int = 0
    adapter_rank: int = 0
    own: str = ""  # layout of weights that lie quantised, and of the model's own adapter
    whole: bool = False  # a layer's cache is one block

    @property
    def cache(self) -> Cache:
        dtype = np.dtype(self.dtype)
        sizes = self.spec, self.slots, self.context_length, dtype
        return jax.eval_shape(lambda: empty_cache(*sizes, whole=self.whole))


def invariance_of(shapes: Shapes, prove: Callable[[], Invariance]) -> Invariance:
    """The recorded outcome for such programs on this machine, or that of `prove`, which is kept.

    A record that cannot be read is proven again; where none can be written, this process keeps it.
    """
    facts = _facts(shapes)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    folder = programs_folder()
    file = None if folder is None else folder / "batch-invariance" / f"{name[:32]}.json"
    place = file or name
    recorded = _known.get(place)
    if recorded is None and file is not None and file.exists():
        record = _read(file)
        if record is not None and record.facts == facts:
            recorded = record.equal
        else:
            _log.warning("%s is no record of these programs: they are proven again", file)
    if recorded is None:
        started = time.monotonic()
        recorded = prove()
        if file is not None:
            seconds = round(time.monotonic() - started, 3)
            _write(file, _Record(facts=facts, equal=recorded, seconds=seconds))
    _known[place] = recorded
    return recorded


def recorded_proofs() -> list[tuple[Mapping[str, Any], Invariance]]:
    """Proofs that are kept for this machine: facts and shapes, and the outcome."""
    folder = programs_folder()
    files = sorted((folder / "batch-invariance").glob("*.json")) if folder else []
    return [(record.facts, record.equal) for record in map(_read, files) if record is not None]


def _facts(shapes: Shapes) -> dict[str, Any]:
    """Facts that an outcome depends on, as JSON types."""
    shape_facts = asdict(shapes) | {"spec": shapes.spec.facts()}
    if not shapes.adapters:  # as records of engines without adapters always were
        del shape_facts["adapters"], shape_facts["adapter_rank"]
    for name in ("own", "whole"):
        if not shape_facts[name]:
            del shape_facts[name]
    adapters = {"adapters_version": ADAPTERS_VERSION} if shapes.adapters else {}
    whole = {"whole_version": WHOLE_VERSION} if shapes.whole else {}
    # either decides which instructions a product becomes
    settings = "jax_disable_most_optimizations", "jax_default_matmul_precision"
    return {
        "version": VERSION,
        **adapters,
        **whole,
        "machine": machine_facts(),
        "libraries": {name: version(name) for name in ("jax", "jaxlib")},
        "settings": {name: str(jax.config.values[name]) for name in settings},
        "shapes": shape_facts,
    }


class _Record(BaseModel):
    """Outcome of the trials of an engine's programs, and the facts that it depends on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["marin-rl/batch-invariance"] = "marin-rl/batch-invariance"
    facts: dict[str, Any]
    equal: Invariance
    seconds: float


def _read(file: Path) -> _Record | None:
    try:
        return _Record.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):  # whatever is wrong with it, the proof is made again
        return None


def _write(file: Path, record: _Record) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_or_absent(file) as partial:
            partial.write_text(json.dumps(record.model_dump(), indent=1, sort_keys=True))
    except OSError as error:
        _log.warning("%s cannot be written (%s): the next process proves it again", file, error)


class Prover:
    """Trials of the engine's own programs, on a cache of random numbers that lives as long as one.

    `put` commits arrays to the engine's device. Weights may be random: which order sums are taken
    in depends only on shapes, and weights of zero would show nothing.
    """

    def __init__(
        self,
        shapes: Shapes,
        fused: Decoder,
        buckets: Sequence[int],
        put: Callable[[Any], Any],
    ) -> None:
        self._shapes = shapes
        self._fused, self._put = fused, put
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
        # near the end of the cache, so that every block of it is read
        self._last = self._length - self._steps - 1
        shape = lambda leaf: (1, *leaf.shape[1:])
        self._columns = jax.tree.map(lambda leaf: self._rng.normal(size=shape(leaf)), shapes.cache)

    def prove(self) -> Invariance:
        wanted, size = self._shapes.prefix_cache, piece_size(self._shapes.slots)
        continued = wanted and self._continued_alike(size)
        adapters = self._shapes.adapters > 0 and self._adapters_alike()
        return Invariance(
            slots=self._slots_alike(),
            # an accelerator with a prefix cache computes prompts in pieces, never in tiles
            prompts=continued if wanted and self._shapes.whole else self._prompts_alike(),
            shared=self._shapes.sharing and self._shared_alike(),
            continued=continued,
            continued_singly=wanted and not continued and self._continued_alike(1),
            adapters=adapters,
            few_adapters=adapters and self._few_alike(),
        )

    def _slots_alike(self) -> bool:
        """One sequence in all slots; then several, of which each is also computed alone.

        The one is on adapter 1, the several on one each, and slots that are not computed on none.
        """
        S, last = self._shapes.slots, self._last
        same = self._run(np.full(S, 1), np.full(S, last), adapter_S=np.full(S, 1))
        # one sequence everywhere first: where already equal rows differ, nothing else needs trying
        if not all(_equal(slot, same[0]) for slot in same):
            return False
        positions_S = last - np.arange(S) % 3
        positions_S[S // 2] = min(5, last)  # blocks past its end are read only for the others
        tokens_S = self._tokens(S)
        rows_S = self._rows(S)
        together = self._run(tokens_S, positions_S, adapter_S=rows_S)
        for slot in sorted({0, S // 2, S - 1}):
            own_S = np.where(np.arange(S) == slot, rows_S, 0)
            alone = self._run(tokens_S, positions_S, only=slot, adapter_S=own_S)
            if not _equal(alone[slot], together[slot]):
                return False
        return True

    def _adapters_alike(self) -> bool:
        """One sequence on the first row of the bank and on the last, others in the other rows."""
        S, last = self._shapes.slots, self._last
        for row in {1, self._shapes.adapters}:
            same = partial(self._run, np.full(S, 1), np.full(S, last), adapter_S=np.full(S, row))
            if not _equal(same(), same(fused=self._with_others_than(row))):
                return False
        return True

    def _few_alike(self) -> bool:
        """Sequences on the last rows of the bank, with only those rows and with all.

        Not tried where each sequence reads its own adapter: that costs the same in any bank.
        """
        bank = self._fused.layers[0].adapters
        if bank is None or isinstance(bank.down, GatheredLowRank):
            return False
        S, last, total = self._shapes.slots, self._last, self._shapes.adapters
        few = BankSizes(adapters=total).few
        tokens_S, positions_S, places_S = self._tokens(S), np.full(S, last), np.arange(S) % few
        rows = np.arange(total - few + 1, total + 1, dtype=np.int32)
        whole = self._run(tokens_S, positions_S, adapter_S=rows[places_S])
        fused = self._with_adapters(lambda adapters: some_rows(adapters, rows))
        half = self._run(tokens_S, positions_S, adapter_S=1 + places_S, fused=fused)
        return _equal(half, whole)

    def _with_others_than(self, row: int) -> Decoder:
        def changed(leaf: Any) -> Any:
            array = np.array(leaf)
            # adapters are on axis 1 behind the parts, else on axis 0
            by_adapter = np.moveaxis(array, array.ndim - 3, 0)
            # doubled, which is exact: a row that depended on the others would show in its bits
            by_adapter[np.arange(len(by_adapter)) != row - 1] *= array.dtype.type(2)
            return self._put(array)

        return self._with_adapters(lambda adapters: jax.tree.map(changed, adapters))

    def _with_adapters(self, change: Callable[[Any], Any]) -> Decoder:
        layers = (each._replace(adapters=change(each.adapters)) for each in self._fused.layers)
        return self._fused._replace(layers=tuple(layers))

    def _rows(self, count: int, first: int = 0) -> np.ndarray:
        """Rows of the bank for `count` sequences, in turn, from `first` on, counted from 0."""
        return 1 + (first + np.arange(count)) % max(1, self._shapes.adapters)

    def _shared_alike(self) -> bool:
        """The same steps with every whole block shared, and with none."""
        S = self._shapes.slots
        tokens_S, positions_S = self._tokens(S), self._last - np.arange(S) % 3
        apart = self._run(tokens_S, positions_S)
        shared = self._run(tokens_S, positions_S, shared=int(positions_S.min()))
        return _equal(apart, shared)

    def _prompts_alike(self) -> bool:
        """For each tile of several prompts: one in all rows, then among others.

        Only products are tried, as all else works on one position at a time.
        """
        products = jax.jit(decoder.prompt_products, static_argnums=0)
        first = self._fused.layer(self._shapes.spec, 0)
        for bucket in self._buckets:
            rows, whole = self._shapes.prefill_rows, self._shapes.whole
            tile = decoder.prefill_tile(rows, bucket, whole=whole)
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
        decoded, sampled = self._decode(tokens_S, positions_S, steps=steps, adapter_S=self._rows(S))
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
            cache = extend_slots(shapes.spec, self._fused, cache, pieces, rows_S)
        return cache

    def _adapter(self, rows: np.ndarray | None) -> np.ndarray | None:
        if not self._shapes.adapters:
            return None
        return (np.zeros(self._shapes.slots) if rows is None else rows).astype(np.int32)

    def _tokens(self, count: int) -> np.ndarray:
        return self._rng.integers(0, self._shapes.spec.vocabulary, count).astype(np.int32)

    def _run(
        self, tokens_S: np.ndarray, positions_S: np.ndarray, **options: Any
    ) -> Sequence[list[np.ndarray]]:
        """Results of `_decode` by slot: tokens, logprobs, reports, and the cache that it left."""
        cache, sampled = self._decode(tokens_S, positions_S, **options)
        by_step = [sampled.tokens_CS, sampled.logprobs_CS, *sampled.reports]
        by_row = [np.moveaxis(np.asarray(array)[: self._steps], 1, 0) for array in by_step]
        # the last layer depends on all others: its first block and its last
        blocks = list(map(np.asarray, jax.tree.leaves((cache[-1][0], cache[-1][-1]))))
        return [[array[row] for array in (*by_row, *blocks)] for row in range(len(tokens_S))]

    def _decode(
        self,
        tokens_S: np.ndarray,
        positions_S: np.ndarray,
        *,
        only: int | None = None,
        steps: int = 0,
        shared: int = 0,
        adapter_S: np.ndarray | None = None,
        fused: Decoder | None = None,
    ) -> tuple[Cache, SampledChunk]:
        """The cache after a chunk, and what it sampled: in all slots or in `only` one.

        With the weights `fused`, and of so many `steps`, where they are given.
        """
        shapes, steps = self._shapes, steps or self._steps
        active_S = np.ones(shapes.slots, np.bool_)
        if only is not None:
            active_S = np.arange(shapes.slots) == only
        inputs = self._inputs._replace(
            token_S=tokens_S.astype(np.int32),
            position_S=positions_S.astype(np.int32),
            remaining_S=np.where(active_S, steps, 0).astype(np.int32),
            adapter_S=self._adapter(adapter_S),
        )
        limits = Limits(np.int32(steps), np.int32(0), np.int32(shared))
        chunk, asked = ChunkInputs(inputs, self._extras, limits), UNKNOWN
        if shapes.whole:  # the program that most chunks of an accelerator are
            nothing = np.zeros((3, shapes.slots), np.int32)
            last, unread_S = SlotState(*self._put(list(nothing))), np.zeros(shapes.slots, np.bool_)
            chunk = chunk._replace(last=last, unread_S=unread_S)
            asked = Asked(filters=False, extras=False)
        return decode_chunk(
            self._fused if fused is None else fused,
            self._cache(),
            chunk,
            spec=shapes.spec,
            steps=shapes.chunk_steps,
            sharing=shapes.sharing,
            asked=asked,
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

"""A runner whose cache grows with use: for a server that answers few requests, or many.

Owns how many rows and blocks of positions the cache has, which sequence slot is in which row, and
the moves from one cache to the next. A lone sequence is decoded by programs of one row over a short
cache, which are soon compiled, small in memory and as fast as a CPU reads the weights. Leaves out
the programs (`programs`) and what a fixed cache shares with this one (`runner`).

Programs of other sizes may add up in another order, so that last bits of a sequence's numbers can
depend on how many others there are. Nothing is proven, therefore nothing is promised: runs sample
with `runner`.

Axes: S sequence slots, R rows of the cache.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from marin_rl.cpu_streams import Lanes
from marin_rl.inference.batch import Chunk, SlotInputs
from marin_rl.inference.execution_plan import ExecutionPlan
from marin_rl.inference.generation import Policy
from marin_rl.inference.kv_cache import BLOCK_MIN, Cache, block_size, empty_cache
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.logprobs import Report
from marin_rl.inference.programs import ChunkInputs, LayerPrograms, Limits, SampledChunk
from marin_rl.inference.runner import Runner, SlotAdapters
from marin_rl.inference.scheduler import Prompts
from marin_rl.inference.weights import Weights

# Rows of one cache are this many times those of the one before: each is programs to compile.
GROWTH = 4

# Positions of a block, if the context is as long, and at most BLOCKS_MAX times as long: short chats
# need one block, and a program of one compiles fastest.
GROWING_BLOCK = 256

# Chunks for which a smaller cache would have done, before running sequences move to one.
CHUNKS_BEFORE_SHRINKING = 8

EMPTY = -1

Announce = Callable[[str], None]


class GrowingRunner(Runner):
    """Programs of one model's shape, on one cache that has room for the running sequences.

    `announce` gets a line before and after each program is compiled.
    """

    announce: Announce

    def _shaped(self, plan: ExecutionPlan) -> ExecutionPlan:
        block = min(GROWING_BLOCK, -(-plan.context_length // BLOCK_MIN) * BLOCK_MIN)
        block = max(block, block_size(plan.context_length))
        lanes = Lanes(1, plan.lanes.slots)
        # one prompt at a time: its numbers do not depend on the others, and nor do its programs
        whole = replace(plan, lanes=lanes, can_share=False, prefill_rows=1, block=block)
        self._whole, self._compiled = whole, set[str]()
        self._layers = LayerPrograms(self.spec, plan.chunk_steps, self.put)
        self._slot_R = np.full(1, EMPTY, np.int32)
        self._chunks_too_large = 0
        self.announce = _silent
        return whole

    def _proven(self, plan: ExecutionPlan, weights: Weights) -> ExecutionPlan:
        return self._plan_of(1, 1)

    @property
    def lanes(self) -> Lanes:
        return self._whole.lanes

    @property
    def rows(self) -> int:
        return self.plan.lanes.slots

    @property
    def blocks(self) -> int:
        return self.plan.length // self._whole.block

    @property
    def cache_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.memory.caches))

    @property
    def cache_bytes_max(self) -> int:
        """Bytes of the largest cache: of all slots, as long as the context."""
        whole, spec = self._whole, self.spec
        positions = whole.lanes.slots * whole.length
        head = spec.kv_heads * spec.head_size
        return 2 * spec.layers * head * positions * whole.dtype.itemsize

    def _plan_of(self, rows: int, blocks: int) -> ExecutionPlan:
        positions = blocks * self._whole.block
        return replace(self._whole, lanes=Lanes(1, rows), context_length=positions)

    def fit(self, inputs: SlotInputs, begun: Sequence[int], steps: int) -> None:
        if not self.memory.caches:  # they were freed, with all that was in them
            self._slot_R[:] = EMPTY
        active = np.flatnonzero(inputs.remaining_S > 0)
        if len(active) == 0:
            return
        running = np.setdiff1d(active, begun)
        self._slot_R = np.where(np.isin(self._slot_R, running), self._slot_R, EMPTY)
        self._resize(len(active), int(inputs.position_S[active].max()) + steps)
        new = active[~np.isin(active, self._slot_R)]
        self._slot_R[np.flatnonzero(self._slot_R == EMPTY)[: len(new)]] = new

    def _resize(self, sequences: int, positions: int) -> None:
        """Replace the cache, if it is not of the size for these sequences and positions."""
        rows = 1
        while rows < sequences:
            rows *= GROWTH
        rows, blocks = min(rows, self.lanes.slots), 1
        while blocks * self._whole.block < min(positions, self.length):
            blocks *= 2
        blocks = min(blocks, self.length // self._whole.block)
        if (self._slot_R != EMPTY).any():
            blocks = max(blocks, self.blocks)
            self._chunks_too_large = self._chunks_too_large + 1 if rows < self.rows else 0
            # where they move anyway, they move to as few rows as will do
            if self._chunks_too_large < CHUNKS_BEFORE_SHRINKING and blocks == self.blocks:
                rows = max(rows, self.rows)
        if (rows, blocks) != (self.rows, self.blocks):
            self._move(self._plan_of(rows, blocks))

    def _move(self, plan: ExecutionPlan) -> None:
        """Go on with the cache of another plan, with the rows that are in use."""
        used_R = np.flatnonzero(self._slot_R != EMPTY)
        rows, caches = plan.lanes.slots, []
        if len(used_R) and self.memory.caches:
            source_R = np.zeros(rows, np.int32)
            source_R[: len(used_R)] = used_R
            kept = jax.tree.map(lambda leaf: _taken(leaf, source_R), self.memory.caches[0])
            new = self._empty(rows, plan.length // plan.block - self.blocks)
            caches = [tuple(map(tuple.__add__, kept, new))]
        slots = self._slot_R[used_R]
        self._slot_R = np.full(rows, EMPTY, np.int32)
        self._slot_R[: len(used_R)] = slots
        self.plan, self._chunks_too_large = plan, 0
        self.memory.replace_caches(plan, caches)

    def _empty(self, rows: int, blocks: int) -> Cache:
        """A cache of zeros; with no blocks, just its empty layers."""
        block = self._whole.block
        if not blocks:
            return ((),) * self.spec.layers
        cache = empty_cache(self.spec, rows, blocks * block, self.plan.dtype, block)
        return self.put(cache)

    def prefill(
        self, policy: Policy, prompts: Prompts, adapter_S: SlotAdapters | None = None
    ) -> None:
        self.memory.wake()
        fused, alone = self._decoder(policy), self.rows == 1
        # one program for caches of any number of rows: a prompt is computed in a separate cache
        layers = list(self.memory.caches[0] if alone else self._empty(1, self.blocks))
        for (bucket, _), own in sorted(prompts.items(), key=lambda item: item[0]):
            for tokens, slots in own:
                # an array for each: the program before may still read its own
                tokens_RP = np.zeros((1, bucket), np.int32)
                tokens_RP[0, : len(tokens)] = tokens
                where = f"in a cache of {self.plan.length} positions"
                with self._compiling(f"prefill of {bucket} tokens {where}"):
                    self._layers.prefill(fused, self.rotary, layers, tokens_RP)
                if not alone:
                    for seq_slot in slots:
                        self._put_row(tuple(layers), self._row_of(seq_slot))
        if alone:
            self.memory.caches[0] = tuple(layers)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            source_R = np.full(1, self._row_of(source), np.int32)
            row = jax.tree.map(lambda leaf, at=source_R: _taken(leaf, at), self.memory.caches[0])
            self._put_row(row, self._row_of(target))

    def _row_of(self, seq_slot: int) -> int:
        return int(np.flatnonzero(self._slot_R == seq_slot)[0])

    def _put_row(self, cache: Cache, row: int) -> None:
        put = partial(_with_row, row=np.int32(row))
        self.memory.caches[0] = jax.tree.map(put, self.memory.caches[0], cache)

    def decode(
        self, policy: Policy, inputs: SlotInputs, extras: ExtraRows, limits: Limits
    ) -> Chunk:
        self.memory.wake()
        used_R = self._slot_R != EMPTY
        slot_R = np.where(used_R, self._slot_R, 0)
        rows = jax.tree.map(lambda leaf: leaf[slot_R], inputs)
        rows = rows._replace(remaining_S=np.where(used_R, rows.remaining_S, 0))
        chunk = ChunkInputs(rows, extras.of_slots(slot_R), limits)
        where = f"in a cache of {self.plan.length} positions"
        with self._compiling(f"decoding of {self.rows} at a time {where}"):
            layers = list(self.memory.caches[0])
            sampled = self._layers.decode(self._decoder(policy), self.rotary, layers, chunk)
            jax.block_until_ready(sampled)
            self.memory.caches[0] = tuple(layers)
        return self._chunk(policy, sampled, reported=extras.reported)

    def _chunk(self, policy: Policy, sampled: SampledChunk, *, reported: bool) -> Chunk:
        """SampledChunk tokens by sequence slot."""
        used_R = self._slot_R != EMPTY
        slot_U = self._slot_R[used_R]

        def by_slot(array: Array | np.ndarray, axis: int) -> np.ndarray:
            rows = np.moveaxis(np.asarray(array), axis, 0)
            out = np.zeros((self.lanes.slots, *rows.shape[1:]), rows.dtype)
            out[slot_U] = rows[used_R]
            return out

        reports: tuple[Report, ...] = ()
        if reported:
            by_step = [np.moveaxis(by_slot(array, 1), 0, 1) for array in sampled.reports]
            reports = (Report(*by_step),)
        return Chunk(
            tokens_SC=by_slot(sampled.tokens_CS, 1),
            logprobs_SC=by_slot(sampled.logprobs_CS, 1),
            counts_S=by_slot(sampled.counts_S, 0),
            slot_steps=int(sampled.steps) * self.rows,
            weight_version=policy.weight_version,
            parameters_digest=policy.parameters_digest,
            reports=reports,
        )

    @contextmanager
    def _compiling(self, program: str) -> Iterator[None]:
        """Announce a program at its first call, by which it is compiled or read from the cache."""
        if program in self._compiled:
            yield
            return
        number, began = len(self._compiled) + 1, time.monotonic()
        self.announce(f"compiling program {number}: {program}")
        yield
        self._compiled.add(program)
        self.announce(f"program {number} is ready after {time.monotonic() - began:.1f} s")

    @property
    def programs(self) -> Sequence[str]:
        return sorted(self._compiled)


def _silent(line: str) -> None:
    """Announce to no one."""


@jax.jit
def _taken(leaf: Array, source_R: Int32[Array | np.ndarray, " R"]) -> Array:
    return jnp.take(leaf, source_R, axis=0)


@partial(jax.jit, donate_argnums=0)
def _with_row(leaf: Array, other: Array, row: Int32[Array | np.ndarray | np.int32, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(leaf, other, row, 0)

"""A runner whose cache grows with use: for a server that answers few requests, or many.

A lone sequence is decoded by programs of one row over a short cache, which are soon compiled, small
in memory and as fast as a CPU reads the weights. Programs of other sizes may add up in another
order, so nothing is promised of last bits: runs sample with `runner`. Leaves out the programs
(`programs`).

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

from marin_rl.compilation import nbytes
from marin_rl.cpu_streams import Lanes
from marin_rl.inference.batch import Chunk, SlotInputs
from marin_rl.inference.decoder import prefill_tile
from marin_rl.inference.execution_plan import ExecutionPlan
from marin_rl.inference.generation import Policy
from marin_rl.inference.kv_cache import Blocks, empty_cache, in_blocks
from marin_rl.inference.logprobs import Report
from marin_rl.inference.programs import (
    ChunkInputs,
    LayerPrograms,
    SampledChunk,
    copy_slots,
)
from marin_rl.inference.runner import NextChunk, Runner, SlotAdapters
from marin_rl.inference.scheduler import Prompt, Prompts
from marin_rl.inference.weights import Decoder, Weights

# Rows of one cache are this many times those of the one before: each is programs to compile.
GROWTH = 4

# Positions of the first cache, enough for short chats; each following one has twice as many.
POSITIONS_MIN = 256

# Chunks for which a smaller cache would have done, before running sequences move to one.
CHUNKS_BEFORE_SHRINKING = 8

EMPTY = -1


class GrowingRunner(Runner):
    """Programs of one model's shape, on one cache that has room for the running sequences."""

    announce: Callable[[str], None]  # gets a line before and after each program is compiled

    def _shaped(self, plan: ExecutionPlan) -> ExecutionPlan:
        lanes = Lanes(1, plan.lanes.slots)
        # In place: a server's first tokens come before a copy would be made.
        of_server = {"can_share": False, "ahead": False, "grows": True, "in_place": True}
        whole = replace(plan, lanes=lanes, **of_server)
        self._whole, self.programs = whole, set[str]()  # those that are compiled
        self._layers = LayerPrograms(self.spec, plan.chunk_steps, self.put)
        self._slot_R = np.full(1, EMPTY, np.int32)
        self._chunks_too_large = 0
        self.announce = lambda line: None
        return whole

    def _proven(self, plan: ExecutionPlan, weights: Weights) -> ExecutionPlan:
        return self._plan_of(1, POSITIONS_MIN)

    @property
    def lanes(self) -> Lanes:
        return self._whole.lanes

    @property
    def rows(self) -> int:
        return self.plan.lanes.slots

    @property
    def positions(self) -> int:
        return self.plan.length

    @property
    def cache_bytes(self) -> int:
        return nbytes(self.memory.caches)

    @property
    def cache_bytes_max(self) -> int:
        """Bytes of the largest cache: of all slots, as long as the context."""
        whole, spec = self._whole, self.spec
        positions = whole.lanes.slots * whole.length
        head = spec.kv_heads * spec.head_size
        return 2 * spec.layers * head * positions * whole.dtype.itemsize

    def _plan_of(self, rows: int, positions: int) -> ExecutionPlan:
        context = min(positions, self._whole.length)
        return replace(self._whole, lanes=Lanes(1, rows), context_length=context)

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

    def _resize(self, sequences: int, needed: int) -> None:
        """Replace the cache, if it is not of the size for these sequences and positions."""
        rows, positions = 1, POSITIONS_MIN
        while rows < sequences:
            rows *= GROWTH
        while positions < needed:
            positions *= 2
        plan = self._plan_of(min(rows, self.lanes.slots), positions)
        if (self._slot_R != EMPTY).any():
            rows, positions = plan.lanes.slots, max(plan.length, self.positions)
            self._chunks_too_large = self._chunks_too_large + 1 if rows < self.rows else 0
            # where they move anyway, they move to as few rows as will do
            if self._chunks_too_large < CHUNKS_BEFORE_SHRINKING and positions == self.positions:
                rows = max(rows, self.rows)
            plan = self._plan_of(rows, positions)
        if plan != self.plan:
            self._move(plan)

    def _move(self, plan: ExecutionPlan) -> None:
        """Go on with the cache of another plan, with the rows that are in use."""
        used_R = np.flatnonzero(self._slot_R != EMPTY)
        rows, caches = plan.lanes.slots, []
        if len(used_R) and self.memory.caches:
            source_R = np.zeros(rows, np.int32)
            source_R[: len(used_R)] = used_R
            move = partial(_moved, source_R=source_R, size=plan.block, length=plan.length)
            caches = [tuple(map(move, self.memory.caches[0]))]
        slots = self._slot_R[used_R]
        self._slot_R = np.full(rows, EMPTY, np.int32)
        self._slot_R[: len(used_R)] = slots
        self.plan, self._chunks_too_large = plan, 0
        self.memory.replace_caches(plan, caches)

    def prefill(
        self, policy: Policy, prompts: Prompts, adapter_S: SlotAdapters | None = None
    ) -> None:
        self.memory.wake()
        fused = self._decoder(policy)
        for (bucket, _), own in sorted(prompts.items(), key=lambda item: item[0]):
            # a lone prompt does not pay for others, and several share each read of the weights
            rows = 1 if len(own) == 1 else self._tile(bucket)
            for start in range(0, len(own), rows):
                self._run_prompts(fused, bucket, own[start : start + rows], rows)

    def _tile(self, bucket: int) -> int:
        return prefill_tile(self.plan.prefill_rows, bucket, whole=self.plan.whole)

    def _run_prompts(self, fused: Decoder, bucket: int, prompts: list[Prompt], rows: int) -> None:
        # an array for each: the program before may still read its own
        tokens_RP = np.zeros((rows, bucket), np.int32)
        for row, (tokens, _) in enumerate(prompts):
            tokens_RP[row, : len(tokens)] = tokens
        # in a separate cache: one program for caches of any number of rows
        plan = self.plan
        cache = empty_cache(self.spec, rows, self.positions, plan.dtype, whole=plan.whole)
        layers = list(self.put(cache))
        program = f"prefill of {bucket} tokens in a cache of {self.positions} positions"
        with self._compiling(program if rows == 1 else f"{rows} times {program}"):
            self._layers.prefill(fused, layers, tokens_RP)
        for row, (_, slots) in enumerate(prompts):
            for target in map(self._row_of, slots):
                put = partial(_with_row, source=np.int32(row), target=np.int32(target))
                self.memory.caches[0] = tuple(map(put, self.memory.caches[0], layers))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        ends_R2 = np.zeros((self.rows, 2), np.int32)
        ends_R2[: len(pairs)] = [tuple(map(self._row_of, pair)) for pair in pairs]
        source_R, target_R = np.ascontiguousarray(ends_R2.T)
        self.memory.caches[0] = copy_slots(
            self.memory.caches[0], source_R, target_R, np.int32(len(pairs))
        )

    def _row_of(self, seq_slot: int) -> int:
        return int(np.flatnonzero(self._slot_R == seq_slot)[0])

    def decode(self, policy: Policy, chunk: NextChunk) -> Callable[[], Chunk]:
        self.memory.wake()
        used_R = self._slot_R != EMPTY
        slot_R = np.where(used_R, self._slot_R, 0)
        rows = jax.tree.map(lambda leaf: leaf[slot_R], chunk.inputs)
        rows = rows._replace(remaining_S=np.where(used_R, rows.remaining_S, 0))
        inputs = ChunkInputs(rows, chunk.extras.of_slots(slot_R), chunk.limits)
        where = f"in a cache of {self.positions} positions"
        with self._compiling(f"decoding of {self.rows} at a time {where}"):
            layers = list(self.memory.caches[0])
            sampled = self._layers.decode(self._decoder(policy), layers, inputs, self._asked(chunk))
            jax.block_until_ready(sampled)
            self.memory.caches[0] = tuple(layers)
        read = self._chunk(sampled, reported=chunk.extras.reported)
        return lambda: read

    def _chunk(self, sampled: SampledChunk, *, reported: bool) -> Chunk:
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
            reports=reports,
        )

    @contextmanager
    def _compiling(self, program: str) -> Iterator[None]:
        """Announce a program at its first call, by which it is compiled or read from the cache."""
        if program in self.programs:
            yield
            return
        number, began = len(self.programs) + 1, time.monotonic()
        self.announce(f"compiling program {number}: {program}")
        yield
        self.programs.add(program)
        self.announce(f"program {number} is ready after {time.monotonic() - began:.1f} s")


@partial(jax.jit, static_argnames=("size", "length"))
def _moved(
    blocks: Blocks, source_R: Int32[Array | np.ndarray, " R"], size: int, length: int
) -> Blocks:
    """These rows of a layer's cache, for `length` positions in blocks of `size`."""
    taken = jax.tree.map(lambda leaf: jnp.take(leaf, source_R, axis=0), blocks)
    return in_blocks(taken, size, length)


@partial(jax.jit, donate_argnums=0)
def _with_row(
    blocks: Blocks,
    others: Blocks,
    source: Int32[Array | np.ndarray | np.int32, ""],
    target: Int32[Array | np.ndarray | np.int32, ""],
) -> Blocks:
    """A layer's cache with row `source` of another in row `target`."""

    def put(leaf: Array, other: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(other, source, 1)
        return jax.lax.dynamic_update_slice_in_dim(leaf, row, target, 0)

    return jax.tree.map(put, blocks, others)

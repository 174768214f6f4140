"""The engine's compiled programs, called on its caches and fused weights.

Owns the calls (prefill, copies between sequence slots, a chunk of decoding, the scoring of a
prompt) and the device memory that they run on. Leaves out what may be computed side by side
(`execution_plan`), what the programs compute (`programs`, `logprobs`), whose tokens these are
(`batch`) and when anything runs (`engine`). Used only by the engine's thread.

Axes: S sequence slots, R prompts of one prefill, P positions of a prompt bucket.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32

from marin_rl.compilation import set_matmul_precision
from marin_rl.config import EngineConfig
from marin_rl.cpu_streams import Lanes, side_by_side
from marin_rl.errors import InputError
from marin_rl.inference.adapters import AdapterBank, Bank, with_bank
from marin_rl.inference.batch import Chunk, SlotInputs
from marin_rl.inference.execution_plan import ExecutionPlan, first_plan, proven
from marin_rl.inference.generation import Policy, PromptScores, WeightsKey
from marin_rl.inference.kv_cache import Cache, empty_cache
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.logprobs import prompt_scores, score_tokens
from marin_rl.inference.pieces import Extension, packed, piece_size
from marin_rl.inference.placement import SLOTS, TENSOR, Placement, placement_of
from marin_rl.inference.programs import (
    ChunkInputs,
    Limits,
    SampledChunk,
    SlotState,
    copy_slots,
    decode_chunk,
    extend_slots,
    prefill_slots,
)
from marin_rl.inference.sampling import UNKNOWN, Asked
from marin_rl.inference.scheduler import Prompt, Prompts
from marin_rl.inference.weights import (
    Decoder,
    Rotary,
    Weights,
    decoder_of,
    read_model,
    rotary_table,
)
from marin_rl.machine import ENGINE_KEYS, memory_errors
from marin_rl.models.module import LanguageModel
from marin_rl.progress import phase

Tree = TypeVar("Tree")
Result = TypeVar("Result")
SlotAdapters = Int32[np.ndarray | jax.Array, " S"]  # rows of the bank


class NextChunk(NamedTuple):
    """A chunk to be decoded, of all slots.

    Rows that are `unread_S` go on from the chunk that was dispatched last, and the others from
    `inputs`.
    """

    inputs: SlotInputs
    extras: ExtraRows
    limits: Limits
    unread_S: Bool[np.ndarray, " S"] | None = None

    @property
    def asked(self) -> Asked:
        of, extras = self.inputs.sampling, self.extras.used
        cut = np.any(of.min_p_S) or np.any(of.top_k_S) or np.any(np.asarray(of.top_p_S) < 1)
        # three programs, and not one for each that may be asked for
        return Asked(filters=extras or bool(cut), extras=extras)


class Runner:
    """Programs of one model's shape, on a cache for each lane of `config.slots` slots.

    Slots are numbered through all lanes. Raises InputError for a model that it cannot decode
    faithfully.
    """

    @memory_errors("the engine", ENGINE_KEYS)
    @phase("building the engine")
    def __init__(
        self, model: LanguageModel, config: EngineConfig, context_length: int, dtype: jnp.dtype
    ) -> None:
        set_matmul_precision(dtype)
        self.spec, weights = read_model(model)
        self._placement = placement_of(weights)
        on_mesh = self._placement.mesh is not None
        plan = first_plan(
            self.spec,
            weights,
            config,
            context_length=context_length,
            dtype=dtype,
            on_mesh=on_mesh,
        )
        plan = self._shaped(plan)
        self.length, self.buckets = plan.length, plan.buckets
        self.rotary = self.put(rotary_table(self.spec, self.length))
        # the trials run the programs of one device: nothing is proven of a mesh
        self.plan = plan if on_mesh else self._proven(plan, weights)
        self.bank: AdapterBank | None = None
        if self.plan.bank_sizes.adapters:
            masked = self.plan.bank_sizes.masked and (on_mesh or self.plan.invariance.adapters)
            self.bank = AdapterBank(self.plan.bank_shapes(masked=masked), self.put)
        several = self.plan.lanes.count > 1
        # programs that one thread starts run one after the other
        self._threads = ThreadPoolExecutor(self.plan.lanes.count, "lane") if several else None
        # last: the trials allocate caches too, and may have changed the lanes
        self.memory = DeviceMemory(self.plan, self._placement, self.rotary)

    def _shaped(self, plan: ExecutionPlan) -> ExecutionPlan:
        return plan

    def _proven(self, plan: ExecutionPlan, weights: Weights) -> ExecutionPlan:
        return proven(plan, weights, self.rotary, self.put)

    def fit(self, inputs: SlotInputs, begun: Sequence[int], steps: int) -> None:
        """Make room for `steps` more tokens of each sequence; `begun` have no cache yet."""

    @property
    def lanes(self) -> Lanes:
        return self.plan.lanes

    def put(self, arrays: Tree) -> Tree:
        """The same arrays, replicated on every device that the programs run on."""
        return self._placement.place(arrays)

    def policy(self, model: LanguageModel, weight_version: int, parameters_digest: str) -> Policy:
        """References to a model's arrays. Raises InputError for a model of another shape."""
        spec, weights = read_model(model)
        if spec != self.spec:
            difference = self.spec.difference(spec)
            raise InputError(f"expected a model like the one loaded: {difference}")
        # references where the arrays lie as the first ones did, as those of the same run always do
        placed = jax.device_put(weights, self._placement.weights)
        return Policy(placed, weight_version, parameters_digest, WeightsKey())

    def compile_chunk(self, policy: Policy, cache: Any, chunk: NextChunk, asked: Asked) -> None:
        """Compile a chunk's program for a lane's cache of these shapes."""
        with self._placement.active():
            inputs = self._chunk_inputs(0, self.lanes.part(0, chunk.inputs), chunk)
            decode_chunk.lower(
                self._decoder(policy), cache, inputs, asked=asked, **self._chunk_sizes
            ).compile()

    def bucket(self, length: int) -> int:
        # few lengths, so few programs: a prompt is padded to the next one
        return next(size for size in self.buckets if size >= length)

    def prefill(
        self, policy: Policy, prompts: Prompts, adapter_S: SlotAdapters | None = None
    ) -> None:
        """Run prompts, by bucket and lane, each into the cache of its slots, all in that lane.

        They are computed with the adapter of these slots.
        """
        self.memory.wake()
        fused = self._decoder(policy)
        # by bucket and lane: the order of programs does not depend on that of the requests
        ordered = sorted(prompts.items(), key=lambda item: item[0])
        rows = self.plan.prefill_rows

        def run(lane: int) -> None:
            for bucket, own in [(bucket, own) for (bucket, at), own in ordered if at == lane]:
                for start in range(0, len(own), rows):
                    self._prefill(fused, lane, bucket, own[start : start + rows], adapter_S)

        self._in_lanes(run)

    def _prefill(
        self,
        fused: Decoder,
        lane: int,
        bucket: int,
        prompts: list[Prompt],
        adapter_S: SlotAdapters | None,
    ) -> None:
        # always this many, however few prompts: another number is another program with other last
        # bits
        rows = self.plan.prefill_rows
        tokens_RP = np.zeros((rows, bucket), np.int32)
        source_S = np.full(self.lanes.slots, rows, np.int32)  # `rows`: the slot takes no prompt
        adapter_R = None if adapter_S is None else np.zeros(rows, np.int32)
        for row, (tokens, slots) in enumerate(prompts):
            tokens_RP[row, : len(tokens)] = tokens
            source_S[slots] = row
            # all slots of a prompt are of one request, and so on one adapter
            if adapter_R is not None and adapter_S is not None and slots:
                adapter_R[row] = adapter_S[slots[0]]
        self.memory.caches[lane] = prefill_slots(
            self.spec,
            fused,
            self.memory.caches[lane],
            tokens_RP,
            np.int32(len(prompts)),
            self.lanes.part(lane, source_S),
            adapter_R,
        )

    def extend(
        self,
        policy: Policy,
        extensions: Sequence[Extension],
        adapter_S: SlotAdapters | None = None,
    ) -> None:
        """Append tokens to the caches of slots."""
        self.memory.wake()
        fused, size = self._decoder(policy), self.lanes.size
        # single positions where several together would give other bits than decoding did
        piece = piece_size(size) if self.plan.whole_pieces else 1

        def run(lane: int) -> None:
            own = [
                one._replace(seq_slot=one.seq_slot % size)
                for one in extensions
                if self.lanes.of(one.seq_slot) == lane
            ]
            for pieces in packed(own, size, piece):
                adapters = self.lanes.part(lane, adapter_S)
                self.memory.caches[lane] = extend_slots(
                    self.spec, fused, self.memory.caches[lane], pieces, adapters
                )
            if not self.plan.ahead:
                # else the thread would end at once, and the lanes run one by one
                jax.block_until_ready(self.memory.caches[lane])

        self._in_lanes(run)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy slots' caches: from the first of each pair to the second, of the same lane."""
        size = self.lanes.size

        def run(lane: int) -> None:
            own = [(a % size, b % size) for a, b in pairs if self.lanes.of(b) == lane]
            if not own:
                return
            # of one size for any number of pairs, so that one program copies them all
            ends_S2 = np.zeros((size, 2), np.int32)
            ends_S2[: len(own)] = own
            source_S, target_S = np.ascontiguousarray(ends_S2.T)
            self.memory.caches[lane] = copy_slots(
                self.memory.caches[lane], source_S, target_S, np.int32(len(own))
            )

        self._in_lanes(run)

    def decode(self, policy: Policy, chunk: NextChunk) -> Callable[[], Chunk]:
        """Dispatch a chunk of at most `limits.steps` steps in every lane, side by side.

        The result waits for it, and reads it.
        """
        self.memory.wake()
        fused = self._decoder(policy)
        own = [self._lane_inputs(lane, chunk.inputs) for lane in range(self.lanes.count)]
        inputs = [self._chunk_inputs(lane, slots, chunk) for lane, (_, slots) in enumerate(own)]
        asked = self._asked(chunk)

        def run(lane: int) -> SampledChunk:
            self.memory.caches[lane], sampled = decode_chunk(
                with_bank(fused, own[lane][0]),
                self.memory.caches[lane],
                inputs[lane],
                asked=asked,
                **self._chunk_sizes,
            )
            if self.plan.ahead:
                self.memory.last = sampled.after
                return sampled
            # a thread that only dispatched would end at once, and the lanes run one by one
            return jax.block_until_ready(sampled)

        return partial(self._read, self._in_lanes(run))

    def _asked(self, chunk: NextChunk) -> Asked:
        return chunk.asked if self.plan.whole else UNKNOWN

    def _chunk_inputs(self, lane: int, slots: SlotInputs, chunk: NextChunk) -> ChunkInputs:
        extras = chunk.extras.on_device(lane)
        if not self.plan.ahead:
            return ChunkInputs(slots, extras, chunk.limits)
        none_S = np.zeros(len(slots.token_S), np.bool_)
        unread_S = none_S if chunk.unread_S is None else chunk.unread_S
        return ChunkInputs(slots, extras, chunk.limits, self.memory.last, unread_S)

    def _read(self, sampled: Sequence[SampledChunk]) -> Chunk:
        return Chunk(
            tokens_SC=np.concatenate([np.asarray(one.tokens_CS).T for one in sampled]),
            logprobs_SC=np.concatenate([np.asarray(one.logprobs_CS).T for one in sampled]),
            counts_S=np.concatenate([np.asarray(one.counts_S) for one in sampled]),
            slot_steps=sum(int(one.steps) for one in sampled) * self.lanes.size,
            reports=tuple(one.reports for one in sampled),
        )

    def _lane_inputs(self, lane: int, inputs: SlotInputs) -> tuple[Bank | None, SlotInputs]:
        """A lane's inputs, and the adapters that its sequences use, of which they name the rows."""
        slots = self.lanes.part(lane, inputs)
        if self.plan.ahead:  # the host writes to its arrays before the device has read them
            slots = jax.tree.map(np.array, slots)
        if self.bank is None or slots.adapter_S is None:
            return None, slots
        # only where the trials gave the same bits: half of a bank is a product of another width
        if not self.plan.invariance.few_adapters:
            return self.bank.arrays, slots
        # a slot may keep the row of a sequence that has ended
        row_S = np.where(slots.remaining_S > 0, slots.adapter_S, 0)
        bank, row_S = self.bank.used(lane, self.plan.bank_sizes, row_S)
        return bank, slots._replace(adapter_S=row_S)

    @property
    def _chunk_sizes(self) -> dict[str, Any]:
        """Static arguments of a chunk's program."""
        return {
            "spec": self.spec,
            "steps": self.plan.chunk_steps,
            "sharing": self.plan.can_share,
        }

    def _in_lanes(self, run: Callable[[int], Result]) -> list[Result]:
        """Results of `run` in every lane; all have ended when an error of one is raised."""
        with self._placement.active():  # of a mesh, which has one lane, in this very thread
            return side_by_side(run, self.lanes.count, self._threads)

    def score(
        self, policy: Policy, prompt: Int32[np.ndarray, " p"], top: int, row: int = 0
    ) -> PromptScores:
        """Logprobs of a prompt's tokens and the `top` likeliest, by a separate forward pass.

        `row` is that of the adapter in the bank.
        """
        tokens_P = np.zeros(self.bucket(len(prompt)), np.int32)
        tokens_P[: len(prompt)] = prompt
        with self._placement.active():
            scored = score_tokens(
                self._decoder(policy),
                tokens_P,
                # data and not static: prompts with and without the likeliest tokens are one program
                np.bool_(top > 0),
                None if self.bank is None else np.full(1, row, np.int32),
                spec=self.spec,
            )
        chosen_P, ids_PK, top_PK = map(np.asarray, scored)
        return prompt_scores(len(prompt), top, chosen_P, ids_PK, top_PK)

    def wait(self) -> None:
        jax.block_until_ready(self.memory.caches)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def _decoder(self, policy: Policy) -> Decoder:
        fused = self.memory.decoder(policy)
        return with_bank(fused, None if self.bank is None else self.bank.arrays)


class DeviceMemory:
    """A cache for each lane of a plan, and at most one fused copy of the weights.

    `last` is the state of all rows after the chunk that was dispatched last.
    """

    def __init__(self, plan: ExecutionPlan, placement: Placement, rotary: Rotary) -> None:
        self._plan, self._placement, self._rotary = plan, placement, rotary
        self._fused: tuple[WeightsKey, Decoder] | None = None
        self.caches: list[Cache] = []
        self.last: SlotState | None = None
        self.wake()

    def wake(self) -> None:
        if not self.caches:
            self.caches = [self._empty_cache() for _ in range(self._plan.lanes.count)]
            nothing = np.zeros((3, self._plan.lanes.slots), np.int32)
            self.last = SlotState(*self._placement.place(list(nothing)))

    def replace_caches(self, plan: ExecutionPlan, caches: list[Cache]) -> None:
        """Go on with the caches of another plan for the same model; none: they are allocated."""
        self._plan, self.caches = plan, caches
        self.wake()

    def release(self, *, caches: bool = False) -> None:
        """Free the fused copy of the weights, which only a running batch needs.

        The `caches` too, where no slot is in use; the next prompt or chunk allocates them again.
        """
        self._fused = None
        if caches:
            self.caches = []

    @property
    def fused(self) -> Decoder | None:
        return None if self._fused is None else self._fused[1]

    def holds_copy_of(self, policy: Policy) -> bool:
        return self._fused is not None and self._fused[0] is policy.key

    def decoder(self, policy: Policy) -> Decoder:
        """Return the policy's weights as the programs read them, fused on first use.

        The copy of other weights goes before this one comes, so there is never more than one;
        `release` frees it.
        """
        if self._fused is None or self._fused[0] is not policy.key:
            self._fused = None
            # the old copy is gone by now: two at once may not fit
            with self._placement.active():
                sources = self._plan.spec, policy.weights, self._plan.dtype, self._rotary
                fused = decoder_of(*sources, in_place=self._plan.in_place)
            self._fused = policy.key, fused
        return self._fused[1]

    def forget_nonfinite(self) -> None:
        """Replace NaN and infinities: in a masked position they would spoil the next sequence."""
        # of all slots: it is rare, and one pass over the caches is soon done
        self.caches = jax.tree.map(jnp.nan_to_num, self.caches)

    def _empty_cache(self) -> Cache:
        plan = self._plan
        slots, length = plan.lanes.size, plan.context_length
        cache = empty_cache(plan.spec, slots, length, plan.dtype, whole=plan.whole)
        # placed as the programs return it, so that the first call compiles for the same sharding as
        # the others
        return self._placement.place(cache, SLOTS, TENSOR)

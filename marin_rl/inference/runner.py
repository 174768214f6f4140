"""The engine's compiled programs, and the arrays that they run on.

Owns where arrays lie, the lanes' caches, the rotary table, the fused weights while there is work,
the bank of adapters, and the calls: prefill, copies between sequence slots, a chunk of decoding,
the scoring of a prompt. Leaves out what the programs compute (`programs`, `logprobs`), whose tokens
these are (`batch`) and when anything runs (`engine`). Used by the engine's thread alone.

Axes: S sequence slots, R prompts of one prefill, P positions of a prompt bucket.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32
from levanter.models.lm_model import LmHeadModel

from marin_rl.config import EngineConfig
from marin_rl.cpu_streams import (
    LANE_WEIGHTS_BYTES_MAX,
    Lanes,
    lanes_for,
    shares_prompts,
    side_by_side,
)
from marin_rl.errors import InputError
from marin_rl.inference.adapters import (
    AdapterBank,
    Bank,
    BankSizes,
    LoadedAdapter,
    bank_shapes,
    with_bank,
)
from marin_rl.inference.attention import SHARE
from marin_rl.inference.batch import Chunk, SlotInputs, WeightsKey
from marin_rl.inference.batch_invariance import (
    UNPROVEN,
    Invariance,
    Shapes,
    invariance_of,
)
from marin_rl.inference.generation import PromptScores
from marin_rl.inference.invariance_trials import Prover, random_weights
from marin_rl.inference.kv_cache import Cache, cache_length, empty_cache
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.logprobs import prompt_scores, score_tokens
from marin_rl.inference.pieces import Extension, packed, piece_size
from marin_rl.inference.placement import SLOTS, TENSOR, placement_of
from marin_rl.inference.programs import (
    ChunkInputs,
    Limits,
    Sampled,
    copy_slots,
    decode_chunk,
    extend_slots,
    fused_weights,
    prefill_slots,
)
from marin_rl.inference.scheduler import Prompt, Prompts
from marin_rl.inference.weights import Decoder, Weights, own_layout, read_model, rotary_table
from marin_rl.machine import give_back_freed_memory

# Shortest padded prompt: every bucket is a program to compile, and one of fewer tokens saves
# little.
BUCKET_MIN = 16

# Rank that an engine with adapters has room for where its configuration names none.
ADAPTER_RANK = 16

_log = logging.getLogger(__name__)

Tree = TypeVar("Tree")
Result = TypeVar("Result")
SlotAdapters = Int32[np.ndarray | jax.Array, " S"]  # rows of the bank


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """Loaded weights: references to the model's arrays, and the identity of this load.

    With `recompute_kv_cache`, sequences that other weights began have their caches computed again.
    """

    weights: Weights
    weight_version: int
    parameters_digest: str
    key: WeightsKey
    adapter_name: str = ""  # empty: the base model
    recompute_kv_cache: bool = False

    def with_adapter(self, adapter: LoadedAdapter | None) -> "Policy":
        """The policy of requests on an adapter: its identity, over the same weights."""
        if adapter is None:
            return self
        return replace(
            self,
            weight_version=adapter.weight_version,
            parameters_digest=adapter.parameters_digest,
            adapter_name=adapter.name,
        )


class Runner:
    """Programs of one model's shape, on a cache for each lane of `config.slots` slots.

    Slots are numbered through all lanes. Raises InputError for a model that it cannot decode
    faithfully.
    """

    def __init__(
        self, model: LmHeadModel, config: EngineConfig, context_length: int, dtype: jnp.dtype
    ) -> None:
        self.spec, weights = read_model(model)
        self._placement = placement_of(weights)
        weights_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        on_mesh = self._placement.mesh is not None
        self.lanes = lanes_for(
            config.lanes, config.slots, weights_bytes=weights_bytes, on_mesh=on_mesh
        )
        # the programs can share; whether they do is decided by what is proven
        self._can_share = shares_prompts(
            self.lanes,
            weights_bytes=weights_bytes,
            queries_per_kv=self.spec.queries_per_kv,
            on_mesh=on_mesh,
            together=SHARE,
        )
        self._config = config
        self._context_length = context_length
        self._dtype = dtype
        self._fused: tuple[object, Decoder] | None = None
        self.bank: AdapterBank | None = None
        self.bank_sizes = sizes_of(config)
        self._mlp_width = model.config.intermediate_dim
        self._own = own_layout(weights.layers)
        shapes = self._shapes()
        self.length = cache_length(shapes.cache)
        self.buckets = _buckets(self.length)
        self._rotary = self.put(rotary_table(model, self.length))
        self.invariance = UNPROVEN
        # the trials run the programs of one device: nothing is proven of a mesh
        if not on_mesh:
            self.invariance = invariance_of(shapes, lambda: self._prove(shapes, weights))
            self._fall_back()
        if self.bank_sizes.adapters:
            masked = self.bank_sizes.masked and (on_mesh or self.invariance.adapters)
            self.bank = AdapterBank(self._bank_shapes(masked=masked), self.put)
        several = self.lanes.count > 1
        # programs that one thread starts run one after the other
        self._threads = ThreadPoolExecutor(self.lanes.count, "lane") if several else None
        # last: the trials needed caches of their own, and may have changed the lanes
        self._caches = [self._empty_cache() for _ in range(self.lanes.count)]

    @property
    def sharing(self) -> bool:
        """True where slots side by side read a common prompt's cache once: proven, and possible."""
        return self._can_share and self.invariance.shared

    def _shapes(self) -> Shapes:
        return Shapes(
            spec=self.spec,
            slots=self.lanes.size,
            context_length=self._context_length,
            chunk_steps=self._config.chunk_steps,
            prefill_rows=self._config.prefill_rows,
            sharing=self._can_share,
            dtype=self._dtype.name,
            prefix_cache=bool(self._config.prefix_cache),
            adapters=self.bank_sizes.adapters,
            adapter_rank=self.bank_sizes.rank,
            own=self._own,
        )

    def _bank_shapes(self, *, masked: bool) -> Bank:
        sizes = self.bank_sizes
        return bank_shapes(self.spec, sizes, self._mlp_width, self._dtype, masked=masked)

    @property
    def keeps_prefixes(self) -> bool:
        """True where prompts are computed in pieces, and can go on from what decoding wrote."""
        proven = self.invariance.continued or self.invariance.continued_singly
        return bool(self._config.prefix_cache) and proven

    def _prove(self, shapes: Shapes, weights: Weights) -> Invariance:
        """Run the trials before there is a cache: they need one of their own."""
        fuse = partial(fused_weights, self.spec, dtype=self._dtype)
        if sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) <= LANE_WEIGHTS_BYTES_MAX:
            fused = random_weights(jax.eval_shape(fuse, weights), self.put)
        else:  # a second copy would cost too much memory
            fused = fuse(weights)
        outcome = self._outcome(shapes, fused, masked=self.bank_sizes.masked)
        if self.bank_sizes.masked and self.bank_sizes.adapters and not outcome.adapters:
            outcome = replace(self._outcome(shapes, fused, masked=False), adapters=False)
        # the last reference, without which its memory is not free to be given back
        del fused
        give_back_freed_memory()
        return outcome

    def _outcome(self, shapes: Shapes, fused: Decoder, *, masked: bool) -> Invariance:
        """The trials' outcome, with random adapters where the engine has room for some."""
        if shapes.adapters:
            fused = with_bank(fused, random_weights(self._bank_shapes(masked=masked), self.put))
        return Prover(shapes, fused, self._rotary, self.buckets, self.put).prove()

    def _fall_back(self) -> None:
        """Compute one by one what has other bits side by side on this machine."""
        if not self.invariance.slots and self.lanes.size > 1:
            _log.warning(
                "sequences side by side have other bits than alone with the programs of %d slots: "
                "every slot is computed on its own, which is slow; try another number of slots",
                self.lanes.size,
            )
            # a lane for each slot; no lane then has two slots that could share a prompt
            self.lanes, self._can_share = Lanes(self._config.slots, self._config.slots), False
            # proven for lanes of another size
            self.invariance = replace(self.invariance, continued=False, continued_singly=False)
        if self._config.prefix_cache and not self.keeps_prefixes:
            _log.warning(
                "decoding and prefill have different bits with the programs of %d slots: every "
                "turn of a dialogue is prefilled from its start; try another number of slots",
                self.lanes.size,
            )
        if not self.invariance.prompts and self._config.prefill_rows > 1:
            _log.warning("prompts side by side have other bits than alone: one is run at a time")
            self._config = self._config.model_copy(update={"prefill_rows": 1})
        if self.bank_sizes.adapters and self.bank_sizes.masked and not self.invariance.adapters:
            _log.warning("an adapter has other bits next to others: every slot reads its own alone")

    def put(self, arrays: Tree) -> Tree:
        """The same arrays, replicated on every device that the programs run on."""
        return self._placement.place(arrays)

    def policy(self, model: LmHeadModel, weight_version: int, parameters_digest: str) -> Policy:
        """References to a model's arrays. Raises InputError for a model of another shape."""
        spec, weights = read_model(model)
        if spec != self.spec:
            raise InputError(f"expected a model like the one loaded, {self.spec}, found {spec}")
        placed = self._placement.place_weights(weights)
        return Policy(placed, weight_version, parameters_digest, WeightsKey())

    @property
    def programs(self) -> int:
        """Number of programs that `warm_up` compiles.

        A chunk, a copy, and for each bucket one that scores and, without a prefix cache, one that
        prefills; with it, one that extends. With adapters also one that copies half of the bank,
        and a chunk with that half.
        """
        buckets = len(self.buckets)
        halves = 2 if self.invariance.few_adapters and self.bank_sizes.adapters > 1 else 0
        return halves + (3 + buckets if self.keeps_prefixes else 2 + 2 * buckets)

    def warm_up(self, policy: Policy, inputs: SlotInputs, extras: ExtraRows) -> None:
        """Compile every program, for every bucket; changes nothing.

        The largest goes first, while the caches are not there, and what compiling freed goes back
        after each: so none of them needs its memory on top of another's.
        """
        # limits are data: a chunk of 0 steps is the same program as any other
        nothing = Limits(np.int32(0), np.int32(0))
        self._wake()
        self._compile_without_caches(policy, inputs, extras, nothing)
        self.decode(policy, inputs, extras, nothing)
        if self.bank is not None:
            self.decode(policy, self._on_all_adapters(inputs), extras, nothing)
        if self.keeps_prefixes:
            nowhere = Extension(0, -1, np.zeros(1, np.int32))
            self.extend(policy, [nowhere], inputs.adapter_S)
            give_back_freed_memory()
        for bucket in reversed(self.buckets):
            if not self.keeps_prefixes:
                nothing_to_run = {(bucket, 0): [(np.zeros(0, np.int32), [])]}
                self.prefill(policy, nothing_to_run, inputs.adapter_S)
            self.score(policy, np.zeros(bucket, np.int32), 0)
            give_back_freed_memory()
        self.copy([(0, 0)])
        self.release_memory()

    def _on_all_adapters(self, inputs: SlotInputs) -> SlotInputs:
        """Inputs whose slots use as many adapters as they can, which takes another program."""
        slots = np.arange(self._config.slots)
        row_S = (1 + slots % self.bank_sizes.adapters).astype(np.int32)
        return inputs._replace(adapter_S=row_S, remaining_S=np.ones_like(row_S))

    def _compile_without_caches(
        self, policy: Policy, inputs: SlotInputs, extras: ExtraRows, limits: Limits
    ) -> None:
        """Compile a chunk for caches of these shapes, which are empty and not kept."""
        cache = jax.tree.map(_shape_of, self._caches[0])
        self.release_memory(caches=True)
        give_back_freed_memory()
        chunk = ChunkInputs(self.lanes.part(0, inputs), extras.on_device(0), limits)
        with self._placement.active():
            decode_chunk.lower(
                self._decoder(policy), self._rotary, cache, chunk, **self._chunk_sizes
            ).compile()
        give_back_freed_memory()

    def bucket(self, length: int) -> int:
        """The padded length of a prompt of `length` tokens."""
        return next(size for size in self.buckets if size >= length)

    def prefill(
        self, policy: Policy, prompts: Prompts, adapter_S: SlotAdapters | None = None
    ) -> None:
        """Run prompts, by bucket and lane, each into the cache of its slots, all in that lane.

        They are computed with the adapter of these slots.
        """
        self._wake()
        fused = self._decoder(policy)
        # by bucket and lane: the order of programs does not depend on that of the requests
        ordered = sorted(prompts.items(), key=lambda item: item[0])
        shares = [
            [(bucket, own) for (bucket, at), own in ordered if at == lane]
            for lane in range(self.lanes.count)
        ]

        def run(lane: int) -> None:
            for bucket, own in shares[lane]:
                rows = self._config.prefill_rows
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
        rows = self._config.prefill_rows
        tokens_RP = np.zeros((rows, bucket), np.int32)
        source_S = np.full(self._config.slots, rows, np.int32)  # `rows`: the slot takes no prompt
        adapter_R = None if adapter_S is None else np.zeros(rows, np.int32)
        for row, (tokens, slots) in enumerate(prompts):
            tokens_RP[row, : len(tokens)] = tokens
            source_S[slots] = row
            if adapter_R is not None and adapter_S is not None and slots:
                adapter_R[row] = adapter_S[slots[0]]
        self._caches[lane] = prefill_slots(
            self.spec,
            fused,
            self._rotary,
            self._caches[lane],
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
        """Write tokens into the caches of slots, each after what it has in its cache."""
        self._wake()
        fused, size = self._decoder(policy), self.lanes.size
        piece = piece_size(size) if self.invariance.continued else 1

        def run(lane: int) -> None:
            own = [
                one._replace(seq_slot=one.seq_slot % size)
                for one in extensions
                if self.lanes.of(one.seq_slot) == lane
            ]
            for pieces in packed(own, size, piece):
                adapters = self.lanes.part(lane, adapter_S)
                self._caches[lane] = extend_slots(
                    self.spec, fused, self._rotary, self._caches[lane], pieces, adapters
                )
            # else the thread would end at once, and the lanes run one by one
            jax.block_until_ready(self._caches[lane])

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
            self._caches[lane] = copy_slots(
                self._caches[lane], source_S, target_S, np.int32(len(own))
            )

        self._in_lanes(run)

    def decode(
        self, policy: Policy, inputs: SlotInputs, extras: ExtraRows, limits: Limits
    ) -> Chunk:
        """A chunk of at most `limits.steps` steps in every lane, side by side."""
        self._wake()
        fused = self._decoder(policy)
        own = [self._lane_inputs(lane, inputs) for lane in range(self.lanes.count)]
        on_device = [extras.on_device(lane) for lane in range(self.lanes.count)]

        def run(lane: int) -> Sampled:
            bank, slots = own[lane]
            chunk = ChunkInputs(slots, on_device[lane], limits)
            self._caches[lane], sampled = decode_chunk(
                with_bank(fused, bank), self._rotary, self._caches[lane], chunk, **self._chunk_sizes
            )
            # a thread that only dispatched would end at once, and the lanes run one by one
            return jax.block_until_ready(sampled)

        sampled = self._in_lanes(run)
        return Chunk(
            tokens_SC=np.concatenate([np.asarray(one.tokens_CS).T for one in sampled]),
            logprobs_SC=np.concatenate([np.asarray(one.logprobs_CS).T for one in sampled]),
            counts_S=np.concatenate([np.asarray(one.counts_S) for one in sampled]),
            slot_steps=sum(int(one.steps) for one in sampled) * self.lanes.size,
            weight_version=policy.weight_version,
            parameters_digest=policy.parameters_digest,
            reports=tuple(one.reports for one in sampled),
        )

    def _lane_inputs(self, lane: int, inputs: SlotInputs) -> tuple[Bank | None, SlotInputs]:
        """A lane's inputs, and the adapters that its sequences use, of which they name the rows."""
        slots = self.lanes.part(lane, inputs)
        if self.bank is None or slots.adapter_S is None:
            return None, slots
        if not self.invariance.few_adapters:
            return self.bank.arrays, slots
        # a slot may keep the row of a sequence that has ended
        row_S = np.where(slots.remaining_S > 0, slots.adapter_S, 0)
        bank, row_S = self.bank.used(lane, self.bank_sizes, row_S)
        return bank, slots._replace(adapter_S=row_S)

    @property
    def _chunk_sizes(self) -> dict[str, Any]:
        """Static arguments of a chunk's program."""
        return {
            "spec": self.spec,
            "steps": self._config.chunk_steps,
            "sharing": self._can_share,
        }

    def _in_lanes(self, run: Callable[[int], Result]) -> list[Result]:
        """Results of `run` in every lane; all have ended when an error of one is raised."""
        with self._placement.active():  # of a mesh, which has one lane, in this very thread
            return side_by_side(run, self.lanes.count, self._threads)

    def score(
        self, policy: Policy, prompt: Int32[np.ndarray, " p"], top: int, row: int = 0
    ) -> PromptScores:
        """Logprobs of a prompt's tokens and the `top` likeliest, by a forward pass of their own.

        `row` is that of the adapter in the bank.
        """
        tokens_P = np.zeros(self.bucket(len(prompt)), np.int32)
        tokens_P[: len(prompt)] = prompt
        with self._placement.active():
            scored = score_tokens(
                self._decoder(policy),
                self._rotary,
                tokens_P,
                # data and not static: prompts with and without the likeliest tokens are one program
                np.bool_(top > 0),
                None if self.bank is None else np.full(1, row, np.int32),
                spec=self.spec,
            )
        chosen_P, ids_PK, top_PK = map(np.asarray, scored)
        return prompt_scores(len(prompt), top, chosen_P, ids_PK, top_PK)

    def wait(self) -> None:
        """Return when the caches are computed."""
        jax.block_until_ready(self._caches)

    def close(self) -> None:
        """End the lanes' threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def release_memory(self, *, caches: bool = False) -> None:
        """Free the fused copy of the weights, which only a running batch needs.

        The `caches` too, where no slot is in use; the next prompt or chunk allocates them again.
        """
        self._fused = None
        if caches:
            self._caches = []

    def holds_copy_of(self, policy: Policy) -> bool:
        """True if the fused weights are there, and this policy's."""
        return self._fused is not None and self._fused[0] is policy.key

    def _wake(self) -> None:
        if not self._caches:
            self._caches = [self._empty_cache() for _ in range(self.lanes.count)]

    def _decoder(self, policy: Policy) -> Decoder:
        """Return the policy's weights as the programs read them, fused on first use.

        The copy of other weights goes before this one comes, so there is never more than one;
        `release_memory` frees it.
        """
        if self._fused is None or self._fused[0] is not policy.key:
            self._fused = None
            with self._placement.active():
                fused = fused_weights(self.spec, policy.weights, self._dtype)
            self._fused = policy.key, fused
        return with_bank(self._fused[1], None if self.bank is None else self.bank.arrays)

    def forget_nonfinite(self) -> None:
        """Replace what is not a number: in a masked position it would spoil the next sequence."""
        self._caches = jax.tree.map(jnp.nan_to_num, self._caches)

    def start_over(self) -> None:
        """New caches and a new copy of the weights, for after a failure on the device."""
        self.release_memory(caches=True)

    def _empty_cache(self) -> Cache:
        slots, length = self.lanes.size, self._context_length
        cache = empty_cache(self.spec, slots, length, self._dtype)
        return self._placement.place(cache, SLOTS, TENSOR)


def sizes_of(config: EngineConfig) -> BankSizes:
    """Room for adapters that a configuration asks for."""
    if not config.adapters_max:
        return BankSizes()
    return BankSizes(adapters=config.adapters_max, rank=config.adapter_rank_max or ADAPTER_RANK)


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype that a program is compiled for."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _buckets(longest: int) -> tuple[int, ...]:
    """Padded prompt lengths: powers of two, the last one cut to the cache's length."""
    # doubling wastes less than half of a prefill, for a number of programs that grows with log T
    sizes = [BUCKET_MIN]
    while sizes[-1] < longest:
        sizes.append(min(2 * sizes[-1], longest))
    return tuple(sizes)

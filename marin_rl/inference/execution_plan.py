"""Division of an engine's slots into lanes, and what its programs may compute side by side.

Owns the shapes of the compiled programs, the order to try them, and the fallback where that fails:
what has other bits in company is computed one by one. Leaves out the trials (`batch_invariance`)
and the calls (`runner`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from marin_rl.compilation import nbytes
from marin_rl.config import EngineConfig
from marin_rl.cpu_streams import LANE_WEIGHTS_BYTES_MAX, Lanes, lanes_for, shares_prompts
from marin_rl.inference.adapters import Bank, BankSizes, bank_shapes, with_bank
from marin_rl.inference.batch_invariance import (
    UNPROVEN,
    Invariance,
    Prover,
    Shapes,
    invariance_of,
    random_weights,
)
from marin_rl.inference.kv_cache import SHARE, block_size
from marin_rl.inference.weights import (
    Decoder,
    Rotary,
    Weights,
    decoder_of,
    fit_in_place,
    own_layout,
)
from marin_rl.machine import give_back_freed_memory
from marin_rl.models.spec import Spec

# Shortest padded prompt: every bucket is a program to compile, and one of fewer tokens saves
# little.
BUCKET_MIN = 16

# The same where programs are compiled while requests wait: many first messages have fewer.
GROWING_BUCKET_MIN = 64

# Rank that an engine with adapters has room for where its configuration names none.
ADAPTER_RANK = 16

_log = logging.getLogger(__name__)

Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """Lanes of `slots` sequence slots, and what is proven of programs of these shapes.

    `can_share`: slots side by side could read a common prompt's cache once; whether they do is
    decided by what is proven. `whole`: a layer's cache is one block. `ahead`: a chunk is dispatched
    before the one before it is read. `own` is the layout of weights that lie quantised, and of the
    model's own adapter.
    """

    spec: Spec
    lanes: Lanes
    can_share: bool
    whole: bool
    ahead: bool
    context_length: int
    chunk_steps: int
    prefill_rows: int
    prefix_cache: bool
    bank_sizes: BankSizes
    dtype: jnp.dtype
    own: str
    grows: bool = False
    in_place: bool = False
    invariance: Invariance = UNPROVEN

    @property
    def shapes(self) -> Shapes:
        """Shapes that decide the compiled programs."""
        return Shapes(
            spec=self.spec,
            slots=self.lanes.size,
            context_length=self.context_length,
            chunk_steps=self.chunk_steps,
            prefill_rows=self.prefill_rows,
            sharing=self.can_share,
            dtype=self.dtype.name,
            prefix_cache=self.prefix_cache,
            adapters=self.bank_sizes.adapters,
            adapter_rank=self.bank_sizes.rank,
            own="in place" if self.in_place else self.own,
            whole=self.whole,
        )

    @property
    def block(self) -> int:
        return block_size(self.context_length, whole=self.whole)

    @property
    def length(self) -> int:
        return -(-self.context_length // self.block) * self.block

    @property
    def buckets(self) -> tuple[int, ...]:
        """Padded prompt lengths: powers of two, the last one cut to the cache's length."""
        # doubling wastes less than half of a prefill, for a number of programs that grows with
        # log T
        sizes, longest = [GROWING_BUCKET_MIN if self.grows else BUCKET_MIN], self.length
        while sizes[-1] < longest:
            sizes.append(min(2 * sizes[-1], longest))
        return tuple(sizes)

    @property
    def sharing(self) -> bool:
        """True where slots side by side read a common prompt's cache once: proven, and possible."""
        return self.can_share and self.invariance.shared

    @property
    def keeps_prefixes(self) -> bool:
        """True if prompts are computed in pieces, and can continue a cache that decoding wrote."""
        proven = self.invariance.continued or self.invariance.continued_singly
        return self.prefix_cache and (proven or self.whole)

    @property
    def whole_pieces(self) -> bool:
        """True if a piece has several positions, and not one where several have other bits."""
        return self.invariance.continued or self.whole

    @property
    def not_promised(self) -> list[str]:
        """Names of equalities that are not proven: last bits may differ there."""
        of = self.invariance
        promises = {
            "a sequence alone and among others": of.slots,
            "a prompt alone and among others": of.prompts,
            "a dialogue continued and computed from its start": of.continued
            or not self.prefix_cache,
        }
        return [name for name, proven in promises.items() if not proven]

    def bank_shapes(self, *, masked: bool) -> Bank:
        return bank_shapes(self.spec, self.bank_sizes, self.dtype, masked=masked)


def first_plan(
    spec: Spec,
    weights: Weights,
    config: EngineConfig,
    *,
    context_length: int,
    dtype: jnp.dtype,
    on_mesh: bool,
) -> ExecutionPlan:
    """The fastest plan for a model of this size, of which nothing is proven.

    Raises InputError for lanes that do not divide the slots, or that a mesh cannot have.
    """
    weights_bytes, adapters = nbytes(weights), config.adapters_max
    accelerator = jax.default_backend() != "cpu"
    rank = config.adapter_rank_max or ADAPTER_RANK
    lanes = lanes_for(config.lanes, config.slots, weights_bytes=weights_bytes, on_mesh=on_mesh)
    return ExecutionPlan(
        spec=spec,
        lanes=lanes,
        can_share=shares_prompts(
            lanes,
            weights_bytes=weights_bytes,
            queries_per_kv=spec.queries_per_kv,
            on_mesh=on_mesh,
            together=SHARE,
        ),
        # each block of a step is a conditional, for which an accelerator waits for the host
        whole=accelerator,
        # where the host has cores of its own to work on: a CPU would gain nothing, and a sample
        # that waits gets its slot a chunk later
        ahead=accelerator and lanes.count == 1,
        context_length=context_length,
        chunk_steps=config.chunk_steps,
        prefill_rows=config.prefill_rows,
        prefix_cache=bool(config.prefix_cache),
        bank_sizes=BankSizes(adapters=adapters, rank=rank) if adapters else BankSizes(),
        dtype=dtype,
        own=own_layout(weights.layers),
        # A joined copy is faster for small matrices, and takes the memory of all layers.
        in_place=not accelerator
        and not on_mesh
        and weights_bytes > LANE_WEIGHTS_BYTES_MAX
        and fit_in_place(weights, dtype),
    )


def proven(
    plan: ExecutionPlan, weights: Weights, rotary: Rotary, put: Callable[[Tree], Tree]
) -> ExecutionPlan:
    """The plan with what holds on this machine, and one by one what does not.

    The trials allocate a cache, so they run before the engine has one.
    """
    outcome = invariance_of(plan.shapes, lambda: _prove(plan, weights, rotary, put))
    return fall_back(replace(plan, invariance=outcome))


def _prove(
    plan: ExecutionPlan, weights: Weights, rotary: Rotary, put: Callable[[Any], Any]
) -> Invariance:
    """Run the trials, with random adapters where the engine has room for some."""
    fuse = partial(decoder_of, plan.spec, dtype=plan.dtype, in_place=plan.in_place)
    if nbytes(weights) <= LANE_WEIGHTS_BYTES_MAX:
        fused = random_weights(jax.eval_shape(fuse, weights), put)
        fused = fused._replace(ends=fused.ends._replace(rotary=rotary))
    else:  # a second copy would cost too much memory
        fused = fuse(weights, rotary=rotary)

    def outcome_of(fused: Decoder, *, masked: bool) -> Invariance:
        if plan.bank_sizes.adapters:
            fused = with_bank(fused, random_weights(plan.bank_shapes(masked=masked), put))
        return Prover(plan.shapes, fused, plan.buckets, put).prove()

    sizes = plan.bank_sizes
    outcome = outcome_of(fused, masked=sizes.masked)
    if sizes.masked and sizes.adapters and not outcome.adapters:
        # the other trials again, with slots that read their own adapter, as the engine then does
        outcome = replace(outcome_of(fused, masked=False), adapters=False)
    # the last reference, without which its memory is not free to be given back
    del fused
    give_back_freed_memory()
    return outcome


def fall_back(plan: ExecutionPlan) -> ExecutionPlan:
    """Compute one by one what has other bits side by side on this machine.

    On an accelerator, which that would leave idle, it is not promised, and the log says so.
    """
    if plan.whole:
        if names := plan.not_promised:
            _log.warning("not promised to have the same bits on this device: %s", "; ".join(names))
        return plan
    if not plan.invariance.slots and plan.lanes.size > 1:
        _log.warning(
            "sequences side by side have other bits than alone with the programs of %d slots: "
            "every slot is computed on its own, which is slow; try another number of slots",
            plan.lanes.size,
        )
        slots = plan.lanes.slots
        plan = replace(
            plan,
            # a lane for each slot; no lane then has two slots that could share a prompt
            lanes=Lanes(slots, slots),
            can_share=False,
            ahead=False,
            # proven for lanes of another size
            invariance=replace(plan.invariance, continued=False, continued_singly=False),
        )
    if plan.prefix_cache and not plan.keeps_prefixes:
        _log.warning(
            "decoding and prefill have different bits with the programs of %d slots: every "
            "turn of a dialogue is prefilled from its start; try another number of slots",
            plan.lanes.size,
        )
    if not plan.invariance.prompts and plan.prefill_rows > 1:
        _log.warning("prompts side by side have other bits than alone: one is run at a time")
        plan = replace(plan, prefill_rows=1)
    if plan.bank_sizes.adapters and plan.bank_sizes.masked and not plan.invariance.adapters:
        _log.warning("an adapter has other bits next to others: every slot reads its own alone")
    return plan

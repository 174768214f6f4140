"""Device memory of an engine: the lanes' caches, and the fused weights while there is work.

Owns when they are allocated, computed again and freed. Leaves out what they hold (`kv_cache`,
`programs`), and when the engine asks for memory to be freed (`engine`).
"""

import jax
import jax.numpy as jnp

from marin_rl.inference.execution_plan import ExecutionPlan
from marin_rl.inference.jobs import WeightsKey
from marin_rl.inference.kv_cache import Cache, empty_cache
from marin_rl.inference.placement import SLOTS, TENSOR, Placement
from marin_rl.inference.policy import Policy
from marin_rl.inference.programs import fused_weights, weights_in_place
from marin_rl.inference.weights import Decoder


class DeviceMemory:
    """A cache for each lane of a plan, and at most one fused copy of the weights."""

    def __init__(self, plan: ExecutionPlan, placement: Placement) -> None:
        self._plan, self._placement = plan, placement
        self._fused: tuple[WeightsKey, Decoder] | None = None
        self.caches: list[Cache] = []
        self.wake()

    def wake(self) -> None:
        """Allocate the caches, where they were freed."""
        if not self.caches:
            self.caches = [self._empty_cache() for _ in range(self._plan.lanes.count)]

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
        """The fused weights, if they are there."""
        return None if self._fused is None else self._fused[1]

    def holds_copy_of(self, policy: Policy) -> bool:
        """True if the fused weights are there, and this policy's."""
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
                fused = None
                if self._plan.block:
                    fused = weights_in_place(self._plan.spec, policy.weights, self._plan.dtype)
                if fused is None:
                    fused = fused_weights(self._plan.spec, policy.weights, self._plan.dtype)
            self._fused = policy.key, fused
        return self._fused[1]

    def forget_nonfinite(self) -> None:
        """Replace what is not a number: in a masked position it would spoil the next sequence."""
        # of all slots: it is rare, and one pass over the caches is soon done
        self.caches = jax.tree.map(jnp.nan_to_num, self.caches)

    def _empty_cache(self) -> Cache:
        plan = self._plan
        slots, length = plan.lanes.size, plan.context_length
        cache = empty_cache(plan.spec, slots, length, plan.dtype, plan.block)
        # placed as the programs return it, so that the first call compiles for the same sharding as
        # the others
        return self._placement.place(cache, SLOTS, TENSOR)

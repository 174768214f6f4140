"""Weights that an engine samples with, and their identity.

Leaves out reading them from a model (`weights`) and the copy that programs run on
(`device_memory`).
"""

from dataclasses import dataclass, replace

from marin_rl.inference.adapters import LoadedAdapter
from marin_rl.inference.jobs import WeightsKey
from marin_rl.inference.weights import Weights


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

"""LoRA adapters (arXiv:2106.09685) as plain arrays: settings, checks, digests, merging, PEFT files.

Knows nothing of models, JAX or servers: a base is its parameters' shapes by path, as
`training.model.parameter_shapes` gives them. Adapters are trained in `training`, served by
`inference`.
"""

from marin_rl.lora.adapter import (
    ALL_LINEAR,
    Adapter,
    LinearShape,
    LoraModule,
    Shapes,
    a_name,
    adapter_of,
    b_name,
    check_adapter_name,
    initial_arrays,
    linear_shapes,
    merged,
    merged_weight,
    module_name,
    policy_digest,
)
from marin_rl.lora.peft import check_adapter_folder, configured_modules, read_peft, write_peft

__all__ = [
    "ALL_LINEAR",
    "Adapter",
    "LinearShape",
    "LoraModule",
    "Shapes",
    "a_name",
    "adapter_of",
    "b_name",
    "check_adapter_folder",
    "check_adapter_name",
    "configured_modules",
    "initial_arrays",
    "linear_shapes",
    "merged",
    "merged_weight",
    "module_name",
    "policy_digest",
    "read_peft",
    "write_peft",
]

"""Conditions of adapters and quantised bases across sections.

Leaves out what must fit within `policy` (policy.py) and the shapes of adapters (`marin_rl.lora`).
"""

from marin_rl.config.sections import RunSections


def check_merged_adapter(config: RunSections) -> None:
    """Refuse to merge an adapter that a policy does not have."""
    if config.inference.serve_merged is not None and config.policy.lora is None:
        raise ValueError(
            "inference.serve_merged is about policies with an adapter, and policy.lora is "
            "null: remove it, or set policy.lora.rank"
        )


def check_quantised_base(config: RunSections) -> None:
    """Refuse what would need the base as it was before it was quantised, or cut."""
    scheme, critic = config.policy.quantize_base, config.training.critic
    if scheme is None:
        return
    if critic is not None and critic.trunk == "own":
        raise ValueError(
            f"training.critic.trunk own with policy.quantize_base {scheme}: a second adapter "
            "on a quantised base is not supported; expected trunk shared, or no critic"
        )
    if config.inference.engine.adapters_max:
        raise ValueError(
            f"inference.engine.adapters_max {config.inference.engine.adapters_max} with "
            f"policy.quantize_base {scheme}: no adapters are loaded next to a quantised base; "
            "expected null, or the run's adapter exported and served with its base as it was "
            "(serve --model FOLDER --adapter)"
        )
    if config.inference.serve_merged is not None:
        raise ValueError(
            f"inference.serve_merged with policy.quantize_base {scheme}: adapters are not "
            "loaded next to a quantised base, and merged it would not be one; leave it out"
        )
    if config.inference.endpoints and config.inference.publish == "lora_adapter":
        raise ValueError(
            f"inference.publish lora_adapter with policy.quantize_base {scheme}: endpoints "
            "apply the adapter to the base as it was, which is another policy than the one "
            "that is trained; expected update_weights_from_disk, or no endpoints"
        )
    if config.mesh.fsdp != 1 or config.mesh.tensor != 1:
        raise ValueError(
            f"policy.quantize_base {scheme} on a mesh: a quantised base is whole on each "
            f"device; expected mesh.fsdp 1 and mesh.tensor 1, found {config.mesh.fsdp} and "
            f"{config.mesh.tensor}"
        )

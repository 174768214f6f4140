"""Conditions of `asynchrony.in_flight_updates`: which objectives and endpoints bear new weights.

Leaves out the other keys of `asynchrony` (asynchrony.py), and environments (`environments.checks`).
"""

from marin_rl.config.objective import ObjectiveConfig
from marin_rl.config.serving import InferenceConfig

KEY = "asynchrony.in_flight_updates"


def check_objective(objective: ObjectiveConfig) -> None:
    """Raise ValueError for an objective that takes tokens for those of one policy."""
    if objective.surrogate != "reinforce" or objective.importance_correction != "none":
        return
    raise ValueError(
        f"{KEY} gives completions tokens of several policies, but objective.surrogate reinforce "
        "takes every token for one of the policy that it updates: set "
        "objective.importance_correction to truncated or masked, or choose a surrogate with a "
        "ratio (ppo_clip, say)"
    )


def check_endpoints(inference: InferenceConfig) -> None:
    """Raise ValueError where requests name the weights of one version, or tokens have none."""
    if inference.serve_merged is False or inference.publish == "lora_adapter":
        key = "serve_merged false" if inference.serve_merged is False else "publish lora_adapter"
        raise ValueError(
            f"{KEY} with inference.{key}: requests end on the adapter that they began with; "
            "expected the adapter merged (serve_merged null, publish update_weights_from_disk), or "
            "in_flight_updates false"
        )
    if inference.route == "sglang" or inference.publish == "vllm_reload":
        key = "route sglang" if inference.route == "sglang" else "publish vllm_reload"
        raise ValueError(
            f"{KEY} with inference.{key}: these endpoints do not answer with the policy of each "
            "token; expected the embedded engine, endpoints of `marin-rl serve` with publish "
            "update_weights_from_disk, or in_flight_updates false"
        )
    if inference.has_fleet and not inference.pulled:
        raise ValueError(
            f"{KEY} with endpoints that come and go ({', '.join(inference.endpoints)}, publish "
            f"{inference.publish}): one that joins would be sent the weights that sampling began "
            "with, whatever the others have by then; expected publish pull (servers that follow "
            "the run), a list of URLs with publish update_weights_from_disk, the embedded engine, "
            "or in_flight_updates false"
        )

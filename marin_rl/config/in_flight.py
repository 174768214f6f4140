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


def check_endpoints(inference: InferenceConfig, *, recompute_kv_cache: bool) -> None:
    """Raise ValueError where requests name the weights of one version, or tokens have none."""
    if inference.serve_merged is False or inference.publish == "lora_adapter":
        key = "serve_merged false" if inference.serve_merged is False else "publish lora_adapter"
        raise ValueError(
            f"{KEY} with inference.{key}: requests end on the adapter that they began with; "
            "expected the adapter merged (serve_merged null, publish update_weights_from_disk), or "
            "in_flight_updates false"
        )
    if inference.route == "sglang":
        raise ValueError(
            f"{KEY} with inference.route sglang: these endpoints do not answer with the policy of "
            "each token; expected the embedded engine, endpoints of `marin-rl serve` with publish "
            "update_weights_from_disk, or in_flight_updates false"
        )
    if inference.publish == "vllm_reload" or inference.route == "vllm_generate":
        _check_vllm(inference, recompute_kv_cache=recompute_kv_cache)
        return
    if inference.has_fleet and not inference.pulled:
        raise ValueError(
            f"{KEY} with endpoints that come and go ({', '.join(inference.endpoints)}, publish "
            f"{inference.publish}): one that joins would be sent the weights that sampling began "
            "with, whatever the others have by then; expected publish pull (servers that follow "
            "the run), a list of URLs with publish update_weights_from_disk, the embedded engine, "
            "or in_flight_updates false"
        )


def _check_vllm(inference: InferenceConfig, *, recompute_kv_cache: bool) -> None:
    """Raise ValueError unless vLLM is sent weights, and asked where it names those of tokens."""
    if inference.publish != "vllm_reload" or inference.route != "vllm_generate":
        raise ValueError(
            f"{KEY} with inference.publish {inference.publish} and route "
            f"{inference.route or 'chat'}: vLLM answers with the policy of each token on one route "
            "alone, by labels that publish vllm_reload sets; expected publish vllm_reload and "
            "route vllm_generate together, for endpoints of `marin-rl serve` the route chat, or "
            "in_flight_updates false"
        )
    if not inference.is_listed:
        raise ValueError(
            f"{KEY} with endpoints that come and go ({', '.join(inference.endpoints)}, publish "
            "vllm_reload): one that joins would have no weights of the run until the next "
            "checkpoint; expected a list of URLs without labels, or in_flight_updates false"
        )
    if not recompute_kv_cache:
        raise ValueError(
            "asynchrony.recompute_kv_cache false with inference.publish vllm_reload: vLLM drops "
            "what its prefix cache has of the old weights only together with the caches of "
            "completions under way; expected recompute_kv_cache true"
        )

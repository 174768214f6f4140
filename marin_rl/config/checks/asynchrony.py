"""Conditions of what is sampled for a round: selection, replay, windows, weights in flight.

Leaves out what must fit within `asynchrony` (asynchrony.py), and environments.
"""

from marin_rl.config.sections import RunSections
from marin_rl.config.serving import InferenceConfig

# Keys of `asynchrony` that choose among what a run samples, or keep it.
OF_SAMPLING = (
    "dynamic_sampling", "over_sampling", "group_filter", "curriculum", "replay", "partial_tokens",
)  # fmt: skip
IN_FLIGHT = "asynchrony.in_flight_updates"


def check_pushed_groups(config: RunSections) -> None:
    """Refuse settings of sampling and scoring that pushed groups cannot follow."""
    if config.rollouts.source != "pushed":
        return
    if config.environment.reward_model is not None:
        raise ValueError(
            "environment.reward_model: groups that are pushed (rollouts.source) have their "
            "scores already; remove it"
        )
    if config.max_staleness:
        raise ValueError(
            f"asynchrony.max_staleness is {config.max_staleness}: environments that push groups "
            "(rollouts.source) are ahead of the rounds by themselves; expected 0"
        )
    for name in OF_SAMPLING:
        if getattr(config.asynchrony, name, None) is not None:
            raise ValueError(
                f"asynchrony.{name} is for groups that the run samples: found rollouts.source "
                f"pushed; expected {name} null"
            )


def check_selection(config: RunSections) -> None:
    """Refuse to choose among groups where there is nothing to choose by."""
    within = config.objective.estimator.within_groups
    if config.samples_on and not (within and config.filters.zero_signal):
        found = f"filters.zero_signal {config.filters.zero_signal}".lower()
        found = found if within else f"objective.advantage {config.objective.advantage}"
        raise ValueError(
            "asynchrony.dynamic_sampling filter samples until enough groups have rewards that "
            "differ: expected an advantage within groups (grpo, rloo, …) and "
            f"filters.zero_signal true, found {found}"
        )


def check_replay(config: RunSections) -> None:
    """Refuse to use groups again that are too old to be trained on."""
    replay, most = config.replay, config.staleness_rounds_max
    if replay is None:
        return
    oldest = replay.window_rounds + (0 if config.windowed else config.max_staleness)
    if oldest > most:
        raise ValueError(
            f"asynchrony.replay.window_rounds {replay.window_rounds} would train on groups "
            f"that are {oldest} rounds old, and nothing older than {most} is trained on: set "
            f"batching.staleness_rounds_max={oldest}, or a smaller window"
        )


def check_window(config: RunSections) -> None:
    """Refuse a window of groups in which no round would ever be complete."""
    groups, most = config.rollouts.groups_per_round, config.inflight_groups_max
    if config.windowed and most < groups:
        raise ValueError(
            f"asynchrony.limits.max_inflight_groups is {most}, so that no round would ever have "
            f"its rollouts.groups_per_round ({groups}) groups: expected at least {groups}"
        )
    if config.windowed and config.environment.reward_model is not None:
        raise ValueError(
            "environment.reward_model judges a round's groups together: expected asynchrony."
            "sampler in_order, found windowed"
        )


def check_in_flight(config: RunSections) -> None:
    """Refuse new weights in flight for objectives and endpoints that cannot bear them."""
    if not config.in_flight_updates:
        return
    objective = config.objective
    if objective.surrogate == "reinforce" and objective.importance_correction == "none":
        raise ValueError(
            f"{IN_FLIGHT} gives completions tokens of several policies, but objective.surrogate "
            "reinforce takes every token for one of the policy that it updates: set "
            "objective.importance_correction to truncated or masked, or choose a surrogate with a "
            "ratio (ppo_clip, say)"
        )
    _check_endpoints_in_flight(config.inference, recompute_kv_cache=config.recompute_kv_cache)


def _check_endpoints_in_flight(inference: InferenceConfig, *, recompute_kv_cache: bool) -> None:
    """Raise ValueError where requests name the weights of one version, or tokens have none."""
    if inference.serve_merged is False or inference.publish == "lora_adapter":
        key = "serve_merged false" if inference.serve_merged is False else "publish lora_adapter"
        raise ValueError(
            f"{IN_FLIGHT} with inference.{key}: requests end on the adapter that they began with; "
            "expected the adapter merged (serve_merged null, publish update_weights_from_disk), or "
            "in_flight_updates false"
        )
    if inference.route == "sglang":
        raise ValueError(
            f"{IN_FLIGHT} with inference.route sglang: these endpoints do not answer with the "
            "policy of each token; expected the embedded engine, endpoints of `marin-rl serve` "
            "with publish update_weights_from_disk, or in_flight_updates false"
        )
    if inference.publish == "vllm_reload" or inference.route == "vllm_generate":
        _check_vllm_in_flight(inference, recompute_kv_cache=recompute_kv_cache)
    elif inference.has_fleet and not inference.pulled:
        raise ValueError(
            f"{IN_FLIGHT} with endpoints that come and go ({', '.join(inference.endpoints)}, "
            f"publish {inference.publish}): one that joins would be sent the weights that sampling "
            "began with, whatever the others have by then; expected publish pull (servers that "
            "follow the run), a list of URLs with publish update_weights_from_disk, the embedded "
            "engine, or in_flight_updates false"
        )


def _check_vllm_in_flight(inference: InferenceConfig, *, recompute_kv_cache: bool) -> None:
    """Raise ValueError unless vLLM is sent weights, and asked where it names those of tokens."""
    if inference.publish != "vllm_reload" or inference.route != "vllm_generate":
        raise ValueError(
            f"{IN_FLIGHT} with inference.publish {inference.publish} and route "
            f"{inference.route or 'chat'}: vLLM answers with the policy of each token on one route "
            "alone, by labels that publish vllm_reload sets; expected publish vllm_reload and "
            "route vllm_generate together, for endpoints of `marin-rl serve` the route chat, or "
            "in_flight_updates false"
        )
    if not inference.is_listed:
        raise ValueError(
            f"{IN_FLIGHT} with endpoints that come and go ({', '.join(inference.endpoints)}, "
            "publish vllm_reload): one that joins would have no weights of the run until the next "
            "checkpoint; expected a list of URLs without labels, or in_flight_updates false"
        )
    if not recompute_kv_cache:
        raise ValueError(
            f"{IN_FLIGHT} keep_kv_cache with inference.publish vllm_reload: vLLM drops "
            "what its prefix cache has of the old weights only together with the caches of "
            "completions under way; expected in_flight_updates true"
        )


def check_sampling_ahead(config: RunSections) -> None:
    """Refuse what cannot be sampled by an older checkpoint than the latest."""
    ahead, kept = config.max_staleness, config.retention.checkpoints_last
    if ahead and kept is not None and kept <= ahead:
        raise ValueError(
            f"retention.checkpoints_last is {kept}, but asynchrony.max_staleness {ahead} "
            f"samples with checkpoints that old: expected at least {ahead + 1}"
        )
    refuses = config.asynchrony is not None and config.asynchrony.bounds.shared_device == "refuse"
    if refuses and not config.inference.endpoints:
        raise ValueError(
            f"asynchrony.max_staleness is {ahead}, but the embedded engine samples on the "
            "device that trains, and asynchrony.limits.shared_device is refuse: expected "
            "inference.endpoints (`marin-rl serve` on other devices), shared_device "
            "time_sliced, or max_staleness 0"
        )
    if ahead and config.inference.endpoints and config.inference.publish == "none":
        raise ValueError(
            f"asynchrony.max_staleness is {ahead}, but inference.publish none leaves it to the "
            "endpoints which checkpoint they serve: set inference.publish to "
            "update_weights_from_disk or pull, so that they keep one until a round is sampled"
        )


def check_machines(config: RunSections) -> None:
    """Refuse other machines that sample from an engine in this process."""
    if config.flow.runner != "local" and not config.inference.endpoints:
        raise ValueError(
            f"flow.runner is {config.flow.runner}, but inference.endpoints is empty: the "
            "embedded engine answers this process alone; expected endpoints, such as registered"
        )

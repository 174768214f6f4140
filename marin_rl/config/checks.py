"""Conditions across the sections of a run, in the order in which they are checked.

Each raises ValueError. What must fit within a section stands with the section.
"""

from collections.abc import Callable

from marin_rl.config.estimators import GROUPS_OF_ONE
from marin_rl.config.sections import RunSections
from marin_rl.config.training import DistillationConfig
from marin_rl.metrics import is_defined


def check_adapter(config: RunSections) -> None:
    if config.inference.serve_merged is not None and config.policy.lora is None:
        raise ValueError(
            "inference.serve_merged is about policies with an adapter, and policy.lora is "
            "null: remove it, or set policy.lora.rank"
        )
    scheme, critic = config.policy.quantize_base, config.training.critic
    if scheme is None:
        return
    # What would need the base as it was before it was quantised, or cut.
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


def check_context(config: RunSections) -> None:
    if config.mesh.context is None:
        return
    if config.policy.quantize_base is not None:
        raise ValueError(
            f"mesh.context {config.mesh.context} with policy.quantize_base: a quantised base is "
            "whole on each device, and this axis shares parameters out; expected null"
        )
    pieces, batching = 2 * config.mesh.context, config.batching
    lengths = {
        "batching.row_tokens": [batching.row_tokens or 0],
        "batching.length_buckets": batching.length_buckets,
    }
    for key, values in lengths.items():
        if odd := [value for value in values if value % pieces]:
            raise ValueError(
                f"mesh.context {config.mesh.context} cuts each row into {pieces} pieces: expected "
                f"{key} in multiples of {pieces}, found {odd[0]}"
            )


def check_optimizer(config: RunSections) -> None:
    if config.training.optimizer == "muon" and config.policy.lora is not None:
        raise ValueError(
            "training.optimizer muon updates the matrices of layers, which policy.lora leaves as "
            "they are: expected optimizer null"
        )


def check_pairs(config: RunSections) -> None:
    # A run has one committed copy of pairs.
    if config.reward_model is not None and config.preference is not None:
        raise ValueError(
            "reward_model and preference each commit the pairs of their run: expected one of them; "
            "give the other a run of its own"
        )


def check_lengths(config: RunSections) -> None:
    sampled = config.reward_model is None and config.preference is None
    if sampled and config.sampling.max_tokens >= config.policy.context_length:
        raise ValueError(
            f"sampling.max_tokens ({config.sampling.max_tokens}) leaves no room for a prompt in "
            f"policy.context_length ({config.policy.context_length})"
        )
    buckets = config.batching.length_buckets
    if buckets and buckets[-1] < config.policy.context_length:
        raise ValueError(
            f"batching.length_buckets end at {buckets[-1]}: the largest must reach "
            f"policy.context_length ({config.policy.context_length})"
        )
    if config.sft.environment is not None and config.sft.environment.reward_model is not None:
        raise ValueError("sft.environment.reward_model: a warm start scores nothing; remove it")
    row = config.batching.row_tokens
    if config.batching.layout != "none" and row is not None and row < config.policy.context_length:
        raise ValueError(
            f"batching.row_tokens is {row}: a row must hold policy.context_length "
            f"({config.policy.context_length})"
        )


def check_lists(config: RunSections) -> None:
    others = {"sft.environment": config.sft.environment}
    others |= {f"evaluation.sets.{n}": e for n, e in (config.evaluation.sets or {}).items()}
    for key, chosen in others.items():
        if chosen is not None and chosen.mixture is not None:
            raise ValueError(f"{key}: expected one environment, found a list")
    for place, entry in enumerate(config.environment.mixture or ()):
        own = entry.sampling and entry.sampling.max_tokens
        if own and own > config.sampling.max_tokens:
            raise ValueError(
                f"environment.{place}.sampling.max_tokens ({own}) is above sampling.max_tokens "
                f"({config.sampling.max_tokens}), the limit of the run: raise that"
            )


def check_estimator(config: RunSections) -> None:
    """Refuse an advantage without its critic, enough members of a group, or its baseline."""
    estimator, rollouts = config.objective.estimator, config.rollouts
    if estimator.needs_critic and config.training.critic is None:
        raise ValueError(
            f"objective.advantage {estimator.name} needs a critic: expected training.critic, "
            "found null (the recipe ppo sets both)"
        )
    if config.training.critic is not None and not estimator.needs_critic:
        raise ValueError(
            "training.critic is for objective.advantage gae: found "
            f"{config.objective.advantage}, which would not look at its values"
        )
    if estimator.within_groups and min(rollouts.group_size, rollouts.group_size_min) < 2:
        raise ValueError(
            "rollouts.group_size and group_size_min are at least 2, for a baseline of the "
            f"group needs others: found {rollouts.group_size} and {rollouts.group_size_min}; 1 "
            f"needs objective.advantage {', '.join(GROUPS_OF_ONE)}"
        )
    k = config.objective.pass_k
    if "k" in estimator.inputs and k >= rollouts.group_size:
        raise ValueError(
            f"objective.pass_k is {k} and rollouts.group_size {rollouts.group_size}: the best "
            "of k tells members of a group apart only where k is less than there are of them"
        )
    greedy = rollouts.greedy_baseline
    if ("greedy_G" in estimator.inputs) != bool(greedy):
        raise ValueError(
            "objective.advantage remax and rollouts.greedy_baseline true need each other: "
            f"found {config.objective.advantage} and {'true' if greedy else 'null'}"
        )
    if greedy and config.sampling.temperature == 0:
        raise ValueError(
            "rollouts.greedy_baseline with sampling.temperature 0: every completion would be "
            "the baseline itself; expected a temperature above 0"
        )


def check_ratios(config: RunSections) -> None:
    """Refuse to compare log-probabilities of different supports, or of different policies."""
    objective, sampling = config.objective, config.sampling
    if sampling.changed and objective.kl_in_reward:
        raise ValueError(
            f"{sampling.changes} with "
            "objective.kl_placement reward: the sampler's log-probabilities are those that these "
            "leave, the reference's of all tokens, so a policy that is the reference itself would "
            "lose reward for every token. Set kl_placement to loss, or sample with top_p 1 and "
            "top_k 0"
        )
    if objective.importance_correction != "none":
        return
    if sampling.changed and objective.surrogate != "reinforce":
        raise ValueError(
            f"{sampling.changes} with "
            "objective.importance_correction none: log-probabilities are those that these leave, "
            "the trainer's of all tokens, so ratios are far from 1 before the first update. Set "
            "importance_correction to truncated or masked, whose ratio is the trainer's own, or "
            "sample with top_p 1 and top_k 0"
        )
    stale, ahead = config.staleness_rounds_max, config.max_staleness
    if stale and objective.surrogate == "reinforce":
        key = "asynchrony.max_staleness" if ahead else "batching.staleness_rounds_max"
        raise ValueError(
            f"{key} is {stale}, but objective.surrogate reinforce takes every rollout for one "
            "of the policy that it updates: set objective.importance_correction to truncated "
            "or masked, or choose a surrogate with a ratio (ppo_clip, say)"
        )


# Keys of `asynchrony` that choose among what a run samples, or keep it.
OF_SAMPLING = (
    "dynamic_sampling", "over_sampling", "group_filter", "curriculum", "replay", "partial_tokens",
)  # fmt: skip
IN_FLIGHT = "asynchrony.in_flight_updates"


def check_pushed_groups(config: RunSections) -> None:
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
    replay, most = config.ahead.replay, config.staleness_rounds_max
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
    objective, inference = config.objective, config.inference
    if objective.surrogate == "reinforce" and objective.importance_correction == "none":
        raise ValueError(
            f"{IN_FLIGHT} gives completions tokens of several policies, but objective.surrogate "
            "reinforce takes every token for one of the policy that it updates: set "
            "objective.importance_correction to truncated or masked, or choose a surrogate with a "
            "ratio (ppo_clip, say)"
        )
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
        _check_vllm_in_flight(config)
    elif inference.has_fleet and not inference.pulled:
        raise ValueError(
            f"{IN_FLIGHT} with endpoints that come and go ({', '.join(inference.endpoints)}, "
            f"publish {inference.publish}): one that joins would be sent the weights that sampling "
            "began with, whatever the others have by then; expected publish pull (servers that "
            "follow the run), a list of URLs with publish update_weights_from_disk, the embedded "
            "engine, or in_flight_updates false"
        )


def _check_vllm_in_flight(config: RunSections) -> None:
    """Raise ValueError unless vLLM is sent weights, and asked where it names those of tokens."""
    inference = config.inference
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
    if not config.recompute_kv_cache:
        raise ValueError(
            f"{IN_FLIGHT} keep_kv_cache with inference.publish vllm_reload: vLLM drops "
            "what its prefix cache has of the old weights only together with the caches of "
            "completions under way; expected in_flight_updates true"
        )


def check_sampling_ahead(config: RunSections) -> None:
    ahead, kept = config.max_staleness, config.retention.checkpoints_last
    if ahead and kept is not None and kept <= ahead:
        raise ValueError(
            f"retention.checkpoints_last is {kept}, but asynchrony.max_staleness {ahead} "
            f"samples with checkpoints that old: expected at least {ahead + 1}"
        )
    if config.ahead.bounds.shared_device == "refuse" and not config.inference.endpoints:
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
    if config.evaluation.patience is not None and (ahead or config.windowed):
        raise ValueError(
            "evaluation.patience ends a run before the round after an evaluation, which asynchrony "
            "samples by then: expected asynchrony.max_staleness 0, or patience null"
        )


def check_best(config: RunSections) -> None:
    metric = config.retention.best
    if metric is None:
        return
    k = metric.partition("@")[2]
    if not is_defined(metric) or (k and k not in map(str, config.evaluation.k)):
        raise ValueError(
            "retention.best: expected a metric of evaluations, such as eval/accuracy or "
            f"eval/pass@{config.evaluation.k[0]}, found {metric}; evaluation.k is "
            f"{list(config.evaluation.k)}"
        )


def check_machines(config: RunSections) -> None:
    if config.flow.runner != "local" and not config.inference.endpoints:
        raise ValueError(
            f"flow.runner is {config.flow.runner}, but inference.endpoints is empty: the "
            "embedded engine answers this process alone; expected endpoints, such as registered"
        )


def check_distillation(config: RunSections) -> None:
    settings, sampling = config.distillation, config.sampling
    if settings is None:
        return
    if sampling.temperature != 1 or sampling.changed:
        raise ValueError(
            "distillation compares the policy's log-probabilities with a teacher's at temperature "
            "1, of all tokens: expected sampling.temperature 1, top_p 1 and top_k 0, found "
            f"temperature {sampling.temperature:g}, {sampling.changes}"
        )
    if settings.loss is None:
        check_scored_rollouts(config, settings)
    elif config.training.critic is not None:
        raise ValueError(
            "distillation.loss is of a step without a value function: expected training.critic "
            "null, or loss null"
        )


def check_scored_rollouts(config: RunSections, settings: DistillationConfig) -> None:
    if config.objective.ratio_level != "token":
        raise ValueError(
            "distillation makes advantages that differ from token to token and needs "
            f"objective.ratio_level token, found {config.objective.ratio_level}"
        )
    if config.windowed or config.rollouts.source == "pushed":
        raise ValueError(
            "distillation scores the groups that a round samples, all of a shard at once: expected "
            "asynchrony.sampler in_order and rollouts.source null"
        )
    entries = config.environment.mixture or (config.environment,)
    if settings.context and any(each.on_broken_prefix == "segments" for each in entries):
        raise ValueError(
            "distillation.context precedes one prompt, and environment.on_broken_prefix segments "
            "gives a rollout several: expected on_broken_prefix end, or context null"
        )
    labels = [entry.shown_label for entry in config.environment.mixture or ()]
    if unknown := [name for name in settings.environments or () if name not in labels]:
        raise ValueError(
            f"distillation.environments: {unknown[0]!r} is none of the environments of the list: "
            f"expected some of {', '.join(labels) or 'a list in `environment`'}"
        )


# The first that fails is the one that is reported.
CHECKS: tuple[Callable[[RunSections], None], ...] = (
    check_pushed_groups,
    check_adapter,
    check_context,
    check_optimizer,
    check_selection,
    check_replay,
    check_window,
    check_in_flight,
    check_sampling_ahead,
    check_best,
    check_machines,
    check_lengths,
    check_lists,
    check_estimator,
    check_ratios,
    check_pairs,
    check_distillation,
)

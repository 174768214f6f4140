"""Conditions across the sections of a run, in the order in which they are checked.

Each raises ValueError. What must fit within a section stands with the section; conditions of what
is sampled for a round are in `checks.asynchrony`.
"""

from collections.abc import Callable

from marin_rl.config.checks.asynchrony import (
    check_in_flight,
    check_machines,
    check_pushed_groups,
    check_replay,
    check_sampling_ahead,
    check_selection,
    check_window,
)
from marin_rl.config.estimators import GROUPS_OF_ONE
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


def check_lengths(config: RunSections) -> None:
    """Refuse lengths that the context does not hold, and lists where one is expected."""
    sampled = config.reward_model is None  # nothing is sampled to train a reward model
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
    if config.batching.packing != "none" and row is not None and row < config.policy.context_length:
        raise ValueError(
            f"batching.row_tokens is {row}: a row must hold policy.context_length "
            f"({config.policy.context_length})"
        )


def check_lists(config: RunSections) -> None:
    """Refuse lists of environments where one is expected, and limits above the run's."""
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
    """Refuse an advantage without its critic, or without enough members of a group."""
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


def check_greedy_baseline(config: RunSections) -> None:
    """Refuse remax without greedy completions, and greedy completions without remax."""
    needs, greedy = "greedy_G" in config.objective.estimator.inputs, config.rollouts.greedy_baseline
    if needs != bool(greedy):
        raise ValueError(
            "objective.advantage remax and rollouts.greedy_baseline true need each other: "
            f"found {config.objective.advantage} and {'true' if greedy else 'null'}"
        )
    if greedy and config.sampling.temperature == 0:
        raise ValueError(
            "rollouts.greedy_baseline with sampling.temperature 0: every completion would be "
            "the baseline itself; expected a temperature above 0"
        )


def check_kl_in_reward(config: RunSections) -> None:
    """Refuse KL in the reward of distributions that narrowed sampling gives different supports."""
    sampling = config.sampling
    if sampling.narrowed and config.objective.kl_in_reward:
        raise ValueError(
            f"sampling.top_p {sampling.top_p:g} and top_k {sampling.top_k} with "
            "objective.kl_placement reward: the sampler's log-probabilities are those of the "
            "tokens that these leave, the reference's of all tokens, so a policy that is the "
            "reference itself would lose reward for every token. Set kl_placement to loss, or "
            "sample with top_p 1 and top_k 0"
        )


def check_ratios(config: RunSections) -> None:
    """Refuse objectives whose importance ratios do not match the freshness of their samples."""
    objective, sampling = config.objective, config.sampling
    if objective.importance_correction != "none":
        return
    if sampling.narrowed and objective.surrogate != "reinforce":
        raise ValueError(
            f"sampling.top_p {sampling.top_p:g} and top_k {sampling.top_k} with "
            "objective.importance_correction none: log-probabilities are those of the tokens "
            "that these leave, the trainer's of all tokens, so ratios are far from 1 before "
            "the first update. Set importance_correction to truncated or masked, whose ratio "
            "is the trainer's own, or sample with top_p 1 and top_k 0"
        )
    stale, ahead = config.staleness_rounds_max, config.max_staleness
    if stale and objective.surrogate == "reinforce":
        key = "asynchrony.max_staleness" if ahead else "batching.staleness_rounds_max"
        raise ValueError(
            f"{key} is {stale}, but objective.surrogate reinforce takes every rollout for one "
            "of the policy that it updates: set objective.importance_correction to truncated "
            "or masked, or choose a surrogate with a ratio (ppo_clip, say)"
        )


# The first that fails is the one that is reported.
CHECKS: tuple[Callable[[RunSections], None], ...] = (
    check_pushed_groups,
    check_merged_adapter,
    check_quantised_base,
    check_selection,
    check_replay,
    check_window,
    check_in_flight,
    check_sampling_ahead,
    check_machines,
    check_lengths,
    check_lists,
    check_estimator,
    check_greedy_baseline,
    check_kl_in_reward,
    check_ratios,
)

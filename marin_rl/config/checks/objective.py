"""Conditions of the objective: critic, groups, reference and importance ratios.

Leaves out what must fit within `objective` (objective.py).
"""

from marin_rl.config.estimators import GROUPS_OF_ONE
from marin_rl.config.sections import RunSections


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
    _check_greedy_baseline(config)
    k = config.objective.pass_k
    if "k" in estimator.inputs and k >= rollouts.group_size:
        raise ValueError(
            f"objective.pass_k is {k} and rollouts.group_size {rollouts.group_size}: the best "
            "of k tells members of a group apart only where k is less than there are of them"
        )


def _check_greedy_baseline(config: RunSections) -> None:
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

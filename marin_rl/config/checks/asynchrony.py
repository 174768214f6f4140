"""Conditions of what is sampled for a round: selection, curriculum, replay, windows and endpoints.

Leaves out what must fit within `asynchrony` (asynchrony.py).
"""

from marin_rl.config.in_flight import check_endpoints, check_objective
from marin_rl.config.sections import RunSections


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


def check_selection(config: RunSections) -> None:
    """Refuse to choose among groups where there is nothing to choose by."""
    if not config.selects_groups:
        return
    if config.rollouts.source == "pushed":
        raise ValueError(
            "asynchrony.dynamic_sampling, over_sampling_factor and group_filter choose among "
            "groups that the run samples: found rollouts.source pushed; expected null"
        )
    within = config.objective.estimator.within_groups
    if config.samples_on and not (within and config.filters.zero_signal):
        found = f"filters.zero_signal {config.filters.zero_signal}".lower()
        found = found if within else f"objective.advantage {config.objective.advantage}"
        raise ValueError(
            "asynchrony.dynamic_sampling filter samples until enough groups have rewards that "
            "differ: expected an advantage within groups (grpo, rloo, …) and "
            f"filters.zero_signal true, found {found}"
        )


def check_curriculum(config: RunSections) -> None:
    """Refuse to choose the examples of groups that others sample."""
    if config.curriculum is not None and config.rollouts.source == "pushed":
        raise ValueError(
            f"asynchrony.curriculum {config.curriculum} chooses what the run samples: found "
            "rollouts.source pushed; expected none"
        )


def check_replay(config: RunSections) -> None:
    """Refuse to use groups again that are too old to be trained on."""
    replay, most = config.replay, config.staleness_rounds_max
    if replay is None:
        return
    if config.rollouts.source == "pushed":
        raise ValueError(
            "asynchrony.replay uses groups again that the run samples: found rollouts.source "
            "pushed; expected replay null"
        )
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
            f"asynchrony.max_inflight_groups is {most}, so that no round would ever have its "
            f"rollouts.groups_per_round ({groups}) groups: expected at least {groups}"
        )
    if config.windowed and config.environment.reward_model is not None:
        raise ValueError(
            "environment.reward_model judges a round's groups together: expected asynchrony."
            "sampler in_order, found windowed"
        )


def check_in_flight(config: RunSections) -> None:
    """Refuse new weights in flight for objectives and endpoints that cannot bear them."""
    if config.in_flight_updates:
        check_objective(config.objective)
        check_endpoints(config.inference, recompute_kv_cache=config.recompute_kv_cache)


def check_pieces(config: RunSections) -> None:
    """Refuse to keep pieces of what the run does not sample."""
    if config.piece_tokens is not None and config.rollouts.source == "pushed":
        raise ValueError(
            "asynchrony.partial_rollout keeps what the run samples: found rollouts.source "
            "pushed; expected false"
        )


def check_sampling_ahead(config: RunSections) -> None:
    """Refuse what cannot be sampled by an older checkpoint than the latest."""
    ahead, kept = config.max_staleness, config.retention.checkpoints_last
    if ahead and kept is not None and kept <= ahead:
        raise ValueError(
            f"retention.checkpoints_last is {kept}, but asynchrony.max_staleness {ahead} "
            f"samples with checkpoints that old: expected at least {ahead + 1}"
        )
    refuses = config.asynchrony is not None and config.asynchrony.shared_device == "refuse"
    if refuses and not config.inference.endpoints:
        raise ValueError(
            f"asynchrony.max_staleness is {ahead}, but the embedded engine samples on the "
            "device that trains, and asynchrony.shared_device is refuse: expected "
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

"""Conditions across the sections of a run, by topic, in the order in which they are checked.

Each raises ValueError. What must fit within a section stands with the section.
"""

from collections.abc import Callable

from marin_rl.config.checks.adapters import check_merged_adapter, check_quantised_base
from marin_rl.config.checks.asynchrony import (
    check_in_flight,
    check_machines,
    check_pushed_groups,
    check_replay,
    check_sampling_ahead,
    check_selection,
    check_window,
)
from marin_rl.config.checks.lengths import check_lengths
from marin_rl.config.checks.objective import check_estimator, check_kl_in_reward, check_ratios
from marin_rl.config.sections import RunSections

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
    check_estimator,
    check_kl_in_reward,
    check_ratios,
)

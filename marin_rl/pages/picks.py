"""Selection of a round's rollouts for a page: few, and deterministic.

Of a round these groups are taken: the one whose rewards differ most, the one with the lowest mean,
the one with the highest, then others in their order. Of a group: its best, its worst, then others
in their order. The same files give the same picks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BEST, WORST = "best", "worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rollout to pick from; `reward` is None where it has no usable one."""

    rollout_id: str
    index: int
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A group that is shown, the reason, and its shown members by id, with their place in it."""

    group_id: str
    why: str
    members: Mapping[str, str]


def pick(groups: Mapping[str, Sequence[Member]], n_groups: int, n_members: int) -> list[Pick]:
    """Pick at most `n_groups` groups of at most `n_members` members, the most telling first."""
    chosen: dict[str, str] = {}
    rewards = {
        name: [member.reward for member in members if member.reward is not None]
        for name, members in groups.items()
    }
    means = {name: math.fsum(values) / len(values) for name, values in rewards.items() if values}
    spreads = {name: max(rewards[name]) - min(rewards[name]) for name in means}
    if spreads and max(spreads.values()) > 0:
        chosen[max(spreads, key=spreads.__getitem__)] = "rewards differ most"
    if means:
        chosen.setdefault(min(means, key=means.__getitem__), "lowest mean reward")
        chosen.setdefault(max(means, key=means.__getitem__), "highest mean reward")
    for name in groups:
        chosen.setdefault(name, "next in order")
    picked = list(chosen.items())[:n_groups]
    return [
        Pick(group_id=name, why=why, members=pick_members(groups[name], n_members))
        for name, why in picked
    ]


def pick_members(members: Sequence[Member], n_members: int) -> dict[str, str]:
    """The ids of the shown members in their order, each with its place: best, worst or none.

    Where all rewards are equal, none is best or worst.
    """
    places: dict[str, str] = {}
    valid = [member for member in members if member.reward is not None]
    if valid:
        best = max(valid, key=lambda member: (member.reward or 0.0, -member.index))
        worst = min(valid, key=lambda member: (member.reward or 0.0, -member.index))
        if best.reward != worst.reward:
            places = {best.rollout_id: BEST, worst.rollout_id: WORST}
    for member in members:
        places.setdefault(member.rollout_id, "")
    kept = dict(list(places.items())[:n_members])
    return {m.rollout_id: kept[m.rollout_id] for m in members if m.rollout_id in kept}

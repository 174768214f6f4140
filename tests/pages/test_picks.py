"""Rollouts of a round are picked for a reason, and the same way every time."""

from marin_rl.display.text import evenly
from marin_rl.pages.rounds import Member, pick, pick_members


def members(name: str, *rewards: float | None) -> list[Member]:
    return [
        Member(rollout_id=f"{name}{index}", index=index, reward=reward)
        for index, reward in enumerate(rewards)
    ]


def test_the_widest_then_the_lowest_then_the_highest_group() -> None:
    groups = {
        "a": members("a", 0.4, 0.6),
        "b": members("b", 0.0, 0.1),
        "c": members("c", 0.0, 1.0),
        "d": members("d", 0.9, 1.0),
        "e": members("e", None, None),
    }
    found = [(one.group_id, one.why) for one in pick(groups, 4, 2)]
    assert found == [
        ("c", "rewards differ most"),
        ("b", "lowest mean reward"),
        ("d", "highest mean reward"),
        ("a", "next in order"),
    ]
    assert len(pick(groups, 99, 2)) == 5
    assert pick(groups, 0, 2) == []


def test_best_and_worst_come_before_others_and_stay_in_order() -> None:
    group = members("g", 0.5, 1.0, None, 0.0, 1.0)
    assert pick_members(group, 3) == {"g0": "", "g1": "best", "g3": "worst"}
    assert pick_members(group, 2) == {"g1": "best", "g3": "worst"}


def test_of_equal_rewards_none_is_best_or_worst() -> None:
    assert pick_members(members("g", 1.0, 1.0, 1.0), 2) == {"g0": "", "g1": ""}
    assert pick_members(members("g", 1.0), 2) == {"g0": ""}
    assert pick_members(members("g", None, None), 1) == {"g0": ""}


def test_rounds_are_spread_evenly_with_both_ends() -> None:
    assert evenly(range(5), 9) == [0, 1, 2, 3, 4]
    assert evenly(range(9), 3) == [0, 4, 8]
    assert evenly(range(9), 1) == [8]
    assert evenly([], 3) == []

"""Pairs out of rollouts, by hand: who is best, who is worst, and which groups give none."""

from dataclasses import replace

import pytest
from support.run_factories import commit_round, configuration, group, group_of, rollout

from marin_rl.errors import InputError, ObjectMissing
from marin_rl.rollouts.rewards import pair_of_group, pairs_of_run
from marin_rl.storage.runs import Run
from marin_rl.types import RewardComponent, Rollout, RolloutGroup

DIGESTS = ("t", "c")


def answered(index: int, reward: float | None, answer: int, style: float = 0.0) -> Rollout:
    made = rollout(f"g/{index}", index=index, reward=reward, completion=[answer])
    parts = (*made.reward_components, RewardComponent(name="style", value=style))
    return replace(made, reward_components=parts)


def pair(group: RolloutGroup, component: str | None = None, margin: float = 0.0):
    return pair_of_group(group, component, margin, DIGESTS, "run")


def test_the_best_is_paired_with_the_worst_with_their_own_tokens():
    members = [answered(0, 0.5, 8), answered(1, 1.0, 9), answered(2, -1.0, 10), answered(3, 1.0, 8)]
    found = pair(group_of("g", members))
    assert found is not None
    assert (found.chosen_id, found.rejected_id) == ("g/1", "g/2")
    assert (found.chosen_reward, found.rejected_reward) == (1.0, -1.0)
    assert found.chosen_token_ids.tolist() == [5, 6, 7, 9]
    assert found.rejected_token_ids.tolist() == [5, 6, 7, 10]
    assert (found.chosen, found.rejected) == (members[1].turns[-1].content, "J" + "")
    assert (found.id, found.source) == ("run/g", "run")
    assert (found.tokenizer_digest, found.chat_template_digest) == DIGESTS
    assert [message.role for message in found.messages] == ["system", "user"]


def test_a_component_ranks_otherwise_than_the_reward():
    members = [answered(0, 1.0, 8, style=0.0), answered(1, 0.0, 9, style=2.0)]
    found = pair(group_of("g", members), "style")
    assert found is not None
    assert (found.chosen_id, found.chosen_reward, found.rejected_reward) == ("g/1", 2.0, 0.0)


@pytest.mark.parametrize(
    ("members", "margin", "gives"),
    [
        ([answered(0, 1.0, 8), answered(1, 0.5, 9)], 0.5, True),
        ([answered(0, 1.0, 8), answered(1, 0.5, 9)], 0.51, False),
        ([answered(0, 1.0, 8), answered(1, 1.0, 9)], 0.0, False),
        ([answered(0, 1.0, 8), answered(1, 0.0, 8)], 0.0, False),
        ([answered(0, 1.0, 8), rollout("g/1", index=1, status="error")], 0.0, False),
        ([answered(0, 1.0, 8), answered(1, float("nan"), 9)], 0.0, False),
    ],
    ids=["at the margin", "below it", "equal", "one answer", "one member", "not finite"],
)
def test_groups_that_give_a_pair(members, margin, gives):
    assert (pair(group_of("g", members), None, margin) is not None) == gives


def test_all_sealed_rounds_are_read_or_those_that_are_asked_for(tmp_path):
    run = Run.create_or_open(configuration(str(tmp_path)))
    for round in range(2):
        named = [group(f"round-{round}/{name}", [0.0, 1.0, 0.5, 0.0]) for name in "ab"]
        commit_round(run, round, [[_with_answers(group) for group in named]])
    assert [p.id for p in pairs_of_run(run)] == [
        "run/round-0/a", "run/round-0/b", "run/round-1/a", "run/round-1/b",
    ]  # fmt: skip
    assert [p.id for p in pairs_of_run(run, rounds=[1])] == ["run/round-1/a", "run/round-1/b"]
    with pytest.raises(InputError, match=r"component 'style'.*components there: correct"):
        pairs_of_run(run, component="style")
    with pytest.raises(ObjectMissing, match="not sealed"):
        pairs_of_run(run, rounds=[7])


def _with_answers(group: RolloutGroup) -> RolloutGroup:
    """Every member with an answer of its own."""
    own = (
        rollout(r.rollout_id, index=r.index_in_group, reward=r.reward, completion=[20 + i])
        for i, r in enumerate(group.rollouts)
    )
    return replace(group, rollouts=tuple(own))

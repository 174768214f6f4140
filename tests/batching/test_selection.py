"""Groups that a round takes of those that were sampled, by hand; and how many are still missing."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_factories import (
    CHECKPOINT,
    FINGERPRINT,
    audit_round,
    commit_round,
    configuration,
    group,
    group_of,
    policy,
    rollout,
)

from marin_rl.batching.build import build_round, further_shards
from marin_rl.batching.selection import shards_missing
from marin_rl.config import parse_config, pin_code
from marin_rl.doctor.data import group_filter
from marin_rl.errors import ConfigError
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.batches import read_dispositions
from marin_rl.storage.tables.rollouts import commit_shard, seal_round
from marin_rl.types import RolloutGroup, SlotRef

FLAT, EVEN = [1.0, 1.0], [0.0, 1.0]


def _run(root: str | os.PathLike[str], groups: int = 2, **sections: Any) -> Run:
    tree = {"rollouts": {"group_size": 2}, "objective": {"advantage": "grpo"}, **sections}
    return Run.create_or_open(configuration(os.fspath(root), groups=groups, **tree))


def fates(run: Run, round: int = 0) -> dict[str, str]:
    """Reason or disposition of each group; its members must agree."""
    rows = read_dispositions(run, round).to_pylist()
    by_group: dict[str, set[str]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], set()).add(row["reason"] or row["disposition"])
    assert audit_round(run, round).balanced
    return {name: "|".join(sorted(fate)) for name, fate in by_group.items()}


def processed(run: Run, *groups: RolloutGroup) -> SlotRef:
    return build_round(run, 0, commit_round(run, 0, [groups]))


def test_a_round_takes_its_first_groups_with_a_signal(tmp_path: Path) -> None:
    run = _run(tmp_path, asynchrony={"over_sampling": 2})
    ref = processed(run, group("a", FLAT), group("b", EVEN), group("c", EVEN), group("d", EVEN))
    assert fates(run) == {"a": "zero_signal", "b": "consumed", "c": "consumed", "d": "surplus"}
    summary = ref.summary
    assert (summary["selection/groups_sampled"], summary["selection/groups_taken"]) == (4, 2)
    assert summary["tokens/wasted/surplus"] == summary["tokens/wasted/zero_signal"] == 4


def test_surplus_is_in_no_statistic_that_advantages_are_divided_by(tmp_path: Path) -> None:
    scaled = {"advantage": "dr_grpo", "advantage_scale": "batch_std"}
    groups = [group("a", [0.0, 1.0]), group("b", [0.0, 3.0])]
    run = _run(tmp_path / "all", objective=scaled)
    processed(run, *groups)
    expected = {r["rollout_id"]: r["advantage"] for r in read_dispositions(run, 0).to_pylist()}
    run = _run(tmp_path / "more", objective=scaled, asynchrony={"over_sampling": 1.5})
    processed(run, *groups, group("c", [0.0, 100.0]))
    for row in read_dispositions(run, 0).to_pylist():
        if row["group_id"] != "c":
            assert row["advantage"] == expected[row["rollout_id"]]


def test_the_first_that_were_finished_are_taken(tmp_path: Path) -> None:
    def finished(name: str, second: int) -> RolloutGroup:
        made = group(name, EVEN)
        rollouts = [
            replace(r, timing=replace(r.timing, finished_at=r.timing.finished_at + later))
            for r in made.rollouts
            for later in [timedelta(seconds=second)]
        ]
        return group_of(name, rollouts)

    cancelled = rollout("d/0", status="aborted"), rollout("d/1", index=1, status="aborted")
    lost = group_of("d", [replace(r, finish_reason="unfinished") for r in cancelled])
    run = _run(tmp_path, asynchrony={"over_sampling": {"factor": 2, "select": "first_done"}})
    ref = processed(run, finished("a", 9), finished("b", 1), finished("c", 2), lost)
    assert fates(run) == {"a": "surplus", "b": "consumed", "c": "consumed", "d": "unfinished"}
    assert ref.summary["rollouts/filtered"] == 4
    assert ref.summary["rollouts/failed"] == 0


def test_the_length_bias_compares_what_is_trained_on_with_what_was_finished(tmp_path):
    run = _run(tmp_path, groups=1, asynchrony={"over_sampling": 2})
    ref = processed(run, group("a", EVEN, completion=[4, 4]), group("b", EVEN, completion=[4] * 6))
    assert ref.summary["selection/length_bias"] == 2 - 4


@pytest.mark.parametrize(
    ("settings", "passing"),
    [
        ({"group_filter": "reward_std_nonzero"}, "varied wordy"),
        ({"group_filter": {"score": "min_reward", "min": 0.6}}, "flat"),
        ({"group_filter": "diversity"}, "flat varied wordy"),
        ({"group_filter": {"score": "diversity", "min": 0.9}}, "varied"),
        ({"group_filter": {"score": "reasonable_length", "min": 0.9}}, "flat varied"),
        ({"group_filter": {"score": "quality_and_diversity", "min": 0.49}}, "flat varied"),
    ],
)
def test_named_filters_by_hand(tmp_path: Path, settings: dict[str, Any], passing: str) -> None:
    """Wordy has equal completions, one of which was cut; the rewards of flat are equal."""
    run = _run(
        tmp_path, groups=3, filters={"zero_signal": False}, asynchrony=settings,
        rollouts={"group_size_min": 2},
    )  # fmt: skip
    flat = [rollout(f"flat/{i}", index=i, reward=1.0, completion=[8, 9]) for i in range(2)]
    varied = [rollout(f"varied/{i}", index=i, reward=float(i), completion=[8, i]) for i in range(2)]
    wordy = [
        rollout("wordy/0", reward=0.0, completion=[8]),
        rollout("wordy/1", index=1, reward=1.0, completion=[8], status="truncated"),
    ]
    groups = {"flat": flat, "varied": varied, "wordy": wordy}
    processed(run, *(group_of(name, members) for name, members in groups.items()))
    taken = [name for name, fate in fates(run).items() if fate == "consumed"]
    assert sorted(taken) == sorted(passing.split())


FILTERS = """
def longest(group):
    return max(len(r.token_ids) for r in group.rollouts)

def odd(group):
    return group.group_id in "bd"

def broken(group):
    return 1 / 0

def text(group):
    return "yes"

def lacking():
    return 1
"""


def own_filter(tmp_path: Path, name: str, **more: Any) -> Run:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "filters.py").write_text(FILTERS)
    settings = {"group_filter": {"score": f"filters.py:{name}", **more}, "over_sampling": 2}
    tree = configuration(str(tmp_path), groups=2, asynchrony=settings).model_dump(mode="json")
    tree["rollouts"]["group_size"] = 2
    return Run.create_or_open(parse_config(pin_code(tree, tmp_path)))


def test_a_function_of_the_user_scores_groups_or_drops_them(tmp_path: Path) -> None:
    groups = [
        group(name, EVEN, completion=[4] * n) for name, n in zip("abcd", (2, 9, 5, 7), strict=True)
    ]
    run = own_filter(tmp_path, "longest", min=9)
    processed(run, *groups)
    assert fates(run) == {"a": "longest", "b": "consumed", "c": "longest", "d": "consumed"}


@pytest.mark.parametrize(
    ("name", "message"),
    [("broken", "failed on a: ZeroDivisionError"), ("text", "returned 'yes' for a: expected")],
)
def test_a_filter_that_does_not_work_is_named(tmp_path: Path, name: str, message: str) -> None:
    run = own_filter(tmp_path, name)
    with pytest.raises(ConfigError, match=f"filters.py:{name}' {message}"):
        processed(run, group("a", EVEN), group("b", EVEN))


def sampled_on(run: Run, shards: Sequence[Sequence[RolloutGroup]]) -> list[SlotRef]:
    return [
        commit_shard(run, 0, shard, groups, FINGERPRINT, policy())
        for shard, groups in enumerate(shards)
    ]


def test_a_round_is_sampled_on_until_it_has_its_groups(tmp_path: Path) -> None:
    settings = {"dynamic_sampling": 3}
    run = _run(tmp_path, groups=2, asynchrony=settings, rollouts={"shards_per_round": 2})
    refs = sampled_on(run, [[group("a", FLAT)], [group("b", EVEN)]])
    assert further_shards(run, 0, refs) == [2, 3]  # one of two had a signal
    refs += [commit_shard(run, 0, 2, [group("c", FLAT)], FINGERPRINT, policy())]
    refs += [commit_shard(run, 0, 3, [group("d", EVEN)], FINGERPRINT, policy())]
    assert further_shards(run, 0, refs) == []
    build_round(run, 0, seal_round(run, 0, refs, [CHECKPOINT]))
    assert Counter(fates(run).values()) == {"zero_signal": 2, "consumed": 2}


def test_a_round_that_was_sampled_as_often_as_it_may_be_is_short(tmp_path: Path) -> None:
    settings = {"dynamic_sampling": 2}
    run = _run(tmp_path, groups=1, asynchrony=settings)
    refs = sampled_on(run, [[group("a", FLAT)], [group("b", FLAT)]])
    assert further_shards(run, 0, refs) == []
    ref = build_round(run, 0, seal_round(run, 0, refs, [CHECKPOINT]))
    assert (ref.summary["rows"], ref.summary["selection/groups_taken"]) == (0, 0)


@given(
    selected=st.integers(0, 40), shards=st.integers(1, 40), per_batch=st.integers(1, 8),
    batches=st.integers(1, 5),
)  # fmt: skip
def test_missing_shards_are_at_most_a_batch_and_never_beyond_the_last(
    selected: int, shards: int, per_batch: int, batches: int
) -> None:
    config = configuration(
        "memory://x", shards=per_batch, groups=16,
        asynchrony={"dynamic_sampling": batches},
    )  # fmt: skip
    missing = list(shards_missing(selected, shards, config))
    assert missing == list(range(shards, shards + len(missing)))
    assert len(missing) <= per_batch
    assert shards + len(missing) <= max(shards, per_batch * batches)
    assert (not missing) == (selected >= 16 or shards >= per_batch * batches)


def test_doctor_loads_a_filter_before_a_run(tmp_path: Path) -> None:
    assert group_filter(own_filter(tmp_path, "longest").config) == "filter longest"
    with pytest.raises(ConfigError, match="expected a function of one group"):
        group_filter(own_filter(tmp_path / "no", "lacking").config)

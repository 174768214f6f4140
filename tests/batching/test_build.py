"""process(round): batches and dispositions by hand, and the laws of batching on random rounds."""

import os
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.run_factories import audit_round, commit_round, configuration, group, group_of, rollout

from marin_rl.batching.build import build_round
from marin_rl.batching.dispositions import overlong_penalty
from marin_rl.batching.plan import bucket
from marin_rl.batching.round_metrics import with_version_sums
from marin_rl.config import BatchingConfig
from marin_rl.errors import CommitConflict, ConfigError, CorruptObject
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.batches import read_batches, read_dispositions
from marin_rl.types import RewardComponent, Rollout, RolloutGroup, SlotRef, TrainingBatch


def _run(root: str | os.PathLike[str], **sections: Any) -> Run:
    return Run.create_or_open(configuration(os.fspath(root), **sections))


def _built(run: Run, *shards: list[RolloutGroup], round: int = 0) -> SlotRef:
    return build_round(run, round, commit_round(run, round, shards))


def _fates(run: Run, round: int = 0) -> dict[str, str]:
    rows = read_dispositions(run, round).to_pylist()
    return {row["rollout_id"]: row["reason"] or row["disposition"] for row in rows}


def test_policies_of_tokens_are_summed_where_a_rollout_has_several():
    """Prompts do not count: 2 + 3 + 3 of the first, three times 1 of the second."""
    table = pa.table(
        {
            "policy_versions": [[9, 2, 3, 3], None],
            "loss_mask": [[0, 1, 1, 1], [0, 1, 1, 1]],
            "policy_version_min": [2, 1],
            "policy_version_max": [3, 1],
            "n_completion_tokens": [3, 3],
        }
    )
    summed = with_version_sums(table)
    assert summed["policy_version_sum"].to_pylist() == [8, 3]
    assert summed["n_tokens_kept"].to_pylist() == [1, 0]
    assert summed["n_tokens_continued"].to_pylist() == [2, 0]
    assert "policy_versions" not in summed.column_names


def _sampled(name: str, members: int, *, prompt: list[int], tokens: int) -> RolloutGroup:
    one = {"prompt": prompt, "completion": [7] * tokens}
    rewards = np.linspace(0, 1, members).tolist()
    return group_of(
        name, [rollout(f"{name}/{i}", index=i, reward=r, **one) for i, r in enumerate(rewards)]
    )


@pytest.mark.parametrize(
    ("members", "prompt", "tokens", "microbatch", "expected"),
    [
        # A group may take 64 + 15 x 12 = 244 tokens, and takes 44 + 16 x 12 = 236.
        pytest.param(16, 44, 12, 16, (256, 4, 8), id="a group a row"),
        # No row is longer than a microbatch, 2 x 64; three groups take 8 such rows, and two 6.
        pytest.param(16, 44, 12, 2, (128, 1, 22), id="a row as long as a microbatch"),
        pytest.param(2, 10, 6, 16, (128, 4, 2), id="several groups a row"),
        pytest.param(2, 30, 2, 1, (32, 1, 16), id="a sequence a row"),
    ],
)
def test_auto_makes_rows_for_whole_groups(tmp_path, members, prompt, tokens, microbatch, expected):
    run = _run(
        tmp_path,
        batching={"packing": "auto"},
        training={"microbatch_sequences": microbatch},
        policy={"context_length": 64},
        sampling={"max_tokens": 12},
        rollouts={"groups_per_round": 8, "group_size": members},
    )
    sampled = [_sampled(f"g{n}", members, prompt=[n] * prompt, tokens=tokens) for n in range(8)]
    (batch,) = read_batches(run, _built(run, sampled))
    rows, length = batch.token_ids.shape
    assert (length, batch.microbatch_rows, rows) == expected
    assert int(batch.loss_mask.sum()) == 8 * members * tokens


def test_auto_gives_prompts_that_differ_to_each_of_their_completions(tmp_path: Path) -> None:
    run = _run(tmp_path, batching={"packing": "auto"})
    members = [
        rollout("g/0", reward=0.0, prompt=[1, 2], completion=[7]),
        rollout("g/1", index=1, reward=1.0, prompt=[1, 3], completion=[8]),
    ]
    (batch,) = read_batches(run, _built(run, [group_of("g", members)]))
    assert batch.token_ids[0, :6].tolist() == [1, 2, 7, 1, 3, 8]
    assert batch.loss_mask[0, :6].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("packing", ["sequences", "shared_prompt", "auto"])
def test_rollouts_of_several_policies_are_packed_as_they_are_padded(tmp_path, packing):
    """Each token keeps its mask, its sampler's logprob and its advantage, wherever it lies."""
    several = {"policy_versions": [0, 0, 1, 1, 2], "version": 1}
    members = [
        rollout("g/0", reward=0.0, completion=[7, 8], version=2),
        replace(rollout("g/1", index=1, completion=[4, 3], **several), policy_version_max=2),
        rollout("g/2", index=2, reward=0.5, completion=[9], version=1),
    ]
    bounds = {"staleness_rounds_max": 2}
    padded, packed = (
        _run(tmp_path / name, asynchrony={"partial_tokens": True}, batching={**bounds, **more})
        for name, more in (
            ("padded", {}),
            ("packed", {"packing": packing, "row_tokens": None if packing == "auto" else 128}),
        )
    )
    refs = [_built(run, [group_of("g", members)], round=2) for run in (padded, packed)]
    ways = [list(read_batches(run, ref)) for run, ref in zip((padded, packed), refs, strict=True)]
    assert len(ways[1][0].token_ids) == 1, "one row"
    assert _trained(ways[0]) == _trained(ways[1])
    totals = [committed_manifest(run.store, ref.slot).totals for run, ref in
              zip((padded, packed), refs, strict=True)]  # fmt: skip
    named = ("tokens/in_flight/", "staleness/")
    mixed = [{k: v for k, v in each.items() if k.startswith(named)} for each in totals]
    assert mixed[0] == mixed[1]
    assert (mixed[0]["tokens/in_flight/kept"], mixed[0]["tokens/in_flight/continued"]) == (1, 1)


def _trained(batches: list[TrainingBatch]) -> list[tuple[float, ...]]:
    """Token, logprob, advantage and position of each trained token, in the order of rollouts."""
    rows = []
    for batch in batches:
        mask = batch.loss_mask > 0
        arrays = batch.token_ids, batch.policy_logprobs, batch.advantages, batch.positions
        rows += list(zip(*(array[mask].tolist() for array in arrays), strict=True))
    return rows


@pytest.mark.parametrize("beyond", [1e300, -1e39])
def test_a_committed_reward_that_cannot_be_trained_on_is_left_out_and_named(
    beyond: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions that accepted such rewards left shards behind, which end no round."""
    run = _run(tmp_path)
    part = RewardComponent(name="score", value=beyond)
    members = [
        rollout("g/0", reward=0.0),
        rollout("g/1", index=1, reward=1.0),
        replace(rollout("g/2", index=2, reward=beyond), reward_components=(part,)),
    ]
    ref = _built(run, [group_of("g", members)])
    assert _fates(run) == {"g/0": "consumed", "g/1": "consumed", "g/2": "no_reward"}
    assert (ref.summary["reward"], ref.summary["reward_max"]) == (0.5, 1.0)
    assert np.isfinite(list(ref.summary.values())).all()
    assert f"found {beyond:g} of g/2" in caplog.text
    assert audit_round(run, 0).balanced


def test_a_round_by_hand(tmp_path: Path) -> None:
    run = _run(tmp_path)
    first = rollout("g/0", reward=0.0, prompt=[5, 6], completion=[7, 8, 9])
    second = rollout("g/1", index=1, reward=1.0, prompt=[5, 6], completion=[4])
    ref = _built(run, [group_of("g", [first, second])])
    (batch,) = read_batches(run, ref)
    assert batch.token_ids.shape == (2, 32)
    assert batch.rollout_ids == (("g/0",), ("g/1",))
    expected = {
        "token_ids": ([5, 6, 7, 8, 9], [5, 6, 4]),
        "loss_mask": ([0, 0, 1, 1, 1], [0, 0, 1]),
        "segment_ids": ([1, 1, 1, 1, 1], [1, 1, 1]),
        "positions": ([0, 1, 2, 3, 4], [0, 1, 2]),
        "policy_logprobs": ([0, 0, -0.5, -1, -1.5], [0, 0, -0.5]),
        "advantages": ([0, 0, -1, -1, -1], [0, 0, 1]),
        "returns": ([0, 0, 0, 0, 0], [0, 0, 1]),
    }
    for name, rows in expected.items():
        for array, row in zip(getattr(batch, name), rows, strict=True):
            assert_array_equal(array, [*row, *[0] * (32 - len(row))], err_msg=name)
    assert ref.summary["tokens"] == 8
    assert ref.summary["rollouts/consumed"] == 2
    assert ref.summary["reward"] == 0.5
    assert ref.summary["rewards/correct/mean"] == 0.5


def test_scores_of_a_teacher_lie_at_their_tokens_and_nan_where_there_are_none(tmp_path):
    run = _run(tmp_path, distillation={"coefficient": 1.0}, objective={"ratio_level": "token"})
    scores = np.array([0, 0, 0, -3.0, -0.5], np.float32)
    taught = replace(rollout("g/0", reward=0.0), teacher_logprobs=scores)
    ref = _built(run, [group_of("g", [taught, rollout("g/1", index=1, reward=1.0)])])
    (batch,) = read_batches(run, ref)
    assert batch.teacher_logprobs is not None
    assert_array_equal(batch.teacher_logprobs[0, :5], scores)
    assert_array_equal(batch.teacher_logprobs[1, :5], [0, 0, 0, np.nan, np.nan])


def test_every_fate_has_its_reason(tmp_path: Path) -> None:
    run = _run(
        tmp_path, filters={"truncated": True}, batching={"staleness_rounds_max": 1}, groups=3
    )
    kept = [rollout(f"a/{i}", index=i, reward=float(i), version=4) for i in range(3)]
    odd = [
        rollout("a/3", index=3, status="error", version=4),
        rollout("a/4", index=4, status="aborted", version=4),
        rollout("a/5", index=5, reward=None, version=4),
        rollout("a/6", index=6, reward=float("nan"), version=4),
        rollout("a/7", index=7, completion=(), version=4),
        rollout("a/8", index=8, status="truncated", reward=9.0, version=4),
        rollout("a/9", index=9, reward=9.0, version=2),
    ]
    lone = [rollout("b/0", version=4), rollout("b/1", index=1, status="error", version=4)]
    flat = group("c", [0.1, 0.1, 0.1], version=4)
    groups = [group_of("a", [*kept, *odd]), group_of("b", lone), flat]
    ref = _built(run, groups, round=4)
    assert _fates(run, 4) == {
        **dict.fromkeys(("a/0", "a/1", "a/2"), "consumed"),
        "a/3": "error",
        "a/4": "aborted",
        "a/5": "no_reward",
        "a/6": "no_reward",
        "a/7": "no_tokens",
        "a/8": "truncated",
        "a/9": "policy_age",
        "b/0": "short_group",
        "b/1": "error",
        **dict.fromkeys(("c/0", "c/1", "c/2"), "zero_signal"),
    }
    # What is dropped for its own sake is not in the baseline of the others either.
    advantages = read_dispositions(run, 4)["advantage"].to_pylist()
    assert advantages[:3] == [-1.5, 0.0, 1.5]
    assert advantages[3:] == [None] * 12
    counts = {name: ref.summary[f"rollouts/{name}"] for name in ("filtered", "stale", "failed")}
    assert counts == {"filtered": 5, "stale": 1, "failed": 6}
    assert audit_round(run, 4).balanced


@pytest.mark.parametrize(
    "objective",
    [
        {"kl_coefficient": 0.1, "kl_placement": "reward"},
        {"kl_coefficient": 0.1, "kl_placement": "loss"},
        {"entropy_coefficient": 0.01},
    ],
)
def test_kl_and_entropy_are_signals_where_rewards_are_equal(objective, tmp_path):
    run = _run(tmp_path, objective=objective)
    _built(run, [group("g", [1.0, 1.0, 1.0])])
    assert set(_fates(run).values()) == {"consumed"}


def test_best_of_k_learns_nothing_from_equal_rewards(tmp_path: Path) -> None:
    run = _run(tmp_path, objective={"advantage": "pass_at_k", "pass_k": 2})
    mixed = group("a", [0.0, 0.5, 1.0])  # one success: of two members it may be missing
    sure = group("b", [0.0, 1.0, 1.0, None])  # any two have a success
    wrong = group("c", [0.0, 0.5, 0.9])  # all below success_threshold
    _built(run, [mixed, sure, wrong])
    fates = _fates(run)
    assert {fates[f"a/{i}"] for i in range(3)} == {"consumed"}
    flat = [f"b/{i}" for i in range(3)] + [f"c/{i}" for i in range(3)]
    assert {fates[name] for name in flat} == {"zero_signal"}


def test_equal_rewards_are_a_signal_where_their_components_differ(tmp_path: Path) -> None:
    def member(name: str, index: int, right: float, short: float) -> Rollout:
        parts = (
            RewardComponent(name="right", value=right, weight=1.0),
            RewardComponent(name="short", value=short, weight=2.0),
        )
        own = rollout(f"{name}/{index}", index=index, reward=right + 2 * short)
        return replace(own, reward_components=parts)

    run = _run(tmp_path, objective={"advantage": "gdpo"})
    apart = [member("a", 0, 2.0, 0.0), member("a", 1, 0.0, 1.0)]  # a reward of 2 each
    flat = [member("b", index, 1.0, 0.5) for index in range(2)]
    (batch,) = read_batches(run, _built(run, [group_of("a", apart), group_of("b", flat)]))
    fates = _fates(run)
    assert [fates[name] for name in ("a/0", "b/0", "b/1")] == [
        "consumed", "zero_signal", "zero_signal",
    ]  # fmt: skip
    # -+ of right is 1 / sqrt 2, twice as much of short; whitened over 4 rollouts, two of them 0.
    std = np.sqrt(2 * 0.5 / 3)
    found = batch.advantages[batch.loss_mask == 1]
    assert_allclose(np.unique(found), np.array([-1, 1]) * 0.5**0.5 / std, rtol=1e-3)


@pytest.mark.parametrize("turns", [{}, {"turn_discount": 0.5, "ratio_level": "token"}])
def test_length_alone_is_no_signal(turns: dict[str, Any], tmp_path: Path) -> None:
    objective = {"overlong": "soft_penalty", "overlong_buffer": 1.0, "overlong_penalty": 2.0}
    run = _run(tmp_path, objective=objective | turns)
    wrong = [rollout("a/0", reward=0.0), rollout("a/1", index=1, reward=0.0, completion=[7] * 9)]
    # equal once shaped, but one of them is right
    share = 2.0 * (9 - 2) / run.config.sampling.max_tokens
    right = [rollout("b/0", reward=0.0), rollout("b/1", index=1, reward=share, completion=[7] * 9)]
    _built(run, [group_of("a", wrong), group_of("b", right)])
    fates = _fates(run)
    assert (fates["a/0"], fates["a/1"]) == ("zero_signal", "zero_signal")
    assert (fates["b/0"], fates["b/1"]) == ("consumed", "consumed")


def test_whitening_over_tokens_weighs_a_rollout_by_its_length(tmp_path: Path) -> None:
    chosen = {"advantage": "reinforce", "advantage_scale": "token_whitening"}
    run = _run(tmp_path, objective=chosen)
    first = rollout("g/0", reward=0.0, completion=[7, 8, 9])
    second = rollout("g/1", index=1, reward=1.0, completion=[4])
    (batch,) = read_batches(run, _built(run, [group_of("g", [first, second])]))
    # of the tokens' 0, 0, 0, 1: mean 1/4, variance (ddof 1) 1/4
    found = batch.advantages[batch.loss_mask == 1]
    assert_allclose(found, [-0.5, -0.5, -0.5, 1.5], rtol=1e-6)


def test_without_the_filter_a_flat_group_is_trained_on_with_advantage_zero(tmp_path: Path) -> None:
    run = _run(tmp_path, filters={"zero_signal": False})
    ref = _built(run, [group("g", [1.0, 1.0, 1.0])])
    (batch,) = read_batches(run, ref)
    assert set(_fates(run).values()) == {"consumed"}
    assert not batch.advantages.any()


def test_an_overlong_completion_is_in_the_baseline_and_not_trained_on(tmp_path: Path) -> None:
    run = _run(tmp_path, objective={"overlong": "mask"})
    members = [rollout(f"a/{i}", index=i, reward=float(i)) for i in range(2)]
    cut_off = rollout("a/2", index=2, status="truncated", reward=5.0)
    _built(run, [group_of("a", [*members, cut_off])])
    assert _fates(run) == {"a/0": "consumed", "a/1": "consumed", "a/2": "overlong"}
    assert read_dispositions(run, 0)["advantage"].to_pylist() == [-3.0, -1.5, None]
    assert audit_round(run, 0).balanced


def test_a_long_completion_loses_reward_and_keeps_its_own_in_the_record(tmp_path: Path) -> None:
    objective = {"overlong": "soft_penalty", "overlong_buffer": 1.0, "overlong_penalty": 2.0}
    run = _run(tmp_path, objective=objective, filters={"zero_signal": False})
    limit = run.config.sampling.max_tokens
    short = rollout("a/0", completion=(7, 8), reward=1.0)
    long = rollout("a/1", index=1, completion=(7, 8, 9, 10), reward=1.0)
    ref = _built(run, [group_of("a", [short, long])])
    advantages = read_dispositions(run, 0)["advantage"].to_pylist()
    assert advantages == pytest.approx([2.0 * 2 / limit, -2.0 * 2 / limit])
    assert read_dispositions(run, 0)["reward"].to_pylist() == [1.0, 1.0]
    (batch,) = read_batches(run, ref)
    returned = [row[row != 0][0] for row in batch.returns]
    assert returned == pytest.approx([1 - 2.0 * 2 / limit, 1 - 2.0 * 4 / limit])


def test_a_baseline_of_the_round_learns_from_a_flat_group(tmp_path: Path) -> None:
    run = _run(tmp_path, objective={"advantage": "reinforce_batch"})
    _built(run, [group("a", [1.0, 1.0]), group("b", [0.0, 2.0])])
    assert set(_fates(run).values()) == {"consumed"}
    assert read_dispositions(run, 0)["advantage"].to_pylist() == [0.0, 0.0, -1.0, 1.0]
    other = _run(tmp_path / "other", objective={"advantage": "reinforce_batch"})
    _built(other, [group("a", [1.0, 1.0]), group("b", [0.0, 0.0])])
    assert read_dispositions(other, 0)["advantage"].to_pylist() == [0.5, 0.5, -0.5, -0.5]


def test_a_critic_learns_from_a_group_of_one_and_from_a_flat_one(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        objective={"advantage": "gae", "ratio_level": "token"},
        training={"critic": {}},
        rollouts={"group_size": 1, "group_size_min": 1},
    )
    lone = rollout("a/0", reward=0.5, prompt=[5, 6], completion=[7, 8])
    ref = _built(run, [group_of("a", [lone]), group("b", [1.0, 1.0])])
    assert set(_fates(run).values()) == {"consumed"}
    assert read_dispositions(run, 0)["advantage"].to_pylist() == [None] * 3
    (batch,) = read_batches(run, ref)
    assert_array_equal(batch.advantages, 0.0)
    assert_array_equal(batch.returns[0, :5], [0, 0, 0.5, 0.5, 0])


def test_pass_at_k_drops_groups_of_fewer_than_k(tmp_path: Path) -> None:
    run = _run(tmp_path, objective={"advantage": "pass_at_k", "pass_k": 3})
    _built(run, [group("a", [0.0, 1.0]), group("b", [0.0, 0.0, 0.0, 1.0])])
    fates = _fates(run)
    assert {fates["a/0"], fates["a/1"]} == {"short_group"}
    assert fates["b/0"] == "consumed"


@pytest.mark.parametrize(("advantage", "worth"), [("reinforce", 1.0), ("reinforce_batch", 0.5)])
def test_groups_of_one_are_trained_on_without_a_groups_baseline(tmp_path, advantage, worth):
    alone = {"group_size": 1, "group_size_min": 1}
    run = _run(tmp_path, objective={"advantage": advantage}, rollouts=alone)
    _built(run, [group("a", [1.0]), group("b", [0.0])])
    table = read_dispositions(run, 0)
    assert table["disposition"].to_pylist() == ["consumed"] * 2
    assert table["advantage"].to_pylist() == [worth, worth - 1.0]


def test_the_least_difference_of_rewards_is_a_signal(tmp_path: Path) -> None:
    run = _run(tmp_path, objective={"advantage": "rloo"})
    _built(run, [group("a", [0.0, 0.0, 0.0, 1e-300])])
    assert set(_fates(run).values()) == {"consumed"}


def test_overlong_completions_lose_linearly_over_the_last_share() -> None:
    penalty_N = overlong_penalty(np.array([0, 15, 16, 18, 20]), 20, 0.25, 2.0)
    assert_allclose(penalty_N, [0.0, 0.0, 0.4, 1.2, 2.0])


def test_a_short_group_is_measured_against_the_configured_size(tmp_path: Path) -> None:
    run = _run(tmp_path, rollouts={"group_size_min": 3})
    _built(run, [group("a", [0.0, 1.0]), group("b", [0.0, 1.0, 1.0])])
    fates = _fates(run)
    assert fates["a/0"] == fates["a/1"] == "short_group"
    assert fates["b/0"] == "consumed"


def test_a_round_without_signal_commits_no_rows(tmp_path: Path) -> None:
    run = _run(tmp_path)
    ref = _built(run, [group("g", [1.0, 1.0])])
    assert list(read_batches(run, ref)) == []
    assert ref.summary["rows"] == ref.summary["steps"] == 0
    assert ref.summary["rollouts/filtered"] == 2
    assert audit_round(run, 0).balanced


def test_steps_hold_the_configured_rows(tmp_path: Path) -> None:
    run = _run(tmp_path, batching={"sequences_per_step": 3})
    ref = _built(run, [group("a", [0.0, 1.0, 1.0, 0.0]), group("b", [1.0, 0.0, 0.0])])
    steps = list(read_batches(run, ref))
    names = [[row[0] for row in step.rollout_ids] for step in steps]
    assert names == [["a/0", "a/1", "a/2"], ["a/3", "b/0", "b/1"], ["b/2"]]
    places = read_dispositions(run, 0).select(["step", "row", "segment"]).to_pylist()
    assert places[4] == {"step": 1, "row": 1, "segment": 1}


# A context that the smallest buckets of these tests reach; rollouts made by hand may exceed it.
SHORT: dict[str, Any] = {"policy": {"context_length": 8}, "sampling": {"max_tokens": 4}}


@pytest.mark.parametrize(
    ("longest", "buckets", "length"),
    [
        *[(1, (), 32), (32, (), 32), (33, (), 48), (48, (), 48), (49, (), 64), (65, (), 96)],
        *[(97, (), 128), (700, (), 768), (769, (), 1024), (7, (8, 16), 8), (9, (8, 16), 16)],
    ],
)
def test_the_smallest_bucket_that_fits(longest: int, buckets: tuple, length: int) -> None:
    assert bucket(longest, BatchingConfig(length_buckets=buckets)) == length


def test_a_sequence_beyond_the_buckets_stops_before_any_work(tmp_path: Path) -> None:
    run = _run(tmp_path, batching={"length_buckets": [4, 8]}, **SHORT)
    sealed = commit_round(run, 0, [[group("g", [0.0, 1.0], completion=range(6))]])
    with pytest.raises(ConfigError, match=r"end at 8, but a sequence of 9 tokens"):
        build_round(run, 0, sealed)
    assert run.store.list("batches") == []


def test_only_kept_sequences_must_fit(tmp_path: Path) -> None:
    run = _run(tmp_path, batching={"length_buckets": [8]}, **SHORT)
    long = group("long", [1.0, 1.0], completion=range(20))
    ref = _built(run, [long, group("g", [0.0, 1.0])])
    assert ref.summary["length"] == 8


def test_running_again_is_free_and_another_setting_conflicts(tmp_path: Path) -> None:
    run = _run(tmp_path)
    sealed = commit_round(run, 0, [[group("g", [0.0, 1.0])]])
    first = build_round(run, 0, sealed)
    keys = run.store.list("")
    again = build_round(run, 0, sealed)
    assert again == first
    assert again.reused
    assert not first.reused
    assert run.store.list("") == keys
    config = configuration(str(tmp_path), objective={"advantage": "grpo"})
    with pytest.raises(CommitConflict, match=r"committed with fingerprint .* expected"):
        build_round(Run(config=config, run_id="run", store=run.store), 0, sealed)


def test_the_same_shards_give_the_same_bytes(tmp_path: Path) -> None:
    run = _run(tmp_path, batching={"sequences_per_step": 2})
    sealed = commit_round(run, 0, [[group("g", [0.0, 1.0, 0.5]), group("h", [1.0, 1.0])]])
    digests = []
    for _ in range(2):
        ref = build_round(run, 0, sealed)
        files = [key for key in run.store.list("batches") if key.endswith(".parquet")]
        digests.append([run.store.read(key) for key in sorted(files)])
        for key in run.store.list("batches"):
            run.store.delete(key)
    assert ref.summary["steps"] == 2
    assert digests[0] == digests[1]


def test_repeated_rollouts_are_refused(tmp_path: Path) -> None:
    run = _run(tmp_path, shards=2)
    sealed = commit_round(run, 0, [[group("g", [0.0, 1.0])], [group("g", [0.0, 1.0])]])
    with pytest.raises(CorruptObject, match=r"more than once.*g/0"):
        build_round(run, 0, sealed)


def test_a_reference_to_other_rollouts_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path)
    sealed = commit_round(run, 0, [[group("g", [0.0, 1.0])]])
    with pytest.raises(CorruptObject, match="of another run or round"):
        build_round(run, 0, SlotRef(slot=sealed.slot, sha256="0" * 64))


ROLLOUT = st.fixed_dictionaries(
    {
        "reward": st.sampled_from([None, float("nan"), 0.0, 0.0, 1.0, 1.0, 0.25]),
        "status": st.sampled_from(["complete"] * 5 + ["truncated", "error", "aborted"]),
        "version": st.integers(1, 3),
        "prompt": st.lists(st.integers(1, 99), min_size=1, max_size=4),
        "completion": st.lists(st.integers(1, 99), max_size=7),
    }
)
FILTERS = st.fixed_dictionaries({"zero_signal": st.booleans(), "truncated": st.booleans()})
ROUND = st.lists(st.lists(ROLLOUT, min_size=1, max_size=4), min_size=2, max_size=5)


def _groups(drawn: list[list[dict[str, Any]]]) -> list[RolloutGroup]:
    return [
        group_of(f"g{g}", [rollout(f"g{g}/{i}", index=i, **x) for i, x in enumerate(members)])
        for g, members in enumerate(drawn)
    ]


def _memory_run(**sections: Any) -> Run:
    return _run(f"memory://{uuid.uuid4().hex}", **sections)


def _contents(batches: list[TrainingBatch]) -> dict[str, list[list[float]]]:
    """By rollout, its unpadded arrays: what training sees of it."""
    found = {}
    for batch in batches:
        for b, (name,) in enumerate(batch.rollout_ids):
            on = batch.segment_ids[b] > 0
            arrays = (
                batch.token_ids, batch.loss_mask, batch.positions, batch.policy_logprobs,
                batch.advantages, batch.returns,
            )  # fmt: skip
            assert not any(array[b][~on].any() for array in arrays)
            found[name] = [array[b][on].tolist() for array in arrays]
    return found


@settings(max_examples=12)
@given(ROUND, st.integers(0, 2), FILTERS)
def test_generated_is_consumed_filtered_stale_and_failed(drawn, staleness, filters):
    run = _memory_run(
        filters=filters, batching={"staleness_rounds_max": staleness, "sequences_per_step": 3}
    )
    ref = _built(run, _groups(drawn), round=3)
    table = read_dispositions(run, 3)
    names = [f"g{g}/{i}" for g, members in enumerate(drawn) for i in range(len(members))]
    assert table["rollout_id"].to_pylist() == names
    counts = Counter(table["disposition"].to_pylist())
    kinds = ("consumed", "filtered", "stale", "failed")
    assert sum(counts[kind] for kind in kinds) == len(names) == ref.summary["rollouts/generated"]
    assert {kind: counts[kind] for kind in kinds} == {
        kind: ref.summary[f"rollouts/{kind}"] for kind in kinds
    }
    assert audit_round(run, 3).balanced
    trained = _contents(list(read_batches(run, ref)))
    assert len(trained) == counts["consumed"]
    # Leave-one-out advantages of what is trained on sum to zero in every group.
    sums = Counter()
    for row in table.to_pylist():
        sums[row["group_id"]] += row["advantage"] or 0.0
    assert_allclose(list(sums.values()), 0.0, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=15)
@given(ROUND, st.sampled_from([(), (16,), (11, 64), (128,)]), st.integers(1, 9))
def test_padding_and_step_size_change_nothing_that_is_trained_on(drawn, buckets, rows):
    plain = _memory_run(batching={"staleness_rounds_max": 9})
    other = _memory_run(
        batching={"staleness_rounds_max": 9, "length_buckets": buckets, "sequences_per_step": rows},
        **SHORT,
    )
    found = [
        _contents(list(read_batches(run, _built(run, _groups(drawn), round=3))))
        for run in (plain, other)
    ]
    assert found[0] == found[1]


@pytest.mark.slow
@settings(max_examples=15)
@given(ROUND, st.integers(1, 4))
def test_the_number_of_shards_changes_no_sample(drawn, cut):
    groups = _groups(drawn)
    cut = min(cut, len(groups) - 1)
    whole = _memory_run(batching={"staleness_rounds_max": 9})
    halves = _memory_run(shards=2, batching={"staleness_rounds_max": 9})
    turned = _memory_run(shards=2, batching={"staleness_rounds_max": 9})
    expected = list(read_batches(whole, _built(whole, groups, round=3)))
    found = list(read_batches(halves, _built(halves, groups[:cut], groups[cut:], round=3)))
    assert [batch.rollout_ids for batch in found] == [batch.rollout_ids for batch in expected]
    for a, b in zip(found, expected, strict=True):
        assert_array_equal(a.advantages, b.advantages)
        assert_array_equal(a.token_ids, b.token_ids)
    # Shards in the other order: other rows, the same sequences with the same numbers.
    other = list(read_batches(turned, _built(turned, groups[cut:], groups[:cut], round=3)))
    assert _contents(other) == _contents(expected)


def test_order_of_commits_changes_nothing(tmp_path: Path) -> None:
    from support.run_factories import CHECKPOINT, FINGERPRINT, policy

    from marin_rl.storage.tables.rollouts import commit_shard, seal_round

    groups = [[group("a", [0.0, 1.0])], [group("b", [1.0, 0.0])]]
    names = []
    for folder, order in (("x", (0, 1)), ("y", (1, 0))):
        run = _run(tmp_path / folder, shards=2)
        refs = [commit_shard(run, 0, s, groups[s], FINGERPRINT, policy()) for s in order]
        ref = build_round(run, 0, seal_round(run, 0, refs, [CHECKPOINT]))
        (batch,) = read_batches(run, ref)
        names.append((batch.rollout_ids, batch.advantages.tobytes()))
    assert names[0] == names[1]


def test_rows_and_views_share_memory_with_what_was_read(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (batch,) = read_batches(run, _built(run, [group("g", [0.0, 1.0])]))
    for name in ("token_ids", "loss_mask", "policy_logprobs", "advantages"):
        array = getattr(batch, name)
        assert not array.flags.writeable
        assert not array.flags.owndata
        assert array.dtype in (np.int32, np.float32)


def test_the_greedy_member_is_the_baseline_of_remax_and_not_trained_on(tmp_path: Path) -> None:
    run = _run(tmp_path, objective={"advantage": "remax"}, rollouts={"greedy_baseline": True})
    rewards = {"a": [1.0, 0.0, 0.25], "b": [0.5, 0.5, 0.5], "c": [1.0, 0.0, None]}
    _built(run, [group(name, values) for name, values in rewards.items()])
    assert _fates(run) == {
        **dict.fromkeys(("a/0", "a/1"), "consumed"),
        "a/2": "greedy",
        **dict.fromkeys(("b/0", "b/1", "b/2"), "zero_signal"),
        **dict.fromkeys(("c/0", "c/1"), "short_group"),  # nothing to hold them against
        "c/2": "no_reward",
    }
    advantages = read_dispositions(run, 0)["advantage"].to_pylist()
    assert advantages == [0.75, -0.25, *[None] * 7]

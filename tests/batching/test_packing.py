"""Packing: every token where it belongs, a prompt once for its group, nothing lost."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.batching.packing import Kept, fill_packed, pack
from marin_rl.errors import ConfigError, CorruptObject


def packed(prompts, sampled, groups, *, row_tokens=10, per_step=100, share=True):
    return pack(
        np.array(prompts, np.int64),
        np.array(sampled, np.int64),
        np.array(groups, np.int64),
        np.arange(len(groups)) // per_step,
        row_tokens=row_tokens,
        share=share,
    )


def test_a_group_lies_behind_its_prompt_by_hand():
    found = packed([3, 3, 3, 2], [2, 2, 3, 1], [0, 0, 0, 1])
    # prompt 0-2, completions 3-4 and 5-6 and 7-9; the next group begins a row
    assert found.row_K.tolist() == [0, 0, 0, 1]
    assert found.segment_K.tolist() == [1, 2, 3, 1]
    assert found.start_K.tolist() == [3, 5, 7, 2]
    assert found.prompt_start_K.tolist() == [0, 0, 0, 0]
    assert found.prompt_segment_K.tolist() == [4, 4, 4, 2]
    assert found.shared_K.tolist() == [False, True, True, False]
    assert found.rows == 2


def test_a_group_too_large_for_a_row_has_its_prompt_in_each_of_its_rows():
    found = packed([4] * 3, [3] * 3, [0] * 3)
    assert found.row_K.tolist() == [0, 0, 1]
    assert found.shared_K.tolist() == [False, True, False]


def test_without_sharing_sequences_follow_one_another():
    found = packed([3, 3, 3], [2, 1, 2], [0, 0, 0], share=False)
    assert found.row_K.tolist() == [0, 0, 1]
    assert found.start_K.tolist() == [0, 5, 0]
    assert not found.shared_K.any()


def test_a_step_begins_a_row():
    found = packed([1] * 4, [1] * 4, [0] * 4, per_step=2)
    assert found.step_K.tolist() == [0, 0, 1, 1]
    assert found.row_K.tolist() == [0, 0, 0, 0]
    assert found.shared_K.tolist() == [False, True, False, True]


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ConfigError, match=r"11 tokens does not fit .*row_tokens \(10\)"):
        packed([8], [3], [0])


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=12),
    share=st.booleans(),
    per_step=st.integers(1, 12),
    cuts=st.randoms(use_true_random=False),
)
def test_every_token_is_where_its_place_says(lengths, share, per_step, cuts):
    groups = [cuts.randrange(3) for _ in lengths]
    groups.sort()
    prompts = [lengths[groups.index(group)][0] for group in groups]  # one prompt a group
    sampled = [count for _, count in lengths]
    packing = packed(prompts, sampled, groups, row_tokens=14, per_step=per_step, share=share)
    table = shard(prompts, sampled, groups)
    kept = Kept(
        index_K=np.arange(len(groups)),
        prompt_K=np.array(prompts, np.int64),
        sampled_K=np.array(sampled, np.int64),
        advantage_K=np.arange(1.0, len(groups) + 1),
        reward_K=np.arange(len(groups)) * 0.5,
    )
    middle = cuts.randint(0, len(groups))
    pieces = [piece for piece in (table[:middle], table[middle:]) if piece.num_rows]
    steps = list(fill_packed(packing, kept, 14, table, iter(pieces)))
    assert len(steps) == len(set(packing.step_K.tolist()))
    seen = 0
    for k, ids in enumerate(table["token_ids"].to_pylist()):
        arrays = steps[packing.step_K[k]].arrays
        row, prompt = packing.row_K[k], prompts[k]
        start = packing.start_K[k] + (0 if share else prompt)
        here = slice(start, start + sampled[k])
        before = slice(packing.prompt_start_K[k], packing.prompt_start_K[k] + prompt)
        if not share:
            before = slice(packing.start_K[k], start)
        assert arrays["token_ids"][row, before].tolist() == ids[:prompt]
        assert arrays["token_ids"][row, here].tolist() == ids[prompt:]
        assert arrays["positions"][row, here].tolist() == list(range(prompt, len(ids)))
        assert arrays["positions"][row, before].tolist() == list(range(prompt))
        assert set(arrays["segment_ids"][row, here].tolist()) == {packing.segment_K[k]}
        assert arrays["loss_mask"][row, here].all()
        assert not arrays["loss_mask"][row, before].any()
        assert set(arrays["advantages"][row, here].tolist()) == {k + 1.0}
        assert set(arrays["returns"][row, here].tolist()) == {k * 0.5}
        names = steps[packing.step_K[k]].rollout_ids[int(row)].as_py()
        assert names[packing.segment_K[k] - 1] == f"r{k}"
        seen += sampled[k]
    assert sum(int(step.arrays["loss_mask"].sum()) for step in steps) == seen


def shard(prompts, sampled, groups, *, other_prompt=None):
    ids = [
        [100 + group + (0 if k != other_prompt else 7)] * prompt + [k + 1] * count
        for k, (prompt, count, group) in enumerate(zip(prompts, sampled, groups, strict=True))
    ]
    pairs = list(zip(prompts, sampled, strict=True))
    masks = [[0] * prompt + [1] * count for prompt, count in pairs]
    return pa.table(
        {
            "rollout_id": pa.array([f"r{k}" for k in range(len(ids))], pa.string()),
            "environment": pa.array(["echo"] * len(ids), pa.string()),
            "token_ids": pa.array(ids, pa.list_(pa.int32())),
            "loss_mask": pa.array(masks, pa.list_(pa.int8())),
            "logprobs": pa.array([[-1.0] * len(row) for row in ids], pa.list_(pa.float32())),
        }
    )


def filled(table, prompts, sampled, groups):
    kept = Kept(
        index_K=np.arange(len(groups)),
        prompt_K=np.array(prompts, np.int64),
        sampled_K=np.array(sampled, np.int64),
        advantage_K=np.zeros(len(groups)),
        reward_K=np.zeros(len(groups)),
    )
    packing = packed(prompts, sampled, groups)
    return list(fill_packed(packing, kept, 10, table, iter([table])))


def test_different_prompts_are_not_shared_in_silence():
    prompts, sampled, groups = [3, 3], [2, 2], [0, 0]
    table = shard(prompts, sampled, groups, other_prompt=1)
    with pytest.raises(ConfigError, match="different prompts, which cannot be shared"):
        filled(table, prompts, sampled, groups)


def test_counts_that_differ_from_the_lists_are_reported():
    table = shard([3, 3], [2, 2], [0, 0])
    with pytest.raises(CorruptObject, match="rollout r1: expected 6 token_ids"):
        filled(table, [3, 3], [2, 3], [0, 0])

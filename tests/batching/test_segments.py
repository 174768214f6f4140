"""Rollouts of several segments in batches: every token once, in a row that begins with its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.run_factories import audit_round, commit_round, configuration, group_of, rollout

from marin_rl.batching.build import build_round
from marin_rl.batching.plan import Segments, cut, with_leads
from marin_rl.errors import CorruptObject
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.batches import read_batches, read_dispositions
from marin_rl.types import Rollout, TrainingBatch, Turn

MASK = (0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1)


def talk(
    name: str, *, index: int = 0, reward: float = 1.0, segments: tuple[int, ...] | None = None
) -> Rollout:
    """A rollout of three turns and 11 tokens, numbered from 20 on."""
    base = rollout(name, index=index, reward=reward)
    mask = np.array(MASK, np.int32)
    return replace(
        base,
        token_ids=np.arange(20, 20 + len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=(-0.5 * mask).astype(np.float32),
        n_prompt_tokens=int((1 - mask).sum()),
        n_completion_tokens=int(mask.sum()),
        segment_lengths=segments,
        turns=(
            Turn(role="user", content="a", start=0, end=2),
            replace(base.turns[1], start=2, end=4, reward=0.25),
            replace(base.turns[1], start=5, end=6),
            replace(base.turns[1], start=9, end=11, reward=reward - 0.25),
        ),
    )


def members() -> list[Rollout]:
    return [
        talk("g/0", reward=1.0, segments=(6, 5)),
        talk("g/1", index=1, reward=0.0),
        talk("g/2", index=2, reward=0.5, segments=(6, 5)),
    ]


def built(root: Path, **sections: Any) -> tuple[Run, list[TrainingBatch]]:
    room = {"policy": {"context_length": 24}, "sampling": {"max_tokens": 8}}
    run = Run.create_or_open(configuration(str(root), groups=1, **room, **sections))
    ref = build_round(run, 0, commit_round(run, 0, [[group_of("g", members())]]))
    return run, list(read_batches(run, ref))


def test_a_rollout_is_cut_into_rows_of_its_own(tmp_path: Path) -> None:
    run, (batch,) = built(tmp_path)
    assert batch.rollout_ids == (("g/0",), ("g/0",), ("g/1",), ("g/2",), ("g/2",))
    expected = {
        "token_ids": [[20, 21, 22, 23, 24, 25], [26, 27, 28, 29, 30], list(range(20, 31))],
        "loss_mask": [[0, 0, 1, 1, 0, 1], [0, 0, 0, 1, 1], list(MASK)],
        "positions": [list(range(6)), list(range(5)), list(range(11))],
        "advantages": [[0, 0, 0.75, 0.75, 0, 0.75], [0, 0, 0, 0.75, 0.75]],
    }
    for name, rows in expected.items():
        for array, row in zip(getattr(batch, name), rows, strict=False):
            assert_array_equal(array, [*row, *[0] * (32 - len(row))], err_msg=name)
    # a disposition is of the rollout, and says where it begins
    places = {row["rollout_id"]: row for row in read_dispositions(run, 0).to_pylist()}
    assert [places[f"g/{i}"]["row"] for i in range(3)] == [0, 2, 3]
    assert {row["n_tokens"] for row in places.values()} == {11}
    assert audit_round(run, 0).offences == {}


def test_a_step_has_whole_rollouts(tmp_path: Path) -> None:
    run, steps = built(tmp_path, batching={"sequences_per_step": 2})
    assert [batch.rollout_ids for batch in steps] == [
        (("g/0",), ("g/0",), ("g/1",)),
        (("g/2",), ("g/2",)),
    ]
    places = {row["rollout_id"]: row for row in read_dispositions(run, 0).to_pylist()}
    assert [(places[f"g/{i}"]["step"], places[f"g/{i}"]["row"]) for i in range(3)] == [
        (0, 0),
        (0, 2),
        (1, 0),
    ]
    assert audit_round(run, 0).offences == {}


def flat(batch: TrainingBatch, name: str) -> list[Any]:
    """Values of trained tokens by rollout and token id."""
    row_N, place_N = np.nonzero(batch.loss_mask)
    segment_N = batch.segment_ids[row_N, place_N] - 1
    names = [batch.rollout_ids[r][s] for r, s in zip(row_N, segment_N, strict=True)]
    values = getattr(batch, name)[row_N, place_N].tolist()
    tokens = batch.token_ids[row_N, place_N].tolist()
    return sorted(zip(names, tokens, values, strict=True))


@pytest.mark.parametrize("discount", [None, 0.5])
@pytest.mark.parametrize("packing", ["sequences", "shared_prompt"])
def test_packed_rows_train_the_tokens_of_padded_ones(tmp_path, packing, discount):
    """All turns of a dialogue, not only the last ones, and those of all segments."""
    objective = {"turn_discount": discount, "ratio_level": "token"}
    _, (padded,) = built(tmp_path / "padded", objective=objective)
    batching = {"packing": packing, "row_tokens": 24}
    run, (packed,) = built(tmp_path / "packed", objective=objective, batching=batching)
    assert audit_round(run, 0).offences == {}
    for name in ("policy_logprobs", "advantages", "returns"):
        assert flat(packed, name) == flat(padded, name), name
    assert all(value != 0 for _, _, value in flat(packed, "advantages")[:5])
    assert len(packed.token_ids) < len(padded.token_ids)
    # tokens of a segment are read from its own first one on; a shared prompt goes before it
    row_N, place_N = np.nonzero(packed.loss_mask)
    begins = {"g/0": (20, 26), "g/1": (20,), "g/2": (20, 26)}
    for row, place in zip(row_N, place_N, strict=True):
        name = packed.rollout_ids[row][packed.segment_ids[row, place] - 1]
        token = int(packed.token_ids[row, place])
        first = max(begin for begin in begins[name] if begin <= token)
        assert packed.positions[row, place] == token - first


def test_lengths_that_do_not_add_up_are_reported() -> None:
    table = pa.table(
        {
            "rollout_id": ["a"],
            "token_ids": pa.array([[1, 2, 3]], pa.list_(pa.int32())),
            "segment_lengths": pa.array([[1, 1]], pa.list_(pa.int32())),
        }
    )
    with pytest.raises(CorruptObject, match=r"rollout a: expected segments of 3 tokens .*\[1, 1\]"):
        cut(table)


MASKS = st.lists(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=3),
    min_size=1,
    max_size=5,
)


@given(rollouts=MASKS)
def test_every_token_is_in_one_segment(rollouts: list[list[list[int]]]) -> None:
    """By lists of lists: the segments of each rollout, and the mask of each segment."""
    masks = [[bit for segment in segments for bit in segment] for segments in rollouts]
    lengths = [[len(s) for s in segments] if len(segments) > 1 else None for segments in rollouts]
    table = pa.table(
        {
            "rollout_id": [str(number) for number in range(len(rollouts))],
            "token_ids": pa.array([list(range(len(m))) for m in masks], pa.list_(pa.int32())),
            "loss_mask": pa.array(masks, pa.list_(pa.int8())),
            "segment_lengths": pa.array(lengths, pa.list_(pa.int32())),
        }
    )
    # also of a slice, as row groups may be
    for part, chosen in ((table, rollouts), (table.slice(1), rollouts[1:])):
        segments = [segment for each in chosen for segment in each]
        tokens_N = np.array([sum(map(len, each)) for each in chosen], np.int64)
        found = Segments.of(with_leads(part), tokens_N)
        assert found.tokens_S.tolist() == [len(segment) for segment in segments]
        assert found.lead_S.tolist() == [([*s, 1].index(1)) for s in segments]
        firsts = np.cumsum([0, *(len(each) for each in chosen)])[:-1]
        assert np.flatnonzero(found.begins_S).tolist() == firsts.tolist()
        assert cut(part)["loss_mask"].to_pylist() == segments
        assert cut(part)["rollout_id"].to_pylist() == [
            str(number)
            for number, each in enumerate(rollouts)
            if number >= len(rollouts) - len(chosen)
            for _ in each
        ]

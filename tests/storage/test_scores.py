"""Scores of a round: the tokens of each segment, in order, committed with the checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_factories import configuration

from marin_rl.errors import CorruptObject
from marin_rl.storage.checkpoints import ExtraParts, commit_checkpoint, restore_checkpoint
from marin_rl.storage.commits import manifest_of, new_attempt
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables import scores as module
from marin_rl.storage.tables.scores import ScoredStep, ScoresWriter, StepScores, iter_scores
from marin_rl.types import SlotRef
from schemas.tables import FLOATS, VALUED, WEIGHED

TREE = {"parameters": {"weight": np.arange(6, dtype=np.float32)}}


def step(first: int, *, reference: bool = True, **changes: Any) -> ScoredStep:
    """Two rows; the second packs two segments, of which the last is not trained on."""
    values = first + np.arange(12, dtype=np.float32).reshape(2, 6)
    floats: dict[str, Any] = dict.fromkeys(FLOATS, values) | {"old_logprobs": None}
    fields: dict[str, Any] = {
        "rollout_ids": ((f"{first}/0",), (f"{first}/1", f"{first}/2")),
        "mask": np.array([[0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]], np.bool_),
        "segment_ids": np.array([[1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 0, 0]], np.int32),
        "positions": np.array([[0, 1, 2, 0, 0, 0], [0, 1, 0, 1, 0, 0]], np.int32),
        "clipped": np.array([[0, 0, 1, 0, 0, 0], [0] * 6], np.bool_),
        "floats": floats if reference else floats | {"reference_logprobs": None},
    }
    return ScoredStep(**fields | changes)


def commit(run: Run, steps: list[ScoredStep], attempt: str | None = None) -> SlotRef:
    attempt = attempt or new_attempt()
    with ScoresWriter(run, 0, attempt, 1) as writer:
        for item in steps:
            writer.write(item)
        return commit_checkpoint(
            run,
            checkpoint_slot(1),
            TREE,
            content={},
            parents=[],
            totals={},
            extra={},
            extra_parts=ExtraParts(attempt=attempt, parts=writer.parts),
        )


def read(run: Run, ref: SlotRef) -> list[StepScores]:
    return list(iter_scores(run, manifest_of(run.store, ref)))


def test_steps_come_back_in_order_with_their_tokens(root: tuple[str, dict[str, Any]]) -> None:
    run = Run.create_or_open(configuration(root[0], storage_options=root[1]))
    first, second = read(run, commit(run, [step(0), step(100, reference=False)]))
    assert (first.step, second.step) == (0, 1)
    assert first.rollout_ids == ("0/0", "0/1", "0/2")
    assert first.counts.tolist() == [2, 1, 0]
    assert first.positions.tolist() == [1, 2, 1]
    assert first.clipped.tolist() == [False, True, False]
    assert first.eos_token_id == 1
    logprobs, reference = first.floats["trainer_logprobs"], first.floats["reference_logprobs"]
    assert logprobs is not None
    assert reference is not None
    assert logprobs.tolist() == [1.0, 2.0, 7.0]
    assert first.floats["old_logprobs"] is None
    assert second.floats["reference_logprobs"] is None


def test_values_of_a_critic_are_read_back_and_null_without_one(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    plain = step(0)
    values = np.arange(12, dtype=np.float32).reshape(2, 6)
    floats = {**plain.floats, **dict.fromkeys(VALUED, values)}
    (with_critic,) = read(run, commit(run, [step(0, floats=floats)]))
    assert all((with_critic.floats[name] == [1.0, 2.0, 7.0]).all() for name in VALUED)
    other = Run.create_or_open(configuration(str(tmp_path / "other")))
    (without,) = read(other, commit(other, [plain]))
    assert [without.floats[name] for name in VALUED] == [None] * 3


def test_score_norms_come_back_without_values(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    norms = np.arange(12, dtype=np.float32).reshape(2, 6)
    floats = {**step(0).floats, "squared_score_norms": norms}
    (scores,) = read(run, commit(run, [step(0, floats=floats)]))
    (name,) = WEIGHED
    assert (scores.floats[name] == [1.0, 2.0, 7.0]).all()
    assert [scores.floats[name] for name in VALUED] == [None] * 3


def test_they_are_committed_with_the_checkpoint_and_not_read_with_it(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    ref = commit(run, [step(0)])
    manifest = manifest_of(run.store, ref)
    (part,) = [part for part in manifest.parts if part.name.startswith("scores-")]
    assert part.rows == 3
    path = run.store.local_path(f"{manifest.slot}/{part.name}")
    assert path is not None
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    restored = restore_checkpoint(run, ref, TREE)
    np.testing.assert_array_equal(restored["parameters"]["weight"], TREE["parameters"]["weight"])
    with pytest.raises(CorruptObject, match="scores-"):
        read(run, ref)


def test_a_round_without_steps_has_no_scores(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    assert read(run, commit(run, [])) == []


def test_many_steps_are_cut_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES_MAX", 1)
    run = Run.create_or_open(configuration(str(tmp_path)))
    ref = commit(run, [step(number) for number in range(7)])
    manifest = manifest_of(run.store, ref)
    assert sum(part.name.startswith("scores-") for part in manifest.parts) == 7
    assert [found.step for found in read(run, ref)] == list(range(7))


def test_an_attempt_that_was_not_first_leaves_nothing_that_counts(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    first, second = commit(run, [step(0)]), commit(run, [step(5)])
    assert second == first
    assert second.reused
    assert read(run, second)[0].rollout_ids[0] == "0/0"


def test_an_error_in_the_thread_ends_the_round(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    with pytest.raises(AssertionError, match="every trained segment has a name"):
        commit(run, [step(0, rollout_ids=((), ()))])

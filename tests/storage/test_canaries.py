"""Canaries next to a run: one for each proven checkpoint, signed, of the newest ones."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.policy_runs import small_run

from marin_rl.errors import CorruptObject
from marin_rl.storage.fleet import CANARIES_KEY, FleetBoard, ProvenVersion
from marin_rl.storage.runs import Run
from marin_rl.types import Canary
from schemas.fleet import CANARIES_MAX

RUN = "0" * 64
FIRST = ProvenVersion(
    version=0,
    parameters_digest="a" * 64,
    canary=Canary(temperature=0.5, token_ids=(1, 2), logprobs=(-0.5, -1.0), tolerance=1e-3),
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return small_run(tmp_path)


def test_each_version_is_added_and_a_second_proof_takes_the_place_of_the_first(run: Run) -> None:
    board = FleetBoard(run.folder, None)
    assert board.canaries(RUN) == {}
    later = replace(FIRST, version=1, parameters_digest="b" * 64)
    # Of two samples; FIRST is as records were that knew of one.
    again = replace(later, canary=replace(later.canary, tolerance=0.1, lengths=(1, 1)))
    assert FIRST.canary.samples == [((1, 2), (-0.5, -1.0))]
    assert again.canary.samples == [((1,), (-0.5,)), ((2,), (-1.0,))]
    for proven in (FIRST, later, again):
        board.prove(RUN, proven)
    assert board.canaries(RUN) == {0: FIRST, 1: again}
    assert board.canaries("1" * 64) == {}, "another run of that name"


def test_the_newest_are_kept(run: Run) -> None:
    board = FleetBoard(run.folder, None)
    for version in range(CANARIES_MAX + 3):
        board.prove(RUN, replace(FIRST, version=version))
    assert sorted(board.canaries(RUN)) == [*range(3, CANARIES_MAX + 3)]


def test_records_of_another_token_prove_nothing_and_are_replaced(run: Run) -> None:
    FleetBoard(run.folder, None).prove(RUN, FIRST)
    board = FleetBoard(run.folder, "secret")
    with pytest.raises(CorruptObject, match="expected a record signed with this process's API"):
        board.canaries(RUN)
    later = replace(FIRST, version=1)
    board.prove(RUN, later)
    assert board.canaries(RUN) == {1: later}, "nothing is taken over that this token did not sign"
    assert b"secret" not in run.folder.read(CANARIES_KEY)

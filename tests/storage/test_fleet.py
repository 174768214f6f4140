"""Heartbeats next to a run: signed, replaced, and named where they do not belong."""

import dataclasses
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.policy_runs import small_run

from marin_rl.errors import CorruptObject, NewerSchema
from marin_rl.storage.fleet import (
    CANARIES_KEY,
    CANARIES_MAX,
    FLEET,
    FleetBoard,
    Heartbeat,
    Identity,
    ProvenVersion,
    Target,
    Unreadable,
    heartbeat_age_s,
    run_sha256,
    served_settings,
)
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect
from marin_rl.types import Canary
from schemas.manifests import sealed_json

DAY_S = 24 * 3600.0
NOW = time.time()


def heartbeat(server: str = "a" * 16, **fields: object) -> Heartbeat:
    known: dict[str, object] = {
        "server": server,
        "url": f"http://{server[0]}:8000/v1",
        "run_sha256": "0" * 64,
        "model": "policy@00003-01234567",
        "weight_version": 3,
        "parameters_digest": "01234567" * 8,
        "labels": {"zone": "eu"},
        "code": "1" * 64,
        "tokenizer": "2" * 64,
        "chat_template": "3" * 64,
        "settings": {"inference.engine.slots": 8, "policy.compute_dtype": "float32"},
        "beat": 1,
        "slots": 8,
        "busy": 2,
        "queued": 5,
        "tokens_per_second": 12.5,
        "started_at": NOW,
        "beat_at": NOW,
    }
    return Heartbeat(**(known | fields))  # type: ignore[arg-type]


IDENTITY = Identity(
    run_sha256="0" * 64,
    code="1" * 64,
    tokenizer="2" * 64,
    chat_template="3" * 64,
    settings={"inference.engine.slots": 8, "policy.compute_dtype": "float32"},
)


def test_a_heartbeat_is_replaced_and_withdrawn(store: ObjectStore) -> None:
    board = FleetBoard(store, "token")
    first, later = heartbeat(), heartbeat(beat=2, queued=0)
    board.announce(first)
    assert board.heartbeats() == [first]
    board.announce(later)
    board.announce(heartbeat("b" * 16))
    assert board.heartbeats() == [later, heartbeat("b" * 16)]
    board.withdraw("a" * 16)
    assert board.heartbeats() == [heartbeat("b" * 16)]
    assert board.target() is None
    target = Target(run_sha256="0" * 64, version=3, through=5, parameters_digest="4" * 64)
    board.aim(target)
    assert board.target() == target
    board.release()
    assert board.target() is None


def test_of_two_servers_that_had_one_address_the_later_one_counts(tmp_path: Path) -> None:
    board = FleetBoard(small_run(tmp_path).folder, None)
    board.announce(heartbeat(started_at=NOW, url="http://h:1/v1"))
    board.announce(heartbeat("b" * 16, started_at=NOW - 60, url="http://h:1/v1", code="9" * 64))
    (only,) = board.heartbeats()
    assert isinstance(only, Heartbeat)
    assert only.server == "a" * 16


@pytest.mark.parametrize("theirs", [None, "another"])
def test_a_record_that_is_not_signed_with_the_token_is_named(tmp_path, theirs):
    folder = small_run(tmp_path).folder
    others, ours = FleetBoard(folder, theirs), FleetBoard(folder, "token")
    others.announce(heartbeat())
    others.aim(Target(run_sha256="0" * 64, version=3, through=5, parameters_digest="4" * 64))
    (refused,) = ours.heartbeats()
    assert isinstance(refused, Unreadable)
    assert "signed" in refused.error
    assert "api_key_variable" in refused.error
    with pytest.raises(CorruptObject, match="signed"):
        ours.target()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "JSON"),
        (sealed_json({"format": "marin-rl/heartbeat", "version": 1}), "heartbeat"),
        (sealed_json({"format": "marin-rl/heartbeat", "version": 9}), "upgrade"),
    ],
)
def test_an_unreadable_heartbeat_hides_no_other(tmp_path: Path, data: bytes, expected: str) -> None:
    folder = small_run(tmp_path).folder
    board = FleetBoard(folder, None)
    board.announce(heartbeat())
    folder.replace(f"{FLEET}/odd.heartbeat.json", data)
    good, bad = board.heartbeats()
    assert good == heartbeat()
    assert isinstance(bad, Unreadable)
    assert expected in bad.error


@pytest.mark.parametrize(
    ("session", "answered", "sampled", "expected"),
    [
        ("now", 3, 3, ""),
        ("now", 4, 3, ""),  # its adapters of earlier versions stay
        ("now", 2, 3, "older than the target of version 3"),
        ("before", 3, 3, "older than this start of the trainer"),
        (None, None, 3, "older than this start of the trainer"),  # it has read no target yet
        ("now", 4, 5, "the target of the run is version 4, expected 5 or later"),
    ],
)
def test_a_heartbeat_ages_by_starts_and_rounds_of_the_trainer(session, answered, sampled, expected):
    target = Target(
        run_sha256="0" * 64, version=4, through=5, parameters_digest="4" * 64, session="now"
    )
    beat = heartbeat(session=session, target_version=answered)
    assert expected in target.aged(beat, sampled)
    assert bool(expected) == bool(target.aged(beat, sampled))
    bare = dataclasses.replace(target, session=None)  # of a trainer that sets none
    assert bare.aged(heartbeat(), 3) != ""


def test_a_newer_target_says_to_upgrade(tmp_path: Path) -> None:
    folder = small_run(tmp_path).folder
    folder.replace(f"{FLEET}/target.json", sealed_json({"format": "marin-rl/target", "version": 2}))
    with pytest.raises(NewerSchema, match="upgrade"):
        FleetBoard(folder, None).target()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"run_sha256": "5" * 64}, "another run of this name: expected digest 0000"),
        ({"code": "5" * 64}, "other code: expected digest 1111"),
        ({"tokenizer": "5" * 64}, "another tokenizer: expected digest 2222"),
        ({"chat_template": "5" * 64}, "another chat template: expected digest 3333"),
        (
            {"settings": {"inference.engine.slots": 4, "policy.compute_dtype": "float32"}},
            "inference.engine.slots is 4, expected 8",
        ),
        ({"settings": {"inference.engine.slots": 8}}, "policy.compute_dtype is None"),
    ],
)
def test_a_server_of_another_kind_is_refused_by_name(change, expected):
    assert IDENTITY.refusal(heartbeat()) == ""
    assert expected in IDENTITY.refusal(heartbeat(**change))


def test_clocks_that_differ_by_a_day_change_nothing(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    board = FleetBoard(run.folder, None)
    for server, apart_s in (("a" * 16, -DAY_S), ("b" * 16, DAY_S)):
        board.announce(heartbeat(server, started_at=NOW + apart_s, beat_at=NOW + apart_s))
    assert len(board.heartbeats()) == 2
    assert [IDENTITY.refusal(h) for h in board.heartbeats() if isinstance(h, Heartbeat)] == ["", ""]
    assert collect(run).garbage == ()


def test_gc_takes_heartbeats_of_long_ago_and_fsck_passes_over_all(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    board = FleetBoard(run.folder, None)
    board.announce(heartbeat())
    board.announce(heartbeat("b" * 16, beat_at=NOW - 10 * DAY_S))
    board.aim(Target(run_sha256="0" * 64, version=3, through=5, parameters_digest="4" * 64))
    run.folder.replace(f"{FLEET}/odd.heartbeat.json", b"not JSON")
    assert check_run(str(tmp_path), run.run_id).faults == ()
    dry = collect(run, dry_run=True)
    assert [(item.reason, item.key) for item in dry.garbage] == [
        ("heartbeat", f"{FLEET}/{'b' * 16}.heartbeat.json")
    ]
    later = datetime.now(UTC) + timedelta(days=10)
    collect(run, now=later)
    assert [h for h in board.heartbeats() if isinstance(h, Heartbeat)] == []
    assert board.target() is not None
    assert heartbeat_age_s("rollouts/x", b"{}", NOW) is None


def test_settings_and_record_of_a_run(tmp_path: Path) -> None:
    run, other = small_run(tmp_path / "a"), small_run(tmp_path / "b")
    settings = served_settings(run.config)
    assert settings["inference.engine.slots"] == run.config.inference.engine.slots
    assert settings["policy.context_length"] == run.config.policy.context_length
    assert "inference.port" not in settings
    assert run_sha256(run.folder) != run_sha256(other.folder), "created twice"
    changed = run.config.inference.engine.model_copy(update={"slots": 3})
    inference = run.config.inference.model_copy(update={"engine": changed})
    apart = served_settings(run.config.model_copy(update={"inference": inference}))
    found = IDENTITY.refusal(dataclasses.replace(heartbeat(), settings=apart))
    assert "configuration" in found


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

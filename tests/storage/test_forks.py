"""Forks: the prefix is the parent's and is never written; what follows is the fork's own."""

import shutil
from pathlib import Path

import pytest
from support.run_factories import checkpoint, play, whole_run

from marin_rl.analysis.scan import scan_metrics, scan_rollouts
from marin_rl.config import RetentionConfig
from marin_rl.errors import ConfigError, ObjectMissing, StorageError
from marin_rl.rounds import close_round
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.run_progress import ROUNDS_PLANNED, progress, rounds_planned
from marin_rl.storage.runs import Run, checkpoint_slot, committed, latest_checkpoint, runs_under
from marin_rl.storage.stores.filesystem import PutOutcome
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.upkeep import forks
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.forks import fork_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect, rule_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    whole_run(str(root), 3)
    return root


@pytest.fixture
def parent(made: Path, tmp_path: Path) -> Run:
    shutil.copytree(made / "run", tmp_path / "run")
    return Run.open(str(tmp_path), "run")


def latest(run: Run):
    found = latest_checkpoint(run)
    assert found is not None
    return found


def test_a_fork_has_its_parents_rounds_and_copies_nothing(parent: Run) -> None:
    fork = fork_run(parent, 2, "fork", ["objective.advantage=grpo"])
    assert fork.folder.list() == ["run.json"]
    assert latest(fork) == committed(parent, checkpoint_slot(2))
    assert sorted(progress(fork)) == [0, 1, 2]  # of 2, the checkpoint
    assert not progress(fork)[2].rollouts
    assert read_metrics(fork)["round"].to_pylist() == [0, 1]
    assert fork.config.objective.advantage == "grpo"
    assert fork.at_round(1).config.objective.advantage == "rloo"
    assert fork.at_round(2) is fork
    assert runs_under(parent.config.root) == ["fork", "run"]


def test_a_forks_later_rounds_are_its_own(parent: Run) -> None:
    fork, before = fork_run(parent, 2, "fork"), parent.folder.list()
    trained = play(fork, 2, latest(fork))
    assert parent.folder.list() == before
    assert trained.sha256 != latest(parent).sha256
    sealed = read_manifest(fork.store, "rollouts/round-00002")
    assert sealed is not None
    assert [p.sha256 for p in sealed[0].parents] == [latest_before(fork).sha256]
    root = parent.config.root
    rows = scan_rollouts(root, "fork").select("run_id", "round").unique().sort("round").collect()
    assert rows.rows() == [("run", 0), ("run", 1), ("fork", 2)]
    assert scan_metrics(root, "fork").collect()["episode"].to_list() == [8, 16, 24]
    assert all(found.balanced for found in audit_run(fork))
    assert check_run(root, "fork").faults == ()
    assert check_run(root, "run").faults == ()


def latest_before(fork: Run):
    found = committed(fork, checkpoint_slot(2))
    assert found is not None
    return found


def test_it_is_as_long_as_its_own_configuration_says(parent: Run) -> None:
    checkpoint(parent, 4, (latest(parent),), extra={ROUNDS_PLANNED: 9})
    close_round(parent, 3, {"timing_s/round": 1.0})
    fork = fork_run(parent, 4, "fork", ["rounds=6"])
    assert rounds_planned(parent, 4) == 9
    assert rounds_planned(fork, 4) == 6
    checkpoint(fork, 5, (latest(fork),), extra={ROUNDS_PLANNED: 7})
    assert rounds_planned(fork, 5) == 7


def test_its_parents_can_go_on_and_be_collected(parent: Run) -> None:
    fork = fork_run(parent, 1, "fork")
    for round in range(3, 6):
        play(parent, round, latest(parent))
    assert latest(fork).slot == checkpoint_slot(1)
    gone = {item.key.split("/")[1] for item in collect(parent, rule_of(parent, 2, None)).garbage}
    assert gone == {"round-00002", "round-00003", "round-00004"}
    assert check_run(parent.config.root, "fork").faults == ()
    play(fork, 1, latest(fork))
    assert latest(fork).slot == checkpoint_slot(2)


def test_a_fork_of_a_fork_names_the_run_that_has_the_rounds(parent: Run) -> None:
    child = fork_run(parent, 2, "child")
    play(child, 2, latest(child))
    inside, beyond = fork_run(child, 1, "inside"), fork_run(child, 3, "beyond")
    assert [(a.run_id, a.through_round) for a in inside.ancestors] == [("run", 1)]
    assert [(a.run_id, a.through_round) for a in beyond.ancestors] == [("run", 2), ("child", 3)]
    assert [beyond.at_round(n).run_id for n in range(4)] == ["run", "run", "child", "beyond"]
    play(beyond, 3, latest(beyond))
    owners = scan_rollouts(parent.config.root, "beyond").select("run_id", "round").unique()
    assert owners.sort("round").collect().rows() == [
        ("run", 0), ("run", 1), ("child", 2), ("beyond", 3),
    ]  # fmt: skip
    assert check_run(parent.config.root, "beyond").faults == ()
    assert collect(parent, rule_of(parent, 2, None), dry_run=True).garbage == ()


def test_the_same_command_again_finds_the_fork(parent: Run) -> None:
    settings = ["training.learning_rate=0.01"]
    first = fork_run(parent, 2, "fork", settings).folder.read("run.json")
    assert fork_run(parent, 2, "fork", settings).folder.read("run.json") == first
    with pytest.raises(ConfigError, match="exists with another content"):
        fork_run(parent, 2, "fork", ["training.learning_rate=0.02"])
    with pytest.raises(ConfigError, match="is no fork of 'run' from round 1"):
        fork_run(parent, 1, "fork", settings)
    with pytest.raises(ConfigError, match="a name of its own"):
        fork_run(parent, 1, "run")


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("policy.context_length=99", "policy.context_length: 128 -> 99"),
        ("policy.model.layers=9", "policy.model.layers: 3 -> 9"),
        ("seed=7", "seed: 0 -> 7"),
        ("sft.steps=7", "sft.steps: 500 -> 7"),
        ("root=/elsewhere", "root: "),
        (
            "objective.reference=average objective.kl_coefficient=0.1",
            "objective.reference: to or from average",
        ),
    ],
)
def test_settings_that_decided_the_shared_rounds_cannot_change(parent, setting, key):
    with pytest.raises(ConfigError, match="a fork shares what its parent did") as refused:
        fork_run(parent, 2, "fork", setting.split())
    assert key in str(refused.value)
    assert runs_under(parent.config.root) == ["run"]


def test_only_closed_rounds_with_arrays_are_forked_from(parent: Run) -> None:
    with pytest.raises(ObjectMissing, match="the latest of run 'run' is checkpoints/round-00003"):
        fork_run(parent, 7, "fork")
    collect(parent, rule_of(parent, 2, None))
    with pytest.raises(ObjectMissing, match="was pruned by retention"):
        fork_run(parent, 1, "fork")
    parent.store.delete("metrics/round-00002.parquet")
    with pytest.raises(ObjectMissing, match="expected round 2 to be closed"):
        fork_run(parent, 3, "fork")
    assert runs_under(parent.config.root) == ["run"]


def test_a_fork_whose_reference_policy_was_pruned_is_refused(parent: Run) -> None:
    kl = ["objective.kl_coefficient=0.1"]
    refreshed = [*kl, "objective.reference=refreshed", "objective.reference_every_rounds=2"]
    collect(parent, rule_of(parent, 2, None))
    with pytest.raises(ObjectMissing, match=r"round-00000 was pruned .* the KL to it"):
        fork_run(parent, 3, "fork", kl)
    assert runs_under(parent.config.root) == ["run"]
    fork_run(parent, 3, "fork", refreshed)  # has checkpoint 2 as reference, which is there
    gone = collect(parent, RetentionConfig(checkpoints_last=2)).garbage
    assert gone == ()


def test_a_collection_between_the_first_look_and_the_fork_is_seen(parent, monkeypatch):
    """The fork is refused rather than left without what it starts from."""
    create = forks.create_record

    def collected_first(*arguments):
        assert collect(parent, rule_of(parent, 2, None)).garbage
        return create(*arguments)

    monkeypatch.setattr(forks, "create_record", collected_first)
    with pytest.raises(ObjectMissing, match=r"was pruned by retention.* Delete .*/fork, then"):
        fork_run(parent, 1, "fork")
    (fault,) = check_run(parent.config.root, "fork").faults
    assert fault.kind == "missing"
    assert fault.place.endswith("run/checkpoints/round-00001")
    assert f"delete {parent.config.root}/fork" in fault.detail
    assert check_run(parent.config.root, "run").faults == ()


def test_nothing_of_the_prefix_can_be_written_or_deleted(parent: Run) -> None:
    fork = fork_run(parent, 2, "fork")
    key = "checkpoints/round-00001/manifest.json"
    assert fork.store.put_if_absent(key, b"x") is PutOutcome.EXISTS
    for write in (
        lambda: fork.store.put_part("rollouts/round-00001/x", b"x"),
        lambda: fork.store.delete(key),
    ):
        with pytest.raises(StorageError, match="belongs to the run"):
            write()
    with pytest.raises(ObjectMissing):
        fork.store.put_if_absent("evals/round-00000/manifest.json", b"x")
    assert fork.store.children("rollouts") == ["round-00000", "round-00001"]
    assert fork.store.children("rollouts/round-00001") == parent.store.children(
        "rollouts/round-00001"
    )
    assert fork.store.list("batches/round-00000") == parent.store.list("batches/round-00000")


def test_software_that_knows_no_forks_refuses_one(parent: Run) -> None:
    """It would take the fork for a run that has done nothing yet."""
    from schemas import NewerVersion
    from schemas.manifests import open_sealed_json

    record = fork_run(parent, 2, "fork").folder.read("run.json")
    with pytest.raises(NewerVersion):
        open_sealed_json(record, format="marin-rl/run", version=1)
    open_sealed_json(parent.folder.read("run.json"), format="marin-rl/run", version=1)


def test_a_fork_on_another_root_kind() -> None:
    parent = whole_run("memory://forks", 1)
    fork = fork_run(parent, 1, "fork")
    play(fork, 1, latest(fork))
    assert check_run("memory://forks", "fork").faults == ()

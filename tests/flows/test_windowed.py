"""Rounds that take groups of a stream: what they take, what a kill loses, and who ends whom."""

import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from support.cases import printed_seed
from support.fault_injection import inject_faults
from support.faults import NamedOperations, outcome
from support.flow_runs import debug
from support.streams import checked

from flows.rl_loop import start
from marin_rl.analysis.lineage import trace
from marin_rl.config import Config
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.training.replay import replay_round

ROUNDS, GROUPS = 4, 4
REPLAY = "asynchrony.replay.max_uses=2"  # a round after its own trains on a group again


def windowed(root: Path, *overrides: str) -> Config:
    return debug(
        root,
        "asynchrony.max_staleness=2",
        "asynchrony.sampler=windowed",
        f"rounds={ROUNDS}",
        "policy.init=random",
        *overrides,
    )


@pytest.fixture(scope="module")
def undisturbed(api: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, list[str]]:
    """A run over a window of two rounds, and the names of its operations."""
    config = windowed(tmp_path_factory.mktemp("windowed"), REPLAY)
    operations = NamedOperations(config.root)
    with inject_faults(operations):
        start(config)
    return config, operations.names.seen


@pytest.mark.slow
def test_every_round_takes_its_groups_and_is_closed(undisturbed):
    run = checked(undisturbed[0])
    rows = read_metrics(run).to_pylist()
    assert all(row["staleness/max"] <= 2 for row in rows)
    assert all(row["timing_s/trainer_idle"] >= 0 for row in rows)
    assert rows[-1]["episode"] == ROUNDS * GROUPS * 4
    every = run.config.evaluation.every_rounds
    assert all(rows[r]["eval/accuracy"] is not None for r in range(0, ROUNDS, every))
    reused = [row["replay/reused"] for row in rows]
    # Groups of round 0 are of checkpoint 0; later ones may be too old for the round after theirs.
    assert reused[:2] == [0, GROUPS * 4]
    assert [item.reused for item in audit_run(run)] == reused
    assert replay_round(run, ROUNDS - 1).equal
    assert any(node.startswith("intakes/") for node in trace(run, 1).nodes)


@pytest.mark.slow
@pytest.mark.bits
def test_all_after_the_rollouts_is_played_again_to_the_same_bits(undisturbed, tmp_path):
    """Only run.json, intakes, rollouts and checkpoint 0 are left of the run.

    Groups are deleted once a sealed round has them.
    """
    config = undisturbed[0]
    before, after = Path(config.root, config.run_id), tmp_path / config.run_id
    shutil.copytree(before, after)
    for name in ("batches", "metrics", "evals", "checkpoints/round-*[1-9]"):
        for path in after.glob(name):
            shutil.rmtree(path)
    start(windowed(tmp_path, REPLAY))
    assert outcome(config).same_as(outcome(windowed(tmp_path, REPLAY))) == []


PIECES = ("asynchrony.partial_tokens=4", "sampling.max_tokens=24", "inference.engine.chunk_steps=1")
PACKS = "asynchrony.limits.commit_every_s=0.05"


@pytest.mark.slow
def test_a_policy_goes_on_with_what_the_one_before_left_unfinished(api, tmp_path):
    """The speed of the machine decides how many groups a checkpoint comes upon, and a pack has."""
    config = windowed(tmp_path, *PIECES, PACKS)
    start(config)
    run = checked(config)
    versions = [
        versions
        for round in range(ROUNDS)
        for table in iter_shards(run, round, ["policy_versions"])
        for versions in table["policy_versions"].to_pylist()
        if versions is not None
    ]
    print(f"{len(versions)} rollouts are of several policies")
    assert all(first <= then for of_one in versions for first, then in pairwise(of_one))
    assert replay_round(run, ROUNDS - 1).equal


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_sampler_is_followed_by_one_that_goes_on(forked_runs, tmp_path):
    """Killed as it commits a part or a pack, and right after it."""
    names = {
        "partial-group-00000000-00": "kill-after",
        "partial-group-00000003-00": "kill-before",
        "groups-00000000-00000001-00": "kill-before",
        "groups-00000002-00000003-00": "kill-after",
    }
    faults = {
        f"create whole/rollouts/.stream/{name}.parquet #1": kind for name, kind in names.items()
    }
    config = windowed(tmp_path, *PIECES, PACKS)
    starts, left = forked_runs.run_until_all_came(config, faults)
    assert left == []
    assert starts > 2
    checked(config)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["kill-amid"])
def test_a_run_that_is_killed_is_whole_at_its_end(undisturbed, forked_runs, tmp_path, kind):
    """Killed at four operations that create something, started again each time."""
    creates = [n for n in undisturbed[1] if n.startswith("create ") and ".probe" not in n]
    faults = dict.fromkeys(random.Random(printed_seed()).sample(creates, 4), kind)
    config = windowed(tmp_path / "killed", REPLAY)
    starts, left = forked_runs.run_until_all_came(config, faults)
    print(f"{starts} starts, {len(left)} operations did not come")
    assert starts > 1
    checked(config)

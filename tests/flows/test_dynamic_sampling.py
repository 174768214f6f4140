"""Rounds that are sampled until they have their groups: whatever the speed, and after kills."""

from pathlib import Path

import pytest
from support.faults import Outcome, outcome
from support.flow_runs import ForkServer
from support.prompt_runs import killed_thrice, played_whole, prompt_run

from flows.rl_loop import start
from marin_rl.analysis.lineage import trace
from marin_rl.analysis.verify import verify_run
from marin_rl.config import Config
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, rollouts_slot
from marin_rl.storage.tables.batches import read_dispositions
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.training.replay import replay_round

ROUNDS, GROUPS, SHARDS = 3, 4, 2


def sampling_on(root: Path, *overrides: str) -> Config:
    """A run whose rewards seldom differ within a group: a random policy says any letter first."""
    rows = ({"prompt": f"say {i}", "answer": f"{i}"} for i in range(40))
    sections = {
        "run_id": "on",
        "rounds": ROUNDS,
        "filters": {"zero_signal": True},
        "asynchrony": {"dynamic_sampling": 6},
    }
    return prompt_run(root, rows, "rare_rewards.py:rare", sections, overrides)


@pytest.fixture(scope="module")
def undisturbed(
    api: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Outcome, list[str]]:
    return played_whole(sampling_on(tmp_path_factory.mktemp("on")))


@pytest.mark.slow
def test_a_round_has_its_groups_and_says_what_became_of_the_others(
    undisturbed: tuple[Config, Outcome, list[str]],
) -> None:
    config, *_ = undisturbed
    run = Run.open(config.root, config.run_id)
    episodes = 0.0
    for round, metrics in enumerate(read_metrics(run).to_pylist()):
        manifest = read_manifest(run.store, rollouts_slot(round))
        assert manifest is not None
        shards = len(manifest[0].parts)
        rows = read_dispositions(run, round).to_pylist()
        taken = {row["group_id"] for row in rows if row["disposition"] == "consumed"}
        assert len(taken) == GROUPS or shards == 6 * SHARDS
        with_signal = {r["group_id"] for r in rows if r["reason"] != "zero_signal"}
        assert taken == set(sorted(with_signal)[:GROUPS]), "the first by number"
        assert metrics["selection/groups_sampled"] == shards * GROUPS // SHARDS
        episodes += metrics["rollouts/generated"]
        assert metrics["episode"] == episodes
    assert all(round.balanced for round in audit_run(run))
    assert [finding.message for finding in verify_run(run) if finding.problem] == []
    assert replay_round(run, ROUNDS - 1).equal
    assert trace(run, 0).nodes
    assert any(len(m) > SHARDS for m in _shards(run)), "some round was sampled on"


def _shards(run: Run) -> list[list[str]]:
    manifests = [read_manifest(run.store, rollouts_slot(round)) for round in range(ROUNDS)]
    return [[part.name for part in item[0].parts] for item in manifests if item]


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_the_groups_of_a_round_do_not_depend_on_speed(
    undisturbed: tuple[Config, Outcome, list[str]], tmp_path: Path
) -> None:
    config = sampling_on(
        tmp_path, "flow.shards_in_flight_max=1", "inference.requests_in_flight_max=1"
    )
    start(config)
    assert undisturbed[1].same_as(outcome(config)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["kill-after"])
def test_a_run_that_is_killed_takes_the_same_groups(
    undisturbed: tuple[Config, Outcome, list[str]],
    fork_server: ForkServer,
    tmp_path: Path,
    kind: str,
) -> None:
    """Killed at three operations that create something, started again each time."""
    _, expected, names = undisturbed
    assert expected.same_as(killed_thrice(names, fork_server, sampling_on(tmp_path), kind)) == []

"""Runs that choose their examples by what was solved, and train on groups again."""

from pathlib import Path

import pytest
from support.faults import Outcome
from support.flow_runs import ForkServer
from support.prompt_runs import killed_thrice, played_whole, prompt_run

from marin_rl.analysis.verify import verify_run
from marin_rl.config import Config
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, rollouts_slot
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.training.replay import replay_round

ROUNDS = 5


def reusing(root: Path, *overrides: str) -> Config:
    """A run one round ahead on prompts of which a third is always solved, and a third never."""
    names = ("always", "never", "some")
    rows = ({"prompt": f"say {i}", "answer": names[i % 3]} for i in range(9))
    sections = {
        "run_id": "again",
        "rounds": ROUNDS,
        "batching": {"length_buckets": [64], "staleness_rounds_max": 3},
        "asynchrony": {
            "max_staleness": 1,
            "curriculum": "solve_rate",
            "replay": {"max_uses": 2, "window_rounds": 2, "select": "prioritised"},
        },
    }
    return prompt_run(root, rows, "solved_rewards.py:solved", sections, overrides)


@pytest.fixture(scope="module")
def undisturbed(
    api: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Outcome, list[str]]:
    return played_whole(reusing(tmp_path_factory.mktemp("again")))


@pytest.mark.slow
def test_rounds_say_what_they_chose_and_what_they_used_again(
    undisturbed: tuple[Config, Outcome, list[str]],
) -> None:
    config, *_ = undisturbed
    run = Run.open(config.root, config.run_id)
    rows = read_metrics(run).to_pylist()
    reports = list(audit_run(run))
    assert [report.problems for report in reports] == [()] * ROUNDS
    assert [report.reused for report in reports] == [row["replay/reused"] for row in rows]
    assert reports[-1].reused > 0
    # Sampled one round ahead; used again one round later, or two.
    assert 2 <= max(row["staleness/max"] for row in rows) <= 3
    assert [finding.message for finding in verify_run(run) if finding.problem] == []
    for round in range(ROUNDS):
        manifest = read_manifest(run.store, rollouts_slot(round))
        assert manifest is not None
        record = manifest[0].extra["curriculum"]
        assert record["policy_version"] == max(0, round - 1)
        assert record["rounds"] == list(range(max(0, round - 1)))
    assert sum(rows[-1][f"curriculum/known/{bucket}"] for bucket in ("always", "never")) > 0
    assert check_run(config.root, config.run_id).whole
    assert replay_round(run, ROUNDS - 1).equal


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["kill-after"])
def test_a_run_that_is_killed_chooses_and_uses_the_same_groups(
    undisturbed: tuple[Config, Outcome, list[str]],
    fork_server: ForkServer,
    tmp_path: Path,
    kind: str,
) -> None:
    """Killed at three operations that create something, started again with one shard at a time."""
    _, expected, names = undisturbed
    config = reusing(tmp_path, "flow.shards_in_flight_max=1")
    assert expected.same_as(killed_thrice(names, fork_server, config, kind)) == []

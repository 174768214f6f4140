"""Runs that choose their examples by what was solved, and train on groups again."""

import json
import random
from pathlib import Path

import pytest
import yaml
from support.cases import printed_seed
from support.faults import NamedOperations, Outcome, outcome
from support.flow_runs import DEBUG, ForkServer

from flows.rl_loop import start
from marin_rl.analysis.verify import verify_run
from marin_rl.config import Config, parse_config
from marin_rl.config.code import pin_code
from marin_rl.config.loading import override
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, rollouts_slot
from marin_rl.storage.stores.fault_injection import inject_faults
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.training.replay import replay_round

ROUNDS = 5
REWARD = "tests/support/solved_rewards.py"


def reusing(root: Path, *overrides: str) -> Config:
    """A run one round ahead on prompts of which a third is always solved, and a third never."""
    root.mkdir(parents=True, exist_ok=True)
    names = ("always", "never", "some")
    rows = ({"prompt": f"say {i}", "answer": names[i % 3]} for i in range(9))
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = yaml.safe_load(DEBUG.read_text())
    options = {"path": str(root / "prompts.jsonl"), "reward": f"{REWARD}:solved"}
    tree |= {
        "run_id": "again",
        "root": str(root / "runs"),
        "rounds": ROUNDS,
        "environment": {"name": "chat", "options": options},
        "batching": {"length_buckets": [64], "staleness_rounds_max": 3},
        "asynchrony": {
            "max_staleness": 1,
            "curriculum": "solve_rate",
            "replay": {"max_uses": 2, "window_rounds": 2, "select": "prioritised"},
        },
    }
    return parse_config(pin_code(override(tree, overrides), Path()), "again")


@pytest.fixture(scope="module")
def undisturbed(
    api: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Outcome, list[str]]:
    config = reusing(tmp_path_factory.mktemp("again"))
    operations = NamedOperations(config.root)
    with inject_faults(operations):
        start(config)
    return config, outcome(config), operations.names.seen


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
    creates = [name for name in names if name.startswith("create ") and ".probe" not in name]
    faults = dict.fromkeys(random.Random(printed_seed()).sample(creates, 3), kind)
    config = reusing(tmp_path, "flow.shards_in_flight_max=1")
    starts, left = fork_server.run_until_all_came(config, faults)
    assert starts > 1, left
    assert expected.same_as(outcome(config)) == []

"""Runs that choose: rounds that are sampled on until they have groups, examples by what was solved,
groups that are trained on again. Whatever the speed, and after kills.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cases import printed_seed
from support.fault_injection import inject_faults
from support.faults import NamedOperations, Outcome, outcome
from support.flow_runs import DEBUG

from flows.rl_loop import start
from marin_rl.analysis.lineage import trace
from marin_rl.analysis.verify import verify_run
from marin_rl.config import Config, parse_config
from marin_rl.config.files import pin_code
from marin_rl.config.loading import override
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, rollouts_slot
from marin_rl.storage.tables.batches import read_dispositions
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.training.replay import replay_round

GROUPS, SHARDS = 4, 2
Played = tuple[Config, Outcome, list[str]]  # its outcome, and the names of its operations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def prompt_run(
    root: Path,
    prompts: Iterable[Mapping[str, str]],
    reward: str,
    sections: Mapping[str, Any],
    overrides: Sequence[str],
) -> Config:
    """A run on these prompts; `reward` is a function of prompt_rewards.py.

    A process that is started again finds that below the folder that it is started in.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    tree = yaml.safe_load(DEBUG.read_text())
    reward = f"tests/flows/prompt_rewards.py:{reward}"
    options = {"path": str(root / "prompts.jsonl"), "reward": reward}
    tree |= {"root": str(root / "runs"), "environment": {"name": "chat", "options": options}}
    return parse_config(pin_code(override({**tree, **sections}, overrides), Path()), "prompts")


def sampling_on(root: Path, *overrides: str) -> Config:
    """A run whose rewards seldom differ within a group: a random policy says any letter first."""
    rows = ({"prompt": f"say {i}", "answer": f"{i}"} for i in range(40))
    sections = {
        "run_id": "on",
        "rounds": 3,
        "filters": {"zero_signal": True},
        "asynchrony": {"dynamic_sampling": 6},
    }
    return prompt_run(root, rows, "rare", sections, overrides)


def reusing(root: Path, *overrides: str) -> Config:
    """A run one round ahead on prompts of which a third is always solved, and a third never."""
    names = ("always", "never", "some")
    rows = ({"prompt": f"say {i}", "answer": names[i % 3]} for i in range(9))
    sections = {
        "run_id": "again",
        "rounds": 5,
        "batching": {"length_buckets": [64], "staleness_rounds_max": 3},
        "asynchrony": {
            "max_staleness": 1,
            "curriculum": "solve_rate",
            "replay": {"max_uses": 2, "window_rounds": 2, "select": "prioritised"},
        },
    }
    return prompt_run(root, rows, "solved", sections, overrides)


def played_whole(config: Config) -> Played:
    operations = NamedOperations(config.root)
    with inject_faults(operations):
        start(config)
    return config, outcome(config), operations.names.seen


@pytest.fixture(scope="module")
def sampled_on(api: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return played_whole(sampling_on(tmp_path_factory.mktemp("on")))


@pytest.fixture(scope="module")
def reused(api: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return played_whole(reusing(tmp_path_factory.mktemp("again")))


def test_a_round_has_its_groups_and_says_what_became_of_the_others(sampled_on):
    config, *_ = sampled_on
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
    assert replay_round(run, 2).equal
    assert trace(run, 0).nodes
    assert any(len(m) > SHARDS for m in _shards(run)), "some round was sampled on"


def _shards(run: Run) -> list[list[str]]:
    manifests = [read_manifest(run.store, rollouts_slot(round)) for round in range(3)]
    return [[part.name for part in item[0].parts] for item in manifests if item]


@pytest.mark.bits
def test_the_groups_of_a_round_do_not_depend_on_speed(sampled_on: Played, tmp_path: Path) -> None:
    config = sampling_on(
        tmp_path, "flow.shards_in_flight_max=1", "inference.requests_in_flight_max=1"
    )
    start(config)
    assert sampled_on[1].same_as(outcome(config)) == []


def test_rounds_say_what_they_chose_and_what_they_used_again(reused):
    config, *_ = reused
    run = Run.open(config.root, config.run_id)
    rows = read_metrics(run).to_pylist()
    reports = list(audit_run(run))
    assert [report.problems for report in reports] == [()] * 5
    assert [report.reused for report in reports] == [row["replay/reused"] for row in rows]
    assert reports[-1].reused > 0
    # Sampled one round ahead; used again one round later, or two.
    assert 2 <= max(row["staleness/max"] for row in rows) <= 3
    assert [finding.message for finding in verify_run(run) if finding.problem] == []
    for round in range(5):
        manifest = read_manifest(run.store, rollouts_slot(round))
        assert manifest is not None
        record = manifest[0].extra["curriculum"]
        assert record["policy_version"] == max(0, round - 1)
        assert record["rounds"] == list(range(max(0, round - 1)))
    assert sum(rows[-1][f"curriculum/known/{bucket}"] for bucket in ("always", "never")) > 0
    assert check_run(config.root, config.run_id).whole
    assert replay_round(run, 4).equal


@pytest.mark.parametrize("kind", ["sampled_on", "reused"])
def test_a_run_that_is_killed_takes_the_same_groups(kind, forked_runs, tmp_path, request):
    """Killed after three operations that create something, started again each time."""
    _, expected, names = request.getfixturevalue(kind)
    one_by_one = "flow.shards_in_flight_max=1"
    config = sampling_on(tmp_path) if kind == "sampled_on" else reusing(tmp_path, one_by_one)
    creates = [name for name in names if name.startswith("create ") and ".probe" not in name]
    chosen = random.Random(printed_seed()).sample(creates, 3)
    starts, left = forked_runs.run_until_all_came(config, dict.fromkeys(chosen, "kill-after"))
    assert starts > 1, left
    assert expected.same_as(outcome(config)) == []

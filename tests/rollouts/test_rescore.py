"""Rescoring: a table per version of a function; the shards stay as they are."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.run_factories import CHECKPOINT, FINGERPRINT, configuration, group, policy
from typer.testing import CliRunner

from marin_rl.analysis.query import sql
from marin_rl.analysis.scan import TABLES
from marin_rl.batching.build import build_round, preview_round
from marin_rl.cli import app
from marin_rl.config import load_config
from marin_rl.errors import ConfigError, InputError, ObjectMissing
from marin_rl.rollouts.replay import rescore_round
from marin_rl.storage.runs import Run
from marin_rl.storage.tables import rewards
from marin_rl.storage.tables.rewards import read_rewards
from marin_rl.storage.tables.rollouts import commit_shard, seal_round
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.training.reprocess import reprocess_round

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
REWARDS = """
def length(example, completion):
    return len(completion) + (1 if example.answer == "42" else 0)

def strict(example, completion):
    if len(completion) > 2:
        raise ValueError("too long")
    return {"short": 1.0, "other": 0.5}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Three rollouts that answered with 2, 3 and 3 letters, and one that failed."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    run = Run.create_or_open(configuration(str(tmp_path / "runs"), groups=2))
    groups = [
        group("a", [0.0, 1.0], completion=[1, 2]),
        group("b", [0.0, 1.0], completion=[1, 2, 3]),
        group("c", [None], status="error"),
    ]
    shard = commit_shard(run, 0, 0, groups, FINGERPRINT, policy(0))
    build_round(run, 0, seal_round(run, 0, [shard], [CHECKPOINT]))
    return run


def test_scores_are_written_next_to_the_shards(run: Run) -> None:
    before = {key: run.store.read(key) for key in run.store.list()}
    found = rescore_round(run, 0, "my_rewards:length", "length")
    assert (found.rollouts, found.changed, found.failed) == (5, 4, 0)
    assert (found.mean_before, found.mean_after) == (0.5, 3.5)
    assert read_rewards(run, 0, "length") == {
        "a/0": 3.0, "a/1": 3.0, "b/0": 4.0, "b/1": 4.0, "c/0": None,
    }  # fmt: skip
    assert {key: run.store.read(key) for key in before} == before
    assert set(run.store.list()) == {*before, "rewards/round-00000/length-v0001.parquet"}
    kinds = {fault.kind for fault in check_run(run.config.root, "run").faults}
    assert kinds == {"missing"}  # the checkpoint that these rollouts pretend to come from


@pytest.mark.slow
def test_versions_count_up_where_the_function_is_another(run: Run, tmp_path: Path) -> None:
    first = rescore_round(run, 0, "my_rewards:length", "mine").table
    assert (first.version, first.reused) == (1, False)
    again = rescore_round(run, 0, "my_rewards:length", "mine").table
    assert (again.version, again.reused, again.sha256) == (1, True, first.sha256)
    other = rescore_round(run, 0, "my_rewards:strict", "mine").table
    assert other.version == 2
    assert read_rewards(run, 0, "mine")["a/0"] == 1.5  # the newest
    assert read_rewards(run, 0, "mine-v0001")["a/0"] == 3.0


def test_an_existing_table_is_printed_without_scoring_again(run, tmp_path, monkeypatch):
    """Also where the function would say something else now: what it imports is in no digest."""
    (tmp_path / "my_factor.py").write_text("FACTOR = 1.0")
    (tmp_path / "my_called.py").write_text(
        "from pathlib import Path\nfrom my_factor import FACTOR\n"
        f"def reward(example, completion):\n    Path({str(tmp_path / 'asked')!r}).touch()\n"
        "    return FACTOR * len(completion)\n"
    )
    first = rescore_round(run, 0, "my_called:reward", "mine")
    (tmp_path / "asked").unlink()
    (tmp_path / "my_factor.py").write_text("FACTOR = 1000.0")
    again = rescore_round(run, 0, "my_called:reward", "mine")
    assert not (tmp_path / "asked").exists()
    assert again.table == replace(first.table, reused=True)
    assert replace(again, table=first.table) == first
    assert again.mean_after == first.mean_after


def test_the_last_version_that_the_message_names_can_be_taken(run, monkeypatch):
    monkeypatch.setattr(rewards, "VERSIONS_MAX", 1)
    assert rescore_round(run, 0, "my_rewards:length", "mine").table.version == 1
    with pytest.raises(ConfigError, match="all 1 versions of 'mine' are taken"):
        rescore_round(run, 0, "my_rewards:strict", "mine")


def test_a_missing_round_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match="cannot import 'my_rewards:absent'"):
        rescore_round(run, 0, "my_rewards:absent", "x")
    with pytest.raises(ObjectMissing, match="not sealed"):
        rescore_round(run, 3, "my_rewards:length", "x")
    with pytest.raises(ConfigError, match="expected a name like"):
        rescore_round(run, 0, "my_rewards:length", "../x")
    with pytest.raises(ObjectMissing, match="no reward table 'x'; found none"):
        read_rewards(run, 0, "x")


def test_a_round_is_previewed_under_other_rewards_and_settings(run: Run) -> None:
    assert rescore_round(run, 0, "my_rewards:strict", "strict").failed == 2
    assert read_rewards(run, 0, "strict")["b/0"] is None
    plain = preview_round(run, 0, run.config)
    assert plain.plan.decision.advantage_N.tolist() == [-1.0, 1.0, -1.0, 1.0, 0.0]
    scored = preview_round(run, 0, run.config, read_rewards(run, 0, "strict"))
    assert scored.plan.decision.reason_N.tolist() == [
        "zero_signal", "zero_signal", "no_reward", "no_reward", "error",
    ]  # fmt: skip
    (batch,) = plain.batches()
    assert batch.rollout_ids == (("a/0",), ("a/1",), ("b/0",), ("b/1",))
    assert list(scored.batches()) == []
    with pytest.raises(InputError, match="no row for a/0 and 4 more"):
        preview_round(run, 0, run.config, {})


def test_advantages_that_a_critic_gives_are_not_compared_before_it_does(tmp_path: Path) -> None:
    settings = ("recipe=recipes/ppo.yaml", "run_id=run", "rollouts.shards_per_round=1")
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *settings]))
    groups = [group(name, [0.0, 1.0]) for name in "ab"]
    shard = commit_shard(run, 0, 0, groups, FINGERPRINT, policy(0))
    build_round(run, 0, seal_round(run, 0, [shard], [CHECKPOINT]))
    assert reprocess_round(run, 0, [], gradient=False).advantages is None
    arguments = ["reprocess", "run", "--round", "0", "--root", str(tmp_path), "--no-gradient"]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert "none: the training stage makes them" in shown.output, shown.exception


def test_the_command(run: Run) -> None:
    arguments = ["rescore", "run", "--round", "0", "--reward", "my_rewards:length"]
    arguments += ["--name", "length", "--root", run.config.root]
    runner = CliRunner(env={"COLUMNS": "200"})
    assert "wrote rewards/round-00000/length-v0001.parquet" in runner.invoke(app, arguments).output
    told = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert told["table"]["reused"] is True


@pytest.mark.slow
def test_every_table_of_rewards_is_queried_by_its_name_and_version(run: Run) -> None:
    asked = "select name, version, rewards.round, rollout_id, reward from rewards order by all"
    assert sql(run.config.root, run.run_id, asked).is_empty()
    rescore_round(run, 0, "my_rewards:length", "length")
    rescore_round(run, 0, "my_rewards:strict", "length")
    rescore_round(run, 0, "my_rewards:length", "other")
    rows = sql(run.config.root, run.run_id, asked).rows()
    assert len(rows) == 15
    assert rows[0] == ("length", 1, 0, "a/0", 3.0)
    assert rows[5] == ("length", 2, 0, "a/0", 1.5)
    assert {row[:2] for row in rows} == {("length", 1), ("length", 2), ("other", 1)}
    joined = """select r.reward, r.reward_before = o.reward as same
                from rewards r join rollouts o using (run_id, rollout_id)
                where name = 'other' and rollout_id = 'b/1'"""
    assert sql(run.config.root, run.run_id, joined).rows() == [(4.0, True)]


def test_sql_without_a_query_lists_the_tables_and_their_columns(run: Run) -> None:
    arguments = ["sql", run.run_id, "--root", run.config.root]
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    tables = {item["table"]: item["columns"] for item in map(json.loads, shown.output.splitlines())}
    assert list(tables) == list(TABLES)
    assert tables["rewards"]["name"] == "VARCHAR"
    assert tables["rollouts"]["reward"] == "DOUBLE"
    lines = CliRunner().invoke(app, arguments).output.splitlines()
    assert "rewards" in lines
    assert "    version  INTEGER" in lines

"""The flow "evaluate" before it begins: it looks at a run that is there, and makes none."""

import asyncio
from pathlib import Path

import pytest
from support.flow_runs import REPOSITORY, debug
from support.run_factories import whole_run

from flows.evaluate import evaluate_run
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.storage.runs import Run, runs_under
from marin_rl.storage.upkeep.forks import fork_run


def test_a_mistyped_name_is_an_error_and_begins_no_run(tmp_path: Path) -> None:
    Run.create_or_open(debug(tmp_path, "run_id=spell"))
    config = str(REPOSITORY / "configs/debug.yaml")
    overrides = [f"root={tmp_path}", "policy.init=sft"]
    with pytest.raises(ObjectMissing, match=r"no run 'spel' under .* found there: spell"):
        asyncio.run(evaluate_run.fn(config, run_id="spel", overrides=overrides))
    assert runs_under(str(tmp_path)) == ["spell"]


def test_a_shared_checkpoint_of_a_fork_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    fork = fork_run(whole_run(str(tmp_path), 2), 2, "fork")
    with pytest.raises(ConfigError, match="marin-rl evaluate run --round 1"):
        asyncio.run(evaluate_run.fn(fork.config.model_dump(mode="json"), round=1))

"""The whole loop, whose server goes on with the weights of the round before."""

import shutil
from pathlib import Path

import pytest
from support.flow_runs import Played
from support.policy_runs import in_memory
from support.servers import check_told, deaf_server

from flows.rl_loop import start
from marin_rl.errors import StalePolicy
from marin_rl.runtime import runtime_for
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run, latest_checkpoint, round_of


def test_the_last_rounds_weights_stop_the_flow_with_both_digests(
    played: Played, tmp_path: Path
) -> None:
    shutil.copytree(played.config.root, tmp_path / "runs")
    config = played.config.model_copy(update={"root": str(tmp_path / "runs")})
    newest = latest_round(Run.create_or_open(config))  # another test may have gone on with it
    config = config.model_copy(update={"rounds": newest + 1})
    run = Run.create_or_open(config)
    in_memory(runtime_for(run)).server = server = deaf_server(run, newest - 1)
    with pytest.raises(StalePolicy, match=f"found those of round {newest - 1}, ") as caught:
        start(config)
    assert server.model_id.startswith(f"policy@{newest:05d}-")  # it said that it changed them
    check_told(str(caught.value), run, expected=newest, found=newest - 1)
    assert progress(run)[newest].shards == 0


def latest_round(run: Run) -> int:
    """Of the newest committed checkpoint."""
    latest = latest_checkpoint(run)
    assert latest is not None
    return round_of(latest.slot.rpartition("/")[2]) or 0

"""The game is learned from reward alone: fewer held-out turns than the warm start needs."""

from pathlib import Path

import pytest
from support.cases import optimal_mean_guesses

from flows.rl_loop import start
from flows.server import prefect_api
from marin_rl.analysis.dialogues import before_and_after
from marin_rl.analysis.status import metric_rows
from marin_rl.config import load_config
from marin_rl.storage.runs import Run

GAME = Path(__file__).parents[2] / "configs/game.yaml"
ROUNDS = 25  # half of them, after which it has fallen by 2.4 turns with the worst of three seeds


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly() -> None:
    """None is: a game is learned with the programs that users have."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("long_runs")
def test_held_out_turns_fall(tmp_path: Path) -> None:
    config = load_config(GAME, [f"root={tmp_path}", "run_id=game-test", f"rounds={ROUNDS}"])
    print(f"seed {config.seed}")
    with prefect_api():
        start(config)
    run = Run.open(str(tmp_path), "game-test")
    turns = [row["eval/mean_turns"] for row in metric_rows(run) if row.get("eval/mean_turns")]
    assert turns[-1] <= turns[0] - 1, turns
    assert turns[-1] >= optimal_mean_guesses(8), "no strategy is better than binary search"
    compared = before_and_after(run)
    assert compared is not None
    assert compared.rounds == (0, ROUNDS)
    assert [len(after.turns) > 1 for _, _, after in compared.pairs] == [True] * 3

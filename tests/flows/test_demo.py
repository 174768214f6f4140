"""The demo keeps its promise: evaluation accuracy climbs, and every rollout is accounted for."""

from pathlib import Path

import pytest

from flows.rl_loop import start
from flows.server import prefect_api
from marin_rl.analysis.status import metric_rows
from marin_rl.config import load_config
from marin_rl.storage.runs import Run
from marin_rl.storage.upkeep.audit import audit_run

DEMO = Path(__file__).parents[2] / "configs/demo.yaml"
ROUNDS = 8  # a fifth of them, after which it spells nine in ten words


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly() -> None:
    """None is: what users see first is played with the programs that they have."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("long_runs")
def test_held_out_accuracy_climbs(tmp_path: Path) -> None:
    shorter = (f"rounds={ROUNDS}", f"evaluation.every_rounds={ROUNDS}")
    config = load_config(DEMO, [f"root={tmp_path}", "run_id=demo-test", *shorter])
    with prefect_api():
        start(config)
    run = Run.open(str(tmp_path), "demo-test")
    accuracies = [
        row["eval/accuracy"] for row in metric_rows(run) if row.get("eval/accuracy") is not None
    ]
    assert accuracies[-1] - accuracies[0] >= 0.35 or accuracies[-1] >= 0.9, accuracies
    audits = list(audit_run(run))
    assert len(audits) == config.rounds
    assert all(audit.balanced for audit in audits)

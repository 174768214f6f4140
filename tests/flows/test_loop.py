"""The whole loop on configs/debug.yaml, in this process, on every real room."""

import asyncio
import time
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, get_client, task
from prefect.client.schemas.filters import (
    ArtifactFilter,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, TaskRun
from support.flow_runs import ROUNDS, SHARDS, Played, debug, latest_flow_run
from typer.testing import CliRunner

from flows.evaluate import start as start_evaluate
from flows.rl_loop import rl_loop, start
from marin_rl.analysis.status import run_status
from marin_rl.cli import app
from marin_rl.config import Config
from marin_rl.doctor.stages import RL
from marin_rl.doctor.start import finished
from marin_rl.errors import ObjectMissing, RunLocked
from marin_rl.planning import plan
from marin_rl.progress import ProgressEvent, listening
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run, checkpoint_slot, committed
from marin_rl.storage.tables.metrics import read_metrics


def files(config: Config) -> dict[str, int]:
    """Every file of a run with the time of its last change, the lock aside."""
    folder = Path(config.root, config.run_id)
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def task_runs(flow_run: UUID, expected: int) -> dict[str, TaskRun]:
    """Task runs by name, once the server has written down how that many ended."""
    only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    deadline = time.monotonic() + 120
    with get_client(sync_client=True) as client:
        while True:
            found = client.read_task_runs(flow_run_filter=only, limit=200)
            ended = [item for item in found if item.state and item.state.is_final()]
            if len(ended) >= expected or time.monotonic() > deadline:
                return {item.name: item for item in found}
            time.sleep(0.2)


def test_a_run_ends_with_every_slot_committed(played: Played) -> None:
    run = Run.create_or_open(played.config)
    assert played.checkpoint == committed(run, checkpoint_slot(ROUNDS))
    found = progress(run)
    assert sorted(found) == [0, 1, 2, 3]
    for round in range(ROUNDS):
        item = found[round]
        assert (item.shards, item.rollouts, item.batches, item.checkpoint, item.metrics) == (
            SHARDS, True, True, True, True,
        )  # fmt: skip
    assert [found[round].evaluation for round in range(4)] == [True, False, True, True]
    rows = read_metrics(run).to_pylist()
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert all(row["rollouts/generated"] == row["rollouts/consumed"] == 16 for row in rows)
    assert all(row["timing_s/generate"] > 0 for row in rows)


def test_progress_is_shown_while_it_happens(played: Played) -> None:
    stages = [event.stage for event in played.events]
    assert stages[0] == "start"
    rounds = [event.round for event in played.events if event.stage == "round"]
    assert rounds == [0, 1, 2]
    evaluated = [event for event in played.events if "eval/accuracy" in event.metrics]
    assert {event.round for event in evaluated} >= {0, 2, 3}


def test_the_plan_bounds_what_lies_on_disk(played: Played) -> None:
    planned, folder = plan(played.config), Path(played.config.root, played.config.run_id)

    def on_disk(name: str) -> int:
        return sum(file.stat().st_size for file in (folder / name).rglob("*") if file.is_file())

    assert on_disk("rollouts") <= planned.rollout_disk_bytes
    assert on_disk("batches") <= planned.batch_disk_bytes
    assert planned.checkpoint_disk_bytes is not None
    # The least: a small model's arrays come with their names.
    assert planned.checkpoint_disk_bytes <= on_disk("checkpoints")


def test_each_part_of_a_run_that_may_last_is_a_phase(played: Played) -> None:
    lasting = {"checking storage root", "proving that the engine decodes as trained"}
    lasting |= {"writing the checkpoint"}
    assert {f"{name} (0 s)" for name in lasting} <= {*played.phases}
    begun = {event.stage for event in played.events if not event.done and not event.metrics}
    assert begun >= {"start", "sft", "serve", "generate", "evaluate", "process", "train"}


@pytest.mark.slow
def test_the_graph_tells_the_round_and_the_shard(played: Played) -> None:
    assert played.flow_run.state_name == "Completed"
    per_round = ["serve", "seal", "process", "train", "publish"]
    expected = {f"{stage}[round-{r:05d}]" for stage in per_round for r in range(ROUNDS)}
    expected |= {
        f"generate[round-{r:05d}/shard-{s:04d}]" for r in range(ROUNDS) for s in range(SHARDS)
    }
    expected |= {f"round-{r:05d}" for r in range(ROUNDS)} | {"begin", "serve[round-00003]"}
    expected |= {f"fine_tune[step-{step:05d}]" for step in (0, 2)}
    expected |= {f"evaluate[round-{r:05d}]" for r in (0, 2, 3)}
    runs = task_runs(played.flow_run.id, len(expected))
    assert set(runs) == expected
    assert {run.state_name for run in runs.values()} == {"Completed"}
    assert before(runs, "round-00002") == {"round-00001"}
    assert before(runs, "round-00000") == {"begin"}
    assert before(runs, "begin") == {"fine_tune[step-00002]"}
    assert before(runs, "seal[round-00001]") >= {
        "generate[round-00001/shard-0000]", "generate[round-00001/shard-0001]",
    }  # fmt: skip
    assert before(runs, "process[round-00001]") == {"seal[round-00001]"}
    assert before(runs, "train[round-00001]") >= {"process[round-00001]", "round-00000"}
    # Prefect follows numbers by their address, which a later one may have: more edges, never fewer.
    assert before(runs, "publish[round-00001]") >= {"train[round-00001]"}
    assert before(runs, "evaluate[round-00003]") == {"round-00002", "serve[round-00003]"}
    assert parents(runs, "train[round-00001]") == {"round-00001"}


def before(runs: dict[str, TaskRun], name: str) -> set[str]:
    """Names of the tasks whose results a task was given."""
    inputs = [v for key, v in runs[name].task_inputs.items() if key != "__parents__"]
    return _names(runs, inputs)


def parents(runs: dict[str, TaskRun], name: str) -> set[str]:
    """Names of the tasks that a task was called in."""
    return _names(runs, [runs[name].task_inputs["__parents__"]])


def _names(runs: dict[str, TaskRun], inputs: list) -> set[str]:  # type: ignore[type-arg]
    by_id = {run.id: name for name, run in runs.items()}
    ids = {item.id for items in inputs for item in items if item.input_type == "task_run"}
    return {by_id[one] for one in ids}


def artifacts(flow_run: UUID, expected: int) -> list[Artifact]:
    """Artifacts of a flow run, once there are `expected` and progress is full."""
    only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    deadline = time.monotonic() + 120
    with get_client(sync_client=True) as client:
        while True:
            found = client.read_artifacts(artifact_filter=ArtifactFilter(), flow_run_filter=only)
            full = len(found) >= expected and any(item.data == 100.0 for item in found)
            if full or time.monotonic() > deadline:
                return found
            time.sleep(0.2)


def test_artifacts_show_the_run(played: Played) -> None:
    expected = {"whole-rounds", "whole-table", "whole-learning-curve", "whole-progress"}
    found = artifacts(played.flow_run.id, len(expected) - 1 + ROUNDS)
    by_key = {str(item.key): item for item in found}
    assert set(by_key) == expected
    pages = [str(item.data) for item in found if item.key == "whole-rounds"]
    assert len(pages) == ROUNDS
    assert all("## Best rollout" in page and "| reward |" in page for page in pages)
    assert by_key["whole-progress"].data == 100.0
    assert "](data:image/png;base64," in str(by_key["whole-learning-curve"].data)
    assert '"held-out accuracy"' in str(by_key["whole-table"].data)


def test_playing_a_complete_run_again_changes_nothing(played: Played) -> None:
    before_files, heard = files(played.config), list[ProgressEvent]()
    with listening(heard.append):
        assert start(played.config) == played.checkpoint
    assert files(played.config) == before_files
    assert [event.stage for event in heard] == ["start"]
    again = latest_flow_run("whole").id
    after()
    assert set(task_runs(latest_flow_run("after").id, 1)) == {"last"}
    assert task_runs(again, 0) == {}


@flow(flow_run_name="after", persist_result=False)
def after() -> None:
    """Task whose run the server records after everything this process sent before."""
    task(lambda: None, task_run_name="last", name="last")()


def test_a_second_flow_on_the_same_run_is_refused(played: Played) -> None:
    with Run.create_or_open(played.config).lock(), pytest.raises(RunLocked, match="process"):
        start(played.config)


@pytest.mark.slow
def test_more_rounds_go_on_from_the_last(played: Played) -> None:
    heard: list[ProgressEvent] = []
    with listening(heard.append):
        start(played.config.model_copy(update={"rounds": ROUNDS + 1}))
    assert {event.round for event in heard if event.stage == "train"} == {ROUNDS}
    rows = read_metrics(Run.create_or_open(played.config)).to_pylist()
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["eval/accuracy"] is not None
    assert rows[3]["loss"] is not None


@pytest.mark.slow
def test_a_run_ends_once_evaluations_get_no_better(tmp_path: Path) -> None:
    # Nothing is learned, so that all evaluations are alike: the second ends the run.
    still = "training.learning_rate=1e-12", "policy.init=random", "evaluation.every_rounds=1"
    config = debug(tmp_path, *still, "rounds=5", "evaluation.patience=2")
    start(config.model_copy(update={"rounds": 1}))  # as if it was killed after a round
    assert finished(config, RL) is None
    heard: list[ProgressEvent] = []
    with listening(heard.append):
        assert start(config).slot == "checkpoints/round-00002"
    assert {event.round for event in heard if event.stage == "train"} == {1}
    assert "ended early" in run_status(config.root, config.run_id).facts["best checkpoint"]
    before = files(config)
    assert finished(config, RL) == start(config)
    said = CliRunner().invoke(app, ["run", f"{config.root}/{config.run_id}"])
    assert said.exit_code == 0, said.output
    assert "ended early, after 2 of 5 rounds" in said.output
    assert "--set evaluation.patience=null" in said.output
    assert files(config) == before
    changed = config.evaluation.model_copy(update={"patience": None})
    assert finished(config.model_copy(update={"evaluation": changed}), RL) is None


@pytest.mark.slow
def test_a_checkpoint_can_be_evaluated_later(played: Played) -> None:
    evaluated = start_evaluate(played.config, 1)
    assert evaluated.slot == "evals/round-00001"
    assert evaluated.summary["eval/examples"] == 4
    with pytest.raises(ObjectMissing, match="no checkpoint of round 77"):
        start_evaluate(played.config, 77)


@pytest.mark.slow
def test_a_cancelled_round_leaves_whole_slots_or_none(api, played, tmp_path):
    config = debug(tmp_path)

    async def cancel_while_generating() -> None:
        generating = asyncio.Event()
        loop = asyncio.get_running_loop()

        def listen(event: ProgressEvent) -> None:
            if event.stage == "generate" and event.round == 1:
                loop.call_soon_threadsafe(generating.set)

        with listening(listen):
            flow = asyncio.create_task(rl_loop(config.model_dump(mode="json")))
            await generating.wait()
            flow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flow

    asyncio.run(cancel_while_generating())
    run = Run.create_or_open(config)
    stopped = progress(run)
    assert stopped[1].checkpoint
    assert 2 not in stopped
    assert start(config).summary == played.checkpoint.summary
    assert parameters_digest(config) == parameters_digest(played.config)


def parameters_digest(config: Config) -> str:
    """Digest of the parameters after the last round of the debug run."""
    run = Run.create_or_open(config)
    ref = committed(run, checkpoint_slot(ROUNDS))
    assert ref is not None
    from marin_rl.storage.commits import manifest_of

    return manifest_of(run.store, ref).extra["parameters_digest"]


def test_the_log_of_the_flow_run_has_a_line_for_each_round(played: Played) -> None:
    """As `prefect flow-run logs` and the Logs tab show it."""
    of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[played.flow_run.id]))
    deadline, lines = time.monotonic() + 120, list[str]()
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            lines = [log.message for log in client.read_logs(of_run)]
            if sum(line.startswith("round ") for line in lines) >= ROUNDS:
                break
            time.sleep(0.2)
    rounds = [line for line in lines if ": reward 0." in line]
    assert [line.partition(":")[0] for line in rounds] == [f"round {n}" for n in range(ROUNDS)]
    assert all("seconds" in line for line in rounds)

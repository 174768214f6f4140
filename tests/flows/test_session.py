"""Configuration of a flow, and its resume point: from committed slots alone."""

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest
from prefect import flow, get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.states import Suspended
from support.flow_runs import REPOSITORY, debug

from flows.evaluate import evaluate_run
from flows.session import open_session, pause_if_suspended, resolve_config, resume_point
from marin_rl.config import load_config, parse_config
from marin_rl.doctor.stages import RL
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.storage.commits import commit_manifest, fingerprint, new_attempt, new_manifest
from marin_rl.storage.runs import Run, checkpoint_slot, runs_under
from marin_rl.storage.tables.metrics import write_round_metrics


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A new run on a folder."""
    return Run.create_or_open(parse_config({"root": str(tmp_path), "run_id": "session"}))


def commit(run: Run, slot: str) -> None:
    attempt = new_attempt()
    commit_manifest(
        run.store, new_manifest(slot, attempt=attempt, fingerprint=fingerprint("test", {}))
    )


def close(run: Run, round: int) -> None:
    write_round_metrics(run, round, {"reward": 0.0})


def point(run: Run) -> int | None:
    found = resume_point(run)
    return None if found is None else found.number


def test_a_new_run_has_nowhere_to_go_on_from(run: Run) -> None:
    assert point(run) is None


def test_a_run_goes_on_from_its_latest_checkpoint(run: Run) -> None:
    commit(run, checkpoint_slot(0))
    assert point(run) == 0
    commit(run, checkpoint_slot(1))
    close(run, 0)
    commit(run, checkpoint_slot(2))
    close(run, 1)
    assert point(run) == 2


@pytest.mark.parametrize("trained", [2, 3])
def test_rounds_that_were_trained_but_not_closed_are_played_again(run: Run, trained: int) -> None:
    for round in range(trained + 1):
        commit(run, checkpoint_slot(round))
    close(run, 0)
    assert point(run) == 1


def test_an_unclosed_round_whose_checkpoint_is_gone_is_left(run: Run) -> None:
    commit(run, checkpoint_slot(5))
    assert point(run) == 5


def test_parameters_of_a_flow_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("run_id: written\nrounds: 3\nseed: 7\n")
    config = resolve_config(str(file), "given", ["seed=9", "training.learning_rate=1e-4"], 5)
    assert (config.run_id, config.rounds, config.seed) == ("given", 5, 9)
    assert config.training.learning_rate == 1e-4
    assert resolve_config(str(file)) == load_config(file)


def test_the_default_configuration_survives_the_trip_through_flow_parameters() -> None:
    config = parse_config({})
    assert resolve_config(config.model_dump(mode="json")) == config


@flow
async def _suspended() -> None:
    """Suspends itself behind its own back, as the UI would, and asks as a round does."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    context.flow_run.deployment_id = uuid4()  # only a worker starts it again
    async with get_client() as client:
        asked = Suspended(timeout_seconds=60)
        await client.set_flow_run_state(context.flow_run.id, asked, force=True)
    await pause_if_suspended()


@flow
async def _resumed() -> None:
    """Hears that it is suspended, and asks once another process goes on."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    context.flow_run.deployment_id = uuid4()
    context.flow_run_suspension_request.mark_requested(Suspended(timeout_seconds=60))
    await pause_if_suspended()


def test_a_flow_alone_trains_no_part_of_several_processes(tmp_path: Path) -> None:
    config = debug(tmp_path, "distributed={coordinator: 'a:1', processes: 2, process_id: 0}")
    with pytest.raises(ConfigError, match="this one is alone"), open_session(config, RL):
        pass
    assert not list(tmp_path.iterdir())


def test_a_flow_that_heard_of_its_suspension_ends_though_it_was_resumed(api: str) -> None:
    with pytest.raises(Pause):
        asyncio.run(_resumed())


def test_a_suspended_flow_ends_before_its_next_round_even_if_no_event_tells_it(api: str) -> None:
    with pytest.raises(Pause) as raised:
        asyncio.run(_suspended())
    assert raised.value.state is not None
    assert raised.value.state.name == "Suspended"


def test_a_mistyped_name_is_an_error_and_begins_no_run(tmp_path: Path) -> None:
    Run.create_or_open(debug(tmp_path, "run_id=spell"))
    config = str(REPOSITORY / "configs/debug.yaml")
    overrides = [f"root={tmp_path}", "policy.init=sft"]
    with pytest.raises(ObjectMissing, match=r"no run 'spel' under .* found there: spell"):
        asyncio.run(evaluate_run.fn(config, run_id="spel", overrides=overrides))
    assert runs_under(str(tmp_path)) == ["spell"]

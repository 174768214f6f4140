"""Tasks without a server: retried errors, opening of a run, states, and `publish`."""

import asyncio
import threading
from pathlib import Path

import pytest
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType
from prefect.tasks import Task
from support.run_factories import whole_run

from marin_rl import errors
from marin_rl.config import parse_config
from marin_rl.storage.runs import Run, checkpoint_slot, latest_checkpoint
from marin_rl.types import SlotRef
from tasks.generate import evaluate, generate, seal
from tasks.options import as_state, in_thread, is_transient, open_run
from tasks.train import begin, fine_tune, process, publish, serve, train

STAGES = (begin, evaluate, fine_tune, generate, process, publish, seal, serve, train)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (errors.EndpointUnavailable("down"), True),
        (errors.StoreUnavailable("503"), True),
        (errors.CommitUnknown("no answer"), True),
        (errors.ConfigError("key"), False),
        (errors.NonFiniteUpdate("NaN"), False),
        (errors.CommitConflict("other"), False),
        (errors.StalePolicy("old"), False),
        (TimeoutError("deadline"), False),
        (RuntimeError("bug"), False),
    ],
)
def test_only_faults_that_may_pass_are_retried(error: Exception, again: bool) -> None:  # noqa: FBT001
    failed: State[object] = State(type=StateType.FAILED, data=error)
    assert is_transient(train, None, failed) is again  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_is_retried_by_the_same_rule_and_never_cached(stage: Task) -> None:  # type: ignore[type-arg]
    assert stage.retry_condition_fn is is_transient
    assert stage.retry_jitter_factor == 0.5
    assert stage.persist_result is False
    assert stage.cache_policy is NO_CACHE


def test_a_reused_slot_is_said_to_be() -> None:
    new = SlotRef(slot="a", sha256="0" * 64)
    assert as_state(new) is new
    state = as_state(SlotRef(slot="a", sha256="0" * 64, reused=True))
    assert isinstance(state, State)
    assert (state.name, state.type) == ("Reused", StateType.COMPLETED)
    assert state.data == new


def test_a_run_is_opened_once_with_the_free_keys_of_its_reference(tmp_path: Path) -> None:
    tree = {"root": str(tmp_path), "run_id": "opened", "rounds": 5, "flow": {"retries": 9}}
    reference = Run.create_or_open(parse_config(tree)).reference
    run = open_run(reference)
    assert (run.config.rounds, run.config.flow.retries) == (5, 9)
    assert open_run(reference) is run
    longer = Run.create_or_open(parse_config(tree | {"rounds": 6})).reference
    assert open_run(longer).config.rounds == 6


def test_cancelling_does_not_wait_for_blocking_work() -> None:
    released = threading.Event()

    async def body() -> str:
        work = asyncio.ensure_future(in_thread(released.wait, 120))
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return "left"

    assert asyncio.run(asyncio.wait_for(body(), 60)) == "left"
    released.set()


def test_a_strangers_folder_does_not_end_a_run(tmp_path, caplog):
    run = whole_run(str(tmp_path), 4, retention={"checkpoints_last": 2})
    stranger = tmp_path / "stranger/run.json"
    stranger.parent.mkdir()
    stranger.write_text("{}")
    trained = latest_checkpoint(run)
    assert trained is not None

    def publish_again() -> list[str]:
        caplog.clear()
        asyncio.run(publish.fn(run.reference, 3, trained, {"timing_s/round": 1.0}))
        return [record.getMessage() for record in caplog.records]

    (told,) = publish_again()
    assert str(stranger) in told
    assert "mend it, move it out of the root, or upgrade" in told
    assert publish_again() == []  # once is enough
    assert not (tmp_path / "run" / checkpoint_slot(0) / "pruned.json").exists()
    stranger.unlink()
    assert publish_again() == []
    assert (tmp_path / "run" / checkpoint_slot(0) / "pruned.json").exists()

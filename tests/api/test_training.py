"""Runs from Python: following them, in scripts and in event loops, stopping, errors.

The flow is a small one of this file that publishes what the real one does; the slow test in
test_scripts.py plays the real one.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

import marin_rl
from marin_rl.api.training import Round, TrainingRun, config_of
from marin_rl.config import Config
from marin_rl.errors import ConfigError, InputError
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.runs import Run

TIMEOUT_S = 60
TREE = {"run_id": "mine", "rounds": 3, "environment": {"name": "echo"}}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.load(TREE, {"root": str(tmp_path)})


def close_rounds(run_id: str, *numbers: int) -> None:
    for number in numbers:
        metrics = {"reward": number / 10}
        publish(ProgressEvent(run_id=run_id, stage="round", round=number, metrics=metrics))


def playing(*numbers: int, then: Callable[["Future[None]"], None] = lambda stop: None):
    """A flow that closes rounds, and then does something else."""

    def flow(config: Config, stop: "Future[None]") -> None:
        Run.create_or_open(config)
        close_rounds("another", 7)
        close_rounds(config.run_id, *numbers)
        then(stop)

    return flow


def until_stopped(stop: "Future[None]") -> None:
    stop.result(TIMEOUT_S)
    raise asyncio.CancelledError


def fail(_: object) -> None:
    raise InputError("a fault of the flow")


def test_rounds_are_yielded_as_they_are_committed_and_kept(config):
    training = TrainingRun(config, playing(0, 1, 2))
    place = f"{config.root}/mine/checkpoints"
    expected = [
        Round(number=n, metrics={"reward": n / 10}, checkpoint=f"{place}/round-{n + 1:05d}")
        for n in range(3)
    ]
    assert list(training) == expected
    assert list(training) == expected  # again, from the first one of the session on
    assert training.rounds == tuple(expected)
    assert training.done
    assert training.wait() is None  # no checkpoint was committed here
    assert repr(training) == f"<TrainingRun {config.root}/mine: 3 rounds in this session, done>"


def test_an_iteration_waits_for_the_next_round(config):
    gates = [threading.Event() for _ in range(2)]

    def flow(config: Config, _: object) -> None:
        Run.create_or_open(config)
        for number, gate in enumerate(gates):
            assert gate.wait(TIMEOUT_S)
            close_rounds(config.run_id, number)

    training = TrainingRun(config, flow)
    rounds = iter(training)
    with pytest.raises(TimeoutError, match=r"is still training after 0\.01 s"):
        training.wait(0.01)
    for number, gate in enumerate(gates):
        assert len(training.rounds) == number
        gate.set()
        assert next(rounds).number == number
    assert list(rounds) == []


def test_errors_of_a_run_are_raised_where_it_is_awaited(config):
    training = TrainingRun(config, playing(0, then=fail))
    with pytest.raises(InputError, match="a fault of the flow"):
        training.wait(TIMEOUT_S)
    rounds = iter(training)
    assert next(rounds).number == 0
    with pytest.raises(InputError, match="a fault of the flow"):
        next(rounds)


def test_leaving_the_block_stops_the_run(config):
    with TrainingRun(config, playing(0, 1, then=until_stopped)) as training:
        for round in training:
            if round.number == 1:
                break
        assert not training.done
    assert training.done
    training.stop()
    assert training.wait() is None


def test_a_cancelled_flow_that_was_not_stopped_is_an_error(config):
    def cancelled(_: object) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        TrainingRun(config, playing(then=cancelled)).wait(TIMEOUT_S)


def test_an_event_loop_goes_on_meanwhile(config):
    async def follow() -> list[int]:
        numbers, ticked = [], asyncio.Event()
        async with TrainingRun(config, playing(0, 1, then=until_stopped)) as training:
            asyncio.get_running_loop().call_soon(ticked.set)
            async for round in training:
                numbers.append(round.number)
                if round.number == 1:
                    await ticked.wait()
                    break
        assert await training is None
        return numbers

    assert asyncio.run(follow()) == [0, 1]


def test_errors_reach_an_event_loop(config):
    async def follow() -> list[Round]:
        return [round async for round in TrainingRun(config, playing(0, then=fail))]

    with pytest.raises(InputError, match="a fault of the flow"):
        asyncio.run(follow())


# ---------------------------------------------------------------- configurations


def test_a_configuration_comes_from_a_file_a_mapping_or_a_run(config, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("run_id: mine\nrounds: 3\nenvironment: {name: echo}\n")
    assert Config.load(file) == Config.load(TREE) == Config.load(str(file), ["rounds=3"])
    assert config_of(file, {"rounds": 5}).rounds == 5
    assert config_of(config) is config
    assert config_of(config, {"rounds": 5}) == config.model_copy(update={"rounds": 5})
    Run.create_or_open(config)
    assert config_of(tmp_path / "mine", {"rounds": 9}).rounds == 9


def test_a_mapping_may_name_a_recipe():
    plain, dapo = Config.load(TREE), Config.load({**TREE, "recipe": "dapo"})
    assert plain.objective != dapo.objective
    assert dapo.run_id == "mine"


@pytest.mark.parametrize(
    ("source", "overrides", "named"),
    [
        ({"round": 3}, (), "did you mean rounds?"),
        (TREE, {"training.learning_rat": 1.0}, "did you mean training.learning_rate?"),
        (TREE, {"environment.options.reward": len}, "code by name"),
        (TREE, "rounds=3", "expected a list or a mapping"),
        ("nowhere.yaml", (), "no configuration file at nowhere.yaml"),
    ],
)
def test_wrong_configurations_are_refused_before_anything_starts(source, overrides, named):
    with pytest.raises(ConfigError) as caught:
        marin_rl.run(source, overrides)
    assert named in str(caught.value)


def test_a_run_with_other_settings_is_refused_before_anything_starts(config):
    Run.create_or_open(config)
    with pytest.raises(ConfigError, match="exists with another content"):
        marin_rl.run(config, {"training.learning_rate": 0.5})

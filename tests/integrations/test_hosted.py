"""The host of other libraries and our end of it, against an adapter whose calls misbehave."""

import asyncio
import os
import random
import sys
import sysconfig
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.episode import StepResult, user_message
from marin_rl.environments.registry import construct
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.integrations.hosted import (
    HostedEnvironment,
    HostedEpisode,
    HostedOptions,
    Interpreter,
    InterpreterEnded,
    Library,
    installed_version,
)
from marin_rl.integrations.verifiers import scored_together
from marin_rl.isolated.processes import WorkerFault
from marin_rl.types import Example, Message, RewardComponent, Split, Turn

ADAPTER = str(Path(__file__).with_name("counting_host.py"))
PATIENCE_S = 120


def started(**options: Any) -> Interpreter:
    """An interpreter that has the adapter of these tests."""
    return Interpreter(None, ADAPTER, options, ())


def step(interpreter: Interpreter, episode: int, do: str) -> Any:
    """The answer to a step."""
    return interpreter.ask("step", episode=episode, turn={"do": do})


@pytest.fixture(scope="module")
def shared() -> Iterator[Interpreter]:
    interpreter = started()
    yield interpreter
    interpreter.close()


@pytest.fixture
def interpreter() -> Iterator[Interpreter]:
    interpreter = started()
    yield interpreter
    interpreter.close()


def begun(interpreter: Interpreter, *seeds: int) -> list[int]:
    """Numbers of new episodes with these seeds."""
    numbers = [seed + 1000 * place for place, seed in enumerate(seeds, start=1)]
    for number, seed in zip(numbers, seeds, strict=True):
        assert interpreter.ask("start", episode=number, row={"n": number}, seed=seed) == {
            "n": number
        }
    return numbers


def test_a_host_has_nothing_of_this_package_and_says_what_its_library_has(shared: Interpreter):
    assert shared.ready == {"sizes": {"train": 3}, "packages": []}
    assert shared.ask("row", split="eval", index=2) == {"split": "eval", "index": 2}


def test_episodes_draw_from_random_numbers_of_their_own(shared: Interpreter):
    first, second, third = begun(shared, 5, 5, 6)
    drawn = random.Random(5)
    expected = [drawn.random() for _ in range(3)]
    assert step(shared, first, "draw") == expected[0]
    assert step(shared, third, "draw") == random.Random(6).random()
    assert step(shared, second, "draw") == expected[0]
    assert step(shared, first, "draw") == expected[1]
    assert step(shared, first, "draw") == expected[2]


def test_random_numbers_are_an_episodes_own_while_others_go_on(shared: Interpreter):
    numbers = begun(shared, *range(20, 28))
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda number: step(shared, number, "draw later"), numbers))
    for seed, answer in zip(range(20, 28), answers, strict=True):
        drawn = random.Random(seed)
        assert answer == [drawn.random(), drawn.random()]


def test_data_sets_of_a_library_draw_no_progress_bars(shared: Interpreter):
    (number,) = begun(shared, 34)
    assert step(shared, number, "bars") is False


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("fail", r"ValueError: no such move \(from KeyError: 'left'\)"),
        ("exit", "SystemExit: given up"),
        ("infinite", "its answer is not JSON: Out of range float"),
        ("object", "its answer is not JSON: Object of type object"),
    ],
)
def test_a_fault_costs_its_call_alone(shared: Interpreter, do: str, expected: str):
    (number,) = begun(shared, 40)
    with pytest.raises(RewardFault, match=expected):
        step(shared, number, do)
    assert isinstance(step(shared, number, "draw"), float)
    shared.ask("close", episode=number)
    with pytest.raises(RewardFault, match="KeyError"):
        step(shared, number, "draw")


def test_the_end_of_the_process_fails_every_call(interpreter: Interpreter):
    first, second = begun(interpreter, 1, 2)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(step, interpreter, first, "wait")
        with pytest.raises(InterpreterEnded, match="exit status 7"):
            step(interpreter, second, "end")
        with pytest.raises(InterpreterEnded, match="exit status 7"):
            waiting.result(PATIENCE_S)
    with pytest.raises(InterpreterEnded):
        step(interpreter, first, "draw")


def test_a_blocked_process_ends_when_its_parent_lets_go(interpreter: Interpreter):
    (number,) = begun(interpreter, 1)
    blocked = interpreter._call("step", {"episode": number, "turn": {"do": "block"}})
    interpreter.close()
    with pytest.raises(WorkerFault, match="its process ended"):
        blocked.result(PATIENCE_S)


class Counting(HostedEnvironment):
    """Counts to three, by the adapter of these tests."""

    name = "counting"
    library = Library("pytest", ">=1", ADAPTER)
    options_kind = HostedOptions

    def example(self, seed: int, index: int, split: Split) -> Example:
        return self.make_example("count", seed=seed, index=index, split=split)


class CountingEpisode(HostedEpisode):
    """A turn names what the adapter does; the episode ends at three."""

    async def start(self) -> Any:
        return await self.begin({"n": 1})

    async def step(self, turn: Turn) -> StepResult:
        answer = await self.take({"do": turn.content})
        return StepResult(messages=user_message(f"{answer}"), done=answer == 3)


@pytest.fixture
def counting() -> Iterator[Counting]:
    made = Counting(EnvironmentConfig(name="counting", options={"id": "x"}))
    yield made
    made.interpreter.close()


def dialogue(*texts: str) -> list[Message]:
    """Turns of the model and what it read, in turn."""
    roles = ("assistant", "user")
    return [Message(role=roles[n % 2], content=text) for n, text in enumerate(texts)]


def test_members_of_a_group_are_played_again_to_be_compared(counting: Counting):
    example = counting.example(3, 0, "train")
    dialogues = [
        dialogue("count", "1", "count", "2", "count"),
        dialogue("count", "1", "count"),  # cut before its end
        dialogue("count", "1", "count", "7", "count"),
        dialogue("fail"),
        dialogue("count", "1", "count", "2", "count"),
    ]
    early = counting.score(example, "")
    members = [(CountingEpisode(counting, example), d) for d in dialogues]
    scores = asyncio.run(scored_together(counting.interpreter, members, example.seed, early))
    best = (
        RewardComponent(name="rubric", value=1.0),
        RewardComponent(name="counted", value=3.0, weight=0.0),
    )
    assert scores[:2] == [best, early]
    assert scores[4] == best
    assert isinstance(scores[2], RewardFault)
    assert "it answers turn 2 otherwise" in str(scores[2])
    assert isinstance(scores[3], RewardFault)
    assert "no such move" in str(scores[3])


def test_an_interpreter_that_ended_is_replaced(counting: Counting):
    first = counting.interpreter
    assert counting.interpreter is first
    (number,) = begun(first, 1)
    with pytest.raises(InterpreterEnded):
        step(first, number, "end")
    second = counting.interpreter
    assert second is not first
    assert begun(second, 1)


def test_a_library_that_refuses_is_quoted():
    with pytest.raises(InputError, match=r"environment\.options: ValueError: no such game"):
        started(refuse=True)
    with pytest.raises(InputError, match=r"environment\.options: SystemExit: 3"):
        started(quit=True)


def test_a_missing_package_names_the_command_that_installs_it():
    with pytest.raises(InputError) as raised:
        installed_version(None, "no-such-package", ">=1,<2")
    assert str(raised.value) == (
        f"environment.options.python: {sys.executable} has no package no-such-package; install it "
        f"with: {sys.executable} -m pip install 'no-such-package>=1,<2'"
    )
    with pytest.raises(InputError, match="has no package no-such-package"):
        installed_version(sys.executable, "no-such-package", ">=1")


def test_another_version_is_refused_with_both():
    with pytest.raises(InputError, match=r"has pytest \d\S*, expected >=99; install it with"):
        installed_version(None, "pytest", ">=99")
    assert installed_version(sys.executable, "pytest", ">=1") == pytest.__version__


def test_an_interpreter_with_another_version_is_refused_before_it_is_started(tmp_path: Path):
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    old = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")}))
    (old / "gymnasium-0.29.1.dist-info").mkdir()
    (old / "gymnasium-0.29.1.dist-info/METADATA").write_text("Name: gymnasium\nVersion: 0.29.1\n")
    options = {"id": "FrozenLake-v1", "python": str(python)}
    with pytest.raises(InputError) as raised:
        construct(EnvironmentConfig(name="gymnasium", options=options))
    assert str(raised.value) == (
        f"environment.options.python: {python} has gymnasium 0.29.1, expected >=1.0,<2; install it "
        f"with: {python} -m pip install 'gymnasium>=1.0,<2'"
    )


@pytest.mark.parametrize("python", ["/no/such/python", os.devnull])
def test_a_path_without_an_interpreter_is_named(python: str):
    with pytest.raises(InputError, match="expected the path of a Python interpreter"):
        installed_version(python, "pytest", ">=1")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("gymnasium", {}, "options.id: Field required"),
        ("textarena", {"id": "A", "players": 2}, "expected an opponent in games of two players"),
        ("textarena", {"id": "A", "player": 1}, "player: expected 0 in a game of one, found 1"),
        ("verifiers", {"id": "a", "eval_fraction": 1}, "options.eval_fraction"),
        ("verifiers", {"id": "a", "arguments": {}}, "options.arguments: Extra inputs"),
    ],
)
def test_wrong_options_are_named_before_a_library_is_looked_for(name, options, expected):
    with pytest.raises(ConfigError, match=expected):
        construct(EnvironmentConfig(name=name, options=options))

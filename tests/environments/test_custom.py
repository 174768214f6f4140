"""Environments of the user's own, in a file: the page of the docs, options, and what is refused."""

import asyncio
import re
from pathlib import Path

import pytest

from marin_rl.config import Config, load_config
from marin_rl.environments.base import Environment
from marin_rl.environments.checks import environment_of
from marin_rl.environments.episode import StepResult
from marin_rl.environments.registry import foreign_code
from marin_rl.environments.scoring import Scorer
from marin_rl.errors import ConfigError, InputError
from marin_rl.types import RewardComponent, Turn

PAGE = (Path(__file__).parents[2] / "docs/your-environment.md").read_text(encoding="utf-8")
NAMES = r"envs\.py|counting\.yaml|guess\.py|further down in guess\.py"
BLOCKS = dict(re.findall(rf"```\w+\n# ({NAMES})\n(.*?)```", PAGE, re.DOTALL))
OTHERS = """
from pydantic import BaseModel
from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import answer_in

class Options(BaseModel):
    largest: int = 3

class ByModel(Counting):
    def __init__(self, options: Options):
        super().__init__(options.largest)

class ByConfig(Counting):
    def __init__(self, config: EnvironmentConfig):
        super().__init__(config.options["largest"])

class Sized(Counting):
    name = "sized"
    def load_examples(self):
        self.size = self.largest

class NoScore(BaseEnvironment):
    def example(self, seed, index, split): ...

class Plain:
    def example(self, seed, index, split): ...
    def score(self, example, completion): ...

class Whole:
    name, version, size, workers = "whole", "3", 7, 0
    def load_examples(self): ...
    def load_scorer(self): ...
    def example(self, seed, index, split):
        return Counting(self.size).example(seed, index, split)
    def demonstration(self, example): return "by hand"
    def score(self, example, completion): ...

class Slotted:
    __slots__ = ("name", "version", "size", "workers")
    load_examples, load_scorer = Whole.load_examples, Whole.load_scorer
    example, demonstration, score = Whole.example, Whole.demonstration, Whole.score
    def __init__(self):
        self.name, self.version, self.size, self.workers = "slotted", "1", 7, 0

class Dialogue(Counting):
    def env_response(self, messages, state): ...

class WrongSize(Counting):
    size = "many"

class Fails(Counting):
    def __init__(self):
        raise OSError("no such corpus")

def function(): ...
"""


def settings(folder: Path, *overrides: str) -> Config:
    (folder / "envs.py").write_text(BLOCKS["envs.py"] + OTHERS)
    (folder / "counting.yaml").write_text(BLOCKS["counting.yaml"])
    return load_config(folder / "counting.yaml", overrides)


def test_the_environment_of_the_docs_makes_and_scores_examples(tmp_path: Path) -> None:
    config = settings(tmp_path)
    environment = environment_of(config)
    assert isinstance(environment, Environment)
    assert (environment.name, environment.version, environment.size) == ("Counting", "1", None)
    example = environment.example(5, 2, "train")
    assert example == environment.example(5, 2, "train")
    number = int(example.messages[0].content.removesuffix("+1="))
    assert example.answer == str(number + 1)
    assert environment.demonstration(example) == example.answer
    scorer = Scorer(environment, config.environment)  # in a process that loads the file itself
    try:
        scores = asyncio.run(scorer.score(example, [f" {number + 1}\n", "x"]))
    finally:
        scorer.close()
    assert scores == [(RewardComponent(name="correct", value=value),) for value in (1.0, 0.0)]


def test_its_file_is_code_of_others(tmp_path: Path) -> None:
    config = settings(tmp_path)
    named = foreign_code(config.model_dump(mode="json"))
    assert named == {"environment.name": config.environment.name}
    assert "#" in config.environment.name


@pytest.mark.parametrize("name", ["ByModel", "ByConfig", "Sized"])
def test_options_reach_a_class_in_its_own_form(tmp_path: Path, name: str) -> None:
    config = settings(tmp_path, f"environment.name=envs.py:{name}", "environment.options.largest=4")
    environment = environment_of(config)
    numbers = {environment.example(i, 0, "train").answer for i in range(50)}
    assert numbers == {"1", "2", "3", "4", "5"}
    assert (environment.name, environment.size) == (
        ("sized", 4) if name == "Sized" else (name, None)
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("options.larges=3", r"'envs\.py:Counting' takes the options largest:\n.*options\.larges"),
        ("options.largest=many", r"environment\.options\.largest: Input should be a valid integer"),
        ("name=envs.py:ByModel", None),
        (
            "name=envs.py:NoScore",
            "is no environment, it lacks score; a subclass of .*needs example",
        ),
        ("name=envs.py:Plain", "it lacks name, version, size, workers, load_examples, dem"),
        ("name=envs.py:Slotted", "a subclass of BaseEnvironment, or a class without __slots__"),
        ("name=envs.py:Dialogue", "'envs.py:Dialogue' has env_response, never called here"),
        ("name=envs.py:WrongSize", "envs.py:WrongSize has size 'many' .expected a number or None"),
        ("name=envs.py:function", "expected a class, found envs.py:function"),
        ("name=envs.py:Count", r"defines no 'Count'; it defines Counting, "),
    ],
)
def test_a_class_that_is_no_environment_is_refused(tmp_path, override, message):
    if message is None:
        assert environment_of(settings(tmp_path, f"environment.{override}")) is not None
        return
    options = () if override.startswith("options") else ("environment.options={}",)
    with pytest.raises(ConfigError, match=message.replace("envs.py", r"envs\.py")):
        environment_of(settings(tmp_path, *options, f"environment.{override}"))


def test_a_class_of_its_own_has_the_defaults_of_the_others(tmp_path: Path) -> None:
    whole = ("environment.name=envs.py:Whole", "environment.options={}")
    environment = environment_of(settings(tmp_path, *whole))
    assert isinstance(environment, Environment)
    assert (environment.name, environment.version, environment.size) == ("whole", "3", 7)
    assert environment.demonstration(environment.example(0, 0, "train")) == "by hand"
    assert (environment.eval_size, environment.extract(" x "), environment.has_episodes) == (
        None,
        "x",
        False,
    )


def test_a_class_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"environment 'envs\.py:Fails': OSError: no such corpus"):
        environment_of(
            settings(tmp_path, "environment.name=envs.py:Fails", "environment.options={}")
        )


def test_the_episodes_of_the_docs_answer_guesses(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(BLOCKS["guess.py"])
    config = settings(tmp_path, "environment={name: guess.py:Guess}")
    environment = environment_of(config)
    example = environment.example(5, 2, "train")
    number = int(example.answer or 0)
    assert 1 <= number <= 8

    async def played(guesses: list[int | str]) -> list[StepResult]:
        episode = environment.episode(example)
        assert episode.start() == (example.messages, ())
        results = [
            await episode.step(Turn(role="assistant", content=str(guess))) for guess in guesses
        ]
        await episode.close()
        return results

    answers = asyncio.run(played([0, 9, number]))
    assert [[m.content for m in answer.messages] for answer in answers] == [[">"], ["<"], []]
    assert [answer.done for answer in answers] == [False, False, True]
    assert answers[-1].reward == pytest.approx(0.8)
    lost = asyncio.run(played([0] * 6))[-1]
    assert (lost.done, lost.reward) == (True, 0.0)

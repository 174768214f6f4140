"""Environments tried and checked outside of a run."""

import json

import pytest
from typer.testing import CliRunner

from marin_rl.cli import app

FORGETFUL = """
from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.environments.episode import StepResult
from marin_rl.types import Message, RewardComponent

COUNT = [0]


class Count(BaseEnvironment):
    workers = 0

    def example(self, seed, index, split):
        return self.make_example("count", seed=seed, index=index, split=split)

    def score(self, example, completion):
        return (RewardComponent(name="none", value=0.0),)

    def episode(self, example):
        return Counting()


class Counting:
    def start(self):
        return (Message(role="user", content="count"),), ()

    async def step(self, turn):
        if turn.content == "no such action":
            raise KeyError("no such action")
        COUNT[0] += 1
        return StepResult(reward=float(COUNT[0]), done=True)

    async def close(self):
        pass
"""


def told(*arguments: str, code: int = 0, typed: str | None = None) -> list[str]:
    """Lines of a command's output."""
    shown = CliRunner().invoke(app, ["env", *arguments], input=typed)
    assert shown.exit_code == code, (shown.output, shown.exception)
    return shown.stdout.splitlines()


def test_environments_are_listed_with_their_needs():
    rows = {row["name"]: row for row in map(json.loads, told("list", "--json"))}
    assert rows["game"]["plays"].startswith("Games of several turns")
    assert rows["openenv"]["needs"] == "a server"
    assert rows["gymnasium"]["needs"].startswith("gymnasium: ")


@pytest.mark.parametrize("name", ["echo", "game"])
def test_laws_hold_for_environments_that_ship(name: str):
    findings = [json.loads(line) for line in told("check", name, "--json")]
    laws = ["examples", "plays", "json", "rewards", "start", "replay", "time"]
    assert [finding["law"] for finding in findings] == laws
    measured = [finding["law"] for finding in findings if finding["passed"] is None]
    assert measured == ["rewards", "time"]
    assert all(finding["passed"] is not False for finding in findings)


def test_an_environment_that_remembers_other_episodes_fails_the_replay(tmp_path, monkeypatch):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    monkeypatch.chdir(tmp_path)
    findings = [json.loads(s) for s in told("check", "forgetful.py:Count", "--json", code=1)]
    assert [finding["law"] for finding in findings if finding["passed"] is False] == ["replay"]


def test_a_person_plays_at_the_terminal():
    lines = told("try", "game", "--episodes", "1", typed="4\n" * 8)
    (end,) = [line for line in lines if "Episode train-0-0: reward" in line]
    assert "  assistant: 4" in lines[lines.index(end) :]

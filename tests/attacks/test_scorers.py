"""Reward functions that leave processes behind, look for secrets, flood and fill memory."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import lives, wait_until_gone

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import reward_of
from marin_rl.environments.checks import make_environment
from marin_rl.environments.scoring import Score, Scorer
from marin_rl.errors import RewardFault
from marin_rl.isolated.processes import PRINTED_BYTES_MAX
from marin_rl.types import Example

REWARDS = r"""
import os, subprocess, sys, time
from pathlib import Path

DAEMON = "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!"

def start_family(file):
    child = subprocess.Popen(["sleep", "600"]).pid
    of_a_session = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    daemon = subprocess.run(["sh", "-c", DAEMON], stdout=subprocess.PIPE, check=True).stdout
    forked = os.fork()
    if not forked:
        time.sleep(600)
    Path(file).write_text(f"{child} {of_a_session} {int(daemon)} {forked}")

def reward(example, completion):
    what, _, argument = completion.partition(":")
    match what:
        case "family": start_family(argument)
        case "family and hang":
            start_family(argument)
            while True:
                time.sleep(600)
        case "secret": return float(argument in os.environ or argument in subprocess.run(
            ["env"], capture_output=True, text=True).stdout)
        case "memory": return len([0] * int(argument))
        case "flood":
            for _ in range(200):
                print("\x1b[2J" + "x" * 65536, flush=True)
                sys.stderr.write("e" * 65536)
        case "input": return len(sys.stdin.read())
    return len(completion)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "hostile_rewards.py").write_text(REWARDS)
    (folder / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "{i}?", "answer": "{i}"}}\n' for i in range(20))
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def configured(folder: Path, **settings: object) -> EnvironmentConfig:
    options = {
        "path": str(folder / "prompts.jsonl"),
        "reward": "hostile_rewards:reward",
        "eval_fraction": 0.3,
    }
    return EnvironmentConfig.model_validate(
        {"name": "chat", "options": options, "reward_timeout_s": 60, **settings}
    )


@pytest.fixture(scope="module")
def example(folder: Path) -> Example:
    return make_environment(configured(folder)).example(0, 0, "train")


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Iterator[Scorer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARIN_RL_ADMIN_KEY", "a secret")
        patch.setenv("MARIN_RL_JUDGE_KEY", "a key that a judge needs")
        settings = {"pass_environment": ["MARIN_RL_JUDGE_KEY"], "reward_memory_bytes_max": 2**30}
        config = configured(folder, **settings)
        scorer = Scorer(make_environment(config), config)
        yield scorer
        scorer.close()


def rewards(scorer: Scorer, example: Example, *completions: str) -> list[float | str]:
    scores: list[Score] = asyncio.run(scorer.score(example, completions))
    return [str(s) if isinstance(s, RewardFault) else reward_of(s) for s in scores]


def family(file: Path) -> list[int]:
    """Process ids that a reward function noted: a child, and three that nothing reaps."""
    ids = [int(word) for word in file.read_text().split()]
    assert len(ids) == 4
    return ids


@pytest.mark.slow
def test_children_of_a_reward_end_at_the_time_limit(folder, example, tmp_path):
    config = configured(folder, reward_timeout_s=4)
    scorer = Scorer(make_environment(config), config)
    found = rewards(scorer, example, "a", f"family and hang:{tmp_path / 'ids'}", "abc")
    assert found[0::2] == [1.0, 3.0]
    assert "took longer than 4 s; environment.reward_timeout_s" in str(found[1])
    wait_until_gone(family(tmp_path / "ids"))
    scorer.close()


@pytest.mark.slow
def test_children_of_a_reward_end_with_the_scorer(folder, example, tmp_path):
    config = configured(folder)
    scorer = Scorer(make_environment(config), config)
    rewards(scorer, example, f"family:{tmp_path / 'ids'}")
    ids = family(tmp_path / "ids")
    assert all(map(lives, ids))
    scorer.close()
    wait_until_gone(ids)


def test_a_reward_sees_no_secret_but_those_named(scorer: Scorer, example: Example) -> None:
    names = ("MARIN_RL_ADMIN_KEY", "MARIN_RL_JUDGE_KEY", "PATH")
    found = rewards(scorer, example, *(f"secret:{name}" for name in names))
    assert found == [0.0, 1.0, 1.0]


def test_memory_beyond_the_limit_costs_one_rollout(scorer: Scorer, example: Example) -> None:
    found = rewards(scorer, example, "memory:1000", f"memory:{50 * 10**9 // 8}", "abc")
    assert found[0::2] == [1000.0, 3.0]
    assert "MemoryError" in str(found[1])


def test_output_of_a_reward_is_bounded_and_has_no_control_characters(scorer, example, capsys):
    assert rewards(scorer, example, "flood", "abc") == [5.0, 3.0]
    printed = capsys.readouterr().err
    assert "prints more than" in printed
    assert len(printed) < 2 * PRINTED_BYTES_MAX
    assert "\x1b" not in printed


def test_a_reward_that_reads_its_input_takes_no_questions(scorer: Scorer, example: Example) -> None:
    assert rewards(scorer, example, "input", "abc") == [0.0, 3.0]


def test_a_supervisor_that_is_killed_takes_its_worker_along(folder, example, tmp_path):
    config = configured(folder)
    scorer = Scorer(make_environment(config), config)
    rewards(scorer, example, "abc")
    assert scorer._pool is not None
    (supervisor,) = scorer._pool.process_ids
    path = Path(f"/proc/{supervisor}/task/{supervisor}/children")
    children = [int(word) for word in path.read_text().split()]
    assert children
    subprocess.run(["kill", "-9", str(supervisor)], check=True)
    wait_until_gone(children)
    scorer.close()

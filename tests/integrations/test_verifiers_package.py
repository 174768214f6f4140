"""Classic environments of verifiers by its package, in an interpreter of its own."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from integrations.libraries import interpreter_with, site_packages
from integrations.library_runs import check_trained, configuration, played, texts
from support.scripted_policies import call, record

from marin_rl.integrations.exchange import export_rollouts
from marin_rl.integrations.hosted import FOLDER
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.types import Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COUNTING = '''
import random

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def right(completion, answer) -> float:
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(said[-1].strip() == answer)


async def total_calls(state) -> float:
    return float(len(state["trajectory"]))


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["quoted"] = ""
        return state

    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="yes")]
            return state["final_env_response"]
        state["quoted"] = f"no, {random.random()}"
        return [vf.UserMessage(content=state["quoted"])]


class Forgetful(Guess):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:]


async def quickest(states, completions) -> list[float]:
    for state, completion in zip(states, completions):
        assert state["quoted"] in str(completion)
    turns = [len(state["trajectory"]) for state in states]
    return [float(n == min(turns)) for n in turns]


def load_environment(kind="tools", n=20):
    rows = Dataset.from_list([{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(n)])
    rubric = vf.Rubric(funcs=[right, total_calls], weights=[1.0, 0.125])
    match kind:
        case "single":
            return vf.SingleTurnEnv(dataset=rows, rubric=rubric, system_prompt="Add.")
        case "guess":
            return Guess(dataset=rows, rubric=rubric, max_turns=3)
        case "group":
            rubric = vf.Rubric(funcs=[right, quickest], weights=[1.0, 0.5])
            return Guess(dataset=rows, rubric=rubric, max_turns=3)
        case "forgetful":
            return Forgetful(dataset=rows, rubric=rubric, max_turns=3)
        case _:
            return vf.ToolEnv(dataset=rows, rubric=rubric, tools=[add], max_turns=5)
'''


@pytest.fixture(scope="module")
def python(interpreters: Path) -> Path:
    """An interpreter that has the package, and an environment of these tests."""
    python = interpreter_with(interpreters / "verifiers", "verifiers==0.3.1")
    (site_packages(python) / "counting_tools.py").write_text(COUNTING)
    return python


def test_verifiers_runs_its_own_loop_tools_and_rubric(tmp_path: Path, python: Path):
    config = configuration(tmp_path, python, "verifiers", id="counting_tools")

    def script(messages: Sequence[Message], member: int) -> str:
        if len(messages) > 1:
            return messages[-1].content
        a, b = messages[0].content.removesuffix("?").split("+")
        return call("add", a=int(a), b=int(b) if member == 0 else "x") if member < 2 else "no idea"

    for group in played(config, script):
        right, wrong, guessed = group.rollouts
        answer = group.example.answer
        assert texts(group, 0)[2:] == [("tool", answer), ("assistant", answer)]
        assert right.turns[2].tool_name == "add"
        assert (right.reward, right.finish_reason) == (1.25, "stop")
        masked = [right.loss_mask[turn.start : turn.end].mean() for turn in right.turns]
        assert masked == [0, 1, 0, 1]
        assert wrong.turns[2].content.startswith("unsupported operand")
        assert wrong.reward == 0.25
        assert guessed.reward == 0.125


def test_verifiers_compares_the_members_of_a_group(tmp_path: Path, python: Path):
    options = {"id": "counting_tools", "args": {"kind": "group"}, "group_rewards": True}
    config = configuration(tmp_path, python, "verifiers", **options)

    def script(messages: Sequence[Message], member: int) -> str:
        said = [message.content for message in messages if message.role == "assistant"]
        answer = str(int(messages[0].content.removesuffix("+1?")) + 1)
        begun = {"0": 0, "00": 1, "000": 2}[said[0]] if said else member
        wrong = "0" * (begun + 1)
        return answer if (begun, len(said)) in ((0, 1), (1, 2)) else wrong

    for group in played(config, script):
        quick, slow, wrong = group.rollouts
        assert [rollout.reward for rollout in group.rollouts] == [1.5, 1.0, 0.0]
        parts = {part.name: (part.value, part.weight) for part in quick.reward_components}
        assert parts == {"rubric": (1.5, 1.0), "right": (1.0, 0.0), "quickest": (1.0, 0.0)} | {
            "num_turns": (2.0, 0.0)
        }
        assert len([turn for turn in slow.turns if turn.role == "assistant"]) == 3
        assert wrong.finish_reason == "stop"  # verifiers ends it, after three turns


# Importing verifiers takes seconds of CPU, so what needs no run is checked in one process.
CHECKS = """
import asyncio, json, sys
sys.path.append(FOLDER)  # after the packages, whose names modules here have
import verifiers_host

def library(**options):
    given = {"id": "counting_tools", "args": {}, "eval_fraction": 0.2, "group_rewards": False}
    return verifiers_host.begin({**given, **options})

def refusal(**options):
    try:
        library(**options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

async def play(kind, *texts):
    made = library(args={"kind": kind, "n": 5})
    episode = made.episode(made.row("train", 0), 0)
    answers = []
    try:
        answers.append(await episode.start())
        for text in texts:
            answers.append(await episode.step({"content": text, "tool_calls": []}))
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
    await episode.close()
    return answers

five = library(args={"kind": "guess", "n": 5})
found = {
    "sizes": five.ready["sizes"],
    "answers": [five.row("train", n)["answer"] for n in range(4)] + [five.row("eval", 0)["answer"]],
    "group": refusal(args={"kind": "group"}),
    "not a group": refusal(args={"kind": "guess"}, group_rewards=True),
    "missing": refusal(id="no_such_environment"),
    "argument": refusal(args={"sort": "tools"}),
    "single": asyncio.run(play("single", "2")),
    "guess": asyncio.run(play("guess", "?", "2")),
    "too many": asyncio.run(play("guess", "?", "?", "?")),
    "forgetful": asyncio.run(play("forgetful", "?")),
}
print(json.dumps(found))
"""


def test_verifiers_ends_refuses_and_splits_as_it_says(python: Path):
    script = CHECKS.replace("FOLDER", repr(str(FOLDER)))
    done = subprocess.run(
        [python, "-I", "-c", script], capture_output=True, text=True, check=True, timeout=900
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["sizes"] == {"train": 4, "eval": 1}
    assert seen["answers"] == ["2", "3", "4", "5", "1"]
    assert "set environment.options.group_rewards to true" in seen["group"]
    assert "has no function that score a whole group" in seen["not a group"]
    assert "no_such_environment" in seen["missing"]
    assert "sort" in seen["argument"]
    start, end = seen["single"]
    assert [message["role"] for message in start["messages"]] == ["system", "user"]
    assert (end["done"], end["reward"]) == (True, 1.125)
    _, answer, end = seen["guess"]
    assert [message["role"] for message in answer["messages"]] == ["user"]
    assert answer["messages"][0]["content"].startswith("no, ")
    assert (end["reward"], end["info"]["stop_condition"]) == (1.25, "has_final_env_response")
    assert end["info"]["metrics"] == {"right": 1.0, "total_calls": 2.0, "num_turns": 2.0}
    assert seen["too many"][-1]["info"]["stop_condition"] == "max_turns_reached"
    assert "it rewrites earlier messages of its prompt" in seen["forgetful"][-1]


@pytest.mark.parametrize(
    "options", [{"args": {"kind": "guess"}}, {"args": {"kind": "group"}, "group_rewards": True}]
)
def test_a_round_is_trained_in_it(tmp_path: Path, python: Path, options: dict[str, Any]):
    config = configuration(tmp_path, python, "verifiers", id="counting_tools", **options)
    check_trained("verifiers", config)


READ_TRACES = """
import json, sys
from pathlib import Path
from verifiers.v1.cli.output import read_episodes
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.state import State
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import Trace

episodes = read_episodes(Path(sys.argv[1]), Trace[WireTaskData, State, WireAgentConfig])
found = [(trace.id, trace.reward, branch.token_ids, branch.sampled_mask, branch.logprobs)
         for episode in episodes for trace in episode.traces for branch in trace.branches]
print(json.dumps(found))
"""


def test_verifiers_reads_rollouts_as_its_own_traces(tmp_path: Path, python: Path):
    config = configuration(tmp_path, python, "verifiers", id="counting_tools")
    recorded, _ = record(config, lambda messages, member: call("add", a=member, b=1))
    export_rollouts(recorded, "traces", tmp_path / "traces.jsonl")
    done = subprocess.run(
        [python, "-c", READ_TRACES, tmp_path], capture_output=True, text=True, check=True
    )
    rows = pa.concat_tables(iter_shards(recorded, 0)).to_pylist()
    ours = [
        [row["rollout_id"], row["reward"], row["token_ids"], [m == 1 for m in row["loss_mask"]]]
        for row in rows
    ]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [item[:4] for item in found] == ours
    for item, row in zip(found, rows, strict=True):
        assert np.allclose(item[4], row["logprobs"])

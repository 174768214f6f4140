"""Environments of other libraries by their packages, each in an interpreter of its own."""

import asyncio
import json
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import yaml
from support.chat_stand_in import chat_stand_in
from support.libraries import interpreter_with, site_packages
from support.library_facts import note, seen_in
from support.scripted_policies import Script, call, record, write_tokenizer
from support.templates import QWEN

from marin_rl import run, scan_rollouts
from marin_rl.config import Config, load_config
from marin_rl.environments.checks import make_environment
from marin_rl.environments.episode_pool import open_episodes
from marin_rl.environments.external.interpreter import HOSTS
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.rollouts.exchange import export_rollouts
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.types import Message, RolloutGroup, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PACKAGES = {
    "gymnasium": ("gymnasium==1.2.3",),
    "openenv": ("openenv==0.10.0",),
    "textarena": ("textarena==0.7.4",),
    "verifiers": ("verifiers==0.3.1",),
}

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
def interpreters(request: pytest.FixtureRequest) -> Path:
    """Folder of the virtual environments, which is kept between sessions."""
    return Path(request.config.cache.mkdir("libraries"))


def python_of(interpreters: Path, package: str) -> Path:
    """The interpreter of a package; that of verifiers has an environment of these tests."""
    python = interpreter_with(interpreters / package, *PACKAGES[package])
    if package == "verifiers":
        (site_packages(python) / "counting_tools.py").write_text(COUNTING)
    return python


def configuration(tmp_path: Path, python: Path | None, name: str, **options: Any) -> Config:
    """A run of a tiny policy in an environment of a library; None: it is on a server."""
    tmp_path.mkdir(exist_ok=True)
    write_tokenizer(tmp_path / "tokenizer", QWEN, "<|im_end|>")
    values = {
        "run_id": name.partition(".")[0],
        "rounds": 1,
        "root": str(tmp_path / "runs"),
        "policy": {
            "init": "random",
            "tokenizer": str(tmp_path / "tokenizer"),
            "context_length": 2048,
            "model": {
                "hidden_size": 16,
                "layers": 1,
                "heads": 2,
                "kv_heads": 1,
                "intermediate_size": 32,
            },
        },
        "environment": {
            "name": name,
            "turns_max": 4,
            "step_timeout_s": 300,
            "options": options if python is None else {"python": str(python), **options},
        },
        "batching": {"length_buckets": [2048]},
        "rollouts": {"groups_per_round": 2, "group_size": 3, "shards_per_round": 1},
        "sampling": {"max_tokens": 32},
        "training": {"microbatch_sequences": 2},
        "evaluation": {"examples": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path)


def played(config: Config, script: Script) -> list[RolloutGroup]:
    """A round that a script plays; it is committed, and equal when it is played again."""
    recorded, groups = record(config, script)
    replays = replay_rollouts(recorded, 0)
    assert replays.equal, replays
    assert len(replays.episodes) == 6
    name, options = config.environment.name, config.environment.options
    if name in PACKAGES:
        note(name, "replayable", *seen_in(groups))
        note(name, *(["group rewards"] if options.get("group_rewards") else []))
    return groups


def following(*ways: str) -> Script:
    """A script with a way for each member; their first words differ."""
    words = [way.split() for way in ways]

    def say(messages: Sequence[Message], member: int) -> str:
        said = [message.content for message in messages if message.role == "assistant"]
        (way,) = [way for way in words if way[: len(said)] == said] if said else [words[member]]
        return way[len(said)]

    return say


def texts(group: RolloutGroup, member: int) -> list[tuple[str, str]]:
    """Roles and texts of a rollout's turns."""
    return [(turn.role, turn.content) for turn in group.rollouts[member].turns]


def test_gymnasium_steps_by_names_of_actions(tmp_path: Path, interpreters: Path):
    config = configuration(
        tmp_path,
        python_of(interpreters, "gymnasium"),
        "gymnasium",
        id="FrozenLake-v1",
        kwargs={"is_slippery": False, "map_name": "4x4"},
        actions=["left", "down", "right", "up"],
        instructions="Reach 15.",
    )
    script = following("down down right down", "right down", "jump up up up")
    for group in played(config, script):
        first, second, third = group.rollouts
        assert texts(group, 0) == [
            ("user", "Reach 15.\n\n0"),
            ("assistant", "down"),
            ("user", "4"),
            ("assistant", "down"),
            ("user", "8"),
            ("assistant", "right"),
            ("user", "9"),
            ("assistant", "down"),
        ]
        assert (first.finish_reason, first.reward) == ("max_turns", 0.0)
        assert (second.finish_reason, second.reward) == ("stop", 0.0)  # a hole
        assert texts(group, 2)[2] == ("user", "expected one of left, down, right, up")
        assert third.finish_reason == "max_turns"


def test_gymnasium_takes_functions_of_the_user(tmp_path: Path, interpreters: Path):
    (tmp_path / "lake.py").write_text(
        "def text(observation, info):\n    return f'at {observation} with {sorted(info)}'\n"
        "def action(text):\n    return {'d': 1, 'r': 2}[text]\n"
    )
    config = configuration(
        tmp_path,
        python_of(interpreters, "gymnasium"),
        "gymnasium",
        id="FrozenLake-v1",
        kwargs={"is_slippery": False},
        to_text="lake.py:text",
        to_action="lake.py:action",
    )

    script = following("d d r x", "r x", "x")
    for group in played(config, script):
        assert texts(group, 0)[2] == ("user", "at 4 with ['prob', 'truncated']")
        assert group.rollouts[0].finish_reason == "environment_error"
        assert "KeyError: 'x'" in str(group.rollouts[0].error)


def test_textarena_repeats_a_game_and_plays_two_sides(tmp_path: Path, interpreters: Path):
    (tmp_path / "other.py").write_text(
        "import random\n"
        "def move(text):\n    return f'[{random.choice([6, 7, 8])}]'\n"  # the first may be taken
    )
    python = python_of(interpreters, "textarena")
    config = configuration(
        tmp_path,
        python,
        "textarena",
        id="TicTacToe-v0",
        players=2,
        opponent="other.py:move",
    )

    script = following("[0] [1] [2]", "[2] [1] [0]", "[1] [0] [2]")
    for group in played(config, script):
        for rollout in group.rollouts:
            assert rollout.turns[0].content.startswith("You are Player 0 in Tic Tac Toe.")
            assert rollout.finish_reason == "stop"
            assert rollout.reward == 1.0
    single = configuration(tmp_path / "single", python, "textarena", id="FrozenLake-v0")
    script = following("[right] x x x", "[down] x x x", "walk x x x")
    starts = {group.rollouts[0].turns[0].content for group in played(single, script)}
    assert len(starts) == 2  # another lake for another seed


def test_textarena_plays_the_policy_against_itself(tmp_path: Path, interpreters: Path):
    python = python_of(interpreters, "textarena")
    options = {"id": "TicTacToe-v0", "players": 2, "opponent": "policy"}
    config = configuration(tmp_path, python, "textarena", **options)
    with run(config) as training:
        (trained,) = training
    assert trained.metrics["completions/mean_length"] > 0
    rollouts = scan_rollouts(config.root).collect()
    assert rollouts.height == 6
    assert not set(rollouts["finish_reason"]) & {"environment_error", "aborted", "timeout"}
    for row in rollouts.iter_rows(named=True):
        assert row["turns"][0]["content"].startswith("You are Player 0 in Tic Tac Toe.")
        sampled = sum(t["end"] - t["start"] for t in row["turns"] if t["role"] == "assistant")
        assert sum(row["loss_mask"]) == sampled  # of the trained player alone


def test_the_policy_may_begin_a_game_against_itself(tmp_path: Path, interpreters: Path):
    python = python_of(interpreters, "textarena")
    options = {"id": "TicTacToe-v0", "players": 2, "player": 1, "opponent": "policy"}
    settings = configuration(tmp_path, python, "textarena", **options).environment
    environment = make_environment(settings)
    example = environment.example(0, 1, "train")

    async def first(url: str) -> str:
        policy = {"endpoints": [url], "model": "m", "sampling": asdict(Sampling(max_tokens=9))}
        given = replace(example, metadata={"policy": policy})
        (episode,) = open_episodes(environment, settings, given, 1)
        return (await episode.start()).messages[-1].content

    with chat_stand_in("[4]", "x", "x") as (url, bodies):
        text = asyncio.run(first(url))
        assert text.startswith("You are Player 1 in Tic Tac Toe.")
        assert "placed their symbol (O) in cell 4" in text
        assert bodies[0]["messages"][0]["content"].startswith("You are Player 0 in Tic Tac Toe.")
        with pytest.raises(RewardFault, match="opening ended the game before the model's turn"):
            asyncio.run(first(url))
    (episode,) = open_episodes(environment, settings, example, 1)
    with pytest.raises(RewardFault, match="such a game is played by a run"):
        asyncio.run(episode.start())


def test_verifiers_runs_its_own_loop_tools_and_rubric(tmp_path: Path, interpreters: Path):
    python = python_of(interpreters, "verifiers")
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


def test_verifiers_compares_the_members_of_a_group(tmp_path: Path, interpreters: Path):
    python = python_of(interpreters, "verifiers")
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


GUESS_SERVER = """
import sys
from uuid import uuid4
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class GuessAction(Action):
    message: str


class GuessObservation(Observation):
    prompt: str


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid4()))

    def reset(self, seed=None, episode_id=None, **options):
        self._secret = seed % 10
        return GuessObservation(prompt=f"game {seed}")

    def step(self, action, timeout_s=None, **options):
        if action.message == "raise":
            raise KeyError("out of order")
        if not action.message.isdigit():
            return GuessObservation(prompt="digits")
        number = int(action.message)
        if number == self._secret:
            return GuessObservation(prompt="yes", reward=1.0, done=True)
        return GuessObservation(prompt="higher" if number < self._secret else "lower")

    @property
    def state(self):
        return self._state


app = create_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=2)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def guess_url(interpreters: Path) -> Iterator[str]:
    """URL of a server of OpenEnv's package, which has room for two episodes."""
    python = python_of(interpreters, "openenv")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen([python, "-I", "-c", GUESS_SERVER, str(port)])
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def test_openenv_plays_groups_that_are_larger_than_its_capacity(tmp_path: Path, guess_url: str):
    config = configuration(tmp_path, None, "openenv", url=guess_url)
    script = following("0 1 2 3", "x raise", "1 0 2 3")

    first, second = played(config, script)
    assert texts(first, 0) == [
        ("user", "game 0"),
        ("assistant", "0"),
    ]
    assert (first.rollouts[0].reward, first.rollouts[0].finish_reason) == (1.0, "stop")
    assert texts(second, 0) == [
        ("user", "game 1"),
        ("assistant", "0"),
        ("user", "higher"),
        ("assistant", "1"),
    ]
    for group in (first, second):
        broken = group.rollouts[1]
        assert broken.finish_reason == "environment_error"
        assert "EXECUTION_ERROR: 'out of order'" in str(broken.error)
        assert group.rollouts[2].reward == 1.0


def test_openenv_trains_a_round(tmp_path: Path, interpreters: Path, guess_url: str):
    (tmp_path / "text.py").write_text(
        "def text(observation, info):\n    return observation['prompt']\n"
    )
    config = configuration(tmp_path, None, "openenv", url=guess_url, to_text="text.py:text")
    with run(config) as training:
        assert len(list(training)) == 1
    rollouts = scan_rollouts(config.root).collect()
    assert rollouts.height == 6
    print(f"openenv: rewards {rollouts['reward'].to_list()}, {training_of(rollouts)}")
    note("openenv", "runs", python=python_of(interpreters, "openenv"), package="openenv")


def training_of(rollouts: pl.DataFrame) -> str:
    """Ends of the rollouts of a round, for the record."""
    return str(Counter(rollouts["finish_reason"].to_list()))


# Importing verifiers takes seconds of CPU, so what needs no run is checked in one process.
CHECKS = """
import asyncio, json, sys
sys.path.insert(0, HOSTS)
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


def test_verifiers_ends_refuses_and_splits_as_it_says(interpreters: Path):
    python = python_of(interpreters, "verifiers")
    script = CHECKS.replace("HOSTS", repr(str(HOSTS)))
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


def test_names_that_a_library_lacks_are_refused(tmp_path: Path, interpreters: Path):
    gymnasium = python_of(interpreters, "gymnasium")
    for options, kind, expected in (
        ({"id": "NoLake-v1"}, InputError, "NoLake"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, ConfigError, "found 1"),
    ):
        config = configuration(tmp_path, gymnasium, "gymnasium", **options)
        with pytest.raises(kind, match=expected):
            make_environment(config.environment)
    textarena = python_of(interpreters, "textarena")
    with pytest.raises(InputError, match="NoGame-v0 not found"):
        make_environment(
            configuration(tmp_path, textarena, "textarena", id="NoGame-v0").environment
        )


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("gymnasium", {"id": "FrozenLake-v1"}),
        ("textarena", {"id": "GuessTheNumber-v0"}),
        ("verifiers", {"id": "counting_tools", "args": {"kind": "guess"}}),
        (
            "verifiers",
            {"id": "counting_tools", "args": {"kind": "group"}, "group_rewards": True},
        ),
    ],
)
def test_a_round_is_trained_in_it(
    tmp_path: Path, interpreters: Path, package: str, options: dict[str, Any]
):
    python = python_of(interpreters, package)
    config = configuration(tmp_path, python, package, **options)
    with run(config) as training:
        (trained,) = training
    assert trained.metrics["completions/mean_length"] > 0
    rollouts = scan_rollouts(config.root).collect()
    assert set(rollouts["environment"]) == {package}
    assert rollouts.height == 6
    assert not set(rollouts["finish_reason"]) & {"environment_error", "aborted", "timeout"}
    print(f"{package}: rewards {rollouts['reward'].to_list()}, {training_of(rollouts)}")
    note(package, "runs", python=python, package=package)


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


def test_verifiers_reads_rollouts_as_its_own_traces(tmp_path: Path, interpreters: Path):
    python = python_of(interpreters, "verifiers")
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


READ_GROUPS = """
import json, sys
from atroposlib.api.server import ScoredData

found = []
for line in open(sys.argv[1]):
    group = ScoredData.model_validate_json(line)
    found.append([group.tokens, group.scores, [[m != -100 for m in row] for row in group.masks]])
print(json.dumps(found))
"""


def test_atropos_reads_rollouts_as_its_own_groups(tmp_path: Path, interpreters: Path):
    config = configuration(
        tmp_path, None, "game", game="guess", size=8, turns_max=3
    )  # the environment makes no difference: the records are those of any run
    recorded, groups = record(config, following("1 2 3", "4 5 6", "7 0 1"))
    export_rollouts(recorded, "atropos", tmp_path / "groups.jsonl")
    python = interpreter_with(interpreters / "atropos", "atroposlib==0.4.0")
    done = subprocess.run(
        [python, "-c", READ_GROUPS, tmp_path / "groups.jsonl"],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [
        [
            [rollout.token_ids.tolist() for rollout in group.rollouts],
            [rollout.reward for rollout in group.rollouts],
            [(rollout.loss_mask == 1).tolist() for rollout in group.rollouts],
        ]
        for group in groups
    ]
    assert json.loads(done.stdout.splitlines()[-1]) == ours

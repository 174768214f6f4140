"""Mathematics with programs: what a call returns, limits by name, and a round played again."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.sandboxes import reason_to_skip
from support.scripted_policies import call, record, tool_run

from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments import sandbox_tools
from marin_rl.environments.python_tool import Python
from marin_rl.environments.registry import construct
from marin_rl.errors import ConfigError
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.types import Message, ToolCall, Turn


def made(**options: Any) -> Python:
    """The environment over its sample, ready to play, with limits that no busy machine reaches."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    options = {"program_timeout_s": 60, **options}
    config = EnvironmentConfig(name="python", options=options, reward_timeout_s=300)
    environment = construct(config)
    assert isinstance(environment, Python)
    environment.load_examples()
    environment.load_scorer()
    return environment


def results(environment: Python, *programs: str) -> list[str]:
    """Texts that the model reads after a turn that runs programs."""
    episode = environment.episode(environment.example(0, 0, "train"))
    episode.start()
    calls = tuple(
        ToolCall(id=f"c{n:08d}", name="python", arguments=json.dumps({"code": code}))
        for n, code in enumerate(programs)
    )
    answer = asyncio.run(episode.step(Turn(role="assistant", content="", tool_calls=calls)))
    assert not answer.done
    return [message.content for message in answer.messages]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of a tiny policy whose template has tools; its processes serve all tests."""
    tmp_path = tmp_path_factory.mktemp("python")
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    rows = [{"question": f"What is {n} * 17?", "answer": str(17 * n)} for n in range(1, 20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"path": str(tmp_path / "rows.jsonl"), "program_timeout_s": 30}
    settings = {"name": "python", "turns_max": 3, "reward_timeout_s": 60, "options": options}
    return tool_run(tmp_path, settings, 2, 3)


@pytest.fixture
def config(shared: Config, tmp_path: Path) -> Config:
    """The shared run, with a root of its own."""
    return shared.model_copy(update={"root": str(tmp_path / "runs")})


def test_a_call_returns_output_errors_and_the_end_of_a_program():
    printed, failed, silent, ended = results(
        made(),
        "import sys\nprint(6 * 7); print('note', file=sys.stderr)",
        "1 / 0",
        "x = 1",
        "import os; os.kill(os.getpid(), 9)",
    )
    assert printed == "42\nnote"
    assert failed.startswith('Traceback (most recent call last):\n  File "/work/program.py"')
    assert failed.endswith("ZeroDivisionError: division by zero\n[exit status 1]")
    assert (silent, ended) == ("[no output]", "[signal 9]")


def test_calls_share_no_state_and_hash_alike():
    program = (
        "import os\nprint(os.listdir(), hash('seed'), 'x' in globals())\nx = 1\nopen('f', 'w')"
    )
    first, second = results(made(), program, program)
    assert first == second
    assert "['program.py']" in first


def test_limits_are_named_in_the_text_of_a_call():
    environment = made(
        program_timeout_s=1,
        program_memory_bytes_max=64 << 20,
        program_output_bytes_max=4096,
        program_disk_bytes_max=1 << 20,
        program_processes_max=4,
    )
    late, large, loud, full, many = results(
        environment,
        "import time; time.sleep(1000)",
        "bytearray(1 << 30)",
        "while True: print('x' * 100)",
        "open('f', 'wb').write(bytes(2 << 20))",
        "import os\nwhile True:\n    if os.fork() == 0: os.pause() if hasattr(os, 'pause') else 0",
    )
    assert late == "[exceeded its limit of time: 1 s]"
    assert large.endswith("MemoryError\n[exit status 1]")
    assert loud.endswith("\n[exceeded its limit of output: 4 KiB]")
    assert "File too large" in full or "No space left" in full or full == "[signal 25]"
    assert "BlockingIOError" in many or "[exceeded" in many


def test_a_long_output_keeps_its_beginning_its_errors_and_its_end():
    environment = made()
    (text,) = results(environment, "print('a' + 50_000 * 'b' + 'c')\n1 / 0")
    assert len(text) <= 16_384
    assert text.startswith("ab")
    assert "characters: the middle is left out" in text
    assert text.endswith("[exit status 1]")
    assert "bc\nTraceback" in text


@pytest.mark.slow
def test_programs_of_a_turn_share_its_time():
    """The second program gets no more than what the first left; the third is not run."""
    environment = made(program_timeout_s=2)
    environment._budget_s = 2.5
    first, second, third = results(environment, *["import time; time.sleep(1000)"] * 3)
    assert first == "[exceeded its limit of time: 2 s]"
    assert second.startswith(("[exceeded its limit of time: 0", "The program was not run"))
    assert third == "The program was not run: the time of this turn is over."


def scripted(messages: Sequence[Message], member: int) -> str:
    """Compute the answer by a program, or by the member: guess it, or never end."""
    expression = messages[0].content.partition("?")[0].removeprefix("What is ")
    if member == 1:
        return r"I think \boxed{-1}."
    endless = member == 2 or any("endless" in str(message.tool_calls) for message in messages)
    if endless or len(messages) == 1:
        return call("python", code=f"print({expression})" + " # endless" * endless)
    return rf"So it is \boxed{{{messages[-1].content}}}."


@pytest.mark.slow
def test_a_round_with_a_tiny_policy_is_scored_and_played_again(config: Config):
    run, groups = record(config, scripted)
    for group in groups:
        solved, guessed, endless = group.rollouts
        assert (solved.reward, solved.finish_reason) == (1.0, "stop")
        assert [turn.role for turn in solved.turns] == ["user", "assistant", "tool", "assistant"]
        assert solved.turns[2].content == group.example.answer
        assert solved.turns[2].tool_name == "python"
        # only the policy's own tokens are trained on
        masked = [solved.loss_mask[t.start : t.end].mean() for t in solved.turns]
        assert masked == [0, 1, 0, 1]
        assert (guessed.reward, guessed.finish_reason) == (0.0, "stop")
        assert (endless.reward, endless.finish_reason) == (0.0, "max_turns")
        assert {c.name for c in endless.reward_components} == {"correct", "format"}
    replays = replay_rollouts(run, 0)
    assert (replays.equal, len(replays.episodes)) == (True, 6)


def test_a_penalty_is_added_to_the_score():
    environment = made(malformed="penalty", malformed_penalty=0.25)
    episode = environment.episode(environment.example(0, 0, "train"))
    episode.start()
    unreadable = Turn(role="assistant", content="", malformed="<tool_call>{")
    result = asyncio.run(episode.step(unreadable))
    assert (result.reward, result.done, result.scored) == (-0.25, False, True)
    end = asyncio.run(episode.step(Turn(role="assistant", content="so")))
    assert (end.reward, end.done, end.scored) == (None, True, True)


def test_limits_and_machines_that_cannot_work_are_refused_before_a_run(monkeypatch):
    for settings, words in (
        ({"reward_timeout_s": 4}, r"program_timeout_s: 4 s, .* expected at least 5"),
        ({"step_timeout_s": 2, "reward_timeout_s": 60}, r"environment\.step_timeout_s 2 "),
        (
            {"options": {"program_timeout_s": 0}},
            "program_timeout_s: Input should be greater than 0",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            construct(EnvironmentConfig.model_validate({"name": "python", **settings}))

    def missing(mode: str, interpreter: str | None) -> str:
        raise ConfigError("the sandbox needs bwrap: install it")

    monkeypatch.setattr(sandbox_tools, "check_sandbox", missing)
    with pytest.raises(ConfigError, match="the sandbox needs bwrap"):
        construct(EnvironmentConfig(name="python")).load_examples()

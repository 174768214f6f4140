"""`init` writes files that work, and lines that commands print can be pasted."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.run_factories import evaluate, whole_run
from typer.testing import CliRunner, Result

from marin_rl.cli import COMMANDS, app
from marin_rl.commands.config import TEMPLATES
from marin_rl.config import load_config
from marin_rl.doctor.data import trials
from marin_rl.doctor.policy import rendered
from marin_rl.doctor.start import before_engines
from marin_rl.environments.registry import loaded_environment
from marin_rl.errors import ConfigError
from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest
from marin_rl.storage.layout import reward_model_slot, sft_slot
from marin_rl.storage.runs import Run, committed_checkpoint
from marin_rl.tokenizers import tokenizer_for
from marin_rl.tool_calls import parse_tool_calls, tool_format

# Lines of commands that train are pasted with an option that keeps them from training.
TRAINS = ("run", "sft", "reward-model")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARIN_RL_ROOT", raising=False)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def lines_in(text: str) -> list[list[str]]:
    """Lines that a user would paste, as words after the program's name."""
    lines = re.findall(r"^ +(?:\S*/)?marin-rl (.+)$", text, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def paste(text: str) -> None:
    """Run every line in `text`; the options that only training takes are checked by --dry-run."""
    assert lines_in(text), text
    for words in lines_in(text):
        dry = ["--dry-run"] if words[0] == "run" else ["--help"] if words[0] in TRAINS else []
        done = invoke(*words, *dry)
        assert done.exit_code == 0, (words, done.output, done.exception)


def test_the_files_of_init_pass_every_check_before_a_run(folder: Path) -> None:
    written = invoke("init", "arithmetic")
    assert written.exit_code == 0, written.output
    config = load_config("arithmetic.yaml")
    assert before_engines(config, "rl-loop") is None
    assert [(t.right_reward, t.wrong_reward) for t in trials(config)] == [(1.0, 0.0)] * 3
    environment = loaded_environment(config.environment)
    assert (environment.size, getattr(environment, "eval_size", None)) == (70, 30)
    paste("\n".join(line for line in written.output.splitlines() if " run " in line))
    compile(Path("test_rewards.py").read_text(), "test_rewards.py", "exec")


def test_the_template_of_tools_samples_calls_that_are_three_tokens(folder: Path) -> None:
    assert invoke("init", "tools").exit_code == 0
    config = load_config("tools.yaml")
    assert before_engines(config, "rl-loop") is None
    assert before_engines(config, "sft") is None
    tokenizer, demonstrations = (
        tokenizer_for(config.policy),
        loaded_environment(config.sft.environment),
    )
    shown = [demonstrations.example(0, index, "train").answer or "" for index in range(40)]
    lengths = {len(tokenizer.encode(text, add_special_tokens=False)) for text in shown}
    assert lengths == {1, 3}  # an answer, or a call without its end token
    form = tool_format(tokenizer)
    assert form is not None
    calls = [parse_tool_calls(form, text, {"ask": {}}).calls for text in shown if len(text) > 1]
    assert {call.name for (call,) in calls} == {"ask"}
    # The prompt of a demonstration is that of an episode, where the template names the tools.
    example = demonstrations.example(0, 0, "train")
    (prompt, _), *_ = rendered(config, [example])
    assert prompt.startswith("<|system|>ask<|user|>1-8")
    body = {"name": "ask", "arguments": {"number": 5}}
    dialogue = [
        {"role": "user", "content": "1-8"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": body}]},
    ]
    again = tokenizer.apply_chat_template(
        dialogue, tools=[{"type": "function", "function": {"name": "ask"}}], tokenize=False
    )
    call = f"<tool_call>\n{json.dumps(body)}\n</tool_call>"
    assert again == f"<|system|>ask<|user|>1-8<|assistant|>{call}<|end|>"
    assert call in shown


@pytest.mark.parametrize("template", [path.name for path in TEMPLATES.iterdir() if path.is_dir()])
def test_the_test_of_each_template_passes(folder: Path, template: str) -> None:
    assert invoke("init", template).exit_code == 0
    for test in folder.glob("test_*.py"):
        command = [sys.executable, test.name]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
    for words in lines_in(Path("README.md").read_text()):
        assert words[0] in COMMANDS, words


def test_templates_are_listed(folder: Path) -> None:
    listed = invoke("init", "--list")
    names = [line.split()[0] for line in listed.output.splitlines()]
    assert {"agent", "arithmetic"} <= set(names)
    assert "demo" in names
    lines = invoke("init", "--list", "--json").stdout.splitlines()
    assert [json.loads(line)["template"] for line in lines] == names
    assert invoke("init").output == listed.output
    assert not list(folder.iterdir())


def test_init_overwrites_nothing(folder: Path) -> None:
    Path("rewards.py").write_text("mine")
    refused = invoke("init", "arithmetic")
    assert isinstance(refused.exception, ConfigError)
    assert "rewards.py already" in str(refused.exception)
    assert [path.name for path in folder.iterdir()] == ["rewards.py"]
    paste_lines = lines_in(str(refused.exception))
    assert invoke(*paste_lines[0]).exit_code == 0
    assert Path("my-first-run/rewards.py").is_file()


def test_an_unknown_template_is_answered_with_the_known_ones(folder: Path) -> None:
    refused = invoke("init", "arithmetics")
    assert re.search("expected one of agent, arithmetic, .*demo", str(refused.exception))
    assert invoke("init", "demo").exit_code == 0
    assert load_config("demo.yaml").run_id == "demo"


def test_lines_of_a_complete_run_can_be_pasted(folder: Path) -> None:
    place = "other place/runs"
    run = whole_run(place, rounds=1)
    last = committed_checkpoint(run, 1)
    assert last is not None
    evaluate(run, 1, last)
    again = invoke("run", f"{place}/{run.run_id}", "--rounds", "1")
    assert again.exit_code == 0, again.exception
    assert "complete: 1 rounds" in again.output
    paste(again.output)


@pytest.mark.parametrize("init", ["sft", "random"])
def test_lines_of_a_warm_start_can_be_pasted(folder: Path, init: str) -> None:
    place = "other place/runs"
    Path("my run.yaml").write_text(f"run_id: warm\npolicy: {{init: {init}}}\n")
    asked = ("my run.yaml", "--root", place, "--set", "sft.steps=3")
    run = Run.create_or_open(load_config("my run.yaml", ["sft.steps=3", f"root={place}"]))
    commit_named(run, sft_slot(3), {"sft/loss": 0.25})
    shown = invoke("status", "warm", "--root", place).output
    assert re.search("warm start.*3 of 3 steps, loss 0.250", shown)
    ended = invoke("sft", *asked)
    assert ended.exit_code == 0, ended.exception
    paste(ended.output)
    (words,) = lines_in(ended.output)
    planned = invoke(*words, "--dry-run").output
    assert ("warm-rl is new" if init == "random" else "warm exists with the same") in planned


def test_lines_of_a_reward_model_can_be_pasted(folder: Path) -> None:
    place = "other place/runs"
    Path("rm.yaml").write_text("run_id: scores\nreward_model: {pairs: pairs.jsonl, steps: 3}\n")
    run = Run.create_or_open(load_config("rm.yaml", [f"root={place}"]))
    commit_named(run, reward_model_slot(3))
    ended = invoke("reward-model", "rm.yaml", "--root", place)
    assert ended.exit_code == 0, ended.exception
    paste(ended.output)
    (setting,) = re.findall(r"^use it: (--set .+)$", ended.output, re.MULTILINE)
    Path("rl.yaml").write_text("seed: 3\n")
    assert invoke("config", "validate", "rl.yaml", *shlex.split(setting)).exit_code == 0


def commit_named(run: Run, slot: str, totals: Mapping[str, float] | None = None) -> None:
    """Commit a slot without parts: enough for a command that finds its work done."""
    manifest = new_manifest(
        slot, attempt=new_attempt(), fingerprint="0" * 64, parts=[], totals=totals or {}
    )
    commit_manifest(run.store, manifest)


def test_lines_of_a_fork_and_of_errors_can_be_pasted(folder: Path) -> None:
    place = "other place/runs"
    run = whole_run(place, rounds=2)
    forked = invoke("fork", run.run_id, "--round", "1", "--run-id", "new", "--root", place)
    assert forked.exit_code == 0, forked.exception
    paste(forked.output)
    Path("run.yaml").write_text("seed: 3\n")
    refused = invoke("run", "run.yaml", "--run-id", run.run_id, "--root", place)
    assert isinstance(refused.exception, ConfigError)
    paste(str(refused.exception))
    with Run.open(place, run.run_id).lock():
        locked = invoke("run", f"{place}/{run.run_id}")
    (words,) = lines_in(str(locked.exception))
    assert invoke(*words).exit_code == 0


def test_a_dry_run_says_whether_the_run_exists(folder: Path) -> None:
    Path("run.yaml").write_text("seed: 3\n")
    assert "is new under runs" in invoke("run", "run.yaml", "--dry-run").output
    Run.create_or_open(load_config("run.yaml"))
    assert "exists with the same content: 0 rounds" in invoke("run", "run.yaml", "--dry-run").output
    other = invoke("run", "run.yaml", "--dry-run", "--set", "seed=4")
    assert isinstance(other.exception, ConfigError)
    assert "seed: 3 -> 4" in str(other.exception)
    assert "Plan of" in other.output

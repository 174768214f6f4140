"""`marin-rl serve` as people start it: by flags, by environment, by its other name, in pursuit."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.adapters import random_adapter
from support.engine_adapters import adapter_for
from support.forked_python import python
from support.policy_runs import commit, small_run
from support.servers import CHAT, chat_body, talk, wait_until
from typer.testing import CliRunner

from marin_rl import cli
from marin_rl.commands.serve import serving_config
from marin_rl.config import Config, LoraConfig
from marin_rl.errors import ConfigError, MarinRLError, ObjectMissing
from marin_rl.lora.peft import write_peft
from marin_rl.serving import launch as standalone
from marin_rl.serving.server import PolicyServer
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.model import build_model

REPOSITORY = Path(__file__).parents[2]


def refusal(*arguments: str) -> MarinRLError:
    """Error of `marin-rl serve` for arguments that it cannot serve."""
    shown = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert isinstance(shown.exception, MarinRLError), shown.exception
    return shown.exception


def test_a_run_or_a_round_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    given = ("--root", str(tmp_path), "--port", "0")
    for arguments, told in (
        (("absent",), "absent"),
        ((run.run_id,), "no checkpoint is committed"),
        ((run.run_id, "--round", "7"), "no checkpoint of round 7"),
        ((run.run_id, "--follow"), "no checkpoint is committed"),
    ):
        error = refusal(*arguments, *given)
        assert isinstance(error, ObjectMissing), error
        assert told in str(error)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "a RUN or --model FOLDER"),
        (["--model", "m", "--follow"], "--follow needs a run"),
        (["--model", "m", "--round", "3"], "--round needs a run"),
        (["--model", "m", "--register"], "--register needs a run"),
        (["RUN", "--register"], "--register needs --follow"),
        (["RUN", "--follow", "--label", "zone=eu"], "--label needs --register"),
        (["RUN", "--follow", "--announce", "http://a/v1"], "--announce needs --register"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments: list[str], expected: str) -> None:
    error = refusal(*arguments)
    assert isinstance(error, ConfigError)
    assert expected in str(error)


def test_the_environment_stands_for_the_flags(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    monkeypatch.setenv("MARIN_RL_ROOT", str(tmp_path))
    monkeypatch.setenv("MARIN_RL_PORT", "0")
    assert str(tmp_path) in str(refusal(run.run_id))
    monkeypatch.setenv("MARIN_RL_PORT", "70000")
    assert "70000" in str(refusal(run.run_id))
    assert "absent" in str(refusal("absent", "--port", "0"))
    monkeypatch.setenv("MARIN_RL_CONFIG", str(tmp_path / "no.yaml"))
    assert "no.yaml" in str(refusal(run.run_id, "--port", "0"))


def test_only_the_section_inference_of_a_file_counts_with_a_run(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    file = tmp_path / "serving.yaml"
    file.write_text("rounds: 99\ninference: {model: mine, engine: {slots: 3}}\n", encoding="utf-8")
    found = serving_config(file, ["inference.engine.chunk_steps=5"], str(tmp_path), run.run_id)
    assert (found.inference.model, found.inference.engine.slots) == ("mine", 3)
    assert found.inference.engine.chunk_steps == 5
    assert found.rounds == run.config.rounds
    recorded = Run.open(str(tmp_path), run.run_id).config
    assert serving_config(None, None, str(tmp_path), run.run_id) == recorded


@pytest.mark.parametrize(
    ("chosen", "served"), [((), 64), (("policy.context_length=48", "sampling.max_tokens=8"), 48)]
)
def test_a_folder_made_for_few_positions_is_served_with_them(tmp_path, monkeypatch, chosen, served):
    tokenizer, policy = character_tokenizer(), small_run(tmp_path).config.policy
    policy = policy.model_copy(update={"context_length": 64})
    save_hf(build_model(policy, len(tokenizer), 0), tokenizer, tmp_path / "model")
    found: list[Config] = []

    def stand_in(*given):
        found.append(given[2])
        return SimpleNamespace(add_name=lambda name: None)

    monkeypatch.setattr(standalone, "growing_server", stand_in)
    monkeypatch.setattr(standalone, "serve_forever", lambda *given, **named: 0)
    given = serving_config(None, list(chosen), str(tmp_path), None)
    assert standalone.serve_folder(tmp_path / "model", given, "127.0.0.1", 0) == 0
    assert found[0].policy.context_length == served


def test_adapters_that_cannot_be_served_are_refused_before_anything_starts(tmp_path: Path) -> None:
    write_peft(tmp_path / "one", random_adapter(LoraConfig(rank=2)))
    folder = f"{tmp_path}/one"
    for options, message in (
        (("math",), "expected --adapter NAME=PATH"),
        ((f"../math={folder}",), "cannot name an adapter"),
        ((f"math={folder}", f"math={folder}"), "--adapter math is given twice"),
        ((f"math={tmp_path}/none",), f"no adapter at {tmp_path}/none"),
    ):
        flags = [part for option in options for part in ("--adapter", option)]
        error = refusal("--model", str(tmp_path), *flags)
        assert message in str(error)


@pytest.mark.slow
def test_a_folder_is_served_with_the_adapters_that_are_named(tmp_path, monkeypatch):
    tokenizer, policy = character_tokenizer(), small_run(tmp_path).config.policy
    base = build_model(policy, len(tokenizer), 0)
    save_hf(base, tokenizer, tmp_path / "model")
    for seed, name in enumerate(("math", "code")):
        write_peft(tmp_path / name, adapter_for(base, seed, rank=3 + seed))
    servers: list[PolicyServer] = []

    def serve(server: PolicyServer, *given: object, **named: object) -> int:
        servers.append(server)
        return 0

    monkeypatch.setattr(standalone, "serve_forever", serve)
    chosen = ["policy.context_length=64", "inference.engine.slots=4"]
    given = serving_config(None, chosen, str(tmp_path), None)
    folders = {"math": tmp_path / "math", "code": tmp_path / "code"}
    assert standalone.serve_folder(tmp_path / "model", given, "", 0, adapters=folders) == 0
    (server,) = servers
    try:
        assert server.adapters.names == ["math", "code"]
        sizes = server.engine.adapters.sizes
        assert (sizes.adapters, sizes.rank) == (4, 8)
    finally:
        server.stop()
    small = serving_config(None, [*chosen, "inference.engine.adapters_max=1"], str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"adapters_max of at least 2 .* math, code, found 1"):
        standalone.serve_folder(tmp_path / "model", small, "", 0, adapters=folders)


# First words of what a server says until it is ready, among what takes long on this machine.
STEPS = ["starting", "loading", "proving", "compiling"]


@contextmanager
def served(run: Run, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`marin-rl serve RUN` in another process, and where it listens."""
    command = [python(), "-m", "marin_rl", "serve", run.run_id, *arguments]
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "MARIN_RL_ROOT": run.config.root,
        "MARIN_RL_PORT": "0",
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            said: list[str] = []
            for line in process.stderr:
                said.append(line.rstrip())
                found = re.match(r"serving (\S+) at (http\S+)/v1$", line)
                if found:
                    words = [line.partition(" ")[0] for line in said]
                    assert [word for word in dict.fromkeys(words) if word in STEPS] == STEPS, said
                    yield process, found[2]
                    return
            raise AssertionError("\n".join(said))
        finally:
            process.kill()


def loaded_id(url: str) -> str:
    """The id of the loaded weights."""
    return talk(url, "GET", "/v1/models")[2]["data"][0]["id"]


@pytest.mark.slow  # a process of its own imports and compiles everything
def test_following_a_run_serves_its_next_checkpoint_by_itself(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    commit(run, 0)
    with served(run, "--follow", "--poll-s", "0.1", "--json") as (process, url):
        assert loaded_id(url).startswith("policy@00000-")
        commit(run, 1)
        wait_until(lambda: not loaded_id(url).startswith("policy@00000-"))
        status, _, answer = talk(url, "POST", CHAT, chat_body())
        assert (status, answer["weight_version"]) == (200, 1)
        assert answer["model"] == loaded_id(url)
        process.send_signal(signal.SIGTERM)
        states = [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
    assert process.returncode == 0
    assert [state["state"] for state in states] == ["compiling", "ready", "draining", "ended"]
    assert (states[1]["url"], states[-1]["exit_code"]) == (f"{url}/v1", 0)

"""A real environment server of verifiers v1: rollouts that it samples from the server of a run."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from integrations.libraries import interpreter_with, site_packages
from integrations.library_runs import configuration

from marin_rl import run, scan_rollouts
from marin_rl.config import Config, load_config
from marin_rl.environments.checks import make_environment
from marin_rl.environments.episode import PolicyAddress
from marin_rl.environments.episode_pool import finished_rollouts
from marin_rl.errors import EndpointUnavailable, InputError
from marin_rl.storage.runs import Run
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.types import Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# A server renders prompts itself, for which its renderers need transformers.
PACKAGES = ("verifiers==0.3.1", "renderers[transformers]==0.1.12", "transformers==4.57.6")

# Asks again once, with the answer that it got: two turns of an agent.
TASKSET = """
import os
import signal
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def length(self, trace) -> float:
        return len(trace.last_reply) / 100

    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            data = SumData(idx=n, prompt=f"{n}+1=", answer=str(n + 1))
            yield SumTask(data, self.config.task)


class AskConfig(vf.HarnessConfig):
    pass


class AskTwice(vf.Harness[AskConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        end = Path(os.environ["END_ONCE"])  # episodes to begin before the whole server ends, once
        if end.exists() and end.read_text() == "0":
            end.unlink()
            os.killpg(0, signal.SIGKILL)
        elif end.exists():
            end.write_text(str(int(end.read_text()) - 1))
        headers = {"Authorization": f"Bearer {secret}"}
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=120, headers=headers) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                (choice,) = answer.json()["choices"]
                messages.append({"role": "assistant", "content": choice["message"]["content"]})
                messages.append({"role": "user", "content": "sure?"})
                if choice["finish_reason"] != "stop":
                    break
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumTaskset", "AskTwice"]
"""
SERVER = """
import logging
import sys
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.serve import serve_env
from verifiers.v1.utils.loaders import environment_class
from verifiers.v1.utils.generic import concrete_type

config_class = concrete_type(environment_class("sums_v1", ""), EnvConfig) or EnvConfig
agent = {"runtime": {"type": "subprocess"}}  # others are sandboxes on other machines
config = config_class.model_validate({"taskset": {"id": "sums_v1"}, "agent": agent})
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
serve_env(max_workers=1, address=sys.argv[1], config=config)
"""

# Speaks ZMQ and msgpack, as another version of verifiers would.
OTHER_SERVER = """
import sys
import msgpack
import zmq

socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
print("EnvServer up", flush=True)
runs = iter(RUNS)
while True:
    client, number, method, _ = socket.recv_multipart()
    answer = HEALTH if method == b"health" else next(runs)
    socket.send_multipart([client, number, msgpack.packb(answer)])
"""


def other_server(health: object, runs: Sequence[object]) -> str:
    """A script whose server answers so when it is asked for its health, and for runs in turn."""
    return f"HEALTH, RUNS = {health!r}, {runs!r}\n{OTHER_SERVER}"


@contextmanager
def environment_server(
    python: Path, address: str, log: Path, script: str = SERVER
) -> Iterator[subprocess.Popen[bytes]]:
    """A server of the taskset, or that of another script, which ends with the block."""
    variables = {**os.environ, "MARIN_RL_API_KEY": "none", "END_ONCE": str(log.with_name("end"))}
    command = [python, "-I", "-c", script, address]
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, env=variables, stdout=file, stderr=file, start_new_session=True
        )
    try:
        while "EnvServer up" not in log.read_text():
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(0.1)
        yield server
    finally:
        _kill(server)


def _kill(server: subprocess.Popen[bytes]) -> None:
    """End a server with the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def served(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Config]:
    """The interpreter of a server, and a run in the environment that it serves."""
    libraries = Path(request.config.cache.mkdir("libraries"))
    python = interpreter_with(libraries / "verifiers-v1", *PACKAGES)
    (site_packages(python) / "sums_v1.py").write_text(TASKSET)
    options = {
        "id": "sums_v1",
        "address": f"ipc://{tmp_path}/server",
        "renderer": {"name": "default"},
    }
    configuration(tmp_path, python, "verifiers_v1", **options)
    return python, load_config(tmp_path / "config.yaml", ["flow.retries=0"])


def test_a_server_that_ends_within_a_run_costs_no_committed_group(tmp_path, request):
    python, config = served(tmp_path, request)
    address = config.environment.options["address"]
    (tmp_path / "end").write_text("4")  # two are those of an evaluation
    with (
        environment_server(python, address, tmp_path / "log") as server,
        pytest.raises(EndpointUnavailable, match=f"server at {address} does not answer"),
        run(config) as training,
    ):
        list(training)
    assert server.returncode == -signal.SIGKILL
    assert not (tmp_path / "end").exists()
    with environment_server(python, address, tmp_path / "log-2"), run(config) as training:
        (trained,) = training
    assert trained.metrics["completions/mean_length"] > 0
    rollouts = scan_rollouts(config.root).collect()
    assert rollouts.height == 6
    assert set(rollouts["finish_reason"]) <= {"stop", "length"}, rollouts["error"].to_list()
    assert all(a.balanced for a in audit_run(Run.open(config.root, config.run_id)))


def test_a_round_is_trained_on_rollouts_of_an_environment_server(tmp_path, request):
    python, config = served(tmp_path, request)
    address = config.environment.options["address"]
    with environment_server(python, address, tmp_path / "log") as server:
        with run(config) as training:
            (trained,) = training
        _kill(server)
        gone = config.environment.model_copy(
            update={"options": {**config.environment.options, "connect_timeout_s": 1.0}}
        )
        with pytest.raises(InputError, match="no environment server of verifiers v1 answers"):
            make_environment(gone)
    assert trained.metrics["completions/mean_length"] > 0
    rollouts = scan_rollouts(config.root).collect()
    assert set(rollouts["finish_reason"]) <= {"stop", "length"}, rollouts["error"].to_list()
    assert rollouts.height == 6
    for row in rollouts.iter_rows(named=True):
        sampled = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        mask = np.array(row["loss_mask"])
        assert 1 <= len(sampled) <= 2
        assert mask.sum() == sum(turn["end"] - turn["start"] for turn in sampled)
        assert np.isfinite(row["logprobs"]).all()
        assert row["reward"] == pytest.approx(len(sampled[-1]["content"].strip()) / 100, abs=0.51)
    stored = Run.open(config.root, config.run_id)
    assert all(audit.balanced for audit in audit_run(stored))
    print(f"verifiers v1: rewards {rollouts['reward'].to_list()}")


def test_a_server_of_another_protocol_version_is_named(tmp_path, request):
    python, config = served(tmp_path, request)
    settings = config.environment
    address = settings.options["address"]
    expected = rf"what answers at {address} does not speak the protocol of verifiers 0\.3\.1: start"
    with (
        environment_server(python, address, tmp_path / "log", other_server(["up", 2], [])),
        pytest.raises(InputError, match=expected),
    ):
        make_environment(settings)
    answers = [
        {"version": 2, "result": {"traces": []}},
        {"episode": [1]},
        {"success": False, "error": "unknown method 'run'"},
        {"success": False, "error": "ValidationError: 2 validation errors for RunRequest"},
        {"success": False, "error": "the sandbox is gone"},
    ]
    script = other_server({"success": True}, answers)
    sampling = Sampling(max_tokens=9)
    policy = PolicyAddress(
        endpoints=("http://127.0.0.1:9/v1",), model="m", tokenizer="t", sampling=(sampling,) * 5,
        api_key_variable="MARIN_RL_API_KEY", context_length=99, turns_max=2,
    )  # fmt: skip
    with environment_server(python, address, tmp_path / "log-2", script):
        environment = make_environment(settings)
        example = environment.example(0, 0, "train")
        faults = asyncio.run(finished_rollouts(environment, settings, example, policy))
    *others, failed = map(str, faults)
    assert all(re.match(f"OtherProtocol: {expected}", other) for other in others), others
    assert failed == "RuntimeError: the sandbox is gone"

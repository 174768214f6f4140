"""Episodes on a resources server of NeMo Gym's own package: its example of session state."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from integrations.libraries import interpreter_with, site_packages
from integrations.test_nemo_gym import configuration
from support.scripted_policies import call, record

from marin_rl import run, scan_rollouts
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.types import Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Gym asks for Python 3.13; its code for resources servers runs on this one as well.
GYM = ("nemo-gym==0.7.0",)
PACKAGES = (
    "aiohttp==3.14.5", "anthropic==0.109.2", "anyio==4.16.0", "datasets==5.2.0",
    "devtools==0.13.0", "fastapi==0.165.0", "gitpython==3.2.1", "httptools==0.9.0",
    "hydra-core==1.3.8", "itsdangerous==2.2.0", "jinja2==3.1.6", "mcp==1.30.0",
    "omegaconf==2.3.1", "openai==2.44.0", "orjson==3.13.0", "psutil==7.2.2", "pydot==4.0.1",
    "pyjwt==2.15.1", "python-multipart==0.0.34", "ray[default]==2.60.0", "rich==15.0.0",
    "scipy==1.17.1", "sqlparse==0.6.1", "tenacity==9.2.1", "tqdm==4.70.1", "uvicorn==0.54.0",
    "uvloop==0.23.0", "wandb==0.31.0", "yappi==1.7.6",
)  # fmt: skip
# As `ng_run` starts it, without its head server.
SERVER = """
import sys
import uvicorn
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt import app

host, port = "127.0.0.1", int(sys.argv[1])
config = app.StatefulCounterResourcesServerConfig(
    host=host, port=port, entrypoint="", name="counter", domain="other"
)
client = ServerClient(
    head_server_config=BaseServerConfig(host=host, port=1), global_config_dict=OmegaConf.create({})
)
server = app.StatefulCounterResourcesServer(config=config, server_client=client)
uvicorn.run(server.setup_webserver(), host=host, port=port, log_level="warning")
"""
START_S = 300


@contextmanager
def gym_server(python: Path, log: Path) -> Iterator[str]:
    """URL of the server, which ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log.open("wb") as file:
        command = [python, "-I", "-c", SERVER, str(port)]
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def script(messages: Sequence[Message], member: int) -> str:
    """Members that count as they are asked, once too few, not at all, and with a wrong call."""
    asked = messages[0].content.split()
    numbers = [int(word) for word in asked if word.isdigit()]
    said = [message for message in messages if message.role == "assistant"]
    if not said:
        first = [call("increment_counter", count=n) for n in numbers]
        return ["\n".join(first), first[0], "done", call("increment_counter", count="x")][member]
    return "done"


def test_its_own_rows_are_played_scored_and_trained_on(tmp_path, request):
    libraries = Path(request.config.cache.mkdir("libraries"))
    python = interpreter_with(libraries / "nemo-gym", *PACKAGES, newer=GYM)
    data = site_packages(python) / "resources_servers/example_session_state_mgmt/data/example.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    with gym_server(python, tmp_path / "log") as url:
        recorded, groups = record(configuration(tmp_path, url, rows), script)
        assert replay_rollouts(recorded, 0).equal
        for group in groups:
            assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.0, 0.0]
            answers = [t.content for t in group.rollouts[0].turns if t.role == "tool"]
            assert answers == ['{"success":true}', '{"success":true}']
            assert "valid integer" in str([t.content for t in group.rollouts[3].turns])
        config = configuration(tmp_path, url, rows, trained=True)
        with run(config) as training:
            (trained,) = training
    assert trained.metrics["completions/mean_length"] > 0
    rollouts = scan_rollouts(config.root).collect()
    assert rollouts.height == 8
    assert set(rollouts["environment"]) == {"nemo_gym"}
    assert not set(rollouts["finish_reason"]) & {"environment_error", "aborted", "timeout"}
    print(
        f"nemo_gym: rewards {rollouts['reward'].to_list()}, {rollouts['finish_reason'].to_list()}"
    )

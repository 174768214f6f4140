"""Environments on a server of OpenEnv's own package."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from integrations.libraries import interpreter_with
from integrations.library_runs import check_trained, configuration, following, played, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

START_S_MAX = 900  # of a server whose packages are imported for the first time
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
def python(interpreters: Path) -> Path:
    """An interpreter that has the package."""
    return interpreter_with(interpreters / "openenv", "openenv==0.10.0")


@pytest.fixture(scope="module")
def guess_url(python: Path) -> Iterator[str]:
    """URL of a server of OpenEnv's package, which has room for two episodes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen([python, "-I", "-c", GUESS_SERVER, str(port)])
    try:
        deadline = time.monotonic() + START_S_MAX
        while not answers(port):
            assert server.poll() is None, "its server has ended"
            assert time.monotonic() < deadline, "its server does not answer"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def answers(port: int) -> bool:
    """Return True once a server listens on a port of this machine."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_openenv_plays_groups_that_are_larger_than_its_capacity(tmp_path: Path, guess_url: str):
    config = configuration(tmp_path, None, "openenv", url=guess_url)
    script = following("0 1 2 3", "x raise", "1 0 2 3")

    first, second = played(config, script)
    assert texts(first, 0) == [("user", "game 0"), ("assistant", "0")]
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


def test_openenv_trains_a_round(tmp_path: Path, guess_url: str):
    (tmp_path / "text.py").write_text(
        "def text(observation, info):\n    return observation['prompt']\n"
    )
    config = configuration(tmp_path, None, "openenv", url=guess_url, to_text="text.py:text")
    check_trained("openenv", config)

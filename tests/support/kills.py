"""Programs in processes of their own, killed with SIGKILL when their folder shows what they do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from support.debug_run import REPOSITORY

from marin_rl.config import Config

TIMEOUT_S = 240


def spawn_program(program: str, config: Config, api: str) -> subprocess.Popen[bytes]:
    """A Python program that is given a configuration as JSON."""
    return subprocess.Popen(
        [sys.executable, "-c", program, config.model_dump_json()],
        cwd=REPOSITORY,
        env={**os.environ, "PREFECT_API_URL": api},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that must end well."""
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, told.decode()[-3000:]


def kill_when(process: subprocess.Popen[bytes], seen: Callable[[], bool], delay_s: float) -> None:
    """SIGKILL the process `delay_s` after `seen` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not seen() and process.poll() is None:
        assert time.monotonic() < deadline, "the stage never began"
        time.sleep(0.0005)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()

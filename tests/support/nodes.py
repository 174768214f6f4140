"""Machines of a fleet, as processes of this one: workers of a pool."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

TIMEOUT_S = 900.0


class Node:
    """A process and what it starts, which are killed together as a machine would be."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: dict[str, str], log: Path
    ) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=file
            )

    def kill(self) -> None:
        """SIGKILL to the process and all that it has started."""
        parent = psutil.Process(self.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def end(self) -> None:
        """Kill it, if it is there still."""
        if self.process.poll() is None:
            self.kill()


def pool_worker(folder: Path, environment: dict[str, str], name: str) -> Node:
    """A worker of the pool `rl-pool`, started in a checkout."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "rl-pool"]
    return Node([*command, "--name", name], folder, environment, folder / f"{name}.log")


def wait(happened: Callable[[], bool], what: str, node: Node | None = None) -> None:
    """Return once it has happened; `node` is not to end before that."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        if node is not None:
            assert node.process.poll() is None, node.log.read_text()[-4000:]
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)

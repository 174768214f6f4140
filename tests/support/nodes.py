"""Machines of a fleet, as processes of this one: workers of a pool, nodes of a Ray cluster."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from support.forked_python import fork_of, python

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
        for process in _tree(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Kill it, if it is there still."""
        if self.process.poll() is None:
            self.kill()


def _tree(root: int) -> list[int]:
    """The ids of a process, of those that it and they have started, and of their forks."""
    found, left = list[int](), [root]
    while left:
        process = left.pop()
        with suppress(psutil.NoSuchProcess):
            left += [child.pid for child in psutil.Process(process).children()]
            fork = fork_of(process)
            left += [fork] if fork != process else []
            found.append(process)
    return found


def pool_worker(folder: Path, environment: dict[str, str], name: str) -> Node:
    """A worker of the pool `rl-pool`, started in a checkout."""
    command = [python(), "-m", "prefect", "worker", "start", "--pool", "rl-pool"]
    return Node([*command, "--name", name], folder, environment, folder / f"{name}.log")


def ray_environment(folder: Path) -> dict[str, str]:
    """Variables of the nodes of a cluster, and of flows that use it; a token in `folder`."""
    token = folder / "token"
    if not token.exists():
        token.write_text(secrets.token_hex(32))
    # All of a busy machine: Ray's own limits are 30 s to 100 s, and count from a start.
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_agent_register_timeout_ms": "600000",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_health_check_timeout_ms": "60000",
        "RAY_gcs_server_request_timeout_seconds": "600",
    }


class RayCluster:
    """A head and further nodes on this machine, of one processor each, with a token of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self.address, self.environment = f"127.0.0.1:{port}", ray_environment(folder)
        head = ("--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=1")
        self.nodes = [self._start("head", *head)]

    def add(self, name: str) -> Node:
        """Start a further node."""
        node = self._start(name, f"--address={self.address}", "--num-cpus=1")
        self.nodes.append(node)
        return node

    def end(self) -> None:
        """Kill every node by its id: `ray stop` would end the clusters of others too."""
        for node in reversed(self.nodes):
            node.end()

    def _start(self, name: str, *options: str) -> Node:
        ray = str(Path(sys.executable).with_name("ray"))
        environment = {**os.environ, **self.environment}
        log = self._folder / f"{name}.log"
        small = "--object-store-memory=80000000"  # its least; references alone travel
        command = [ray, "start", "--block", "--disable-usage-stats", small, *options]
        nodes: list[Node] = []

        def started() -> bool:
            """One that has ended is started again: Ray gives a node 30 s, whatever the load."""
            if not nodes or nodes[-1].process.poll() is not None:
                nodes.append(Node(command, self._folder, environment, log))
            return "Ray runtime started" in log.read_text()

        wait(started, f"Ray's {name}: {log.read_text()[-2000:] if log.exists() else ''}")
        return nodes[-1]


def wait(happened: Callable[[], bool], what: str, node: Node | None = None) -> None:
    """Return once it has happened; `node` is not to end before that."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        if node is not None:
            assert node.process.poll() is None, node.log.read_text()[-4000:]
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)

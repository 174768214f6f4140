"""A Prefect server with a checkout next to it, and a run whose flow other machines sample for."""

import os
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import yaml
from support.fleet_servers import RegisteredServer
from support.flow_runs import DEBUG, REPOSITORY, debug
from support.forked_python import python
from support.nodes import Node, wait
from support.prefect_server import PrefectServer

from marin_rl.storage.runs import Run

CHECKOUT = ("flows", "tasks", "marin_rl", "schemas", "configs", "prefect.yaml", "prefect.toml")
FLEET = ("inference.endpoints=registered", "inference.publish=pull")


class Site:
    """A Prefect server and a checkout, in a folder."""

    def __init__(self, folder: Path, ended: ExitStack) -> None:
        self.folder = folder
        for name in CHECKOUT:
            (folder / name).symlink_to(REPOSITORY / name)
        server = PrefectServer(folder / "prefect", python())
        server.start()
        ended.callback(server.kill)
        self.url = server.url
        self.environment = {
            **os.environ,
            "PREFECT_API_URL": server.url,
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "RL_ROOT": str(folder),
            "PYTHONPATH": str(folder),
        }

    def deploy(self) -> None:
        """Make the pool, the deployments and the automations."""
        self.call("work-pool", "create", "rl-pool", "--type", "process", "--overwrite")
        self.call("--no-prompt", "deploy", "--all")
        self.call("automation", "create", "--from-file", "flows/automations.yaml")

    def call(self, *command: str) -> None:
        """Run a command of Prefect in the checkout."""
        done = subprocess.run(
            [python(), "-m", "prefect", *command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


class Machines:
    """A run with registered servers, and the process of its flow, which reports to a site."""

    def __init__(
        self, folder: Path, ended: ExitStack, *overrides: str, site: Site | None = None
    ) -> None:
        self.folder, self._ended = folder, ended
        self.site = site or Site(folder, ended)
        self.environment = self.site.environment
        self.overrides = (*FLEET, *overrides)
        self.config = debug(folder / "runs", *self.overrides)
        self.run = Run.create_or_open(self.config)

    def serve(self, name: str) -> RegisteredServer:
        """Start an endpoint, which announces itself."""
        server = RegisteredServer(self.run, self.folder / f"{name}.log")
        self._ended.callback(server.end)
        return server

    def play(self, environment: Mapping[str, str] | None = None) -> Node:
        """Start the run's flow."""
        tree = yaml.safe_load(DEBUG.read_text())
        file = self.folder / "run.yaml"
        file.write_text(yaml.safe_dump(tree))
        given = [f"--set={item}" for item in self.overrides]
        command = [python(), "-m", "marin_rl", "run", str(file), "--run-id", "whole"]
        command += ["--set=policy.init=sft", f"--set=root={self.config.root}", *given]
        log = self.folder / "flow.log"
        node = Node(command, self.site.folder, {**self.environment, **(environment or {})}, log)
        self._ended.callback(node.end)
        return node

    def shards(self, round: int) -> int:
        """Committed shards of a round."""
        names = self.run.store.children(f"rollouts/round-{round:05d}")
        return sum(name.startswith("shard-") for name in names)

    def finish(self, flow: Node) -> None:
        """Wait for the end of the flow, which succeeds."""
        wait(lambda: flow.process.poll() is not None, "the end of the flow")
        assert flow.process.returncode == 0, flow.log.read_text()[-4000:]

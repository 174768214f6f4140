"""Servers of a run in processes of their own, which announce themselves next to it."""

import os
import signal
import subprocess
import time
from pathlib import Path

from support.forked_python import python

from marin_rl.storage.fleet import FleetBoard, Heartbeat
from marin_rl.storage.runs import Run

REGISTERS_S = 400


class RegisteredServer:
    """`marin-rl serve RUN --follow --register` on a free port, by the id of its process."""

    def __init__(self, run: Run, log: Path, *options: str) -> None:
        self._run, self._log = run, log
        command = [
            *(python(), "-m", "marin_rl", "serve", run.run_id, "--root", run.config.root),
            *("--follow", "--register", "--port", "0", "--poll-s", "0.1", *options),
        ]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ)

    @property
    def announced(self) -> bool:
        """True once a heartbeat that this process wrote is there."""
        assert self.process.poll() is None, self._log.read_text()[-3000:]
        return f"serving {self._run.config.inference.model}@" in self._log.read_text()

    def wait(self) -> None:
        """Return once it is announced."""
        deadline = time.monotonic() + REGISTERS_S
        while not self.announced:
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.1)

    @property
    def requests(self) -> int:
        """Completions that it was asked for, the canary's included."""
        return self.log.count('"/v1/chat/completions')

    @property
    def log(self) -> str:
        """The text of its standard output and error."""
        return self._log.read_text()

    def kill(self) -> None:
        """Kill it with SIGKILL: its heartbeat stays."""
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """End it as an operator does; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def announced(run: Run) -> list[Heartbeat]:
    """Heartbeats next to a run, those of servers that were killed included."""
    beats = FleetBoard(run.folder, None).heartbeats()
    return [beat for beat in beats if isinstance(beat, Heartbeat)]

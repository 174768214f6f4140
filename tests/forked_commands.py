"""Commands of marin-rl, one after the other, in processes that `forked_python` forks.

    with ForkedCommands(log) as commands:
        code = commands.run(folder, "status", "demo")
        code = commands.run(folder, "serve", "demo", until="http://")
        code = commands.run_script(Path("bench/fsck.py"), folder, output=folder / "printed")

What a start from a shell adds, tests of single commands and of the wheel show.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from support.forked_python import REPOSITORY, START_PYTHON, python

END_S_MAX = 240.0


class ForkedCommands:
    """Runs commands, whose output goes to `log`. `environment` is added to ours of this moment."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        own = {"PYTHONPATH": str(REPOSITORY), START_PYTHON: sys.executable}
        self._environment = {**os.environ, **own, **environment}

    def __enter__(self) -> Self:
        self.log.touch()
        return self

    def __exit__(self, *_: object) -> None:
        """Each command has ended."""

    def run(self, folder: Path, *words: str, until: str | None = None, **environment: str) -> int:
        """Run `marin-rl WORDS` in `folder`; returns its exit code, or minus a signal.

        A command that goes on, such as a server, is interrupted as by Ctrl-C once it has printed
        `until`.
        """
        printed = self.log.stat().st_size
        process = self._start(folder, ["-m", "marin_rl", *words], self.log, environment)
        if until is not None:
            ends = time.monotonic() + END_S_MAX
            while until.encode() not in self.log.read_bytes()[printed:]:
                if process.poll() is not None or time.monotonic() > ends:
                    break  # it ended: its code says how
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        return process.wait()

    def run_script(
        self, script: Path, folder: Path, *words: str, output: Path, **environment: str
    ) -> int:
        """Run a Python script in the same way, with its standard output in the file `output`.

        A variable MARIN_RL_TEST_PYTHON is what it takes for Python.
        """
        return self._start(folder, [str(script.absolute()), *words], output, environment).wait()

    def _start(
        self, folder: Path, words: list[str], output: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with output.open("ab") as stdout, self.log.open("ab") as stderr:
            return subprocess.Popen(
                [python(), *words], cwd=folder, env=self._environment | environment,
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            )  # fmt: skip

    def said(self) -> str:
        """The end of what the commands printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]

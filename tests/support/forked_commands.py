"""Commands of marin-rl in processes of their own that are forked: a start costs 5 s of imports.

    with ForkedCommands(log) as commands:
        code = commands.run(folder, "status", "demo")
        code = commands.run(folder, "serve", "demo", until="http://")
        code = commands.run_script(Path("bench/fsck.py"), folder, output=folder / "printed")

One child process, which `forked_python` forks, has imported what commands need, starts no thread
and touches no device. A fork of it has a folder, standard streams and an end of its own, and JAX
and Prefect's services start in it.
What a start from a shell adds, tests of single commands and of the wheel show.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from support.forked_python import python
from support.preloading import COMMANDS, code_of, end_process, import_for_forks

REPOSITORY = Path(__file__).parents[2]
TESTS = REPOSITORY / "tests"
END_S_MAX = 240.0


class ForkedCommands:
    """A process that forks commands, whose output goes to `log`. `environment` is added to ours."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> Self:
        self.log.touch()
        self._process = subprocess.Popen(
            [python(), __file__, str(self.log), sys.executable],
            cwd=REPOSITORY,
            env={**self._environment, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{TESTS}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=END_S_MAX)

    def run(self, folder: Path, *words: str, until: str | None = None, **environment: str) -> int:
        """Run `marin-rl WORDS` in `folder`; returns its exit code, or minus a signal.

        A command that goes on, such as a server, is interrupted as by Ctrl-C once it has printed
        `until`. What libraries read from the environment as they are imported, such as Prefect's
        address, they have read already.
        """
        printed = self.log.stat().st_size
        pid = self._fork(folder=str(folder), words=words, environment=environment)
        if until is not None:
            self._interrupt(pid, until.encode(), printed)
        return self._ended()

    def run_script(
        self, script: Path, folder: Path, *words: str, output: Path, **environment: str
    ) -> int:
        """Run a Python script in the same way, with its standard output in the file `output`.

        A variable MARIN_RL_TEST_PYTHON is what it takes for Python.
        """
        started = {"script": str(script.absolute()), "output": str(output)}
        self._fork(folder=str(folder), words=words, environment=environment, **started)
        return self._ended()

    def _fork(self, **order: Any) -> int:
        """Process id of a command that now runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def _ended(self) -> int:
        """Exit code of the command, once it has ended."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def _interrupt(self, pid: int, until: bytes, printed: int) -> None:
        """Send SIGINT to a command that has printed `until`, or is about to end without it."""
        ends = time.monotonic() + END_S_MAX
        while time.monotonic() < ends and until not in self.log.read_bytes()[printed:]:
            if not Path(f"/proc/{pid}").exists():
                return  # it ended: its code says how
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)

    def said(self) -> str:
        """The end of what the commands printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]


def main() -> None:
    """Import, then fork a command per line of standard input and print how each ended."""
    del sys.path[0]  # this folder, whose modules have plain names
    sys.path.remove(str(TESTS))  # and tests, which commands do not see
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    sys.executable = sys.argv[2]  # what commands start is not forked
    import_for_forks(COMMANDS)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _live(json.loads(line))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _live(order: dict[str, Any]) -> None:
    """Body of a fork: the command line or script, in its folder, and an end as Python's own.

    But what is imported is not taken apart, which takes a second.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, file in ((1, order.get("output", sys.argv[1])), (2, sys.argv[1])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    sys.executable = os.environ.pop("MARIN_RL_TEST_PYTHON", sys.executable)
    script = order.get("script")
    sys.argv = [script or "marin-rl", *order["words"]]
    code = 1
    try:
        if script:
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
        else:
            importlib.import_module("marin_rl.cli").main()
        code = 0
    except SystemExit as end:
        code = code_of(end)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - it is what ends the command
        traceback.print_exc()
    finally:
        end_process(code)


if __name__ == "__main__":
    main()

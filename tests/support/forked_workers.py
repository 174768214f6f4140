"""Workers of pytest-xdist forked from one process that has collected the tests already.

Importing what the tests import takes most of a worker's collection. It is done once, in a process
that starts no thread and touches no device; its forks find every module in `sys.modules`.

A worker is started as pytest-xdist starts any Python: its command passes its standard streams and
environment to that process, and ends with the fork.
"""

import contextlib
import json
import os
import random
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

STREAMS = (0, 1, 2)


class ForkedWorkers:
    """A process that collects the tests of a `pytest.Config` and is forked for each worker."""

    def __init__(self, config: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="marin-rl-workers-")
        address = f"{self._folder.name}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, __file__, "collect", str(listener.fileno()), *_collecting(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
        client = [sys.executable, "-I", "-S", __file__, "start", address]
        self.python = shlex.join(client)

    def stop(self) -> None:
        """End the process; workers have ended."""
        self._process.communicate()
        self._folder.cleanup()


def _collecting(config: Any) -> list[str]:
    """Arguments of pytest with which the process imports the files that the workers collect."""
    # rerunfailures would start a thread.
    options = ["--collect-only", "-q", "-n", "0", "-p", "no:rerunfailures"]
    return [*options, "-m", config.option.markexpr, *config.args]


class Failures:
    """A plugin that notes whether a file could not be collected."""

    any = False

    def pytest_collectreport(self, report: Any) -> None:
        self.any |= report.failed


def forget_tests() -> None:
    """Have workers import the files of tests again, and report what fails.

    Else what is left of a module that failed would count as imported there, without any test.
    """
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").name.startswith("test_"):
            del sys.modules[name]


def collect(listener: socket.socket, arguments: list[str]) -> None:
    """Collect tests, then fork a worker for each connection until standard input ends."""
    import warnings

    import pytest

    # Options of the environment are for the workers: of reruns, whose plugin is left out here.
    os.environ.pop("PYTEST_ADDOPTS", None)
    failures = Failures()
    if pytest.main(arguments, plugins=[failures]) == pytest.ExitCode.USAGE_ERROR:
        raise RuntimeError(f"expected a collection by the arguments {arguments}, see above")
    if failures.any:
        forget_tests()
    import jaxtyping._pytest_plugin  # not before: pytest rewrites the assertions of plugins
    from jax._src import xla_bridge
    from support.preloading import freeze

    from marin_rl.isolated.pool import close_pools

    close_pools()  # processes of this one, which its forks could not use
    # Its import hook stays: a second one would refuse what is imported.
    del jaxtyping._pytest_plugin.pytest_load_initial_conftests
    if threading.active_count() > 1 or xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "expected a collection that starts no thread and touches no device, found "
            f"{threading.enumerate()}: move what a test file does as it is imported to a fixture"
        )
    freeze()
    warnings.filterwarnings("ignore", "os.fork.. was called", RuntimeWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the workers, and they end this
    sys.stdout.flush()
    workers = []
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        workers.append(os.fork())
        if workers[-1] == 0:
            listener.close()
            _work(connection)
            return
        connection.close()
    for worker in workers:
        os.waitpid(worker, 0)  # so that their time is part of this command's


def _work(connection: socket.socket) -> None:
    """Be the worker whose streams and environment come over the connection, open until its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()  # or all workers draw the same numbers, such as names of temporary things
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, len(STREAMS))
    for number, stream in zip(STREAMS, streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(json.loads(message))
    sys.argv = ["-c"]
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # as execnet starts any Python


def start(connection: socket.socket) -> None:
    """Hand this process's streams and environment to a new worker, and wait for its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker gets it too
    socket.send_fds(connection, [json.dumps(dict(os.environ)).encode()], STREAMS)
    with contextlib.suppress(ConnectionResetError):
        connection.recv(1)


def main(command: str, place: str, *arguments: str) -> None:
    """Run one of the two sides."""
    if command == "collect":
        # In place of this folder, whose modules have plain names.
        sys.path[0] = str(Path(__file__).parents[2])
        collect(socket.socket(fileno=int(place)), list(arguments))
        from support.preloading import end_process

        end_process(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(place)
        start(connection)


if __name__ == "__main__":
    main(*sys.argv[1:])

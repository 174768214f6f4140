"""A Python whose processes are forked: what starts many of them saves 5 s of imports for each.

    subprocess.run([python(), "-m", "marin_rl", "status", "demo"])

It is the path of a program that is called as Python is. Where it is asked for a command of marin-rl
or Prefect, a program by `-c`, or a script of this repository, a server that has imported what these
need forks a process for it; else it becomes Python. A fork has the folder, environment and standard
streams of its caller, and calls the same program as its `sys.executable`, so that what it starts is
forked too. Signals that reach the program are passed on, an end by SIGKILL as well, and it ends as
the fork does. What a start adds, tests of single commands and of the wheel show.

The program imports of the standard library what a start needs; the server this file.
"""

import array
import atexit
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from support.preloading import COMMANDS, close_down, code_of, import_for_forks

REPOSITORY = Path(__file__).resolve().parents[2]
START_PYTHON = "MARIN_RL_TEST_PYTHON"  # what a fork takes for Python, in place of the program
TESTS = REPOSITORY / "tests"
# A worker of a pool starts a supervisor for each flow run, which becomes the flow run's engine.
SUPERVISOR = "prefect.runner._workspace_supervisor"
MODULES = ("marin_rl", "prefect", "prefect.engine", SUPERVISOR, "flows.stack")
ROOMS = (
    *COMMANDS,
    "flows.stages",
    "prefect.cli",
    "prefect.flow_engine",
    SUPERVISOR,
    "prefect.server.api.server",
    "prefect.workers.process",
    "uvicorn.protocols.http.auto",
)

# The program: it must start in a moment, so it imports little and no site.
PROGRAM = '''#!{python} -ISs
import array, json, os, signal, socket, sys

def forked(words):
    """Return True for what the server forks."""
    while words and words[0] in ("-P", "-u"):
        words = words[1:]
    if words[:1] == ["-m"]:
        return len(words) > 1 and words[1] in {modules!r}
    if words[:1] == ["-c"]:
        return "isolated" not in words[1]
    return bool(words) and os.path.abspath(words[0]).startswith({scripts!r})

words = sys.argv[1:]
if not forked(words):
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    order = dict(words=words, folder=os.getcwd(), environment=dict(os.environ))
    order["cores"] = sorted(os.sched_getaffinity(0))
    text = json.dumps(order).encode()
    streams = array.array("i", [0, 1, 2])
    given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
    server.sendmsg([len(text).to_bytes(8, "big")], given)
    server.sendall(text)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # pipes of the caller end with the fork
        os.dup2(nothing, stream)
    code = int(server.recv(16) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
'''


@cache
def python() -> str:
    """The program's path: its server begins with the first call, and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = folder / "python"
    scripts = (f"{REPOSITORY}/flows/", f"{REPOSITORY}/bench/")
    named = {"python": sys.executable, "modules": MODULES, "scripts": scripts}
    program.write_text(PROGRAM.format(address=str(folder / "forks"), **named), encoding="utf-8")
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{TESTS}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    _servers.append(server)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return str(program)


_servers: list[subprocess.Popen[bytes]] = []  # which end when their standard input does


def fork_of(program: int) -> int:
    """The process that was forked for a program, by ids; the program's own where it became Python.

    A program of which the server has not heard yet is waited for.
    """
    heard = Path(python()).with_name(str(program))
    while not heard.exists() and _is_program(program):
        time.sleep(0.01)
    return int(heard.read_text(encoding="utf-8")) if heard.exists() else program


def _is_program(process: int) -> bool:
    """Return True for a process that is the program still, or about to be."""
    place = Path(f"/proc/{process}")
    try:
        words = (place / "cmdline").read_bytes().split(b"\0")
        state = (place / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    # A process has no words while it is executed, and once it has ended.
    return python().encode() in words or (words == [b""] and state not in "ZX")


class Forks:
    """The server: its connections, and the forks that live."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "forks"))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._begin)
        self._selector.register(0, selectors.EVENT_READ, self._end)
        self._living: dict[int, socket.socket] = {}
        self._goes_on = True

    def serve(self) -> None:
        """Fork until standard input ends, then kill what lives."""
        while self._goes_on:
            for key, _ in self._selector.select():
                key.data(key.fileobj)
        for process in self._living:
            os.kill(process, signal.SIGKILL)

    def _end(self, _: int) -> None:
        self._goes_on = False

    def _begin(self, listener: socket.socket) -> None:
        """Fork for a program that has connected."""
        caller, _ = listener.accept()
        order, streams = _received(caller)
        process = os.fork()
        if process == 0:
            listener.close()
            caller.close()
            for other in self._living.values():
                other.close()
            self._selector.close()
            _live(order, streams, str(self._folder / "python"))
        for stream in streams:
            os.close(stream)
        self._name(caller, process)
        self._living[process] = caller
        ended = os.pidfd_open(process)
        self._selector.register(caller, selectors.EVENT_READ, lambda _: self._signal(process))
        self._selector.register(ended, selectors.EVENT_READ, lambda _: self._wait(process, ended))

    def _name(self, caller: socket.socket, process: int) -> None:
        """Write down the fork of a program."""
        credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        program = int.from_bytes(credentials[:4], sys.byteorder)
        written = self._folder / f"{program}.new"
        written.write_text(str(process), encoding="utf-8")
        written.rename(self._folder / str(program))

    def _signal(self, process: int) -> None:
        """Pass on a signal; the program that was killed has its fork killed."""
        caller = self._living.get(process)
        if caller is None:
            return  # it has ended just now
        numbers = caller.recv(16)
        for number in numbers:
            os.kill(process, number)
        if not numbers:
            os.kill(process, signal.SIGKILL)
            self._selector.unregister(caller)

    def _wait(self, process: int, ended: int) -> None:
        """Tell a program how its fork has ended."""
        _, status = os.waitpid(process, 0)
        self._selector.unregister(ended)
        os.close(ended)
        caller = self._living.pop(process)
        if caller in self._selector.get_map():
            self._selector.unregister(caller)
            with suppress(BrokenPipeError):  # it was killed at the same moment
                caller.send(str(os.waitstatus_to_exitcode(status)).encode())
        caller.close()


def _received(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The order of a program, and its standard streams."""
    streams = array.array("i", [0, 0, 0])
    size, found, *_ = caller.recvmsg(8, socket.CMSG_SPACE(len(streams.tobytes())))
    streams = array.array("i", found[0][2])
    text, length = b"", int.from_bytes(size, "big")
    while len(text) < length:
        text += caller.recv(length - len(text))
    return json.loads(text), list(streams)


def _live(order: dict[str, Any], streams: list[int], program: str) -> None:
    """Body of a fork: what Python does with its words, and an end as Python's own.

    But what is imported is not taken apart, which takes a second.
    """
    for stream, given in enumerate(streams):
        os.dup2(given, stream)
        os.close(given)
    os.setsid()  # of its own as to Ctrl-C: the program passes it on
    os.sched_setaffinity(0, order["cores"])
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.executable = os.environ.pop(START_PYTHON, program)
    code = 1
    try:
        _read_settings_again()
        _run(order["words"])
        code = 0
    except SystemExit as end:
        code = code_of(end)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - it is what ends the process
        traceback.print_exc()
    finally:
        close_down()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _read_settings_again() -> None:
    """Read again what Prefect and JAX took from the environment and the folder on import."""
    importlib.import_module("prefect.context").refresh_global_settings_context()
    quick = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    importlib.import_module("jax").config.update("jax_disable_most_optimizations", quick)


def _run(words: list[str]) -> None:
    """Run a module, a program or a script as the words of a command line say."""
    here = True
    while words[0] in ("-P", "-u"):
        here = here and words[0] != "-P"
        words = words[1:]
    # A checkout of links is this repository, whose modules are imported already.
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = paths
    if words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = words[1:]
        if "." in words[1]:
            sys.modules.pop(words[1], None)  # it is run, as another module
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        if here:
            sys.path.insert(0, str(Path(words[0]).parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def main(folder: str) -> None:
    """Import, then fork."""
    del sys.path[0]  # this folder, whose modules have plain names
    sys.path.remove(str(TESTS))  # and tests, which programs do not see
    import_for_forks(ROOMS)
    assert threading.active_count() == 1, threading.enumerate()
    forks = Forks(Path(folder))
    print("ready", flush=True)
    forks.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])

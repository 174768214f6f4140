"""`marin-rl launch`: a command as several processes on this machine, under a small parent.

It sets the variables by which the processes find one another (`hosts`), marks the lines that others
than process 0 print, and ends all with the first that fails.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import IO, Annotated, Any

import typer

from marin_rl.commands.hosts import COORDINATOR, PROCESS_ID, PROCESSES
from marin_rl.commands.options import err
from marin_rl.errors import QUIET, ConfigError
from marin_rl.isolated.supervisor import LINUX, end_with
from marin_rl.machine import computes_on_host

# From the first end to SIGTERM for the others, where it is a failure or not, and to SIGKILL.
GRACE_S, END_S = 3.0, 25.0
LAUNCHED = ("run", "sft", "reward-model", "preference", "doctor")


def launch(
    command: Annotated[list[str], typer.Argument(help="such as: run configs/debug.yaml")],
    *,
    processes: Annotated[int, typer.Option("-n", min=1, max=1024, help="number of processes")],
    devices_per_process: Annotated[
        int | None, typer.Option("--devices-per-process", min=1, help="GPUs, or parts of the CPU")
    ] = None,
) -> None:
    """Start a command as several processes on this machine.

    Output of process 0 is as that of the command; lines of the others have their number, and are on
    standard error. All end with the first that fails, and its exit code is that of this command.
    """
    if command[0] not in LAUNCHED:
        raise ConfigError(
            f"launch: expected one of the commands {', '.join(LAUNCHED)}, found {command[0]!r}"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
    children = list[subprocess.Popen[bytes]]()
    python = sys.executable, "-P"  # no package of this folder
    for number in range(processes):
        variables = {COORDINATOR: place, PROCESSES: str(processes), PROCESS_ID: str(number)}
        children.append(
            subprocess.Popen(
                [*python, *(("-X", QUIET) if number else ()), "-m", "marin_rl", *command],
                env={**os.environ, **variables, **_devices(number, devices_per_process)},
                stdout=subprocess.PIPE if number else None,
                stderr=subprocess.STDOUT if number else None,
                stdin=subprocess.DEVNULL if number else None,
                start_new_session=LINUX,  # Ctrl-C reaches process 0 by this one
                preexec_fn=partial(end_with, os.getpid()),
            )
        )
    for number, child in enumerate(children):
        threading.Thread(target=_await, args=(number, child, ended), daemon=True).start()
    raise typer.Exit(_Watch(children, ended).code())


def _devices(number: int, count: int | None) -> dict[str, str]:
    """Environment by which a process has `count` devices of its own. Raises ConfigError."""
    if computes_on_host():
        flag = f"--xla_force_host_platform_device_count={count}"
        return {} if count is None else {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}"}
    if count is None:
        raise ConfigError("launch: expected --devices-per-process, the number of GPUs of each")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    own = range(number * count, (number + 1) * count)
    if visible and own[-1] >= len(visible):
        raise ConfigError(
            f"launch: process {number} would have GPUs {own[0]} to {own[-1]} of the {len(visible)} "
            "in CUDA_VISIBLE_DEVICES: expected fewer processes or devices"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[i] if visible else str(i) for i in own)}


def _await(
    number: int, child: "subprocess.Popen[bytes]", ended: "SimpleQueue[tuple[int, int]]"
) -> None:
    output: IO[bytes] | None = child.stdout
    for line in output or ():
        sys.stderr.buffer.write(f"[{number}] ".encode() + line)
        sys.stderr.buffer.flush()
    ended.put((number, child.wait()))


class _Watch:
    """The wait for all children, which end with the first that ends."""

    def __init__(
        self, children: "list[subprocess.Popen[bytes]]", ended: "SimpleQueue[tuple[int, int]]"
    ) -> None:
        self._children, self._ended = children, ended
        self._running, self._asked = set(range(len(children))), False
        self._steps: list[tuple[float, signal.Signals]] = []
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, self._forward)

    def _forward(self, sign: int, _: Any) -> None:
        """Ask process 0 to end, with which the others end; at the second time, kill all."""
        with suppress(OSError):
            for child in self._children if self._asked else self._children[:1]:
                child.send_signal(signal.SIGKILL if self._asked else sign)
        self._asked = True

    def code(self) -> int:
        """Wait for all ends; return the exit code of the first failure, 128 + n for signal n."""
        ends = dict[int, int]()
        while self._running:
            timeout_s = max(self._steps[0][0] - time.monotonic(), 0.0) if self._steps else None
            try:
                number, status = self._ended.get(timeout=timeout_s)
            except Empty:
                _, sign = self._steps.pop(0)
                for other in self._running:
                    self._children[other].send_signal(sign)
                continue
            if not ends:
                # Where all end well, process 0 is the last: it reports.
                asked = time.monotonic() + (GRACE_S if status else END_S)
                self._steps = [(asked, signal.SIGTERM), (asked + END_S, signal.SIGKILL)]
            self._running.discard(number)
            ends[number] = status
        # In the order of the ends: what failed later may have failed for the first.
        failures = [(number, status) for number, status in ends.items() if status]
        if not failures:
            return 0
        number, status = failures[0]
        if not self._asked and (status < 0 or status != ends[0]):  # else process 0 has told it
            how = f"ended with exit code {status}"
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            err.print(f"process {number} of {len(self._children)} {how}", markup=False)
        return status if status > 0 else 128 - status

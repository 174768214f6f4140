"""A sandbox for programs that a model wrote: no network, no host files, limits on everything.

`Sandbox.run` starts one program in namespaces of its own (bubblewrap), reads what it prints within
a bound, and ends it with all that it started. A program reports nothing but text and an exit
status; what these are compared with stays outside. Leaves out the
command line (`sandbox_command`), the filter of system calls (`seccomp`), the watch over a run
(`sandbox_watch`) and the test that all of it holds on this machine (`sandbox_check`).
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from marin_rl.errors import InputError
from marin_rl.isolated.sandbox_command import (
    ENVIRONMENT,
    WORK,
    Descriptors,
    SandboxLimits,
    bubblewrap,
    interpreter_of,
    rooms,
)
from marin_rl.isolated.sandbox_watch import (
    Limit,
    Watched,
    await_end,
    discarded_on_error,
    watch,
)
from marin_rl.isolated.seccomp import seccomp_filter

Mode = Literal["bubblewrap", "rlimits_only"]

_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW, WRITE of linux/fcntl.h
_ADD_SEALS = 1033
_STATUS_BYTES = 1 << 16
_START_TIMEOUT_S = 60.0  # until the namespaces are made, which takes milliseconds
# Adopts what a program without walls leaves, and ends it; its environment has no secret either.
_SUPERVISED = (sys.executable, "-I", "-S", str(Path(__file__).with_name("descendants.py")))
_SIGNALS = 128  # an exit status above it says that a signal ended the program


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """End of a program: its exit status, or the limit that ended it, and what it printed.

    The exit status of a program that a signal ended is 128 and the signal's number.
    """

    exit_status: int | None
    limit: Limit | None
    stdout: bytes
    stderr: bytes
    wall_s: float

    @property
    def succeeded(self) -> bool:
        """True for exit status 0 within all limits."""
        return self.limit is None and self.exit_status == 0

    @property
    def how(self) -> str:
        """Description of the end, for people."""
        if self.limit is not None:
            return f"exceeded its limit of {self.limit}"
        status = self.exit_status or 0
        return f"signal {status - _SIGNALS}" if status > _SIGNALS else f"exit status {status}"

    def printed_after(self, number: str) -> str | None:
        """Standard output of a success behind a number that it begins with, and has only there.

        None for any other: a number drawn for the run tells it from what a program prints itself.
        """
        text = self.stdout.decode(errors="replace")
        if not self.succeeded or text.count(number) != 1 or not text.startswith(number):
            return None
        return text.removeprefix(number)


class Sandbox:
    """Runs programs one after the other, each in a new sandbox. Thread safe.

    With the mode `rlimits_only` a program has limits and no walls: it has the rights of this user.
    `interpreter` is the Python of programs, by default this one without its packages. Raises
    ConfigError where that is none.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        mode: Mode = "bubblewrap",
        interpreter: str | None = None,
    ) -> None:
        self.limits = SandboxLimits() if limits is None else limits
        self.mode: Mode = mode
        self.interpreter = interpreter_of(interpreter)
        self.python = self.interpreter.path  # inside as outside
        self._filter = seccomp_filter()

    @property
    def filters_calls(self) -> bool:
        """True where system calls are filtered; not on machines whose numbers are not known."""
        return self.mode == "bubblewrap" and self._filter is not None

    def run(
        self,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        wall_s: float | None = None,
        workspace: Path | None = None,
    ) -> SandboxResult:
        """Run a program and return how it ended.

        `files` lie in the folder that it starts in, `wall_s` may shorten the limit, and a
        `workspace` is a folder of this machine in place of an empty one. Raises InputError where
        no sandbox can be made.
        """
        began = time.monotonic()
        seconds = self.limits.wall_s if wall_s is None else min(wall_s, self.limits.wall_s)
        run = self._isolated if self.mode == "bubblewrap" else self._limited
        with ExitStack() as stack:
            source = stack.enter_context(_sealed(stdin))
            watched, status = run(stack, arguments, source, files or {}, workspace, seconds)
        limit = watched.limit
        if limit is None and status == _SIGNALS + signal.SIGXCPU:
            limit = "CPU time"
        return SandboxResult(
            exit_status=status,
            limit=limit,
            stdout=watched.stdout,
            stderr=watched.stderr,
            wall_s=time.monotonic() - began,
        )

    def _isolated(
        self,
        stack: ExitStack,
        arguments: Sequence[str],
        stdin: int,
        files: Mapping[str, bytes],
        workspace: Path | None,
        wall_s: float,
    ) -> tuple[Watched, int | None]:
        status, reported = os.pipe()
        stack.callback(os.close, status)
        release, releasing = os.pipe()
        stack.callback(os.close, releasing)
        with ExitStack() as theirs:
            theirs.callback(os.close, reported)
            theirs.callback(os.close, release)
            filtered = None
            if self._filter is not None:
                filtered = theirs.enter_context(_sealed(self._filter))
            descriptors = Descriptors(
                status=reported,
                release=release,
                seccomp=filtered,
                files={name: theirs.enter_context(_sealed(data)) for name, data in files.items()},
            )
            options, command = bubblewrap(
                arguments, self.limits, self.interpreter, descriptors, workspace
            )
            described = theirs.enter_context(_sealed(b"\0".join(map(os.fsencode, options))))
            command[1:1] = ["--args", str(described)]
            inherited = (*descriptors.all, described)
            process = _started(command, stdin, ENVIRONMENT, inherited)
            theirs.close()
            with discarded_on_error(process):
                child = self._limit(status)
                with contextlib.suppress(BrokenPipeError):  # it has ended, and says why below
                    os.write(releasing, b"x")
        places = () if child is None else rooms(workspace)
        seen = [Path(f"/proc/{child}/root{place}") for place in places]
        watched = watch(process, self.limits, wall_s, workspace, seen)
        if child is not None:
            await_end(child)
        os.set_blocking(status, False)
        report = b""  # the rest of it, as far as it is there
        with contextlib.suppress(BlockingIOError):
            report = os.read(status, _STATUS_BYTES)
        exit_status = _facts(report).get("exit-code")
        if exit_status is None and watched.limit is None:
            raise InputError(
                "no sandbox could be made: expected that bubblewrap starts a program, found "
                f"{watched.stderr.decode(errors='replace').strip()[-300:]!r}"
            )
        return watched, exit_status

    def _limit(self, status: int) -> int | None:
        """Limit the first process of a sandbox, which waits, and return its number.

        The program inherits the limits; a command that sets them would be one more to start.
        None where bubblewrap ended before. Raises InputError where the limits are refused.
        """
        if (child := _facts(_first_line(status)).get("child-pid")) is None:
            return None
        try:
            self.limits.impose(child)
        except ProcessLookupError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"no sandbox could be made: limits are refused: {error}") from error
        return child

    def _limited(
        self,
        stack: ExitStack,
        arguments: Sequence[str],
        stdin: int,
        files: Mapping[str, bytes],
        workspace: Path | None,
        wall_s: float,
    ) -> tuple[Watched, int | None]:
        folder = workspace or Path(tempfile.mkdtemp(prefix="marin-rl-sandbox-"))
        if workspace is None:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        environment = ENVIRONMENT | {"HOME": str(folder), "TMPDIR": str(folder)}
        command = [*_SUPERVISED, *self.limits.prefix(), *arguments]
        process = _started(command, stdin, environment, (), folder)
        watched = watch(process, self.limits, wall_s, workspace, end_by=signal.SIGTERM)
        code = process.returncode
        return watched, _SIGNALS - code if code < 0 else code


def _started(
    command: Sequence[str],
    stdin: int,
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command. Raises InputError where it is not there."""
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd=folder,
            pass_fds=descriptors,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise InputError(f"no sandbox could be made: {command[0]}: {error}") from error


@contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    """A file in memory at its beginning, for others to read and not to change."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def _first_line(status: int) -> bytes:
    """Wait for a line of bubblewrap's report; empty where bubblewrap ended without one.

    Raises InputError where it says nothing for too long.
    """
    poll = select.poll()
    poll.register(status, select.POLLIN)
    said = b""
    while b"\n" not in said:
        if not poll.poll(_START_TIMEOUT_S * 1000):
            raise InputError(
                f"no sandbox could be made: bubblewrap did not start in {_START_TIMEOUT_S:.0f} s"
            )
        if not (more := os.read(status, _STATUS_BYTES)):
            return b""
        said += more
    return said


def _facts(report: bytes) -> dict[str, int]:
    facts: dict[str, int] = {}
    for line in report.splitlines():
        with contextlib.suppress(ValueError):
            facts |= json.loads(line)
    return facts


__all__ = ["WORK", "Mode", "Sandbox", "SandboxLimits", "SandboxResult"]

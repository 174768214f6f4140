"""A sandbox for programs that a model wrote: no network, no host files, limits on everything.

`Sandbox.run` starts one program in namespaces of its own (bubblewrap), reads what it prints within
a bound, and ends it with all that it started. A program reports nothing but text and an exit
status; what these are compared with stays outside. `check_sandbox` proves the walls here. Leaves
out the command line (`sandbox_command`) and the watch over a run (`sandbox_watch`).
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from marin_rl.errors import ConfigError, InputError
from marin_rl.isolated.sandbox_command import (
    ENVIRONMENT,
    SandboxLimits,
    bubblewrap,
    homes,
    interpreter_of,
    mounted,
    rooms,
    seccomp_filter,
)
from marin_rl.isolated.sandbox_watch import Limit, Watched, end_namespace, watch
from marin_rl.isolated.supervisor import supervised

Mode = Literal["bubblewrap", "rlimits_only"]

_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW, WRITE of linux/fcntl.h
_ADD_SEALS = 1033
_STATUS_BYTES = 1 << 16
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
        return self.limit is None and self.exit_status == 0

    @property
    def how(self) -> str:
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
        with ExitStack() as stack:
            program = _Program(arguments, stack.enter_context(_sealed(stdin)), files or {}, seconds)
            if self.mode == "bubblewrap":
                watched, status = self._isolated(stack, program, workspace)
            else:
                assert workspace is None, "only programs behind walls work in a folder of others"
                watched, status = self._limited(stack, program)
        limit, stdout, stderr = watched
        if limit is None and status == _SIGNALS + signal.SIGXCPU:
            limit = "CPU time"
        return SandboxResult(
            exit_status=status,
            limit=limit,
            stdout=stdout,
            stderr=stderr,
            wall_s=time.monotonic() - began,
        )

    def _isolated(
        self, stack: ExitStack, program: "_Program", workspace: Path | None
    ) -> tuple[Watched, int | None]:
        status, reported = os.pipe()
        stack.callback(os.close, status)
        with ExitStack() as theirs:
            theirs.callback(os.close, reported)
            sealed = lambda data: theirs.enter_context(_sealed(data))
            filtered = None if self._filter is None else sealed(self._filter)
            inputs = {name: sealed(data) for name, data in program.files.items()}
            options, command = bubblewrap(
                program.arguments,
                self.limits,
                self.interpreter,
                workspace,
                status=reported,
                seccomp=filtered,
                files=inputs,
            )
            described = sealed(b"\0".join(map(os.fsencode, options)))
            command[1:1] = ["--args", str(described)]
            inherited = [reported, described, *inputs.values()]
            inherited += [] if filtered is None else [filtered]
            process = _started(command, program.stdin, ENVIRONMENT, inherited)
        watched = watch(process, self.limits, program.wall_s, workspace, rooms(workspace))
        os.set_blocking(status, False)
        facts = dict[str, int]()
        with contextlib.suppress(BlockingIOError, ValueError):  # cut off where it was killed
            for line in os.read(status, _STATUS_BYTES).splitlines():
                facts |= json.loads(line)
        if (first := facts.get("child-pid")) is not None:
            end_namespace(first)
        exit_status = facts.get("exit-code")
        if exit_status is None and watched[0] is None:
            raise InputError(
                "no sandbox could be made: expected that bubblewrap starts a program, found "
                f"{watched[2].decode(errors='replace').strip()[-300:]!r}"
            )
        return watched, exit_status

    def _limited(self, stack: ExitStack, program: "_Program") -> tuple[Watched, int]:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="marin-rl-sandbox-", ignore_cleanup_errors=True)
        )
        for name, data in program.files.items():
            Path(folder, name).write_bytes(data)
        environment = ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
        command = supervised([*self.limits.prefix(), *program.arguments])
        process = _started(command, program.stdin, environment, (), folder)
        watched = watch(process, self.limits, program.wall_s, end_by=signal.SIGTERM)
        code = process.returncode
        return watched, _SIGNALS - code if code < 0 else code


@dataclass(frozen=True, slots=True)
class _Program:
    arguments: Sequence[str]
    stdin: int
    files: Mapping[str, bytes]
    wall_s: float


def _started(
    command: Sequence[str],
    stdin: int,
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    folder: str | None = None,
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


# The self-test: a program inside reports what it sees, before anything relies on the walls.

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora, RHEL)"
ALTERNATIVE = (
    "or set environment.options.sandbox: rlimits_only, with which programs that a model writes "
    "have limits and the rights of this user"
)
_CHECK_TIMEOUT_S = 60.0

# What a program sees, written so that it does not fail where a wall is missing.
_PROBE = """
import json, os, resource, sys
host_file, nonce, homes, *kinds = sys.argv[1:]
def fails(call, *arguments):
    try: call(*arguments)
    except OSError: return True
    return False
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
facts = {
    "user": os.getuid(),
    "capabilities": sum(int(status["Cap" + kind], 16) for kind in ("Eff", "Prm", "Bnd")),
    "no_new_privileges": status["NoNewPrivs"].strip() == "1",
    "calls_are_filtered": status["Seccomp"].strip() == "2",
    "limits": [resource.getrlimit(getattr(resource, kind))[0] for kind in kinds],
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "interfaces": interfaces,
    "host_file_is_there": os.path.exists(host_file),
    "mounts": [line.split()[4] for line in open("/proc/self/mountinfo")],
    "homes": {home: sorted(os.listdir(home)) for home in json.loads(homes) if os.path.isdir(home)},
    "system_is_read_only": fails(open, "/usr/.marin-rl", "w") and fails(open, "/.marin-rl", "w"),
    "work_can_be_written": not fails(open, "probe", "w"),
}
print(nonce + json.dumps(facts))
"""


@lru_cache(maxsize=8)
def check_sandbox(mode: Mode, interpreter: str | None = None) -> None:
    """Run a program in a sandbox and compare what it sees with what it may see.

    Raises ConfigError that says what to install or to set.
    """
    needed = ["bwrap", "prlimit", "setpriv"] if mode == "bubblewrap" else ["prlimit"]
    if missing := [name for name in needed if shutil.which(name) is None]:
        package = INSTALL if "bwrap" in missing else "util-linux"
        raise ConfigError(
            f"the sandbox needs {', '.join(missing)}: install it, {package}; {ALTERNATIVE}"
        )
    sandbox = Sandbox(mode=mode, interpreter=interpreter)
    nonce = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile() as host_file:
        seen = json.dumps([str(home) for home in homes()])
        arguments = [sandbox.python, "-I", "-S", "-c", _PROBE, host_file.name, nonce, seen]
        arguments += [f"RLIMIT_{name.upper()}" for name in sandbox.limits.by_name()]
        try:
            result = sandbox.run(arguments, wall_s=_CHECK_TIMEOUT_S)
        except InputError as error:
            raise ConfigError(f"{error}. {_hint()}; {ALTERNATIVE}") from error
    text = result.stdout.decode(errors="replace")
    if not (result.succeeded and text.startswith(nonce)):
        said = result.stderr.decode(errors="replace").strip()[-300:]
        raise ConfigError(
            f"expected that {sandbox.python} runs in the sandbox, found {result.how}: {said!r}. "
            "Set environment.options.interpreter to a Python that every user can read, such as "
            f"/usr/bin/python3; {ALTERNATIVE}"
        )
    if mode == "rlimits_only":
        return
    facts = json.loads(text.removeprefix(nonce))
    if failed := [name for name, holds in _expected(facts, sandbox).items() if not holds]:
        raise ConfigError(
            f"the sandbox does not hold on this machine: {', '.join(failed)}; a program in it "
            f"reports {json.dumps(facts)}. {_hint()}; {ALTERNATIVE}"
        )


def _expected(facts: Mapping[str, Any], sandbox: Sandbox) -> dict[str, bool]:
    """Return whether each wall holds, by its name."""
    interpreter = sandbox.interpreter
    shown = [Path(place) for place in mounted(interpreter)]
    on_the_way = {*interpreter.folders, *interpreter.links}
    return {
        "user": facts["user"] != 0,
        "capabilities": facts["capabilities"] == 0,
        "no_new_privileges": facts["no_new_privileges"],
        # not on machines whose system calls have numbers that are not known
        "calls_are_filtered": facts["calls_are_filtered"] == (seccomp_filter() is not None),
        "limits": facts["limits"] == [soft for soft, _ in sandbox.limits.by_name().values()],
        # itself, the first of its namespace, and no other
        "processes": facts["processes"] <= 2,
        "interfaces": facts["interfaces"] == ["lo"],
        "host_file_is_there": not facts["host_file_is_there"],
        "mounts": all(
            mount == "/" or any(Path(mount).is_relative_to(place) for place in shown)
            for mount in facts["mounts"]
        ),
        # of a home no more than what leads to the interpreter
        "homes": all(
            any(Path(place).is_relative_to(Path(home, name)) for place in on_the_way)
            for home, names in facts["homes"].items()
            for name in names
        ),
        "system_is_read_only": facts["system_is_read_only"],
        "work_can_be_written": facts["work_can_be_written"],
    }


def _hint() -> str:
    """Return what keeps bubblewrap from working, most often."""
    closed = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if closed.exists() and closed.read_text().strip() == "1":
        return "AppArmor keeps users from namespaces here: give bwrap a profile that allows them"
    return (
        "In a container allow namespaces, such as by docker run --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --cap-add SYS_ADMIN"
    )

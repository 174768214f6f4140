"""Command lines of sandboxed programs: bubblewrap's, the resource limits, and the interpreter.

A program sees the system's `/usr` and one Python installation, both read only, a fresh `/proc` and
`/dev`, and an empty folder of limited size in which it starts. Leaves out starting and watching it
(`sandbox`) and the system calls that it may use (`seccomp`).

bubblewrap run by root makes the namespaces with root's rights, so that a Python in root's home can
be shown, and the program then becomes a user of its own without capabilities. Run by a user, it
makes a user namespace, which the program cannot repeat.
"""

import itertools
import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marin_rl.errors import ConfigError

WORK = "/work"  # working directory of a program, and its only room on disk
USER = 65534  # the program's user where bubblewrap is run by a user
_OWN_USERS = 2_000_000_000  # users of programs where it is run by root; no system gives them away
_USERS_PER_PROCESS = 64
_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives")

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}

_turns = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one run: seconds, bytes, and counts.

    `memory_bytes` limits each process and all of them together, `disk_bytes` all files together and
    each file. CPU time is that of one process, by the whole second; `output_bytes` that of standard
    output and of standard error each. `workspace_bytes` limits the folder of this machine that a
    program writes to, if it has one; it is counted every second.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 << 20
    disk_bytes: int = 32 << 20
    workspace_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    processes: int = 32
    files: int = 64

    def prefix(self) -> list[str]:
        """Return the command that sets these limits and becomes the one after it."""
        options = [f"--{name}={soft}:{hard}" for name, (soft, hard) in self._by_name().items()]
        return ["prlimit", *options, "--"]

    def impose(self, process_id: int) -> None:
        """Set these limits for a process and those that it starts.

        Raises OSError or ValueError where that is refused.
        """
        for kind, limits in self.by_kind().items():
            resource.prlimit(process_id, kind, limits)

    def by_kind(self) -> dict[int, tuple[int, int]]:
        """Return the soft and the hard limit by the number of `resource.RLIMIT_*`."""
        return {
            getattr(resource, f"RLIMIT_{name.upper()}"): limits
            for name, limits in self._by_name().items()
        }

    def _by_name(self) -> dict[str, tuple[int, int]]:
        """Return the soft and the hard limit by the kernel's name."""
        equal = {
            "data": self.memory_bytes,
            "fsize": self.disk_bytes,
            "nproc": self.processes,
            "nofile": self.files,
            "core": 0,
            "msgqueue": 0,
            "memlock": 0,
        }
        # SIGXCPU, and SIGKILL a second later
        cpu = {"cpu": (self.cpu_s, self.cpu_s + 1)}
        return cpu | {name: (limit, limit) for name, limit in equal.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python that programs run with, and the folders outside of `/usr` that belong to it."""

    path: str
    folders: tuple[str, ...]


def interpreter_of(path: str | None = None) -> Interpreter:
    """Return the Python at `path`, by default the one that runs this, without its packages.

    Raises ConfigError where there is none. A virtual environment brings its base along.
    """
    chosen = Path(os.path.realpath(sys.executable) if path is None else path)
    if not (chosen.is_absolute() and chosen.is_file() and os.access(chosen, os.X_OK)):
        raise ConfigError(f"expected the absolute path of a Python interpreter, found {path!r}")
    if own := [place for place in (WORK, "/tmp") if chosen.is_relative_to(place)]:
        raise ConfigError(
            f"expected a Python interpreter outside of {own[0]}, where programs have files of "
            f"their own, found {path!r}"
        )
    places = {chosen.parent.parent, chosen.resolve().parent.parent}
    folders = sorted(str(place) for place in places if not place.is_relative_to("/usr"))
    return Interpreter(path=str(chosen), folders=tuple(each for each in folders if each != "/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Open files that bubblewrap reads and writes, and the files of the program by their place.

    It reports to `status`, and starts the program once `release` can be read.
    """

    status: int
    release: int
    seccomp: int | None
    files: Mapping[str, int]

    @property
    def all(self) -> tuple[int, ...]:
        """Every descriptor that bubblewrap inherits."""
        own = () if self.seccomp is None else (self.seccomp,)
        return (self.status, self.release, *own, *self.files.values())


def bubblewrap(
    arguments: Sequence[str],
    limits: SandboxLimits,
    interpreter: Interpreter,
    descriptors: Descriptors,
    workspace: Path | None = None,
) -> list[str]:
    """Return the command line that runs `arguments` in a sandbox once its limits are imposed.

    `workspace` is a folder of this machine in place of an empty one; `/tmp` is apart from it then.
    """
    by_root = os.geteuid() == 0
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session"]
    command += ["--hostname", "sandbox", "--json-status-fd", str(descriptors.status)]
    command += ["--block-fd", str(descriptors.release)]
    if descriptors.seccomp is not None:
        command += ["--seccomp", str(descriptors.seccomp)]
    command += _namespaces(by_root)
    command += _system()
    for folder in interpreter.folders:
        command += _readable(folder)
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += _room("/dev/shm", limits.disk_bytes)
    if workspace is None:
        command += _room(WORK, limits.disk_bytes)
    else:
        command += ["--bind", str(workspace), WORK]
    for name, descriptor in descriptors.files.items():
        command += ["--perms", "0644", "--file", str(descriptor), f"{WORK}/{name}"]
    command += (
        ["--symlink", WORK, "/tmp"] if workspace is None else _room("/tmp", limits.disk_bytes)
    )
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    command += ["--chdir", WORK, "--"]
    if by_root:
        command += _as_own_user()
    return [*command, *arguments]


def _namespaces(by_root: bool) -> list[str]:  # noqa: FBT001 - of this module alone
    if by_root:
        names = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
        kept = [part for name in names for part in ("--cap-add", name)]
        separate = [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
        return [*separate, "--cap-drop", "ALL", *kept]
    who = ["--uid", str(USER), "--gid", str(USER)]
    return ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", *who]


def _as_own_user() -> list[str]:
    """Return the command that drops root's rights and becomes the one after it.

    Limits of processes count by user, so programs of one time are users of their own.
    """
    user = _OWN_USERS + os.getpid() * _USERS_PER_PROCESS + next(_turns) % _USERS_PER_PROCESS
    ids = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return ["setpriv", *ids, "--bounding-set=-all", "--inh-caps=-all", "--"]


def _system() -> list[str]:
    command = ["--ro-bind", "/usr", "/usr"]
    for name in _FOLDERS:
        place = Path("/", name)
        if place.is_symlink():
            command += ["--symlink", str(place.readlink()), str(place)]
        elif place.is_dir():
            command += ["--ro-bind", str(place), str(place)]
    command += ["--perms", "0755", "--dir", "/etc"]
    for place in _SETTINGS:
        command += ["--ro-bind-try", place, place]
    return command


def _readable(folder: str) -> list[str]:
    """Show a folder at its place; folders above it are empty and open to every user."""
    parents = [part for part in reversed(Path(folder).parents) if str(part) != "/"]
    made = [part for each in parents for part in ("--perms", "0755", "--dir", str(each))]
    return [*made, "--ro-bind", folder, folder]


def _room(place: str, size: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size), "--tmpfs", place]

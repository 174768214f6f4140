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
import pwd
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
_PARTS = ("bin", "include", "lib", "lib32", "lib64")  # of a Python in a folder with other things

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
    program writes to, if it has one; it is counted every second, and each entry as 4 KiB at least.
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
        options = [f"--{name}={soft}:{hard}" for name, (soft, hard) in self._by_name().items()]
        return ["prlimit", *options, "--"]

    def impose(self, process_id: int) -> None:
        """Set these limits for a process and its children.

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
    """A Python that programs run with, and what belongs to it outside of `/usr`.

    `folders` are shown; `links` lead to its path from outside of them, by place and target.
    """

    path: str
    folders: tuple[str, ...]
    links: Mapping[str, str]


def interpreter_of(path: str | None = None) -> Interpreter:
    """Return the Python at `path`, by default the one that runs this, without its packages.

    Raises ConfigError where there is none, or where more than a Python would be shown with it. A
    virtual environment brings its base along.
    """
    chosen = Path(os.path.realpath(sys.executable) if path is None else path)
    if not (chosen.is_absolute() and chosen.is_file() and os.access(chosen, os.X_OK)):
        raise ConfigError(f"expected the absolute path of a Python interpreter, found {path!r}")
    if own := [place for place in (WORK, "/tmp") if chosen.is_relative_to(place)]:
        raise ConfigError(
            f"expected a Python interpreter outside of {own[0]}, where programs have files of "
            f"their own, found {path!r}"
        )
    prefixes = {chosen.resolve().parent.parent}
    if (settings := chosen.parent.parent / "pyvenv.cfg").is_file():
        prefixes.add(settings.parent)
        for line in settings.read_text(errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home" and Path(value.strip()).is_dir():  # the base Python
                prefixes.add(Path(value.strip()).resolve().parent)
    folders = sorted(str(folder) for prefix in prefixes for folder in _shown(prefix, chosen))
    links = {
        place: target
        for place, target in _links(chosen).items()
        if not any(
            Path(place).is_relative_to(each) for each in (*folders, "/usr", *_system_folders())
        )
    }
    return Interpreter(path=str(chosen), folders=tuple(folders), links=links)


def _shown(prefix: Path, chosen: Path) -> list[Path]:
    """Return the folders of a prefix that a program sees.

    A prefix may be a folder that holds other things too, so only the parts of a Python are shown of
    it, and nothing of a home. Raises ConfigError.
    """
    if prefix.is_relative_to("/usr") or prefix == Path("/"):
        return []
    if not any(prefix.glob("lib*/python3*")):
        raise ConfigError(
            f"interpreter {chosen}: expected a Python with its library in {prefix}/lib, found "
            "none; name the file that sys.executable is, such as that of a virtual environment"
        )
    if any(home.is_relative_to(prefix) for home in homes()):
        raise ConfigError(
            f"interpreter {chosen}: expected a Python with a folder of its own, found one in "
            f"{prefix}, which holds a home: make a virtual environment, {chosen} -m venv FOLDER"
        )
    if (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir():
        return [prefix]
    return [place for name in _PARTS if (place := prefix / name).is_dir()]


def homes() -> set[Path]:
    """Return the homes of this user and of others who log in."""
    people = [user.pw_dir for user in pwd.getpwall() if user.pw_uid in (0, os.geteuid())]
    people += [user.pw_dir for user in pwd.getpwall() if 1000 <= user.pw_uid < 60_000]
    named = {Path(place).resolve() for place in (*people, Path("~").expanduser())}
    return {place for place in named if place.is_dir() and place != Path("/")}


def _links(path: Path) -> dict[str, str]:
    """Return the links that the kernel follows to a file, by place and target."""
    links: dict[str, str] = {}
    way, waiting = Path("/"), list(reversed(path.parts[1:]))
    while waiting:
        place = way.parent if (part := waiting.pop()) == ".." else way / part
        if not place.is_symlink() or str(place) in links:
            way = place
            continue
        target = links[str(place)] = str(place.readlink())
        way = Path("/") if target.startswith("/") else way
        waiting += [each for each in reversed(target.split("/")) if each not in ("", ".")]
    return links


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
        own = () if self.seccomp is None else (self.seccomp,)
        return (self.status, self.release, *own, *self.files.values())


def bubblewrap(
    arguments: Sequence[str],
    limits: SandboxLimits,
    interpreter: Interpreter,
    descriptors: Descriptors,
    workspace: Path | None = None,
) -> tuple[list[str], list[str]]:
    """Return bubblewrap's options, and the command line that runs `arguments` with them.

    The options go by a descriptor: a program can read the command line, and they name places of
    this machine. `workspace` is a folder of it in place of an empty one; `/tmp` is apart from it
    then. The program starts once its limits are imposed.
    """
    by_root = os.geteuid() == 0
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--"]
    options = ["--hostname", "sandbox", "--json-status-fd", str(descriptors.status)]
    options += ["--block-fd", str(descriptors.release)]
    if descriptors.seccomp is not None:
        options += ["--seccomp", str(descriptors.seccomp)]
    options += _namespaces(by_root)
    options += _system()
    for folder in interpreter.folders:
        options += [*_reached(folder), "--ro-bind", folder, folder]
    for place, target in interpreter.links.items():
        options += [*_reached(place), "--symlink", target, place]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for place in rooms(workspace):
        options += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", place]
    if workspace is not None:
        options += ["--bind", str(workspace), WORK]
    for name, descriptor in descriptors.files.items():
        options += ["--perms", "0644", "--file", str(descriptor), f"{WORK}/{name}"]
    if workspace is None:
        options += ["--symlink", WORK, "/tmp"]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]
    options += ["--chdir", WORK]
    return options, [*command, *(_as_own_user() if by_root else []), *arguments]


def rooms(workspace: Path | None) -> tuple[str, str]:
    return ("/dev/shm", WORK if workspace is None else "/tmp")


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


def _system_folders() -> list[str]:
    """Return the folders of the system that programs need next to `/usr`, or links to it."""
    return [place for name in _FOLDERS if (place := f"/{name}") and Path(place).exists()]


def _system() -> list[str]:
    command = ["--ro-bind", "/usr", "/usr"]
    for place in _system_folders():
        if Path(place).is_symlink():
            command += ["--symlink", str(Path(place).readlink()), place]
        else:
            command += ["--ro-bind", place, place]
    command += ["--perms", "0755", "--dir", "/etc"]
    for place in _SETTINGS:
        command += ["--ro-bind-try", place, place]
    return command


def mounted(interpreter: Interpreter) -> tuple[str, ...]:
    """Return the places at or below which a program may see a file system, besides its root."""
    return ("/usr", "/proc", "/dev", WORK, *_SETTINGS, *_system_folders(), *interpreter.folders)


def _reached(place: str) -> list[str]:
    """Make the folders above a place, empty and open to every user."""
    parents = [part for part in reversed(Path(place).parents) if str(part) != "/"]
    return [part for each in parents for part in ("--perms", "0755", "--dir", str(each))]

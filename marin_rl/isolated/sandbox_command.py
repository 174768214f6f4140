"""Command lines of sandboxed programs: bubblewrap's, the resource limits, and the interpreter.

A program sees the system's `/usr` and one Python installation, both read only, a fresh `/proc` and
`/dev`, and an empty folder of limited size in which it starts; a seccomp filter takes away system
calls that it has no use for. Leaves out starting it (`sandbox`) and watching it (`sandbox_watch`).

bubblewrap run by root makes the namespaces with root's rights, so that a Python in root's home can
be shown, and the program then becomes a user of its own without capabilities. Run by a user, it
makes a user namespace, which the program cannot repeat.
"""

import errno
import itertools
import os
import platform
import pwd
import resource
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marin_rl.errors import ConfigError, InputError

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

    def by_name(self) -> dict[str, tuple[int, int]]:
        """Return the soft and the hard limit by the kernel's name, such as `nofile`."""
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

    def prefix(self) -> list[str]:
        """Command line that sets these limits. InputError where this process may not."""
        limits = self.by_name()
        for name, (_, hard) in limits.items():
            _, most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
            if hard > most != resource.RLIM_INFINITY:
                raise InputError(
                    f"no sandbox could be made: limits are refused: {name} {hard}, and this "
                    f"process has at most {most}"
                )
        options = [f"--{name}={soft}:{hard}" for name, (soft, hard) in limits.items()]
        return ["prlimit", *options, "--"]


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


def bubblewrap(
    arguments: Sequence[str],
    limits: SandboxLimits,
    interpreter: Interpreter,
    workspace: Path | None,
    *,
    status: int,
    seccomp: int | None,
    files: Mapping[str, int],
) -> tuple[list[str], list[str]]:
    """Return bubblewrap's options, and the command line that runs `arguments` with them.

    Of open files it reports to `status`, and reads its filter and the program's `files`. The
    options go by a descriptor: a program can read the command line, and they name places of
    this machine. `workspace` is a folder of it in place of an empty one; `/tmp` is apart from it
    then. Raises InputError where the limits are refused.
    """
    by_root = os.geteuid() == 0
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--"]
    command += [*limits.prefix(), *(_as_own_user() if by_root else []), *arguments]
    options = ["--hostname", "sandbox", "--json-status-fd", str(status)]
    if seccomp is not None:
        options += ["--seccomp", str(seccomp)]
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
    for name, descriptor in files.items():
        options += ["--perms", "0644", "--file", str(descriptor), f"{WORK}/{name}"]
    if workspace is None:
        options += ["--symlink", WORK, "/tmp"]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*options, "--chdir", WORK], command


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


# The seccomp filter, as classic BPF for x86-64 and 64-bit ARM without a library; numbers are those
# of the kernel's `unistd.h`. It is a second line: namespaces, missing
# capabilities and resource limits hold without it. It takes away new namespaces, mounts, tracing,
# keys, BPF, io_uring, memory outside of any limit (`memfd_create`, System V), sockets other than IP
# and Unix ones (vsock has no namespace), and typing into terminals.

# From linux/bpf_common.h: opcodes of the four instructions that are used.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# From linux/seccomp.h: what a filter returns, and offsets into the data that it reads.
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_NAMESPACES = 0x7E020000  # CLONE_NEW* of linux/sched.h, without NEWTIME, which clone cannot take
_X32 = 0x40000000  # numbers of x86-64's second ABI begin here
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Call numbers on x86-64 and on 64-bit ARM; None if the architecture lacks the call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioperm": (173, None), "iopl": (172, None), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "mbind": (237, 235), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "modify_ldt": (154, None), "mount": (165, 40),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239),
    "msgget": (68, 186), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218), "semget": (64, 190),
    "set_mempolicy": (238, 237), "setdomainname": (171, 162), "sethostname": (170, 161),
    "setns": (308, 268), "settimeofday": (164, 170), "shmget": (29, 194), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "vhangup": (153, 58),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKET, _IOCTL = (41, 198), (16, 29)


def seccomp_filter() -> bytes | None:
    """Return the filter for this machine, None for one that is not known."""
    if (machine := platform.machine()) not in _AUDIT:
        return None
    column = list(_AUDIT).index(machine)
    program = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_EQUAL, _AUDIT[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_op(_AT_LEAST, _X32, 0, 1), _refusal(errno.EPERM)]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [_op(_EQUAL, number, 0, 1), _refusal(errno.EPERM)]
    # Its flags lie in memory, out of a filter's reach; the C library falls back to clone.
    program += [_op(_EQUAL, _CLONE3[column], 0, 1), _refusal(errno.ENOSYS)]
    namespaces = [_op(_LOAD, _ARGUMENTS), _op(_ANY_BIT, _NAMESPACES, 0, 1), _refusal(errno.EPERM)]
    families = [
        _op(_LOAD, _ARGUMENTS),
        *(_op(_EQUAL, each, len(_FAMILIES) - place, 0) for place, each in enumerate(_FAMILIES)),
        _refusal(errno.EAFNOSUPPORT),
    ]
    typing = [
        _op(_LOAD, _ARGUMENTS + 8),  # the low half of the second argument
        _op(_EQUAL, _TERMINAL_INPUT[0], 1, 0),
        _op(_EQUAL, _TERMINAL_INPUT[1], 0, 1),
        _refusal(errno.EPERM),
    ]
    for call, body in ((_CLONE, namespaces), (_SOCKET, families), (_IOCTL, typing)):
        program += [_op(_EQUAL, call[column], 0, len(body) + 1), *body, _op(_RETURN, _ALLOW)]
    return b"".join([*program, _op(_RETURN, _ALLOW)])


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction; jumps count the instructions that are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _refusal(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)

"""Programs that try to leave their sandbox, to fill the machine, or to fake their end."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import wait_until_gone
from support.sandboxes import PATIENT_S, sandbox

from marin_rl.errors import ConfigError, InputError
from marin_rl.isolated import sandbox_command
from marin_rl.isolated.sandbox import Sandbox, SandboxLimits, SandboxResult, check_sandbox

TOP = Path(__file__).parents[2]

# Calls of the C library that return -1 where the kernel refuses; `error` is the name of errno.
PRELUDE = """
import ctypes, errno, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def error(result):
    return errno.errorcode[ctypes.get_errno()] if result == -1 else "allowed"
def attempt(call, *arguments):
    try: return call(*arguments)
    except OSError as problem: return errno.errorcode[problem.errno]
"""


def play(program: str, box: Sandbox | None = None, *arguments: str) -> SandboxResult:
    """Run a Python program in a sandbox."""
    box = box or sandbox()
    return box.run([box.python, "-I", "-S", "-c", PRELUDE + program, *arguments])


def said(program: str, box: Sandbox | None = None, *arguments: str) -> str:
    """Return what a program that ends by itself prints."""
    result = play(program, box, *arguments)
    assert result.succeeded, (result.how, result.stderr.decode())
    return result.stdout.decode().strip()


def test_a_program_gets_its_input_and_files_and_its_output_is_returned():
    box = sandbox()
    result = box.run(
        [box.python, "-I", "twice.py"],
        stdin=b"4\n",
        files={"twice.py": b"import os; print(2 * int(input()), os.getcwd())"},
    )
    assert (result.exit_status, result.stdout, result.how) == (0, b"8 /work\n", "exit status 0")
    assert play("sys.exit(3)").how == "exit status 3"
    assert play("os.kill(os.getpid(), 11)").how == "signal 11"


def test_the_network_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = str(server.getsockname()[1])
        program = """
print(attempt(socket.create_connection, ("127.0.0.1", int(sys.argv[1])), 5))
print(attempt(socket.create_connection, ("192.0.2.1", 80), 5))
print(attempt(socket.socket, 40, socket.SOCK_STREAM))  # AF_VSOCK, which has no namespace
print(attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW))
"""
        assert said(program, None, port).split() == [
            "ECONNREFUSED", "ENETUNREACH", "EAFNOSUPPORT", "EAFNOSUPPORT",
        ]  # fmt: skip
        with pytest.raises(TimeoutError):
            server.accept()


def test_files_of_the_host_are_not_there(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    program = """
os.symlink(sys.argv[1], "link")
os.symlink("/proc/1/root" + sys.argv[1], "link by proc")
for place in (sys.argv[1], "link", "link by proc", "/etc/passwd", "/etc/shadow"):
    print(attempt(open, place))
print(attempt(open, "/usr/new", "w"), attempt(open, "/new", "w"), attempt(open, "/dev/new", "w"))
print(*os.listdir("/"))
"""
    lines = said(program, None, str(secret)).splitlines()
    assert lines[:5] == ["ENOENT", "ENOENT", lines[2], "ENOENT", "ENOENT"]
    assert lines[2] in ("ENOENT", "EACCES")
    assert lines[5] == "EROFS EROFS EROFS"
    assert not {"home", "var", "sys", "boot", "mnt"} & set(lines[6].split())


def test_descriptors_variables_processes_and_rights_of_the_host_are_not_there(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    program = """
print(len(os.listdir("/proc/self/fd")))  # the fourth is that of the listing itself
print(attempt(os.write, 0, b"x"), attempt(open("/proc/self/fd/0", "r+b", 0).write, b"x"))
print("secret" in open("/proc/self/environ").read())
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
print(attempt(os.kill, int(sys.argv[1]), 0))
attempt(os.kill, -1, signal.SIGTERM)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(os.getuid() > 0, status["NoNewPrivs"].strip(), int(status["CapBnd"], 16))
for name in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sysrq-trigger", "1/oom_score_adj"):
    print(attempt(open, "/proc/" + name, "w"))
"""
    *lines, core, caches, trigger, score = said(program, None, str(os.getpid())).splitlines()
    assert lines == ["4", "EPERM EPERM", "False", "True", "ESRCH", "True 1 0"]
    assert {core, caches, trigger, score} <= {"EROFS", "EACCES", "EPERM", "ENOENT"}


REFUSED = {
    "ptrace": "libc.ptrace(0, 0, 0, 0)",
    "ptrace of the first process": "libc.ptrace(16, 1, 0, 0)",
    "mount": 'libc.mount(b"none", b"/work", b"tmpfs", 0, None)',
    "umount": 'libc.umount2(b"/proc", 0)',
    "chroot": 'libc.chroot(b"/work")',
    "unshare of users": "libc.unshare(0x10000000)",
    "unshare of mounts": "libc.unshare(0x20000)",
    "clone into a user namespace": "libc.syscall(56, 0x10000011, 0, 0, 0, 0)",
    "setns": "libc.setns(0, 0)",
    "setuid": "libc.setuid(0)",
    "hostname": 'libc.sethostname(b"x", 1)',
    "file in memory": 'libc.memfd_create(b"x", 0)',
    "shared memory": "libc.shmget(0, 1 << 30, 0o1600)",
    "device node": 'libc.mknod(b"/work/disk", 0o60666, 0x0800)',
    "raised limit": "libc.syscall(302, 0, 6, b'\\xff' * 16, 0)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of calls are those of x86-64")
def test_calls_that_lead_out_are_refused():
    program = "".join(
        f"print({name!r}, error({call}), sep='|')\n" for name, call in REFUSED.items()
    )
    results = dict(line.split("|") for line in said(program).splitlines())
    assert results.keys() == REFUSED.keys()
    assert set(results.values()) <= {"EPERM", "EINVAL"}, results
    # without namespaces of its own a program still has threads and processes
    program = "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
    assert said(program + "print(subprocess.run(['true']).returncode)").split() == ["thread", "0"]


def test_a_fork_bomb_ends_at_its_limit_of_processes():
    program = """
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        children += 1
except OSError as problem:
    print(children < 20, errno.errorcode[problem.errno])
"""
    box = sandbox(processes=20)
    with ThreadPoolExecutor(2) as threads:  # side by side, each with a limit of its own
        assert set(threads.map(lambda _: said(program, box), range(2))) == {"True EAGAIN"}


def test_memory_is_limited_by_process_and_in_all():
    box = sandbox(memory_bytes=128 << 20)
    result = play("print(len(bytearray(1 << 30)))", box)
    assert b"MemoryError" in result.stderr
    program = """
for _ in range(8):
    if os.fork() == 0:
        data = bytearray(os.urandom(1 << 20)) * 60
        time.sleep(1000)
time.sleep(1000)
"""
    assert play(program, box).limit == "memory"
    shared = "import mmap; m = mmap.mmap(-1, 1 << 30); m.write(bytes(1 << 20) * 100)\n"
    assert play(shared + "m.write(bytes(1 << 20) * 100); time.sleep(1000)", box).limit == "memory"


def test_disk_is_limited():
    program = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for folder in ("/work", "/tmp", "/dev/shm"):
    try:
        for i in range(100):
            with open(f"{folder}/{i}", "wb") as file: file.write(bytes(1 << 20))
        print("allowed")
    except OSError as problem:
        print(errno.errorcode[problem.errno])
"""
    assert said(program, sandbox(disk_bytes=4 << 20)).split() == ["ENOSPC"] * 3


# Files that a walk over names does not find, 16 MiB each.
HIDDEN = """
import mmap, socket
block, kept = bytes(1 << 20), []
def unlinked():
    file = os.open("x", os.O_RDWR | os.O_CREAT)
    os.unlink("x")
    return file
def full(file):
    for _ in range(16): os.write(file, block)
    return file
def allocated(file):
    os.posix_fallocate(file, 0, 16 << 20)
    return file
def mapped(file):
    os.truncate(file, 16 << 20)
    kept.append(mmap.mmap(file, 16 << 20))
    os.close(file)
    kept[-1].write(block * 16)
def sent(file):
    kept.append(socket.socketpair())
    socket.send_fds(kept[-1][0], [b"x"], [file])
    os.close(file)
for _ in range(24): {play}
time.sleep(1000)
"""
PLAYS = {
    "unlinked": "full(unlinked())",
    "without a name": "full(os.open('.', os.O_RDWR | os.O_TMPFILE))",
    "allocated": "allocated(unlinked())",
    "mapped": "mapped(unlinked())",
    "in a socket": "sent(full(unlinked()))",
    "of many processes": "os.fork() or (full(unlinked()), time.sleep(1000))",
    "named": "full(os.open(f'{_}', os.O_RDWR | os.O_CREAT)); _ < 23 or sys.exit()",
    "entries": "[os.mkdir(f'{_} {n}') for n in range(2000)]",
}


def in_a_workspace(folder: Path, program: str, **limits: float) -> SandboxResult:
    folder.chmod(0o777)
    for place in folder.parents[:3]:  # pytest's own folders
        place.chmod(0o755)
    box = sandbox(workspace_bytes=64 << 20, disk_bytes=32 << 20, files=256, **limits)
    arguments = [box.python, "-I", "-S", "-c", PRELUDE + program]
    return box.run(arguments, workspace=folder)


@pytest.mark.slow
@pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
def test_disk_of_a_workspace_is_counted_as_the_kernel_does(play: str, tmp_path: Path):
    result = in_a_workspace(tmp_path, HIDDEN.replace("{play}", play))
    assert result.limit == "disk", (result.how, result.stderr)


def test_files_within_the_limits_of_a_workspace_stay(tmp_path: Path):
    program = HIDDEN.replace("range(24)", "range(3)").replace("time.sleep(1000)", "print('end')")
    result = in_a_workspace(tmp_path, program.replace("{play}", PLAYS["named"]))
    assert (result.how, result.stdout) == ("exit status 0", b"end\n")
    assert sum(place.stat().st_size for place in tmp_path.iterdir()) == 48 << 20


@pytest.mark.parametrize("folder", ["/work", "/dev/shm"])
def test_entries_of_a_room_in_memory_are_limited(folder: str):
    program = f"for n in range(10**7): os.mkdir(f'{folder}/{{n}}')"
    result = play(program, sandbox(disk_bytes=4 << 20))
    assert result.limit == "files", (result.how, result.stderr)


def test_page_tables_are_memory():
    program = """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
start = libc.mmap(None, 1 << 40, 1, 0x4022, -1, 0)  # readable, without reserve
for place in range(start, start + (1 << 40), 2 << 20): ctypes.c_char.from_address(place).value
time.sleep(1000)
"""
    result = play(program, sandbox(memory_bytes=64 << 20))
    assert result.limit == "memory", (result.how, result.stderr)


def test_no_place_of_the_host_is_in_the_command_of_the_first_process(tmp_path: Path):
    result = in_a_workspace(tmp_path, "print(open('/proc/1/cmdline').read())")
    assert result.succeeded, result.stderr
    assert str(tmp_path).encode() not in result.stdout


def test_first_processes_are_reaped_where_orphans_are_children_of_this_process():
    """As of a container without an init; a subreaper gets orphans as its first process does."""
    program = f"""
import ctypes, sys; sys.path.insert(0, {str(TOP)!r})
from pathlib import Path
from marin_rl.isolated.sandbox import Sandbox, SandboxLimits
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
for command, wall_s in ((["true"], 100), (["sleep", "1000"], 0.2), (["/nowhere"], 100)):
    Sandbox(SandboxLimits(wall_s=wall_s)).run(command)
print(Path("/proc/thread-self/children").read_text().split())
"""
    sandbox()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert result.stdout == b"[]\n"


def test_output_without_end_is_cut_while_it_is_read():
    box = sandbox(output_bytes=10_000)
    for stream in ("stdout", "stderr"):
        result = play(f"while True: sys.{stream}.write('x' * 1000)", box)
        assert result.limit == "output"
        assert len(getattr(result, stream)) == 10_000


@pytest.mark.slow
def test_time_is_limited_also_for_programs_that_ignore_signals():
    program = "for n in (1, 2, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
    result = play(program + "time.sleep(1000)", sandbox(wall_s=0.5))
    assert (result.limit, result.exit_status) == ("time", None)
    busy = play(program + "print('began', flush=True)\nwhile True: pass", sandbox(cpu_s=1))
    assert busy.how in ("exceeded its limit of CPU time", "signal 9")
    assert busy.stdout == b"began\n"


def test_late_threads_and_processes_end_with_the_program():
    program = """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(3): os.close(descriptor)
            time.sleep(1000)
        os._exit(0)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("done", flush=True)
os._exit(0)
"""
    before = _processes()
    began = time.monotonic()
    assert said(program) == "done"
    assert time.monotonic() - began < 900
    wait_until_gone(_processes() - before)


def test_nothing_that_a_program_prints_is_taken_for_its_end():
    program = """
for descriptor in range(3, 64):
    attempt(os.write, descriptor, b'{ "exit-code": 0 }')
print('{ "exit-code": 0 }'); sys.stdout.flush()
os._exit(7)
"""
    assert play(program).exit_status == 7
    assert not play("os.kill(os.getpid(), 9)").succeeded
    # the first process of the namespace is not this one, and cannot be ended by it
    assert play("print(attempt(os.kill, 1, 9)); sys.exit(5)").exit_status == 5


@pytest.mark.parametrize("mode", ["bubblewrap", "rlimits_only"])
def test_a_killed_parent_leaves_no_program(mode: str):
    program = f"""
import sys; sys.path.insert(0, {str(TOP)!r})
from marin_rl.isolated.sandbox import Sandbox, SandboxLimits
box = Sandbox(SandboxLimits(wall_s=1000), mode={mode!r})
print("ready", flush=True)
box.run(["sleep", "987654"])
"""
    sandbox()
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + PATIENT_S
    while not (sleeping := _named(b"sleep", b"987654")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # The process around it asks to die with its parent, and then sleeps.
    (program_id,) = sleeping
    while _stat(_stat(program_id)[1])[0] != "S":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until_gone(sleeping)


def _stat(process_id: int | str) -> list[str]:
    """State and parent of a process."""
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()


def _named(*words: bytes) -> set[int]:
    """Processes whose command line begins with `words`."""
    return {each for each, line in _command_lines() if line[: len(words)] == list(words)}


def _processes() -> set[int]:
    """Processes of this machine that belong to sandboxes."""
    return {each for each, line in _command_lines() if b"--die-with-parent" in line}


def _command_lines() -> Iterator[tuple[int, list[bytes]]]:
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(place.name), (place / "cmdline").read_bytes().split(b"\0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_walls_hold_for_a_user_who_is_not_root():
    sandbox()
    python = "/usr/bin/python3"
    version = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not Path(python).exists() or subprocess.run(version, check=False).returncode:
        pytest.skip("no Python 3.11 that every user can run")
    program = (TOP / "tests/attacks/sandbox_of_a_user.py").read_text()
    sources = [TOP / "marin_rl/errors.py", *(TOP / "marin_rl/isolated").glob("s*.py")]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        package = Path(folder, "marin_rl/isolated")
        package.mkdir(parents=True)
        for source in sources:
            shutil.copy(source, Path(folder, source.relative_to(TOP)))
        result = subprocess.run(
            [python, "-c", program],
            cwd=folder,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
    if "user namespaces" in result.stderr or "No permissions to create" in result.stderr:
        pytest.skip(result.stderr[-300:])
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["65534 EPERM EPERM", "True EAGAIN", "disk", "disk"]


@pytest.fixture
def unchecked() -> Iterator[None]:
    """A sandbox works here, and no check is remembered."""
    sandbox()
    check_sandbox.cache_clear()
    yield
    check_sandbox.cache_clear()


def test_a_machine_without_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check_sandbox.cache_clear()
    with pytest.raises(ConfigError, match=r"apt-get install bubblewrap.*sandbox: rlimits_only"):
        check_sandbox("bubblewrap")


@pytest.mark.usefixtures("unchecked")
def test_a_bubblewrap_that_cannot_make_namespaces_is_refused(monkeypatch, tmp_path):
    unfit = tmp_path / "bwrap"
    unfit.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    unfit.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"No permissions.*--cap-add SYS_ADMIN.*rlimits_only"):
        check_sandbox("bubblewrap")
    with pytest.raises(InputError, match="no sandbox could be made"):
        Sandbox().run(["true"])


@pytest.mark.skipif(os.geteuid() != 0, reason="removes a wall that root asks for by name")
@pytest.mark.usefixtures("unchecked")
def test_a_wall_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    walls = [wall for wall in sandbox_command._namespaces(True) if wall != "--unshare-pid"]
    monkeypatch.setattr(sandbox_command, "_namespaces", lambda by_root: walls)
    with pytest.raises(ConfigError, match=r"does not hold on this machine: processes; "):
        check_sandbox("bubblewrap")


def test_limits_that_are_refused_start_no_program():
    box = sandbox(files=1 << 40)
    before, descriptors = _processes(), _descriptors()
    with pytest.raises(InputError, match="limits are refused"):
        play("print('began')", box)
    wait_until_gone(_processes() - before)
    assert _descriptors() == descriptors


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with a secret that every user can read, at a place that programs may see."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        home = Path(folder).resolve()
        for place in (home, home / "bin", home / ".local/bin", home / ".ssh"):
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o755)
        (home / ".ssh/id").write_text("secret")
        monkeypatch.setenv("HOME", folder)
        yield home


def test_an_interpreter_that_is_a_link_in_a_home_shows_nothing_of_it(home: Path):
    sandbox()
    (home / ".local/bin/python3.11").symlink_to(sandbox_command.interpreter_of().path)
    (home / "bin/python3").symlink_to(home / ".local/bin/python3.11")
    for path in (home / "bin/python3", home / ".local/bin/python3.11"):
        check_sandbox("bubblewrap", str(path))
        program = "print(attempt(open, sys.argv[1]), sorted(os.listdir(sys.argv[2])))"
        text = said(program, Sandbox(interpreter=str(path)), str(home / ".ssh/id"), str(home))
        assert text in ("ENOENT ['.local', 'bin']", "ENOENT ['.local']")


def test_an_interpreter_whose_folder_is_a_home_is_refused(home: Path):
    shutil.copy(sandbox_command.interpreter_of().path, home / "bin/python3")
    with pytest.raises(ConfigError, match=r"expected a Python with its library in .*, found none"):
        Sandbox(interpreter=str(home / "bin/python3"))
    (home / "lib/python3.11").mkdir(parents=True)
    with pytest.raises(ConfigError, match="which holds a home: make a virtual environment"):
        Sandbox(interpreter=str(home / "bin/python3"))
    (home / "pyvenv.cfg").write_text("home = /usr/bin\n")
    with pytest.raises(ConfigError, match="which holds a home"):
        Sandbox(interpreter=str(home / "bin/python3"))


def test_of_a_folder_with_other_things_the_parts_of_a_python_are_shown(home: Path):
    own = home / ".local"
    (own / "lib/python3.11").mkdir(parents=True)
    (own / "share/keyrings").mkdir(parents=True)
    shutil.copy(sandbox_command.interpreter_of().path, own / "bin/python3")
    shown = sandbox_command.interpreter_of(str(own / "bin/python3")).folders
    assert shown == (str(own / "bin"), str(own / "lib"))


@pytest.mark.usefixtures("unchecked")
def test_a_mount_of_the_host_fails_the_self_test(home: Path, monkeypatch: pytest.MonkeyPatch):
    bound = [*sandbox_command._reached(str(home)), "--ro-bind", str(home), str(home)]
    wrong = [*sandbox_command._system(), *bound]
    monkeypatch.setattr(sandbox_command, "_system", lambda: wrong)
    with pytest.raises(ConfigError, match="does not hold on this machine: mounts, homes; "):
        check_sandbox("bubblewrap")


def test_without_walls_the_limits_hold():
    box = Sandbox(
        SandboxLimits(wall_s=PATIENT_S, memory_bytes=128 << 20, output_bytes=1000),
        mode="rlimits_only",
    )
    assert said("print(os.path.exists('/etc/passwd'))", box) == "True"
    assert b"MemoryError" in play("print(len(bytearray(1 << 30)))", box).stderr
    assert play("while True: print('x' * 100)", box).limit == "output"
    left = said(
        "p = subprocess.Popen(['sleep', '1000'], start_new_session=True); print(p.pid)", box
    )
    wait_until_gone([int(left)])


LEFT = """
for words in (["env", "-i", "setsid"], ["env", "-i", "setsid", "setsid"], ["setsid", "nohup"]):
    subprocess.Popen([*words, "sleep", "987653"], stdin=-3, stdout=-3, stderr=-3)
time.sleep(0.5)  # most are other programs by then
"""


def test_without_walls_nothing_outlives_a_run():
    for end, how in (
        ("", "exit status 0"),
        ("os.kill(os.getpid(), 15)", "signal 15"),
        ("time.sleep(1000)", "exceeded its limit of time"),
    ):
        wall_s = 3.0 if "sleep" in end else PATIENT_S
        box = Sandbox(SandboxLimits(wall_s=wall_s), mode="rlimits_only")
        assert play(LEFT + end, box).how == how
        assert not _named(b"sleep", b"987653")


def test_without_walls_processes_are_limited_for_root_too():
    box = Sandbox(SandboxLimits(wall_s=PATIENT_S, processes=1), mode="rlimits_only")
    program = "for _ in range(20): os.fork() or time.sleep(1000)\ntime.sleep(1000)"
    result = play(program, box)
    assert result.limit == "processes" or b"BlockingIOError" in result.stderr


def test_without_walls_the_parent_of_a_program_has_no_secret():
    look = "import os; print(open(f'/proc/{os.getppid()}/environ').read().count('secret'))"
    program = f"""
import sys; sys.path.insert(0, {str(TOP)!r})
from marin_rl.isolated.sandbox import Sandbox
box = Sandbox(mode="rlimits_only")
print(box.run([box.python, "-I", "-S", "-c", {look!r}]).stdout)
"""
    environment = {"PATH": os.environ["PATH"], "MARIN_RL_API_KEY": "secret"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert result.stdout == b"b'0\\n'\n"


@pytest.mark.slow
def test_many_runs_leave_nothing_behind():
    seed = int(os.environ.get("MARIN_RL_SEED", random.randrange(2**32)))
    runs = int(os.environ.get("MARIN_RL_SANDBOX_RUNS", 500))
    print(f"seed {seed}, {runs} runs")
    draw = random.Random(seed)
    box = sandbox(wall_s=1.0, output_bytes=2000, processes=8)
    programs = (
        "print('x')",
        "print('x' * 5000)",
        "open('file', 'w').write('x' * 1000)",
        "os.fork() or time.sleep(1000)",
        "sys.exit(4)",
        "os.kill(os.getpid(), 9)",
        "subprocess.Popen(['sleep', '100'], start_new_session=True)",
    )
    files, mounts = _left()
    before, descriptors = _processes(), _descriptors()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda each: play(each, box), draw.choices(programs, k=runs)))
    wait_until_gone(_processes() - before)
    assert _descriptors() == descriptors
    assert _left() == (files, mounts)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _left() -> tuple[set[str], str]:
    """Return our temporary files, and the mounts of this process."""
    own = {path.name for path in Path(tempfile.gettempdir()).glob("marin-rl-sandbox-*")}
    return own, Path("/proc/self/mountinfo").read_text()

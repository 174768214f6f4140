"""Overhead of a sandboxed run: a Python that does nothing, in the sandbox and as a subprocess.

    python bench/sandbox.py --runs 50
    python bench/sandbox.py --leftovers 10000

Runs of both alternate, so that another load of the machine weighs on both. Prints milliseconds of
the fastest run, of the fastest fifth and of the median, and CPU time a run with that of all its
processes. `--leftovers` counts processes, files, mounts, descriptors before and after many runs.
"""

import argparse
import ctypes
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import print_head

from marin_rl.isolated.sandbox import Sandbox, check_sandbox

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50, help="runs of each")
    parser.add_argument("--leftovers", type=int, metavar="RUNS", help="count what runs leave")
    options = parser.parse_args()
    print_head()
    check_sandbox("bubblewrap")
    if options.leftovers:
        count_leftovers(options.leftovers)
    else:
        measure(options.runs)


def measure(runs: int) -> None:
    """Time the same program as a subprocess, with limits and in the sandbox, in turns."""
    # the first process of a namespace outlives bubblewrap: adopted, its CPU time is counted
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    sandbox, limited = Sandbox(), Sandbox(mode="rlimits_only")
    program = [sandbox.python, "-I", "-S", "-c", "0"]
    kinds: dict[str, Callable[[], object]] = {
        "subprocess": lambda: subprocess.run(program, capture_output=True, check=True),
        "limits": lambda: limited.run(program),
        "sandbox": lambda: sandbox.run(program),
    }
    walls: dict[str, list[float]] = {name: [] for name in kinds}
    cpu: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(runs):
        for name, run in kinds.items():
            cpu_before, began = cpu_s(), time.perf_counter()
            run()
            walls[name].append(1000 * (time.perf_counter() - began))
            reap_adopted()
            cpu[name].append(1000 * (cpu_s() - cpu_before))
    print(f"{runs} runs each, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ms")
    print(f"{'':12}{'wall min':>9}{'5th':>7}{'median':>8}{'CPU min':>9}{'median':>8}")
    middle, fast = runs // 2, runs // 5
    columns = {
        name: [*(sorted(walls[name])[at] for at in (0, fast, middle)),
               *(sorted(cpu[name])[at] for at in (0, middle))]
        for name in kinds
    }  # fmt: skip
    base = columns["subprocess"]
    columns["overhead"] = [a - b for a, b in zip(columns["sandbox"], base, strict=True)]
    for name, (least, fifth, median, cpu_least, cpu_median) in columns.items():
        print(f"{name:12}{least:9.1f}{fifth:7.1f}{median:8.1f}{cpu_least:9.1f}{cpu_median:8.1f}")


def count_leftovers(runs: int) -> None:
    """Run programs that end in different ways, and count what is there before and after."""
    sandbox = Sandbox()
    programs = (
        "print('x')",
        "import sys; sys.exit(4)",
        "import os; os.kill(os.getpid(), 9)",
        "open('file', 'wb').write(bytes(1 << 20))",
        "import os, time; os.fork() or time.sleep(1000)",
        "import os, time; os.fork() or (os.setsid(), os.fork() or time.sleep(1000))",
        "while True: print('x' * 10000)",
    )

    def play(number: int) -> str:
        program = programs[number % len(programs)]
        return sandbox.run([sandbox.python, "-I", "-S", "-c", program]).how

    # a folder of its own: other programs make files in the common one
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        report(runs, play)


def report(runs: int, play: Callable[[int], str]) -> None:
    """Print the ends of `runs` programs, and the counts before and after them."""
    ends: dict[str, int] = {}
    before, began = counts(), time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        for how in threads.map(play, range(runs)):
            ends[how] = ends.get(how, 0) + 1
    after = counts()
    print(f"{runs} runs in {time.perf_counter() - began:.0f} s; their ends: {ends}")
    for name in before:
        print(f"{name:24}{before[name]:6} before {after[name]:6} after")


def counts() -> dict[str, int]:
    """Count what a run could leave on this machine."""
    command_lines = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command_lines.append((place / "cmdline").read_bytes())
        except OSError:
            continue  # it has ended meanwhile
    return {
        "bubblewrap processes": sum(b"--die-with-parent" in line for line in command_lines),
        "children of this process": len(children()),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "temporary files": len(list(Path(tempfile.gettempdir()).iterdir())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
    }


def children() -> list[str]:
    """Return the process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return [child for task in tasks for child in (task / "children").read_text().split()]


def reap_adopted() -> None:
    """Wait for the processes that bubblewrap left to its parent."""
    while children():
        os.waitpid(-1, 0)


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    own, ended = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


if __name__ == "__main__":
    main()

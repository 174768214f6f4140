"""CPU seconds until a command of `marin-rl` has answered, next to limits, and to Python and typer.

    python bench/startup.py [--repeat 7] [--uncounted 1]

Makes a small run, then starts every command --repeat times in a process of its own, one after the
other so that a slower moment of the machine meets all. Prints the least and the median of user and
system seconds, how many times the least of `python -c "import typer"` the least is, which holds on
another machine too, and the limit of the command, which may be exceeded on a slow machine. The
least is what a command takes alone: other processes only add to it. A first start of each, which
writes the caches of Python's compiler, does not count (--uncounted).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from machine import print_head
from support.run_factories import shown_run, whole_run

BASELINE = "import typer"
PYTHON = (sys.executable, "-c")
MARIN_RL = (sys.executable, "-m", "marin_rl")
RUN = "started"
WHOLE = "whole"  # its checkpoints have arrays, which fsck reads

LIMITS_S = {"--help": 0.3, "run --help": 0.3, "--version": 0.3, "status": 0.6, "status RUN": 0.6}
ID = "group-00000/000"
OF_ROLLOUTS = "select round, avg(reward) from rollouts group by round"
# It writes a page of megabytes. `metrics verify` is not here: it computes, in JAX.
REPORT = "report RUN"


def commands(root: str) -> dict[str, tuple[str, ...]]:
    """Command lines by name, the baselines first."""
    place = ("--root", root)
    return {
        "an empty program": (*PYTHON, "pass"),
        BASELINE: (*PYTHON, BASELINE),
        "--help": (*MARIN_RL, "--help"),
        "--version": (*MARIN_RL, "--version"),
        "run --help": (*MARIN_RL, "run", "--help"),
        "status": (*MARIN_RL, "status", *place),
        "status RUN": (*MARIN_RL, "status", RUN, *place),
        "rollouts RUN": (*MARIN_RL, "rollouts", RUN, *place),
        "rollouts RUN --id ID": (*MARIN_RL, "rollouts", RUN, "--id", ID, *place),
        "lineage RUN": (*MARIN_RL, "lineage", RUN, *place),
        "audit RUN": (*MARIN_RL, "audit", RUN, *place),
        "fsck RUN": (*MARIN_RL, "fsck", WHOLE, *place),
        "gc RUN --dry-run": (*MARIN_RL, "gc", RUN, "--dry-run", *place),
        "diff RUN RUN": (*MARIN_RL, "diff", RUN, RUN, *place),
        'sql RUN "select 1"': (*MARIN_RL, "sql", RUN, "select 1", *place),
        "sql RUN: of rollouts": (*MARIN_RL, "sql", RUN, OF_ROLLOUTS, *place),
        "sql RUN: of metrics": (*MARIN_RL, "sql", RUN, "select * from metrics", *place),
        "sql RUN": (*MARIN_RL, "sql", RUN, *place),
        REPORT: (*MARIN_RL, "report", RUN, *place),
        "recipes": (*MARIN_RL, "recipes"),
        "env list": (*MARIN_RL, "env", "list"),
        "config validate CONFIG": (*MARIN_RL, "config", "validate", "configs/debug.yaml", *place),
    }


def cpu_seconds(command: tuple[str, ...]) -> float:
    """User and system seconds of a command, its own processes included."""
    environment = {key: v for key, v in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    subprocess.run(
        command,
        check=True,
        cwd=Path(__file__).parents[1],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    after = os.times()
    return (
        after.children_user - before.children_user + after.children_system - before.children_system
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--uncounted", type=int, default=1, help="first starts, which do not count")
    options = parser.parse_args()
    print_head()
    with tempfile.TemporaryDirectory() as root:
        shown_run(Path(root), run_id=RUN)
        whole_run(root, run_id=WHOLE)
        chosen = commands(root)
        for _ in range(options.uncounted):
            for command in chosen.values():
                cpu_seconds(command)
        spent: dict[str, list[float]] = {name: [] for name in chosen}
        for _ in range(options.repeat):
            for name, command in chosen.items():
                spent[name].append(cpu_seconds(command))
    unit = min(spent[BASELINE])
    for name, seconds in spent.items():
        least, median = min(seconds), statistics.median(seconds)
        limit = f"  limit {limit_of(name)}" if limit_of(name) < float("inf") else ""
        verdict = f"{limit}, EXCEEDED" if least > limit_of(name) else limit
        print(
            f"{name:<26} {least:6.2f} CPU s  (median {median:.2f})  "
            f"{least / unit:5.1f} x {BASELINE!r}{verdict}"
        )


def limit_of(name: str) -> float:
    """Return the limit of a command's CPU seconds; infinity where none is set."""
    if name == REPORT:
        return float("inf")
    return LIMITS_S.get(name, float("inf"))


if __name__ == "__main__":
    main()

"""Whole runs of configs/debug.yaml with a warm start, also in processes that are killed.

    with ForkServer(log) as fork_server:
        fork_server.run(config, faults={"create run/run.json #1": "kill-before"})   # [-9]

The fork server is one child process that imports what a run needs, starts no thread and touches no
device; for each run it forks, so that a run costs its own work and not ten seconds of imports. A
fork is a process like any other to `kill -9`, to file locks and to JAX, which starts in it. Its
lifetime is counted in its own processor time: on a busy machine it gets as far as on an idle one.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from support.fault_injection import inject_faults
from support.faults import NamedOperations
from support.preloading import RUNS, import_for_forks

from marin_rl.config import Config, load_config, parse_config
from marin_rl.progress import ProgressEvent
from marin_rl.types import SlotRef

REPOSITORY = Path(__file__).parents[2]
DEBUG = REPOSITORY / "configs" / "debug.yaml"
ROUNDS, SHARDS = 3, 2


def debug(root: Path, *overrides: str) -> Config:
    """The configuration below `root`, always under one name: samples depend on it."""
    settings = ("run_id=whole", "policy.init=sft", "checkpoints.optimizer_every_rounds=2")
    return load_config(DEBUG, [f"root={root}", *settings, *overrides])


def latest_flow_run(name: str) -> FlowRun:
    """The flow run of this name that was started last."""
    with get_client(sync_client=True) as client:
        newest_first = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC)
    return next(run for run in newest_first if run.name == name)


@dataclass(slots=True)
class Played:
    """A run that was played once by a flow run, and what was heard of it."""

    flow_run: FlowRun
    config: Config
    checkpoint: SlotRef
    events: list[ProgressEvent] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)


TIMEOUT_S = 240


def spawn_program(program: str, config: Config, api: str) -> subprocess.Popen[bytes]:
    """A Python program that is given a configuration as JSON."""
    return subprocess.Popen(
        [sys.executable, "-c", program, config.model_dump_json()],
        cwd=REPOSITORY,
        env={**os.environ, "PREFECT_API_URL": api},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that must end well."""
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, told.decode()[-3000:]


def kill_when(process: subprocess.Popen[bytes], seen: Callable[[], bool], delay_s: float) -> None:
    """SIGKILL the process `delay_s` after `seen` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not seen() and process.poll() is None:
        assert time.monotonic() < deadline, "the stage never began"
        time.sleep(0.0005)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


ROOMS = (
    *RUNS,
    "flows.rl_loop",
    "flows.session",
    "marin_rl.batching.sequences",
    "marin_rl.compilation",
    "marin_rl.environments.echo",
    "marin_rl.serving.weights.canary",
    "marin_rl.planning",
    "marin_rl.serving.app",
    "marin_rl.serving.server",
    "marin_rl.training.loop",
    "marin_rl.training.sft",
    "marin_rl.weight_sync",
    "fastapi",
    "gcsfs",
    "openai.resources",
    "s3fs",
    "uvicorn.protocols.http.auto",
)
RUN_S_MAX = 240.0
POLL_S = 0.002  # where processor time is waited for
END_POLL_S = 0.02  # where nothing but an end is, and looking more often costs a hundredth of a core
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ForkServer:
    """A process that forks runs. `environment` is added to what this process hands on.

    Of the last run, `cpu_s` is the processor time of each process, `others_killed` the times at
    which other processes were killed, in seconds since the epoch.
    """

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        self.cpu_s: list[float] = []
        self.others_killed: list[float] = []
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> Self:
        path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=REPOSITORY,
            env={**self._environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(RUN_S_MAX)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(
        self,
        config: Config,
        *,
        copies: int = 1,
        life_s: float | None = None,
        also_kill: Mapping[int, float] | None = None,
        limit_s: float = RUN_S_MAX,
        faults: Mapping[str, str] | None = None,
        met: Path | None = None,
    ) -> list[int]:
        """Run `config` in `copies` processes at once; returns the exit code of each.

        The code is minus the signal that ended the process. A process is killed after `life_s`
        seconds of CPU time. `also_kill` maps ids of other processes to seconds: each is killed
        when a process of the run has used that much CPU time. After `limit_s` seconds, processes
        with a `life_s` are killed, others aborted. For `faults` and `met` see faults.py.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {
            "config": config.model_dump(mode="json"),
            "faults": dict(faults or {}),
            "met": None if met is None else str(met),
            "log": str(self.log),
            "copies": copies,
            "life_s": life_s,
            "also_kill": [*(also_kill or {}).items()],
            "limit_s": limit_s,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        ends: list[int]
        answer = self._process.stdout.readline()
        ends, self.cpu_s, self.others_killed = json.loads(answer)
        return ends

    def run_until_all_came(
        self, config: Config, faults: Mapping[str, str]
    ) -> tuple[int, list[str]]:
        """Start a run again after each fault that kills it; the starts, and what never came."""
        met, left = Path(config.root).with_suffix(".met"), dict(faults)
        starts, code = 0, -9
        while code == -9:
            met.write_text("")
            (code,) = self.run(config, faults=left, met=met)
            came = met.read_text().splitlines()
            assert (code, bool(came)) in ((-9, True), (0, False)), self.said()
            for name in came:
                del left[name]
            starts += 1
        return starts, list(left)

    def said(self) -> str:
        """The end of what the runs printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]


def main() -> None:
    """Import, then fork a run per line of standard input and print how each ended."""
    import_for_forks(ROOMS)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(_watched(order)), flush=True)


def _watched(order: dict[str, Any]) -> tuple[list[int], list[float], list[float]]:
    """Fork the processes of an order; their ends, processor times, and when others were killed."""
    ends: dict[int, tuple[int, float] | None] = {}
    for _ in range(order["copies"]):
        child = os.fork()
        if child == 0:
            _live(order)
        ends[child] = None
    also_kill, killed = list(order["also_kill"]), list[float]()
    deadline = time.monotonic() + order["limit_s"]
    poll_s = END_POLL_S if order["life_s"] is None and not also_kill else POLL_S
    while None in ends.values():
        for child in [child for child, end in ends.items() if end is None]:
            lived_s = _cpu_s(child)
            for other in [other for other in also_kill if lived_s >= other[1]]:
                os.kill(other[0], signal.SIGKILL)
                also_kill.remove(other)
                killed.append(time.time())
            _end_in_time(child, lived_s, order["life_s"], late=time.monotonic() > deadline)
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                ends[child] = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        time.sleep(poll_s)
    known = [end for end in ends.values() if end is not None]
    return [code for code, _ in known], [cpu_s for _, cpu_s in known], killed


def _end_in_time(child: int, lived_s: float, life_s: float | None, *, late: bool) -> None:
    """Kill a child that was to live so long; one that hangs must not look like one of those."""
    if life_s is not None and (late or lived_s >= life_s):
        os.kill(child, signal.SIGKILL)
    elif late:
        os.kill(child, signal.SIGABRT)


def _cpu_s(process: int) -> float:
    """Seconds of processor time that a child, which is not waited for yet, has had."""
    numbers = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / TICKS_PER_S


def _live(order: dict[str, Any]) -> None:
    """Body of a fork: play one run and exit, without waiting for threads."""
    descriptor = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        config = parse_config(order["config"])
        with _suffering(config, order):
            importlib.import_module("flows.rl_loop").start(config)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def _suffering(config: Config, order: dict[str, Any]) -> AbstractContextManager[Any]:
    """The faults of an order; nothing stands before the stores where it has none."""
    if not order["faults"]:
        return nullcontext()
    met = None if order["met"] is None else Path(order["met"])
    return inject_faults(NamedOperations(config.root, order["faults"], met))


if __name__ == "__main__":
    main()

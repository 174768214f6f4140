"""Whole runs of configs/debug.yaml with a warm start, also in processes that are killed.

    runs = ForkedRuns(log)
    runs.run(config, faults={"create run/run.json #1": "kill-before"})   # -9

A run in a fork costs its own work and not ten seconds of imports. It is a process like any other
to `kill -9`, to file locks and to JAX, which starts in it. Its lifetime is counted in its own
processor time: on a busy machine it gets as far as on an idle one.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from support.fault_injection import inject_faults
from support.faults import NamedOperations, committed_digests, outcome
from support.forked_python import START_PYTHON, fork_of, python

from marin_rl.config import Config, load_config, parse_config
from marin_rl.progress import ProgressEvent
from marin_rl.storage.runs import Run, latest_checkpoint, round_of
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


RUN_S_MAX = 240.0
LATE_S = 7200.0  # of a run that plays the rounds of many lives without a pause
ROUNDS_MAX = 100_000  # of a run that is to be there for each kill
POLL_S = 0.002  # where processor time is waited for
END_POLL_S = 0.02  # where nothing but an end is, and looking more often costs a hundredth of a core
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROGRAM = "from support.flow_runs import live; live()"


class ForkedRuns:
    """Plays runs in processes that `forked_python` forks. `environment` is added to ours of now.

    `flow` is the module of what they play. `cpu_s` is the processor time of the last one.
    """

    flow = "flows.rl_loop"

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        self.cpu_s = 0.0
        path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parents[1])])
        own = {"PYTHONPATH": path, START_PYTHON: sys.executable}
        self._environment = {**os.environ, **environment, **own}

    def run(
        self,
        config: Config,
        *,
        life_s: float | None = None,
        also_kill: Mapping[int, float] | None = None,
        limit_s: float = RUN_S_MAX,
        faults: Mapping[str, str] | None = None,
        met: Path | None = None,
    ) -> int:
        """Run `config` in a process; returns its exit code, or minus the signal that ended it.

        It is killed after `life_s` seconds of CPU time. `also_kill` maps ids of other processes to
        seconds: each is killed when the run has used that much CPU time. After `limit_s` seconds,
        a process with a `life_s` is killed, another aborted. For `faults` and `met` see faults.py.
        """
        order = {
            "config": config.model_dump(mode="json"),
            "flow": self.flow,
            "faults": dict(faults or {}),
            "met": None if met is None else str(met),
        }
        with self.log.open("ab") as log:
            program = subprocess.Popen(
                [python(), "-c", PROGRAM, json.dumps(order)],
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        fork, others = fork_of(program.pid), dict(also_kill or {})
        deadline, self.cpu_s = time.monotonic() + limit_s, 0.0
        while program.poll() is None:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended just now
                self.cpu_s = _cpu_s(fork)
                for other in [other for other, at_s in others.items() if self.cpu_s >= at_s]:
                    os.kill(other, signal.SIGKILL)
                    del others[other]
                late = time.monotonic() > deadline
                if life_s is not None and (late or self.cpu_s >= life_s):
                    os.kill(fork, signal.SIGKILL)
                elif late:  # one that hangs must not look like one that was to live so long
                    os.kill(fork, signal.SIGABRT)
            time.sleep(END_POLL_S if life_s is None and not others else POLL_S)
        return program.returncode

    def run_until_all_came(
        self, config: Config, faults: Mapping[str, str]
    ) -> tuple[int, list[str]]:
        """Start a run again after each fault that kills it; the starts, and what never came."""
        met, left = Path(config.root).with_suffix(".met"), dict(faults)
        starts, code = 0, -9
        while code == -9:
            met.write_text("")
            code = self.run(config, faults=left, met=met)
            came = met.read_text().splitlines()
            assert (code, bool(came)) in ((-9, True), (0, False)), self.said()
            for name in came:
                del left[name]
            starts += 1
        return starts, list(left)

    def first_round_s(self, config: Config) -> float:
        """Play the first round, undisturbed; the seconds of processor time that this took."""
        once = config.model_copy(update={"rounds": 1})
        assert self.run(once, limit_s=LATE_S) == 0, self.said()
        return self.cpu_s

    def check_end(self, killed: Config, alone: Config) -> int:
        """End a run that was killed after its next round: it must be the one that nobody disturbed.

        Both have begun with `first_round_s`, which evaluates what it ends with. Returns the rounds.
        """
        rounds = reached(killed) + 1
        self.first_round_s(alone)
        played = [each.model_copy(update={"rounds": rounds}) for each in (killed, alone)]
        for config in played:
            assert self.run(config, limit_s=LATE_S) == 0, self.said()
        assert outcome(played[0]).same_as(outcome(played[1])) == []
        return rounds

    def said(self) -> str:
        """The end of what the runs printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]


def still_committed(config: Config, known: Mapping[str, str]) -> dict[str, str]:
    """Return the commits of a run; all that were `known` must be there as they were."""
    now = committed_digests(config)
    assert known.items() <= now.items(), "something committed was lost or changed"
    return now


def reached(config: Config) -> int:
    """Rounds that are trained."""
    if not Path(config.root, config.run_id, "run.json").exists():
        return 0
    found = latest_checkpoint(Run.open(config.root, config.run_id))
    return 0 if found is None else round_of(found.slot.rpartition("/")[2]) or 0


def _cpu_s(process: int) -> float:
    """Seconds of processor time that a process has had."""
    numbers = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / TICKS_PER_S


def live() -> None:
    """Play the run of an order, this program's argument, and exit without waiting for threads."""
    order, code = json.loads(sys.argv[1]), 1
    try:
        config = parse_config(order["config"])
        with _suffering(config, order):
            importlib.import_module(order["flow"]).start(config)
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

"""Ctrl-C in each phase of a command: one line, exit code 130, and no abort."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.forked_python import REPOSITORY

DEBUG = str(REPOSITORY / "configs" / "debug.yaml")
SFT = ("--set", "policy.init=sft", "--set", "sft.steps=100000")
WAIT_S = 600.0
PHASES = {
    "doctor": (("doctor", DEBUG), "ok "),
    "a server starts": (("run", DEBUG), "using a temporary one"),
    "warm start": (("run", DEBUG, *SFT), "warm start"),
    "rounds": (("run", DEBUG, "--set", "rounds=100000"), "round 1 "),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_ends_each_phase_with_exit_code_130(phase: str, tmp_path: Path) -> None:
    words, until = PHASES[phase]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "marin_rl", *words]
    root = ("--root", str(tmp_path)) if words[0] == "run" else ()
    environment = {**os.environ, "PREFECT_API_URL": "", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *root], stdout=file, stderr=file, env=environment, cwd=tmp_path
        )
    ends = time.monotonic() + WAIT_S
    while until not in log.read_text() or not _handles_signals(process):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 130, log.read_text()
    said = log.read_text()
    assert "interrupted" in said
    assert "Traceback" not in said
    assert "terminate called" not in said


def _handles_signals(process: "subprocess.Popen[bytes]") -> bool:
    """Return True once Python has its handler: before that SIGINT just ends the process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & (1 << (signal.SIGINT - 1)))

"""Processes that tests watch by id, and the work of a worker that reports its own limits."""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

GONE_TIMEOUT_S = 60


def lives(process_id: int) -> bool:
    """Return True for a process that is there, and more than a zombie."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(process_ids: Iterable[int]) -> None:
    """Wait for processes to end, which something else sees to."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while alive := [each for each in process_ids if lives(each)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def begin(_settings: object) -> Callable[[object], bytes]:
    """Return the work of a worker."""
    return answer


def answer(_request: object) -> bytes:
    """Return as JSON what this process has and may do."""
    written = 0
    try:
        with tempfile.NamedTemporaryFile() as file:
            written = Path(file.name).write_bytes(b"x")
    except OSError:
        pass
    return json.dumps(
        {
            "environment": dict(os.environ),
            "session": os.getsid(0),
            "written_bytes": written,
            "jax": "jax" in sys.modules,
            "processes": resource.getrlimit(resource.RLIMIT_NPROC),
        }
    ).encode()

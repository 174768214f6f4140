"""Processes that tests watch by id, and the work of a worker that reports its own limits."""

import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from marin_rl.processes import Processes

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


@contextmanager
def joined_processes() -> Iterator[list[Processes]]:
    """Two processes of a real coordinator, which are threads of this one."""
    from jax._src.lib import _jax  # a second, which workers need not spend

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(place, 2, shutdown_timeout=5)
    clients = [
        _jax.get_distributed_runtime_client(place, n, init_timeout=30, shutdown_timeout=5)
        for n in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        try:
            yield [Processes(client, n, 2) for n, client in enumerate(clients)]
        finally:
            list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()

"""A Prefect server in a process of its own, which commands that tests start report to."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import prefect

from flows.server import free_port, healthy

REPOSITORY = Path(__file__).parents[2]
START_S_MAX = 900.0  # where other programs have the most of a machine


def _template() -> Path:
    return Path(os.environ["PREFECT_HOME"]) / f"migrated-{prefect.__version__}.db"


def copy_template(database: Path) -> bool:
    """Copy a migrated, empty database where there is none: migrating a new one takes seconds."""
    if not database.exists() and _template().exists():
        shutil.copyfile(_template(), database)
    return database.exists()


def save_template(database: Path) -> None:
    """Keep a database that was just migrated for the next start."""
    partial = _template().with_name(f".{os.getpid()}.db")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
    partial.replace(_template())


class PrefectServer:
    """A Prefect server that can be killed, and started again with what it knew.

    `python` starts it; that of `forked_python` forks it.
    """

    def __init__(self, home: Path, python: str = sys.executable) -> None:
        self._home, self._port, self._python = home, free_port(), python
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        self._home.mkdir(exist_ok=True)
        database = self._home / "p.db"
        migrated = not copy_template(database)
        self._process = subprocess.Popen(
            [self._python, "-P", str(REPOSITORY / "flows" / "server.py"), str(self._port)],
            env={
                **os.environ,
                "PREFECT_HOME": str(self._home),
                "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
                "PREFECT_UI_ENABLED": "false",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S_MAX
        while not healthy(self.url):
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.1)
        if migrated:
            save_template(database)

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, wherever it is not dead already."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

"""Roots and working folders that are not ASCII, in a locale that has no such characters."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.policy_runs import small_run

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def ended(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A Python in an ASCII locale, at its end."""
    command = [sys.executable, *arguments]
    env = os.environ | ASCII
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, encoding="utf-8", check=False
    )


def test_the_command_line_reads_any_root_in_any_locale(tmp_path: Path) -> None:
    folder = tmp_path / "w\u00f6rk"
    run = small_run(folder / "wurz\u00e9l")
    status = "-m", "marin_rl", "status", run.run_id, "--json"
    shown = ended(*status, "--root", "wurz\u00e9l", folder=folder)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["run_id"] == run.run_id


def test_a_script_is_told_how_to_read_it(tmp_path: Path) -> None:
    script = (
        "from marin_rl.storage.stores.filesystem import open_store\n"
        "open_store('/tmp/wurz\\u00e9l')\n"
    )
    refused = ended("-c", script, folder=tmp_path)
    last = refused.stderr.splitlines()[-1]
    assert refused.returncode == 1
    assert r"root: '/tmp/wurz\xe9l' cannot be a file name in this process" in last
    assert "PYTHONUTF8=1" in last

"""A whole run with an environment and a loss of the user's own, next to files named like ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"
TRAPS = ("tasks", "flows", "schemas", "types", "errors", "json", "marin_rl")


def block(page: str, start: str) -> str:
    """The code block of a page of the docs whose first line begins with `start`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.search(rf"```\w+\n({re.escape(start)}.*?)```", text, re.DOTALL)[1]  # type: ignore[index]


@pytest.mark.slow
def test_a_run_with_own_code_goes_on_without_its_files(api: str, tmp_path: Path) -> None:
    """Every command as a process in the user's folder; later with the copies alone."""
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported by mistake')\n")
    files = {
        "envs.py": block("your-environment.md", "# envs.py"),
        "losses.py": block("objectives.md", "# losses.py"),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tree = yaml.safe_load(block("your-environment.md", "# counting.yaml"))
    tree |= yaml.safe_load(block("objectives.md", "objective:\n  loss"))
    tree |= {"rounds": 2, "filters": {"zero_signal": False}, "inference": {"engine": {"slots": 16}}}
    (tmp_path / "counting.yaml").write_text(yaml.safe_dump(tree))
    state = os.environ | {"PREFECT_API_URL": api, "COLUMNS": "200"}
    state |= {"XDG_STATE_HOME": str(tmp_path / "state")}
    program = [str(Path(sys.executable).parent / "marin-rl")]

    def command(*arguments: str, code: int = 0, env: dict[str, str] = state) -> str:
        ended = subprocess.run(
            [*program, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    command("run", "counting.yaml")
    folder = tmp_path / "runs/counting"
    assert "loss/custom/above_high" in (folder / "metrics.jsonl").read_text()
    assert sorted(path.read_text() for path in (folder / "code").iterdir()) == sorted(
        files.values()
    )
    for name in files:
        (tmp_path / name).unlink()
    assert "no file envs.py in" in command("run", "counting.yaml", code=2)
    command("metrics", "verify", "counting")
    command("fsck", "counting")
    assert "EQUAL" in command("replay-step", "counting", "--round", "1")
    command("run", "runs/counting", "--rounds", "3")
    (tmp_path / "envs.py").write_text(files["envs.py"] + "\n# changed\n")
    (tmp_path / "losses.py").write_text(files["losses.py"])
    assert "was started with other code" in command("run", "counting.yaml", code=2)
    others = state | {"XDG_STATE_HOME": str(tmp_path / "others")}
    refused = command("replay-step", "counting", "--round", "1", code=2, env=others)
    assert "objective.loss: imports losses.py:asymmetric_clip#" in refused
    assert "EQUAL" in command("replay-step", "counting", "--round", "1", "--trust", env=others)
    for name in ("types", "json", "marin_rl"):  # these would keep `-m` itself from starting
        (tmp_path / f"{name}.py").unlink()
    program[:] = [sys.executable, "-m", "marin_rl"]
    assert "counting" in command("status")

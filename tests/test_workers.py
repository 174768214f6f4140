"""Workers of tests are forked from a collection: what it cannot import, they report."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_fails_the_tests(tmp_path: Path) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text("from os import no_such_name\n\n\ndef test_nothing() -> None: ...\n")
    command = ["-m", "pytest", "-q", "-n", "1", "-m", "not slow", "tests/test_finite.py"]
    done = subprocess.run(
        [sys.executable, *command, str(broken)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "cannot import name 'no_such_name'" in done.stdout
    assert " passed" in done.stdout
    assert "1 error" in done.stdout

"""Programs that are compiled quickly stay within their block."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

# XLA ends a process that has it read a flag that it does not know.
PROGRAM = """
import jax
from support import quick_programs
quick_programs.QUICK_FLAG = "--xla_of_no_version"
with quick_programs.quick_programs():
    print(jax.jit(lambda number: number + 1)(1))
"""


def test_a_process_whose_first_program_is_a_quick_one_keeps_its_own_flags() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=TESTS, capture_output=True, text=True
    )
    assert done.stdout == "2\n", done.stderr[-2000:]

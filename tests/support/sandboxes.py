"""The sandbox of tests: one for all, or a reason to skip them."""

import functools
import shutil

import pytest

from marin_rl.errors import ConfigError
from marin_rl.isolated.sandbox import Sandbox, SandboxLimits, check_sandbox

PATIENT_S = 120.0  # no busy machine reaches it


@functools.lru_cache(maxsize=1)
def reason_to_skip() -> str | None:
    """Return why no sandbox works here, None where one does.

    A bubblewrap that is installed and does not work skips too: containers may forbid namespaces.
    """
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed: apt-get install bubblewrap"
    try:
        check_sandbox("bubblewrap")
    except ConfigError as error:
        return str(error)
    return None


def sandbox(**limits: float) -> Sandbox:
    """Return a sandbox whose time limits no busy machine reaches, or skip the test."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    return Sandbox(SandboxLimits(**{"wall_s": PATIENT_S, "cpu_s": 100, **limits}))

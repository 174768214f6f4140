"""Tests with a real model, SmolLM2-135M-Instruct: `make test-real` installs it and runs them.

MARIN_RL_REAL_MODEL names its Hugging Face folder. Tests here are marked slow, take the fixture
`real_model`, and never write into the folder.
"""

import os
from pathlib import Path

import pytest

REAL_MODEL = "MARIN_RL_REAL_MODEL"


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the real model; skips without one."""
    folder = os.environ.get(REAL_MODEL)
    if not folder:
        pytest.skip(f"{REAL_MODEL} names no folder: `make test-real` makes one")
    return Path(folder).resolve()

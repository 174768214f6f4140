"""Promises of imports: no device, no socket, no accelerator library on the data side."""

import os
import subprocess
import sys

import pytest
from support.imports import FOREIGN

DATA_SIDE = (
    "marin_rl.storage.tables.rollouts",
    "marin_rl.storage.tables.batches",
    "marin_rl.storage.upkeep.audit",
    "marin_rl.rollouts.evaluate",
    "marin_rl.rollouts.generate",
    "marin_rl.batching.build",
    "marin_rl.environments.base",
    "marin_rl.inference.client.policy_client",
)
EVERYTHING = (
    "flows.rl_loop",
    "flows.sft",
    "flows.evaluate",
    "marin_rl.cli",
    "marin_rl.serving.server",
    "marin_rl.serving.weights.canary",
    "marin_rl.training.loop",
    "marin_rl.training.sft",
)
HEAVY = ("jax", "levanter", "haliax", "orbax", "torch")
# Imports of seconds, of which an error in a configuration or its files needs none.
ENGINES = (*HEAVY, "prefect", "polars", "duckdb", "openai")


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_data_side_imports_nothing_of_accelerators_or_integrations(tmp_path):
    """The checks before a run import no engine; those of an environment start no process."""
    code = f"""
import sys
from marin_rl.config import Config, load_config
from marin_rl.doctor.start import before_engines
sound = load_config("configs/debug.yaml", ["root={tmp_path}"])
assert before_engines(sound, "rl-loop") is None
assert not set({ENGINES!r}) & set(sys.modules)
from marin_rl.environments.checks import environment_of
from marin_rl.environments.episode_pool import pools
import {", ".join(DATA_SIDE)}
environment_of(Config(run_id="r"))
assert not pools
print([name for name in sys.modules if name in {HEAVY!r} or name.startswith({FOREIGN!r})])
"""
    assert python(code) == "[]"


@pytest.mark.slow
def test_importing_touches_no_device():
    """JAX would fail at the first array, for there is no such platform."""
    code = "\n".join(f"import {module}" for module in EVERYTHING)
    assert python(f"{code}\nprint('imported')", JAX_PLATFORMS="nowhere", XLA_FLAGS="") == "imported"


def test_commands_start_without_heavy_imports():
    heavy = f"[n for n in (*{HEAVY!r}, 'prefect') if n in sys.modules]"
    assert python(f"import marin_rl.cli, marin_rl.display, sys; print({heavy})") == "[]"


@pytest.mark.slow
def test_prefect_still_starts_its_server_with_the_pinned_fastapi():
    code = "from prefect.server.api.server import create_app; print(type(create_app()).__name__)"
    assert python(code) == "FastAPI"

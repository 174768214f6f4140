"""Shared setup of all tests. It also lets them import the helpers in this folder by name."""

import os
from pathlib import Path

# Before anything imports JAX: two devices, so that every test of sharding has something to shard.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

# What one test compiles, the next one finds, in whatever process, also of the next `make test`; the
# home folder stays clean. `pytest --cache-clear` drops it.
PROGRAMS = Path(__file__).resolve().parents[1] / ".pytest_cache/d/marin-rl-programs"
os.environ.setdefault("MARIN_RL_TEST_PROGRAMS", str(PROGRAMS))
os.environ["MARIN_RL_COMPILATION_CACHE"] = os.environ["MARIN_RL_TEST_PROGRAMS"]

from marin_rl.machine import machine_key

os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", f"{os.environ['MARIN_RL_TEST_PROGRAMS']}/{machine_key()}"
)
# Runs that tests start are remembered apart from the user's own.
os.environ["XDG_STATE_HOME"] = str(PROGRAMS.with_name("marin-rl-state"))

from collections.abc import Iterator

import jax
import pytest
from hypothesis import HealthCheck, settings

# jaxtyping's plugin has imported JAX before this file, so the variable above reaches children
# only. Small programs are kept too: thousands of them take most of the suite's time.
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

settings.register_profile(
    "marin-rl",
    deadline=None,  # the cores are shared with other programs
    derandomize="MARIN_RL_SEED" in os.environ,  # a fixed seed means the same examples
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("marin-rl")


_quick_programs_left = False


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Programs are compiled in half the time, and run slower than those that users have.

    Their last bits differ too, and a jitted function keeps its programs: `pytest_runtest_setup`
    drops them before the next test that wants what users have.
    """
    global _quick_programs_left
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    _quick_programs_left = True
    with pytest.MonkeyPatch.context() as patch:  # for processes that tests begin
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test of programs as users have them meets none that was compiled quickly before it."""
    global _quick_programs_left
    if _quick_programs_left and "compiled_quickly" not in getattr(item, "fixturenames", ()):
        jax.clear_caches()
        _quick_programs_left = False


# The files that take longest, from the longest on: they begin first, so that `make test` does not
# end with one process at work on one of them.
LONGEST = (
    "training/test_step.py",
    "flows/test_every_operation.py",
    "inference/test_engine.py",
    "inference/test_engine_load.py",
    "inference/test_batch_invariance.py",
    "inference/test_lanes.py",
    "training/test_loop.py",
    "training/test_logprobs.py",
    "test_rounds.py",
    "analysis/test_verify.py",
    "serving/test_admin.py",
    "serving/test_watcher.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the order within a file stays."""
    top = Path(__file__).parent
    rank = {top / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))

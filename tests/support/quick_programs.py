"""Programs that are compiled in a fifth of the time and run slower than those that users have."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compiler

# What writes XLA's fusions by way of MLIR takes three quarters of the time of compiling quickly.
EMITTERS = "xla_cpu_use_fusion_emitters"
# As one module of code per program: that costs a fifth less than the parts for many threads.
PARTS = "xla_cpu_parallel_codegen_split_count"
# For a process that gets an XLA_FLAGS of its own.
QUICK_FLAG = f"--{EMITTERS}=false --{PARTS}=1"

_quick = False
_left = False


@contextmanager
def quick_programs(*, emitters: bool = False) -> Iterator[None]:
    """Compile quickly inside the block, also in processes that begin there.

    With the `emitters` it takes three times as long; a process then gives the bits of another that
    has other devices.

    Last bits differ from those of users' programs, and a jitted function keeps what it has:
    `drop_quick_programs` comes before whatever wants programs as users have them.
    """
    global _quick, _left
    if _quick:
        yield
        return
    # XLA reads XLA_FLAGS once, as JAX starts: within, all later programs of this process would be
    # of that kind, and in the cache under the names of users' own.
    jax.devices()
    before, _quick, _left = jax.config.values["jax_disable_most_optimizations"], True, True
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
            if not emitters:
                patch.setattr(compiler, "get_compile_options", _without_emitters())
                patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAG}")
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        _quick = False


def drop_quick_programs() -> None:
    """Forget the programs of this process, if any were compiled quickly since the last call."""
    global _left
    if _left:
        jax.clear_caches()
        _left = _quick


def _without_emitters() -> Callable[..., Any]:
    """JAX's options of a program, for a process in which XLA has read XLA_FLAGS already."""
    options_of = compiler.get_compile_options

    def options(*arguments: Any, **named: Any) -> Any:
        made = options_of(*arguments, **named)
        made.env_option_overrides = [*made.env_option_overrides, (EMITTERS, False), (PARTS, 1)]
        return made

    return options


def run_on_devices(count: int, module: Path, call: str, *, quick: bool = True) -> str:
    """Call a function of a test module in a process of its own that has `count` CPU devices.

    What it wrote to stderr, compilers' warnings among it.
    """
    folder, flags = module.parent, f"--xla_force_host_platform_device_count={count}"
    flags = f"{flags} {QUICK_FLAG}" if quick else flags
    places = f"{folder.parents[1]}:{folder.parent}:{folder}"
    done = subprocess.run(
        [sys.executable, "-c", f"import {module.stem}; {module.stem}.{call}"],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": places},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr

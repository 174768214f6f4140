"""What JAX is told before it compiles anything, once per process.

A restarted run finds the programs of the one before in a cache on disk, and a CPU keeps the memory
that programs free instead of asking the kernel for zeroed pages at every step.
"""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import jax

CACHE_VARIABLE = "MARIN_RL_COMPILATION_CACHE"

# glibc's mallopt(3): parameter numbers, and the largest threshold that it accepts.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_NEVER = 2**31 - 1


@cache
def enable_compilation_cache() -> Path | None:
    """Keep compiled programs on disk; returns the folder, or None where it is switched off.

    The folder is that of the environment variable MARIN_RL_COMPILATION_CACHE (empty: no cache), of
    JAX's own setting, or ~/.cache/marin-rl/xla. A program found there is the one that was compiled,
    so it computes the same bits.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen == "":
        return None
    folder = Path(chosen or os.environ.get("JAX_COMPILATION_CACHE_DIR") or "~/.cache/marin-rl/xla")
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep what is freed; True where that was done.

    A training step on a CPU allocates and frees hundreds of megabytes. By default each such block
    is mapped afresh, and a fifth of the step's CPU time goes to the kernel's page faults.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = {
        _M_ARENA_MAX: 1,
        _M_MMAP_THRESHOLD: 1 << 30,
        _M_TRIM_THRESHOLD: _NEVER,
        _M_TOP_PAD: 64 << 20,
    }
    accepted = [library.mallopt(name, value) for name, value in settings.items()]
    return all(accepted)

"""Process-wide settings of JAX, the C library and Python's garbage collector.

A restarted run finds the programs of the one before in a cache on disk, a CPU keeps the memory that
programs free instead of asking the kernel for zeroed pages at every step, what compiling freed goes
back once, what lives as long as the process is not looked at again and again, arrays reach the
device without compiling a program, and float32 is float32 on accelerators too.
"""

import gc
import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from marin_rl.machine import (
    M_MMAP_THRESHOLD,
    M_TOP_PAD,
    M_TRIM_THRESHOLD,
    give_back_freed_memory,
    glibc,
    machine_key,
    share_one_heap,
)
from marin_rl.progress import phase

_log = logging.getLogger(__name__)

Tree = TypeVar("Tree")

CACHE_VARIABLE = "MARIN_RL_COMPILATION_CACHE"

# The largest threshold that mallopt(3) accepts.
_NEVER = 2**31 - 1

_MIN_COMPILE_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"  # JAX's own
# Of memory that XLA's CPU client reads in place.
ALIGNMENT_BYTES = 64
# New objects before the collector looks at them; Python's own number is 700.
_YOUNG_OBJECTS = 10_000


def programs_folder() -> Path | None:
    """The folder of this machine's compiled programs, or None where the cache is switched off.

    It is in the folder of the environment variable MARIN_RL_COMPILATION_CACHE (empty: no cache), of
    JAX's own setting, or ~/.cache/marin-rl/xla, and is named after instruction set and threads:
    JAX's keys have the flags that it is given, but neither the processor nor the size of the pool.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen == "":
        return None
    folder = Path(chosen or os.environ.get("JAX_COMPILATION_CACHE_DIR") or "~/.cache/marin-rl/xla")
    key = machine_key()
    try:
        # JAX's setting may name such a folder already: that of the process that began this one
        return folder.expanduser() if folder.name == key else folder.expanduser() / key
    except RuntimeError as error:  # no home is known
        _warn_of_no_cache(error)
        return None


@cache
def enable_compilation_cache() -> Path | None:
    """Keep compiled programs on disk; returns the folder, or None without a cache.

    A program that is read from there is the one that was compiled, so it computes the same bits. A
    folder that cannot be written is a warning: programs are then compiled in every process. What
    compiles in less than 0.2 s is not kept; JAX's own variable sets another limit.
    """
    folder = programs_folder()
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _warn_of_no_cache(error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if _MIN_COMPILE_VARIABLE not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


def _warn_of_no_cache(error: Exception) -> None:
    _log.warning(
        "no compiled programs are kept (%s): each process compiles them again. Set %s to a folder "
        "that can be written, or to nothing to switch the cache off",
        error,
        CACHE_VARIABLE,
    )


def device_array(array: Any, dtype: Any = None, *, copy: bool = True) -> jax.Array:
    """An array of JAX, in another dtype if given; NumPy's are copied, so that they may be
    written to afterwards, unless `copy` is false.

    `jnp.asarray` would compile a program for each shape of NumPy's arrays.
    """
    # A CPU's array may be the very memory that it is given, so that is a copy.
    if isinstance(array, jax.Array):
        return array.astype(dtype or array.dtype)
    return jax.device_put(np.array(array, dtype, copy=copy or None))


@cache
def replicated(mesh: Mesh) -> Callable[[Any], jax.Array]:
    """Return the program that gives every device of `mesh` all of an array: a collective."""
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))


def gathered(tree: Tree) -> Tree:
    """The same tree, in which this process can read every array whole.

    What is spread over the devices of several processes is gathered, an array at a time. That is a
    collective: all of them call it, in the thread that runs their programs. Others are unchanged.
    """

    def readable(array: Any) -> Any:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return array
        if array.is_fully_replicated:
            return array
        assert isinstance(array.sharding, NamedSharding), array.sharding
        mesh = array.sharding.mesh
        assert isinstance(mesh, Mesh), "arrays lie on devices"
        return np.asarray(replicated(mesh)(array))

    return jax.tree.map(readable, tree)


def nbytes(arrays: Any) -> int:
    """Bytes of all arrays of a tree, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def aligned_empty(shape: Sequence[int], dtype: DTypeLike = np.float32) -> np.ndarray:
    """An array without values, whose memory a CPU's device takes as it is: no copy is made."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    block = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    return block[start : start + size].view(dtype).reshape(shape)


def compiled_apart(jitted: Any, name: str) -> Callable[..., Any]:
    """A jitted function whose programs are compiled, each at its first call, before they run.

    What is free goes back to the kernel before and after, so that compiling a large program, which
    takes hundreds of megabytes for a while, does so neither on top of what was freed before nor
    below what the program itself needs. Threads that call it at once compile once; `name` is
    that of the program in progress.
    """
    known: set[Any] = set()
    compiling = threading.Lock()

    def call(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return jitted(*arguments)  # within a trace there is nothing to compile
        kind = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        with compiling:
            if kind not in known:
                with phase(f"compiling {name}"):
                    lowered = jitted.lower(*arguments)
                    give_back_freed_memory()
                    lowered.compile()  # the call below finds this very program
                    del lowered
                    give_back_freed_memory()
                known.add(kind)
        return jitted(*arguments)

    return call


# Freed blocks that are kept, and those of a process that trains a large model.
KEPT_BYTES_MAX, KEPT_BYTES_MAX_LARGE, LARGE_BYTES_MIN = 1 << 30, 1 << 25, 1 << 28


@cache
def keep_freed_memory(kept_max: int = KEPT_BYTES_MAX) -> bool:
    """Let the C library keep freed blocks below `kept_max` bytes; True where that was done.

    A training step on a CPU allocates and frees hundreds of megabytes. By default each such block
    is mapped afresh, and a fifth of the step's CPU time goes to the kernel's page faults.
    """
    library = glibc()
    if library is None or jax.default_backend() != "cpu":
        return False
    settings = {M_MMAP_THRESHOLD: kept_max, M_TRIM_THRESHOLD: _NEVER, M_TOP_PAD: 64 << 20}
    accepted = [library.mallopt(name, value) for name, value in settings.items()]
    return all(accepted) and share_one_heap()


def set_matmul_precision(compute_dtype: DTypeLike) -> None:
    """Have accelerators multiply float32 matrices in float32, for a policy that computes in it.

    By JAX's default an NVIDIA GPU multiplies them in TF32 (10 bits of mantissa) and a TPU in
    bfloat16 (7 bits): engine and trainer, which add up in different orders, are then 1e-3 nats
    apart after a few updates. JAX_DEFAULT_MATMUL_PRECISION, where it is set, stays as it is, and
    so does JAX's default for a policy in bfloat16. For the whole process; before programs are
    compiled.
    """
    chosen = jax.config.values["jax_default_matmul_precision"] is not None
    if chosen or np.dtype(compute_dtype) != np.float32 or jax.default_backend() == "cpu":
        return
    jax.config.update("jax_default_matmul_precision", "highest")


def prepare_for_training(parameters_bytes: int = 0) -> None:
    """Set up this process to train a model of this size."""
    enable_compilation_cache()
    # glibc finds no room for an aligned array in the gap that an equal one left: of large ones,
    # whose faults are no share of a step, it would keep as much again as training needs.
    large = parameters_bytes > LARGE_BYTES_MIN
    keep_freed_memory(KEPT_BYTES_MAX_LARGE if large else KEPT_BYTES_MAX)


@cache
def spare_long_lived_objects() -> None:
    """Freeze the heap (`gc.freeze`) after start-up.

    The libraries' objects number a million. A full collection looks at every one of them, for 0.4 s
    of a core, and a server's requests bring one about every thousand or so.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])

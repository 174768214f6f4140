"""XLA's compiled programs, kept on disk between processes.

A second start of the same model and engine reads its programs instead of compiling them again. The
trainer's programs go there too. Entries are keyed by XLA on the program, its options, the platform
and the library's version, so a stale one is never used.
"""

import os
from pathlib import Path

import jax

# Programs that compile faster than this are not worth a file.
COMPILE_MIN_S = 0.3


def compilation_cache_folder() -> Path:
    """`marin-rl/xla` in XDG_CACHE_HOME, or in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "marin-rl" / "xla"


def enable_compilation_cache(folder: str | Path | None = None) -> Path:
    """Keep compiled programs in `folder` from now on; returns it. A folder set already stays.

    To be called before the first compilation. JAX_COMPILATION_CACHE_DIR takes precedence.
    """
    present = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    path = (
        Path(present) if present and folder is None else Path(folder or compilation_cache_folder())
    )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", COMPILE_MIN_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path

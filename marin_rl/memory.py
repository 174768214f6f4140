"""Settings of glibc's memory allocator for a process that computes; elsewhere nothing is done.

By default every thread that allocates gets a heap of its own, and what one freed no other uses: a
run has dozens of threads, and its training steps would leave such a heap full of holes in each.
"""

import ctypes
import sys
from functools import cache

# mallopt(3): parameter numbers.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8


@cache
def share_one_heap() -> bool:
    """Let all threads allocate from one heap; True where that was done.

    Threads that allocated before keep theirs, so this goes before any library that starts some.
    """
    library = glibc()
    return library is not None and bool(library.mallopt(M_ARENA_MAX, 1))


def give_back_freed_memory() -> None:
    """Hand what is free back to the kernel, once: a program's compilation or a step's blocks."""
    library = glibc()
    if library is not None:
        library.malloc_trim(0)


def glibc() -> ctypes.CDLL | None:
    """The C library of this process, where it is glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None

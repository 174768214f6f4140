"""One heap for all threads of a process, and what is free in it."""

import subprocess
import sys

import pytest

from marin_rl.machine import glibc

# malloc_info(3) tells of every heap: threads that allocate side by side would get one each.
HEAPS = """
import ctypes, sys, tempfile, threading
from marin_rl.machine import glibc, share_one_heap
if sys.argv[1] == "shared":
    assert share_one_heap()
library = glibc()
library.malloc.restype = ctypes.c_void_p
met = threading.Barrier(4)
def allocate():
    met.wait()
    library.malloc(1000)
    met.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(library.fopen(file.name.encode(), b"w"))
    library.malloc_info(0, stream)
    library.fclose(stream)
    print(file.read().decode().count("<heap "))
"""


@pytest.mark.skipif(glibc() is None, reason="heaps are counted by glibc")
def test_threads_allocate_from_one_heap():
    def heaps(how: str) -> int:
        command = [sys.executable, "-c", HEAPS, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert heaps("shared") == 1
    assert heaps("as it comes") > 1


# As a step leaves them: many blocks freed, and among them small ones that stay.
GAPS = """
import ctypes, sys, threading
from pathlib import Path
from marin_rl.compilation import keep_freed_memory
from marin_rl.machine import give_back_freed_memory, glibc, heap_bytes
assert keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def block(size):
    found = library.malloc(size)
    library.memset(found, 1, size)
    return found
def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) >> 8
large = []
for _ in range(200):
    large.append(block(1 << 20))
    block(1000)
used = resident_mb()
for one in large:
    library.free(one)
kept = resident_mb()
give_back_freed_memory()
print(used - kept, used - resident_mb())
if not hasattr(glibc(), "mallinfo2"):
    sys.exit()
# other threads are about to free some
before, settled = resident_mb(), heap_bytes()
large = [block(1 << 20) for _ in range(600)]
def free():
    for one in large:
        library.free(one)
timer = threading.Timer(0.05, free)
timer.start()
give_back_freed_memory(1 << 29, settled)
print(resident_mb() - before)
timer.join()
"""


@pytest.mark.skipif(glibc() is None, reason="what is kept is glibc's")
def test_freed_memory_is_kept_until_it_is_returned_and_what_others_free_is_waited_for():
    command = [sys.executable, "-c", GAPS]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kept, given_back, *late = map(int, said.split())
    assert kept < 20
    assert given_back > 150
    # MB: FREED_BYTES_MIN of them count as settled; glibc before 2.33 counts no bytes
    assert all(megabytes < 300 for megabytes in late)

"""The machine: facts that bits depend on, XLA's thread pool, its memory and what does not fit.

XLA's CPU client sizes its pool once, when JAX starts: by the environment variable NPROC, else by
the cores that the process may use. A pool of one thread adds up products in another order than a
larger one, so a process on one core gets a pool of THREADS_MIN. Owns that floor, and the facts that
manifests record and comparisons name; the memory that this process may use (limits of control
groups count, and of an accelerator once JAX has started), and one error for work that does not fit
into it. Leaves out how much a run needs (`planning`). Imports no JAX: commands that read a run, or
only plan one, need none.

By default every thread that allocates gets a heap of its own, and what one freed no other uses: a
run has dozens of threads, and its training steps would leave such a heap full of holes in each.
"""

import ctypes
import hashlib
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from marin_rl.errors import DeviceLost, OutOfMemory

THREADS_VARIABLE = "NPROC"
CHOSEN_PLATFORMS = "JAX_PLATFORMS"  # JAX's own variable

LOOPBACK = ("localhost", "127.0.0.1", "::1")

# One core then gives the bits of two.
THREADS_MIN = 2

# Of a small model a training step's microbatches, and the engine's slots, are computed side by side
# in lanes. The operations of larger models are long enough that XLA shares each among all cores,
# and every lane of a training step has gradients of its own.
LANE_WEIGHTS_BYTES_MAX = 2**27
STEP_LANES = 2

# What XLA calls the threads of its CPU pool; Linux keeps 15 characters of a name.
_POOL_THREAD = "tf_XLAEigen"

# XLA's names of instruction sets, ascending, and the processor's flag for each.
_INSTRUCTION_SETS = (
    ("SSE4_2", "sse4_2"),
    ("AVX", "avx"),
    ("AVX2", "avx2"),
    ("AVX512", "avx512f"),
    ("AVX512_VNNI", "avx512_vnni"),
    ("AVX512_BF16", "avx512_bf16"),
    ("AMX", "amx_bf16"),
    ("AMX_FP16", "amx_fp16"),
)
_ISA_FLAG = "--xla_cpu_max_isa"
_DEVICES_FLAG = "--xla_force_host_platform_device_count"

# Settings of JAX that change which instructions a program is made of.
_JAX_SETTINGS = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DEFAULT_MATMUL_PRECISION")


def ensure_threads() -> None:
    """Set NPROC where XLA's pool would have fewer than THREADS_MIN threads.

    A value that is set already is the user's own. Without effect once JAX has started; done by the
    first import of the package, so that every entry point has it.
    """
    if THREADS_VARIABLE not in os.environ and cores() < THREADS_MIN:
        os.environ[THREADS_VARIABLE] = str(THREADS_MIN)


def proxies() -> list[str]:
    """Return the names of the environment's proxy variables that are set; values may be secret."""
    kinds = ("http_proxy", "https_proxy", "all_proxy")
    return sorted(name for name in os.environ if name.lower() in kinds and os.environ[name])


def spare_loopback() -> None:
    """Have no request to this machine go through a proxy, in this process and its children.

    Servers of a run listen on loopback: a proxy of the environment would answer in their place.
    Done by the first import of the package.
    """
    if not proxies():
        return
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name for name in (part.strip() for part in known.split(",")) if name]
    if "*" not in names:
        value = ",".join(dict.fromkeys([*names, *LOOPBACK]))
        os.environ.update(no_proxy=value, NO_PROXY=value)


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ensure_no_alarms() -> None:
    """Set TF_CPP_MIN_LOG_LEVEL so that XLA's CPU compiler asks nobody to file a bug for slowness.

    Phases say what is compiled, and for how long. A level that is set already is the user's own;
    with an NVIDIA GPU XLA's errors may be the only word on what is wrong with its driver.
    """
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def computes_on_host() -> bool:
    """True where JAX computes on this machine's CPUs, by its setting or for want of others."""
    if chosen := os.environ.get(CHOSEN_PLATFORMS):
        return chosen.partition(",")[0] == "cpu"
    return not any(Path("/dev", name).exists() for name in ("nvidiactl", "accel0", "vfio/0"))


def pool_threads() -> int:
    """Threads of XLA's CPU pool: counted where JAX has started, else as many as it will start."""
    running = running_pool_threads()
    if running:
        return running
    devices = max(int(xla_flags().get(_DEVICES_FLAG) or 1), _number("JAX_NUM_CPU_DEVICES"))
    return max(_number(THREADS_VARIABLE) or cores(), devices)


def running_pool_threads() -> int:
    """Threads of the pool that runs in this process: 0 before JAX starts, or not on Linux."""
    if "jax" not in sys.modules:
        return 0
    names = map(text_of, Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith(_POOL_THREAD) for name in names)


def request_threads(count: int) -> bool:
    """Have JAX start with a pool of `count` threads; False where it has started with another."""
    if count == pool_threads():
        return True
    if running_pool_threads():
        return False
    os.environ[THREADS_VARIABLE] = str(count)
    return pool_threads() == count


def machine_facts() -> dict[str, str]:
    """The facts that bits depend on besides code, libraries, configuration and mesh.

    `processor`, its `instruction_set` as XLA names it (or the one that XLA_FLAGS limits it to),
    `threads` of XLA's pool, the `device` that JAX computes on once it has started, and settings of
    XLA and JAX in the environment that change programs.
    """
    facts = {
        "processor": processor(),
        "instruction_set": instruction_set(),
        "threads": str(pool_threads()),
    }
    if (device := started_device()) is not None:
        facts["device"] = str(device.device_kind)
    ignored = (_ISA_FLAG, _DEVICES_FLAG, "--xla_dump")
    flags = [
        f"{name}={value}" for name, value in xla_flags().items() if not name.startswith(ignored)
    ]
    if flags:
        facts["xla_flags"] = " ".join(sorted(flags))
    return facts | {name.lower(): os.environ[name] for name in _JAX_SETTINGS if name in os.environ}


def machine_key() -> str:
    """A name for this machine's programs: instruction set, threads, digest of facts and features.

    The device is left out: it is not known before JAX has started, and JAX keeps programs of
    different devices apart.
    """
    facts = {name: value for name, value in machine_facts().items() if name != "device"}
    text = repr((sorted(facts.items()), sorted(_features())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{facts['instruction_set']}-{facts['threads']}-{digest}".lower()


def changed_facts(
    recorded: Mapping[str, str], layout: Mapping[str, str] | None = None
) -> dict[str, tuple[str, str]]:
    """Facts that are others now than the recorded ones, as (recorded, now).

    `layout` has those of the mesh, and of the processes that share it. What was never recorded, as
    in checkpoints of earlier versions, reads "not recorded".
    """
    now = machine_facts() | dict(layout or {})
    names = sorted({*recorded, *now})
    absent = "" if recorded else "not recorded"
    pairs = {name: (str(recorded.get(name, absent)), now.get(name, "")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def instruction_set() -> str:
    """The largest of XLA's instruction sets that the processor has and XLA_FLAGS allows."""
    largest, limit = processor_instruction_set(), xla_flags().get(_ISA_FLAG, "").upper()
    known = [name for name, _ in _INSTRUCTION_SETS]
    return min(largest, limit, key=known.index) if {largest, limit} <= {*known} else largest


def processor_instruction_set() -> str:
    """The largest of XLA's instruction sets that the processor has; its family where not an x86."""
    names = [name for name, flag in _INSTRUCTION_SETS if flag in _features()]
    return names[-1] if names else platform.machine()


@cache
def processor() -> str:
    """Name of the processor, as the operating system reports it."""
    match = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


@cache
def _features() -> frozenset[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


@cache
def _cpu_info() -> str:
    return text_of(Path("/proc/cpuinfo"))


def text_of(file: Path) -> str:
    """Text of a file of the kernel; empty where it is not there, or not any more."""
    try:
        return file.read_text()
    except OSError:
        return ""


def xla_flags() -> dict[str, str]:
    pairs = (flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name: value for name, _, value in pairs}


def _number(variable: str) -> int:
    """The value of an environment variable, or 0 where it is no positive number."""
    value = os.environ.get(variable, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def started_device() -> Any:
    """The first of JAX's devices; None before it has started, which this does not do."""
    # no import: the data side reads facts too, and never depends on JAX
    bridge = sys.modules.get("jax._src.xla_bridge")
    # by its backends and not by the pool, which JAX_PLATFORMS=cuda starts none of
    if bridge is None or not bridge.backends_are_initialized():
        return None
    return sys.modules["jax"].local_devices()[0]


# mallopt(3): parameter numbers.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8


@cache
def share_one_heap() -> bool:
    """Let all threads allocate from one heap; True where that was done.

    Threads that allocated before keep theirs, so this goes before any library that starts some.
    """
    library = glibc()
    return library is not None and bool(library.mallopt(M_ARENA_MAX, 1))


# Freed bytes that are worth 0.1 s of looking for them, and the page faults of their next use.
FREED_BYTES_MIN = 2**28
SETTLING_S, SETTLING_WAITS_MAX = 0.002, 100


class _HeapInfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_bytes() -> int:
    """Bytes that are allocated from the C library's heap; 0 where it does not say."""
    library = glibc()
    if library is None or not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _HeapInfo
    info = library.mallinfo2()
    return info.uordblks + info.hblkhd


def give_back_freed_memory(freed: int = FREED_BYTES_MIN, settled: int | None = None) -> None:
    """Hand what is free back to the kernel, once: a program's compilation or a step's blocks.

    `freed` is about how many bytes there are; too few are left for the next allocations. With
    `settled`, about what `heap_bytes` will be, that is waited for, 0.2 s at most: XLA's threads
    free what a program read some time after its results are there.
    """
    library = glibc()
    if library is None or freed < FREED_BYTES_MIN:
        return
    if settled is not None:
        for _ in range(SETTLING_WAITS_MAX):
            if heap_bytes() < settled + FREED_BYTES_MIN:
                break
            time.sleep(SETTLING_S)
    library.malloc_trim(0)


def glibc() -> ctypes.CDLL | None:
    """The C library of this process, where it is glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


# Code of a server's answer to a request that does not fit into its memory.
OUT_OF_MEMORY = "out_of_memory"
# Settings that lower the memory of an engine, the mildest first.
ENGINE_KEYS = (
    "fewer inference.engine.slots",
    "a smaller policy.context_length",
    "a smaller inference.engine.prefill_rows",
)

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# XLA's words on every device: an allocation that failed, by its bytes or as a table of buffers.
_OF_XLA = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OUT_OF_MEMORY")
# A CUDA error within a program, after which the process can use the card no more.
_LOST = re.compile(r"CUDA_ERROR_(?!OUT_OF_MEMORY)\w+|GPU is lost|fallen off the bus")
_ASKED = re.compile(r"allocat\w* (?:of )?([\d.]+)\s*([KMGT]iB|GB|bytes)?")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a process may have in all and that are free now, and whose they are."""

    total: int
    free: int
    place: str

    def __str__(self) -> str:
        return f"{gigabytes(self.free)} free of {gigabytes(self.total)} ({self.place})"


def room(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> Room | None:
    """Memory of what JAX computes on: this host, or an accelerator; None before it has started one.

    Of a host: the least of what the machine, control groups and `ulimit -v` leave. `groups` is
    where control groups are mounted, and `own` lists those of this process.
    """
    if (device := started_device()) is not None and device.platform != "cpu":
        stats = device.memory_stats() or {}
        if total := int(stats.get("bytes_limit", 0)):
            return Room(total, total - int(stats.get("bytes_in_use", 0)), str(device.device_kind))
    return _of_host(groups, own) if computes_on_host() else None


def _of_host(groups: Path, own: Path) -> Room:
    info = {
        name: int(number) * 1024
        for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text_of(Path("/proc/meminfo")), re.M)
    }
    rooms = [Room(info.get("MemTotal", 2**62), info.get("MemAvailable", 2**62), "this machine")]
    rooms += _of_groups(groups, own)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        used = int((text_of(Path("/proc/self/statm")).split() or ["0"])[0])
        rooms.append(Room(limit, limit - used * resource.getpagesize(), "ulimit -v"))
    # The narrowest decides: a container's limit is below the machine's, and its parent's may be.
    least = min(rooms, key=lambda one: one.free)
    return Room(min(one.total for one in rooms), max(least.free, 0), least.place)


def _of_groups(root: Path, own: Path) -> Iterator[Room]:
    """Limits of this process's control group and of those above it, of version 2 and of 1."""
    for line in text_of(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        files = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        # Within a container the path may be the host's, and the root is its own group.
        inside = Path(path.strip("/"))
        for folder in {root / controllers / part for part in ("", inside, *inside.parents)}:
            total, used = (text_of(folder / f"memory.{name}").strip() for name in files)
            if total.isdigit() and int(total) < 2**60:
                cache = re.search(r"^inactive_file (\d+)", text_of(folder / "memory.stat"), re.M)
                kept = int(used or 0) - (int(cache[1]) if cache else 0)
                yield Room(int(total), int(total) - kept, "its control group")


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def is_out_of_memory(error: BaseException) -> bool:
    """True for XLA's and Python's exceptions of an allocation that failed."""
    # XLA's is a RuntimeError, also where this process did not import it.
    of_xla = isinstance(error, RuntimeError) and _OF_XLA.search(str(error)) is not None
    return of_xla or isinstance(error, MemoryError)


def out_of_memory(work: str, keys: Sequence[str], error: BaseException) -> OutOfMemory:
    """Build the error of a failed allocation: bytes asked for, bytes there, settings to lower.

    `keys` are settings that lower it, the mildest first.
    """
    asked = _ASKED.search(str(error))
    amount = ""
    if asked is not None:
        amount = f" ({gigabytes(int(float(asked[1]) * _UNITS.get(asked[2], 1)))} in one piece)"
    here = room()
    there_is = "" if here is None else f", with {here}"
    return OutOfMemory(
        f"{work} does not fit into memory: it asked for more than there is{amount}{there_is}. "
        f"Lower it by {'; or '.join(keys)}"
    )


def device_lost(work: str, error: BaseException) -> DeviceLost | None:
    """The error of a card that failed under a program; None where `error` says nothing of one."""
    if not isinstance(error, RuntimeError) or (said := _LOST.search(str(error))) is None:
        return None
    return DeviceLost(
        f"the device failed in {work} ({said[0]}): what is committed is whole. Start this process "
        "again once `nvidia-smi` lists the card without errors: a run continues from its last "
        "checkpoint"
    )


@contextmanager
def memory_errors(work: str, keys: Iterable[str]) -> Iterator[None]:
    """Raise OutOfMemory in place of what XLA or Python raise where memory ends in the block.

    DeviceLost where a card fails in it.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (lost := device_lost(work, error)) is not None:
            raise lost from error
        if not is_out_of_memory(error):
            raise
        # XLA's trace names allocations of its own and no setting; the first line is in the message.
        raise out_of_memory(work, tuple(keys), error) from None

"""Memory: how much this process may use, and one error for work that does not fit into it.

Limits of control groups count, and so does that of an accelerator once JAX has started. Leaves out
how much a run needs (`planning`). Imports no JAX: commands that only plan need none.
"""

import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from marin_rl.errors import OutOfMemory
from marin_rl.machine import computes_on_host, started_device, text_of

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
    of_device = _of_accelerator()
    return _of_host(groups, own) if of_device is None and computes_on_host() else of_device


def _of_accelerator() -> Room | None:
    if (device := started_device()) is None or device.platform == "cpu":
        return None
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    total = int(stats["bytes_limit"])
    free = total - int(stats.get("bytes_in_use", 0))
    return Room(total, free, str(device.device_kind))


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


@contextmanager
def memory_errors(work: str, keys: Iterable[str]) -> Iterator[None]:
    """Raise OutOfMemory in place of what XLA or Python raise where memory ends in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # XLA's trace names allocations of its own and no setting; the first line is in the message.
        raise out_of_memory(work, tuple(keys), error) from None

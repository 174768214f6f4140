"""Memory of a process of several while it writes and reads its share of a checkpoint."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed

from marin_rl.machine import share_one_heap
from marin_rl.processes import Processes, join
from marin_rl.storage.checkpoints import commit_checkpoint, restore_checkpoint
from marin_rl.storage.runs import Run, checkpoint_slot

SHARE, ARRAYS, COLUMNS = 2**28, 8, 2**10  # bytes of a process, in arrays


def resident(name: str) -> int:
    """Bytes of memory by their name in /proc."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def peak_over(work: Callable[[], Any]) -> tuple[Any, int]:
    """A result, and the bytes by which memory rose meanwhile."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = resident("VmRSS")
    return work(), resident("VmHWM") - before


def arrays_of(n_bytes: int, sharding: jax.NamedSharding) -> dict[str, jax.Array]:
    """Arrays of so many bytes together, cut into rows that each have their number."""
    shape = (n_bytes // ARRAYS // 4 // COLUMNS, COLUMNS)

    def values(index: Any) -> np.ndarray:
        rows = np.arange(*index[0].indices(shape[0]), dtype=np.float32)
        return np.repeat(rows[:, None], COLUMNS, axis=1)

    return {f"{n}": jax.make_array_from_callback(shape, sharding, values) for n in range(ARRAYS)}


def round_trip(run: Run, round: int, arrays: dict[str, jax.Array]) -> tuple[int, int]:
    """Bytes besides the arrays while they are written, and with a second copy as they are read."""
    slot, none = checkpoint_slot(round), {"content": {}, "parents": [], "totals": {}, "extra": {}}
    ref, saving = peak_over(lambda: commit_checkpoint(run, slot, {"arrays": arrays}, **none))
    like = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in arrays.items()
    }
    tree, loading = peak_over(lambda: restore_checkpoint(run, ref, {"arrays": like}))
    for name, array in arrays.items():
        pairs = zip(array.addressable_shards, tree["arrays"][name].addressable_shards, strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(one.data, other.data)
    return saving, loading


def measured(place: str, root: str, count: int, number: int) -> tuple[float, float]:
    """Memory of a process in shares: with its part while that is written, and while it is read."""
    share_one_heap()  # as commands do
    if count > 1:
        jax.distributed.initialize(place, count, number)
        client: Any = distributed.global_state.client
        join(Processes(client, number, count))
    mesh, run = jax.sharding.Mesh(np.array(jax.devices()), ("all",)), Run.open(root, "memory")
    sharding = jax.NamedSharding(mesh, jax.P("all"))
    round_trip(run, 0, arrays_of(count * 2**22, sharding))  # imports what is needed
    saving, loading = round_trip(run, 1, arrays_of(count * SHARE, sharding))
    return 1 + saving / SHARE, loading / SHARE

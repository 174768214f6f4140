"""CPU streams: parts of a small model's work that are computed side by side, a thread each.

The operations of a small model are too short for XLA to keep a CPU's cores busy with one after the
other; several programs, each with a part of the batch, do. Such a part is a lane (configuration key
`inference.engine.lanes`): of the engine's sequence slots, which have a cache of their own, or of a
training step's microbatches. A device that is busy with the whole batch at once, and a mesh, which
has its own division, have one lane. The number of lanes decides the shapes of programs and the
order of sums, so it follows from recorded facts, never from the cores at hand.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import jax

from marin_rl.errors import InputError
from marin_rl.machine import LANE_WEIGHTS_BYTES_MAX, cores, pool_threads

Tree = TypeVar("Tree")
Result = TypeVar("Result")

# A lane of fewer slots spends more on reading weights than its core saves.
LANE_SLOTS_MIN = 16


@dataclass(frozen=True, slots=True)
class Lanes:
    """`count` lanes of equal size; lane i holds the i-th part of all `slots`."""

    count: int
    slots: int

    @property
    def size(self) -> int:
        return self.slots // self.count

    def of(self, slot: int) -> int:
        return slot // self.size

    def part(self, lane: int, rows: Tree) -> Tree:
        """A lane's rows of arrays that have one row per slot: views."""
        start = lane * self.size
        return jax.tree.map(lambda leaf: leaf[start : start + self.size], rows)


def lanes_for(lanes: int, slots: int, *, weights_bytes: int, on_mesh: bool) -> Lanes:
    """Return `lanes` lanes; for 0, one per pool thread for a small model on a CPU, else one.

    Raises InputError for a number that does not divide the slots, or for several on a mesh.
    """
    if lanes == 0:
        threads = pool_threads()
        even = slots % threads == 0 and slots // threads >= LANE_SLOTS_MIN
        several = even and gains_from_lanes(weights_bytes, on_mesh=on_mesh)
        return Lanes(threads if several else 1, slots)
    if slots % lanes or (lanes > 1 and on_mesh):
        where = "a mesh, which takes one lane" if on_mesh else "one device"
        raise InputError(
            f"expected lanes to divide the {slots} slots on {where}, found {lanes}: change "
            "inference.engine.lanes, or leave it at 0"
        )
    return Lanes(lanes, slots)


def gains_from_lanes(weights_bytes: int, *, on_mesh: bool) -> bool:
    small = weights_bytes <= LANE_WEIGHTS_BYTES_MAX
    return small and not on_mesh and jax.default_backend() == "cpu"


def shares_prompts(
    lanes: Lanes, *, weights_bytes: int, queries_per_kv: int, on_mesh: bool, together: int
) -> bool:
    """True if `together` neighbouring slots read a common prompt's cache once.

    That makes every block of the cache two programs: for a small model on a CPU, where reading the
    cache is a quarter of a step, that is worth compiling them. A single query per key has a kernel
    for itself, which does not add up in the order of the one for several.
    """
    small = gains_from_lanes(weights_bytes, on_mesh=on_mesh)
    return small and queries_per_kv > 1 and lanes.size % together == 0


def side_by_side(
    run: Callable[[int], Result], count: int, threads: ThreadPoolExecutor | None = None
) -> list[Result]:
    """Results of `run` for each of `count` lanes, once all have ended.

    `threads` are reused where given; else one core takes the lanes one after the other. Raises what
    the first lane that failed raised.
    """
    if count == 1 or cores() == 1:
        return [run(lane) for lane in range(count)]
    # Programs that one thread starts run one after the other, so each lane has a thread.
    with nullcontext(threads) if threads else ThreadPoolExecutor(count, "cpu-stream") as pool:
        futures = [pool.submit(run, lane) for lane in range(count)]
        wait(futures)
    return [future.result() for future in futures]

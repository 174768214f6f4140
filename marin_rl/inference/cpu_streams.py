"""Lanes: parts of the batch with a cache of their own, computed side by side.

Owns how many lanes there are and whose slots are whose. A step of a small model is made of
operations too small for XLA to share among a CPU's cores, so there each core gets a lane: programs
of several lanes run side by side. A device that is busy with the whole batch at once, and a mesh,
which has its own division, have one lane. Their number decides the shapes of the programs,
so it follows from the recorded size of XLA's thread pool, not from the cores at hand. Leaves out
who sits where (`scheduler`) and the programs (`runner`).
"""

from dataclasses import dataclass
from typing import TypeVar

import jax

from marin_rl.errors import InputError
from marin_rl.inference.attention import SHARE
from marin_rl.machine import pool_threads

Tree = TypeVar("Tree")

# A lane of fewer slots spends more on reading weights than a core of its own saves.
LANE_SLOTS_MIN = 16

# The operations of larger models are long enough that XLA shares each among all cores.
LANE_WEIGHTS_BYTES_MAX = 2**27


@dataclass(frozen=True, slots=True)
class Lanes:
    """`count` lanes of equal size; lane i holds the i-th part of all `slots`."""

    count: int
    slots: int

    @property
    def size(self) -> int:
        """Slots of each lane."""
        return self.slots // self.count

    def of(self, slot: int) -> int:
        """The lane of a slot."""
        return slot // self.size

    def part(self, lane: int, rows: Tree) -> Tree:
        """A lane's rows of arrays that have one row per slot: views."""
        start = lane * self.size
        return jax.tree.map(lambda leaf: leaf[start : start + self.size], rows)


def lanes_for(asked: int, slots: int, *, weights_bytes: int, on_mesh: bool) -> Lanes:
    """As many lanes as are asked for; 0: one per pool thread for a small model on a CPU, else one.

    Raises InputError for a number that does not divide the slots, or for several on a mesh.
    """
    if asked == 0:
        small = weights_bytes <= LANE_WEIGHTS_BYTES_MAX
        return Lanes(_wanted(slots) if small and not on_mesh else 1, slots)
    if slots % asked or (asked > 1 and on_mesh):
        where = "a mesh, which takes one lane" if on_mesh else "one device"
        raise InputError(
            f"expected lanes to divide the {slots} slots on {where}, found {asked}: change "
            "inference.engine.lanes, or leave it at 0"
        )
    return Lanes(asked, slots)


def shares_prompts(lanes: Lanes, *, weights_bytes: int, queries_per_kv: int, on_mesh: bool) -> bool:
    """True if slots next to each other read a common prompt's cache once, all of them together.

    That makes every block of the cache two programs: for a small model on a CPU, where reading the
    cache is a quarter of a step, that is worth compiling them. A single query per key has a kernel
    of its own, which does not add up in the order of the one for several.
    """
    small = weights_bytes <= LANE_WEIGHTS_BYTES_MAX and jax.default_backend() == "cpu"
    return small and not on_mesh and queries_per_kv > 1 and lanes.size % SHARE == 0


def _wanted(slots: int) -> int:
    """One lane per thread of XLA's pool, if all of them are large enough."""
    threads = pool_threads()
    if jax.default_backend() != "cpu" or slots % threads or slots // threads < LANE_SLOTS_MIN:
        return 1
    return threads

"""The record by which tasks name what is committed.

Apart from the other records of `marin_rl.types`, which hold arrays: commands that only read a run
import this one without NumPy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


# Prefect links a task's result to later tasks by weak reference, so that an address that is used
# again draws no false edge in its graph.
@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class SlotRef:
    """A committed slot: its key in the run, and the SHA-256 of its commit object.

    This is all that travels between tasks. `reused` is True when the slot was there already;
    `summary` holds a few numbers for people (rows, tokens, mean reward), never data.
    """

    slot: str
    sha256: str
    reused: bool = field(default=False, compare=False)
    summary: Mapping[str, float] = field(default_factory=dict[str, float], compare=False)

    @property
    def number(self) -> int:
        """Number of the round or step that ends the slot's name."""
        return int(self.slot.rpartition("-")[2])

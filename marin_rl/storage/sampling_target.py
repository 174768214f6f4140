"""Checkpoint that workers of a pool or cluster sample a window by, as their flow last wrote it.

`.fleet/sampling.json` is written again and again by one flow, and commits nothing: a worker that
reads an old one samples by an older policy, which its groups say. Workers that another machine
started learn from it that their flow pauses, or has gone on to the next checkpoint.
"""

from dataclasses import dataclass

from marin_rl.errors import ObjectMissing
from marin_rl.storage.fleet import FLEET, SignedRecords
from marin_rl.types import SlotRef
from schemas.fleet import SamplingEnvelope

SAMPLING_KEY = f"{FLEET}/sampling.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTarget:
    """`checkpoint` to sample by, while `open`: see `schemas.fleet.SamplingRecord`."""

    checkpoint: SlotRef
    open: bool


class SamplingBoard(SignedRecords):
    """The sampling target of a run."""

    def write(self, target: SamplingTarget) -> None:
        """Replace the target. Raises StorageError."""
        record = {
            "state": "open" if target.open else "closed",
            "checkpoint": target.checkpoint.slot,
            "checkpoint_sha256": target.checkpoint.sha256,
        }
        self.folder.replace(SAMPLING_KEY, self.signed("sampling", record))

    def read(self) -> SamplingTarget | None:
        """Return the target; None where no flow has written one.

        Raises CorruptObject for a record of another token, NewerSchema, StoreUnavailable.
        """
        try:
            record = self.opened("sampling", SamplingEnvelope, SAMPLING_KEY)
        except ObjectMissing:
            return None
        checkpoint = SlotRef(slot=record["checkpoint"], sha256=record["checkpoint_sha256"])
        return SamplingTarget(checkpoint=checkpoint, open=record["state"] == "open")

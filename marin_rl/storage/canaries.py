"""Canaries of the checkpoints that endpoints of a run may serve: `.fleet/canaries.json`.

The trainer adds one each time that it has proven a checkpoint. Clients of endpoints whose weights
change while they answer prove by them whatever version an endpoint names. Like the other records of
a fleet they commit nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from marin_rl.errors import CorruptObject, ObjectMissing
from marin_rl.storage.fleet import FLEET, SignedRecords
from marin_rl.types import Canary
from schemas.fleet import CANARIES_MAX, CanariesEnvelope

CANARIES_KEY = f"{FLEET}/canaries.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenVersion:
    """A version, the digest of its parameters, and the canary that proves endpoints with it."""

    version: int
    parameters_digest: str
    canary: Canary


class CanaryBoard(SignedRecords):
    """The canaries of a run, of the newest versions. `run_sha256` tells runs of a name apart."""

    def add(self, run_sha256: str, proven: ProvenVersion) -> None:
        """Record a version that is proven, in the place of what was known of it.

        Raises StorageError.
        """
        try:
            known = self.read(run_sha256)
        except CorruptObject:  # of another token: none of it can be trusted
            known = {}
        known[proven.version] = proven
        newest = [asdict(known[version]) for version in sorted(known)[-CANARIES_MAX:]]
        record = {"run_sha256": run_sha256, "canaries": newest}
        self.folder.replace(CANARIES_KEY, self.signed("canaries", record))

    def read(self, run_sha256: str) -> dict[int, ProvenVersion]:
        """The proven versions; none where no trainer of this run has proven one.

        Raises CorruptObject for a record of another token, NewerSchema, StoreUnavailable.
        """
        try:
            record = self.opened("canaries", CanariesEnvelope, CANARIES_KEY)
        except ObjectMissing:
            return {}
        if record["run_sha256"] != run_sha256:
            return {}
        return {
            each["version"]: ProvenVersion(
                version=each["version"],
                parameters_digest=each["parameters_digest"],
                canary=canary_in(each["canary"]),
            )
            for each in record["canaries"]
        }


def canary_in(record: Mapping[str, Any]) -> Canary:
    """The canary in the fields of a record."""
    return Canary(
        temperature=record["temperature"],
        token_ids=tuple(record["token_ids"]),
        logprobs=tuple(record["logprobs"]),
        tolerance=record["tolerance"],
        lengths=tuple(record.get("lengths") or ()),
    )

"""JSON records other than manifests: run.json, tombstones of retention, an archive's contents.

Each is sealed by its own digest (`manifests.sealed_json`). The models check shapes, strictly, as a
configuration's are; fields that they do not know are kept and ignored. What a field means belongs
to storage.
"""

from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.fields import Integer, Key, Moment, Name, Round, Sha256, Size, Text

ANCESTORS_MAX = 1000  # of a fork of a fork …: each is a folder that every listing looks into
CODE_NAMES_MAX = 1000  # keys of a configuration that name code


class Record(BaseModel):
    """Base of the records: strict, without NaN, open to fields of other versions."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class RowsRecord(Record):
    """Digest of the rows that a run reads by one key of its configuration."""

    attempt: Name
    path: Text
    rows_digest: Text


class AncestorRecord(Record):
    """A run that a fork begins with, see `marin_rl.storage.stores.forked_store.Ancestor`."""

    model_config = ConfigDict(extra="forbid")

    run_id: Name
    through_round: Round
    sha256: Sha256


class Seeds(Record):
    """The seeds that a run was created with."""

    run: Integer


class RunRecord(Record):
    """run.json."""

    run_id: Name
    config: dict[str, Any]
    content_digest: Sha256
    seeds: Seeds
    code: dict[str, Text]
    libraries: dict[str, Text]
    created_at: Moment
    attempt: Name
    user_code: Annotated[list[dict[str, Text]], Field(max_length=CODE_NAMES_MAX)] = []
    ancestors: Annotated[list[AncestorRecord], Field(max_length=ANCESTORS_MAX)] = []

    @model_validator(mode="after")
    def _ascend(self) -> "RunRecord":
        rounds = [ancestor.through_round for ancestor in self.ancestors]
        if any(later <= earlier for earlier, later in pairwise(rounds)):
            raise ValueError(f"expected ancestors by ascending through_round, found {rounds[:9]}")
        return self


class TombstoneRecord(Record):
    """pruned.json."""

    slot: Key
    manifest: Sha256
    parts: list[Key]
    rule: dict[str, Any]
    created_at: Moment
    attempt: Name


class ContentsRecord(Record):
    """contents.json."""

    run_id: Name
    everything: bool
    root_hash: Sha256
    lineage: dict[Key, dict[Key, Sha256]]
    entries: list[tuple[Key, Size, Sha256]]
